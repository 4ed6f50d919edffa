"""What runs inside the worker for the residency map: blocks, and the time to pass over each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from labhelpers.capture import Capture, capture_for
from labhelpers.host_memory import host_free_bytes
from labhelpers.oom import is_oom
from labhelpers.trials import surroundings

PASSES = 2
CARD_SAMPLES, BUS_SAMPLES = 16, 4
LEAD_IN, LONG_LEAD_IN = 8, 64
"""Untimed passes first: they wake the clocks, and keep the device busy while the host runs
ahead, so that no launch waits inside a timed pass."""

Work = Callable[[], Any]


def measure_residency_trial(
    device: str, block_bytes: int, blocks: int, host_reserve_bytes: int
) -> dict[str, Any]:
    """Measure the card, the bus and then every block; return what a trial keeps, JSON-able.

    Args:
        device: `cpu` or `cuda:N`.
        block_bytes: size of a block.
        blocks: how many to ask for; the map holds those that were granted.
        host_reserve_bytes: no further block is asked for once the host has less than this.
    """
    capture = capture_for(torch.device(device))
    capture.empty_cache()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    before = surroundings(capture, "before")
    capture.reset_peak()
    details = _measure(capture, block_bytes, blocks, host_reserve_bytes)
    facts = {
        "details": {**details, "block_bytes": block_bytes, "asked_blocks": blocks},
        "peak_allocated_bytes": capture.peak_allocated_bytes(),
        "peak_reserved_bytes": capture.peak_reserved_bytes(),
        "started_at": started_at,
    }
    facts |= before | surroundings(capture, "after")
    capture.empty_cache()
    return facts


def _measure(
    capture: Capture, block_bytes: int, count: int, host_reserve_bytes: int
) -> dict[str, Any]:
    """Measure in this order: the card is known before the blocks can crowd it."""
    scratch = [make_block(block_bytes, capture.device) for _ in range(2)]
    card = measure_card(capture, scratch)
    bus = measure_bus(capture, scratch[0])
    blocks, ended = allocate(
        lambda: make_block(block_bytes, capture.device), count,
        enough_left=lambda: host_free_bytes() >= host_reserve_bytes,
    )  # fmt: skip
    lead_in = _fill(scratch[0])
    return {
        "card": card,
        "bus": bus,
        "blocks": len(blocks),
        "ended": ended,
        # All are filled before one is read: what was just written would answer from a cache.
        "fill_s": time_passes(capture, [_fill(block) for block in blocks], lead_in),
        "read_s": time_passes(capture, [_read(block) for block in blocks], lead_in),
    }


def make_block(block_bytes: int, device: torch.device) -> Tensor:
    """Return a block of about `block_bytes`, float32, not filled."""
    return torch.empty(block_bytes // 4, dtype=torch.float32, device=device)


def allocate(
    make: Callable[[], Tensor], count: int, *, enough_left: Callable[[], bool]
) -> tuple[list[Tensor], str | None]:
    """Make up to `count` blocks; return them and, where they are fewer, why."""
    blocks: list[Tensor] = []
    while len(blocks) < count:
        if not enough_left():
            return blocks, f"the host's memory ran low after {len(blocks)} blocks"
        block = _granted(make)
        if block is None:
            return blocks, f"block {len(blocks) + 1} was refused with an out-of-memory error"
        blocks.append(block)
    return blocks, None


def _granted(make: Callable[[], Tensor]) -> Tensor | None:
    try:
        return make()
    except RuntimeError as error:
        if not is_oom(error):
            raise
    return None


def measure_card(capture: Capture, scratch: Sequence[Tensor]) -> dict[str, list[float]]:
    """Time filling, reading and copying two fresh blocks in turn, in seconds a block."""
    first, second = scratch
    turns = [first, second] * (CARD_SAMPLES // 2)
    lead_in = _fill(first)
    return {
        "fill_s": time_once(capture, [_fill(block) for block in turns], lead_in, LONG_LEAD_IN),
        "read_s": time_once(capture, [_read(block) for block in turns], lead_in, LEAD_IN),
        "copy_s": time_once(
            capture, [lambda: second.copy_(first)] * CARD_SAMPLES, lead_in, LEAD_IN
        ),
    }


def measure_bus(capture: Capture, block: Tensor) -> dict[str, Any]:
    """Time copies of a block from and to pinned host memory; why not, where that fails.

    On WSL2 pinned memory can be refused; on the CPU there is no bus.
    """
    if capture.device.type == "cpu":
        return {"why_not": "on the CPU there is no bus to cross"}
    try:
        host = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
    except RuntimeError as error:
        return {"why_not": f"pinned memory was refused: {str(error).splitlines()[0]}"}
    copies = {
        "to_device_s": lambda: block.copy_(host, non_blocking=True),
        "from_device_s": lambda: host.copy_(block, non_blocking=True),
    }
    return {
        name: time_once(capture, [copy] * BUS_SAMPLES, copy, 1) for name, copy in copies.items()
    }


def time_passes(capture: Capture, works: Sequence[Work], lead_in: Work) -> list[list[float]]:
    """Run all works in order, `PASSES` times; return the seconds of each, by pass."""
    return [time_once(capture, works, lead_in, LEAD_IN) for _ in range(PASSES)]


def time_once(capture: Capture, works: Sequence[Work], lead_in: Work, lead_ins: int) -> list[float]:
    """Time each work by the capture's marks, after a few untimed ones."""
    capture.prepare(lead_ins + len(works))
    started = capture.start()
    for work in [lead_in] * lead_ins + list(works):
        work()
        capture.mark()
    capture.stop(started)
    return list(capture.step_times_s()[lead_ins:])


def _fill(block: Tensor) -> Work:
    return lambda: block.fill_(1.0)


def _read(block: Tensor) -> Work:
    # The largest element: a sum of so many float32 ones would be as quick, but not exact.
    return lambda: block.amax()
