"""Capture a training step in CUDA graphs, one for each length of batch, and replay it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labhelpers.training import Step

WARM_UP_STEPS = 3
"""Untimed steps before a capture: libraries choose kernels and optimizers make their state."""


@dataclass(frozen=True)
class Captured:
    """A captured step: its graph, the place of its input, and the place of its loss."""

    graph: torch.cuda.CUDAGraph
    chosen: Tensor
    loss: Tensor


class GraphedStep:
    """Replay a step that was captured once for each length of batch in an epoch.

    Args:
        step: takes the indices of a batch, (N,) int64 on the device, and returns the loss.
        batches: the batches of one epoch in order; all lengths that occur are captured.
        kept: how many losses at the end of an epoch are wanted; the others are not copied out
            of the graph and show what the last step left there.
    """

    def __init__(self, step: Step, batches: Sequence[Tensor], kept: int) -> None:
        # A graph holds addresses, not tensors: what the step reads must live as long as it.
        self._step = step
        self._captured: dict[int, Captured] = {}
        pool: Any = None
        for batch in batches:
            if len(batch) not in self._captured:
                captured = capture_step(step, batch, pool)
                # One pool for all: only one graph runs at a time, and none reads another's.
                pool = captured.graph.pool()
                self._captured[len(batch)] = captured
        self._unkept = max(0, len(batches) - kept)
        self._done = 0

    def restart(self) -> None:
        """Begin a new epoch."""
        self._done = 0

    def __call__(self, chosen: Tensor, _targets: Tensor) -> Tensor:
        captured = self._captured[len(chosen)]
        captured.chosen.copy_(chosen)
        captured.graph.replay()
        self._done += 1
        # The next replay overwrites the loss, so one that is wanted must be copied.
        return captured.loss.clone() if self._done > self._unkept else captured.loss


def capture_step(step: Step, batch: Tensor, pool: Any) -> Captured:
    """Warm a step up on a side stream, as capturing asks for, and capture it once.

    `pool` is another graph's memory pool to share, or None. The step really trains: put weights
    and optimizer state back afterwards, in place.
    """
    chosen = batch.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            step(chosen, chosen)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        # Detached: a loss that keeps its history keeps nodes that belong to this stream.
        loss = step(chosen, chosen).detach()
    return Captured(graph, chosen, loss)
