"""Workloads for the finder's tests; a worker process imports them by this module's name."""

import ctypes
import os
import signal
import time
from typing import ClassVar

import torch
from torch import nn

from labhelpers.finder_room import memory_limit
from labhelpers.oom import attempt
from labhelpers.training import make_step, set_precision
from labhelpers.workloads import Workload, workload_from

FEATURES = 131_072  # a sample of 512 KiB


class Wide(nn.Module):
    """A model whose memory is its input: one parameter, FEATURES numbers a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.look_at(len(inputs))
        return (inputs * self.scale).tanh().mean(1, keepdim=True)

    def look_at(self, batch_size: int) -> None:
        """Do what a test wants done at a batch size."""


class HangsAbove4(Wide):
    def look_at(self, batch_size: int) -> None:
        if batch_size > 4:
            time.sleep(600)


class SlowAbove4(Wide):
    """Every step takes a while, so that only the time between steps can end it."""

    def look_at(self, batch_size: int) -> None:
        if batch_size > 4:
            time.sleep(1.0)


class DiesAbove4(Wide):
    def look_at(self, batch_size: int) -> None:
        if batch_size > 4:
            os.kill(os.getpid(), signal.SIGKILL)


class CrashesAbove4(Wide):
    def look_at(self, batch_size: int) -> None:
        if batch_size > 4:
            ctypes.string_at(0)


class OutOfMemoryAbove1(Wide):
    """Real out-of-memory errors above 1, and an error of its own at 1."""

    def look_at(self, batch_size: int) -> None:
        if batch_size > 1:
            torch.empty(2**50, dtype=torch.uint8)
        raise ValueError("expected more than 1 value")


class OutOfMemory(Wide):
    def look_at(self, batch_size: int) -> None:
        torch.empty(batch_size * 2**50, dtype=torch.uint8)


class FailsAbove4(Wide):
    def look_at(self, batch_size: int) -> None:
        if batch_size > 4:
            raise LookupError("five is right out")


class LibraryLimitAbove4(Wide):
    def look_at(self, batch_size: int) -> None:
        if batch_size > 4:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")


class SmallNet(nn.Sequential):
    """A small CNN for any images with three channels: five classes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip


def make_batch(batch_size: int, device: torch.device):
    return torch.rand(batch_size, FEATURES, device=device), torch.rand(batch_size, 1, device=device)


def job(make_model=Wide, **changes) -> Workload:
    """Return a workload of one of these models (not packed by value: it is imported)."""
    name = getattr(make_model, "__name__", "model")
    return Workload(name, make_model, make_batch, nn.functional.mse_loss, **changes)


def tokens() -> Workload:
    """A model with two integer inputs, given by name."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(100, 8), nn.Embedding(16, 8)
            self.last = nn.Linear(8, 100)

        def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return self.last(self.words(words) + self.places(places)).transpose(1, 2)

    def batch(batch_size: int, device: torch.device):
        words = torch.randint(100, (batch_size, 16), device=device)
        places = torch.arange(16, device=device).expand(batch_size, 16)
        return {"words": words, "places": places}, words

    return Workload("tokens", Pair, batch)


def make_workload() -> Workload:
    """A workload for the command line, with a data set of 12."""
    return job(dataset_size=12)


def trains(reference: str, shape: list[int], classes: int, batch_size: int, cap_bytes: int) -> bool:
    """Train five steps in this process, on the GPU under a cap; tell whether they ran."""
    device = torch.device("cuda:0")
    workload = workload_from(reference, input_shape=tuple(shape), classes=classes)
    set_precision("fp32")

    def train() -> None:
        torch.manual_seed(42)
        model = workload.make_model().to(device).train()
        optimizer = workload.make_optimizer(model.parameters(), 1e-3)
        step = make_step(model, optimizer, workload.loss, "fp32", device)
        batch = workload.make_batch(batch_size, device)
        for _ in range(5):
            step(*batch)
        torch.cuda.synchronize()

    with memory_limit(device, cap_bytes):
        return attempt(train).ok


class Recorded(torch.optim.Adam):
    """Adam that notes its bytes of state before and after each step."""

    notes: ClassVar[list] = []

    def step(self, closure=None):
        before = self._state_bytes()
        super().step(closure)
        Recorded.notes.append((before, self._state_bytes()))

    def _state_bytes(self) -> int:
        tensors = [t for entry in self.state.values() for t in entry.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
