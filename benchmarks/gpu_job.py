"""The whole job for a GPU: tests marked `gpu`, benchmarks, the notebooks, a short table last.

    python benchmarks/gpu_job.py --run results/reference/NAME [--only tests,notebooks,...]

The notebooks are executed with their defaults into the named run directory; they and the logs
land in OUTPUT (default build/gpu_job). It needs torch with a GPU and this project's packages.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def command(log: Path, *arguments: str, timeout_s: float = 900) -> int:
    """Run a Python command in the project, its output into a log; return its exit code."""
    with open(log, "w", encoding="utf-8") as stream:
        try:
            done = subprocess.run(
                [sys.executable, *arguments], cwd=PROJECT, stdout=stream, stderr=subprocess.STDOUT,
                timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124
    return done.returncode


def tests(out: Path, _run: Path) -> int:
    """Run the tests that need a GPU."""
    return command(
        out / "tests.log", "-m", "pytest", "-m", "gpu", "tests/gpu", "-v", "--durations=15"
    )


def benchmark(name: str, *options: str) -> Callable[[Path, Path], int]:
    """Return a step that runs one benchmark script."""

    def step(out: Path, _run: Path) -> int:
        return command(out / f"{name}.log", f"benchmarks/{name}.py", *options)

    return step


def notebook(name: str) -> Callable[[Path, Path], int]:
    """Return a step that executes one notebook with its defaults into the run directory."""

    def step(out: Path, run: Path) -> int:
        from labhelpers.report import NOTEBOOKS, run_notebook

        os.environ["LABHELPERS_RUN_DIR"] = os.path.relpath(run, NOTEBOOKS)
        found = next(NOTEBOOKS.glob(f"{name}_*.ipynb"))
        result = run_notebook(found, out / "notebooks" / found.name, {}, cell_timeout_s=600)
        if result.why:
            print(f"{found.name}: {result.why}")
        return result.exit_code

    return step


def memory(out: Path, run: Path) -> int:
    """Set the peaks of the run beside the article's."""
    return command(out / "memory.log", "benchmarks/memory_against_article.py", str(run))


def false_alarms(out: Path, _run: Path) -> int:
    """Measure how often the regression gate cries wolf on this machine, from twelve runs."""
    runs = str(out / "false_alarm_runs")
    return command(out / "false_alarms.log", "benchmarks/false_alarms.py", runs, "--collect", "12")


def ladder(out: Path, run: Path) -> int:
    """Read what the ladder, the feeds and the sweep of the run must show."""
    return command(out / "ladder.log", "benchmarks/ladder.py", "--run", str(run))


STEPS: dict[str, Callable[[Path, Path], int]] = {
    "tests": tests,
    "harness_tax": benchmark(
        "harness_tax", "--feeds", "article,workers,host,resident", "--batch-sizes", "32",
        "--images", "16000",
    ),
    "notebook_01": notebook("01"),
    "memory": memory,
    "notebook_02": notebook("02"),
    "notebook_03": notebook("03"),
    "finders": benchmark("finders"),
    "notebook_04": notebook("04"),
    "notebook_05": notebook("05"),
    "ladder": ladder,
    "notebook_00": notebook("00"),
    "false_alarms": false_alarms,
    "soak": benchmark("soak", "--torch", "--device", "cuda:0"),
}  # fmt: skip


def main() -> int:
    """Run the steps one after the other; a step that fails does not keep the next from running."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=PROJECT / "build" / "gpu_job")
    parser.add_argument("--only", default=",".join(STEPS))
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in asked.only.split(","):
        started = time.monotonic()
        code = STEPS[name](asked.output, asked.run.resolve())
        rows.append((name, code, time.monotonic() - started))
        print(f"{name}: exit {code}", flush=True)
    for log in sorted(asked.output.glob("*.log")):
        lines = log.read_text(encoding="utf-8").strip().splitlines()
        print(f"--- {log.name}", *lines[-25:], sep="\n")
    print("--- summary")
    for name, code, seconds in rows:
        print(f"{name:<24} exit {code:>3}  {seconds:>7.1f} s")
    return int(any(code for _, code, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
