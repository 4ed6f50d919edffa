"""How many probes and failures does the search need? 120 made-up memories, and a bisection.

Prints for each kind of memory the mean number of probes and of out-of-memory failures, beside
those of doubling followed by halving, which looks at no peak.

    python benchmarks/search_models.py
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from labhelpers.search import ProbeResult, SearchResult, search_largest

MIB = 2**20
TOP = 60_000
PER_KIND = 20
MONOTONIC_KINDS = ("linear", "steps", "workspace", "noise", "allocator")
KINDS = (*MONOTONIC_KINDS, "falling")

Bytes = Callable[[int], float]


@dataclass(frozen=True)
class Memory:
    """A made-up memory: what a size needs, and what a trial of it would report.

    `needed(n)` decides: n fits if it is at most the limit. `reserved` and `live` are the peaks
    reported, in bytes; `live` may be None.
    """

    kind: str
    limit_bytes: int
    needed: Bytes
    reserved: Bytes
    live: Bytes | None = None

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
        """Return what a failing trial held and asked for: some of what is too much, not all."""
        share = random.Random(f"{self.limit_bytes} {batch_size}").uniform(0.3, 1.0)
        return round(self.limit_bytes + share * (self.needed(batch_size) - self.limit_bytes))

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


def memories(seed: int = 0) -> Iterator[Memory]:
    """Make the memories, `PER_KIND` of each kind, on cards of 1 to 80 GiB."""
    makers = (_linear, _steps, _workspace, _noise, _allocator, _falling)
    dice = random.Random(seed)
    for make in makers:
        for _ in range(PER_KIND):
            yield make(dice, int(2**30 * 80 ** dice.random()))


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


if __name__ == "__main__":
    main()
