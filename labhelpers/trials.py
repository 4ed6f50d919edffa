"""What runs inside the worker for one trial of a sweep: warm-up, measurement, summary."""

from __future__ import annotations

import functools
import gc
import importlib
import math
import os
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from labhelpers import drivers
from labhelpers.capture import Capture, CudaCapture, capture_for
from labhelpers.cpu_load import CpuLoad
from labhelpers.environment import describe, environment_id, resolve_device
from labhelpers.feeds import make_feed
from labhelpers.inputs import InputError
from labhelpers.records import FASHION, Spec, SweepSpec, Trial
from labhelpers.training import Step, make_step, read_precision, run_epoch, set_precision
from labhelpers.workloads import Workload, batch_of, fashion_workload, workload_from


def prepare(device: str, require_gpu: bool) -> dict[str, Any]:
    """Resolve the device, start it, and return the facts of the environment.

    Raises:
        InputError: the device does not exist here, or a GPU is required and there is none.
    """
    resolved = resolve_device(device, require_gpu=require_gpu)
    if resolved != "cpu":
        torch.cuda.set_device(resolved)
        torch.zeros(1, device=resolved)
    return describe(resolved)


def prepare_training(device: str, require_gpu: bool) -> dict[str, Any]:
    """Do what `prepare` does, and one tiny step, so that libraries load before any trial."""
    importlib.import_module("torchvision.datasets")  # a part of the facts, so before them
    facts = prepare(device, require_gpu)
    where = torch.device(facts["device"])
    set_precision("fp32")
    workload = fashion_workload()
    new_step(SweepSpec(device=facts["device"]), workload, where)(*batch_of(workload, 2, where))
    return facts


def measure_sweep_trial(
    spec: dict[str, Any], batch_size: int, repeat: int, position: int,
    workload: Workload | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train one epoch at one batch size and return the trial, JSON-able.

    `spec` is a resolved SweepSpec; `workload` is taken in place of the one that it names. Every
    trial begins with the same weights and the same order of images, in an emptied cache, after
    one untimed step of the same shape.
    """
    asked = SweepSpec(**spec)
    capture = capture_for(torch.device(asked.device))
    capture.empty_cache()
    gc.freeze()  # searching torch's modules for garbage takes 0.1 s, four times a trial
    place = (batch_size, repeat, position)
    facts = opening_facts("sweep", asked, place, feed=asked.feed, precision=asked.precision)
    facts |= surroundings(capture, "before")
    load = CpuLoad()
    facts |= _measure(asked, workload or named_workload(asked.workload), batch_size, capture)
    facts["details"] = {"cpu_of_others": load.share_of_others()}
    if asked.feed == "workers":
        facts["details"]["workers"] = asked.workers
    if facts["final_loss"] is not None and not math.isfinite(facts["final_loss"]):
        facts["details"]["loss_not_finite"] = True
    facts |= surroundings(capture, "after") | {"precision_after": read_precision()}
    capture.empty_cache()
    return Trial(**facts).model_dump(mode="json", exclude_none=True)


def named_workload(reference: str) -> Workload:
    """Return the workload of a name, made once in this process unless its file has changed.

    A reader's data set may take long to load, and every trial must train on the same data.
    """
    path = reference.rpartition(":")[0]
    changed_at = os.stat(path).st_mtime_ns if os.path.isfile(path) else None
    return _made_once(reference, changed_at)


@functools.lru_cache(maxsize=4)
def _made_once(reference: str, _changed_at: int | None) -> Workload:
    return workload_from(reference)


def opening_facts(
    kind: str, asked: Spec, place: tuple[int, int, int], *, feed: str, precision: str
) -> dict[str, Any]:
    """Set the precision, and return what is known of a trial before it is measured.

    `place` is its batch size, repeat and position in the order.
    """
    batch_size, repeat, position = place
    return {
        "kind": kind, "workload": asked.workload, "batch_size": batch_size, "repeat": repeat,
        "position": position, "feed": feed, "precision": precision,
        "device": asked.device, "synthetic": asked.synthetic,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment_id": environment_id_of(asked.device),
        "precision_before": set_precision(precision),
    }  # fmt: skip


def _measure(
    asked: SweepSpec, workload: Workload, batch_size: int, capture: Capture
) -> dict[str, Any]:
    """Warm up, time one epoch and read the peaks; all tensors die when this returns."""
    step = new_step(asked, workload, capture.device)
    feed = feed_of(asked, workload, batch_size, capture.device)
    largest = largest_batch(asked, workload, batch_size)
    first_step_peak_bytes = warm_up(step, workload, capture, largest)
    retries = capture.alloc_retries()
    capture.prepare(_known_length(feed))
    capture.reset_peak()
    epoch = run_epoch(step, feed, capture, batch_size=batch_size)
    if epoch.images == 0:
        raise InputError(f"workload: {asked.workload} gives an empty loader; nothing to train on")
    now = capture.alloc_retries()
    return asdict(epoch) | {
        "updates": epoch.steps,
        "first_step_peak_bytes": first_step_peak_bytes,
        "peak_allocated_bytes": capture.peak_allocated_bytes(),
        "peak_reserved_bytes": capture.peak_reserved_bytes(),
        "alloc_retries": None if now is None or retries is None else now - retries,
    }


def new_step(asked: Spec, workload: Workload, device: torch.device) -> Step:
    """Return a step over a new model and optimizer; equal seeds give equal weights."""
    torch.manual_seed(asked.seed)
    model = workload.make_model().to(device).train()
    optimizer = workload.make_optimizer(model.parameters(), asked.learning_rate)
    return make_step(model, optimizer, workload.loss, asked.precision, device)


def warm_up(step: Step, workload: Workload, capture: Capture, batch_size: int) -> int | None:
    """Run one synthetic step of the same shape and return its peak in bytes."""
    capture.reset_peak()
    step(*batch_of(workload, batch_size, capture.device))
    capture.synchronize()
    return capture.peak_allocated_bytes()


def largest_batch(asked: SweepSpec, workload: Workload, batch_size: int) -> int:
    """Return the size of the largest batch that the epoch will really hold."""
    images = workload.dataset_size if workload.make_loader else asked.images
    return min(batch_size, images or batch_size)


def feed_of(
    asked: SweepSpec, workload: Workload, batch_size: int, device: torch.device
) -> Iterable[Any]:
    """Return the epoch that a sweep trains on: the workload's own loader, or a named feed."""
    if workload.make_loader is not None:
        return workload.make_loader(batch_size, asked.seed)
    if asked.workload != FASHION:
        raise InputError(
            f"workload: {asked.workload} has no data; give a Workload with make_loader to sweep it"
        )
    return make_feed(
        asked.feed, asked.data_dir, batch_size=batch_size, seed=asked.seed, device=device,
        images=asked.images or 0, workers=asked.workers, synthetic=asked.synthetic,
    )  # fmt: skip


def _known_length(feed: Iterable[Any]) -> int:
    try:
        return len(feed)  # type: ignore[arg-type]
    except TypeError:
        return 0


def surroundings(capture: Capture, when: str) -> dict[str, Any]:
    """Read the driver's memory, clocks and other processes, outside the timed part."""
    handle = capture.handle if isinstance(capture, CudaCapture) else None
    seen: dict[str, Any] = {f"memory_{when}": capture.driver_memory()}
    if handle is not None:
        seen[f"clocks_{when}"] = drivers.clocks(handle)
        seen["other_processes"] = drivers.other_processes(handle)
    return seen


@functools.cache
def environment_id_of(device: str) -> str:
    """Return the id of the environment that measurements on this device belong to."""
    return environment_id(describe(device))
