"""What runs inside the worker to find out how busy the device is: a few untimed steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any

import torch

from labhelpers.capture import Capture, capture_for
from labhelpers.limits import total_length
from labhelpers.oom import is_oom
from labhelpers.records import SweepSpec, Trial
from labhelpers.training import Step, read_precision
from labhelpers.trials import (
    feed_of,
    largest_batch,
    named_workload,
    new_step,
    opening_facts,
    warm_up,
)
from labhelpers.workloads import Workload, as_pair, batch_length, to_device

LEAST_STEPS, MOST_STEPS = 2, 8
PROFILED_IMAGES = 2048
"""So many images are profiled, within the limits of steps."""

# Names of the driver's calls that take memory from the device or give it back.
_ALLOCATIONS = ("cudaMalloc", "cudaFree", "cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease")
# Waiting is recorded on the device's lane too, but is no work.
_NO_WORK = ("Context Sync", "Stream Sync", "Event Sync", "Stream Wait")


def measure_limits(
    spec: dict[str, Any], batch_size: int, workload: Workload | None = None
) -> dict[str, Any]:
    """Profile a few steps of a sweep's training and return a trial of kind `limits`.

    `details["limits"]` holds `kernel_s`, the time during which the device worked (the union of
    its kernels and copies, None where the profiler returned none), `allocation_s`, the time in
    the driver's memory calls, `wall_s`, `steps` and `images`, and `why` there are no kernels.
    """
    asked = SweepSpec(**spec)
    workload = workload or named_workload(asked.workload)
    capture = capture_for(torch.device(asked.device))
    place = (batch_size, 0, 0)
    facts = opening_facts("limits", asked, place, feed=asked.feed, precision=asked.precision)
    step = new_step(asked, workload, capture.device)
    feed = feed_of(asked, workload, batch_size, capture.device)
    warm_up(step, workload, capture, largest_batch(asked, workload, batch_size))
    steps = max(LEAST_STEPS, min(MOST_STEPS, PROFILED_IMAGES // batch_size))
    facts["details"] = {"limits": profile_steps(step, itertools.islice(feed, steps), capture)}
    facts["precision_after"] = read_precision()
    del step, feed
    capture.empty_cache()
    return Trial(**facts).model_dump(mode="json", exclude_none=True)


def profile_steps(step: Step, batches: Iterable[Any], capture: Capture) -> dict[str, Any]:
    """Run steps under torch's profiler; times in seconds, None where it returned no kernels."""
    from torch.profiler import ProfilerActivity, profile

    seen = steps = 0
    started = time.perf_counter()
    try:
        # The host's own operators are left out: recording them would slow the host down.
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            capture.synchronize()
            started = time.perf_counter()
            for batch in batches:
                inputs, targets = as_pair(batch)
                inputs = to_device(inputs, capture.device)
                step(inputs, to_device(targets, capture.device))
                seen, steps = seen + batch_length(inputs), steps + 1
            capture.synchronize()
            wall_s = time.perf_counter() - started
        events = list(profiler.events() or ())
    except RuntimeError as error:
        if is_oom(error):
            raise
        return _without_kernels(f"the profiler failed: {error}")
    kernel_s, allocation_s = device_seconds(events)
    if not kernel_s:
        return _without_kernels("the profiler returned no kernels")
    return {
        "kernel_s": kernel_s, "allocation_s": allocation_s, "wall_s": wall_s,
        "steps": steps, "images": seen, "why": None,
    }  # fmt: skip


def device_seconds(events: Iterable[Any]) -> tuple[float, float]:
    """Return the seconds during which the device worked, and those in the driver's memory calls.

    `events` are the profiler's. Annotations cover a span of the device's time without working.
    """
    work: list[tuple[float, float]] = []
    allocation_us = 0.0
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if event.device_type.name == "CPU":
            allocation_us += span[1] - span[0] if event.name.startswith(_ALLOCATIONS) else 0.0
        elif not event.is_user_annotation and not event.name.startswith(_NO_WORK):
            work.append(span)
    return total_length(work) / 1e6, allocation_us / 1e6


def _without_kernels(why: str) -> dict[str, Any]:
    return {
        "kernel_s": None, "allocation_s": None, "wall_s": None, "steps": None, "images": None,
        "why": " ".join(why.split()),
    }  # fmt: skip
