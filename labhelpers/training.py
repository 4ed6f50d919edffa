"""One optimizer step, one epoch, and the precision they run in."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labhelpers.capture import Capture
from labhelpers.inputs import InputError
from labhelpers.workloads import Loss, as_pair, batch_length, call_model, to_device

Step = Callable[[Any, Any], Tensor]
LOSS_IMAGES = 2048
"""The final loss is the mean over the last steps that hold at least so many images."""


@dataclass(frozen=True)
class Epoch:
    """What one timed epoch gave; images are those really seen, times are in seconds."""

    images: int
    steps: int
    last_batch: int
    epoch_s: float
    step_times_s: tuple[float, ...]
    feed_wait_s: float
    final_loss: float | None


def set_precision(precision: str) -> dict[str, str]:
    """Set FP32 arithmetic to `ieee`, or to `tf32`, and return what was read back.

    Only torch's `fp32_precision` is used: mixing it with the older `allow_tf32` switches
    silently brings TF32 back, and reading those then raises. bf16 and fp16 use autocast over
    ieee FP32.

    Raises:
        InputError: the precision is not one of fp32, tf32, bf16, fp16.
    """
    if precision not in ("fp32", "tf32", "bf16", "fp16"):
        raise InputError(f"precision: got {precision!r}; must be fp32, tf32, bf16 or fp16")
    mode = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = mode
    torch.backends.cudnn.conv.fp32_precision = mode  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn.fp32_precision = mode  # type: ignore[attr-defined]
    return read_precision()


def read_precision() -> dict[str, str]:
    """Read both FP32 precisions back, and say `mixed` where they differ."""
    matmul = torch.backends.cuda.matmul.fp32_precision
    convolution = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    both = matmul if matmul == convolution else "mixed"
    return {"matmul": matmul, "convolution": convolution, "both": both}


def make_step(
    model: Callable[..., Any], optimizer: torch.optim.Optimizer, loss_function: Loss,
    precision: str, device: torch.device, scaler: torch.amp.GradScaler | None = None,
) -> Step:  # fmt: skip
    """Return `step(inputs, targets) -> loss`: forward, backward and one optimizer update.

    `scaler` scales the loss of fp16; left out, a new one does.
    """

    def plain_step(inputs: Any, targets: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_function(call_model(model, inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    if precision in ("fp32", "tf32"):
        return plain_step
    kind = torch.bfloat16 if precision == "bf16" else torch.float16
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def autocast_step(inputs: Any, targets: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=kind):
            loss = loss_function(call_model(model, inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return autocast_step


def run_epoch(step: Step, feed: Iterable[Any], capture: Capture, *, batch_size: int) -> Epoch:
    """Time one epoch: wait for the feed, copy, forward, backward, update; nothing else.

    Call `capture.prepare(steps)` before. The device is synchronised before the start and
    before the stop, never inside.
    """
    losses: collections.deque[Tensor] = collections.deque(maxlen=-(-LOSS_IMAGES // batch_size))
    clock, device = time.perf_counter, capture.device
    seen = steps = length = 0
    wait_s = 0.0
    started = capture.start()
    batches = iter(feed)
    while True:
        asked = clock()
        batch = next(batches, None)
        wait_s += clock() - asked
        if batch is None:
            break
        inputs, targets = (to_device(part, device) for part in as_pair(batch))
        loss = step(inputs, targets)
        capture.mark()
        losses.append(loss.detach())
        length = batch_length(inputs)
        seen, steps = seen + length, steps + 1
    epoch_s = capture.stop(started)
    return Epoch(seen, steps, length, epoch_s, capture.step_times_s(), wait_s, mean_loss(losses))


def mean_loss(losses: Iterable[Tensor]) -> float | None:
    """Average the kept losses; None for none, or for one that is not finite."""
    values = [float(loss) for loss in losses]
    mean = math.fsum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None
