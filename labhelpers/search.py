"""Search the largest batch size that fits: a pure function of a predicate.

A few small probes, a line through their peaks, a jump to just under the limit, a new line, and
so on until one size ran and the next did not. Peaks only choose what to try next; the answer is
a size that ran. So wrong, noisy or missing peaks cost probes, never a wrong answer.

Whatever the peaks say, a search up to `max_batch_size` = N ends within 10·log2(N) + 12 probes:
2·log2(N) + 10 upwards (from the ninth step that does not double the size on, each such step is
at least twice the one before), and at most eight for each halving of the range that is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from labhelpers.forecast import fit_line, has_fallen
from labhelpers.inputs import InputError
from labhelpers.search_result import (
    EndedBy,
    NothingFits,
    ProbeOutcome,
    ProbeResult,
    SearchError,
    SearchResult,
    WorkloadFailed,
)
from labhelpers.search_steps import Sizes, State, Strategy, next_target

__all__ = [
    "NothingFits",
    "ProbeOutcome",
    "ProbeResult",
    "SearchError",
    "SearchResult",
    "WorkloadFailed",
    "search_largest",
]

Maximum = Literal["maximum", "dataset"]


def search_largest(
    probe: Callable[[int], ProbeResult],
    *,
    max_batch_size: int,
    limit_bytes: int | None = None,
    start: int = 2,
    multiple_of: int = 1,
    powers_of_two: bool = False,
    strategy: Strategy = "exact",
    maximum: Maximum = "maximum",
    time_left: Callable[[], float] | None = None,
    max_probes: int | None = None,
) -> SearchResult:
    """Find the largest allowed batch size that runs, up to and including `max_batch_size`.

    `probe(n)` tries n and says what happened; an exception it raises passes through. Without
    `limit_bytes`, what the trials may use, the size doubles and then the range is halved.
    "doubling" stops at the first failure after a success; "bisect" uses no peaks. When the
    first size fails, smaller ones are tried. `maximum` names what the upper limit is.
    `time_left` gives the seconds until the deadline and is asked before each probe.
    If fitting is not monotonic the promise is: `largest` ran and the next size did not.

    Raises:
        InputError: an argument outside what is allowed, or an answer for another size.
        NothingFits: no size ran, after finitely many trials or when the time was up.
        WorkloadFailed: a trial ended with outcome "error" before any size ran.
    """
    sizes = _checked_sizes(max_batch_size, multiple_of, powers_of_two)
    _check_rest(start, strategy, maximum, limit_bytes, max_probes)
    state, stopped = State(), None
    while (size := _next_size(state, sizes, strategy, limit_bytes, start)) is not None:
        stopped = _stop(state, time_left, max_probes)
        if stopped is not None:
            break
        state.add(_ask(probe, size))
        if state.low == 0 and state.bound == "error":
            raise WorkloadFailed(f"the workload failed: {_story(state)}", tuple(state.probes))
    if state.low == 0:
        raise NothingFits(_why_nothing(state, stopped), tuple(state.probes))
    return _result(state, sizes, stopped or state.bound or maximum)


def _next_size(
    state: State, sizes: Sizes, strategy: Strategy, limit_bytes: int | None, start: int
) -> int | None:
    target = next_target(state, strategy, limit_bytes, start, sizes.multiple_of)
    return None if target is None else sizes.pick(state.low, state.high, target)


def _stop(
    state: State, time_left: Callable[[], float] | None, max_probes: int | None
) -> EndedBy | None:
    """Say why no further probe may start; None if one may."""
    if max_probes is not None and len(state.probes) >= max_probes:
        return "probes"
    if time_left is not None and time_left() <= 0:
        return "time"
    return None


def _ask(probe: Callable[[int], ProbeResult], size: int) -> ProbeResult:
    result = probe(size)
    if result.batch_size != size:
        raise InputError(f"batch_size={result.batch_size} in the probe's answer: asked was {size}")
    return result


def _result(state: State, sizes: Sizes, ended_by: EndedBy) -> SearchResult:
    return SearchResult(
        probes=tuple(state.probes),
        largest=state.low,
        fit=fit_line(state.taken_readings),
        ended_by=ended_by,
        monotonic=not has_fallen(state.main_readings),
        closed=sizes.pick(state.low, state.high, state.low) is None,
    )


def _story(state: State) -> str:
    tried = (f"{probe.batch_size} ({probe.outcome})" for probe in state.probes)
    return f"tried batch size {', '.join(tried)}" if state.probes else "nothing was tried"


def _why_nothing(state: State, stopped: EndedBy | None) -> str:
    """Return one line that says what was tried and what to do."""
    if stopped == "time":
        return f"the time was up before any batch size ran: {_story(state)}; allow more time"
    if stopped == "probes":
        return f"no batch size ran in {len(state.probes)} probes: {_story(state)}; allow more"
    return (
        f"no allowed batch size fits: {_story(state)}; free memory on the device, "
        "or make the model or its input smaller"
    )


def _checked_sizes(max_batch_size: int, multiple_of: int, powers_of_two: bool) -> Sizes:
    _check_count("max_batch_size", max_batch_size)
    _check_count("multiple_of", multiple_of)
    if powers_of_two and multiple_of > 1:
        raise InputError(f"multiple_of={multiple_of} with powers_of_two: give only one of them")
    if multiple_of > max_batch_size:
        raise InputError(
            f"multiple_of={multiple_of}: must be at most the largest size, {max_batch_size}"
        )
    return Sizes(max_batch_size, multiple_of, powers_of_two)


def _check_rest(
    start: int, strategy: str, maximum: str, limit_bytes: int | None, max_probes: int | None
) -> None:
    _check_count("start", start)
    _check_choice("strategy", strategy, get_args(Strategy))
    _check_choice("maximum", maximum, get_args(Maximum))
    for name, value in (("limit_bytes", limit_bytes), ("max_probes", max_probes)):
        if value is not None:
            _check_count(name, value)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}={value!r}: give a whole number of at least 1")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{name}={value!r}: give one of {', '.join(allowed)}")
