"""The residency map: which blocks of memory answer at the card's speed, which at the bus's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from labhelpers.inputs import InputError
from labhelpers.records import Trial

Place = Literal["card", "system", "between", "undecided", "host"]

LEAST_BLOCKS = 2
"""One block alone lies: on WSL2 a first block larger than the card is granted."""
SLOW_SHARE = 0.5
"""Below this share of the card's bandwidth a block is not, or not wholly, in video memory."""


@dataclass(frozen=True)
class BlockJudgement:
    """One block: its bandwidth in bytes per second, and where it lies by that.

    `card`: it answers at the card's speed. `system`: at the bus's, so half of it or more lies
    outside. `between`: too slow for the card, too fast for that. `undecided`: card and bus are
    too close to tell. `host`: on the CPU, where there is no other place to lie in.
    """

    index: int
    bandwidth: float
    place: Place

    @property
    def slow(self) -> bool:
        """Tell whether the block is known not to answer at the card's speed."""
        return self.place in ("system", "between")


@dataclass(frozen=True)
class ResidencyMap:
    """A map as it was measured: seconds of each pass over the blocks, and what to hold them to.

    `fill_s` and `read_s` hold one sequence of seconds per pass. Bandwidths are bytes per
    second, derived from the best pass; those of the bus are None where no pinned memory could
    be had.
    """

    device: str
    block_bytes: int
    asked_blocks: int
    fill_s: tuple[tuple[float, ...], ...]
    read_s: tuple[tuple[float, ...], ...]
    card_fill: float
    card_read: float
    card_copy: float
    bus_to_device: float | None
    bus_from_device: float | None
    ended: str | None

    @property
    def fill_judgements(self) -> list[BlockJudgement]:
        """Judge each block by its best fill."""
        return self._judged(self.fill_s, self.card_fill, self.bus_from_device)

    @property
    def read_judgements(self) -> list[BlockJudgement]:
        """Judge each block by its best read."""
        return self._judged(self.read_s, self.card_read, self.bus_to_device)

    @property
    def slow_blocks(self) -> list[int]:
        """Return the numbers of the blocks that both a fill and a read found slow."""
        pairs = zip(self.fill_judgements, self.read_judgements, strict=True)
        return [fill.index for fill, read in pairs if fill.slow and read.slow]

    def _judged(
        self, passes: tuple[tuple[float, ...], ...], card: float, bus: float | None
    ) -> list[BlockJudgement]:
        best = [min(times) for times in zip(*passes, strict=True)]
        judged = judge_blocks(best, self.block_bytes, card, bus)
        return [replace(j, place="host") for j in judged] if self.device == "cpu" else judged


def judge_blocks(
    fill_s: Sequence[float], block_bytes: int, card_bandwidth: float, bus_bandwidth: float | None
) -> list[BlockJudgement]:
    """Judge where each block lies from the seconds that passing over it once took.

    Args:
        fill_s: seconds of each block.
        block_bytes: the size of a block.
        card_bandwidth: bytes per second of the same work on a block known to be on the card.
        bus_bandwidth: bytes per second of a pinned copy over the bus; None if not measured.

    Raises:
        InputError: fewer than two blocks, or a value that is not above 0.
    """
    if len(fill_s) < LEAST_BLOCKS:
        raise InputError(f"fill_s has {len(fill_s)} blocks; at least {LEAST_BLOCKS} are needed")
    bus = 0.0 if bus_bandwidth is None else bus_bandwidth
    checked = [*fill_s, block_bytes, card_bandwidth, *([] if bus_bandwidth is None else [bus])]
    wrong = next((value for value in checked if not (math.isfinite(value) and value > 0)), None)
    if wrong is not None:
        raise InputError(f"got {wrong!r}; seconds, bytes and bandwidths must be above 0")
    rates = [block_bytes / seconds for seconds in fill_s]
    return [BlockJudgement(i, rate, _place(rate, card_bandwidth, bus)) for i, rate in
            enumerate(rates)]  # fmt: skip


def _place(rate: float, card: float, bus: float) -> Place:
    if bus >= SLOW_SHARE * card:
        return "undecided"
    if rate >= SLOW_SHARE * card:
        return "card"
    # With a share f of it outside, a block answers at about bus / f: at half, twice the bus.
    return "system" if rate <= 2 * bus else "between"


def residency_map(trial: Trial) -> ResidencyMap | None:
    """Read a map from its trial; None where it was not measured, or has less than two blocks."""
    details = trial.details or {}
    if trial.outcome != "ok" or details.get("blocks", 0) < LEAST_BLOCKS:
        return None
    size = details["block_bytes"]
    to_device, from_device = (details["bus"].get(name) for name in ("to_device_s", "from_device_s"))
    return ResidencyMap(
        device=trial.device,
        block_bytes=size,
        asked_blocks=details["asked_blocks"],
        fill_s=tuple(tuple(times) for times in details["fill_s"]),
        read_s=tuple(tuple(times) for times in details["read_s"]),
        card_fill=_rate(size, details["card"]["fill_s"]),
        card_read=_rate(size, details["card"]["read_s"]),
        # A copy within the card reads every byte and writes it.
        card_copy=_rate(2 * size, details["card"]["copy_s"]),
        bus_to_device=_rate(size, to_device) if to_device else None,
        bus_from_device=_rate(size, from_device) if from_device else None,
        ended=details.get("ended"),
    )


def _rate(size_bytes: int, seconds: Sequence[float]) -> float:
    return size_bytes / statistics.median(seconds)
