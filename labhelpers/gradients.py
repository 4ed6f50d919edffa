"""Catch the gradient of an update, and say how far two gradients are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Caught:
    """The gradients of the first update, on the host, in the optimizer's order of parameters.

    None until there was an update; a parameter that had no gradient has an empty tensor.
    """

    gradients: list[Tensor] | None = field(default=None, repr=False)


@contextmanager
def catch_gradients(optimizer: torch.optim.Optimizer) -> Iterator[Caught]:
    """Catch what the optimizer is given at the first update inside the block.

    That is after accumulation, clipping and, in float16, unscaling. An update that a
    `GradScaler` leaves out is none.
    """
    caught = Caught()

    def keep(given: torch.optim.Optimizer, *_: Any) -> None:
        if caught.gradients is None:
            caught.gradients = [
                torch.empty(0) if p.grad is None else p.grad.detach().to("cpu", copy=True)
                for group in given.param_groups
                for p in group["params"]
            ]

    handle = optimizer.register_step_pre_hook(keep)
    try:
        yield caught
    finally:
        handle.remove()


def relative_change(found: Sequence[Tensor], reference: Sequence[Tensor]) -> float | None:
    """Return ‖found − reference‖ / ‖reference‖ over all tensors together, in float64.

    None where the shapes differ, the reference is 0, or the result is not finite.
    """
    if [tensor.shape for tensor in found] != [tensor.shape for tensor in reference]:
        return None
    pairs = zip(found, reference, strict=True)
    moved = math.fsum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    length = math.fsum(float(b.double().square().sum()) for b in reference)
    change = math.sqrt(moved / length) if length > 0 and math.isfinite(moved) else math.nan
    return change if math.isfinite(change) else None
