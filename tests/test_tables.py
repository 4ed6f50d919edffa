"""Trials become rows: medians, two step times, flags, and n/a for what was not measured."""

import pandas as pd
import pytest

from labhelpers.records import Clocks, OtherProcess, Trial
from labhelpers.references import article_curve
from labhelpers.tables import (
    COST,
    SPEED,
    SWEEP_COLUMNS,
    by_batch_size,
    flags,
    median_peaks,
    median_rates,
    readable,
    sweep_table,
)


def trial(size: int, **facts: object) -> Trial:
    measured = {
        "images": 100, "steps": -(-100 // size), "last_batch": 100 % size or size, "updates": 1,
        "epoch_s": 1.0, "step_times_s": (0.1, 0.2, 0.9), "feed_wait_s": 0.25,
        "peak_allocated_bytes": 2**21, "final_loss": 2.3,
    }  # fmt: skip
    return Trial(kind="sweep", batch_size=size, **measured | facts)


def failed(size: int, outcome: str, **facts: object) -> Trial:
    return Trial(kind="sweep", batch_size=size, outcome=outcome, **facts)


def test_one_row_per_batch_size_with_medians_over_the_repeats():
    trials = [trial(32, epoch_s=s, repeat=n) for n, s in enumerate((2.0, 1.0, 4.0))]
    table = sweep_table([trial(64), *trials])
    assert tuple(table.columns) == SWEEP_COLUMNS
    assert list(table["batch_size"]) == [32, 64]
    row = table.iloc[0]
    assert row["images_per_s"] == 50  # of 50, 100 and 25
    assert row["spread"] == pytest.approx((100 - 25) / 50)
    assert row["share_of_best"] == 0.5
    assert (row["epoch_s"], row["repeats"], row["steps"], row["last_batch"]) == (2.0, 3, 4, 4)
    assert row["allocated_mib"] == 2
    assert pd.isna(row["reserved_mib"])
    assert pd.isna(table.iloc[1]["spread"])  # one repeat has none


def test_the_articles_step_time_and_the_median_of_events_are_two_quantities():
    row = sweep_table([trial(50)]).iloc[0]
    assert row["step_ms"] == 500  # one second for two steps
    assert row["event_step_ms"] == 200
    assert row["feed_wait"] == 0.25


def test_step_times_of_the_article_follow_from_its_table():
    table = article_curve().table.set_index("batch_size")
    printed = {32: 1.99, 256: 7.35, 1024: 27.39, 2048: 53.57, 8192: 202.80}
    assert {size: round(table["step_ms"][size], 2) for size in printed} == printed


def test_a_failed_repeat_does_not_hide_the_measured_ones():
    table = sweep_table([failed(32, "timeout"), trial(32, repeat=1), failed(64, "oom")])
    assert list(table["flags"]) == ["timeout", "oom"]
    assert list(table["repeats"]) == [1, 0]
    assert table["images_per_s"][0] == 100
    assert pd.isna(table["images_per_s"][1])
    assert pd.isna(table["steps"][1])


def test_medians_leave_out_what_was_not_measured():
    trials = [trial(32), failed(64, "error"), trial(128, peak_allocated_bytes=None)]
    assert median_rates(trials) == {32: 100, 128: 100}
    assert median_peaks(trials) == {32: 2**21}
    assert list(by_batch_size(reversed(trials))) == [32, 64, 128]


def test_no_trials_are_an_empty_table():
    assert len(sweep_table([])) == 0
    assert len(readable(sweep_table([]))) == 0


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({}, []),
        ({"other_processes": ()}, []),
        ({"other_processes": (OtherProcess(pid=1),)}, ["other process on the device"]),
        ({"alloc_retries": 0}, []),
        ({"alloc_retries": 2}, ["allocator retries"]),
        ({"details": {"cpu_of_others": None}}, []),
        ({"details": {"cpu_of_others": 0.05}}, []),
        ({"details": {"cpu_of_others": 0.5}}, ["others used the CPU"]),
        ({"precision_after": {"both": "ieee"}}, []),
        ({"precision_after": {"both": "mixed"}}, ["mixed precision settings"]),
        ({"clocks_before": Clocks(throttle_reasons=())}, []),
        ({"clocks_after": Clocks(throttle_reasons=("sw_power_cap", "hw_slowdown"))},
         ["throttled: sw_power_cap, hw_slowdown"]),
    ],
)  # fmt: skip
def test_flags_name_what_disturbed_a_trial(facts, found):
    assert flags([trial(32, **facts)]) == found
    assert flags([trial(32), trial(32, **facts), trial(32, **facts)]) == found


def test_a_readable_table_has_units_and_never_a_zero_for_not_measured():
    text = readable(sweep_table([trial(32, epoch_s=0.5), failed(4096, "oom")]))
    assert dict(text.iloc[0]) == {
        "batch": "32", "images/s": "200", "spread": "n/a", "of best": "100.0%",
        "epoch s": "0.500", "step ms": "125.00", "event ms": "200.00", "waiting for feed": "50%",
        "allocated MiB": "2.0", "reserved MiB": "n/a", "steps": "4", "last batch": "4",
        "updates/epoch": "1", "final loss": "2.300", "limited by": "undecided", "flags": "",
    }  # fmt: skip
    assert dict(text.iloc[1]) == dict.fromkeys(text.columns, "n/a") | {
        "batch": "4,096", "flags": "oom",
    }  # fmt: skip


def test_a_table_without_flags_has_no_column_for_them():
    table = sweep_table([trial(32)])
    assert "flags" not in readable(table).columns
    assert list(readable(table, SPEED).columns)[:2] == ["batch", "images/s"]
    assert list(readable(table, COST).columns)[-1] == "final loss"
    assert set(SPEED) | set(COST) <= set(SWEEP_COLUMNS)


@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        ({"steps": 125}, ""),
        ({"steps": 100, "images": 800}, ""),  # a loader that drops the last, short batch
        ({"steps": 334}, "the loader's batches have another size"),
        ({"steps": 125, "details": {"loss_not_finite": True}}, "the loss is not finite"),
    ],
)
def test_what_a_reader_must_know_of_a_trial_is_flagged(changed, flag):
    trial = Trial(**{"kind": "sweep", "batch_size": 8, "images": 1000, "epoch_s": 1.0} | changed)
    assert flags([trial]) == [flag] * bool(flag)
