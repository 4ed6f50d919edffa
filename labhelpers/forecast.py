"""Guess from peaks where memory will end: a line, a centre and a spread.

A guess only chooses which batch size to try next; whether a size fits is never decided here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Reading = tuple[int, int]
"""A batch size that ran and its peak in bytes, above 0."""

FALL_SHARE = 0.02
"""Share by which a peak must lie below that of a smaller batch to count as fallen."""
FLOOR_SHARE = 0.02
"""Share of a peak by which it must lie above the line through larger sizes to be left out."""
FIXED_SHARE = 0.4
"""Largest share of a peak that may be fixed if a line through two sizes is to be trusted."""
FLAT_SHARE = 0.02
"""A line whose growth makes up less than this share of the peak predicts nothing."""
SCATTER = 10
"""Times the typical residual that a small growth must be above to count all the same."""
FLAT_GROWTH = 2
"""Multiple of the largest size that is tried next where three sizes took the same."""
STRETCH = 0.015
"""Error of an extrapolation per multiple of the largest size seen.

3 % at twice that size and 6 % at four times: twice the median errors of lines through three
probes over 1,017 published models, because two probes are often all there is.
"""
DOUBT_SHARE = 0.0001
LEAST_SPREAD = 0.1
"""What stays uncertain on a perfect line: a share of the size, and a part of one sample."""
CUT_OFF_SHARE = 0.97
"""Share of the limit from which a reserved peak is cut off: caches were given back to go on."""
GAP_CENTER = 0.9
GAP_SPREAD = 0.2
"""Where between its two bounds the limit is expected, and how widely, in parts of the gap.

Tuned on traces of a simulated caching allocator; a wrong value costs probes, never the answer.
"""
NARROW_GAP = 0.02
"""Share of the size below which a gap is skipped on the way up: its upper end is tried."""
FAILURE_SPREAD = 0.05
"""How far a failure's own figures may mislead: a share of what they take away."""
SEGMENT_BYTES = 2 * 2**20
"""What torch's allocator takes from the device at least, and a multiple of which it takes."""
SLOPE_FACTOR = 1.3
"""Largest factor by which two failures may correct the growth that the peaks show."""
ROOM_SHARE = 0.05
"""Share of the limit a reserved peak must leave free to guide the way up after a fall."""


@dataclass(frozen=True)
class Line:
    """A line through peaks: bytes per sample, bytes at 0, and peak minus line per reading."""

    slope: float
    intercept: float
    residuals: tuple[float, ...]


@dataclass(frozen=True)
class Forecast:
    """Where memory is believed to end: a Cauchy law over batch sizes, and not above `top`."""

    center: float
    spread: float
    top: float = math.inf

    def quantile(self, low: float, high: float, share: float) -> float:
        """Return the size below which the limit lies with probability `share`.

        The law is cut to low..high; high may be infinite. Its heavy tails let the steps grow
        by themselves when a trial contradicts the guess.
        """
        below = math.atan((low - self.center) / self.spread)
        above = math.atan((min(high, max(self.top, low)) - self.center) / self.spread)
        return self.center + self.spread * math.tan(below + share * (above - below))


def fit_line(readings: Sequence[Reading]) -> Line | None:
    """Fit a line by least squares, weighted with the batch size; None below two sizes.

    The weight lets large batches, which are near the limit, count more than the first ones.
    Residuals come in the order of the readings.
    """
    if len({size for size, _ in readings}) < 2:
        return None
    total = sum(size for size, _ in readings)
    mean_size = sum(size * size for size, _ in readings) / total
    mean_peak = sum(size * peak for size, peak in readings) / total
    rise = sum(size * (size - mean_size) * (peak - mean_peak) for size, peak in readings)
    slope = rise / sum(size * (size - mean_size) ** 2 for size, _ in readings)
    intercept = mean_peak - slope * mean_size
    return Line(slope, intercept, tuple(peak - intercept - slope * n for n, peak in readings))


def latest_regime(readings: Sequence[Reading]) -> list[Reading]:
    """Return the readings, by size, from the last fall on: other kernels ran before it."""
    regime: list[Reading] = []
    highest = 0
    for size, peak in sorted(readings):
        if peak < (1 - FALL_SHARE) * highest:
            regime, highest = [], 0
        regime.append((size, peak))
        highest = max(highest, peak)
    return regime


def has_fallen(readings: Sequence[Reading]) -> bool:
    """Tell whether a peak lies below that of a smaller batch by more than `FALL_SHARE`."""
    return len(latest_regime(readings)) < len(readings)


def above_the_floor(readings: Sequence[Reading]) -> Sequence[Reading]:
    """Leave out small sizes whose peak something else than the batch sets; keep at least two.

    Parameters and the optimizer's step take as much at any size: until activations outgrow
    them, a peak lies above the line through those of larger sizes.
    """
    while len(readings) > 2:
        (size, peak), *larger = readings
        line = fit_line(larger)
        if line is None or peak - line.intercept - line.slope * size < FLOOR_SHARE * peak:
            break
        readings = larger
    return readings


def proportional(readings: Sequence[Reading], limit_bytes: int) -> float:
    """Return the size that fits if every byte grew with the batch; the real one is seldom less."""
    size, peak = max(readings)
    return size * limit_bytes / peak


def is_settled(readings: Sequence[Reading]) -> bool:
    """Tell whether a line through these peaks may be followed far.

    Through two sizes it may if the batch makes up most of the larger one's peak. Otherwise the
    smaller one's may come from elsewhere, and the line is too flat; a third one shows it.
    """
    regime = above_the_floor(latest_regime(readings))
    line = fit_line(regime)
    if line is None:
        return False
    return len(regime) > 2 or line.intercept <= FIXED_SHARE * regime[-1][1]


def forecast(readings: Sequence[Reading], limit_bytes: int) -> Forecast | None:
    """Guess the size at which these peaks reach the limit; None without readings.

    Anchored at the largest size. A single reading, or peaks that do not grow, give the size
    that would fit if every byte grew with the batch: the real one is seldom smaller.
    """
    regime = above_the_floor(latest_regime(readings))
    if not regime:
        return None
    size, peak = regime[-1]
    line = fit_line(regime)
    if line is None or _is_flat(regime, line):
        center = proportional(regime, limit_bytes)
        if len(regime) > 2:  # three sizes took the same: something else sets the peak
            center = max(center, FLAT_GROWTH * size)
        return Forecast(center, LEAST_SPREAD + DOUBT_SHARE * center)
    center = size + (limit_bytes - peak) / line.slope
    stretch = STRETCH * max(center / size, 1.0) * max(center - size, 0.0)
    noise = _typical_residual(regime, line) / line.slope
    doubt = DOUBT_SHARE * max(center, size)
    return Forecast(center, LEAST_SPREAD + doubt + stretch + noise)


def believe(
    peaks: Sequence[Reading], live: Sequence[Reading], limit_bytes: int, high: int | None
) -> Forecast | None:
    """Guess the limit from reserved peaks and live peaks together; None without readings.

    `high` is the smallest size that failed. Both lists are by size. An allocator gives its
    caches back before it fails, so the limit lies between two bounds: where what it reserves
    reaches the limit without that, and where the live tensors alone reach it.
    """
    if not peaks or not live:
        return forecast(peaks or live, limit_bytes)
    if has_fallen(live):
        return _believe_after_a_fall(peaks, latest_regime(live), limit_bytes, high)
    upper = forecast(live, limit_bytes)
    lower = forecast([r for r in peaks if r[1] < CUT_OFF_SHARE * limit_bytes], limit_bytes)
    if upper is None or lower is None:
        return upper or lower
    base = max(lower.center, live[-1][0])
    gap = min(upper.center, math.inf if high is None else high) - base
    if gap <= (NARROW_GAP * base if high is None else 0):
        return upper
    # A failure in the gap shows that the guess was wrong: any part of it may be the right one.
    spread = GAP_SPREAD * gap if high is None else gap
    return Forecast(base + GAP_CENTER * gap, max(spread, upper.spread))


def is_squeezed(peaks: Sequence[Reading], live: Sequence[Reading], limit_bytes: int) -> bool:
    """Tell whether the largest size ran only because caches were given back on the way.

    Then what was reserved is the limit itself, and where memory ends is between the peaks.
    """
    if not peaks or not live:
        return False
    cut_off_bytes = CUT_OFF_SHARE * limit_bytes
    return peaks[-1][1] >= cut_off_bytes > live[-1][1]


def below_failures(
    guess: Forecast | None,
    low: int,
    readings: Sequence[Reading],
    failures: Sequence[Reading],
    limit_bytes: int,
) -> Forecast | None:
    """Bring a guess down to what failures say: how many bytes too many their sizes needed.

    `low` is the largest size that ran, `failures` are sizes that failed, the smallest first, and
    what each held and asked for when it did. More may have been asked for later, so the limit
    lies at the size this gives, or below it.
    """
    high, needed = failures[0]
    missing = needed - limit_bytes
    if missing <= 0:
        return guess
    slope = _growth_of_need(readings, failures)
    # Just above the limit a whole segment is missing, not the bytes of one sample.
    top = min(high - (missing - SEGMENT_BYTES) / slope, high - 1)
    if top <= low:  # that size ran: steps grow with what the failure was wrong by
        spread = min(LEAST_SPREAD + SEGMENT_BYTES / slope + low - top, (high - low) / 2)
        return Forecast(low, spread, low + 4 * spread)
    if guess is not None and guess.center <= top:
        return Forecast(guess.center, guess.spread, top + 1)
    doubt = FAILURE_SPREAD * (high - top) + SEGMENT_BYTES / 2 / slope
    return Forecast(top, LEAST_SPREAD + doubt, top + 1)


def _growth_of_need(readings: Sequence[Reading], failures: Sequence[Reading]) -> float:
    """Return how many bytes more a sample more needs, from peaks and from failures."""
    (high, needed), *larger = failures
    line = fit_line(latest_regime(readings))
    # The steeper one takes less away: a line through other kernels' peaks may be too flat.
    slope = max(needed / high, line.slope if line else 0.0)
    if not larger or larger[0][1] <= needed:
        return slope
    between = (larger[0][1] - needed) / (larger[0][0] - high)
    return min(max(between, slope / SLOPE_FACTOR), slope * SLOPE_FACTOR)


def _believe_after_a_fall(
    peaks: Sequence[Reading], regime: Sequence[Reading], limit_bytes: int, high: int | None
) -> Forecast | None:
    """Guess from the readings since the last fall, whichever of the two bounds is at work.

    On the way up that is the reserved peak while it leaves room, and the live one after that.
    Once a size has failed it is the bound that lies below that size, the higher one of two.
    """
    low = regime[-1][0]
    since = [reading for reading in peaks if reading[0] >= regime[0][0]]
    lower, upper = forecast(since, limit_bytes), forecast(regime, limit_bytes)
    if lower is None or upper is None:
        return lower or upper
    if high is None:
        return lower if since[-1][1] < (1 - ROOM_SHARE) * limit_bytes else upper
    ceiling = high
    return min(upper, lower, key=lambda guess: max(low - guess.center, guess.center - ceiling, 0.0))


def _is_flat(readings: Sequence[Reading], line: Line) -> bool:
    """Tell whether peaks grow too little to predict anything; three that lie on a line do."""
    size, peak = readings[-1]
    growth = line.slope * size
    scatters = growth <= SCATTER * _typical_residual(readings, line)
    return growth < FLAT_SHARE * peak and (len(readings) < 3 or scatters)


def _typical_residual(readings: Sequence[Reading], line: Line) -> float:
    """Return the mean of the absolute residuals in bytes, weighted like the fit."""
    total = sum(size for size, _ in readings)
    pairs = zip(readings, line.residuals, strict=True)
    return sum(size * abs(residual) for (size, _), residual in pairs) / total
