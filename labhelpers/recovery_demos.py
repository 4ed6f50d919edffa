"""What frees memory after an out-of-memory error and what does not, measured step by step.

Every demonstration holds a block of real memory, does one thing after another, and reads how
many bytes of it are still held after each: allocated ones on CUDA, resident ones on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labhelpers.capture import capture_for
from labhelpers.environment import resolve_device
from labhelpers.formats import MIB
from labhelpers.freeing import Memory, read_memory, release_memory
from labhelpers.oom import attempt

BLOCK_BYTES = 256 * MIB
"""Far above the noise of a process, and above what the C library keeps for itself."""

_TOO_MUCH_BYTES = 2**50  # 1 PiB: more than any machine has, less than a size overflow


@dataclass(frozen=True)
class Moment:
    """What was done, and how many bytes above the beginning were held and cached after it."""

    action: str
    held_bytes: int
    cached_bytes: int | None = None


@dataclass(frozen=True)
class Demonstration:
    """One way to hold on to memory, and what ends it."""

    title: str
    device: str
    block_bytes: int
    moments: tuple[Moment, ...]

    @property
    def holds(self) -> tuple[bool, ...]:
        """Tell for each moment whether the block was still held."""
        return tuple(moment.held_bytes > self.block_bytes / 2 for moment in self.moments)


class _Watch:
    """Read memory on a device, as bytes above what was there at the beginning."""

    def __init__(self, title: str, device: str, block_bytes: int) -> None:
        self.title, self.block_bytes = title, block_bytes
        self.device = torch.device(resolve_device(str(device)))
        self._moments: list[Moment] = []
        self.block()  # what the first block and the first error bring along is nobody's block
        with suppress(RuntimeError):
            self.fail()
        self.empty_cache()
        self._start = self._read()

    def block(self) -> Tensor:
        """Return a new block, every page of it written."""
        return torch.ones(self.block_bytes, dtype=torch.uint8, device=self.device)

    def empty_cache(self) -> None:
        """Collect garbage and give back what the allocator has free, as people do after an OOM."""
        capture_for(self.device).empty_cache()

    def fail(self) -> None:
        """Ask for more than there is: a real out-of-memory error."""
        torch.empty(_TOO_MUCH_BYTES, dtype=torch.uint8, device=self.device)

    def note(self, action: str) -> None:
        """Read the memory now, and keep it under what was just done."""
        now = self._read()
        cached_now, cached_before = _cached_bytes(now), _cached_bytes(self._start)
        cached_bytes = None
        if cached_now is not None and cached_before is not None:
            cached_bytes = cached_now - cached_before
        held_bytes = self._used(now) - self._used(self._start)
        self._moments.append(Moment(action, held_bytes, cached_bytes))

    def result(self) -> Demonstration:
        return Demonstration(self.title, str(self.device), self.block_bytes, tuple(self._moments))

    def _read(self) -> Memory:
        return read_memory(self.device if self.device.type == "cuda" else None)

    def _used(self, memory: Memory) -> int:
        on_gpu = self.device.type == "cuda"
        return (memory.allocated_bytes if on_gpu else memory.resident_bytes) or 0


def demonstrate_empty_cache(device: str, block_bytes: int = BLOCK_BYTES) -> Demonstration:
    """Empty the cache while a name still refers to the block, and once it does not."""
    watch = _Watch("a name", device, block_bytes)
    kept = watch.block()
    watch.note("a tensor is made")
    watch.empty_cache()
    watch.note("clean up")
    del kept
    watch.note("del the name")
    watch.empty_cache()
    watch.note("clean up again")
    return watch.result()


def demonstrate_handler(device: str, block_bytes: int = BLOCK_BYTES) -> Demonstration:
    """Clean up inside `except`, where the error's frames still hold the block, and after it."""
    watch = _Watch("the error being handled", device, block_bytes)
    try:
        _step_that_fails(watch)
    except RuntimeError:
        watch.empty_cache()
        watch.note("clean up inside except")
    watch.empty_cache()
    watch.note("clean up after the block")
    return watch.result()


def demonstrate_kept_error(device: str, block_bytes: int = BLOCK_BYTES) -> Demonstration:
    """Keep the error for later, and keep its text instead."""
    watch = _Watch("a kept error", device, block_bytes)
    errors: list[RuntimeError | str] = []
    try:
        _step_that_fails(watch)
    except RuntimeError as error:
        errors.append(error)
    watch.empty_cache()
    watch.note("clean up, the error in a list")
    errors = [str(error) for error in errors]
    watch.empty_cache()
    watch.note("clean up, only its text in the list")
    return watch.result()


def demonstrate_attempt(device: str, block_bytes: int = BLOCK_BYTES) -> Demonstration:
    """Let `attempt` catch the error: it cleans up outside the handler and keeps the text."""
    watch = _Watch("nothing, with attempt()", device, block_bytes)
    found = attempt(_step_that_fails, watch)
    watch.note(f"attempt() has returned: {found.outcome}")
    return watch.result()


def demonstrate_displayed(device: str, block_bytes: int = BLOCK_BYTES) -> Demonstration | None:
    """Display a tensor as a cell that ends in its name does; None outside of IPython."""
    shell = _shell()
    if shell is None:
        return None
    watch = _Watch("a cell that ended in its name", device, block_bytes)
    shown = watch.block()
    _remember_as_displayed(shell, shown)
    watch.note("the cell has shown it")
    del shown
    watch.empty_cache()
    watch.note("del the name, clean up")
    shell.user_ns["_oh"].pop(shell.displayhook.prompt_count, None)
    watch.empty_cache()
    watch.note("delete it from Out, clean up")
    release_memory()
    watch.note("release_memory()")
    return watch.result()


def demonstrate_all(device: str, block_bytes: int = BLOCK_BYTES) -> list[Demonstration]:
    """Run every demonstration that the caller's surroundings allow, one after the other."""
    every: tuple[Callable[..., Demonstration | None], ...] = (
        demonstrate_empty_cache, demonstrate_handler, demonstrate_kept_error,
        demonstrate_displayed, demonstrate_attempt,
    )  # fmt: skip
    found = [demonstrate(device, block_bytes) for demonstrate in every]
    return [demonstration for demonstration in found if demonstration is not None]


def _cached_bytes(memory: Memory) -> int | None:
    """Return what CUDA's allocator holds beyond live tensors; None on the CPU."""
    if memory.reserved_bytes is None or memory.allocated_bytes is None:
        return None
    return memory.reserved_bytes - memory.allocated_bytes


def _step_that_fails(watch: _Watch) -> None:
    """Stand for a training step: hold a block, then run out of memory."""
    activations = watch.block()
    watch.note("a step runs out of memory")
    watch.fail()
    activations.add_(1)


def _shell() -> Any | None:
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def _remember_as_displayed(shell: Any, value: Any) -> None:
    """Do with a value what IPython does with that of a cell's last line, without printing it."""
    shell.displayhook.update_user_ns(value)
