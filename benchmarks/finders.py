"""Finders of the largest batch size side by side, and each held to the truth.

    python benchmarks/finders.py [--device cuda:0] [--only resnet50,...] [--without-peers]

ResNet50 with Adam under set_per_process_memory_fraction(0.0572) of an H200, 8 GiB: ours,
Lightning's two modes and accelerate, each in a fresh process; ours and the bisection in three
rounds, whose median seconds count, with those that ours takes to prove the headroom. Then ours
alone on four more models.
The truth comes from fresh processes that train five steps: the size ran, the next one did not.
They and a search that is not timed come before the rounds, so that no contender is the one that
reads the libraries from the disk. Exit 1 if ours misses the truth, takes more out-of-memory
errors or probes than allowed, or more than a third of Lightning's bisection. Lightning and
accelerate must be installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GIB = 2**30
PEERS = ("lightning power", "lightning binsearch", "accelerate")
MOST_OF_BISECTION = 1 / 3
TIME_LIMIT_S = 180.0
COMPARED = ("ours", "lightning binsearch")
ROUNDS = 3
"""How often the contenders are run whose seconds are compared, in turn."""


@dataclass(frozen=True)
class Case:
    """A model, its cap, and what is allowed; `exact` holds it to the truth of fresh processes."""

    name: str
    model: str
    cap_bytes: int
    input: str | None = None
    classes: int | None = None
    most_ooms: int = 3
    most_probes: int = 30
    exact: bool = True
    peers: bool = False


def cases(total_bytes: int) -> list[Case]:
    """Return the models; the caps are those of the published figures."""
    images = {"input": "3,224,224", "classes": 1000}
    vision = "torchvision.models"
    return [
        Case(
            "resnet50", f"{vision}:resnet50", int(0.0572 * total_bytes), **images, most_ooms=2,
            peers=True,
        ),
        Case(
            "FashionCNN", "fashion_cnn", int(1.4 * GIB), most_ooms=12, most_probes=12, exact=False
        ),
        Case("mobilenet_v3_large", f"{vision}:mobilenet_v3_large", int(4.2 * GIB), **images),
        Case("vit_b_16", f"{vision}:vit_b_16", 8 * GIB, **images),
        Case("transformer", f"{HERE / 'finder_models.py'}:token_transformer", 4 * GIB),
    ]  # fmt: skip


def contender(name: str, case: Case, device: str, size: int | None = None) -> dict[str, Any]:
    """Run one contender in a fresh process and return what it printed."""
    command = [
        sys.executable, str(HERE / "finder_contenders.py"), name, "--model", case.model,
        "--cap-bytes", str(case.cap_bytes), "--device", device,
    ]  # fmt: skip
    extra = {"--input": case.input, "--classes": case.classes, "--size": size}
    command += [str(part) for pair in extra.items() if pair[1] is not None for part in pair]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {TIME_LIMIT_S:g} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def truth(case: Case, device: str, guess: int) -> int:
    """Return the largest size that trains in a fresh process, beginning at a guess.

    The cap is each process's own, so two of them may run at a time.

    Raises:
        RuntimeError: a process ended otherwise than by running or by running out of memory.
    """

    def ran(size: int) -> bool:
        if size == 0:
            return True
        found = contender("fits", case, device, size)
        if "ran" not in found:
            raise RuntimeError(f"the truth at {size} is not known: {found['error']}")
        return bool(found["ran"])

    with ThreadPoolExecutor(2) as pool:
        low_ran, high_ran = pool.map(ran, (guess, guess + 1))
    if low_ran and not high_ran:
        return guess
    low, high = (guess + 1, None) if high_ran else (0, guess)
    step = 1
    while high is None:
        low, high = (low + step, None) if ran(low + step) else (low, low + step)
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ran(middle) else (low, middle)
    return low


def judge(case: Case, ours: dict[str, Any], true_size: int) -> list[str]:
    """List what is not as it must be in one search of ours; nothing if all is well."""
    if "error" in ours:
        return [f"ours did not run: {ours['error']}"]
    wrong = []
    if case.exact and ours["batch_size"] != true_size:
        wrong.append(f"found {ours['batch_size']}, the truth is {true_size}")
    if not ours["closed"]:
        wrong.append("the next size was not shown to fail")
    if ours["ooms"] > case.most_ooms:
        wrong.append(f"{ours['ooms']} out-of-memory errors, at most {case.most_ooms}")
    if ours["tries"] > case.most_probes:
        wrong.append(f"{ours['tries']} probes, at most {case.most_probes}")
    return wrong


def too_slow(seconds: dict[str, float]) -> list[str]:
    """Say if ours takes more than its part of Lightning's bisection; from median seconds."""
    bisection = seconds.get("lightning binsearch")
    if bisection is None or seconds["ours"] <= MOST_OF_BISECTION * bisection:
        return []
    return [f"{seconds['ours'] / bisection:.2f} of Lightning's bisection, at most 0.33"]


def line(name: str, found: dict[str, Any], true_size: int, seconds: dict[str, float]) -> str:
    """Return one row of the table: size, share of the truth, seconds, tries, failures."""
    if "error" in found:
        return f"  {name:<22} {found['error']}"
    share = f"{found['batch_size'] / true_size:6.1%}" if true_size and found["batch_size"] else "-"
    ratio = f"{seconds['ours'] / seconds[name]:5.2f}×" if "ours" in seconds else "     -"
    start = f" (+ {found['start_s']:.1f} s to start)" if "start_s" in found else ""
    proofs = f" (+ {found['proofs']} for the headroom)" if found.get("proofs") else ""
    return (
        f"  {name:<22} {found['batch_size'] or 0:>6} {share:>7} of the truth "
        f"{seconds[name]:>6.2f} s {ratio} {found['tries']:>3} tries {found['ooms']:>3} OOMs"
        f"{proofs}{start}  {' '.join(map(str, found['sizes']))}"
    )


def run(case: Case, device: str, with_peers: bool) -> list[str]:
    """Run all contenders of a case, print its table, and return what is wrong."""
    first = contender("ours", case, device)
    try:
        if "error" in first:
            raise RuntimeError(first["error"])
        true_size = truth(case, device, first["batch_size"])
    except RuntimeError as error:
        print(f"{case.name}: {error}", flush=True)
        return [f"{case.name}: {error}"]
    print(f"{case.name} in {case.cap_bytes / GIB:.2f} GiB: the truth is {true_size}", flush=True)
    searches = {"ours": [first]}
    if with_peers and case.peers:
        searches = {name: [] for name in ("ours", *PEERS)}
        for name in (*COMPARED * ROUNDS, *(name for name in PEERS if name not in COMPARED)):
            searches[name].append(contender(name, case, device))
    judged = (judge(case, found, true_size) for found in [first, *searches["ours"]])
    wrong = [what for each in judged for what in each] + told(searches, true_size)
    return [f"{case.name}: {what}" for what in dict.fromkeys(wrong)]


def told(searches: dict[str, list[dict[str, Any]]], true_size: int) -> list[str]:
    """Print a row for each contender's last search; return what is wrong with peers and speed."""
    ran = {
        name: [found["seconds"] for found in each if "error" not in found]
        for name, each in searches.items()
    }
    seconds = {name: statistics.median(values) for name, values in ran.items() if values}
    wrong = []
    for name, each in searches.items():
        print(line(name, each[-1], true_size, seconds), flush=True)
        if len(ran[name]) > 1:
            spread = ", ".join(f"{value:.2f}" for value in ran[name])
            print(f"  {'':<22} the rounds took {spread} s", flush=True)
        if name != "ours":
            wrong += [f"{name} did not run: {found['error']}" for found in each if "error" in found]
            wrong += [f"{name} found no size" for found in each if found.get("batch_size") is None]
    return wrong + (too_slow(seconds) if "ours" in seconds else [])


def main() -> int:
    """Run the cases asked for; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", default="")
    parser.add_argument("--without-peers", action="store_true")
    asked = parser.parse_args()
    wanted = {name for name in asked.only.split(",") if name}
    every = cases(total_bytes_of(asked.device))
    unknown = wanted - {case.name for case in every}
    if unknown:
        parser.error(f"--only: got {', '.join(sorted(unknown))}; there are "
                     f"{', '.join(case.name for case in every)}")  # fmt: skip
    wrong = []
    for case in every:
        if not wanted or case.name in wanted:
            wrong += run(case, asked.device, not asked.without_peers)
    print(*(f"WRONG: {what}" for what in wrong), sep="\n") if wrong else print("all as it must be")
    return int(bool(wrong))


def total_bytes_of(device: str) -> int:
    """Return what a device holds, asked in a process of its own: this one starts no GPU."""
    script = f"import torch; print(torch.cuda.get_device_properties({device!r}).total_memory)"
    return int(subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
