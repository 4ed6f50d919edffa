"""What runs inside the worker for one size of a probe: a batch on the device, no loader."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any

import torch

from labhelpers import drivers
from labhelpers.caps import exact_fraction, memory_cap
from labhelpers.capture import Capture, CudaCapture, capture_for
from labhelpers.cpu_load import CpuLoad
from labhelpers.oom import is_oom
from labhelpers.records import Precision, ProbeSpec, Trial
from labhelpers.training import Step, read_precision, run_epoch, set_precision
from labhelpers.trials import environment_id_of, new_step, surroundings
from labhelpers.workloads import Batch, Workload, batch_of, workload_from

FEED = "synthetic"
"""How a probe's trials name their feed: one made-up batch that stays on the device."""

_WATCHED_S = 0.1
_SAMPLED_S = 0.05  # two directions of the bus, about 20 ms each
_MOST_STEPS = 16
_NO_KERNELS = ("Memcpy", "Memset", "Optimizer.")
_NAME_LENGTH = 160
_LONGEST = 5


def read_device_memory(device: str) -> dict[str, int | None]:
    """Return what the driver (on the CPU: the system) says of the memory now, in bytes."""
    return capture_for(torch.device(device)).driver_memory().model_dump()


def measure_probe_trial(
    spec: dict[str, Any], batch_size: int, repeat: int, position: int, cap_bytes: int | None
) -> dict[str, Any]:
    """Train on one synthetic batch of one size and return the trial, JSON-able.

    `spec` is a resolved ProbeSpec. Warm-up, then a profiled step, then the timed ones, then a
    few that only the driver watches. The profiler runs before the timing at every size, so
    that what it leaves behind in the process is the same for all. The peaks are those of the
    whole trial: model, batch and every step.
    """
    asked = ProbeSpec(**spec)
    capture = capture_for(torch.device(asked.device))
    _pay_first_use(asked.workload, asked.precision, asked.device)
    capture.empty_cache()
    facts: dict[str, Any] = {
        "kind": "probe", "workload": asked.workload, "batch_size": batch_size, "repeat": repeat,
        "position": position, "feed": FEED, "precision": asked.precision, "synthetic": True,
        "device": asked.device, "cap_bytes": cap_bytes,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment_id": environment_id_of(asked.device),
        "precision_before": set_precision(asked.precision),
    }  # fmt: skip
    facts |= surroundings(capture, "before")
    with _cap(cap_bytes, capture.device):
        measured = _measure(asked, workload_from(asked.workload), batch_size, capture)
    # What was read while the device worked replaces what it says at rest.
    facts |= surroundings(capture, "after") | measured | {"precision_after": read_precision()}
    capture.empty_cache()
    return Trial(**facts).model_dump(mode="json", exclude_none=True)


@functools.cache
def _pay_first_use(workload: str, precision: Precision, device: str) -> None:
    """Run a tiny step once in this process: what libraries load then is no trial's memory."""
    asked = ProbeSpec(workload=workload, precision=precision, device=device)
    set_precision(precision)
    job, where = workload_from(workload), torch.device(device)
    new_step(asked, job, where)(*batch_of(job, 2, where))


def _cap(cap_bytes: int | None, device: torch.device) -> AbstractContextManager[Any]:
    if cap_bytes is None:
        return nullcontext()
    if device.type == "cpu":
        return memory_cap(budget_bytes=cap_bytes)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return memory_cap(
        fraction=exact_fraction(min(cap_bytes, total_bytes), total_bytes), device=device
    )


def _measure(
    asked: ProbeSpec, workload: Workload, batch_size: int, capture: Capture
) -> dict[str, Any]:
    """Warm up, profile, time and watch; all tensors die when this returns."""
    capture.reset_peak()
    step = new_step(asked, workload, capture.device)
    batch = batch_of(workload, batch_size, capture.device)
    first_step_peak_bytes = _warm_up(step, batch, capture, asked.warmup_steps)
    kernels = profiled_kernels(lambda: step(*batch), capture)
    retries = capture.alloc_retries()
    load = CpuLoad()
    capture.prepare(asked.steps)
    epoch = run_epoch(step, itertools.repeat(batch, asked.steps), capture, batch_size=batch_size)
    others, now = load.share_of_others(), capture.alloc_retries()
    watched, traffic = _watch(step, batch, capture, epoch.epoch_s / epoch.steps)
    return watched | {
        "images": epoch.images, "steps": epoch.steps, "last_batch": epoch.last_batch,
        "updates": epoch.steps, "epoch_s": epoch.epoch_s, "step_times_s": epoch.step_times_s,
        "final_loss": epoch.final_loss,
        "first_step_peak_bytes": first_step_peak_bytes,
        "peak_allocated_bytes": capture.peak_allocated_bytes(),
        "peak_reserved_bytes": capture.peak_reserved_bytes(),
        "alloc_retries": None if now is None or retries is None else now - retries,
        "details": {
            "kernels": None if kernels is None else sorted(kernels),
            "longest_kernels_s": None if kernels is None else _longest(kernels),
            "bus_traffic": traffic, "cpu_of_others": others,
        },
    }  # fmt: skip


def _warm_up(step: Step, batch: Batch, capture: Capture, steps: int) -> int | None:
    """Run untimed steps; return the peak after the first, None if there is none."""
    peak_bytes = None
    for number in range(steps):
        step(*batch)
        capture.synchronize()
        peak_bytes = capture.peak_allocated_bytes() if number == 0 else peak_bytes
    return peak_bytes


def profiled_kernels(run_step: Callable[[], Any], capture: Capture) -> dict[str, float] | None:
    """Run one step under torch's profiler: seconds of each kernel, by name.

    None on the CPU, and where the profiler gives no kernels (it happens on WSL2).
    """
    if capture.device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run_step()
            capture.synchronize()
    except RuntimeError as error:
        if is_oom(error):
            raise
        return None  # a profiler that cannot start costs the names, not the trial
    found = [(kernel.name, kernel.duration / 1e6) for event in profiler.events() or ()
             for kernel in event.kernels]  # fmt: skip
    return sum_by_name(found) or None


def sum_by_name(found: list[tuple[str, float]]) -> dict[str, float]:
    """Add up the seconds of each kernel; copies, fills and annotations are no kernels."""
    seconds: dict[str, float] = {}
    for name, duration_s in found:
        if not name.startswith(_NO_KERNELS):
            short = name.removeprefix("void ")[:_NAME_LENGTH]
            seconds[short] = seconds.get(short, 0.0) + duration_s
    return seconds


def _longest(kernels: dict[str, float]) -> dict[str, float]:
    ranked = sorted(kernels.items(), key=lambda item: -item[1])
    return dict(ranked[:_LONGEST])


def _watch(
    step: Step, batch: Batch, capture: Capture, step_s: float
) -> tuple[dict[str, Any], dict[str, int] | None]:
    """Read clocks and bus traffic while untimed steps run; only clocks where these are short."""
    handle = capture.handle if isinstance(capture, CudaCapture) else None
    if handle is None:
        return {}, None
    steps = min(_MOST_STEPS, math.ceil(_WATCHED_S / step_s))
    for _ in range(steps):
        step(*batch)
    clocks = drivers.clocks(handle)
    traffic = drivers.bus_traffic(handle) if steps * step_s >= _SAMPLED_S else None
    capture.synchronize()
    return {"clocks_after": clocks}, traffic
