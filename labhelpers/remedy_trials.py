"""What runs inside the worker for one remedy: compare one update, then time."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from labhelpers.capture import Capture, capture_for
from labhelpers.cpu_load import CpuLoad
from labhelpers.gradients import catch_gradients, relative_change
from labhelpers.oom import attempt
from labhelpers.records import RemedySpec, Trial
from labhelpers.remedy_plan import PLAIN, Remedy, remedy_named
from labhelpers.remedy_steps import Job, NotApplicable, build_job
from labhelpers.training import read_precision, set_precision
from labhelpers.trials import environment_id_of, surroundings
from labhelpers.worker import unpacked
from labhelpers.workloads import Batch, Workload, batch_of, to_device, workload_from

_MOST_TRIES = 30
"""A float16 scaler leaves updates out until its scale is small enough: 2**16 halved 30 times."""


@dataclass(frozen=True)
class Reference:
    """The plain FP32 step on the host: its batch, and what it gave (None if it did not fit)."""

    batch: Batch
    loss: float | None = None
    gradients: list[Tensor] | None = None
    statistics: list[Tensor] | None = None


def measure_remedy(
    spec: dict[str, Any], name: str, position: int, data: bytes | None
) -> dict[str, Any]:
    """Measure one remedy and return the trial, JSON-able; or `not_run` with the reason.

    `spec` is a resolved RemedySpec, `data` a packed Workload where the spec only names it.
    Peaks are those of model, optimizer, batch and every step together.
    """
    asked, remedy = RemedySpec(**spec), remedy_named(name)
    capture = _start(asked.device)
    facts: dict[str, Any] = {
        "kind": "remedy", "workload": asked.workload, "variant": name, "position": position,
        "feed": "synthetic", "precision": remedy.precision, "device": asked.device,
        "synthetic": True, "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment_id": environment_id_of(asked.device),
        "precision_before": set_precision("fp32"),
    }  # fmt: skip
    reference = _reference(json.dumps(spec, sort_keys=True), data)
    capture.empty_cache()
    facts |= surroundings(capture, "before")
    try:
        facts |= _measure(remedy, _workload(asked, data), asked, reference, capture)
    except NotApplicable as reason:
        return {"not_run": str(reason)}
    facts |= surroundings(capture, "after") | {"precision_after": read_precision()}
    capture.empty_cache()
    return Trial(**facts).model_dump(mode="json", exclude_none=True)


def _start(device: str) -> Capture:
    if device != "cpu":
        torch.cuda.set_device(device)
    return capture_for(torch.device(device))


def _workload(asked: RemedySpec, data: bytes | None) -> Workload:
    if data is not None:
        workload: Workload = unpacked(data)
        return workload
    return workload_from(asked.workload, input_shape=asked.input_shape, classes=asked.classes)


@functools.lru_cache(maxsize=1)
def _reference(spec: str, data: bytes | None) -> Reference:
    """Take the plain step once in this process, with the batch that all remedies are given."""
    asked = RemedySpec(**json.loads(spec))
    workload, device = _workload(asked, data), torch.device(asked.device)
    torch.manual_seed(asked.seed)
    made = batch_of(workload, asked.batch_size or 1, device)
    host = torch.device("cpu")
    batch = to_device(made[0], host), to_device(made[1], host)
    del made
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the copies do not wait by themselves

    def plain() -> dict[str, Any]:
        return _first_update(build_job(remedy_named(PLAIN), workload, asked, batch, device), asked)

    found = attempt(plain)
    return Reference(batch, **(found.value if found.ok else {}))


def _measure(
    remedy: Remedy, workload: Workload, asked: RemedySpec, reference: Reference, capture: Capture
) -> dict[str, Any]:
    """Build, compare the first update, warm up once more, time; all tensors die with this."""
    capture.reset_peak()
    job = build_job(remedy, workload, asked, reference.batch, capture.device)
    first = _first_update(job, asked)
    first_step_peak_bytes = capture.peak_allocated_bytes()
    job.run()
    retries = capture.alloc_retries()
    steps = asked.steps or 1
    capture.prepare(steps)
    load = CpuLoad()
    started = capture.start()
    for _ in range(steps):
        loss = job.run()
        capture.mark()
    epoch_s = capture.stop(started)
    others, now = load.share_of_others(), capture.alloc_retries()
    return {
        "batch_size": job.images, "images": steps * job.images, "steps": steps,
        "last_batch": job.images, "updates": steps if remedy.training else 0,
        "epoch_s": epoch_s, "step_times_s": capture.step_times_s(),
        "final_loss": _finite(loss), "first_step_peak_bytes": first_step_peak_bytes,
        "peak_allocated_bytes": capture.peak_allocated_bytes(),
        "peak_reserved_bytes": capture.peak_reserved_bytes(),
        "alloc_retries": None if now is None or retries is None else now - retries,
        "details": {
            "whole_batch": asked.batch_size, "first_loss": first["loss"],
            "losses_kept": len(job.kept), "cpu_of_others": others, **job.facts,
            **_changes(remedy, first, reference), **_segments(remedy, capture.device),
        },
    }  # fmt: skip


def _first_update(job: Job, asked: RemedySpec) -> dict[str, Any]:
    """Run until the first update; return its loss, its gradients and the statistics after it."""
    device = next(job.model.parameters()).device
    torch.manual_seed(asked.seed + 1)  # the same dropout masks wherever they are drawn alike
    tries, most = 0, _MOST_TRIES if job.model.training else 1
    with catch_gradients(job.optimizer) as caught:
        while caught.gradients is None and tries < most:
            loss = job.run()
            tries += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # An update that was left out still moved the statistics: then there is nothing to compare.
    statistics = None if tries > 1 else [
        buffer.detach().to("cpu", copy=True)
        for buffer in job.model.buffers() if buffer.is_floating_point()
    ]  # fmt: skip
    return {"loss": _finite(loss), "gradients": caught.gradients, "statistics": statistics}


def _changes(remedy: Remedy, first: dict[str, Any], reference: Reference) -> dict[str, Any]:
    """Say how far the first update is from the plain one; None where that means nothing."""
    comparable = remedy.training and remedy.same_input
    loss, plain = first["loss"], reference.loss
    moved = None if loss is None or not plain else abs(loss - plain) / abs(plain)
    return {
        "loss_change": moved if comparable else None,
        "gradient_change": _change(comparable, first["gradients"], reference.gradients),
        "statistics_change": _change(comparable, first["statistics"], reference.statistics),
    }


def _change(
    comparable: bool, found: list[Tensor] | None, reference: list[Tensor] | None
) -> float | None:
    if not comparable or not found or not reference:
        return None
    return relative_change(found, reference)


def _segments(remedy: Remedy, device: torch.device) -> dict[str, Any]:
    """Check that the allocator took the setting: some of its segments can grow."""
    if not remedy.expandable:
        return {}
    grown = [segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()]
    if not any(grown):
        raise NotApplicable(f"the allocator of {device} did not take the setting")
    return {"expandable_segments": sum(map(bool, grown))}


def _finite(loss: Tensor) -> float | None:
    value = float(loss)
    return value if abs(value) < float("inf") else None
