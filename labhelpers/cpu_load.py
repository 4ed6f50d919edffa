"""How much of the CPU other programs used while we measured."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class CpuLoad:
    """Watch the CPU from now on; `share_of_others` tells what others used of it."""

    def __init__(self) -> None:
        self._start = _times()

    def share_of_others(self) -> float | None:
        """Return the share (0 to 1) of all CPU time that other processes used since the start.

        None where the system does not tell (no /proc), or no time has passed.
        """
        now = _times()
        if self._start is None or now is None or now[0] <= self._start[0]:
            return None
        total, busy, own = (b - a for a, b in zip(self._start, now, strict=True))
        return max(0.0, busy - own) / total


def _times() -> tuple[float, float, float] | None:
    """Return all CPU seconds, those not idle, and those of this process and its children."""
    with suppress(OSError, ValueError):
        line = Path("/proc/stat").read_text().splitlines()[0]
        ticks = [int(value) / os.sysconf("SC_CLK_TCK") for value in line.split()[1:9]]
        return sum(ticks), sum(ticks) - ticks[3] - ticks[4], sum(os.times()[:4])
    return None
