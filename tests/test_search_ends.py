"""What ends a search besides memory: errors, time, sizes asked for, bad input."""

import math
from collections.abc import Callable

import pytest
from predicates import GIB, fits_up_to, line, never, tried

from labhelpers.inputs import InputError
from labhelpers.search import (
    NothingFits,
    ProbeResult,
    SearchResult,
    WorkloadFailed,
    search_largest,
)

# Failures that are not about memory.


def test_an_error_at_the_first_size_stops_at_once():
    cause = ValueError("bad shape")

    def broken(size: int) -> ProbeResult:
        return ProbeResult(size, "error", payload=cause)

    with pytest.raises(WorkloadFailed, match=r"2 \(error\)") as caught:
        search_largest(broken, max_batch_size=1000)
    assert tried(caught.value) == [2]
    assert caught.value.probes[-1].payload is cause


def test_out_of_memory_at_2_and_an_error_at_1_gives_the_error():
    def probe(size: int) -> ProbeResult:
        return ProbeResult(size, "oom" if size > 1 else "error", payload=size)

    with pytest.raises(WorkloadFailed) as caught:
        search_largest(probe, max_batch_size=1000)
    assert tried(caught.value) == [2, 1]
    assert caught.value.probes[-1].payload == 1


@pytest.mark.parametrize("failure", ["error", "library_limit", "timeout", "killed"])
@pytest.mark.parametrize("limit_bytes", [None, 80 * GIB])
def test_another_end_than_memory_is_named(failure, limit_bytes):
    probe = fits_up_to(1024, line(500, 2), failure=failure)
    result = search_largest(probe, max_batch_size=60_000, limit_bytes=limit_bytes)
    assert (result.largest, result.ended_by, result.closed) == (1024, failure, True)
    assert result.oom_count == 0
    assert len(result.probes) <= 2 * math.log2(60_000) + 4


def test_silent_oversubscription_counts_as_memory():
    probe = fits_up_to(93, line(650, 82), failure="oversubscribed")
    result = search_largest(probe, max_batch_size=1000, limit_bytes=8 * GIB)
    assert (result.largest, result.ended_by) == (93, "memory")
    assert result.oom_count >= 1


# Time.


class Countdown:
    """A clock that an own count of probes advances."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def left(self) -> float:
        return self.seconds

    def slowed(self, probe: Callable[[int], ProbeResult]) -> Callable[[int], ProbeResult]:
        def slow(size: int) -> ProbeResult:
            self.seconds -= 1.0
            return probe(size)

        return slow


def test_the_deadline_ends_the_search_with_the_largest_that_ran():
    clock = Countdown(3.0)
    probe = clock.slowed(fits_up_to(1000))
    result = search_largest(probe, max_batch_size=10_000, time_left=clock.left)
    assert tried(result) == [2, 4, 8]
    assert (result.largest, result.ended_by, result.closed) == (8, "time", False)


def test_a_proof_that_came_in_time_is_not_called_late():
    clock = Countdown(2.0)
    result = search_largest(clock.slowed(fits_up_to(1)), max_batch_size=1000, time_left=clock.left)
    assert (result.largest, result.ended_by, result.closed) == (1, "memory", True)


def test_no_time_at_all_is_a_clear_error():
    with pytest.raises(NothingFits, match="time was up before any batch size ran: nothing"):
        search_largest(fits_up_to(10), max_batch_size=10, time_left=lambda: 0.0)
    with pytest.raises(NothingFits, match="in 1 probes"):
        search_largest(never, max_batch_size=10, max_probes=1)


# Sizes asked for.


def test_multiples_and_powers_of_two():
    probe = fits_up_to(93, line(650, 82))
    result = search_largest(probe, max_batch_size=1000, limit_bytes=8 * GIB, multiple_of=8)
    assert all(size % 8 == 0 for size in tried(result))
    assert (result.largest, result.closed) == (88, True)
    assert 96 in tried(result)
    result = search_largest(probe, max_batch_size=1000, limit_bytes=8 * GIB, powers_of_two=True)
    assert all(size & (size - 1) == 0 for size in tried(result))
    assert (result.largest, result.closed) == (64, True)
    assert 128 in tried(result)


def test_a_multiple_that_does_not_fit_is_not_replaced():
    with pytest.raises(NothingFits, match=r"8 \(oom\);") as caught:
        search_largest(fits_up_to(7), max_batch_size=100, multiple_of=8)
    assert tried(caught.value) == [8]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0: give a whole number of at least 1"),
        ({"max_batch_size": 8.0}, "max_batch_size=8.0"),
        ({"max_batch_size": True}, "max_batch_size=True"),
        ({"start": 0}, "start=0"),
        ({"multiple_of": 16}, "multiple_of=16: must be at most the largest size, 10"),
        ({"multiple_of": 2, "powers_of_two": True}, "give only one of them"),
        ({"limit_bytes": -1}, "limit_bytes=-1"),
        ({"max_probes": 0}, "max_probes=0"),
        ({"strategy": "guess"}, "strategy='guess': give one of exact, doubling, bisect"),
        ({"maximum": "wall"}, "maximum='wall'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_tried(asked, told):
    def untouched(size: int) -> ProbeResult:
        raise AssertionError("tried")

    with pytest.raises(InputError) as caught:
        search_largest(untouched, **{"max_batch_size": 10, **asked})
    assert told in str(caught.value)


def test_records_refuse_what_cannot_be():
    with pytest.raises(InputError, match="outcome='fine': give one of ok, oom"):
        ProbeResult(2, "fine")
    with pytest.raises(InputError, match="peak_bytes=0: must be above 0; give None"):
        ProbeResult(2, "ok", 0)
    with pytest.raises(InputError, match="largest=4 did not run"):
        SearchResult((ProbeResult(4, "oom"),), 4, None, "memory", True, True)
    with pytest.raises(InputError, match="batch_size=3 in the probe's answer: asked was 2"):
        search_largest(lambda size: ProbeResult(size + 1, "ok"), max_batch_size=10)
