"""Reading a profile: what counts as work of the device, and what does not."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from labhelpers.profiling import device_seconds


@dataclass
class Event:
    """What the profiler tells of one event; times in microseconds."""

    name: str
    start: float
    end: float
    lane: str = "CUDA"
    is_user_annotation: bool = False

    @property
    def time_range(self) -> SimpleNamespace:
        return SimpleNamespace(start=self.start, end=self.end)

    @property
    def device_type(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.lane)


def test_kernels_and_copies_are_work_and_overlap_counts_once():
    events = [
        Event("gemm", 0, 100), Event("Memcpy HtoD (Pinned -> Device)", 50, 150),
        Event("relu", 200, 210), Event("cudaLaunchKernel", 0, 900, lane="CPU"),
    ]  # fmt: skip
    assert device_seconds(events) == (pytest.approx(160e-6), 0)


def test_annotations_and_waiting_are_no_work():
    events = [
        Event("Optimizer.step#Adam.step", 0, 1000, is_user_annotation=True),
        Event("Context Sync", 0, 1000), Event("Stream Wait Event", 0, 1000),
        Event("adam", 10, 20),
    ]  # fmt: skip
    assert device_seconds(events) == (pytest.approx(10e-6), 0)


def test_the_drivers_memory_calls_are_counted_apart():
    events = [
        Event("cudaMalloc", 0, 300, lane="CPU"), Event("cudaFree", 400, 500, lane="CPU"),
        Event("cudaMemcpyAsync", 500, 900, lane="CPU"), Event("cuMemMap", 0, 50, lane="CPU"),
    ]  # fmt: skip
    assert device_seconds(events) == (0, pytest.approx(450e-6))
    assert device_seconds([]) == (0, 0)
