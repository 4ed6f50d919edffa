"""How much of the host's memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def host_total_bytes(cgroup: Path = CGROUP) -> int:
    """Return what the host, or the container this process runs in, may hold, in bytes."""
    total_bytes = int(psutil.virtual_memory().total)
    limit_bytes = _number(cgroup / "memory.max")
    return total_bytes if limit_bytes is None else min(total_bytes, limit_bytes)


def host_free_bytes(cgroup: Path = CGROUP) -> int:
    """Return what can still be taken without swapping, in bytes.

    A container's limit (cgroup v2) counts where it is lower than the host's own figure, which
    knows nothing of it. Its file cache is free for the asking.
    """
    free_bytes = int(psutil.virtual_memory().available)
    limit_bytes, used_bytes = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit_bytes is None or used_bytes is None:
        return free_bytes
    return min(free_bytes, max(0, limit_bytes - used_bytes + _file_cache_bytes(cgroup)))


def _number(file: Path) -> int | None:
    """Read a file that holds one number; None for 'max' and where there is no such file."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _file_cache_bytes(cgroup: Path) -> int:
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0
