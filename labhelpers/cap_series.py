"""Choose batch sizes so that some fit under a cap and the next fails: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from labhelpers.formats import MIB

SHARE_OF_FIRST = 0.4
"""Share of the cap that the first size is expected to take."""

_FACTORS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # the article's 1 : 2 : 3, and on


def bytes_per_image(peaks: Sequence[tuple[int, int | None]]) -> float | None:
    """Return the slope between two probes (batch size, peak bytes); None if they do not tell."""
    (small, low), (large, high) = peaks
    if low is None or high is None or high <= low:
        return None
    return (high - low) / (large - small)


def first_size(room_bytes: int, slope_bytes: float | None) -> int:
    """Return the power of two that is expected to take at most 40 % of the room, at least 1.

    Where the probes do not tell, a MiB an image is taken for granted: a small size costs a few
    steps more, a large one would cost the fits.
    """
    images = SHARE_OF_FIRST * room_bytes / (slope_bytes or MIB)
    return 1 << max(0, int(images).bit_length() - 1)


def next_size(first: int, tried: Sequence[tuple[int, bool]]) -> int | None:
    """Return the size to try next; None once some fitted and a larger one failed.

    Sizes grow by the article's factors while they fit. If the first fails, they are halved
    until one fits: memory need not grow evenly, because other kernels are chosen on the way.

    Args:
        first: from `first_size`.
        tried: (batch size, whether it fitted) in the order they ran.
    """
    fitted = [size for size, fits in tried if fits]
    failed = [size for size, fits in tried if not fits]
    if fitted and failed:
        return None
    if failed:
        return min(failed) // 2 or None
    return next((first * f for f in _FACTORS if first * f > max(fitted, default=0)), None)


def size_after_oom(tried: Sequence[tuple[int, bool]]) -> int | None:
    """Return the size that shows recovery: the largest that fitted, up to half of what failed.

    It needs a good part of the cap, so it would fail too if the OOM's memory were still held;
    and it is no close call, because on the CPU the same budget is not the same to the byte.
    None where nothing failed or nothing of that size fitted.
    """
    failed = [size for size, fits in tried if not fits]
    half = min(failed, default=0) // 2
    return max((size for size, fits in tried if fits and size <= half), default=None)
