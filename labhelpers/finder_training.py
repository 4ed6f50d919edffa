"""Train one epoch of made-up images with the batch size that was found, inside the worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from labhelpers.capture import Capture, capture_for
from labhelpers.environment import usable_cpus
from labhelpers.finder_room import keep_heap_small, memory_limit
from labhelpers.inputs import InputError
from labhelpers.oom import attempt
from labhelpers.optimizers import optimizer_named
from labhelpers.records import FinderSpec
from labhelpers.training import make_step, run_epoch, set_precision
from labhelpers.trials import environment_id_of, surroundings
from labhelpers.workloads import Workload, batch_of, workload_from

_MOST_WORKERS = 8


def measure_training(
    asked: dict[str, Any], batch_size: int, cap_bytes: int | None
) -> dict[str, Any]:
    """Train one epoch at one batch size under a cap; return the facts of a trial, JSON-able.

    The images are torchvision's FakeData, through a DataLoader, after one step that is not
    timed. A last batch of one image is left out, because BatchNorm fails on it.

    Raises:
        InputError: the workload is none that trains on images with class labels.
    """
    spec = FinderSpec(**asked)
    device = torch.device(spec.device)
    capture = capture_for(device)
    if device.type == "cpu":
        keep_heap_small()
    capture.empty_cache()
    set_precision(spec.precision)
    workload = workload_from(spec.workload, input_shape=spec.input_shape, classes=spec.classes)
    facts = {
        "batch_size": batch_size, "device": spec.device, "cap_bytes": cap_bytes,
        "environment_id": environment_id_of(spec.device),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    tried = attempt(_epoch, spec, workload, batch_size, capture, cap_bytes)
    capture.empty_cache()
    if tried.failure is None:
        return facts | dict(tried.value)
    return facts | {
        "outcome": "oom", "error_class": tried.error_class, "error_text": tried.text,
        "oom": tried.failure.message.to_dict(),
    }  # fmt: skip


def fake_loader(spec: FinderSpec, batch_size: int, device: torch.device) -> DataLoader[Any]:
    """Return a loader over the second article's made-up images: (N, *input_shape) and labels.

    Raises:
        InputError: the spec names no input shape, classes or data set size.
    """
    from torchvision.datasets import FakeData
    from torchvision.transforms import ToTensor

    if not (spec.input_shape and spec.classes and spec.dataset_size):
        raise InputError("input_shape, classes and dataset_size are needed to make up images")
    data = FakeData(spec.dataset_size, spec.input_shape, spec.classes, transform=ToTensor())
    on_gpu = device.type == "cuda"
    return DataLoader(
        data, batch_size, shuffle=True, pin_memory=on_gpu,
        num_workers=min(_MOST_WORKERS, max(1, usable_cpus() - 1)) if on_gpu else 0,
        drop_last=spec.dataset_size % batch_size == 1,
        generator=torch.Generator().manual_seed(spec.seed),
    )  # fmt: skip


def _epoch(
    spec: FinderSpec, workload: Workload, batch_size: int, capture: Capture, cap_bytes: int | None
) -> dict[str, Any]:
    device = capture.device
    torch.manual_seed(spec.seed)
    model = workload.make_model().to(device).train()
    make = workload.make_optimizer if spec.optimizer is None else optimizer_named(spec.optimizer)
    step = make_step(
        model, make(model.parameters(), spec.learning_rate), workload.loss, spec.precision, device
    )
    if device.type == "cpu":
        _start_threads(workload, device)
    capture.reset_peak()
    with memory_limit(device, cap_bytes):
        step(*batch_of(workload, batch_size, device))
        capture.synchronize()
        first_step_peak_bytes = capture.peak_allocated_bytes()
        loader: Iterable[Any] = fake_loader(spec, batch_size, device)
        capture.prepare(0)
        epoch = run_epoch(step, loader, capture, batch_size=batch_size)
        return asdict(epoch) | surroundings(capture, "after") | {
            "outcome": "ok", "updates": epoch.steps,
            "peaks": {
                "first_allocated": first_step_peak_bytes,
                "steady_allocated": capture.peak_allocated_bytes(),
                "steady_reserved": capture.peak_reserved_bytes(),
            },
        }  # fmt: skip


def _start_threads(workload: Workload, device: torch.device) -> None:
    """Start what a first step starts, such as threads, before a limit counts."""
    model: nn.Module = workload.make_model().train()
    inputs, targets = batch_of(workload, 2, device)
    workload.loss(model(inputs), targets).backward()
