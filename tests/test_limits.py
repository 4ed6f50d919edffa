"""What limits a batch size: shares from trials, verdicts from shares, planted cases on the CPU."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labhelpers.limits import (
    ADVICE,
    CLEAR_LEAD,
    Shares,
    limited_by,
    limits_of,
    shares_of,
    total_length,
)
from labhelpers.records import DriverMemory, SweepSpec, Trial, ask
from labhelpers.store import RunDirectory
from labhelpers.sweep import run_sweep

PLANTED = Path(__file__).with_name("planted_workloads.py")
GIB = 2**30


def trial(wait_s: float | None = 1.0, **facts: object) -> Trial:
    """A GPU epoch of 10 s over 1,000 images at batch 100."""
    known = {
        "kind": "sweep", "batch_size": 100, "images": 1000, "steps": 10, "epoch_s": 10.0,
        "device": "cuda:0", "feed_wait_s": wait_s,
    }  # fmt: skip
    return Trial(**(known | facts))


def profile(kernel_s: float | None, **facts: object) -> dict[str, object]:
    """Two profiled steps of batch 100."""
    return {"kernel_s": kernel_s, "allocation_s": 0.0, "wall_s": 4.0, "steps": 2, "images": 200,
            "why": None} | facts  # fmt: skip


# Shares


def test_idle_time_is_divided_as_the_host_spent_its_time():
    # 0.4 s of kernels for 200 images are 2 s of the epoch; the host waited 75 % of the time.
    shares = shares_of([trial(7.5)], profile(0.4))
    assert shares.compute == pytest.approx(0.2)
    assert shares.feed == pytest.approx(0.8 * 0.75)
    assert shares.launch == pytest.approx(0.8 * 0.25)
    assert shares.memory == 0


@given(
    st.floats(0, 10), st.floats(1e-6, 100), st.floats(0, 4), st.integers(0, 3)
)  # fmt: skip
def test_known_shares_add_up_to_one_and_none_is_negative(wait_s, kernel_s, allocation_s, retries):
    found = shares_of(
        [trial(wait_s, alloc_retries=retries)], profile(kernel_s, allocation_s=allocation_s)
    ).known()
    assert set(found) == {"feed", "launch", "compute", "memory"}
    assert sum(found.values()) == pytest.approx(1)
    assert min(found.values()) >= 0


def test_a_profiler_without_kernels_leaves_launching_and_computing_unknown():
    for nothing in (None, {}, profile(None), profile(0.0)):
        shares = shares_of([trial(3.0)], nothing)
        assert (shares.feed, shares.launch, shares.compute) == (0.3, None, None)


def test_on_the_cpu_launching_is_a_part_of_computing():
    shares = shares_of([trial(3.0, device="cpu")], profile(0.4))
    assert (shares.feed, shares.launch, shares.compute) == (0.3, None, 0.7)
    assert shares.on_cpu


def test_time_in_the_drivers_memory_calls_counts_only_where_the_epoch_had_retries():
    asking = profile(0.4, allocation_s=2.0)
    assert shares_of([trial(0.0)], asking).memory == 0
    shares = shares_of([trial(0.0, alloc_retries=5)], asking)
    assert shares.memory == pytest.approx(0.5)
    assert shares.retries == 5
    assert limited_by(shares).verdict == "memory"


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0), ([(1, 3)], 2), ([(1, 3), (2, 5)], 4), ([(4, 5), (1, 2)], 2),
        ([(1, 10), (2, 3), (4, 5)], 9), ([(1, 2), (2, 3)], 2),
    ],
)  # fmt: skip
def test_overlapping_kernels_count_once(spans, length):
    assert total_length(spans) == length


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=20))
def test_the_length_of_a_union_is_the_number_of_covered_units(pairs):
    spans = [(start, start + width) for start, width in pairs]
    covered = {unit for start, end in spans for unit in range(start, end)}
    assert total_length(spans) == len(covered)


# Verdicts


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        (Shares(0.9, 0.05, 0.05, 0.0), "feed"),
        (Shares(0.1, 0.7, 0.2, 0.0), "launch"),
        (Shares(0.01, 0.02, 0.97, 0.0), "compute"),
        (Shares(0.1, 0.1, 0.2, 0.6), "memory"),
        (Shares(0.46, 0.45, 0.09, 0.0), "undecided"),
        (Shares(0.46, 0.36, 0.18, 0.0), "feed"),
        (Shares(0.9, 0.05, 0.05, 0.0, oversubscribed=True), "oversubscribed"),
        (Shares(0.9), "feed"),
        (Shares(0.5), "undecided"),
        (Shares(0.05), "undecided"),
        (Shares(None, oversubscribed=True), "oversubscribed"),
        (Shares(0.8, None, 0.2, on_cpu=True), "feed"),
        (Shares(0.2, None, 0.8, on_cpu=True), "compute"),
        (Shares(0.5, None, 0.5, on_cpu=True), "undecided"),
    ],
)
def test_the_largest_share_is_the_verdict_if_it_leads(shares, verdict):
    found = limited_by(shares)
    assert found.verdict == verdict
    assert found.evidence
    assert found.advice


def test_a_verdict_says_why_and_what_to_do():
    found = limited_by(Shares(0.1, 0.7, 0.2, 0.0))
    assert found.evidence == (
        "the device worked 20 % of the time",
        "it was idle for 10 % while the host waited for images",
        "it was idle for 70 % while the host launched work",
    )
    assert found.advice == ADVICE["launch"]
    close = limited_by(Shares(0.46, 0.45, 0.09, 0.0))
    assert close.advice == f"{ADVICE['feed']}; or {ADVICE['launch']}"
    unknown = limited_by(Shares(0.3, retries=2))
    assert unknown.evidence[-1] == "the allocator gave memory back 2 times"
    assert "profiler" in unknown.advice


@given(st.lists(st.floats(0.001, 1), min_size=4, max_size=4))
def test_a_verdict_never_names_a_share_that_does_not_lead(parts):
    feed, launch, compute, memory = (part / sum(parts) for part in parts)
    found = limited_by(Shares(feed, launch, compute, memory))
    others = {"feed": feed, "launch": launch, "compute": compute, "memory": memory}
    if found.verdict != "undecided":
        leader = others.pop(found.verdict)
        assert all(leader - share >= CLEAR_LEAD for share in others.values())


# Whole sweeps


def test_every_measured_size_is_judged_by_its_own_profile():
    trials = [trial(9.0), trial(9.0, repeat=1), trial(0.1, batch_size=200),
              trial(batch_size=300, outcome="oom", epoch_s=None)]  # fmt: skip
    profiles = [
        Trial(kind="limits", batch_size=200, details={"limits": profile(1.9)}),
        Trial(kind="limits", batch_size=100, details={"limits": profile(0.1)}),
    ]
    found = limits_of(trials, profiles)
    assert {size: each.verdict for size, each in found.items()} == {100: "feed", 200: "compute"}
    assert {size: each.verdict for size, each in limits_of(trials).items()} == {
        100: "feed", 200: "undecided",
    }  # fmt: skip


def test_more_memory_than_the_card_holds_is_oversubscribed():
    card = DriverMemory(total_bytes=16 * GIB)
    past = trial(1.0, peak_allocated_bytes=30 * GIB, memory_before=card)
    assert limits_of([past])[100].verdict == "oversubscribed"
    within = trial(9.0, peak_allocated_bytes=GIB, memory_before=card)
    assert limits_of([within])[100].verdict == "feed"


def test_a_size_of_which_nothing_is_known_is_left_out():
    assert limits_of([trial(None), trial(None, batch_size=5, epoch_s=None)]) == {}


@pytest.mark.parametrize(
    ("name", "verdict"), [("sleeping_feed", "feed"), ("large_convolution", "compute")]
)
def test_planted_cases_on_the_cpu(tmp_path, name, verdict):
    run = RunDirectory.create(tmp_path / "run")
    given = {"workload": f"{PLANTED}:{name}", "batch_sizes": [4], "repeats": 1, "device": "cpu"}
    trials = run_sweep(ask(SweepSpec, given), run)
    found = limits_of(trials, run.trials("limits"))[4]
    assert found.verdict == verdict
    assert trials[0].feed == "own"
    assert run.trials("limits") == []  # on the CPU nothing is profiled
