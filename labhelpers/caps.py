"""Cap the memory of a GPU, or of this process on the CPU, for as long as a block runs."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from labhelpers.inputs import InputError

_JUST_BELOW_ONE = math.nextafter(1.0, 0.0)
_PARALLEL_GRAIN = 32_768  # elements that PyTorch gives one thread at the least


@dataclass(frozen=True)
class Cap:
    """A cap as it was set and read back.

    On a GPU `allowed_bytes` is int(fraction × total): what the allocator may reserve, the
    CUDA context not counted. On the CPU it is the limit of the address space, what the
    process had mapped plus `budget_bytes`. What does not apply is None.
    """

    device: str
    fraction: float | None
    allowed_bytes: int
    budget_bytes: int | None


def memory_cap(
    *, fraction: float | None = None, budget_bytes: int | None = None, device: Any = None
) -> AbstractContextManager[Cap]:
    """Cap memory inside a `with` block and always restore the cap there was before.

    Args:
        fraction: share of a GPU's memory, above 0 and up to 1, on the device asked for
            (the current one by default). 1 is set as the largest number below it, because
            newer releases take 1.0 for "no cap".
        budget_bytes: on the CPU, how much more the process may map than it has mapped now.
            All threads share it, and so do child processes started inside the block.
        device: a CUDA device for `fraction`; None or "cpu" for `budget_bytes`.

    Raises:
        InputError: before torch is touched, for a value or a pair that makes no sense; or
            where the device, or such a limit, does not exist here.
        RuntimeError: the cap that was read back is not the one that was set.
    """
    named = None if device is None else str(device)
    if (fraction is None) == (budget_bytes is None):
        raise InputError("memory_cap: give either fraction (of a GPU) or budget_bytes (on the CPU)")
    if fraction is not None:
        if named == "cpu":
            raise InputError("fraction caps a GPU; on the CPU give budget_bytes")
        return _gpu_cap(_checked_fraction(fraction), device)
    if named not in (None, "cpu"):
        raise InputError(f"budget_bytes caps this process on the CPU; for {named!r} give fraction")
    return _cpu_cap(_checked_budget(budget_bytes))


def exact_fraction(allowed_bytes: int, total_bytes: int) -> float:
    """Return a fraction with int(fraction × total) == allowed, so that a restore loses no byte."""
    fraction = allowed_bytes / total_bytes
    while int(fraction * total_bytes) < allowed_bytes:
        fraction = math.nextafter(fraction, 1.0)
    return fraction


def _checked_fraction(fraction: Any) -> float:
    number = isinstance(fraction, numbers.Real) and not isinstance(fraction, bool)
    if not number or not 0 < fraction <= 1:  # NaN fails every comparison
        raise InputError(f"fraction: got {fraction!r}; must be a number above 0 and at most 1")
    return min(float(fraction), _JUST_BELOW_ONE)


def _checked_budget(budget_bytes: Any) -> int:
    whole = isinstance(budget_bytes, numbers.Integral) and not isinstance(budget_bytes, bool)
    if not whole or budget_bytes <= 0:
        raise InputError(
            f"budget_bytes: got {budget_bytes!r}; must be a whole number of bytes above 0"
        )
    return int(budget_bytes)


@contextmanager
def _gpu_cap(fraction: float, device: Any) -> Iterator[Cap]:
    import torch

    index = _device_index(torch, device)
    total_bytes = torch.cuda.get_device_properties(index).total_memory
    before = torch.cuda.get_per_process_memory_fraction(index)
    try:
        allowed_bytes = _set_fraction(torch, index, fraction, total_bytes)
        yield Cap(f"cuda:{index}", fraction, allowed_bytes, None)
    except BaseException:
        # A device that was lost in the block refuses the restore; the block's error comes first.
        with suppress(RuntimeError):
            _restore_fraction(torch, index, before, total_bytes)
        raise
    _restore_fraction(torch, index, before, total_bytes)


def _device_index(torch: Any, device: Any) -> int:
    if not torch.cuda.is_available():
        raise InputError("fraction caps a GPU and there is none here; on the CPU give budget_bytes")
    if isinstance(device, int) and not isinstance(device, bool):
        index: int | None = device
    else:
        try:
            asked = torch.device("cuda" if device is None else device)
        except (RuntimeError, TypeError):
            raise InputError(f"device: got {device!r}; must be 'cuda' or 'cuda:N'") from None
        if asked.type != "cuda":
            raise InputError(f"device: got {device!r}; fraction can cap CUDA devices only")
        index = asked.index
    if index is None:
        return int(torch.cuda.current_device())
    if not 0 <= index < torch.cuda.device_count():
        raise InputError(f"device: got {device!r}; there are {torch.cuda.device_count()} GPUs here")
    return index


def _set_fraction(torch: Any, index: int, fraction: float, total_bytes: int) -> int:
    """Set the cap, read it back and return the bytes it allows."""
    torch.cuda.set_per_process_memory_fraction(fraction, index)
    allowed_bytes = int(fraction * total_bytes)
    read_bytes = torch.cuda.get_per_process_memory_fraction(index) * total_bytes
    if abs(read_bytes - allowed_bytes) >= 2:
        raise RuntimeError(
            f"a cap of {fraction} was set on cuda:{index}, but {read_bytes:.0f} bytes were read "
            f"back instead of {allowed_bytes}"
        )
    return allowed_bytes


def _restore_fraction(torch: Any, index: int, before: float, total_bytes: int) -> None:
    if before < 1:
        before = exact_fraction(round(before * total_bytes), total_bytes)
    torch.cuda.set_per_process_memory_fraction(float(before), index)


@contextmanager
def _cpu_cap(budget_bytes: int) -> Iterator[Cap]:
    if sys.platform != "linux":
        raise InputError("budget_bytes needs Linux (or WSL2): this system has no such limit")
    import resource

    _make_ready()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed_bytes = psutil.Process().memory_info().vms + budget_bytes
    if hard != resource.RLIM_INFINITY:
        allowed_bytes = min(allowed_bytes, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (allowed_bytes, hard))
        read_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
        yield Cap("cpu", None, read_bytes, budget_bytes)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _make_ready() -> None:
    """Give back what is free, and start torch's threads, before the limit counts.

    Freed memory that stays mapped would add to the budget; and the OpenMP runtime ends the
    whole process when, under the limit, it cannot start a thread.
    """
    if "torch" not in sys.modules:
        return
    import torch

    from labhelpers.capture import CpuCapture

    CpuCapture(torch.device("cpu")).empty_cache()
    torch.zeros(torch.get_num_threads() * _PARALLEL_GRAIN * 2).add_(1)
