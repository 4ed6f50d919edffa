"""Judge, from figures alone, whether a batch size ran past the card without an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from labhelpers.formats import mib, show_rate, show_share, show_times
from labhelpers.memory_rows import MemoryRow, number_above_zero, read_rows
from labhelpers.platforms import (
    SPILLING_PLATFORMS,
    Platform,
    checked_platform,
    clean_driver_value,
    fallback_policy,
    platform_of,
)
from labhelpers.slowdowns import CAUSES, Cause, Comparison, compare_rows, explain_fall

__all__ = [
    "CAUSES",
    "MemoryJudgement",
    "best_safe_batch",
    "clean_driver_value",
    "fallback_policy",
    "judge_memory",
    "platform_of",
]

Verdict = Literal["no", "suspected", "certain"]

DOUBLED_RATIO = 2.0
NEAR_SHARE = 0.95
"""Share of the card from which it is near: on one card 23,371 of 24,576 MiB were usable."""
NEAR_AND_SLOW_SHARE = 0.85
"""The same where time doubled too: WSL2 ran out with 2 GB reported free (microsoft/WSL #41176)."""
FULL_FREE_SHARE = 0.01


@dataclass(frozen=True)
class MemoryJudgement:
    """The verdict on one row; `causes` name what explains its fall in speed, `()` for no fall."""

    batch_size: int
    verdict: Verdict
    causes: tuple[Cause, ...] = ()
    evidence: tuple[str, ...] = ()
    images_per_s: float | None = None
    outcome: str | None = None


def judge_memory(rows: Iterable[Any], total_bytes: float, platform: str) -> list[MemoryJudgement]:
    """Judge each row: did it run past the card, and what explains each fall in speed.

    `certain`: allocated is more than the card holds; or reserved is, and the time per image at
    least doubled with the memory per image unchanged. `suspected`: near or past the card by one
    sign only (near counts only where the driver can spill: WSL2, Windows). Otherwise `no`: a
    fall in images/s alone proves nothing.

    Args:
        rows: records or mappings with `batch_size`, and where known `images_per_s`,
            `peak_allocated_bytes`, `peak_reserved_bytes`, `alloc_retries`, `free_bytes`,
            `kernels`, `clock_mhz`, `throttled`, `other_processes`, `position`, `outcome`.
            In any order; the smallest size may be repeated to show drift.
        total_bytes: what the card holds, as `torch.cuda.mem_get_info()` says.
        platform: linux, wsl2 or windows.

    Returns:
        One judgement per row, in the order given.

    Raises:
        InputError: one line, for an unknown platform, a total that is not above 0, or a value
            that is not a finite number.
    """
    total = number_above_zero("total_bytes", total_bytes)
    known = checked_platform(platform)
    return [_judge(against, total, known) for against in compare_rows(read_rows(rows), total)]


def best_safe_batch(judgements: Sequence[MemoryJudgement]) -> int | None:
    """Return the fastest batch below the first one that is suspected or certain.

    Only rows that ran and were judged `no` count, and of each size its first. Where no speed is
    known it is the largest of them; None where no size is safe.
    """
    limit = min((j.batch_size for j in judgements if j.verdict != "no"), default=None)
    below = [j for j in judgements if limit is None or j.batch_size < limit]
    ran = [j for j in below if j.outcome in (None, "ok")]
    safe = list({j.batch_size: j for j in reversed(ran)}.values())
    speeds = [(j.images_per_s, -j.batch_size) for j in safe if j.images_per_s is not None]
    if speeds:
        return -max(speeds)[1]
    return max((j.batch_size for j in safe), default=None)


def _judge(against: Comparison, total: float, platform: Platform) -> MemoryJudgement:
    row = against.row
    verdict, reason = _verdict(against, total, platform)
    found = explain_fall(against, verdict)
    return MemoryJudgement(
        batch_size=row.batch_size,
        verdict=verdict,
        causes=tuple(found),
        evidence=(
            _memory_in_words(row, total),
            reason,
            *_speed_in_words(against),
            *found.values(),
        ),
        images_per_s=row.images_per_s,
        outcome=row.outcome,
    )


def _verdict(against: Comparison, total: float, platform: Platform) -> tuple[Verdict, str]:
    row = against.row
    note = _linux_note(platform)
    if row.peak_allocated_bytes is not None and row.peak_allocated_bytes > total:
        return "certain", f"Allocated is more than the card holds: not all of it lies there.{note}"
    if row.past(total):
        return _past_by_reserved(against, note)
    near = _near(against, total) if platform in SPILLING_PLATFORMS else None
    if near is not None:
        return "suspected", near
    return "no", _nothing_found(row, total, platform)


def _past_by_reserved(against: Comparison, note: str) -> tuple[Verdict, str]:
    """Judge a row whose reserved memory alone is more than the card holds."""
    if against.slowdown is None:
        missing = "no smaller size inside the card was timed beside it"
    elif against.remaining < DOUBLED_RATIO:
        missing = (
            f"the time per image is {show_times(against.remaining)} the reference's, not double"
        )
    elif against.same_memory is None:
        missing = "the memory per image is not known on both sides"
    elif not against.same_memory:
        missing = "the memory per image changed, so other kernels may have run"
    else:
        return "certain", (
            "Reserved is more than the card holds, and the time per image at least doubled with"
            f" the memory per image unchanged.{note}"
        )
    return "suspected", f"Reserved is more than the card holds, but {missing}: one sign only.{note}"


def _near(against: Comparison, total: float) -> str | None:
    """Say by which sign the row is near the card's limit; None if by none."""
    row = against.row
    peak = max(row.peak_allocated_bytes or 0.0, row.peak_reserved_bytes or 0.0)
    slow = against.remaining >= DOUBLED_RATIO and against.same_memory is True
    if peak >= (NEAR_AND_SLOW_SHARE if slow else NEAR_SHARE) * total:
        return (
            f"The peak is {show_share(peak / total)} of the card, and spill can begin below the"
            " nominal size: one sign only."
        )
    if _reported_full(row, total) and not against.held:
        speed = "the speed fell" if against.fell else "nothing shows that the speed held"
        return (
            f"The driver reports {mib(row.free_bytes):,.0f} MiB free, and {speed}: one sign only."
        )
    return None


def _reported_full(row: MemoryRow, total: float) -> bool:
    return row.free_bytes is not None and row.free_bytes <= FULL_FREE_SHARE * total


def _nothing_found(row: MemoryRow, total: float, platform: Platform) -> str:
    if row.outcome == "oom":
        return "It ended in an out-of-memory error: the limit showed itself, no silent spill."
    if platform in SPILLING_PLATFORMS and _reported_full(row, total):
        return "The driver reports the card full, but the speed held: full, not past it."
    if row.peak_allocated_bytes is None and row.peak_reserved_bytes is None:
        return "No peak is known, and no other sign points past the card."
    if platform == "linux":
        return "The peaks are inside the card, and native Linux never moves part of them out."
    return "The peaks are inside the card."


def _linux_note(platform: Platform) -> str:
    if platform != "linux":
        return ""
    return (
        " On native Linux cudaMalloc cannot do this: either managed memory is in use, or the total"
        " is that of another device or of a slice."
    )


def _memory_in_words(row: MemoryRow, total: float) -> str:
    parts = [
        f"{name} {mib(peak):,.0f} MiB ({show_share(peak / total)})"
        for name, peak in (
            ("allocated", row.peak_allocated_bytes),
            ("reserved", row.peak_reserved_bytes),
        )
        if peak is not None
    ]
    return f"Peak of {mib(total):,.0f} MiB: {', '.join(parts) or 'not known'}."


def _speed_in_words(against: Comparison) -> tuple[str, ...]:
    if against.reference is None or against.slowdown is None:
        return ()
    words = (
        f"{show_rate(against.row.images_per_s)} against"
        f" {show_rate(against.reference.images_per_s)} at batch"
        f" {against.reference.batch_size:,}: time per image {show_times(against.slowdown, 2)}"
    )
    if against.memory_change is None:
        return (f"{words}.",)
    return (f"{words}, memory per image {show_times(against.memory_change, 2)}.",)
