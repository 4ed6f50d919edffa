"""What is trained: FashionCNN to the parameter, models by name, batches of any form."""

from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from labhelpers.inputs import InputError
from labhelpers.workloads import (
    FASHION_PARAMETERS,
    Workload,
    as_pair,
    batch_length,
    call_model,
    count_parameters,
    fashion_cnn,
    fashion_workload,
    to_device,
    workload_from,
)

CPU = torch.device("cpu")
MODULE = """
import torch
from torch import nn
from labhelpers.workloads import Workload, image_batches

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x.flatten(1))

def make_net():
    return Net()

def make_workload():
    return Workload("mine", Net, image_batches((4,), 3))

ready = make_workload()
built = Net()
number = 5

def broken():
    raise ValueError("line one\\nline two")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    return path


def test_the_articles_model_has_its_parameters_and_shapes():
    model = fashion_cnn()
    assert count_parameters(model) == FASHION_PARAMETERS == 105_866
    assert model(torch.rand(7, 1, 28, 28)).shape == (7, 10)


def test_the_articles_job_makes_batches_and_steps():
    job = fashion_workload()
    images, labels = job.make_batch(5, CPU)
    assert (images.shape, images.dtype) == ((5, 1, 28, 28), torch.float32)
    assert (labels.shape, labels.dtype) == ((5,), torch.int64)
    loss = job.loss(job.make_model()(images), labels)
    loss.backward()
    assert job.make_loader is None


def test_equal_seeds_give_equal_weights():
    torch.manual_seed(42)
    first = fashion_cnn().state_dict()
    torch.manual_seed(42)
    assert all(
        torch.equal(value, first[name]) for name, value in fashion_cnn().state_dict().items()
    )


@pytest.mark.parametrize("name", ["Net", "make_net"])
def test_a_model_by_file_and_name_needs_its_shape_and_classes(file, name):
    job = workload_from(f"{file}:{name}", input_shape=(4,), classes=3)
    inputs, targets = job.make_batch(2, CPU)
    assert job.loss(job.make_model()(inputs), targets).ndim == 0
    with pytest.raises(InputError, match="its input shape and number of classes are needed too"):
        workload_from(f"{file}:{name}")


@pytest.mark.parametrize("name", ["make_workload", "ready"])
def test_a_workload_by_file_and_name(file, name):
    assert workload_from(f"{file}:{name}").name == "mine"


def test_a_model_of_torchvision_by_path():
    job = workload_from("torchvision.models:squeezenet1_1", input_shape=(3, 64, 64), classes=7)
    inputs, _ = job.make_batch(2, CPU)
    assert job.make_model()(inputs).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "has no 'nothing'; check the name after the colon"),
        ("number", "gives int; a Workload, or a function or class that returns a torch model"),
        ("built", "is a model already built; give a function that builds it"),
        ("broken", "() failed: ValueError: line one line two"),
    ],
)
def test_a_name_that_gives_no_workload_is_one_line(file, name, said):
    with pytest.raises(InputError) as caught:
        workload_from(f"{file}:{name}", input_shape=(4,), classes=3)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("resnet", "workload 'resnet' is not known; use 'fashion_cnn', 'package.module:name'"),
        ("no.such.module:net", "cannot import no.such.module: ModuleNotFoundError"),
        ("nowhere/mine.py:net", "cannot import nowhere/mine.py: FileNotFoundError"),
        (":net", "is not known"),
        ("mine.py:", "is not known"),
    ],
)
def test_a_reference_that_leads_nowhere_is_one_line(reference, said):
    with pytest.raises(InputError) as caught:
        workload_from(reference)
    assert said in str(caught.value)


def test_a_file_that_does_not_compile_is_one_line(tmp_path):
    (tmp_path / "bad.py").write_text("def (:\n")
    with pytest.raises(InputError) as caught:
        workload_from(f"{tmp_path / 'bad.py'}:net")
    assert "SyntaxError" in str(caught.value)
    assert "\n" not in str(caught.value)


class TwoInputs(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


@pytest.mark.parametrize("form", [tuple, list, lambda pair: dict(zip("ab", pair, strict=True))])
def test_inputs_may_be_several_tensors(form):
    inputs = form([torch.ones(3, 2), torch.ones(3, 2)])
    moved = to_device(inputs, CPU)
    assert type(moved) is type(inputs)
    assert batch_length(moved) == 3
    assert torch.equal(call_model(TwoInputs(), moved), torch.full((3, 2), 2.0))


def test_a_batch_that_is_one_tensor_or_holds_other_things():
    assert batch_length(torch.zeros(4, 2)) == 4
    assert batch_length({"a": (torch.zeros(5),)}) == 5
    assert to_device(["text", 3, None], CPU) == ["text", 3, None]


Both = namedtuple("Both", "a b")


def test_named_tuples_keep_their_type():
    moved = to_device(Both(torch.ones(3), {"c": [torch.ones(3)]}), CPU)
    assert type(moved) is Both
    assert batch_length(moved) == 3


ENDLESS = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    "inputs",
    ["x", "", b"xy", ["text"], {"x": "text"}, [], {}, None, 5, torch.tensor(1.0), np.ones((2, 3)),
     np.ones(()), iter([torch.ones(2)]), ENDLESS],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_batch_without_a_tensor_has_no_length(inputs):
    with pytest.raises(InputError, match="inputs: got .* where a tensor is needed") as caught:
        batch_length(inputs)
    assert "\n" not in str(caught.value)


def test_a_model_is_not_called_with_the_letters_of_a_text():
    with pytest.raises(InputError, match="inputs: got str 'ab' where a tensor is needed"):
        call_model(TwoInputs(), "ab")


@pytest.mark.parametrize(
    "batch",
    [{"x": torch.ones(2, 3), "y": torch.ones(2, 1)}, UserDict(a=1, b=2), "xy", torch.ones(2, 3),
     [torch.ones(2)], (1, 2, 3), None, np.ones((2, 3)), {1, 2}],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_only_a_tuple_or_list_of_two_is_a_pair(batch):
    with pytest.raises(InputError, match=r"batches: got .* must be a pair \(inputs, targets\)"):
        as_pair(batch)


def test_pairs_of_any_type_are_pairs():
    for batch in ((1, 2), [1, 2], Both(1, 2)):
        assert as_pair(batch) == (1, 2)


def test_a_workload_is_frozen_and_has_defaults():
    job = Workload("x", fashion_cnn, lambda size, device: (size, device))
    assert (job.dataset_size, job.make_loader) == (None, None)
    with pytest.raises(AttributeError):
        job.name = "y"
