"""Guess from peaks seen so far where memory will end: a line, a centre and a spread.

A guess only chooses which batch size to try next; whether a size fits is never decided here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Reading = tuple[int, float]
"""A batch size that ran and a peak in bytes, above 0."""

FALL_SHARE = 0.02
"""Share by which a peak must lie below that of a smaller batch to count as fallen."""
STRETCH = 0.0075
"""Growth of the slope's error: about 1.5 % at twice the largest size seen, 3 % at four times.

These were the median errors of lines through three probes over 1,017 published models.
"""
DOUBT = 0.001
"""Share of the guessed size that stays uncertain even on a perfect line: the allocator."""
LEAST_SPREAD = 0.25
FLAT_SHARE = 0.02
"""A line whose growth makes up less than this share of the peak predicts nothing."""


@dataclass(frozen=True)
class Line:
    """A line through peaks: bytes per sample, bytes at 0, and peak minus line per reading."""

    slope: float
    intercept: float
    residuals: tuple[float, ...]

    def at(self, batch_size: float) -> float:
        """Return the bytes the line gives for a batch size."""
        return self.intercept + self.slope * batch_size


@dataclass(frozen=True)
class Forecast:
    """Where memory is believed to end, as a Cauchy law over batch sizes."""

    center: float
    spread: float

    def quantile(self, low: float, high: float, share: float) -> float:
        """Return the size below which the limit lies with probability `share`.

        The law is cut to low..high (high may be infinite). Its heavy tails make the steps
        grow by themselves when a trial contradicts the guess.
        """
        below = math.atan((low - self.center) / self.spread)
        above = math.atan((high - self.center) / self.spread)
        return self.center + self.spread * math.tan(below + share * (above - below))


def fit_line(readings: Sequence[Reading]) -> Line | None:
    """Fit a line by least squares weighted with the batch size; None below two sizes.

    The weight makes large batches, which are near the limit, count more than the first ones.
    """
    if len({size for size, _ in readings}) < 2:
        return None
    total = sum(size for size, _ in readings)
    mean_size = sum(size * size for size, _ in readings) / total
    mean_peak = sum(size * peak for size, peak in readings) / total
    over = sum(size * (size - mean_size) * (peak - mean_peak) for size, peak in readings)
    slope = over / sum(size * (size - mean_size) ** 2 for size, _ in readings)
    intercept = mean_peak - slope * mean_size
    residuals = tuple(peak - intercept - slope * size for size, peak in readings)
    return Line(slope, intercept, residuals)


def fallen(readings: Sequence[Reading]) -> bool:
    """Tell whether any peak lies below that of a smaller batch by more than `FALL_SHARE`."""
    return len(latest_regime(readings)) < len(readings)


def latest_regime(readings: Sequence[Reading]) -> list[Reading]:
    """Return the readings, by size, from the last fall on: other kernels run since then."""
    regime: list[Reading] = []
    for reading in sorted(readings):
        if regime and reading[1] < (1 - FALL_SHARE) * max(peak for _, peak in regime):
            regime = []
        regime.append(reading)
    return regime


def forecast(readings: Sequence[Reading], limit_bytes: float) -> Forecast | None:
    """Guess the size at which peaks reach the limit; None without a usable reading.

    Anchored at the largest size seen. One reading, or peaks that do not grow, give the size
    that would fit if every byte grew with the batch: the real one is seldom smaller.
    """
    regime = latest_regime(readings)
    if not regime:
        return None
    size, peak = regime[-1]
    line = fit_line(regime)
    if line is None or line.slope * size < FLAT_SHARE * peak:
        center = size * limit_bytes / peak
        return Forecast(center, LEAST_SPREAD + DOUBT * center)
    center = size + (limit_bytes - peak) / line.slope
    stretch = STRETCH * max(center / size, 1.0) * max(center - size, 0.0)
    noise = _typical_residual(regime, line) / line.slope
    return Forecast(center, LEAST_SPREAD + DOUBT * max(center, size) + stretch + noise)


def _typical_residual(readings: Sequence[Reading], line: Line) -> float:
    """Return the weighted mean of the absolute residuals, in bytes."""
    total = sum(size for size, _ in readings)
    parts = zip(readings, line.residuals, strict=True)
    return sum(size * abs(residual) for (size, _), residual in parts) / total
