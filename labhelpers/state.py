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
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return TrainingState(
        tensors={name: _host_copy(tensor) for name, tensor in _tensors(model).items()},
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
            tensor.copy_(state.tensors[name])
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
