"""A caller's model, optimizer and process come back bit for bit, however a search ends."""

import os
import signal
import threading
import time
import warnings

import pytest
import torch
from handing_back import FEATURES, Disturbing, Trained, changed, hashed, job, process_facts
from torch import nn

from labhelpers.finder import find_batch_size, search_batch_size
from labhelpers.handback import (
    apply_settings,
    model_handed_back,
    process_handed_back,
    read_settings,
)
from labhelpers.inputs import InputError
from labhelpers.search import NothingFits
from labhelpers.workloads import Workload

QUICK = {"device": "cpu", "num_iterations": 3, "headroom": 0.0, "max_batch_size": 8}
ENDS = {"error": LookupError, "stop": KeyboardInterrupt, "oom": NothingFits}


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("own_optimizer", [True, False])
def test_after_a_search_that_ends_well(worker, isolate, own_optimizer):
    trained = Trained()
    before = trained.facts()
    report = search_batch_size(
        job(trained, own_optimizer=own_optimizer), worker=worker, isolate=isolate, **QUICK
    )
    assert report.largest == 8
    assert changed(before, trained.facts()) == set()


@pytest.mark.parametrize("failing", ["error", "stop", "oom"])
@pytest.mark.parametrize("own_optimizer", [True, False])
def test_after_an_error_in_the_middle_of_a_step_here(failing, own_optimizer):
    trained = Trained()
    before = trained.facts()
    with pytest.raises(ENDS[failing]):
        search_batch_size(job(trained, failing, own_optimizer), isolate=False, **QUICK)
    assert changed(before, trained.facts()) == set()


@pytest.mark.parametrize("failing", ["error", "oom"])
def test_after_an_error_in_the_worker(worker, failing):
    trained = Trained()
    before = trained.facts()
    with pytest.raises(ENDS[failing]):
        search_batch_size(job(trained, failing), worker=worker, isolate=True, **QUICK)
    assert changed(before, trained.facts()) == set()


@pytest.mark.parametrize("isolate", [True, False])
def test_after_ctrl_c_between_two_probes(worker, isolate):
    trained = Trained()
    before = trained.facts()
    with pytest.raises(KeyboardInterrupt):
        search_batch_size(
            job(trained), worker=worker, isolate=isolate, **QUICK,
            on_progress=lambda p: p.trial and signal.raise_signal(signal.SIGINT),
        )  # fmt: skip
    assert changed(before, trained.facts()) == set()


def test_after_ctrl_c_while_the_worker_is_busy(worker):
    trained = Trained()
    before = trained.facts()
    worker.warm_up()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        search_batch_size(
            job(trained), worker=worker, **{**QUICK, "max_batch_size": 10**6, "headroom": 0.5}
        )
    timer.join()
    assert changed(before, trained.facts()) == set()


def test_after_ctrl_c_in_the_middle_of_a_probe_here():
    trained = Trained()
    before = trained.facts()
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        search_batch_size(job(trained, "slow"), isolate=False, **{**QUICK, "num_iterations": 200})
    assert time.monotonic() - started < 10  # the steps end, they are not waited for
    assert changed(before, trained.facts()) == set()


def test_what_is_compared_does_change_in_a_plain_training():
    trained = Trained()
    before = trained.facts()
    trained.optimizer.zero_grad()
    trained.model.train()(torch.rand(6, FEATURES)).square().mean().backward()
    trained.optimizer.step()
    different = changed(before, trained.facts())
    assert {
        "0.weight",
        "0.weight.grad",
        "1.running_mean",
        "2 mode",
        "optimizer",
        "torch",
    } <= different


@pytest.mark.parametrize("isolate", [None, False])
def test_the_articles_function_hands_the_model_back(isolate):
    trained = Trained()
    before = trained.facts()
    found = find_batch_size(
        trained.model, (FEATURES,), (2,), 16, "cpu", num_iterations=3, isolate=isolate
    )
    assert found == 16
    assert changed(before, trained.facts()) == set()


def test_a_caller_without_gradients_is_not_disturbed():
    trained = Trained()
    with torch.no_grad():
        before = trained.facts()
        assert find_batch_size(trained.model, (FEATURES,), (2,), 4, "cpu", isolate=False) == 4
        assert changed(before, trained.facts()) == set()


def test_the_callers_settings_hold_in_the_trials():
    """What the caller chose, here the default dtype, is what its training will run with."""
    kinds = []

    class Noting(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            kinds.append((inputs.dtype, torch.is_grad_enabled(), self.training))
            return super().forward(inputs)

    before = read_settings()
    torch.set_default_dtype(torch.float64)
    try:
        model = Noting(2, 2).eval()
        assert find_batch_size(model, (2,), (2,), 2, "cpu", isolate=False) == 2
        assert not model.training
    finally:
        apply_settings(before)
    assert set(kinds) == {(torch.float64, True, True)}


def test_the_precision_asked_for_is_set_in_the_trials_and_gone_afterwards():
    before = read_settings()
    report = search_batch_size(job(Trained()), isolate=False, precision="tf32", **QUICK)
    assert {trial.precision_before["both"] for trial in report.trials} == {"tf32"}
    assert read_settings() == before


def test_a_model_comes_back_in_the_tensors_it_had():
    """Moved to another device (here one that holds no data) and back: the very same storage."""
    trained = Trained()
    before = trained.facts()
    with model_handed_back(trained.model):
        trained.model.to("meta")
        trained.model.add_module("new", nn.Linear(1, 1))
    assert changed(before, trained.facts()) == set()


def test_settings_are_read_and_put_back():
    before = read_settings()
    Disturbing(nn.Identity())(torch.zeros(1))
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert read_settings() != before
    apply_settings(before)
    assert read_settings() == before
    assert process_facts()["settings"] == before


# Models that are hard to put back


class Leaving(nn.Linear):
    """Leave buffers behind in other ways than by writing into them."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("grown", torch.zeros(2))
        self.register_buffer("graph", torch.zeros(2))
        self.register_buffer("windows", torch.arange(5.0).unfold(0, 3, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        self.grown.set_(torch.ones(9))
        self.graph.detach_().add_(outputs.mean(0))
        self.windows[0] += 1
        self.register_buffer("late", torch.zeros(1), persistent=False)
        return outputs


def looks(model: nn.Module) -> dict:
    """Return every tensor of a model by its bytes, place and part in training."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        **{
            name: (hashed(t), id(t), t.data_ptr(), t.stride(), t.requires_grad, t.is_leaf)
            for name, t in tensors.items()
        },
        "not persistent": [set(m._non_persistent_buffers_set) for m in model.modules()],
    }


def test_buffers_moved_drawn_into_the_graph_or_overlapping_come_back():
    model = Leaving()
    before = looks(model)
    assert find_batch_size(model, (2,), (2,), 4, "cpu", isolate=False) == 4
    assert looks(model) == before


@pytest.mark.parametrize("isolate", [None, False])
def test_an_expanded_buffer_comes_back(isolate):
    model = nn.Linear(4, 2)
    model.register_buffer("mask", torch.zeros(1).expand(5))
    before = looks(model)
    assert find_batch_size(model, (4,), (2,), 4, "cpu", isolate=isolate) == 4
    assert looks(model) == before


def test_flags_and_hooks_set_in_forward_are_gone_after_it():
    trained = Trained()
    before = trained.facts()
    with process_handed_back(), model_handed_back(trained.model):
        Disturbing(trained.model)(torch.rand(3, FEATURES, dtype=torch.float32))
        different = changed(before, trained.facts())
        trained.model.requires_grad_(True)
    assert {"0 hooks", "4.weight hooks", "0.weight trains", "mask"} <= different
    assert changed(before, trained.facts()) == set()


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates scripting
        return torch.jit.script(nn.Linear(4, 2))


def inference_only() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(4, 2)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("isolate", [None, True, False])
@pytest.mark.parametrize(
    ("make", "told"),
    [(scripted, "is a ScriptModule"), (inference_only, "is an inference tensor")],
)
def test_what_cannot_be_handed_back_is_refused_before_a_step(make, told, isolate, wrapped):
    model = nn.Sequential(make()) if wrapped else make()
    before = {name: hashed(tensor) for name, tensor in model.state_dict().items()}
    with pytest.raises(InputError, match=told) as caught:
        find_batch_size(model, (4,), (2,), 64, "cpu", isolate=isolate)
    assert "\n" not in str(caught.value)
    assert {name: hashed(tensor) for name, tensor in model.state_dict().items()} == before


@pytest.mark.parametrize("make", [scripted, inference_only])
def test_a_workload_of_such_a_model_is_refused_too(make):
    model = make()

    def make_batch(batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        raise AssertionError("a step was prepared")

    with pytest.raises(InputError, match="model: "):
        search_batch_size(Workload("own", lambda: model, make_batch), isolate=False, **QUICK)
