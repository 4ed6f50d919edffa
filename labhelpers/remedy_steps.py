"""The step that each remedy makes of a training job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labhelpers.accumulation import accumulate, micro_batches
from labhelpers.checkpointing import checkpoint_blocks
from labhelpers.oom import is_oom
from labhelpers.records import RemedySpec
from labhelpers.remedy_plan import Remedy
from labhelpers.training import Step, make_step
from labhelpers.workloads import Batch, Workload, batch_length, call_model, to_device


class NotApplicable(Exception):
    """The remedy does not apply to this model; the text says why."""


@dataclass
class Job:
    """A model, its optimizer, one batch on the device, and the step to run on it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch
    step: Step
    facts: dict[str, Any] = field(default_factory=dict)
    keep: Callable[[Tensor], Any] = Tensor.detach
    kept: list[Tensor] = field(default_factory=list)

    @property
    def images(self) -> int:
        """How many images a step sees."""
        return batch_length(self.batch[0])

    def run(self) -> Tensor:
        """Run one step and return its loss without its graph."""
        loss = self.step(*self.batch)
        self.kept.append(self.keep(loss))
        return loss.detach()


def build_job(
    remedy: Remedy, workload: Workload, asked: RemedySpec, batch: Batch, device: torch.device
) -> Job:
    """Build the job of a remedy; equal seeds give equal weights for all of them.

    Args:
        batch: the whole batch, on the host.

    Raises:
        NotApplicable: the model, or its input, is not of the kind that the remedy needs.
    """
    torch.manual_seed(asked.seed)
    model = workload.make_model().to(device).train()
    facts: dict[str, Any] = {}
    if remedy.channels_last:
        model, batch = _to_channels_last(model, batch)
    if remedy.checkpoints:
        facts["checkpointed_blocks"] = checkpoint_blocks(model)
        if not facts["checkpointed_blocks"]:
            raise NotApplicable("the model has no nn.Sequential or nn.ModuleList of blocks")
    optimizer = workload.make_optimizer(model.parameters(), asked.learning_rate)
    batch = to_device(batch[0], device), to_device(batch[1], device)
    if not remedy.same_input:
        batch = _half_as_large(model, batch)
    size = micro_size(asked)
    if not remedy.training:
        batch = micro_batches(*batch, size)[0]
        model.eval()
    job = Job(model, optimizer, batch, lambda *_: torch.empty(0), facts)
    job.step = _step(remedy, workload, job, size)
    if remedy.keeps_losses:
        job.keep = _with_its_graph
    return job


def micro_size(asked: RemedySpec) -> int:
    """Return the size of a micro-batch; the last may be shorter."""
    return -(-(asked.batch_size or 1) // asked.micro_batches)


def _step(remedy: Remedy, workload: Workload, job: Job, size: int) -> Step:
    if remedy.accumulates:
        job.facts["micro_batch_size"] = size
        return _accumulated(job, workload, size)
    if remedy.training:
        device = next(job.model.parameters()).device
        return make_step(job.model, job.optimizer, workload.loss, remedy.precision, device)

    def evaluate(inputs: Any, targets: Any) -> Tensor:
        with torch.set_grad_enabled(not remedy.without_graph):
            return workload.loss(call_model(job.model, inputs), targets)

    return evaluate


def _accumulated(job: Job, workload: Workload, size: int) -> Step:
    def step(inputs: Any, targets: Any) -> Tensor:
        parts = micro_batches(inputs, targets, size)
        done = accumulate(job.model, parts, workload.loss, job.optimizer, window=len(parts))
        return done.total / done.samples  # `loss` would wait for the device

    return step


def _with_its_graph(loss: Tensor) -> Tensor:
    return loss


def _to_channels_last(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    images = _images(batch)
    layout = torch.channels_last
    return model.to(memory_format=layout), (images.contiguous(memory_format=layout), batch[1])  # type: ignore[call-overload]


def _half_as_large(model: nn.Module, batch: Batch) -> Batch:
    """Return the images at half their side, if the model takes them."""
    images = _images(batch)
    if min(images.shape[-2:]) < 2:
        raise NotApplicable(f"images of {tuple(images.shape[-2:])} cannot be halved")
    smaller = nn.functional.avg_pool2d(images, 2)
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(smaller[:2])
    except RuntimeError as error:
        if is_oom(error):
            raise
        reason = str(error).splitlines()[0]
        raise NotApplicable(f"the model takes no images of half the side ({reason})") from None
    model.train(training)
    return smaller, batch[1]


def _images(batch: Batch) -> Tensor:
    inputs = batch[0]
    if isinstance(inputs, Tensor) and inputs.dim() == 4 and inputs.is_floating_point():
        return inputs
    raise NotApplicable("the inputs are no images (one tensor of N×C×H×W)")
