"""Train one epoch on all ranks so that each update is that of the whole batch on one process.

DistributedDataParallel averages the ranks' gradients as if their shares were equally large. A
share's mean loss is therefore weighted by ranks × own images / all images of the update: 1 for
full batches, and right for a short last one, whose shares may differ or be empty.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labhelpers.capture import Capture
from labhelpers.distributed import Team
from labhelpers.distributed_shares import Count, Shared
from labhelpers.training import LOSS_IMAGES, Epoch, mean_loss
from labhelpers.workloads import Loss, as_pair, call_model, to_device

_DROPPED_STEPS = 2
"""First steps after a change between both kinds, which are not timed."""


class Member(nn.Module):
    """A model that can also be called with nothing, and then gives a zero that has gradients.

    With it a rank whose share of the last batch is empty takes part in the all-reduce.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        """Return the model's outputs, or a zero that depends on every parameter."""
        if inputs is None:
            return sum((p * 0).sum() for p in self.parameters() if p.requires_grad)
        return call_model(self.model, inputs)


class SharedStep:
    """Forward, backward and update of one rank; the gradients come to all ranks' mean.

    Args:
        member: on the device; wrapped in DistributedDataParallel where the team has a group.
        precision: fp32, tf32, bf16 or fp16, as `training.make_step` has it.
    """

    def __init__(
        self, member: Member, optimizer: torch.optim.Optimizer, loss_function: Loss,
        precision: str, team: Team,
    ) -> None:  # fmt: skip
        self.device = torch.device(team.device)
        self.bare = member
        self._model: nn.Module = _wrapped(member, team)
        self._optimizer, self._loss_function = optimizer, loss_function
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        self._autocast_to = kinds.get(precision)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")

    def begin(self) -> None:
        """Drop the gradients of the update before."""
        self._optimizer.zero_grad(set_to_none=True)

    def backward(self, inputs: Any, targets: Any, weight: float, *, sync: bool) -> Tensor | None:
        """Add a weighted micro-batch's gradients; with `sync` the ranks' become one.

        `inputs` None is an empty share. Returns the loss without the weight, or None.
        """
        with nullcontext() if sync else self._quiet():
            if inputs is None:
                self._scaler.scale(self._model(None)).backward()
                return None
            loss = self._loss(self._model, inputs, targets)
            # A factor of 1 would be one kernel more in every step.
            self._scaler.scale(loss if weight == 1 else loss * weight).backward()
        return loss.detach()

    def update(self) -> None:
        """Let the optimizer update the weights."""
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def rehearse(self, inputs: Any, targets: Any) -> None:
        """Run a step of this rank alone, with all its memory, and leave the weights as they are.

        It goes past DistributedDataParallel, so that an error on one rank keeps none waiting.
        The update has zero gradients: Adam makes its state, and all ranks stay equal.
        """
        self.begin()
        self._scaler.scale(self._loss(self.bare, inputs, targets)).backward()
        for parameter in self.bare.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.update()
        self.begin()

    def _loss(self, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
        kind = self._autocast_to
        context = nullcontext() if kind is None else torch.autocast(self.device.type, dtype=kind)
        with context:
            return self._loss_function(model(inputs), targets)

    def _quiet(self) -> AbstractContextManager[Any]:
        wrapped = isinstance(self._model, DistributedDataParallel)
        return self._model.no_sync() if wrapped else nullcontext()  # type: ignore[operator]


def _wrapped(member: Member, team: Team) -> nn.Module:
    if team.group is None:
        return member
    device = torch.device(team.device)
    return DistributedDataParallel(
        member,
        device_ids=None if device.type == "cpu" else [device.index],
        process_group=team.group,
    )


def windows(counts: Sequence[Count], accumulation: int) -> Iterator[Sequence[Count]]:
    """Yield the steps of each update; the last window may hold fewer."""
    for start in range(0, len(counts), accumulation):
        yield counts[start : start + accumulation]


def run_shared_epoch(
    step: SharedStep, shared: Shared, capture: Capture, team: Team, *, accumulation: int = 1
) -> Epoch:
    """Time one epoch of this rank: wait for the feed, copy, forward, backward, update.

    All ranks begin together. Step times are those of updates. Call `capture.prepare` before;
    the device is synchronised before the start and before the stop, never inside.
    """
    largest = max((own for own, _ in shared.counts), default=1) or 1
    losses: collections.deque[Tensor] = collections.deque(maxlen=-(-LOSS_IMAGES // largest))
    wait = _Wait()
    capture.synchronize()
    team.wait()
    started = capture.start()
    batches = iter(shared.feed)
    for window in windows(shared.counts, accumulation):
        total = sum(all_ranks for _, all_ranks in window)
        step.begin()
        for number, (own, _) in enumerate(window, start=1):
            inputs, targets = wait.for_next(batches, capture.device) if own else (None, None)
            weight = team.world_size * own / total
            # Gradients travel with the last micro-batch of an update only.
            loss = step.backward(inputs, targets, weight, sync=number == len(window))
            losses.extend([] if loss is None else [loss])
        step.update()
        capture.mark()
    epoch_s = capture.stop(started)
    images, last = sum(own for own, _ in shared.counts), shared.counts[-1][0]
    return Epoch(
        images, len(shared.counts), last, epoch_s, capture.step_times_s(), wait.seconds,
        mean_loss(losses),
    )  # fmt: skip


class _Wait:
    """Fetch batches and sum up how long that took."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock

    def for_next(self, batches: Iterator[Any], device: torch.device) -> tuple[Any, Any]:
        asked = self._clock()
        inputs, targets = as_pair(next(batches))
        self.seconds += self._clock() - asked
        return to_device(inputs, device), to_device(targets, device)


def time_updates(
    step: SharedStep, batch: tuple[Any, Any], capture: Capture, team: Team,
    *, steps: int, sync: bool,
) -> tuple[float, ...]:  # fmt: skip
    """Time updates on one batch that is on the device, with the all-reduce or without it.

    Without it the ranks' weights drift apart: only for models that are thrown away after.
    """
    capture.prepare(steps + _DROPPED_STEPS)
    team.wait()
    started = capture.start()
    for _ in range(steps + _DROPPED_STEPS):
        step.begin()
        step.backward(*batch, 1, sync=sync)
        step.update()
        capture.mark()
    capture.stop(started)
    return capture.step_times_s()[_DROPPED_STEPS:]
