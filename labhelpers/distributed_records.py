"""What a torchrun job is asked to measure, and its records rank by rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import Field

from labhelpers.fields import Integer
from labhelpers.records import FeedName, SweepSpec, Trial, ask, rate_of
from labhelpers.store import RunDirectory
from labhelpers.sweep import trials_of
from labhelpers.verdicts import median

SEARCHED = "all ranks"
"""Variant and purpose of a size that a search tried on all ranks."""
ROOMY = "all ranks, headroom kept free"
"""Variant and purpose of a size that it tried with the headroom kept free."""
PROVEN = "all ranks, trained together"
"""Variant of the size that such a search answered with: its updates, gradients sent."""

N = TypeVar("N", int, float)

SPEC_NAME = "ddp"
"""What the request of a job is called in `run.json`."""

ALONE = "alone"
"""Variant of the baseline: one device, without DistributedDataParallel."""


class DistributedSpec(SweepSpec):
    """Ask for a sweep on all the GPUs of a torchrun job, one process a GPU.

    `batch_sizes` are those of one GPU, `images` those of all together. `accumulation`
    micro-batches make an update. In the first repeat `compared_steps` are timed twice with the
    all-reduce and twice without; `None` means "what suits the device".
    """

    feed: FeedName = "resident"
    accumulation: Annotated[Integer, Field(ge=1, le=100_000)] = 1
    compared_steps: Annotated[Integer, Field(ge=1, le=1000)] | None = None


def variant_of(accumulation: int, *, alone: bool) -> str | None:
    """Name what tells trials of the same batch size and job apart; None for the plain case."""
    parts = [ALONE] if alone else []
    parts += [f"accumulation {accumulation}"] if accumulation > 1 else []
    return ", ".join(parts) or None


def is_alone(trial: Trial) -> bool:
    """Tell whether a trial is the baseline on one device."""
    return (trial.variant or "").startswith(ALONE)


def accumulation_of(trial: Trial) -> int:
    """Return how many micro-batches made an update."""
    return int((trial.details or {}).get("accumulation", 1))


@dataclass(frozen=True)
class Group:
    """One measurement of a job: the trials of all its ranks, in their order."""

    trials: tuple[Trial, ...]

    @property
    def first(self) -> Trial:
        """The trial of rank 0."""
        return self.trials[0]

    @property
    def outcome(self) -> str:
        """How the measurement ended: the ranks agree on it."""
        return next((t.outcome for t in self.trials if t.outcome != "ok"), "ok")

    @property
    def images(self) -> int | None:
        """Images that all ranks saw together, each counted once."""
        return _total(trial.images for trial in self.trials)

    @property
    def epoch_s(self) -> float | None:
        """Seconds of the slowest rank."""
        return _most(trial.epoch_s for trial in self.trials)

    @property
    def slowest_rank(self) -> int | None:
        """The rank that took longest."""
        timed = [(t.epoch_s, t.rank) for t in self.trials if t.epoch_s is not None]
        return max(timed)[1] if timed else None

    @property
    def images_per_s(self) -> float | None:
        """Images of all ranks per second of the slowest; None unless it was timed."""
        return rate_of(self.outcome, self.images, self.epoch_s)

    @property
    def all_reduce_share(self) -> float | None:
        """Share of a step with an update that is waiting for gradients; None if not measured.

        A step is as long as that of the slowest rank. Steps without the all-reduce differ from
        rank to rank; the longest is what the step would take if gradients travelled for free.
        """
        synced = self._slowest("synced_step_times_s")
        unsynced = self._slowest("unsynced_step_times_s")
        return None if not synced or unsynced is None else max(0.0, 1 - unsynced / synced)

    def _slowest(self, name: str) -> float | None:
        medians = [median((trial.details or {}).get(name, ())) for trial in self.trials]
        return _most(medians)


def global_trial(group: Group) -> Trial:
    """Return a measurement as one trial: the images of all ranks in the time of the slowest.

    Its batch size is the global one, its peaks are those of the rank that took most.
    """
    every = group.trials
    return group.first.model_copy(
        update={
            "batch_size": group.first.batch_size * group.first.world_size,
            "outcome": group.outcome,
            "images": group.images,
            "epoch_s": group.epoch_s,
            "last_batch": _total(trial.last_batch for trial in every),
            "feed_wait_s": _most(trial.feed_wait_s for trial in every),
            "peak_allocated_bytes": _most(trial.peak_allocated_bytes for trial in every),
            "peak_reserved_bytes": _most(trial.peak_reserved_bytes for trial in every),
            "first_step_peak_bytes": _most(trial.first_step_peak_bytes for trial in every),
            "alloc_retries": _total(trial.alloc_retries for trial in every),
            "final_loss": _mean_loss(every),
        }
    )


def _most(values: Iterable[N | None]) -> N | None:
    return max((value for value in values if value is not None), default=None)


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean_loss(trials: Iterable[Trial]) -> float | None:
    """Average the ranks' losses, each as one of the images it saw."""
    known = [(t.final_loss, t.images) for t in trials if t.final_loss is not None and t.images]
    images = sum(count for _, count in known)
    return sum(loss * count for loss, count in known) / images if images else None


def groups_of(trials: Iterable[Trial]) -> list[Group]:
    """Gather the trials of torchrun jobs into whole measurements, in the order they were made.

    A measurement of which a rank is missing (the machine lost power while it was written) is
    none: it is left out here, and measured again when the run is resumed.
    """
    found: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        if trial.kind == "ddp":
            key = (trial.workload, trial.variant, trial.feed, trial.precision,
                   trial.batch_size, trial.repeat, trial.world_size)  # fmt: skip
            found.setdefault(key, []).append(trial)
    ordered = (sorted(group, key=lambda trial: trial.rank) for group in found.values())
    return [Group(tuple(group)) for group in ordered if _is_whole(group)]


def _is_whole(group: Sequence[Trial]) -> bool:
    return [trial.rank for trial in group] == list(range(group[0].world_size))


def stored_request(run: RunDirectory) -> DistributedSpec | None:
    """Return the sweep that a run was last asked for on several ranks; None if it was not."""
    asked = run.info.specs.get(SPEC_NAME)
    return None if asked is None else ask(DistributedSpec, asked)


def alike(spec: DistributedSpec, trials: Iterable[Trial]) -> list[Trial]:
    """Keep the trials of a request's workload, feed and precision."""
    wanted = (spec.workload, spec.feed, spec.precision)
    return [t for t in trials if (t.workload, t.feed, t.precision) == wanted]


def matching(spec: DistributedSpec, trials: Iterable[Trial], world_size: int) -> list[Group]:
    """Keep the whole measurements that a spec asks for on so many ranks, the baseline too."""
    variants = {variant_of(spec.accumulation, alone=alone): alone for alone in (True, False)}
    return [
        group
        for group in groups_of(alike(spec, trials))
        if group.first.variant in variants
        and group.first.world_size == (1 if variants[group.first.variant] else world_size)
    ]


def swept(run: RunDirectory) -> list[Trial]:
    """Return the sweep that a run was last asked for, that of several ranks where it is one.

    Then each measurement of the newest job is one trial, by its global batch size.
    """
    if trials := trials_of(run):
        return trials
    spec = stored_request(run)
    if spec is None:
        return []
    ranks = int((run.environment().get("job") or {}).get("world_size", 1))
    groups = matching(spec, run.trials(SPEC_NAME), ranks)
    return [global_trial(group) for group in groups if not is_alone(group.first)]
