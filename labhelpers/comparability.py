"""Compare like with like only: what two sweeps must have in common, and what they measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from labhelpers.comparison import Samples
from labhelpers.distributed_records import swept
from labhelpers.inputs import InputError
from labhelpers.records import Trial
from labhelpers.store import RunDirectory
from labhelpers.tables import by_batch_size, cpu_was_busy

DEVICE_FEED = "resident"
"""The one feed whose images lie on the device, so that the host's speed matters little."""


def measured_sweep(run: RunDirectory) -> list[Trial]:
    """Return the sweep of a run; InputError if nothing was measured in it."""
    trials = swept(run)
    if not any(trial.outcome == "ok" for trial in trials):
        raise InputError(f"{run.path} holds no measured sweep; run labhelpers sweep first")
    return trials


def differences(baseline: RunDirectory, new: RunDirectory) -> list[str]:
    """List in words what the conditions of two sweeps differ in; nothing if like meets like."""
    before, now = conditions(baseline), conditions(new)
    return [
        f"{name}: {before.get(name, 'n/a')} in the baseline, {now.get(name, 'n/a')} in the run"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
    ]


def conditions(run: RunDirectory) -> dict[str, str]:
    """Return what a sweep's speed depends on, by name, as text.

    The CPU and torch's threads count where the host does some of the work. A run measured
    under several environments (it was resumed elsewhere) has all their values.
    """
    trials = measured_sweep(run)
    ids = dict.fromkeys(trial.environment_id for trial in trials if trial.outcome == "ok")
    facts = [run.info.environments.get(name or "", {}) or run.environment() for name in ids]
    found = [_of_environment(each) for each in facts] + [_of_trials(trials)]
    first = next(trial for trial in trials if trial.outcome == "ok")
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


def _of_trials(trials: Iterable[Trial]) -> dict[str, Any]:
    first = next(trial for trial in trials if trial.outcome == "ok")
    return {
        "workload": first.workload, "precision": first.precision, "feed": first.feed,
        "ranks": first.world_size, "images per epoch": first.images,
        "synthetic images": first.synthetic,
    }  # fmt: skip


def _joined(found: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Put several sets of facts together; a name with several values has all of them."""
    values: dict[str, dict[str, None]] = {}
    for facts in found:
        for name, value in facts.items():
            values.setdefault(name, {})["n/a" if value is None else str(value)] = None
    return {name: " and ".join(each) for name, each in values.items()}


def samples(trials: Iterable[Trial]) -> tuple[Samples, Samples]:
    """Return seconds per image and peak bytes of each repeat, by batch size.

    Trials that other programs disturbed on the CPU are left out. Memory is what the allocator
    gave out; where a size has none of it, it is left out.
    """
    groups = by_batch_size(t for t in trials if t.images_per_s and not cpu_was_busy(t))
    times = {size: [1 / (t.images_per_s or 1) for t in group] for size, group in groups.items()}
    peaks = {
        size: [
            float(t.peak_allocated_bytes or 0) for t in group if (t.peak_allocated_bytes or 0) > 0
        ]
        for size, group in groups.items()
    }
    return times, {size: values for size, values in peaks.items() if values}


def disturbed(trials: Iterable[Trial]) -> int:
    """Count the trials that were left out because other programs used the CPU."""
    return sum(cpu_was_busy(trial) for trial in trials if trial.images_per_s)


def ended(trials: Iterable[Trial]) -> dict[int, str]:
    """Say of each size with a failed trial how the first of them ended."""
    words = {
        "oom": "out of memory", "killed": "killed", "timeout": "over its time limit",
        "error": "failed",
    }  # fmt: skip
    groups = by_batch_size(trial for trial in trials if trial.outcome != "ok")
    return {size: words[group[0].outcome] for size, group in groups.items()}
