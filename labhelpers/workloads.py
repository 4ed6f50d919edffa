"""What is trained: FashionCNN, models by import path, batches, loss, optimizer."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labhelpers.inputs import InputError, shown

FASHION_PARAMETERS = 105_866
FASHION_CLASSES = 10
FASHION_SHAPE = (1, 28, 28)

Batch = tuple[Any, Any]
MakeBatch = Callable[[int, torch.device], Batch]
MakeLoader = Callable[[int, int], Iterable[Batch]]
Loss = Callable[[Any, Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]

_DEEPEST = 100  # no batch nests so deep, except a list that holds itself


def adam(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Return torch's Adam with its defaults, as both articles use it."""
    return torch.optim.Adam(parameters, lr=learning_rate)


@dataclass(frozen=True)
class Workload:
    """One training job: everything needed to run a step at any batch size.

    Args:
        name: how results call it.
        make_model: returns a new model on the CPU.
        make_batch: `(batch_size, device) -> (inputs, targets)`, synthetic, on the device;
            inputs may be a tensor, a tuple (positional) or a mapping (by keyword).
        loss: `(outputs, targets) -> scalar tensor`.
        make_optimizer: `(parameters, learning_rate) -> optimizer`.
        make_loader: `(batch_size, seed) -> iterable of (inputs, targets)`, one epoch; None if
            there is no data behind it.
        dataset_size: how many samples an epoch has; None if unknown.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: MakeBatch
    loss: Loss = nn.functional.cross_entropy
    make_optimizer: MakeOptimizer = adam
    make_loader: MakeLoader | None = None
    dataset_size: int | None = None


def batch_of(workload: Workload, batch_size: int, device: torch.device) -> Batch:
    """Return one made-up batch of a workload: inputs and targets.

    Raises:
        TypeError: its `make_batch` returns something else than such a pair.
    """
    made = workload.make_batch(batch_size, device)
    if isinstance(made, tuple | list) and len(made) == 2:
        return made[0], made[1]
    count = f" of {len(made)}" if isinstance(made, tuple | list) else ""
    raise TypeError(
        f"make_batch returned a {type(made).__name__}{count}; must be a pair (inputs, targets), "
        "where several inputs are a tuple (by position) or a mapping (by keyword)"
    )


def fashion_cnn() -> nn.Sequential:
    """Return the first article's CNN: (N, 1, 28, 28) float32 -> (N, 10) logits."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(),
        nn.Linear(64, FASHION_CLASSES),
    )  # fmt: skip
    found = count_parameters(model)
    if found != FASHION_PARAMETERS:
        raise AssertionError(f"FashionCNN has {found:,} parameters, not {FASHION_PARAMETERS:,}")
    return model


def count_parameters(model: nn.Module) -> int:
    """Count the elements of all parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def image_batches(shape: tuple[int, ...], classes: int) -> MakeBatch:
    """Return a maker of random images (N, *shape) float32 and labels (N,) int64."""

    def make_batch(batch_size: int, device: torch.device) -> Batch:
        images = torch.rand((batch_size, *shape), device=device)
        return images, torch.randint(classes, (batch_size,), device=device)

    return make_batch


def fashion_workload() -> Workload:
    """Return the first article's job; its images come from a feed, not from the workload."""
    return Workload("fashion_cnn", fashion_cnn, image_batches(FASHION_SHAPE, FASHION_CLASSES))


def workload_from(
    reference: str, *, input_shape: tuple[int, ...] | None = None, classes: int | None = None
) -> Workload:
    """Build a workload from its name, an import path or a file.

    `reference` is `fashion_cnn`, `package.module:name` or `file.py:name`, where the name is a
    `Workload`, a function that returns a `Workload`, or a function or class that returns a
    model (then `input_shape`, without the batch, and `classes` are needed).

    Raises:
        InputError: it cannot be imported, or is none of these.
    """
    if reference == "fashion_cnn":
        return fashion_workload()
    found = _load(reference)
    is_class = isinstance(found, type) and issubclass(found, nn.Module)
    if is_class or _is_model_factory(reference):
        return _model_workload(reference, found, input_shape, classes)
    made = found if isinstance(found, (Workload, nn.Module)) else _call(reference, found)
    if isinstance(made, Workload):
        return made
    if isinstance(made, nn.Module):
        return _model_workload(reference, found, input_shape, classes)
    raise InputError(
        f"{reference} gives {type(made).__name__}; a Workload, or a function or class that "
        "returns a torch model, is expected"
    )


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with a tensor, a tuple (positional) or a mapping (by keyword).

    Raises:
        InputError: the inputs are text, which would fall into its letters.
    """
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, (str, bytes)):
        raise no_tensor("inputs", inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def to_device(value: Any, device: torch.device) -> Any:
    """Move a tensor, or a tuple, list or mapping of them, without waiting for the copy."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return rebuilt(value, (to_device(item, device) for item in value))
    return value


def rebuilt(value: Any, items: Iterable[Any]) -> Any:
    """Return the items in a tuple, named tuple or list of the type that `value` has."""
    make = getattr(value, "_make", type(value))  # a named tuple wants its fields one by one
    return make(items)


def batch_length(inputs: Any) -> int:
    """Return how many samples a batch holds: the first dimension of its first tensor.

    Raises:
        InputError: what comes first is no tensor, such as text, or a tensor without dimensions.
    """
    found = inputs
    for _ in range(_DEEPEST):
        if isinstance(found, Tensor) and found.ndim:
            return len(found)
        single = isinstance(found, (str, bytes)) or hasattr(found, "__array__")
        if single or not isinstance(found, Collection) or not len(found):
            break
        found = next(iter(found.values() if isinstance(found, Mapping) else found))
    raise no_tensor("inputs", found)


def as_pair(batch: Any) -> Batch:
    """Return the inputs and targets of a batch.

    Raises:
        InputError: it is no tuple or list of two, such as a mapping, a bare tensor or text.
    """
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)) and len(batch) == 2:
        return batch[0], batch[1]
    raise InputError(
        f"batches: got {described(batch)}; each batch must be a pair (inputs, targets), where "
        "inputs may be a mapping of tensors"
    )


def no_tensor(name: str, found: Any) -> InputError:
    """Return the error for a value that stands where a tensor with samples is needed."""
    return InputError(
        f"{name}: got {described(found)} where a tensor is needed whose first dimension counts "
        "the samples; give a tensor, or a tuple, list or mapping of tensors"
    )


def described(value: Any) -> str:
    """Say in a few words what a value is: a tensor by its shape, others by type and content."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {shown(list(value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {shown(value)}"


def _model_workload(
    reference: str, factory: Any, shape: tuple[int, ...] | None, classes: int | None
) -> Workload:
    if not shape or not classes:
        raise InputError(
            f"{reference} is a model; its input shape and number of classes are needed too, for "
            "example --input 3,224,224 --classes 1000"
        )
    if isinstance(factory, nn.Module):
        raise InputError(f"{reference} is a model already built; give a function that builds it")
    return Workload(reference, _factory(factory, reference, classes), image_batches(shape, classes))


def _factory(factory: Any, reference: str, classes: int) -> Callable[[], nn.Module]:
    if _is_model_factory(reference):
        return lambda: factory(num_classes=classes)
    made: Callable[[], nn.Module] = factory
    return made


def _is_model_factory(reference: str) -> bool:
    """Tell whether the name is from a library whose models take `num_classes`."""
    return reference.split(":")[0].split(".")[0] in {"torchvision", "timm"}


def _load(reference: str) -> Any:
    path, _, name = reference.rpartition(":")
    if not path or not name:
        raise InputError(
            f"workload {reference!r} is not known; use 'fashion_cnn', 'package.module:name' or "
            "'file.py:name'"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # a module beside the reader, as `python -m` finds it
    try:
        module = _load_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except Exception as error:
        raise InputError(
            f"cannot import {path}: {type(error).__name__}: {error}; check the path and that it "
            "is installed"
        ) from error
    if not hasattr(module, name):
        raise InputError(f"{path} has no {name!r}; check the name after the colon")
    return getattr(module, name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _call(reference: str, function: Any) -> Any:
    if not callable(function):
        return function
    try:
        return function()
    except Exception as error:
        raise InputError(f"{reference}() failed: {type(error).__name__}: {error}") from error
