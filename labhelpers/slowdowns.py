"""Find where speed fell and why: each size against the nearest smaller one that held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from labhelpers.formats import show_count, show_times
from labhelpers.memory_rows import MemoryRow

Cause = Literal[
    "oversubscription", "kernel_change", "allocator_retries", "drift", "other_process", "undecided"
]
CAUSES: tuple[Cause, ...] = get_args(Cause)

FALL_RATIO = 1.1
"""Time per image over the reference's from which a speed counts as fallen."""
DRIFT_RATIO = 1.05
"""The same for a repeat of the smallest size, where only time has passed."""
SAME_MEMORY_MARGIN = 0.2
"""How far memory per image may move and still count as unchanged."""


@dataclass(frozen=True)
class Comparison:
    """One row against its reference; None where a side of a ratio is unknown.

    `drift` is how much slower the smallest size was at its last run than at its first (1.0 if
    it was not). `is_base` marks the first run of the smallest size when larger ones were timed;
    `is_repeat` its later runs, whose reference is the first.
    """

    row: MemoryRow
    reference: MemoryRow | None
    drift: float = 1.0
    memory_change: float | None = None
    same_memory: bool | None = None
    is_base: bool = False
    is_repeat: bool = False

    @property
    def slowdown(self) -> float | None:
        """Time per image over that of the reference."""
        if self.reference is None or not self.row.images_per_s or not self.reference.images_per_s:
            return None
        return self.reference.images_per_s / self.row.images_per_s

    @property
    def fell(self) -> bool:
        """Tell whether the speed is known to have fallen."""
        limit = DRIFT_RATIO if self.is_repeat else FALL_RATIO
        return self.slowdown is not None and self.slowdown >= limit

    @property
    def held(self) -> bool:
        """Tell whether the size is known not to have slowed, drift aside."""
        fallen = self.fell and self.remaining >= FALL_RATIO
        return self.is_base or self.is_repeat or (self.slowdown is not None and not fallen)

    @property
    def clocks_known(self) -> bool:
        """Tell whether both sides have a clock reading."""
        return bool(self.row.clock_mhz and self.reference and self.reference.clock_mhz)

    @property
    def clock_ratio(self) -> float:
        """The reference's clock over this row's; 1.0 where either is unknown."""
        before = self.reference.clock_mhz if self.reference else None
        return before / self.row.clock_mhz if before and self.row.clock_mhz else 1.0

    @property
    def remaining(self) -> float:
        """Slowdown that neither drift nor a lower clock accounts for."""
        return (self.slowdown or 1.0) / max(self.drift, self.clock_ratio, 1.0)


def compare_rows(rows: Sequence[MemoryRow], total_bytes: float) -> list[Comparison]:
    """Compare each row with the largest smaller size inside the card whose speed held."""
    runs = _runs_of_smallest(rows)
    drift = _drift(runs)
    # Later runs of the smallest size tell of drift: what ran before them is not held to them.
    first = [row for row in rows if row not in runs[1:]]
    return [_compare(row, first, runs, drift, total_bytes) for row in rows]


def explain_fall(against: Comparison, verdict: str) -> dict[Cause, str]:
    """Name what explains a fall in speed, each with its evidence; `{}` where nothing fell.

    `verdict` is the row's own on memory: no, suspected or certain.
    """
    if not against.fell:
        return {}
    found: dict[Cause, str | None] = {
        "kernel_change": _kernel_cause(against),
        "allocator_retries": _retry_cause(against),
        "drift": _drift_cause(against),
        "other_process": _process_cause(against),
    }
    # Changed memory per image, or drift that covers the whole fall, outweighs mere suspicion.
    settled = against.same_memory is False or against.remaining < FALL_RATIO
    if verdict == "certain" or (verdict == "suspected" and not settled):
        found["oversubscription"] = f"Oversubscription as the cause of the fall: {verdict}."
    known = {cause: found[cause] for cause in CAUSES if found.get(cause)}
    return {cause: words for cause, words in known.items() if words} or {
        "undecided": "Nothing measured here explains the fall: undecided."
    }


def _kernel_cause(against: Comparison) -> str | None:
    if against.is_repeat or against.reference is None:
        return None
    ran, before = against.row.kernels, against.reference.kernels
    if ran is not None and before is not None:
        new = ", ".join(sorted(ran - before)[:3]) or "fewer of them"
        return f"Other kernels ran than at the reference: {new}." if ran != before else None
    if against.same_memory is False:
        return (
            f"Memory per image is {show_times(against.memory_change, 2)} that of the reference:"
            " the library chose other kernels, with other workspaces."
        )
    return None


def _retry_cause(against: Comparison) -> str | None:
    before = against.reference.alloc_retries if against.reference else None
    retries = against.row.alloc_retries or 0
    if retries <= (before or 0):
        return None
    return f"The allocator emptied its cache and tried again, {show_count(retries, 'times')}."


def _drift_cause(against: Comparison) -> str | None:
    """Say that the machine itself slowed: the same work later, a lower clock, a throttle."""
    if against.is_repeat:
        times = show_times(against.slowdown, 2)
        return f"The same size took {times} its first time per image when repeated: heat or clocks."
    if against.remaining < FALL_RATIO:
        times = show_times(max(against.drift, against.clock_ratio), 2)
        return (
            f"The machine slowed {times} (smallest size repeated, or clock): this covers the fall."
        )
    before = against.reference.throttle_reasons if against.reference else None
    new = (against.row.throttle_reasons or frozenset()) - (before or frozenset())
    # Two known clocks have said already how much of the fall is theirs.
    if not new or against.clocks_known:
        return None
    return f"The device held back ({', '.join(sorted(new))})."


def _process_cause(against: Comparison) -> str | None:
    before = against.reference.other_processes if against.reference else None
    if (against.row.other_processes or 0) <= (before or 0):
        return None
    return "Other processes took more of the device than at the reference."


def _compare(
    row: MemoryRow,
    rows: Sequence[MemoryRow],
    runs: Sequence[MemoryRow],
    drift: float,
    total_bytes: float,
) -> Comparison:
    if row in runs[1:]:
        return Comparison(row, runs[0], is_repeat=True)
    steady = _steady_below(row, rows, total_bytes)
    if not steady:
        larger = any(r.images_per_s and r.batch_size > row.batch_size for r in rows)
        return Comparison(row, None, drift, is_base=row in runs and larger)
    change, same = _memory_change(row, steady)
    return Comparison(row, steady[-1], drift, change, same)


def _runs_of_smallest(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Return the timed runs of the smallest batch size, in the order of time."""
    timed = [row for row in rows if row.images_per_s and row.ran]
    size = min((row.batch_size for row in timed), default=0)
    return sorted((r for r in timed if r.batch_size == size), key=lambda r: r.position)


def _drift(runs: Sequence[MemoryRow]) -> float:
    first, last = (runs[0].images_per_s, runs[-1].images_per_s) if runs else (None, None)
    ratio = first / last if first and last else 1.0
    return ratio if ratio >= DRIFT_RATIO else 1.0


def _steady_below(row: MemoryRow, rows: Sequence[MemoryRow], total_bytes: float) -> list[MemoryRow]:
    """Return the smaller sizes inside the card whose speed held, one row per size, ascending.

    The last is the reference rather than the fastest: its fixed memory is most like the row's.
    """
    speeds = {
        r: r.images_per_s
        for r in rows
        if r.batch_size < row.batch_size and r.images_per_s and r.ran and not r.past(total_bytes)
    }
    best = max(speeds.values(), default=0.0)
    held = [r for r, speed in speeds.items() if speed * FALL_RATIO > best]
    fastest_last = sorted(held, key=lambda r: (r.batch_size, speeds[r]))
    return list({r.batch_size: r for r in fastest_last}.values())


def _memory_change(row: MemoryRow, steady: Sequence[MemoryRow]) -> tuple[float | None, bool | None]:
    """Return memory per image over the reference's, and whether that counts as unchanged.

    Weights and other fixed memory make the ratio fall although no kernel changed; so memory on
    the line through the two sizes before counts as unchanged too.
    """
    here, before, earlier = _peaks([row, steady[-1], *steady[-2:-1]])
    if not here or not before:
        return None, None
    size, size_before = row.batch_size, steady[-1].batch_size
    change = (here * size_before) / (before * size)
    if abs(change - 1) <= SAME_MEMORY_MARGIN or not earlier:
        return change, abs(change - 1) <= SAME_MEMORY_MARGIN
    slope = (before - earlier) / (size_before - steady[-2].batch_size)
    predicted = before + slope * (size - size_before)
    return change, slope > 0 and abs(here / predicted - 1) <= SAME_MEMORY_MARGIN


def _peaks(rows: Sequence[MemoryRow]) -> list[float | None]:
    """Return three peaks of one kind: allocated if the first two rows have it, else reserved."""
    allocated = [r.peak_allocated_bytes for r in rows]
    reserved = [r.peak_reserved_bytes for r in rows]
    peaks = reserved if None in allocated[:2] else allocated
    return [*peaks, None][:3]
