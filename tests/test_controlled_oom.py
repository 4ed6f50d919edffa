"""A real out-of-memory error in this process, under a limit, and life after it."""

import resource
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labhelpers import controlled_oom, oom_narrative
from labhelpers.cap_series import bytes_per_image, first_size, next_size, size_after_oom
from labhelpers.controlled_oom import run_controlled_oom
from labhelpers.formats import GIB, MIB
from labhelpers.inputs import InputError
from labhelpers.oom_check import check_oom_message
from labhelpers.oom_message import parse_oom_message
from labhelpers.oom_plots import cap_figure
from labhelpers.plots import png_bytes
from labhelpers.records import RemedySpec, ask
from labhelpers.store import RunDirectory


def series(first: int, limit: int) -> list[tuple[int, bool]]:
    """Play a series against a limit that is known."""
    tried: list[tuple[int, bool]] = []
    while (size := next_size(first, tried)) is not None:
        tried.append((size, size <= limit))
        assert len(tried) < 40
    return tried


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_a_series_ends_with_sizes_that_fit_and_one_that_fails(first, limit):
    tried = series(first, limit)
    fitted = [size for size, fits in tried if fits]
    failed = [size for size, fits in tried if not fits]
    if limit < first * 64:
        assert fitted
        assert failed
        assert max(fitted) < min(failed)
    else:
        assert not failed


def test_the_articles_card_would_end_where_the_article_did():
    # 8,192 and 16,384 fit under its cap of 3.98 GiB and 24,576 does not.
    slope = bytes_per_image([(2048, round(728.9 * MIB)), (4096, round(1386.0 * MIB))])
    first = first_size(int(3.98 * GIB), slope)
    assert first == 4096
    assert [size for size, _ in series(first, 20_000)] == [4096, 8192, 12288, 16384, 24576]


@pytest.mark.parametrize(
    ("room_bytes", "slope_bytes", "size"),
    [(1000, 100.0, 4), (1000, 1e9, 1), (0, 1.0, 1), (100 * MIB, None, 32), (10 * MIB, None, 4)],
)
def test_the_first_size_takes_less_than_half_of_the_room(room_bytes, slope_bytes, size):
    assert first_size(room_bytes, slope_bytes) == size


@pytest.mark.parametrize(
    "peaks", [[(1, None), (2, 5)], [(1, 5), (2, None)], [(1, 5), (2, 5)], [(1, 6), (2, 5)]]
)
def test_probes_that_do_not_tell_give_no_slope(peaks):
    assert bytes_per_image(peaks) is None


@pytest.mark.parametrize(
    ("tried", "size"),
    [
        ([(8192, True), (16384, True), (24576, False)], 8192),
        ([(4, True), (8, True)], None),
        ([(8, False), (4, False), (2, True)], 2),
        ([(8, True), (12, False)], None),
        ([], None),
    ],
)
def test_the_size_after_the_error_needs_what_the_error_held(tried, size):
    assert size_after_oom(tried) == size


def new_run(folder: Path) -> RunDirectory:
    return RunDirectory.create(folder / "run")


def asked(**given_values) -> RemedySpec:
    return ask(RemedySpec, {"device": "cpu", **given_values})


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Two sizes that fit in 96 MiB, one that needs far more, and the same once more."""
    run = new_run(tmp_path_factory.mktemp("cap"))
    before = resource.getrlimit(resource.RLIMIT_AS)
    spec = asked(cap_batch_sizes=[16, 32, 4096], cap_budget_bytes=96 * MIB)
    trials = run_controlled_oom(spec, run)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    return run, trials, run_controlled_oom(spec, run)


def test_the_given_sizes_fit_or_fail_and_one_is_trained_again(measured):
    _, trials, _ = measured
    assert [(t.batch_size, t.outcome) for t in trials] == [
        (16, "ok"), (32, "ok"), (4096, "oom"), (32, "ok"),
    ]  # fmt: skip
    assert [t.details["after_oom"] for t in trials] == [False, False, False, True]
    assert {t.cap_bytes for t in trials} == {96 * MIB}
    assert all(t.final_loss > 0 for t in trials if t.outcome == "ok")


def test_the_error_is_reported_as_the_article_asks(measured):
    _, trials, _ = measured
    failed = trials[2]
    assert "DefaultCPUAllocator" in failed.error_text
    assert failed.error_class == "RuntimeError"
    assert failed.oom["kind"] == "host"
    assert failed.oom["requested_bytes"] > MIB
    wanted = {
        "text", "parsed", "batch_size", "fraction", "free_bytes", "total_bytes", "torch", "cuda",
        "driver", "peak_allocated_bytes", "peak_reserved_bytes", "disagreements", "advice", "cap",
        "released",
    }  # fmt: skip
    assert wanted <= failed.details.keys()
    assert (failed.details["batch_size"], failed.details["disagreements"]) == (4096, [])
    assert failed.details["cap"]["budget_bytes"] == 96 * MIB
    assert failed.details["text"] == failed.error_text


def test_all_trials_are_in_the_run_a_second_series_too(measured):
    run, first, second = measured
    assert [t.key for t in run.trials("cap")] == [t.key for t in first + second]
    assert len({t.key for t in first + second}) == 8
    assert [t.repeat for t in first] == [0, 0, 0, 1]
    assert [t.repeat for t in second] == [1, 2, 1, 3]
    assert run.info.specs["cap"]["cap_budget_bytes"] == 96 * MIB
    assert first[0].environment_id in run.info.environments


def test_sizes_are_chosen_so_that_some_fit_and_the_next_fails(tmp_path):
    trials = run_controlled_oom(asked(cap_budget_bytes=64 * MIB), new_run(tmp_path))
    outcomes = [t.outcome for t in trials if not t.details["after_oom"]]
    assert set(outcomes) == {"ok", "oom"}
    fitted = [t.batch_size for t in trials if t.outcome == "ok"]
    failed = [t.batch_size for t in trials if t.outcome == "oom"]
    assert max(fitted) < min(failed)


def test_a_system_without_such_a_limit_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(controlled_oom.sys, "platform", "darwin")
    run = new_run(tmp_path)
    assert run_controlled_oom(asked(), run) == []
    assert run.info.notes[0].startswith("controlled OOM: not run: this system cannot limit")
    assert "not run" in oom_narrative.cap_answer([])


def test_bad_input_is_refused_in_one_line():
    with pytest.raises(InputError, match="cap_fraction: got 1.5"):
        asked(cap_fraction=1.5)
    with pytest.raises(InputError, match="cap_batch_sizes"):
        asked(cap_batch_sizes=[0])


def test_the_story_is_told_from_the_trials(measured):
    _, trials, _ = measured
    table = oom_narrative.cap_table(trials)
    assert list(table["outcome"]) == [
        "trained", "trained", "out of memory", "trained, after the error",
    ]  # fmt: skip
    assert "of the cap" not in table  # the CPU's budget counts addresses
    answer = oom_narrative.cap_answer(trials)
    assert "batch **32** trained and batch **4,096** ran out of memory" in answer
    assert "budget of 96.0 MiB" in answer
    assert "trained again" in oom_narrative.recovery_answer(trials)
    message, observed, platform = oom_narrative.message_of(trials)
    assert (message.causes, observed.batch_size) == (("host",), 4096)
    assert list(oom_narrative.message_table(message, observed)["figure"]) == ["asked for"]
    told = oom_narrative.message_answer(message, check_oom_message(message, observed), platform)
    assert "**host**" in told
    assert "No disagreement found" in told


def test_without_an_error_there_is_nothing_to_check_or_recover_from(measured):
    _, trials, _ = measured
    fitted = trials[:2]
    assert oom_narrative.message_of(fitted) is None
    assert "every size trained, up to batch **32**" in oom_narrative.cap_answer(fitted)
    assert "no error" in oom_narrative.recovery_answer(fitted)
    assert "nothing trained" in oom_narrative.cap_answer(trials[2:3])


def test_the_articles_message_is_read_and_its_absurd_figure_named():
    text, observed = oom_narrative.article_message()
    message = parse_oom_message(text)
    assert message.causes == ("cap",)
    assert message.this_process_bytes is None
    found = check_oom_message(message, observed)
    assert len(found) == 1
    assert found[0].startswith("says 17179869184.00 GiB in use: the driver's mark")
    shown = oom_narrative.message_table(message, observed).set_index("figure")
    assert shown.loc["allowed", "the message says"] == shown.loc["allowed", "measured"]


def test_the_articles_series_is_quoted_as_published():
    table = oom_narrative.article_cap_table()
    assert isinstance(table, pd.DataFrame)
    assert list(table["batch"]) == ["8,192", "16,384", "24,576"]
    assert list(table["of the cap"]) == ["66 %", "93 %", "79 %"]
    assert table["asked for when it failed"].iloc[-1] == "588.0 MiB"


def test_the_figure_has_a_bar_for_each_trial_and_the_limit(measured):
    _, trials, _ = measured
    figure = cap_figure(trials, "a title")
    axes = figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx(
        [(t.peak_allocated_bytes or 0) / MIB for t in trials]
    )
    assert axes.lines[0].get_ydata()[0] == 96
    assert "(MiB)" in axes.get_ylabel()
    assert len(png_bytes(figure)) > 10_000
