"""Which trials of a sweep run, in which order, and when repeats are enough."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labhelpers.records import ARTICLE_BATCH_SIZES, FASHION, TRAINING_IMAGES, SweepSpec, Trial

# What suits a device where nothing was asked: (batch sizes, images, repeats).
_GPU_DEFAULTS = (ARTICLE_BATCH_SIZES, TRAINING_IMAGES, 3)
_GPU_QUICK = ((32, 256, 2048, 8192), TRAINING_IMAGES, 1)
_CPU_DEFAULTS = ((32, 64, 128, 256, 512, 1024), 4096, 3)
_CPU_QUICK = ((32, 128, 512), 2048, 1)
MOST_ROUNDS = 100
Finished = Mapping[tuple[int, int], Trial]
"""The finished trials of a sweep by batch size and repeat."""


@dataclass(frozen=True)
class Planned:
    """One trial to come: its batch size, repeat, place in the order, and variant if any."""

    batch_size: int
    repeat: int
    position: int
    variant: str | None = None


def resolved(spec: SweepSpec, device: str) -> SweepSpec:
    """Fill in what was left open, with what suits the device (`cpu` or `cuda:N`)."""
    table = {
        (True, False): _GPU_DEFAULTS, (True, True): _GPU_QUICK,
        (False, False): _CPU_DEFAULTS, (False, True): _CPU_QUICK,
    }  # fmt: skip
    sizes, images, repeats = table[device != "cpu", spec.quick]
    return spec.model_copy(
        update={
            "device": device,
            "batch_sizes": spec.batch_sizes or sizes,
            "images": spec.images or images,
            "repeats": spec.repeats or repeats,
        }
    )


def notes_of(spec: SweepSpec) -> tuple[str, ...]:
    """Return what a reader should know about a resolved request, in sentences."""
    images = spec.images or 0
    above = [f"{size:,}" for size in spec.batch_sizes or () if size > images]
    notes = []
    if above and spec.workload == FASHION:
        notes.append(
            f"batch {', '.join(above)}: above the data set of {images:,} images, so an epoch is "
            "1 step"
        )
    if spec.synthetic:
        notes.append("synthetic images: speed is real, loss says nothing about FashionMNIST")
    return tuple(notes)


def plan(spec: SweepSpec) -> list[Planned]:
    """List the trials of a resolved spec in the order they run.

    `article` is ascending, descending, ascending, …; `shuffled` draws a new order for every
    repeat from the seed. `repeats="auto"` is shuffled, and the list holds its six first repeats.
    """
    from labhelpers.noise import MIN_REPEATS

    auto = spec.repeats == "auto"
    repeats = MIN_REPEATS if spec.repeats == "auto" else spec.repeats or 0
    draw = random.Random(spec.seed)
    trials: list[Planned] = []
    for repeat in range(repeats):
        ordered = sorted(spec.batch_sizes or ())
        if auto or spec.order == "shuffled":
            draw.shuffle(ordered)
        elif spec.order == "descending" or (spec.order == "article" and repeat % 2):
            ordered.reverse()
        trials += [Planned(size, repeat, len(trials) + i) for i, size in enumerate(ordered)]
    return trials


def due(spec: SweepSpec, finished: Finished) -> list[Planned]:
    """List the trials that run next; `[]` when the sweep is done.

    Those of the plan first. For `repeats="auto"` then, round after round, one more repeat of
    each size whose median is not settled, until the measured epochs took `time_budget_s`. Who
    takes part in a round depends on the rounds before it alone, so an interrupted sweep goes on
    as it would have.
    """
    waiting = [p for p in plan(spec) if (p.batch_size, p.repeat) not in finished]
    if waiting or spec.repeats != "auto":
        return waiting
    first = 1 + max((p.repeat for p in plan(spec)), default=-1)
    for number in range(first, MOST_ROUNDS):
        before = [trial for (_, repeat), trial in finished.items() if repeat < number]
        sizes = [size for size in sorted(spec.batch_sizes or ()) if _needs_more(size, before)]
        if not sizes or sum(trial.epoch_s or 0.0 for trial in before) >= spec.time_budget_s:
            break
        random.Random(f"{spec.seed} {number}").shuffle(sizes)
        left = [size for size in sizes if (size, number) not in finished]
        if left:
            return [Planned(size, number, len(finished) + i) for i, size in enumerate(left)]
    return []


def measured(spec: SweepSpec, finished: Finished) -> list[Trial]:
    """Return the finished trials that a spec asks for, in the order they run."""
    if spec.repeats != "auto":
        return [finished[p.batch_size, p.repeat] for p in plan(spec)]
    sizes = set(spec.batch_sizes or ())
    asked = [trial for trial in finished.values() if trial.batch_size in sizes]
    return sorted(asked, key=lambda trial: (trial.repeat, trial.position))


def estimate_s(waiting: Sequence[Planned], seconds: dict[int, list[float]]) -> float | None:
    """Estimate the seconds that waiting trials take, from those measured; None before the first.

    A size not measured yet takes what the nearest measured size took.
    """
    if not seconds:
        return None

    def one(size: int) -> float:
        nearest = min(seconds, key=lambda known: abs(known.bit_length() - size.bit_length()))
        return statistics.median(seconds.get(size, seconds[nearest]))

    return sum(one(planned.batch_size) for planned in waiting)


def _needs_more(size: int, trials: Sequence[Trial]) -> bool:
    """Tell whether more repeats of a size would help: not where most of them failed."""
    group = [trial for trial in trials if trial.batch_size == size]
    rates = tuple(trial.images_per_s for trial in group if trial.images_per_s is not None)
    return 2 * len(rates) >= len(group) and not _settled(rates)


@functools.lru_cache(maxsize=4096)
def _settled(rates: tuple[float, ...]) -> bool:
    from labhelpers.noise import settled

    return settled(rates)
