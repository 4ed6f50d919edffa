"""Workloads whose larger batches go wrong: slow, killed, or refused."""

import os
import signal
import time

import torch
from torch import nn

from labhelpers.workloads import Workload

TOO_LARGE = 16


def make_batch(batch_size, device):
    return torch.rand(batch_size, 4, device=device), torch.randint(2, (batch_size,), device=device)


class Breaks(nn.Module):
    """A small model that does something else when the batch is too large."""

    def __init__(self, act):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.act = act

    def forward(self, inputs):
        if len(inputs) >= TOO_LARGE:
            self.act()
        return self.linear(inputs)


def _workload(name, act):
    return Workload(name, lambda: Breaks(act), make_batch)


def sleeps():
    return _workload("sleeps", lambda: time.sleep(60))


def dies():
    return _workload("dies", lambda: os.kill(os.getpid(), signal.SIGKILL))


def refuses():
    def refuse():
        raise ArithmeticError(f"batches of {TOO_LARGE} and more are refused")

    return _workload("refuses", refuse)
