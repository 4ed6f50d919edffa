"""Facts about platforms: which one this is, what its driver says, what it does past the card."""

from __future__ import annotations

import math
from typing import Any, Literal

from labhelpers.inputs import InputError

Platform = Literal["linux", "wsl2", "windows"]
PLATFORMS: tuple[Platform, ...] = ("linux", "wsl2", "windows")

SPILLING_PLATFORMS: tuple[Platform, ...] = ("wsl2", "windows")
"""Where the driver may back device allocations with system memory without an error."""

# NVML answers "not available" for a size with an unsigned 64-bit -1.
_NOT_AVAILABLE_FROM = 2**64 - 1
_NOT_AVAILABLE_WORDS = {
    "", "n/a", "not available", "not supported", "unknown", "unknown error", "none", "nan",
    "insufficient permissions",
}  # fmt: skip

_POLICY: dict[Platform, str] = {
    "windows": (
        "Since driver 536.40 the Windows driver (WDDM) moves allocations to system memory when"
        " the card is close to full, without an error: training goes on, several times slower."
        " It can be switched off since driver 546.01: NVIDIA Control Panel, Manage 3D settings,"
        " Program Settings, the python.exe in use, 'CUDA - Sysmem Fallback Policy' set to"
        " 'Prefer No Sysmem Fallback'; then restart Python. Past the card an out-of-memory error"
        " is raised again. It cannot be switched from Python, nor by PyTorch's own settings"
        " (source: NVIDIA support answer 5490)."
    ),
    "wsl2": (
        "WSL2 reaches the card through the Windows driver (WDDM), which may back device memory"
        " with system memory without an error. The 'CUDA - Sysmem Fallback Policy' of the NVIDIA"
        " Control Panel is reported as not honoured for programs inside WSL2 (microsoft/WSL"
        " #11050), so do not count on switching it off, and there is nothing to switch inside"
        " Linux. What helps: stay below the card with a memory cap"
        " (torch.cuda.set_per_process_memory_fraction), which raises a real out-of-memory error,"
        " and watch the time per image. Usable memory ends a little below the nominal size."
    ),
    "linux": (
        "The native Linux driver has no such fall-back: cudaMalloc, which PyTorch's allocator"
        " calls, fails when the card is full, so there is nothing to switch and an out-of-memory"
        " error is what a full card looks like. Only managed memory (cudaMallocManaged) can be"
        " larger than the card, and PyTorch does not use it unless told to."
    ),
}


def platform_of(kernel_release: str | None, system: str) -> Platform:
    """Name the platform from what `platform.release()` and `platform.system()` return.

    WSL2 is a Linux whose kernel release holds "microsoft", in any case.

    Raises:
        InputError: for a system that has neither a CUDA driver nor such a fall-back (macOS).
    """
    name = system.strip().lower()
    if name.startswith("win"):
        return "windows"
    if name.startswith("linux"):
        return "wsl2" if "microsoft" in (kernel_release or "").lower() else "linux"
    raise InputError(
        f"system {system!r} has no CUDA platform; allowed: Linux (also under WSL2) and Windows"
    )


def clean_driver_value(value: Any) -> Any:
    """Return a value as the driver gave it, or None where it means "not available".

    NVML's None, nvidia-smi's "[N/A]" and its like, 2^64-1 (which PyTorch prints as
    17179869184.00 GiB) and NaN are all not available.
    """
    if isinstance(value, str):
        word = value.strip().strip("[]").strip().lower()
        unavailable = word in _NOT_AVAILABLE_WORDS or word == str(_NOT_AVAILABLE_FROM)
        return None if unavailable else value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        is_nan = isinstance(value, float) and math.isnan(value)
        return None if is_nan or value >= _NOT_AVAILABLE_FROM else value
    return value


def fallback_policy(platform: str) -> str:
    """Explain what the driver does past the card on a platform, and what can be switched where.

    Raises:
        InputError: for a platform other than linux, wsl2 or windows.
    """
    return _POLICY[checked_platform(platform)]


def checked_platform(platform: str) -> Platform:
    """Return the platform if it is a known one; InputError otherwise."""
    for known in PLATFORMS:
        if platform == known:
            return known
    raise InputError(f"platform is {platform!r}; allowed: {', '.join(PLATFORMS)}")
