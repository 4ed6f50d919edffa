"""How often does `labhelpers compare` cry wolf, and what does it catch? Measured by resampling.

    python benchmarks/false_alarms.py RUNS [--collect 12] [--device auto] [--feed resident]

RUNS is a folder of runs of one machine under equal conditions; `--collect N` measures N of them
first, each in a fresh worker process. Every comparison then draws two different runs, and from
each as many passes as `--repeats` (a pass is one repeat of all batch sizes), so that what makes
one run differ from another stays in. Nothing changed between the runs: each alarm is a false one.

A slowdown of one size by a factor moves its best and its median by that factor and leaves the
noise as it is; the smallest factor that each comparison would have caught is therefore known.
Exit 1 if more than 1 % of the comparisons raise an alarm.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from labhelpers import comparison
from labhelpers.comparability import differences, disturbed, measured_sweep, samples
from labhelpers.comparison import Limits, Samples, SizeChange, above_best, compare_sizes
from labhelpers.records import ARTICLE_BATCH_SIZES, SweepSpec, Trial, ask
from labhelpers.store import RunDirectory, open_run
from labhelpers.sweep import run_sweep

CPU_BATCH_SIZES = (8, 12, 16, 24, 32, 64, 96, 128, 256)
CAUGHT = 0.95
LIMIT = 0.01
BUSY_TRIALS = 0.1
Passes = list[list[Trial]]


def collect(folder: Path, asked: argparse.Namespace) -> None:
    """Measure the runs that are missing, one after the other."""
    import torch

    gpu = asked.device != "cpu" and torch.cuda.is_available()
    given = {
        "device": asked.device, "feed": asked.feed, "repeats": asked.passes,
        "batch_sizes": ARTICLE_BATCH_SIZES if gpu else CPU_BATCH_SIZES,
        "images": asked.images or (20_000 if gpu else 256), "data_dir": asked.data_dir,
        "synthetic": asked.synthetic, "limits": False,
    }  # fmt: skip
    for number in range(asked.collect):
        path = folder / f"run-{number + 1:02d}"
        if path.exists():
            continue
        spec = ask(SweepSpec, given)
        started = time.monotonic()
        run_sweep(spec, RunDirectory.create(path, specs={"sweep": spec}))
        print(f"{path.name}: {time.monotonic() - started:.1f} s", flush=True)


def read(folder: Path) -> list[Passes]:
    """Return the passes of every run in a folder; the runs must have equal conditions."""
    runs = [open_run(path.parent) for path in sorted(folder.glob("*/run.json"))]
    if len(runs) < 2:
        sys.exit(f"{folder} holds {len(runs)} runs; use --collect 12")
    runs = [run for run in runs if is_quiet(run)]
    if len(runs) < 2:
        sys.exit("other programs used the CPU during nearly all runs; use a quiet machine")
    for run in runs[1:]:
        for difference in differences(runs[0], run):
            sys.exit(f"{run.path} is not like {runs[0].path}: {difference}")
    return [passes(measured_sweep(run)) for run in runs]


def is_quiet(run: RunDirectory) -> bool:
    """Tell whether other programs left the CPU alone during nine of ten trials, and say if not."""
    trials = measured_sweep(run)
    busy = disturbed(trials)
    if busy > BUSY_TRIALS * len(trials):
        print(f"{run.path.name} is left out: {busy} of {len(trials)} trials were disturbed")
    return busy <= BUSY_TRIALS * len(trials)


def passes(trials: Sequence[Trial]) -> Passes:
    """Group the trials of a run by repeat."""
    groups: dict[int, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.repeat, []).append(trial)
    return list(groups.values())


def some(run: Passes, repeats: int, chance: random.Random) -> tuple[Samples, Samples]:
    """Draw passes of a run, each once, and return what they measured."""
    return samples(itertools.chain(*chance.sample(run, repeats)))


def resampled(
    runs: Sequence[Passes], repeats: int, comparisons: int, limits: Limits, seed: int
) -> Iterator[list[SizeChange]]:
    """Compare two different runs of the same machine, again and again."""
    chance = random.Random(seed)
    for _ in range(comparisons):
        before, now = chance.sample(runs, 2)
        yield compare_sizes(some(before, repeats, chance), some(now, repeats, chance), limits)


def smallest_caught(row: SizeChange, limits: Limits) -> float:
    """Return the factor from which on this comparison calls this size slower."""
    change = row.speed
    if change is None:  # all its repeats were disturbed
        return math.inf
    return max(
        change.allowed / change.best_ratio, (1 + limits.max_slowdown) / change.median_ratio
    )  # fmt: skip


def at_95(values: Sequence[float]) -> float:
    """Return the value that 95 in 100 do not exceed."""
    return sorted(values)[min(len(values) - 1, int(CAUGHT * len(values)))]


def report(found: Sequence[list[SizeChange]], runs: Sequence[Passes], limits: Limits) -> float:
    """Print the table and return the share of comparisons with an alarm."""
    caught: dict[int, list[float]] = collections.defaultdict(list)
    everywhere = []
    alarms: collections.Counter[int] = collections.Counter()
    for rows in found:
        for row in rows:
            caught[row.batch_size].append(smallest_caught(row, limits))
            alarms[row.batch_size] += bool(row.worse)
        everywhere.append(min(caught[row.batch_size][-1] for row in rows))
    noises = within(runs)
    print("batch   above best   false alarms   caught 95 times in 100 from")
    for size, factors in caught.items():
        rate = alarms[size] / len(found)
        print(f"{size:>5}{noises[size]:>12.1%}{rate:>15.2%}{at_95(factors) - 1:>14.1%} slower")
    rate = sum(any(row.worse for row in rows) for rows in found) / len(found)
    typical = statistics.median(at_95(factors) for factors in caught.values())
    print(f"false alarms, all {len(caught)} sizes together: {rate:.2%} of {len(found):,}")
    print(f"smallest slowdown of one size caught 95 times in 100: {typical - 1:.1%} (median size)")
    print(f"smallest slowdown of all sizes at once: {at_95(everywhere) - 1:.1%}")
    return rate


def within(runs: Sequence[Passes]) -> dict[int, float]:
    """Return how far repeats lie above the best one in their run, by size, on average."""
    times = [samples(itertools.chain(*run))[0] for run in runs]
    return {size: above_best(each[size] for each in times) or 0.0 for size in times[0]}


def main() -> int:
    """Collect if asked, resample, print; exit 1 above the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--collect", type=int, default=0, help="measure so many runs first")
    parser.add_argument("--passes", type=int, default=4, help="repeats measured in each run")
    parser.add_argument("--repeats", type=int, default=3, help="repeats drawn for a comparison")
    parser.add_argument("--comparisons", type=int, default=4000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--feed", default="resident")
    parser.add_argument("--images", type=int, default=None)
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--factor", type=float, default=comparison.NOISE_FACTOR)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    collect(asked.runs, asked)
    comparison.NOISE_FACTOR = asked.factor  # to see what another one would give
    runs, limits = read(asked.runs), Limits()
    found = list(resampled(runs, asked.repeats, asked.comparisons, limits, asked.seed))
    print(f"{len(runs)} runs of {len(runs[0])} passes; {asked.repeats} passes in a comparison")
    return int(report(found, runs, limits) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
