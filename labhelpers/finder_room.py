"""Memory around the trials of a search: how much there is, its limit, and emptying it."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from labhelpers.caps import exact_fraction, memory_cap
from labhelpers.capture import Capture
from labhelpers.host_memory import host_free_bytes, host_total_bytes
from labhelpers.inputs import InputError

_M_MMAP_THRESHOLD = -3
_OWN_MAPPING_BYTES = 2**20


def room_of(capture: Capture) -> dict[str, Any]:
    """Return what this process may use on a device, and what the device holds, in bytes.

    On a GPU: what is free there and what the allocator holds already, up to the cap if one is
    set; other processes' memory is not free. On the CPU: what the system can still give.

    Raises:
        InputError: the CPU of a system that has no limit to set.
    """
    device = capture.device
    if device.type == "cpu":
        if sys.platform != "linux":
            raise InputError(
                "device: got 'cpu'; finding a batch size there needs Linux or WSL2, whose memory "
                "limit makes running out of memory harmless"
            )
        return {"room_bytes": host_free_bytes(), "total_bytes": host_total_bytes()}
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    room_bytes = free_bytes + torch.cuda.memory_reserved(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    if fraction < 1:
        whole_bytes = torch.cuda.get_device_properties(device).total_memory
        room_bytes = min(room_bytes, int(fraction * whole_bytes))
    return {"room_bytes": room_bytes, "total_bytes": total_bytes}


def memory_limit(device: torch.device, cap_bytes: int | None) -> AbstractContextManager[Any]:
    """Cap what this process may take on a device, in bytes, inside a block; None for no cap."""
    if cap_bytes is None:
        return nullcontext()
    if device.type == "cpu":
        return memory_cap(budget_bytes=cap_bytes)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    fraction = exact_fraction(min(cap_bytes, total_bytes), total_bytes)
    return memory_cap(fraction=fraction, device=device)


def empty_device(capture: Capture, *, workspaces: bool) -> None:
    """Give unused memory of a device back; with `workspaces` also what libraries keep.

    A fresh process has no workspaces, but a CUDA graph of the caller's may use one.
    """
    if capture.device.type == "cuda":
        capture.synchronize()
        if workspaces:
            getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    capture.empty_cache()


@contextmanager
def little_to_collect() -> Iterator[None]:
    """Leave what lives now out of garbage collection: each trial collects more than once."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def start_libraries(device: torch.device) -> None:
    """Run a tiny step, so that the first trial does not pay for loading cuBLAS and cuDNN."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 4)).to(device)
    model(torch.rand(2, 3, 8, 8, device=device)).sum().backward()
    torch.cuda.synchronize(device)


def keep_heap_small() -> None:
    """Let the C library map every tensor of 1 MiB or more by itself, for this process's life.

    Left alone it soon takes tensors up to 32 MiB from its heap and keeps what is freed there:
    a limit on the address space then no longer says what a trial takes. It costs speed.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
