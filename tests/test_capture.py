"""Capture on the CPU: the peak above the start, marks between steps, what is not known."""

import gc
import time

import pytest
import torch

from labhelpers.capture import CpuCapture, capture_for
from labhelpers.formats import MIB
from labhelpers.records import DriverMemory

CPU = torch.device("cpu")
SLACK_BYTES = 8 * MIB


@pytest.fixture
def capture() -> CpuCapture:
    found = capture_for(CPU)
    assert isinstance(found, CpuCapture)
    return found


def touch(size_bytes: int) -> None:
    """Allocate and write memory, and give it back."""
    torch.ones(size_bytes, dtype=torch.uint8)


def test_the_peak_is_what_was_used_above_the_start(capture):
    capture.reset_peak()
    touch(200 * MIB)
    assert capture.peak_allocated_bytes() == pytest.approx(200 * MIB, abs=SLACK_BYTES)


def test_a_small_trial_after_a_big_one_does_not_read_the_big_ones_peak(capture):
    capture.reset_peak()
    touch(300 * MIB)
    big = capture.peak_allocated_bytes()
    capture.reset_peak()
    touch(20 * MIB)
    small = capture.peak_allocated_bytes()
    assert big == pytest.approx(300 * MIB, abs=SLACK_BYTES)
    assert small == pytest.approx(20 * MIB, abs=SLACK_BYTES)


def test_memory_that_stays_is_part_of_the_start(capture):
    capture.reset_peak()
    touch(300 * MIB)
    live = torch.ones(50 * MIB, dtype=torch.uint8)
    capture.reset_peak()
    touch(30 * MIB)
    assert capture.peak_allocated_bytes() == pytest.approx(30 * MIB, abs=SLACK_BYTES)
    assert len(live) == 50 * MIB


def test_many_small_pieces_are_given_back_before_the_next_start(capture):
    capture.reset_peak()
    pieces = [bytearray(1000) for _ in range(100_000)]
    del pieces
    gc.collect()
    capture.reset_peak()
    touch(20 * MIB)
    assert capture.peak_allocated_bytes() == pytest.approx(20 * MIB, abs=SLACK_BYTES)


def test_a_peak_that_was_never_begun_is_not_known(capture):
    assert capture.peak_allocated_bytes() is None


def test_the_cpu_has_no_caching_allocator(capture):
    capture.reset_peak()
    assert capture.peak_reserved_bytes() is None
    assert capture.alloc_retries() is None


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_there_is_one_step_time_for_each_step(capture, steps):
    capture.prepare(steps)
    started = capture.start()
    for _ in range(steps):
        time.sleep(0.002)
        capture.mark()
    epoch_s = capture.stop(started)
    times = capture.step_times_s()
    assert len(times) == steps
    assert all(seconds >= 0.002 for seconds in times)
    assert sum(times) <= epoch_s
    capture.prepare(steps)
    assert capture.step_times_s() == ()


def test_the_systems_view_of_memory(capture):
    memory = capture.driver_memory()
    assert isinstance(memory, DriverMemory)
    assert memory.total_bytes > memory.free_bytes > 0
    assert memory.total_bytes > memory.process_bytes > 50 * MIB  # torch is loaded here
    assert memory.device_used_bytes is None
