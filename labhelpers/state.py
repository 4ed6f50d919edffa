"""Keep what a training step changes, and put it back after a step that failed half-way."""

from __future__ import annotations

import copy
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TrainingState:
    """Model, optimizer, mode, gradients and random numbers at one moment, in host memory."""

    tensors: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    modes: dict[str, bool]
    optimizer: dict[str, Any] | None
    random: dict[str, Any]


def save_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingState:
    """Copy to host memory all that a step may change, so that no device memory is taken.

    The copy is as large as parameters, buffers, gradients and optimizer state together.
    """
    tensors = {name: _once(tensor, tensor) for name, tensor in _tensors(model).items()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return TrainingState(
        tensors={name: _host_copy(tensor) for name, tensor in tensors.items()},
        gradients={name: _host_copy(gradient) for name, gradient in gradients.items()},
        modes={name: module.training for name, module in model.named_modules()},
        optimizer=None if optimizer is None else _host_copy(optimizer.state_dict()),
        random=random_state(),
    )


def restore_state(
    state: TrainingState, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Put model, optimizer, mode, gradients and random numbers back as they were saved.

    Parameters and buffers keep their identity; their values are copied in. Call it after the
    memory has been released.
    """
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            write_values(tensor, state.tensors[name])
    for name, parameter in model.named_parameters():
        gradient = state.gradients[name]
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
    for name, module in model.named_modules():
        module.training = state.modes[name]
    if optimizer is not None and state.optimizer is not None:
        # A copy, because the optimizer keeps and changes host tensors that it is given.
        optimizer.load_state_dict(copy.deepcopy(state.optimizer))
    restore_random_state(state.random)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def write_values(tensor: Tensor, saved: Tensor) -> None:
    """Copy saved values in, also where elements of the tensor share memory (a view).

    torch refuses to write to a tensor that was expanded, or whose windows overlap.
    """
    if tensor.is_nested or tensor.layout is not torch.strided:
        tensor.copy_(saved)
        return
    target, source = _once(tensor, tensor), _once(saved.expand(tensor.shape), tensor)
    if not _may_overlap(target):
        target.copy_(source)
        return
    reach = 1 + sum((n - 1) * step for n, step in zip(target.shape, target.stride(), strict=True))
    places = torch.arange(reach, device=target.device).as_strided(target.shape, target.stride())
    memory = target.as_strided((reach,), (1,))
    memory[places.reshape(-1)] = source.reshape(-1).to(target.device)


def _once(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor without what `like`, of the same shape, only repeats (`expand`)."""
    if like.is_nested or like.layout is not torch.strided:
        return tensor
    for dim, step in enumerate(like.stride()):
        if step == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _may_overlap(tensor: Tensor) -> bool:
    """Tell whether elements may share memory: a step is within what finer steps reach."""
    reach = 1
    for step, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1 and step < reach:
            return tensor.numel() > 0
        reach += (count - 1) * step
    return False


def _host_copy(value: Any) -> Any:
    """Copy tensors, in dictionaries and lists too, to host memory; other values as they are."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _host_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_host_copy(item) for item in value)
    return value


def random_state() -> dict[str, Any]:
    """Return the state of every random number generator that a step may draw from."""
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the random number generators back to what `random_state` returned."""
    random.setstate(state["python"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state_all(state["cuda"])
