"""How many probes and failures does the search need? Made-up memories, recorded ones, a bisection.

Prints for each kind of 140 made-up memories the mean number of probes and of out-of-memory
failures, beside those of doubling followed by halving, which looks at no peak; then the sizes
tried on what five models took of an NVIDIA H200 (recorded_memory_h200.json).

    python benchmarks/search_models.py
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labhelpers.search import ProbeResult, SearchResult, search_largest

MIB = 2**20
TOP = 60_000
RECORDED = Path(__file__).resolve().parent / "recorded_memory_h200.json"
PER_KIND = 20
MONOTONIC_KINDS = ("linear", "steps", "workspace", "noise", "allocator", "floor")
KINDS = (*MONOTONIC_KINDS, "falling")

Bytes = Callable[[int], float]


@dataclass(frozen=True)
class Memory:
    """A made-up memory: what a size needs, and what a trial of it would report.

    `needed(n)` decides: n fits if it is at most the limit. `reserved` and `live` are the peaks
    reported, in bytes; `live` may be None. `tensor_share` is how much of what a size needs a
    trial asks for at once: it fails at the first request that is too much, long before it
    would have needed everything.
    """

    kind: str
    limit_bytes: int
    needed: Bytes
    reserved: Bytes
    live: Bytes | None = None
    tensor_share: float = 0.02

    def fits(self, batch_size: int) -> bool:
        """Tell whether a size runs."""
        return self.needed(batch_size) <= self.limit_bytes

    def probe(self, batch_size: int) -> ProbeResult:
        """Try a size."""
        if not self.fits(batch_size):
            return ProbeResult(batch_size, "oom", needed_bytes=self.needed_at_failure(batch_size))
        live = None if self.live is None else max(1, round(self.live(batch_size)))
        reserved = min(self.limit_bytes, self.reserved(batch_size))
        return ProbeResult(batch_size, "ok", max(1, round(reserved)), live)

    def needed_at_failure(self, batch_size: int) -> int:
        """Return what a failing trial held and asked for: above the limit by part of a tensor."""
        needed = self.needed(batch_size)
        share = random.Random(f"{self.limit_bytes} {batch_size}").random()
        over = min(needed - self.limit_bytes, share * self.tensor_share * needed)
        return round(self.limit_bytes + over)

    def largest(self) -> int:
        """Return the largest size that fits, where fitting is monotonic."""
        low, high = 0, TOP + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low


def _line(dice: random.Random, limit: int) -> Bytes:
    """Return a line: 1 to 200 MiB per sample above 2 to 30 % of the limit."""
    slope = MIB * 200 ** dice.random()
    fixed = limit * dice.uniform(0.02, 0.3)
    return lambda n: fixed + slope * n


def _linear(dice: random.Random, limit: int) -> Memory:
    line = _line(dice, limit)
    return Memory("linear", limit, line, line)


def _steps(dice: random.Random, limit: int) -> Memory:
    """What is taken from the device is rounded up to blocks; what is live is not."""
    line, block = _line(dice, limit), dice.choice((2, 20)) * MIB

    def rounded(n: int) -> float:
        return -(-line(n) // block) * block

    return Memory("steps", limit, rounded, rounded, line)


def _workspace(dice: random.Random, limit: int) -> Memory:
    """From some sizes on, kernels with a larger workspace run."""
    line = _line(dice, limit)
    jumps = [(2 ** dice.uniform(2, 13), limit * dice.uniform(0.01, 0.08)) for _ in range(2)]

    def needed(n: int) -> float:
        return line(n) + sum(size for start, size in jumps if n >= start)

    return Memory("workspace", limit, needed, needed)


def _noise(dice: random.Random, limit: int) -> Memory:
    """Peaks are read 0.3 % wrong either way; what is needed is not."""
    line, seed = _line(dice, limit), dice.random()

    def noisy(n: int) -> float:
        return line(n) * random.Random(f"{seed} {n}").uniform(0.997, 1.003)

    return Memory("noise", limit, line, noisy)


def _allocator(dice: random.Random, limit: int) -> Memory:
    """Caches make up to 12 % of what is reserved; most of it is given back before failing."""
    live, cached = _line(dice, limit), dice.uniform(0.02, 0.12)
    stuck = cached * dice.uniform(0.0, 0.3)
    return Memory(
        "allocator",
        limit,
        needed=lambda n: live(n) * (1 + stuck),
        reserved=lambda n: live(n) * (1 + cached),
        live=live,
    )


def _falling(dice: random.Random, limit: int) -> Memory:
    """When the workspace does not fit any more, leaner kernels run: the peak falls."""
    live, share = _line(dice, limit), dice.uniform(0.2, 0.6)

    def lean(n: int) -> float:
        return live(n) * (1 + share) if live(n) * (1 + share) <= limit else live(n)

    return Memory("falling", limit, lean, lambda n: 1.03 * lean(n), lean)


def _floor(dice: random.Random, limit: int) -> Memory:
    """Parameters and the optimizer's step set the peak of small batches, activations the rest."""
    line, floor = _line(dice, limit), limit * dice.uniform(0.05, 0.4)

    def needed(n: int) -> float:
        return max(floor, line(n))

    return Memory("floor", limit, needed, needed)


def memories(seed: int = 0) -> Iterator[Memory]:
    """Make the memories, `PER_KIND` of each kind, on cards of 1 to 80 GiB."""
    makers = (_linear, _steps, _workspace, _noise, _allocator, _floor, _falling)
    dice = random.Random(seed)
    for make in makers:
        for _ in range(PER_KIND):
            made = make(dice, int(2**30 * 80 ** dice.random()))
            yield replace(made, tensor_share=dice.choice((0.005, 0.02, 0.1, 0.3)))


@dataclass(frozen=True)
class Recorded:
    """What a model took of a real GPU under a cap, between recorded sizes by a straight line.

    `ran` holds size, peak reserved and peak allocated bytes and retries of the allocator,
    `failed` size and the bytes held and asked for when memory ran out.
    """

    name: str
    limit_bytes: int
    largest: int
    ran: list[list[int]]
    failed: list[list[int]]

    def probe(self, batch_size: int) -> ProbeResult:
        """Answer as the trial did, or as its neighbours did."""
        if batch_size > self.largest:
            return ProbeResult(batch_size, "oom", needed_bytes=self._needed(batch_size))
        above = next(row for row in self.ran if row[0] >= batch_size)
        below = [row for row in self.ran if row[0] <= batch_size] or [above]
        # Other kernels ran from there on: no line between them.
        low = below[-1] if below[-1][3] == above[3] else above
        share = (batch_size - low[0]) / (above[0] - low[0]) if above[0] > low[0] else 1.0
        peak, live = (round(low[i] + share * (above[i] - low[i])) for i in (1, 2))
        return ProbeResult(batch_size, "ok", max(peak, live), live)

    def _needed(self, batch_size: int) -> int:
        size, needed = min(self.failed, key=lambda row: abs(row[0] - batch_size))
        return round(needed * batch_size / size) if batch_size > size else needed


def recorded() -> list[Recorded]:
    """Read the recorded memories."""
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))["models"]
    return [Recorded(name, **facts) for name, facts in found.items()]


def search_recorded(memory: Recorded) -> SearchResult:
    """Search one recorded memory as the finder does."""
    return search_largest(memory.probe, limit_bytes=memory.limit_bytes, max_batch_size=100_000)


def search_shaken(memory: Recorded, seed: int) -> SearchResult:
    """Search it with an end up to 1 % away and readings up to 0.2 % wrong; raise if inexact."""
    dice = random.Random(seed)
    most = max(1, memory.largest // 100)
    shift = dice.randint(-most, most)

    def wrong(value: int | None) -> int | None:
        return None if value is None else round(value * dice.uniform(0.998, 1.002))

    def probe(batch_size: int) -> ProbeResult:
        near_the_end = batch_size > memory.largest // 2
        answer = memory.probe(max(1, batch_size - shift if near_the_end else batch_size))
        return ProbeResult(
            batch_size, answer.outcome, wrong(answer.peak_bytes), wrong(answer.live_bytes),
            needed_bytes=answer.needed_bytes,
        )  # fmt: skip

    result = search_largest(probe, limit_bytes=memory.limit_bytes, max_batch_size=100_000)
    if result.largest != memory.largest + shift:
        raise AssertionError(f"found {result.largest}, the end is {memory.largest + shift}")
    return result


def search_both(memory: Memory) -> tuple[SearchResult, SearchResult]:
    """Search one memory with peaks, and by doubling and halving."""
    return (
        search_largest(memory.probe, limit_bytes=memory.limit_bytes, max_batch_size=TOP),
        search_largest(memory.probe, max_batch_size=TOP, strategy="bisect"),
    )


def _row(kind: str, pairs: list[tuple[SearchResult, SearchResult]]) -> str:
    ours, plain = zip(*pairs, strict=True)
    probes = [statistics.mean(len(result.probes) for result in side) for side in (ours, plain)]
    ooms = [statistics.mean(result.oom_count for result in side) for side in (ours, plain)]
    few = statistics.mean(result.oom_count <= 2 for result in ours)
    return f"{kind:10s} {probes[0]:7.1f} {probes[1]:7.1f} {ooms[0]:6.2f} {ooms[1]:7.2f} {few:6.0%}"


def main() -> None:
    """Print the table."""
    print(f"{'kind':10s} {'probes':>7s} {'bisect':>7s} {'ooms':>6s} {'bisect':>7s} {'<= 2':>6s}")
    for kind in KINDS:
        print(_row(kind, [search_both(memory) for memory in memories() if memory.kind == kind]))
    for memory in recorded():
        result = search_recorded(memory)
        tried = " ".join(f"{p.batch_size}{'' if p.outcome == 'ok' else '!'}" for p in result.probes)
        print(
            f"{memory.name}: {result.largest} of {memory.largest} in {len(result.probes)} probes, "
            f"{result.oom_count} OOMs: {tried}"
        )


if __name__ == "__main__":
    main()
