"""Judge a sweep against a baseline: what got slower or hungrier, beyond noise and a margin.

Pure functions of figures. The best repeats of two runs are compared: a real change moves every
repeat, a busy host only some, and never to the better. A size is worse only if its best repeat
is past the margin even after what the noise explains, and its median is past the margin too.

Noise is how far the other repeats of a size lie above their best one, in both runs. Three repeats
agree by luck now and then, and one outlier makes much of it, so a size has at least the noise
that is typical of sizes like it, and at most a few times that. Like it are those about as noisy
as its neighbours: where launches or a loader limit small batches, these are noisier by far than
large ones that the GPU limits, and must not hide what changes there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from labhelpers.inputs import InputError

NOISE_FACTOR = 2.8
"""How much of the noise of three repeats is forgiven.

`benchmarks/false_alarms.py` measures what comes of it: less than one false alarm in 100
comparisons of nine batch sizes, on a GPU whose host is busy and on a noisy CPU.
"""
NEIGHBOURS = 3
ALIKE = 6
"""Factor within which the noise of other sizes is like that of a size's neighbours."""
OUTLIER = 3
"""Most times the typical noise that a size's own counts: more is an outlier's doing."""

Samples = Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Limits:
    """How much worse is still fine: shares of the baseline's time per image and peak memory."""

    max_slowdown: float = 0.05
    max_memory: float = 0.02


@dataclass(frozen=True)
class Change:
    """One quantity at one batch size against the baseline; less is better.

    `baseline` and `new` are medians; `best_ratio` is new best / baseline best, and `allowed`
    the ratio up to which margin and noise explain it.
    """

    baseline: float
    new: float
    best_ratio: float
    allowed: float
    worse: bool

    @property
    def median_ratio(self) -> float:
        """Return new median / baseline median."""
        return self.new / self.baseline


@dataclass(frozen=True)
class SizeChange:
    """What became of one batch size; None where it could not be compared.

    `failed` says how trials of the new run ended, `gap` why the speed was not compared, and
    `memory_gap` why the memory was not although the speed was.
    """

    batch_size: int
    speed: Change | None
    memory: Change | None
    failed: str | None = None
    gap: str | None = None
    memory_gap: str | None = None

    @property
    def worse(self) -> tuple[str, ...]:
        """Name what got worse, or nothing."""
        speed = self.speed is not None and self.speed.worse
        memory = self.memory is not None and self.memory.worse
        words = ("slower" if speed else "", "needs more memory" if memory else "", self.failed)
        return tuple(word for word in words if word)


def compare_sizes(
    baseline: tuple[Samples, Samples], new: tuple[Samples, Samples], limits: Limits,
    failures: Mapping[int, str] | None = None,
) -> list[SizeChange]:  # fmt: skip
    """Compare (seconds per image, peak bytes) of two runs, for each size of the baseline.

    Memory is left out where a run has no peaks, and everywhere if no size has two of them.

    Args:
        baseline, new: by batch size, what each repeat took; a size may lack either.
        failures: sizes whose trials failed in the new run, with how they ended; each has a row.

    Raises:
        InputError: no size that both measured was repeated: nobody can tell a change from noise.
    """
    speed = changes(baseline[0], new[0], limits.max_slowdown)
    memory: dict[int, Change] = {}
    with suppress(InputError):
        memory = changes(baseline[1], new[1], limits.max_memory)
    ended = failures or {}
    return [
        SizeChange(size, speed.get(size), memory.get(size), ended.get(size))
        for size in sorted({*baseline[0], *baseline[1], *ended})
    ]


def changes(baseline: Samples, new: Samples, margin: float) -> dict[int, Change]:
    """Judge one quantity (seconds or bytes: less is better) at every size that both measured.

    Raises:
        InputError: no size that both measured was repeated in either of them.
    """
    baseline, new = _figures(baseline), _figures(new)
    sizes = sorted(size for size in baseline if baseline[size] and new.get(size))
    noises = {size: above_best((baseline[size], new[size])) for size in sizes}
    if sizes and all(noise is None for noise in noises.values()):
        raise InputError(
            "every batch size was measured once only, so a change cannot be told from noise; "
            "measure with --repeats 3"
        )
    return {
        size: judged(baseline[size], new[size], margin, noise_around(noises, size))
        for size in sizes
    }


def _figures(measured: Samples) -> dict[int, list[float]]:
    """Leave out what is no measurement: nothing, less than that, and what is not finite."""
    return {
        size: [value for value in values if 0 < value < math.inf]
        for size, values in measured.items()
    }


def noise_around(noises: Mapping[int, float | None], size: int) -> float:
    """Return the noise of a size as it counts: between what is typical and a few times that.

    A size that was measured once has the typical noise, or its noisiest neighbour's if greater.
    """
    known = {other: noise for other, noise in sorted(noises.items()) if noise is not None}
    place = sum(other < size for other in known)
    by_distance = sorted(enumerate(known.values()), key=lambda pair: abs(pair[0] - place))
    near = [noise for _, noise in by_distance[:NEIGHBOURS]] or [0.0]
    middle = statistics.median(near)
    alike = [noise for noise in known.values() if middle / ALIKE <= noise <= middle * ALIKE]
    typical = max(middle, statistics.median(alike or [middle]))
    own = noises[size]
    return max(typical, max(near) if own is None else min(own, OUTLIER * typical))


def judged(baseline: Sequence[float], new: Sequence[float], margin: float, noise: float) -> Change:
    """Judge one quantity at one size; `noise` is what `above_best` gives."""
    fewest = min(len(baseline), len(new))
    # Figures that are hundreds of orders apart are no measurements, but no reason to crash.
    forgiven = min(NOISE_FACTOR * noise * math.sqrt(3 / fewest), 700.0)
    allowed = (1 + margin) * math.exp(forgiven)
    before, now = statistics.median(baseline), statistics.median(new)
    best_ratio = min(new) / min(baseline)
    worse = best_ratio > allowed and now / before > 1 + margin
    return Change(before, now, best_ratio, allowed, worse)


def above_best(groups: Iterable[Sequence[float]]) -> float | None:
    """Return how far, in logarithms, repeats lie above the best of their group on average.

    None if no group has a repeat.
    """
    above = []
    for group in groups:
        best, *others = sorted(math.log(value) for value in group)
        above += [other - best for other in others]
    return statistics.fmean(above) if above else None


def is_worse(rows: Iterable[SizeChange]) -> bool:
    """Tell whether any batch size got worse."""
    return any(row.worse for row in rows)
