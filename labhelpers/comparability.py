"""Compare like with like only: what two sweeps must have in common, and what they measured."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labhelpers.comparison import Samples, SizeChange
from labhelpers.distributed_records import SPEC_NAME, swept
from labhelpers.formats import MIB, show_bytes
from labhelpers.inputs import InputError, shown
from labhelpers.records import Trial
from labhelpers.store import RunDirectory
from labhelpers.tables import by_batch_size, cpu_was_busy

ROUGH_BYTES = 256 * MIB
"""Peak on a CPU below which it is not compared: the heap's own steps are most of it."""
DEVICE_FEED = "resident"
"""The one feed whose images lie on the device, so that the host's speed matters little."""


@dataclass(frozen=True)
class LeftOut:
    """How many of the measured trials of a run other programs disturbed."""

    name: str
    disturbed: int
    measured: int

    @property
    def most(self) -> bool:
        """Whether half of the trials or more were left out."""
        return 2 * self.disturbed >= self.measured


def measured_sweep(run: RunDirectory) -> list[Trial]:
    """Return the sweep of a run.

    Raises:
        InputError: nothing was measured in it, or a trial lacks what its speed is made of.
    """
    trials = tried_sweep(run)
    if not _ok(trials):
        raise _nothing_measured(run)
    return trials


def tried_sweep(run: RunDirectory) -> list[Trial]:
    """Return the sweep of a run, of which every trial may have failed.

    Raises:
        InputError: nothing was tried, or a trial lacks what its speed is made of.
    """
    trials = swept(run)
    if not trials:
        raise _nothing_measured(run)
    for trial in _ok(trials):
        if not _has_speed(trial):
            raise InputError(
                f"{run.path}: batch {trial.batch_size:,}, repeat {trial.repeat}: images is "
                f"{_given(trial.images)}, epoch_s is {_given(trial.epoch_s)}; a measured trial "
                "has both, above 0; measure the run again"
            )
    return trials


def _given(value: float | None) -> str:
    return "missing" if value is None else shown(value)


def _nothing_measured(run: RunDirectory) -> InputError:
    return InputError(f"{run.path} holds no measured sweep; run labhelpers sweep first")


def _ok(trials: Iterable[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.outcome == "ok"]


def _has_speed(trial: Trial) -> bool:
    """Tell whether images and seconds give a speed that can be divided by."""
    images, epoch_s = trial.images or 0, trial.epoch_s or 0.0
    try:
        return images > 0 and epoch_s > 0 and 0 < epoch_s / images < math.inf > images / epoch_s
    except OverflowError:
        return False


def differences(baseline: RunDirectory, new: RunDirectory) -> list[str]:
    """List in words what the conditions of two sweeps differ in; nothing if like meets like.

    Of a new run in which every trial failed, less is known; the rest is not held against it.
    """
    seen = bool(_ok(tried_sweep(new)))
    before, now = conditions(baseline, seen=seen), conditions(new, seen=seen)
    return [
        f"{name}: {before.get(name, 'n/a')} in the baseline, {now.get(name, 'n/a')} in the run"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]


def conditions(run: RunDirectory, *, seen: bool = True) -> dict[str, str]:
    """Return what a sweep's speed depends on, by name, as text.

    The CPU and torch's threads count where the host does some of the work. A run measured
    under several environments (it was resumed elsewhere) has all their values. Without `seen`
    the images that were asked for stand in for what measured trials alone tell.
    """
    trials = tried_sweep(run)
    trials = _ok(trials) or trials
    first, ids = trials[0], dict.fromkeys(trial.environment_id for trial in trials)
    facts = [run.info.environments.get(name or "", {}) or run.environment() for name in ids]
    found = [_of_environment(each) for each in facts] + [_of_trial(first)]
    found += [_of_measured(trial) for trial in trials] if seen else [_of_request(run)]
    if first.device == "cpu" or first.feed != DEVICE_FEED:
        found += [_of_host(each) for each in facts]
    return _joined(found)


def _of_environment(facts: Mapping[str, Any]) -> dict[str, Any]:
    packages = facts.get("packages")
    torch = packages.get("torch") if isinstance(packages, Mapping) else None
    return {
        "device": facts.get("device_name"), "driver": facts.get("driver"), "torch": torch,
        "CUDA": facts.get("cuda"), "WSL2": facts.get("wsl2"),
    }  # fmt: skip


def _of_host(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"CPU": facts.get("cpu"), "torch threads": facts.get("torch_threads")}


def _of_trial(first: Trial) -> dict[str, Any]:
    return {
        "workload": first.workload, "precision": first.precision, "feed": first.feed,
        "ranks": first.world_size, "synthetic images": first.synthetic,
    }  # fmt: skip


def _of_measured(trial: Trial) -> dict[str, Any]:
    return {"images per epoch": trial.images, "precision read back": read_back(trial)}


def _of_request(run: RunDirectory) -> dict[str, Any]:
    asked = run.info.specs.get("sweep") or run.info.specs.get(SPEC_NAME) or {}
    return {"images asked for": asked.get("images")}


def read_back(trial: Trial) -> str | None:
    """Say in which precision FP32 was read back after a trial, in parts where they differ."""
    found = dict(trial.precision_after or {})
    if len(set(found.values())) < 2:
        return next(iter(found.values()), None)
    both = found.pop("both", "mixed")
    return f"{both} ({', '.join(f'{name} {value}' for name, value in sorted(found.items()))})"


def _joined(found: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Put several sets of facts together; a name with several values has all, sorted."""
    values: dict[str, dict[str, None]] = {}
    for facts in found:
        for name, value in facts.items():
            values.setdefault(name, {})["n/a" if value is None else str(value)] = None
    return {name: " and ".join(sorted(each)) for name, each in values.items()}


def samples(trials: Iterable[Trial]) -> tuple[Samples, Samples]:
    """Return seconds per image and peak bytes of each repeat, by batch size.

    Trials that other programs disturbed on the CPU are left out. Memory is what the allocator
    gave out, on a CPU what the process grew by; where a size has none of it, or on a CPU less
    than `ROUGH_BYTES`, it is left out.
    """
    groups = by_batch_size(t for t in trials if t.images_per_s and not cpu_was_busy(t))
    times = {size: [1 / (t.images_per_s or 1) for t in group] for size, group in groups.items()}
    peaks = {size: [p for p in map(_peak, group) if p] for size, group in groups.items()}
    return times, {size: values for size, values in peaks.items() if values}


def _peak(trial: Trial) -> float | None:
    """Return the peak of a trial in bytes; None where it has none that can be compared."""
    least = ROUGH_BYTES if trial.device == "cpu" else 1
    peak = trial.peak_allocated_bytes or 0
    return float(peak) if least <= peak < 2**63 else None


def disturbed(trials: Iterable[Trial]) -> int:
    """Count the trials that were left out because other programs used the CPU."""
    return sum(cpu_was_busy(trial) for trial in trials if trial.images_per_s)


def left_out(*runs: tuple[RunDirectory, Sequence[Trial]]) -> tuple[LeftOut, ...]:
    """Count for each run, once each, what was left out of it; a run without any is not listed."""
    found = {}
    for run, trials in runs:
        path, measured = run.path.resolve(), sum(bool(trial.images_per_s) for trial in trials)
        found[path] = LeftOut(path.name, disturbed(trials), measured)
    return tuple(each for each in found.values() if each.disturbed)


def newly_failed(before: Sequence[Trial], now: Sequence[Trial]) -> dict[int, str]:
    """Say how sizes ended that the baseline measured and the new run could not.

    A size that failed now and then in the baseline too must have failed every time.
    """
    known, held, holds = ended(before), _sizes(_ok(before)), _sizes(_ok(now))
    return {
        size: how
        for size, how in ended(now).items()
        if size in held and (size not in known or size not in holds)
    }


def _sizes(trials: Iterable[Trial]) -> set[int]:
    return {trial.batch_size for trial in trials}


def explained(
    rows: Iterable[SizeChange], before: Sequence[Trial], now: Sequence[Trial]
) -> tuple[SizeChange, ...]:
    """Return a row for each size the baseline measured, with why something was not compared."""
    known = {row.batch_size: row for row in rows}
    every = [known.get(s, SizeChange(s, None, None)) for s in sorted(_sizes(_ok(before)))]
    measured, calm = _sizes(_ok(now)), samples(before)[0].keys() & samples(now)[0].keys()
    return tuple(
        replace(row, gap=_gap(row, measured, calm), memory_gap=_memory_gap(row, before, now))
        for row in every
    )


def _gap(row: SizeChange, measured: Collection[int], calm: Collection[int]) -> str | None:
    """Say why the speed of a size was not compared; None if it was, or if the size failed.

    `measured` are the sizes the new run has, `calm` those that both runs have undisturbed.
    """
    if row.speed is not None or row.failed:
        return None
    if row.batch_size not in measured:
        return "not measured"
    return "measured once only" if row.batch_size in calm else "disturbed"


def _memory_gap(row: SizeChange, before: Sequence[Trial], now: Sequence[Trial]) -> str | None:
    """Say why the memory of a size was not compared although its speed was."""
    if row.speed is None or row.memory is not None:
        return None
    sides = [_no_peak(row.batch_size, trials) for trials in (before, now)]
    if sides[0] and sides[0] == sides[1]:
        return f"{sides[0]} in both runs"
    places = zip(sides, ("the baseline", "the run"), strict=True)
    missing = [f"{lack} in {place}" for lack, place in places if lack]
    return " and ".join(missing) or "only one peak in each run"


def _no_peak(size: int, trials: Iterable[Trial]) -> str | None:
    """Say what a run's undisturbed peaks of a size lack; None if one of them is above 0."""
    group = [t for t in trials if t.batch_size == size and t.images_per_s and not cpu_was_busy(t)]
    peaks = [t.peak_allocated_bytes for t in group if t.peak_allocated_bytes is not None]
    if not peaks:
        return "no peak"
    if any(_peak(trial) for trial in group):
        return None
    return f"a peak below {show_bytes(ROUGH_BYTES)} on a CPU" if max(peaks) > 0 else "a peak of 0"


def ended(trials: Iterable[Trial]) -> dict[int, str]:
    """Say of each size with a failed trial how the first of them ended."""
    words = {
        "oom": "out of memory", "killed": "killed", "timeout": "over its time limit",
        "error": "failed",
    }  # fmt: skip
    groups = by_batch_size(trial for trial in trials if trial.outcome != "ok")
    return {size: words[group[0].outcome] for size, group in groups.items()}
