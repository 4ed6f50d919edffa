"""Refuse what gradients cannot be accumulated with, in one line, before anything is trained."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from labhelpers.inputs import InputError, shown, to_integer, to_number
from labhelpers.workloads import no_tensor

_WHOLE = f"a whole number of at least 1 and at most {sys.maxsize:,}"

AUTOCAST_KINDS = (torch.bfloat16, torch.float16)
"""What the forward pass may compute in, besides the precision that the model has."""


def checked_window(window: Any) -> int:
    """Return how many micro-batches an update holds; InputError for what is no such number."""
    size = _whole(window)
    if size is None or not 1 <= size <= sys.maxsize:
        raise InputError(f"window: got {shown(window)}; must be {_WHOLE}")
    return size


def checked_norm(clip_norm: Any) -> float | None:
    """Return the largest norm, None for none; InputError for what is no number above 0."""
    if clip_norm is None:
        return None
    try:
        norm = to_number(clip_norm)
    except ValueError:
        norm = math.nan
    if not norm > 0:
        raise InputError(f"clip_norm: got {shown(clip_norm)}; must be a number above 0, or None")
    return norm


def check_choices(kind: Any, count: Any) -> None:
    """Refuse an autocast of another kind, and a count that is no function."""
    if not callable(count):
        raise InputError(f"count: got {shown(count)}; must be a function of inputs and targets")
    if kind is not None and not any(kind is allowed for allowed in AUTOCAST_KINDS):
        names = ", ".join(map(str, AUTOCAST_KINDS))
        raise InputError(f"autocast: got {shown(kind)}; must be one of {names}, or None")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose updates could not change the model."""
    own = {id(parameter) for parameter in model.parameters()}
    groups = getattr(optimizer, "param_groups", ())
    if not any(id(parameter) in own for group in groups for parameter in group["params"]):
        raise InputError(
            f"optimizer: this {type(optimizer).__name__} holds none of the model's parameters; "
            "make it from the model.parameters() of the model that is trained"
        )


def checked_terms(found: Any) -> int:
    """Return what a micro-batch counts; InputError for what is no whole number from 0."""
    terms = _whole(found)
    if terms is None or terms < 0:
        raise InputError(
            f"count: gave {shown(found)} for a micro-batch; must give a whole number from 0, of "
            "what its loss is a mean over"
        )
    return terms


def checked_size(size: Any) -> int:
    """Return the samples of a micro-batch; InputError for what is no integer of at least 1."""
    try:
        found = 0 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        found = 0
    if not 1 <= found <= sys.maxsize:
        raise InputError(f"size: got {shown(size)}; must be {_WHOLE}")
    return found


def check_lengths(inputs: Any, targets: Any) -> None:
    """Refuse anything but tensors, and first dimensions that differ."""
    lengths = [*_lengths("inputs", inputs), *_lengths("targets", targets)]
    if len(set(lengths)) > 1:
        raise InputError(
            f"inputs and targets: their first dimensions are {shown(lengths)}; all must be equal, "
            "the number of samples"
        )


def _lengths(name: str, value: Any) -> list[int]:
    """Return the first dimensions of all tensors of a value, in order; at least one."""
    if isinstance(value, Tensor) and value.ndim:
        return [len(value)]
    if not isinstance(value, (tuple, list, Mapping)) or not value:
        raise no_tensor(name, value)
    items = value.values() if isinstance(value, Mapping) else value
    return [length for item in items for length in _lengths(name, item)]


def _whole(value: Any) -> int | None:
    """Return a number, text or tensor of one whole number as an integer; None for any other."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        return None
    try:
        return to_integer(value)
    except ValueError:
        return None
