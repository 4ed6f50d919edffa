"""The NVIDIA driver's view through NVML; every answer is `None` where it gives none.

On WSL2 and in containers NVML often has no per-process figures; "not available" comes as
None, "[N/A]" or 2^64-1, and is never a number here.
"""

from __future__ import annotations

import os
from typing import Any

from labhelpers.records import Clocks, DriverMemory, OtherProcess

_NOT_AVAILABLE = {2**64 - 1, 2**32 - 1}
_THROTTLE_REASONS = {
    "sw_power_cap": "nvmlClocksThrottleReasonSwPowerCap",
    "hw_slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "hw_thermal_slowdown": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "hw_power_brake_slowdown": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
    "sw_thermal_slowdown": "nvmlClocksThrottleReasonSwThermalSlowdown",
}


def nvml() -> Any | None:
    """Return the NVML module, initialised; None where there is no NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - a missing library, driver or permission: all mean "no NVML here"
        return None
    return pynvml


def device_handle(device: Any) -> Any | None:
    """Return NVML's handle of a CUDA device, found by UUID (indices may be renumbered)."""
    import torch

    library = nvml()
    if library is None:
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return ask_nvml("nvmlDeviceGetHandleByUUID", name)


def ask_nvml(function: str, *arguments: Any) -> Any | None:
    """Call an NVML function by name; None if it is missing, refused or not available."""
    library = nvml()
    if library is None or not hasattr(library, function):
        return None
    try:
        answer = getattr(library, function)(*arguments)
    except Exception:  # noqa: BLE001 - NVMLError, or a wrong signature in an older driver
        return None
    return _number(answer)


def driver_memory(handle: Any, free_bytes: int | None, total_bytes: int | None) -> DriverMemory:
    """Combine `mem_get_info` with NVML's figures for this process and the device, in bytes."""
    memory = ask_nvml("nvmlDeviceGetMemoryInfo", handle) if handle else None
    own = [used for pid, used in _processes(handle) or () if pid == os.getpid()]
    return DriverMemory(
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        process_bytes=own[0] if own else None,
        device_used_bytes=None if memory is None else int(memory.used),
    )


def other_processes(handle: Any) -> tuple[OtherProcess, ...] | None:
    """List other processes that compute on the device; None where NVML does not tell."""
    found = _processes(handle)
    if found is None:
        return None
    return tuple(
        OtherProcess(pid=pid, used_bytes=used) for pid, used in found if pid != os.getpid()
    )


def clocks(handle: Any) -> Clocks:
    """Read clocks (MHz), heat (°C), power (W) and the reasons for holding back."""
    if not handle:
        return Clocks()
    power_mw = ask_nvml("nvmlDeviceGetPowerUsage", handle)
    return Clocks(
        sm_mhz=ask_nvml("nvmlDeviceGetClockInfo", handle, 1),
        memory_mhz=ask_nvml("nvmlDeviceGetClockInfo", handle, 2),
        temperature_c=ask_nvml("nvmlDeviceGetTemperature", handle, 0),
        power_w=None if power_mw is None else power_mw / 1e3,
        throttle_reasons=_throttle_reasons(handle),
    )


def bus_traffic(handle: Any) -> dict[str, int] | None:
    """Sample what crosses PCIe now, in bytes per second; None where NVML does not tell.

    The driver looks at about 20 ms for each direction: call it while the device works.
    """
    sent, received = (
        ask_nvml("nvmlDeviceGetPcieThroughput", handle, counter) if handle else None
        for counter in (0, 1)  # NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES
    )
    if sent is None or received is None:
        return None
    return {"sent_bytes_per_s": sent * 1000, "received_bytes_per_s": received * 1000}


def driver_version() -> str | None:
    """Return the driver's version as text; None without one."""
    answer = ask_nvml("nvmlSystemGetDriverVersion")
    return answer.decode() if isinstance(answer, bytes) else answer


def _throttle_reasons(handle: Any) -> tuple[str, ...] | None:
    mask = ask_nvml("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if mask is None:
        return None
    library = nvml()
    return tuple(
        reason for reason, name in _THROTTLE_REASONS.items() if mask & getattr(library, name, 0)
    )


def _processes(handle: Any) -> list[tuple[int, int | None]] | None:
    found = ask_nvml("nvmlDeviceGetComputeRunningProcesses", handle) if handle else None
    if found is None:
        return None
    return sorted((int(process.pid), _number(process.usedGpuMemory)) for process in found)


def _number(value: Any) -> Any:
    """Return NVML's answer, or None for its marks of "not available"."""
    return None if isinstance(value, int) and value in _NOT_AVAILABLE else value
