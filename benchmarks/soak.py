"""500 trials in a row: does the parent process grow, leak handles or leave zombies?

    python benchmarks/soak.py [--trials 500] [--torch] [--device auto] [--images 512]

Without `--torch` the worker measures nothing and everything around it is soaked; with it every
trial trains on one batch. Memory, handles and children are those of the process that steers.
Exit 1 if memory grew by more than 5 MiB from the 50th trial on, or a handle or a zombie stays.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from labhelpers.formats import MIB
from labhelpers.records import SweepSpec, ask
from labhelpers.store import RunDirectory
from labhelpers.sweep import Measure, Progress, run_sweep
from labhelpers.worker import Worker, import_torch

SETTLED = 50
GROWTH_BYTES = 5 * MIB


@dataclass(frozen=True)
class Sample:
    """What the steering process holds after a trial, and when."""

    at_s: float
    rss_bytes: int
    handles: int
    threads: int
    children: int
    zombies: int


def sample() -> Sample:
    """Look at this process."""
    own = psutil.Process()
    children = own.children(recursive=True)
    zombies = sum(child.status() == psutil.STATUS_ZOMBIE for child in children)
    return Sample(
        time.perf_counter(), own.memory_info().rss, own.num_fds(), own.num_threads(),
        len(children), zombies,
    )  # fmt: skip


def prepare(_device: str, _require_gpu: bool) -> dict[str, Any]:
    """Return the facts of a machine that measures nothing."""
    return {"device": "cpu", "device_name": "nothing is measured"}


def measure(spec: dict[str, Any], batch_size: int, repeat: int, position: int) -> dict[str, Any]:
    """Return a trial of a usual length at once."""
    return {
        "kind": "sweep", "workload": spec["workload"], "batch_size": batch_size, "repeat": repeat,
        "position": position, "feed": spec["feed"], "images": 6000, "steps": 200, "epoch_s": 1.0,
        "step_times_s": [0.005 + i * 1e-6 for i in range(200)],
    }  # fmt: skip


def nothing() -> None:
    """Warm nothing."""


def soak(asked: argparse.Namespace, folder: Path) -> tuple[list[Sample], float]:
    """Run the trials; return a sample after each, and the seconds before the first."""
    samples: list[Sample] = []

    def watch(progress: Progress) -> None:
        if progress.trial is not None:
            samples.append(sample())

    given = {
        "batch_sizes": [64], "repeats": asked.trials, "device": asked.device, "limits": False,
        "images": asked.images, "data_dir": asked.data_dir, "time_budget_s": 1e6,
    }  # fmt: skip
    given |= {} if asked.torch else {"workload": "nothing:nothing", "feed": "own", "device": "cpu"}
    spec = ask(SweepSpec, {k: v for k, v in given.items() if k in SweepSpec.model_fields})
    run = RunDirectory.create(folder / "run", specs={"sweep": spec})
    started = time.perf_counter()
    with Worker(import_torch if asked.torch else nothing) as worker:
        own = None if asked.torch else Measure(prepare, measure)
        run_sweep(spec, run, worker=worker, on_progress=watch, measure=own)
    return samples, started


def rows(samples: list[Sample], started: float) -> list[str]:
    """Return the table: one row for every 50 trials."""
    head = f"{'trials':>7} {'ms/trial':>9} {'MiB':>8} {'handles':>8} {'threads':>8} {'zombies':>8}"
    lines, before = [head], started
    for number in range(SETTLED, len(samples) + 1, SETTLED):
        each = samples[number - 1]
        took_ms = (each.at_s - before) / SETTLED * 1e3
        lines.append(
            f"{number:>7} {took_ms:>9.1f} {each.rss_bytes / MIB:>8.1f} {each.handles:>8} "
            f"{each.threads:>8} {each.zombies:>8}"
        )
        before = each.at_s
    return lines


def per_trial_s(samples: list[Sample]) -> list[float]:
    """Return the wall time of each trial after the first."""
    return [now.at_s - before.at_s for before, now in itertools.pairwise(samples)]


def children_left() -> int:
    """Count living children but Python's own resource tracker, which ends with this process."""
    found = psutil.Process().children(recursive=True)
    return sum("resource_tracker" not in " ".join(child.cmdline()) for child in found)


def main() -> int:
    """Soak, print the table, and judge it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--data-dir", default="data")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples, started = soak(asked, Path(folder))
    gc.collect()
    settled, last = samples[min(SETTLED, len(samples)) - 1], samples[-1]
    growth = last.rss_bytes - settled.rss_bytes
    times = per_trial_s(samples)
    half = len(times) // 2
    early, late = statistics.median(times[:half]), statistics.median(times[half:])
    print(*rows(samples, started), sep="\n")
    print(
        f"memory after trial {SETTLED}: {growth / MIB:+.2f} MiB (limit +{GROWTH_BYTES / MIB:.0f})"
    )
    print(f"handles: {last.handles - settled.handles:+}; zombies: {last.zombies}")
    print(
        f"median trial: {early * 1e3:.2f} ms in the first half, {late * 1e3:.2f} ms in the second"
    )
    left = children_left()
    print(f"processes left: {left}")
    flat = growth <= GROWTH_BYTES and last.handles <= settled.handles and not last.zombies
    return int(not flat or left > 0)


if __name__ == "__main__":
    sys.exit(main())
