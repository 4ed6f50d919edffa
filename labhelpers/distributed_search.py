"""Search one batch size on all ranks: each tries alone, all agree on what came of it.

A rank that runs out of memory leaves no other waiting, because a trial does not talk to other
ranks. As all continue from the same answers, by the same pure function, all come to the same
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from labhelpers.distributed import Team
from labhelpers.oom import is_context_lost, suspected_limit
from labhelpers.search import (
    ProbeOutcome,
    ProbeResult,
    SearchResult,
    WorkloadFailed,
    search_largest,
)

Probe = Callable[[int], ProbeResult]

_WORST_FIRST: tuple[ProbeOutcome, ...] = (
    # Memory first: at a smaller size the other rank's error may be gone, or shows again.
    "oom", "oversubscribed", "killed", "timeout", "library_limit", "error",
)  # fmt: skip


@dataclass(frozen=True)
class RankAnswer:
    """What one rank said of one size; `limit_bytes` is what its trials may use."""

    outcome: ProbeOutcome
    peak_bytes: int | None
    live_bytes: int | None
    limit_bytes: int | None
    needed_bytes: int | None = None
    text: str | None = None


def ranks_of(probe: ProbeResult) -> Sequence[RankAnswer]:
    """Return what each rank said of a size that all tried."""
    answers = probe.payload
    return answers if isinstance(answers, tuple) else ()


def search_together(
    probe: Probe, team: Team, *, max_batch_size: int, limit_bytes: int | None = None,
    time_left: Callable[[], float] | None = None, **choices: Any,
) -> SearchResult:  # fmt: skip
    """Find the largest size that runs on every rank; every rank calls it and gets the same.

    `probe(n)` must not talk to other ranks; an error of its own is an answer too. Limits and
    peaks may differ: the search sees those of the rank that is nearest to its limit.

    Args:
        limit_bytes: what the trials of this rank may use; None where unknown.
        choices: `start`, `strategy`, … of `search_largest`, equal on all ranks.

    Raises:
        InputError, NothingFits, WorkloadFailed: as `search_largest`, on all ranks alike.
    """
    limits = team.gather(limit_bytes)
    known = [limit for limit in limits if limit is not None]
    shared_limit = min(known) if len(known) == len(limits) else None

    def ask(size: int) -> ProbeResult:
        own = _careful(probe, size)
        text = own.payload if isinstance(own.payload, str) else None
        answer = RankAnswer(
            own.outcome, own.peak_bytes, own.live_bytes, limit_bytes, own.needed_bytes, text
        )
        return combine(size, team.gather(answer), shared_limit)

    top = min(team.gather(max_batch_size))
    left = None if time_left is None else lambda: min(team.gather(time_left()))
    try:
        return search_largest(
            ask, max_batch_size=top, limit_bytes=shared_limit, time_left=left, **choices
        )
    except WorkloadFailed as failed:
        raise WorkloadFailed(f"{failed}: {said_of(failed.probes[-1])}", failed.probes) from None


def said_of(probe: ProbeResult) -> str:
    """Return what the ranks said of a size that failed, each text once with its ranks."""
    said: dict[str, list[str]] = {}
    for rank, answer in enumerate(ranks_of(probe)):
        if answer.outcome != "ok":
            said.setdefault(answer.text or answer.outcome, []).append(str(rank))
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {text}"
        for text, ranks in said.items()
    )


def _careful(probe: Probe, size: int) -> ProbeResult:
    """Try a size; an error becomes an answer, as the others wait for one."""
    try:
        return probe(size)
    except Exception as error:
        if is_context_lost(error):
            raise
        limit = suspected_limit(error)
        outcome: ProbeOutcome = "error" if limit is None else "library_limit"
        return ProbeResult(size, outcome, payload=f"{type(error).__name__}: {error}")


def combine(size: int, answers: Sequence[RankAnswer], limit_bytes: int | None) -> ProbeResult:
    """Return the answer of all ranks: the worst outcome, and the peaks nearest to the limit.

    A peak counts as the same share of the common limit as it is of its rank's own.
    """
    outcomes = {answer.outcome for answer in answers}
    worst: ProbeOutcome = next((name for name in _WORST_FIRST if name in outcomes), "ok")
    peaks = [_scaled(answer.peak_bytes, answer, limit_bytes) for answer in answers]
    live = [_scaled(answer.live_bytes, answer, limit_bytes) for answer in answers]
    needed = [_scaled(answer.needed_bytes, answer, limit_bytes) for answer in answers]
    return ProbeResult(
        size, worst, peak_bytes=_largest(peaks), live_bytes=_largest(live),
        needed_bytes=_largest([value for value in needed if value is not None]),
        payload=tuple(answers),
    )  # fmt: skip


def _scaled(value: int | None, answer: RankAnswer, limit_bytes: int | None) -> int | None:
    if value is None or limit_bytes is None or not answer.limit_bytes:
        return value
    return round(value / answer.limit_bytes * limit_bytes)


def _largest(values: Sequence[int | None]) -> int | None:
    """Return the largest value; None where one is unknown, or there is none."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None
