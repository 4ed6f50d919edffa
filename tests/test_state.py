"""A step that fails half-way leaves no trace once its state is put back."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from labhelpers.oom import attempt
from labhelpers.state import restore_state, save_state


class TooMuchInBackward(torch.autograd.Function):
    """Pass the input on; ask for more memory than any machine has on the way back."""

    @staticmethod
    def forward(_ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(_ctx, gradient):
        torch.empty(2**50, dtype=torch.uint8)
        return gradient


class Training:
    """A model whose step changes everything: statistics, dropout masks, moments, gradients."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], **options: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2)
        )
        self.optimizer = optimizer(self.model.parameters(), **options)

    def step(self, break_at: int | None = None) -> float:
        hidden = torch.rand(16, 8) + random.random() + np.random.rand()
        for index, layer in enumerate(self.model):
            hidden = layer(hidden)
            if index == break_at:
                hidden = TooMuchInBackward.apply(hidden)
        loss = hidden.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def half_step(self) -> None:
        self.model[2].eval()
        self.optimizer.param_groups[0]["lr"] = 9.0
        self.step(break_at=2)

    def facts(self) -> dict:
        return {
            **self.model.state_dict(),
            **{f"{name}.grad": value.grad for name, value in self.model.named_parameters()},
            **{f"{name}.mode": module.training for name, module in self.model.named_modules()},
            "groups": str(self.optimizer.state_dict()["param_groups"]),
            **{
                f"{number}.{name}": value
                for number, entry in self.optimizer.state_dict()["state"].items()
                for name, value in entry.items()
            },
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": str(np.random.get_state()),
        }


def differences(before: dict, after: dict) -> set[str]:
    def same(one, other) -> bool:
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return torch.equal(one, other) if both else one is other or one == other

    names = before.keys() | after.keys()
    return {name for name in names if not same(before.get(name), after.get(name))}


def copied(facts: dict) -> dict:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in facts.items()}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.Adam, {"lr": 1e-3}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})],
)
def test_after_an_oom_in_half_a_step_everything_is_as_before(optimizer, options, steps_before):
    training = Training(optimizer, **options)
    for _ in range(steps_before):
        training.step()
    before = copied(training.facts())
    parameters = list(training.model.parameters())
    state = save_state(training.model, training.optimizer)

    assert attempt(training.half_step).outcome == "oom"
    changed = differences(before, training.facts())
    assert {"1.running_mean", "4.weight.grad", "2.mode", "groups", "torch", "python"} <= changed
    assert "0.weight.grad" not in changed  # half a step: the gradient never came so far

    restore_state(state, training.model, training.optimizer)
    assert differences(before, training.facts()) == set()
    assert all(a is b for a, b in zip(parameters, training.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in parameters)


def test_training_goes_on_as_if_nothing_had_happened():
    losses = []
    for interrupted in (False, True):
        random.seed(1)
        np.random.seed(1)
        training = Training(torch.optim.Adam, lr=1e-3)
        losses.append([training.step()])
        if interrupted:
            state = save_state(training.model, training.optimizer)
            for _ in range(3):
                assert not attempt(training.half_step).ok
                restore_state(state, training.model, training.optimizer)
        losses[-1] += [training.step() for _ in range(4)]
    assert losses[0] == losses[1]


def test_gradients_that_were_there_come_back():
    model = nn.Linear(3, 1)
    model(torch.ones(2, 3)).sum().backward()
    gradient = model.weight.grad.clone()
    state = save_state(model)
    model.zero_grad(set_to_none=True)
    restore_state(state, model)
    assert torch.equal(model.weight.grad, gradient)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1).expand(5),
        lambda: torch.zeros(3, 1).expand(3, 4)[1:],
        lambda: torch.arange(6.0).unfold(0, 3, 2),
        lambda: torch.arange(6.0).unfold(0, 3, 1)[:, :0],
        lambda: torch.arange(6.0)[::2],
        lambda: torch.eye(3).to_sparse().coalesce(),
    ],
)
def test_buffers_of_any_layout_come_back(make):
    model = nn.Linear(1, 1)
    model.register_buffer("odd", make())
    odd, before = model.odd, model.odd.to_dense().clone()
    state = save_state(model)
    (odd.values() if odd.is_sparse else odd.as_strided((1,), (1,))).fill_(7)
    restore_state(state, model)
    assert model.odd is odd
    assert torch.equal(odd.to_dense(), before)
