"""How sure is a median of a few repeats, and which differences are beyond noise? A bootstrap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from labhelpers.formats import show_share
from labhelpers.inputs import InputError

MIN_REPEATS = 6
"""Below so many repeats a bootstrap of the median says little."""
ENOUGH = 0.01
"""Repeats are enough when the interval of their median is no wider than this share of it."""
MARGIN = 0.02
"""A difference below this share is of no use to anybody, even where it is beyond noise."""
CONFIDENCE = 0.95
RESAMPLES = 2000

Standing = Literal["faster", "slower", "same", "undecided"]


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its bootstrap interval, all in the unit of what was given."""

    low: float
    middle: float
    high: float

    @property
    def relative_width(self) -> float:
        """Width of the interval over the value in its middle."""
        return (self.high - self.low) / self.middle


@dataclass(frozen=True)
class Difference:
    """How one set of repeats stands against another: `ratio` is the median over the other's."""

    ratio: Interval
    standing: Standing


def median_interval(values: Iterable[float | None], *, seed: int = 0) -> Interval | None:
    """Return the median of the known values and its bootstrap interval; None below two values.

    The same values and seed give the same interval, in whatever order the values come.

    Raises:
        InputError: a value is not a finite number above 0.
    """
    known = _known(values)
    if len(known) < 2:
        return None
    return _interval(float(np.median(known)), _medians(known, seed))


def settled(values: Iterable[float | None], *, target: float = ENOUGH, seed: int = 0) -> bool:
    """Tell whether repeats are enough: six or more, and a median known to `target`."""
    known = _known(values)
    interval = median_interval(known, seed=seed)
    return len(known) >= MIN_REPEATS and interval is not None and interval.relative_width <= target


def compare_medians(
    values: Iterable[float | None], against: Iterable[float | None], *,
    margin: float = MARGIN, seed: int = 0,
) -> Difference | None:  # fmt: skip
    """Compare the medians of two sets of speeds; None where either has fewer than six repeats.

    `faster` or `slower`: the whole interval of the ratio lies past the margin. `same`: it lies
    within the margin. `undecided`: the noise is too large to tell.
    """
    mine, other = _known(values), _known(against)
    if min(len(mine), len(other)) < MIN_REPEATS:
        return None
    ratio = float(np.median(mine) / np.median(other))
    # Two seeds: equal sets must not be resampled in step, which would hide their noise.
    resampled = _medians(mine, seed) / _medians(other, seed + 1)
    interval = _interval(ratio, resampled)
    return Difference(interval, _standing(interval, margin))


def differences_from_best(
    rates: Mapping[int, Sequence[float | None]], *, margin: float = MARGIN, seed: int = 0
) -> dict[int, Difference]:
    """Compare every batch size with the fastest one; sizes with too few repeats are left out.

    Args:
        rates: images per second of each repeat, by batch size.
    """
    known = {size: _known(values) for size, values in rates.items()}
    medians = {size: float(np.median(values)) for size, values in known.items() if values}
    if not medians:
        return {}
    best = max(medians, key=lambda size: (medians[size], -size))
    found = {
        size: compare_medians(values, known[best], margin=margin, seed=seed)
        for size, values in known.items()
        if size != best
    }
    return {size: difference for size, difference in found.items() if difference is not None}


def describe_difference(difference: Difference) -> str:
    """Say how a speed stands against another, in a few words for a table."""
    ratio = difference.ratio
    if difference.standing == "undecided":
        return "too noisy to tell"
    if difference.standing == "same":
        return f"the same within {show_share(MARGIN, 0)}"
    ends = sorted(abs(1 - end) for end in (ratio.low, ratio.high))
    between = f"{show_share(ends[0])} to {show_share(ends[1])}"
    return f"{difference.standing} by {show_share(abs(1 - ratio.middle))} ({between})"


def _standing(ratio: Interval, margin: float) -> Standing:
    if ratio.low > 1 + margin:
        return "faster"
    if ratio.high < 1 - margin:
        return "slower"
    return "same" if 1 - margin <= ratio.low and ratio.high <= 1 + margin else "undecided"


def _medians(values: Sequence[float], seed: int) -> np.ndarray:
    draw = np.random.Generator(np.random.PCG64(seed))
    chosen = draw.integers(len(values), size=(RESAMPLES, len(values)))
    medians: np.ndarray = np.median(np.sort(values)[chosen], axis=1)
    return medians


def _interval(middle: float, resampled: np.ndarray) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(float(low), middle, float(high))


def _known(values: Iterable[float | None]) -> list[float]:
    known = [float(value) for value in values if value is not None]
    for value in known:
        if not (np.isfinite(value) and value > 0):
            raise InputError(f"{value!r} is not a speed; it must be a finite number above 0")
    return known
