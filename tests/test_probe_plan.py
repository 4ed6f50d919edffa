"""The plan of a probe on simulated cards: which sizes it tries, and why it ends."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labhelpers.formats import GIB, MIB
from labhelpers.probe_curves import h200_probe
from labhelpers.probe_plan import (
    Limits,
    Moment,
    Stop,
    default_limits,
    ended_by,
    next_size,
    predicted_peak_bytes,
    size_past_card,
)
from labhelpers.records import ProbeSpec, Trial, ask

SIZES = [1024, 4096, 8192, 16_384, 32_768, 49_152, 65_536, 98_304, 131_072, 262_144, 524_288]
PLENTY = Moment(0.0, 512 * GIB)


def limits_of(platform="linux", *, card=16 * GIB, free=None, device="cuda:0", spec=None):
    return default_limits(
        spec or ProbeSpec(), device, platform, total_bytes=card,
        free_bytes=card if free is None else free, host_total_bytes=64 * GIB,
    )  # fmt: skip


def ran(size, *, position=0, peak_bytes=None, rate=100_000.0, **facts):
    """A trial as it would be seen: 380 KiB reserved per image unless told otherwise."""
    peak_bytes = 64 * MIB + 380 * 1024 * size if peak_bytes is None else peak_bytes
    seen = {
        "images": size * 5, "steps": 5, "epoch_s": size * 5 / rate,
        "peak_allocated_bytes": int(0.87 * peak_bytes), "peak_reserved_bytes": peak_bytes,
    }  # fmt: skip
    return Trial(kind="probe", batch_size=size, position=position, **{**seen, **facts})


def probe(card, limits, sizes=SIZES, now=PLENTY):
    """Run the plan against a simulated card until it ends; return the sizes and the stop."""
    spec = ask(ProbeSpec, {"probe_sizes": sizes})
    seen = []
    while not isinstance(chosen := next_size(spec, seen, limits, now), Stop):
        assert len(seen) < 30, "the plan does not end"
        seen.append(card(chosen, len(seen)))
    return [trial.batch_size for trial in seen], chosen


def spilling_card(card_bytes):
    """A card under WSL2: past it everything goes on, four times slower."""

    def trial(size, position):
        seen = ran(size, position=position)
        past = (seen.peak_reserved_bytes or 0) > card_bytes
        return ran(size, position=position, rate=25_000.0) if past else seen

    return trial


def plain_card(size, position):
    return ran(size, position=position)


def test_every_size_that_fits_the_budgets_runs_in_growing_order():
    sizes, stop = probe(plain_card, limits_of(card=256 * GIB), sizes=[4096, 1024, 8192])
    assert sizes == [1024, 4096, 8192]
    assert stop.reason == "done"


def test_native_linux_stops_before_the_budget_not_at_the_error():
    sizes, stop = probe(plain_card, limits_of(card=16 * GIB))
    assert sizes == [1024, 4096, 8192, 16_384, 32_768]
    assert (stop.reason, stop.batch_size) == ("memory_budget", 49_152)
    assert "17.9 GiB" in stop.words
    assert "14.4 GiB" in stop.words


def test_native_linux_counts_only_what_is_free():
    sizes, _ = probe(plain_card, limits_of(card=16 * GIB, free=8 * GIB))
    assert sizes[-1] == 16_384


def test_the_recorded_h200_would_be_probed_up_to_524_288():
    recorded = {int(row["batch_size"]): row for row in h200_probe().rows}

    def h200(size, position):
        row = recorded[size]
        return ran(
            size, position=position, rate=row["images_per_s"],
            peak_bytes=row["peak_reserved_bytes"],
            peak_allocated_bytes=row["peak_allocated_bytes"],
        )  # fmt: skip

    limits = limits_of(card=150_109_880_320)
    sizes, stop = probe(h200, limits, sizes=sorted(recorded))
    assert sizes[-1] == 524_288
    assert 65_536 in sizes, "a kernel change must not end the probe"
    assert (stop.reason, stop.batch_size) == ("memory_budget", 1_048_576)


def test_wsl2_shows_the_cliff_and_ends_there():
    sizes, stop = probe(spilling_card(16 * GIB), limits_of("wsl2", card=16 * GIB))
    assert sizes[-2:] == [32_768, 49_152]
    assert (stop.reason, stop.batch_size) == ("oversubscribed", 49_152)


@pytest.mark.parametrize("card_gib", [6, 8, 10, 12, 16, 24, 32])
def test_wsl2_shows_a_cliff_on_every_card(card_gib):
    """Where the list would jump far past the card, one size just past it is added."""
    card = card_gib * GIB
    sizes, stop = probe(spilling_card(card), limits_of("wsl2", card=card))
    largest = ran(sizes[-1]).peak_reserved_bytes or 0
    assert stop.reason == "oversubscribed"
    assert 1.0 < largest / card <= 1.25


def test_native_linux_adds_no_size_past_the_card():
    spec = ask(ProbeSpec, {"probe_sizes": SIZES})
    seen = [ran(1024), ran(16_384)]
    assert size_past_card(spec, seen, limits_of("linux", card=8 * GIB)) is None
    assert size_past_card(spec, seen, limits_of("wsl2", card=8 * GIB)) == 24_320


def test_spill_must_leave_the_host_its_reserve():
    limits = limits_of("wsl2", card=16 * GIB)
    sizes, stop = probe(spilling_card(16 * GIB), limits, now=Moment(0.0, 7 * GIB))
    assert sizes[-1] == 32_768
    assert (stop.reason, stop.batch_size) == ("host_memory", 49_152)


def test_on_a_card_that_holds_it_the_host_is_only_looked_at_for_its_reserve():
    limits = limits_of(card=256 * GIB)
    assert probe(plain_card, limits, now=Moment(0.0, 7 * GIB))[1].reason == "done"
    assert probe(plain_card, limits, now=Moment(0.0, 6 * GIB)) == (
        [],
        Stop("host_memory", "the host has 6.00 GiB free, and batch 1,024 must leave 6.40 GiB of it",
             1024),
    )  # fmt: skip


def test_the_cpu_takes_a_quarter_of_the_free_host_memory():
    limits = limits_of("wsl2", card=16 * GIB, free=12 * GIB, device="cpu")
    assert limits.memory_budget_bytes == 3 * GIB
    assert not limits.can_spill
    sizes, stop = probe(plain_card, limits)
    assert sizes == [1024, 4096]
    assert (stop.reason, stop.batch_size) == ("memory_budget", 8192)


def test_a_size_that_would_pass_the_time_budget_is_not_tried():
    spec = ask(ProbeSpec, {"probe_sizes": SIZES, "time_budget_s": 10})
    limits = limits_of(card=256 * GIB, spec=spec)
    seen = [ran(8192, rate=20_000.0)]
    assert next_size(spec, seen, limits, Moment(1.0, 64 * GIB)) == 1024
    waiting = ask(ProbeSpec, {"probe_sizes": [8192, 16_384], "time_budget_s": 10})
    stop = next_size(waiting, seen, limits, Moment(3.0, 64 * GIB))
    assert isinstance(stop, Stop)
    assert stop.reason == "time_budget"
    assert next_size(waiting, seen, limits, Moment(1.0, 64 * GIB)) == 16_384


def test_a_time_per_image_that_doubled_stretches_the_prediction():
    spec = ask(ProbeSpec, {"probe_sizes": [1024, 2048], "time_budget_s": 2})
    limits = limits_of(spec=spec)
    assert next_size(spec, [ran(1024, rate=20_000)], limits, PLENTY) == 2048
    slow = next_size(spec, [ran(1024, rate=1000)], limits, PLENTY)
    assert isinstance(slow, Stop)
    assert slow.reason == "time_budget"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"outcome": "oom", "oom": {"causes": ["card_full"]}, "cap_bytes": GIB}, "oom"),
        ({"outcome": "oom", "oom": {"causes": ["cap"]}, "cap_bytes": GIB}, "memory_budget"),
        ({"outcome": "oom", "oom": {"causes": ["host"]}, "cap_bytes": GIB}, "memory_budget"),
        ({"outcome": "oom"}, "oom"),
        ({"outcome": "timeout", "error_text": "took longer than 5 s"}, "failed"),
        ({"outcome": "killed"}, "failed"),
        ({"outcome": "error", "error_text": "boom\nmore"}, "failed"),
    ],
)
def test_a_trial_that_did_not_end_well_ends_the_probe(facts, reason):
    trial = Trial(kind="probe", batch_size=4096, **facts)
    assert ended_by(trial).reason == reason
    assert ended_by(trial).batch_size == 4096
    spec = ask(ProbeSpec, {"probe_sizes": SIZES})
    assert next_size(spec, [ran(1024), trial], limits_of(), PLENTY) == ended_by(trial)
    assert "more" not in ended_by(trial).words


def test_a_first_size_never_gets_past_the_card():
    wsl2 = limits_of("wsl2", card=16 * GIB)
    assert wsl2.cap_bytes(predicted=False) == 16 * GIB
    assert wsl2.cap_bytes(predicted=True) is None
    linux = limits_of(card=16 * GIB, free=10 * GIB)
    assert linux.cap_bytes(predicted=True) == linux.cap_bytes(predicted=False) == 9 * GIB


@pytest.mark.parametrize(("platform", "capped"), [("linux", True), ("wsl2", True),
                                                  ("windows", False), (None, False)])  # fmt: skip
def test_the_cpu_is_capped_where_the_system_can(platform, capped):
    limits = limits_of(platform, device="cpu")
    assert (limits.cap_bytes(predicted=True) is not None) == capped
    assert (limits.cap_bytes(predicted=False) is not None) == capped


def test_a_budget_that_was_asked_for_counts():
    spec = ask(ProbeSpec, {"memory_budget_bytes": "3e9", "probe_sizes": SIZES})
    sizes, stop = probe(plain_card, limits_of(card=16 * GIB, spec=spec))
    assert sizes[-1] == 4096
    assert stop.reason == "memory_budget"


def test_a_resumed_probe_skips_what_it_has_seen():
    spec = ask(ProbeSpec, {"probe_sizes": [1024, 4096, 8192]})
    seen = [ran(1024), ran(4096, position=1), ran(1024, position=2, repeat=1)]
    assert next_size(spec, seen, limits_of(), PLENTY) == 8192


def test_the_prediction_starts_anew_after_a_kernel_change():
    old = [ran(1024, peak_bytes=1 * GIB), ran(2048, peak_bytes=2 * GIB)]
    assert predicted_peak_bytes(old, 4096) == pytest.approx(4 * GIB)
    fallen = [*old, ran(4096, peak_bytes=GIB)]
    assert predicted_peak_bytes(fallen, 8192) == pytest.approx(2 * GIB)
    assert predicted_peak_bytes([], 8192) is None


@given(
    card_gib=st.integers(2, 200),
    per_image_kib=st.integers(1, 4000),
    fixed_mib=st.integers(0, 2000),
    sizes=st.lists(st.integers(1, 2_000_000), min_size=1, max_size=12, unique=True),
    platform=st.sampled_from(["linux", "wsl2", "windows"]),
)
@settings(max_examples=150, deadline=None)
def test_no_predicted_size_ever_passes_the_budget(
    card_gib, per_image_kib, fixed_mib, sizes, platform
):
    """On straight lines the prediction is right from the second size on: so is the promise."""
    limits = limits_of(platform, card=card_gib * GIB)

    def card(size, position):
        peak_bytes = fixed_mib * MIB + per_image_kib * 1024 * size
        cap_bytes = limits.cap_bytes(predicted=position > 0)
        if cap_bytes is not None and peak_bytes > cap_bytes:
            return Trial(kind="probe", batch_size=size, outcome="oom", cap_bytes=cap_bytes)
        return ran(size, position=position, peak_bytes=peak_bytes)

    tried, stop = probe(card, dataclasses.replace(limits, time_budget_s=1e12), sizes=sizes)
    assert len(set(tried)) == len(tried)
    assert stop.reason in ("done", "memory_budget", "oversubscribed", "host_memory")
    for size in tried[2:]:
        assert fixed_mib * MIB + per_image_kib * 1024 * size <= 1.001 * limits.memory_budget_bytes


def test_limits_on_a_platform_without_nvidia_never_spill():
    limits = Limits("cpu", None, 8 * GIB, 8 * GIB, 2 * GIB, 60.0, GIB)
    assert not limits.can_spill
    assert probe(plain_card, limits, sizes=[256])[1].reason == "done"
