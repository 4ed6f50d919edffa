"""Hand a caller's model and process back exactly as they were, however the block ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from labhelpers.inputs import InputError
from labhelpers.state import (
    TrainingState,
    random_state,
    restore_random_state,
    restore_state,
    save_state,
)

_CUDNN = ("enabled", "benchmark", "deterministic", "benchmark_limit")
_HELD = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, (dict, set)))
"""Where a module keeps parameters, buffers, modules and hooks of every kind."""
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def read_settings() -> dict[str, Any]:
    """Return the process-wide settings that a step's memory depends on, JSON-able.

    Default dtype, cuDNN's flags, FP32 precisions and deterministic algorithms. The older
    `allow_tf32` switches are not read: they raise once the newer ones are in use.
    """
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "cudnn": {name: getattr(torch.backends.cudnn, name) for name in _CUDNN},
        "fp32_precision": {name: place.fp32_precision for name, place in _precisions().items()},
        "deterministic": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
    }


def apply_settings(settings: dict[str, Any]) -> None:
    """Put the settings back to what `read_settings` returned; what is equal is not touched."""
    now = read_settings()
    if now["default_dtype"] != settings["default_dtype"]:
        torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    for name, value in settings["cudnn"].items():
        if now["cudnn"][name] != value:
            setattr(torch.backends.cudnn, name, value)
    for name, value in settings["fp32_precision"].items():
        if now["fp32_precision"][name] != value:
            _precisions()[name].fp32_precision = value
    if now["deterministic"] != settings["deterministic"]:
        enabled, warn_only = settings["deterministic"]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@contextmanager
def process_handed_back() -> Iterator[None]:
    """Put settings, random numbers and the current device back after the block.

    A CUDA device that the block is to use must have been started before: its random numbers
    exist only from then on.
    """
    settings, numbers = read_settings(), random_state()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        apply_settings(settings)
        restore_random_state(numbers)
        if device is not None:
            torch.cuda.set_device(device)


@contextmanager
def model_handed_back(model: nn.Module) -> Iterator[TrainingState]:
    """Put a model back after the block, and give its state.

    That is its parameters, buffers, gradients, modes, hooks, and what of it is trained. A model
    that the block moves to another device comes back in the very tensors it had.

    Raises:
        InputError: it could not be put back, or not be trained; nothing was done then.
    """
    check_returnable(model)
    state, places = save_state(model), Places(model)
    try:
        yield state
    finally:
        try:
            places.put_back()
        finally:
            restore_state(state, model)


def check_returnable(model: nn.Module) -> None:
    """Refuse a model that could not be handed back after a training step.

    Raises:
        InputError: a part of it is a ScriptModule, or one of its tensors an inference tensor.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"model: {name or 'it'} is a ScriptModule, whose tensors and hooks cannot be put "
                "back as they were; search with the eager model that it was made from"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise InputError(
                f"model: {name} is an inference tensor, which cannot be trained; build the model "
                "outside torch.inference_mode()"
            )


class Places:
    """Which tensors, modules and hooks a model holds, so that others can be taken out again."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (module, {name: copy(getattr(module, name)) for name in _HELD})
            for module in model.modules()
        ]
        self._full_hooks = [(module, module._is_full_backward_hook) for module in model.modules()]
        self._tensors = [_TensorPlace(t) for t in (*model.parameters(), *model.buffers())]

    def put_back(self) -> None:
        """Put all back where it was; gradients of parameters, which may lie elsewhere, go."""
        for module, held in self._held:
            for name, entries in held.items():
                _refill(getattr(module, name), entries)
        for module, full in self._full_hooks:
            module._is_full_backward_hook = full
        for place in self._tensors:
            place.put_back()


class _TensorPlace:
    """Where a tensor's data lie, whether it is trained, and its hooks."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._data, self._trained = tensor, tensor.data, tensor.requires_grad
        hooks = {name: getattr(tensor, name) for name in _TENSOR_HOOKS}
        self._hooks = {name: (kept, copy(kept)) for name, kept in hooks.items()}

    def put_back(self) -> None:
        tensor: Any = self._tensor
        if isinstance(tensor, nn.Parameter):
            tensor.grad = None
        tensor.data = self._data
        if not tensor.is_leaf and not self._trained:
            tensor.detach_()  # a buffer that a step drew into its graph
        elif tensor.requires_grad != self._trained:
            tensor.requires_grad_(self._trained)
        for name, (kept, entries) in self._hooks.items():
            if kept is not None:
                _refill(kept, entries)
            if getattr(tensor, name) is not kept:
                setattr(tensor, name, kept)


def _refill(kept: Any, entries: Any) -> None:
    """Give a dictionary or set its entries back; handles and others keep hold of it."""
    kept.clear()
    kept.update(entries)


def _precisions() -> dict[str, Any]:
    backends: Any = torch.backends
    return {
        "matmul": backends.cuda.matmul,
        "convolution": backends.cudnn.conv,
        "rnn": backends.cudnn.rnn,
    }
