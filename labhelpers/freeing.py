"""Give memory back: what nobody uses, and what IPython keeps of cells that are over."""

from __future__ import annotations

import gc
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

_LAST_ERROR = ("last_traceback", "last_value", "last_exc", "last_type")
_UNDERSCORES = ("_", "__", "___")
_SHOWN = re.compile(r"_{1,3}|_\d+")
_DEEPEST = 3  # lists in lists in lists: deeper than a cell's value usually nests tensors


@dataclass(frozen=True)
class Memory:
    """Memory at one moment, in bytes; None where there is no such figure.

    All but `resident_bytes` (this process's, in the system's memory) are of a CUDA device.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    fraction: float | None = None
    resident_bytes: int | None = None


@dataclass(frozen=True)
class Released:
    """Memory before and after a release."""

    before: Memory
    after: Memory

    @property
    def freed_bytes(self) -> int | None:
        """Bytes given back: reserved ones on CUDA, resident ones on the CPU."""
        pairs = (
            (self.before.reserved_bytes, self.after.reserved_bytes),
            (self.before.resident_bytes, self.after.resident_bytes),
        )
        return next((a - b for a, b in pairs if a is not None and b is not None), None)


def release_memory(device: Any = None) -> Released:
    """Collect garbage, empty every allocator's cache and drop what IPython keeps.

    That is the traceback of the last red cell (`%debug` has nothing to show afterwards), and
    tensors, modules and optimizers that a cell displayed (`_`, `_5`, `Out[5]`). Names of the
    user's own keep what they hold.

    Args:
        device: the CUDA device to read figures of; the current one by default.

    Raises:
        RuntimeError: from the device, when its context is lost.
    """
    before = read_memory(device)
    _forget_last_error()
    shell = _shell()
    if shell is not None:
        _forget_traceback(shell)
        _forget_displayed(shell)
    _collect_and_empty_caches()
    return Released(before, read_memory(device))


def read_memory(device: Any = None) -> Memory:
    """Read the memory of the process and of a CUDA device that is in use; starts no device."""
    resident_bytes = psutil.Process().memory_info().rss
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return Memory(resident_bytes=resident_bytes)
    cuda = torch.cuda
    free_bytes, total_bytes = cuda.mem_get_info(device)
    return Memory(
        allocated_bytes=cuda.memory_allocated(device),
        reserved_bytes=cuda.memory_reserved(device),
        peak_allocated_bytes=cuda.max_memory_allocated(device),
        peak_reserved_bytes=cuda.max_memory_reserved(device),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        fraction=cuda.get_per_process_memory_fraction(device),
        resident_bytes=resident_bytes,
    )


def _collect_and_empty_caches() -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        gc.collect()
        return
    from labhelpers.capture import CpuCapture

    CpuCapture(torch.device("cpu")).empty_cache()
    for name in ("cuda", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_initialized():
            backend.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def _forget_last_error() -> None:
    for name in _LAST_ERROR:
        with suppress(AttributeError):
            delattr(sys, name)


def _shell() -> Any | None:
    """Return the running IPython shell; None outside of one. IPython is never imported."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def _forget_traceback(shell: Any) -> None:
    """Drop the shell's own traceback, its debugger and the error of the last cell's result."""
    for name in ("InteractiveTB", "SyntaxTB"):
        printer = getattr(shell, name, None)
        for kept in ("tb", "pdb"):
            if getattr(printer, kept, None) is not None:
                setattr(printer, kept, None)
    result = getattr(shell, "last_execution_result", None)
    if result is not None:
        result.error_before_exec = result.error_in_exec = None


def _forget_displayed(shell: Any) -> None:
    """Drop displayed tensors from all places that keep them; a user's own `_` stays."""
    hook, shown = shell.displayhook, shell.user_ns.get("_oh", {})
    hidden = shell.user_ns_hidden
    values = [*shown.values(), *(hidden.get(name) for name in _UNDERSCORES)]
    values += [getattr(hook, name, None) for name in _UNDERSCORES]
    kept = {id(value) for value in values if _holds_memory(value)}
    for number in [number for number, value in shown.items() if id(value) in kept]:
        del shown[number]
    for space in (shell.user_ns, hidden):
        for name in [name for name in space if _SHOWN.fullmatch(name) and id(space[name]) in kept]:
            if name in _UNDERSCORES:
                space[name] = ""  # as IPython's own flush does, so that `_` goes on being updated
            else:
                del space[name]
    for name in _UNDERSCORES:
        if id(getattr(hook, name, None)) in kept:
            setattr(hook, name, "")
    result = getattr(shell, "last_execution_result", None)
    if result is not None and _holds_memory(result.result):
        result.result = None


def _holds_memory(value: Any, depth: int = 0) -> bool:
    """Tell whether a displayed value is, or contains, a tensor, a module or an optimizer."""
    torch = sys.modules.get("torch")
    if torch is None or depth > _DEEPEST:
        return False
    if isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple, set)):
        return False
    return any(_holds_memory(item, depth + 1) for item in value)
