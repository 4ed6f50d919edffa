"""Everything a search must hand back, as one dictionary of hashes and values."""

import copy
import hashlib
import pickle
import random
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from labhelpers.handback import read_settings
from labhelpers.workloads import Workload

FEATURES = 8


class Trained:
    """A model that has been trained, with its optimizer, on a device.

    Everything is where a default would not put it: a layer in eval mode, a frozen parameter,
    gradients on some parameters only, hooks on a module and a tensor, an expanded buffer,
    statistics and moments from real steps.
    """

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8),
            nn.Linear(8, 2),
        ).to(device)  # fmt: skip
        self.model.register_buffer("note", torch.arange(3.0, device=device), persistent=False)
        self.model.register_buffer("mask", torch.ones(1, device=device).expand(5))
        self.model[3].weight.requires_grad_(False)
        self.model[3].register_forward_hook(unchanged)
        self.model[4].weight.register_hook(unchanged)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        for _ in range(3):
            self.optimizer.zero_grad()
            self.model(torch.rand(6, FEATURES, device=device)).square().mean().backward()
            self.optimizer.step()
        self.model[2].eval()
        self.model[0].bias.grad = None

    def facts(self) -> dict[str, Any]:
        """Hash every byte; identities and modes as they are."""
        parameters = dict(self.model.named_parameters())
        tensors = {**parameters, **dict(self.model.named_buffers())}
        gradients = {f"{name}.grad": value.grad for name, value in parameters.items()}
        return {
            **{name: hashed(tensor) for name, tensor in (tensors | gradients).items()},
            **{f"{name} is": (id(tensor), tensor.data_ptr()) for name, tensor in tensors.items()},
            **{f"{name} trains": p.requires_grad for name, p in parameters.items()},
            **{f"{name} hooks": hooks_of(module) for name, module in self.model.named_modules()},
            **{f"{name} hooks": hooks_of(tensor) for name, tensor in tensors.items()},
            **{f"{name} mode": module.training for name, module in self.model.named_modules()},
            "optimizer": hashed(self.optimizer.state_dict()),
            **process_facts(),
        }


class Disturbing(nn.Module):
    """Wrap a model in one that also changes what belongs to the process, and may fail.

    It draws random numbers and leaves other settings behind; its forward registers a buffer and
    hooks, freezes a parameter and writes into an expanded buffer. `failing` is raised from the
    second step on; "slow" makes every step slow.
    """

    def __init__(self, model: nn.Module, failing: str | None = None) -> None:
        super().__init__()
        self.inner, self.failing, self.calls = model, failing, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        random.random()
        np.random.rand()
        torch.rand(3, device=inputs.device)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.set_default_dtype(torch.float64)
        self.register_buffer("late", torch.zeros(1, device=inputs.device))
        for module in self.inner.modules():
            leave_hooks(module)
        for parameter in list(self.inner.parameters())[:1]:
            parameter.requires_grad_(False)
        if "mask" in dict(self.inner.named_buffers()):
            self.inner.mask[:1] += 1
        if self.failing == "slow":
            time.sleep(0.1)
        elif self.failing and self.calls > 1:
            failures = {
                "error": LookupError("broken"), "stop": KeyboardInterrupt(),
                "oom": MemoryError("made up"),
            }  # fmt: skip
            raise failures[self.failing]
        return self.inner(inputs)


def unchanged(*_: Any) -> None:
    """Be a hook of any kind that changes nothing."""


def leave_hooks(module: nn.Module) -> None:
    """Register a hook of every kind on a module and on its trained parameters."""
    module.register_forward_hook(unchanged, with_kwargs=True, always_call=True)
    module.register_forward_pre_hook(unchanged, with_kwargs=True)
    module.register_full_backward_hook(unchanged)
    module.register_full_backward_pre_hook(unchanged)
    module.register_state_dict_post_hook(unchanged)
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            parameter.register_hook(unchanged)
            parameter.register_post_accumulate_grad_hook(unchanged)


def hooks_of(owner: nn.Module | torch.Tensor) -> dict[str, Any]:
    """Return the hooks of a module or tensor, by where they are kept."""
    if isinstance(owner, torch.Tensor):
        names = ["_backward_hooks", "_post_accumulate_grad_hooks"]
    else:
        names = [name for name in vars(owner) if "_hook" in name]
    return {name: copy.copy(getattr(owner, name)) for name in names}


def job(trained: Trained, failing: str | None = None, own_optimizer: bool = False) -> Workload:
    """Return a workload whose model is the trained one, and its optimizer too if asked."""

    def make_batch(batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        kind = {"device": device, "dtype": torch.float32}
        return torch.rand(batch_size, FEATURES, **kind), torch.rand(batch_size, 2, **kind)

    def make_optimizer(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
        return trained.optimizer if own_optimizer else torch.optim.Adam(parameters)

    return Workload(
        "disturbing", lambda: Disturbing(trained.model, failing), make_batch,
        nn.functional.mse_loss, make_optimizer,
    )  # fmt: skip


def process_facts() -> dict[str, Any]:
    """Return random numbers of every generator in use, and the process-wide settings."""
    started = torch.cuda.is_initialized()
    return {
        "python": hashed(random.getstate()),
        "numpy": hashed(np.random.get_state()),
        "torch": hashed(torch.get_rng_state()),
        "cuda": [hashed(state) for state in torch.cuda.get_rng_state_all()] if started else None,
        "device": torch.cuda.current_device() if started else None,
        "settings": read_settings(),
        "grad": torch.is_grad_enabled(),
    }


def hashed(value: Any) -> str | None:
    """Hash a value with all tensors in it, bit by bit."""
    return None if value is None else hashlib.sha256(pickle.dumps(_plain(value))).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), str(value.device), tuple(value.shape), data.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the names of what is not as it was."""
    names = before.keys() | after.keys()
    return {name for name in names if before.get(name) != after.get(name)}
