"""Hand a caller's model and process back exactly as they were, however the block ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from labhelpers.state import (
    TrainingState,
    random_state,
    restore_random_state,
    restore_state,
    save_state,
)

_CUDNN = ("enabled", "benchmark", "deterministic", "benchmark_limit")
_HELD = ("_parameters", "_buffers", "_modules")


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
    """Put parameters, buffers, gradients and modes back after the block, and give their state.

    A model that the block moves to another device comes back in the very tensors it had.
    """
    state, places = save_state(model), Places(model)
    try:
        yield state
    finally:
        places.put_back()
        restore_state(state, model)


class Places:
    """Which tensors and modules a model holds, so that others can be taken out again."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (module, {name: dict(getattr(module, name)) for name in _HELD})
            for module in model.modules()
        ]
        self._data = [(parameter, parameter.data) for parameter in model.parameters()]

    def put_back(self) -> None:
        """Put the tensors back where they were; gradients, which may lie elsewhere, go."""
        for module, held in self._held:
            for name, entries in held.items():
                kept = getattr(module, name)
                kept.clear()
                kept.update(entries)
        for parameter, data in self._data:
            parameter.grad = None
            parameter.data = data


def _precisions() -> dict[str, Any]:
    backends: Any = torch.backends
    return {
        "matmul": backends.cuda.matmul,
        "convolution": backends.cudnn.conv,
        "rnn": backends.cudnn.rnn,
    }
