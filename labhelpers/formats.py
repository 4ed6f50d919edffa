"""The only place where bytes become MiB and seconds become ms; `None` reads "n/a"."""

from __future__ import annotations

MIB = 1024**2
GIB = 1024**3
GB = 10**9
"""Bandwidths are given in 10^9 bytes per second, as memory is sold."""
NOT_AVAILABLE = "n/a"


def mib(value_bytes: float | None) -> float | None:
    """Convert bytes to MiB (1,048,576 bytes); None stays None."""
    return None if value_bytes is None else value_bytes / MIB


def gib(value_bytes: float | None) -> float | None:
    """Convert bytes to GiB; None stays None."""
    return None if value_bytes is None else value_bytes / GIB


def ms(value_s: float | None) -> float | None:
    """Convert seconds to milliseconds; None stays None."""
    return None if value_s is None else value_s * 1e3


def bytes_of_mib(value_mib: float | None) -> int | None:
    """Convert MiB to whole bytes; None stays None."""
    return None if value_mib is None else round(value_mib * MIB)


def show_bytes(value_bytes: float | None) -> str:
    """Write bytes in the unit a reader expects: `106.2 MiB`, `3.98 GiB`."""
    if value_bytes is None:
        return NOT_AVAILABLE
    if abs(value_bytes) >= 10 * GIB:
        return f"{value_bytes / GIB:,.1f} GiB"
    if abs(value_bytes) >= GIB:
        return f"{value_bytes / GIB:,.2f} GiB"
    if abs(value_bytes) >= MIB:
        return f"{value_bytes / MIB:,.1f} MiB"
    return f"{value_bytes:,.0f} bytes"


def show_seconds(value_s: float | None) -> str:
    """Write a duration as people say it: `7.35 ms`, `3.74 s`, `2 min 05 s`."""
    if value_s is None:
        return NOT_AVAILABLE
    if abs(value_s) < 0.1:
        return f"{value_s * 1e3:,.2f} ms"
    if abs(value_s) < 10:
        return f"{value_s:,.2f} s"
    if abs(value_s) < 59.95:  # 59.96 would be written 60.0
        return f"{value_s:,.1f} s"
    minutes, seconds = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def show_rate(value_per_s: float | None) -> str:
    """Write images per second with thousands separators and no false digits."""
    return NOT_AVAILABLE if value_per_s is None else f"{value_per_s:,.0f} images/s"


def show_bandwidth(value_bytes_per_s: float | None) -> str:
    """Write a bandwidth in 10^9 bytes per second: `4,310 GB/s`, `24.9 GB/s`."""
    if value_bytes_per_s is None:
        return NOT_AVAILABLE
    value = value_bytes_per_s / GB
    return f"{value:,.0f} GB/s" if value >= 100 else f"{value:,.1f} GB/s"


def show_share(value: float | None, digits: int = 1) -> str:
    """Write a ratio as a percentage: 0.931 is `93.1 %`."""
    return NOT_AVAILABLE if value is None else f"{value * 100:.{digits}f} %"


def show_times(value: float | None, digits: int = 1) -> str:
    """Write a ratio as a multiple: 25.46 is `25.5×`."""
    return NOT_AVAILABLE if value is None else f"{value:,.{digits}f}×"


def show_count(value: float | None, noun: str = "") -> str:
    """Write a whole number with thousands separators: `1,875 updates`."""
    text = NOT_AVAILABLE if value is None else f"{value:,.0f}"
    return f"{text} {noun}".strip()
