"""The second article's short way: a model and two shapes make a workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from labhelpers.handback import check_returnable
from labhelpers.inputs import InputError, to_integer
from labhelpers.workloads import Batch, Workload


def shapes_workload(
    model: Any, input_shape: Sequence[int], output_shape: Sequence[int]
) -> Workload:
    """Return a workload of random inputs (N, *input_shape) and targets (N, *output_shape).

    The loss is the mean squared error, the optimizer Adam; its model is `model` itself. Inputs
    and targets have the dtype of the model's first floating-point parameter, or the default.

    Raises:
        InputError: no torch model, one that cannot be handed back, or a shape that is none.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: got {type(model).__name__}; must be a torch.nn.Module")
    check_returnable(model)
    kinds = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    kind = next(kinds, None)  # torch takes None for its default
    inputs, targets = _shape("input_shape", input_shape), _shape("output_shape", output_shape)

    def make_batch(batch_size: int, device: torch.device) -> Batch:
        shapes = (batch_size, *inputs), (batch_size, *targets)
        made = [torch.rand(shape, device=device, dtype=kind) for shape in shapes]
        return made[0], made[1]

    return Workload(type(model).__name__, lambda: model, make_batch, nn.functional.mse_loss)


def _shape(name: str, given: Sequence[int]) -> tuple[int, ...]:
    """Return a shape as whole numbers from 1; `()` is one number per sample."""
    try:
        shape = tuple(to_integer(size) for size in given)
    except (TypeError, ValueError):
        shape = (0,)
    if any(size < 1 for size in shape):
        raise InputError(
            f"{name}: got {given!r}; must be whole numbers from 1, such as (3, 224, 224)"
        )
    return shape
