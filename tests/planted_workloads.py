"""Training jobs whose limit is known: a feed that sleeps, tiny layers, a large convolution."""

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from labhelpers.workloads import Workload, image_batches

STEPS = 6
SLEEP_S = 0.05


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _batches(
    shape: tuple[int, ...], batch_size: int, steps: int, sleep_s: float = 0.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield one batch again and again; it lies where it is needed, so nothing is copied."""
    batch = (
        torch.rand(batch_size, *shape, device=DEVICE),
        torch.randint(10, (batch_size,), device=DEVICE),
    )
    for _ in range(steps):
        time.sleep(sleep_s)
        yield batch


def sleeping_feed() -> Workload:
    """A model of no weight behind a loader that sleeps before every batch."""
    return Workload(
        "sleeping", lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 10)),
        image_batches((4, 4), 10),
        make_loader=lambda size, _: _batches((4, 4), size, STEPS, SLEEP_S),
    )  # fmt: skip


def tiny_layers() -> Workload:
    """A hundred layers of eight numbers each: nothing to compute, much to launch."""
    layers = [nn.Linear(8, 8) for _ in range(100)]
    return Workload(
        "tiny layers", lambda: nn.Sequential(*layers, nn.Linear(8, 10)),
        lambda size, device: (
            torch.rand(size, 8, device=device), torch.randint(10, (size,), device=device)
        ),
        make_loader=lambda size, _: _batches((8,), size, 40),
    )  # fmt: skip


def large_convolution() -> Workload:
    """A wide convolution over large images."""
    side, channels = (256, 256) if DEVICE == "cuda" else (48, 64)
    shape = (64, side, side)
    return Workload(
        "large convolution",
        lambda: nn.Sequential(
            nn.Conv2d(64, channels, 5, padding=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(channels, 10),
        ),
        image_batches(shape, 10),
        make_loader=lambda size, _: _batches(shape, size, STEPS),
    )  # fmt: skip
