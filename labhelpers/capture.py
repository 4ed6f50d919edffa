"""Timing and memory capture over CUDA and CPU, made not to disturb what it measures.

Step times come from marks (device events on CUDA) that are read after the epoch; nothing
inside an epoch waits for the device.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

import torch

from labhelpers.drivers import device_handle, driver_memory
from labhelpers.records import DriverMemory


class Capture(ABC):
    """Capture time and memory on one device.

    Use: `prepare(steps)`, `start()`, a `mark()` after each step, `stop()`, then read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""

    @abstractmethod
    def prepare(self, steps: int) -> None:
        """Make room for the marks of `steps` steps, outside the timed part."""

    @abstractmethod
    def mark(self) -> None:
        """Mark the end of a step, without waiting."""

    @abstractmethod
    def step_times_s(self) -> tuple[float, ...]:
        """Return the seconds between marks; call it after `stop()`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin a new measurement of the peak of memory."""

    def restart_peak(self) -> None:
        """Begin a new peak above the same start, without giving any memory back."""
        self.reset_peak()

    @abstractmethod
    def peak_allocated_bytes(self) -> int | None:
        """Return the peak of memory in use since `reset_peak()`; None where unknown."""

    @abstractmethod
    def peak_reserved_bytes(self) -> int | None:
        """Return the peak of memory held by the allocator; None on the CPU."""

    @abstractmethod
    def alloc_retries(self) -> int | None:
        """Count how often the allocator had to flush its cache and try again."""

    @abstractmethod
    def driver_memory(self) -> DriverMemory:
        """Return the driver's (on the CPU: the system's) view of the memory."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give memory that nobody uses back to the device or the system."""

    def start(self) -> float:
        """Synchronise, mark the start and return the clock, directly before the timed part."""
        self.synchronize()
        self.mark()
        return time.perf_counter()

    def stop(self, started: float) -> float:
        """Synchronise directly before the stop and return the seconds since `started`."""
        self.synchronize()
        return time.perf_counter() - started


class CudaCapture(Capture):
    """Capture on an NVIDIA device: CUDA events, the caching allocator's counters, NVML."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # Events are recorded on the current device, and a restarted worker begins with cuda:0.
        torch.cuda.set_device(device)
        self._events: list[torch.cuda.Event] = []
        self._next = 0
        self.handle = device_handle(device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def prepare(self, steps: int) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        self._next = 0

    def mark(self) -> None:
        if self._next == len(self._events):  # a loader that does not know its length
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[self._next].record()
        self._next += 1

    def step_times_s(self) -> tuple[float, ...]:
        used = self._events[: self._next]
        return tuple(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(used))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_allocated_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.device)

    def peak_reserved_bytes(self) -> int | None:
        return torch.cuda.max_memory_reserved(self.device)

    def alloc_retries(self) -> int | None:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def driver_memory(self) -> DriverMemory:
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        return driver_memory(self.handle, free_bytes, total_bytes)

    def empty_cache(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class CpuCapture(Capture):
    """Capture on the CPU: wall clock, and the process's peak above its size at the start."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._marks: list[float] = []
        self._start_bytes: int | None = None

    def synchronize(self) -> None:
        """Do nothing: work on the CPU is done when the call returns."""

    def prepare(self, steps: int) -> None:  # noqa: ARG002 - a list grows by itself
        self._marks = []

    def mark(self) -> None:
        self._marks.append(time.perf_counter())

    def step_times_s(self) -> tuple[float, ...]:
        return tuple(b - a for a, b in zip(self._marks, self._marks[1:], strict=False))

    def reset_peak(self) -> None:
        # Without the trim a small batch after a large one would read the large one's peak.
        self.empty_cache()
        self._start_bytes = None
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self._start_bytes = _status_bytes("VmRSS")

    def restart_peak(self) -> None:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak_allocated_bytes(self) -> int | None:
        peak_bytes = _status_bytes("VmHWM")
        if self._start_bytes is None or peak_bytes is None:
            return None
        return max(0, peak_bytes - self._start_bytes)

    def peak_reserved_bytes(self) -> int | None:
        return None

    def alloc_retries(self) -> int | None:
        return None

    def driver_memory(self) -> DriverMemory:
        free_bytes, total_bytes = _meminfo_bytes("MemAvailable"), _meminfo_bytes("MemTotal")
        process_bytes = _status_bytes("VmRSS")
        return DriverMemory(
            free_bytes=free_bytes, total_bytes=total_bytes, process_bytes=process_bytes
        )

    def empty_cache(self) -> None:
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def capture_for(device: torch.device) -> Capture:
    """Return the capture that fits the device, and make that device the process's current one.

    Events are recorded on the current device, so a capture of another would time nothing.
    """
    if device.type != "cuda":
        return CpuCapture(device)
    if device.index is None:  # "cuda" means the current one, which `set_device` refuses
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    return CudaCapture(device)


def _status_bytes(field: str) -> int | None:
    return _kib_field("/proc/self/status", field)


def _meminfo_bytes(field: str) -> int | None:
    return _kib_field("/proc/meminfo", field)


def _kib_field(file: str, field: str) -> int | None:
    """Read one `Name:  123 kB` line; None where the system has no such file or line."""
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None
