"""A workload whose loader ends differently at some batch sizes; the others train."""

import os
import signal
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from labhelpers.workloads import Workload, image_batches

IMAGES = 40


def _loader(batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    if batch_size == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if batch_size == 3:
        raise ValueError("three is\nrefused")
    if batch_size == 4:
        time.sleep(600)
    if batch_size == 5:
        torch.empty(2**50, dtype=torch.uint8)
    for start in range(0, IMAGES, batch_size):
        count = min(batch_size, IMAGES - start)
        yield torch.rand(count, 1, 4, 4), torch.randint(10, (count,))


def failing() -> Workload:
    return Workload(
        "failing",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 10)),
        image_batches((1, 4, 4), 10),
        make_loader=_loader,
        dataset_size=IMAGES,
    )


def empty() -> Workload:
    return Workload(
        "empty", lambda: nn.Linear(1, 10), image_batches((1,), 10), make_loader=lambda *_: []
    )


def without_data() -> Workload:
    return Workload("without data", lambda: nn.Linear(1, 1), image_batches((1,), 10))


def bare() -> Workload:
    return Workload(
        "bare", lambda: nn.Linear(4, 4), lambda size, _: (torch.rand(size, 4),) * 2,
        nn.functional.mse_loss,
        make_loader=lambda size, _: [torch.rand(2, 4)] * (IMAGES // size),
    )  # fmt: skip
