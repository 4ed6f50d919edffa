"""Accumulate gradients over micro-batches, so that an update is that of the whole batch.

The gradient of a mean is the mean of the micro-batches' gradients weighted by their samples;
dividing each by their number instead is right only where all are equally long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labhelpers import accumulation_checks as checks
from labhelpers.inputs import InputError
from labhelpers.state import random_state, restore_random_state, write_values
from labhelpers.workloads import (
    Batch,
    Loss,
    as_pair,
    batch_length,
    call_model,
    described,
    rebuilt,
    to_device,
)  # fmt: skip

Count = Callable[[Any, Any], int]
Counted = tuple[Batch, int]


@dataclass(frozen=True)
class Accumulated:
    """What a call did: how many micro-batches each update held, and the samples seen."""

    windows: tuple[int, ...]
    samples: int
    total: Tensor = field(repr=False, compare=False)
    mean_loss: bool = field(default=True, repr=False)

    @property
    def updates(self) -> int:
        """How often the optimizer was asked to update."""
        return len(self.windows)

    @property
    def loss(self) -> float:
        """The loss over all samples, each taken with the weights of its window.

        The mean over the samples, or their sum where `mean_loss` was False. Reading it waits
        for the device.
        """
        total = float(self.total)
        return total / self.samples if self.mean_loss else total


def count_samples(inputs: Any, targets: Any) -> int:  # noqa: ARG001 - others count in targets
    """Count what a loss usually averages over: the samples of the micro-batch."""
    return batch_length(inputs)


def accumulate(
    model: nn.Module, batches: Iterable[Batch], loss_function: Loss,
    optimizer: torch.optim.Optimizer, *, window: int = 4, clip_norm: float | None = None,
    mean_loss: bool = True, count: Count = count_samples, autocast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Accumulated:  # fmt: skip
    """Train on micro-batches, updating once per window as if the window were one batch.

    A shorter last window is an update too. Gradients are clipped once, at the update. No
    gradient is there at the beginning or left at the end, whatever happens. After an error the
    earlier windows' updates stand, and buffers, modes and random numbers are as before the
    failed window; only an error inside the optimizer's own update can leave that half done
    (`state.save_state` before and `state.restore_state` after undo it).

    A model in DistributedDataParallel sends gradients once per window, and every rank's samples
    weigh the same, however many each rank has. All ranks need equally many windows. What is
    returned is this rank's own.

    Args:
        batches: micro-batches `(inputs, targets)`; they are moved to the model's device.
        window: micro-batches per update; so many are held at a time.
        clip_norm: largest norm of the whole gradient; None does not clip.
        mean_loss: whether the loss is a mean over what `count` counts; False for a sum.
        count: how many terms a micro-batch's mean is over, such as tokens that are not
            padding; samples by default. A micro-batch that counts 0 is passed over.
        autocast: torch.bfloat16 or torch.float16, for the forward pass alone.
        scaler: for float16; an update that it leaves out still counts as one.

    Raises:
        InputError: a window, norm, `autocast`, optimizer or count that makes no sense, a batch
            that is no pair `(inputs, targets)`, no batches at all or only empty ones, or ranks
            with more windows than others (then on all ranks).
    """
    size, norm = checks.checked_window(window), checks.checked_norm(clip_norm)
    checks.check_choices(autocast, count)
    checks.check_optimizer(model, optimizer)
    job = _Job(model, loss_function, optimizer, norm, mean_loss, autocast, scaler)
    return _accumulated(job, _groups(batches, size, count))


def _accumulated(job: _Job, groups: Iterable[list[Counted]]) -> Accumulated:
    windows, samples, total = [], 0, torch.zeros((), dtype=torch.float64, device=job.device)
    group: list[Counted] | None = None
    for group in groups:
        if group:
            total += job.run(group)
            windows.append(len(group))
            samples += sum(terms for _, terms in group)
    over_ranks(job.model, 0, job.device)
    if group is None:
        raise InputError("batches: got none; give at least one (a generator is empty after use)")
    if not windows:
        raise InputError("batches: all are empty, counting 0; give at least one with samples")
    return Accumulated(tuple(windows), samples, total, job.mean_loss)


@dataclass(frozen=True)
class _Job:
    """What all windows have in common."""

    model: nn.Module
    loss_function: Loss
    optimizer: torch.optim.Optimizer
    clip_norm: float | None
    mean_loss: bool
    autocast: torch.dtype | None
    scaler: torch.amp.GradScaler | None

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def run(self, group: list[Counted]) -> Tensor:
        """Do one window and its update; return the sum of the losses of all its terms."""
        terms, ranks = over_ranks(self.model, sum(own for _, own in group), self.device)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with _traceless(self.model, self.optimizer, self.scaler):
            for number, (batch, own) in enumerate(group, start=1):
                # DistributedDataParallel sends gradients with the last micro-batch only.
                with _quiet(self.model, number < len(group)):
                    loss = self._loss(batch)
                    share = loss * (own / terms if self.mean_loss else ranks)
                    (share if self.scaler is None else self.scaler.scale(share)).backward()
                total += loss.detach() * (own if self.mean_loss else 1)
            self._update()
        return total

    def _loss(self, batch: Batch) -> Tensor:
        inputs, targets = to_device(batch[0], self.device), to_device(batch[1], self.device)
        # Around the forward pass alone: a longer block would go on using casts of old weights.
        with _autocast(self.device, self.autocast):
            return self.loss_function(call_model(self.model, inputs), targets)

    def _update(self) -> None:
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            groups = self.optimizer.param_groups
            nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], self.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def over_ranks(model: nn.Module, terms: int, device: torch.device) -> tuple[float, int]:
    """Return how many terms a rank has on average in this window, and how many ranks there are.

    DistributedDataParallel takes the mean of the ranks' gradients: right only with the terms of
    a mean rank below, not those of each rank's own. Without it there is one rank.

    Raises:
        InputError: some ranks have no window left and some have, on all ranks.
    """
    if not isinstance(model, DistributedDataParallel):
        return terms, 1
    ranks = dist.get_world_size(model.process_group)
    seen = torch.tensor([terms, terms > 0], dtype=torch.float64, device=device)
    dist.all_reduce(seen, group=model.process_group)
    whole, going = seen.tolist()
    if going not in (0, ranks):
        raise InputError(
            f"batches: {going:.0f} of {ranks} ranks have micro-batches left and the others none; "
            "give every rank equally many windows"
        )
    return whole / ranks, ranks


def micro_batches(inputs: Any, targets: Any, size: int) -> list[Batch]:
    """Split a batch into micro-batches of at most `size` samples, views of the same memory.

    Args:
        inputs: a tensor, or a tuple, named tuple, list or mapping of tensors with equal first
            dimensions.
        targets: likewise, with the same first dimension.
        size: a whole number of at least 1.

    Raises:
        InputError: a size that is none, anything but tensors, or first dimensions that differ.
    """
    size = checks.checked_size(size)
    checks.check_lengths(inputs, targets)
    return list(zip(_split(inputs, size), _split(targets, size), strict=True))


def _split(value: Any, size: int) -> Sequence[Any]:
    if isinstance(value, Tensor):
        return torch.split(value, size)
    if isinstance(value, Mapping):
        parts = zip(*(_split(item, size) for item in value.values()), strict=True)
        return [dict(zip(value, part, strict=True)) for part in parts]
    return [rebuilt(value, part) for part in zip(*(_split(i, size) for i in value), strict=True)]


def _groups(batches: Iterable[Batch], window: int, count: Count) -> Iterator[list[Counted]]:
    """Gather the micro-batches of each window, each with what its loss averages over.

    Those that count 0 are left out, so a window may be empty.
    """
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise InputError(f"batches: got {described(batches)}; must be pairs (inputs, targets)")
    waiting = iter(batches)
    while taken := list(islice(waiting, window)):
        counted = [(pair, checks.checked_terms(count(*pair))) for pair in map(as_pair, taken)]
        yield [(pair, terms) for pair, terms in counted if terms]


def _autocast(device: torch.device, kind: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if kind is None else torch.autocast(device.type, dtype=kind)


def _quiet(model: nn.Module, quiet: bool) -> AbstractContextManager[Any]:
    no_sync = getattr(model, "no_sync", None)
    return no_sync() if quiet and no_sync is not None else nullcontext()


@contextmanager
def _traceless(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None
) -> Iterator[None]:
    """Begin and end without gradients; after an error put back all but the update itself."""
    _drop_gradients(model, optimizer)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    chance = random_state()
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # a lost device refuses; its own error comes first
            _put_back(buffers, modes, chance, scaler)
        raise
    finally:
        _drop_gradients(model, optimizer)


def _put_back(
    buffers: list[tuple[Tensor, Tensor]], modes: list[tuple[nn.Module, bool]],
    chance: dict[str, Any], scaler: torch.amp.GradScaler | None,
) -> None:  # fmt: skip
    for module, training in modes:
        module.training = training
    restore_random_state(chance)
    with torch.no_grad():
        for buffer, kept in buffers:
            write_values(buffer, kept)
    if scaler is not None and scaler.is_enabled():
        with suppress(AssertionError):  # nothing was scaled yet
            scaler.update(scaler.get_scale())  # forgets that gradients were unscaled already


def _drop_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad(set_to_none=True)
    optimizer.zero_grad(set_to_none=True)
