"""Read a sweep: the sweet spot, and what going further gains and costs."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from labhelpers.inputs import InputError

DEFAULT_SHARE = 0.93
NEIGHBOUR_SHARES = (0.90, 0.95)
"""Shares whose sweet spot is shown beside the one asked for: 0.93 can be a knife's edge."""


@dataclass(frozen=True)
class SweetSpot:
    """The smallest batch whose median reaches `share` of the best; `at` has it for other shares."""

    batch_size: int
    images_per_s: float
    share: float
    share_of_best: float
    best_batch_size: int
    best_images_per_s: float
    at: Mapping[float, int] = field(hash=False)


class Gain(NamedTuple):
    """Speed at one size over that at the size before; 1.0 is no gain."""

    from_batch: int
    to_batch: int
    ratio: float


@dataclass(frozen=True)
class Readings:
    """What the article reads from its table, derived from any sweep; None is not measured.

    `memory_ratio` is the largest size's peak over the sweet spot's; `saved_s` the seconds per
    epoch that the fastest size saves over the sweet spot.
    """

    sweet_spot: SweetSpot
    gains: tuple[Gain, ...]
    largest_batch_size: int
    memory_ratio: float | None
    saved_s: float | None


def sweet_spot(medians: Mapping[int, float | None], share: float = DEFAULT_SHARE) -> SweetSpot:
    """Find the smallest batch size whose median images/s reaches a share of the best.

    Args:
        medians: images per second by batch size; None where it was not measured.
        share: above 0, at most 1.

    Raises:
        InputError: for a share outside that range, no measured size, or a speed that is not a
            finite number above 0.
    """
    wanted = checked_share(share)
    known = _known(medians)
    if not known:
        raise InputError("no batch size has a measured speed; a sweet spot needs at least one")
    best = max(known, key=lambda size: (known[size], -size))
    spot = _smallest_reaching(known, wanted)
    shares = sorted({*NEIGHBOUR_SHARES, wanted})
    return SweetSpot(
        batch_size=spot,
        images_per_s=known[spot],
        share=wanted,
        share_of_best=known[spot] / known[best],
        best_batch_size=best,
        best_images_per_s=known[best],
        at={each: _smallest_reaching(known, each) for each in shares},
    )


def gain_per_doubling(medians: Mapping[int, float | None]) -> list[Gain]:
    """List the speed ratio of each two neighbouring measured sizes, ascending.

    Where the step is not a doubling the ratio is what one doubling of a steady gain would give:
    2.25 from 32 to 128 is 1.5 per doubling.
    """
    known = _known(medians)
    return [
        Gain(small, large, _per_doubling(known[large] / known[small], large / small))
        for small, large in itertools.pairwise(known)
    ]


def memory_ratio(
    peaks_bytes: Mapping[int, float | None], batch_size: int, against: int
) -> float | None:
    """Return one size's peak memory over another's; None where either is not measured."""
    peak, base = peaks_bytes.get(batch_size), peaks_bytes.get(against)
    return None if peak is None or not base else peak / base


def seconds_saved(
    medians: Mapping[int, float | None], images: int, from_batch: int, to_batch: int
) -> float | None:
    """Return the seconds per epoch saved by going from one size to another (negative: lost).

    None where either size is not measured.

    Raises:
        InputError: for a number of images below 1.
    """
    if images < 1:
        raise InputError(f"images is {images!r}; an epoch needs at least 1")
    known = _known(medians)
    if from_batch not in known or to_batch not in known:
        return None
    return images / known[from_batch] - images / known[to_batch]


def read_sweep(
    medians: Mapping[int, float | None],
    peaks_bytes: Mapping[int, float | None],
    images: int,
    share: float = DEFAULT_SHARE,
) -> Readings:
    """Derive the article's readings from medians, peak memory and the images of an epoch.

    Raises:
        InputError: as `sweet_spot` and `seconds_saved` do.
    """
    spot = sweet_spot(medians, share)
    largest = max(_known(medians))
    return Readings(
        sweet_spot=spot,
        gains=tuple(gain_per_doubling(medians)),
        largest_batch_size=largest,
        memory_ratio=memory_ratio(peaks_bytes, largest, spot.batch_size),
        saved_s=seconds_saved(medians, images, spot.batch_size, spot.best_batch_size),
    )


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the known values; None if there is none.

    Raises:
        InputError: for NaN or an infinite value.
    """
    known = _finite(values)
    return statistics.median(known) if known else None


def spread(values: Iterable[float | None]) -> float | None:
    """Return (largest - smallest) / median of the known values; None below two of them.

    Raises:
        InputError: for NaN or an infinite value.
    """
    known = _finite(values)
    middle = median(known)
    return (max(known) - min(known)) / middle if len(known) > 1 and middle else None


def checked_share(share: float) -> float:
    """Return a share that is above 0 and at most 1; InputError otherwise."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise InputError(f"share is {share!r}; it must be above 0 and at most 1, for example 0.93")
    return float(share)


def _per_doubling(ratio: float, step: float) -> float:
    try:
        return float(ratio ** (1 / math.log2(step)))
    except OverflowError:
        # Two sizes so close that a doubling of the same gain is beyond any number.
        return math.inf


def _smallest_reaching(known: Mapping[int, float], share: float) -> int:
    best = max(known.values())
    return min(size for size, speed in known.items() if speed >= share * best)


def _known(medians: Mapping[int, float | None]) -> dict[int, float]:
    """Return the measured sizes, ascending; InputError for a size or speed that cannot be."""
    known = {size: speed for size, speed in medians.items() if speed is not None}
    for size, speed in known.items():
        if size < 1:
            raise InputError(f"batch size {size!r} must be a whole number of at least 1")
        if not (math.isfinite(speed) and speed > 0):
            raise InputError(
                f"batch {size}: {speed!r} images/s; it must be a finite number above 0"
                " (None if not measured)"
            )
    return dict(sorted(known.items()))


def _finite(values: Iterable[float | None]) -> list[float]:
    known = [value for value in values if value is not None]
    for value in known:
        if not math.isfinite(value):
            raise InputError(f"{value!r} is not a finite number; leave out what was not measured")
    return known
