"""Optimizers by name."""

from __future__ import annotations

from typing import Any

import torch

from labhelpers.inputs import InputError
from labhelpers.workloads import MakeOptimizer

_OTHER_STEPS = {"optimizer", "lbfgs", "sparseadam", "muon"}
"""They need a closure, sparse gradients or matrices only: not any model trains with them."""


def optimizer_named(name: str) -> MakeOptimizer:
    """Return a maker of torch's optimizer of that name, in any case, with torch's defaults.

    Raises:
        InputError: torch has none of that name that trains any model.
    """
    found = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    known = {key: found[key] for key in sorted(found.keys() - _OTHER_STEPS)}
    chosen = known.get(name.strip().lower())
    if chosen is None:
        raise InputError(f"optimizer: got {name!r}; must be one of {', '.join(known)}")
    optimizer_class: Any = chosen
    return lambda parameters, learning_rate: optimizer_class(parameters, lr=learning_rate)
