"""What `labhelpers doctor` tries on the device, inside a worker process."""

from __future__ import annotations

from typing import Any

import torch

from labhelpers import drivers
from labhelpers.caps import memory_cap
from labhelpers.capture import CudaCapture, capture_for
from labhelpers.formats import MIB
from labhelpers.oom import is_oom
from labhelpers.training import set_precision

_CAP_FRACTION = 0.05
_CAP_BUDGET_BYTES = 256 * MIB


def look_at_device(device: str) -> dict[str, Any]:
    """Read a device's memory, who else holds some of it, and its clocks, as the driver tells."""
    capture = capture_for(torch.device(device))
    handle = capture.handle if isinstance(capture, CudaCapture) else None
    memory, others = capture.driver_memory(), drivers.other_processes(handle)
    return {
        "memory": memory.model_dump() if memory else None,
        "others": None if others is None else [other.model_dump() for other in others],
        "clocks": drivers.clocks(handle).model_dump() if handle else None,
    }


def try_precision(_device: str) -> dict[str, str]:
    """Ask for FP32 and return what is read back."""
    return set_precision("fp32")


def try_pinned_memory(device: str) -> bool:
    """Copy a pinned tensor to the device and tell whether it came through."""
    values = torch.arange(MIB, dtype=torch.int32).pin_memory()
    copied = values.to(device, non_blocking=True)
    return values.is_pinned() and bool(torch.equal(copied.cpu(), values))


def try_cap(device: str) -> bool:
    """Tell whether a memory cap lets a little through and stops more with a real OOM."""
    on_gpu = device != "cpu"
    cap = memory_cap(fraction=_CAP_FRACTION, device=device) if on_gpu else memory_cap(
        budget_bytes=_CAP_BUDGET_BYTES
    )  # fmt: skip
    with cap as set_cap:
        allowed_bytes = set_cap.allowed_bytes if on_gpu else _CAP_BUDGET_BYTES
        torch.empty(16 * MIB, dtype=torch.uint8, device=device)
        try:
            torch.empty(allowed_bytes + 64 * MIB, dtype=torch.uint8, device=device)
        except Exception as error:
            if is_oom(error):
                return True
            raise
    return False
