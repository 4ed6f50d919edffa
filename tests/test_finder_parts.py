"""The finder's pure parts: terms, verdicts, headroom, reports and words, from made-up trials."""

import json
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from labhelpers import finder_narrative as narrative
from labhelpers.finder_failures import failure_facts
from labhelpers.finder_headroom import candidates, leaves_headroom, with_headroom
from labhelpers.finder_plots import search_sheet
from labhelpers.finder_report import BatchSizeReport, result_of, split_effective
from labhelpers.finder_search import notes_of
from labhelpers.finder_trials import (
    CPU_LIMIT_BYTES,
    HEADROOM_MARK,
    Terms,
    judged,
    outcome_of,
    probe_result,
    sizes_that_ran,
    terms_of,
    trial_of,
    variant_of,
)
from labhelpers.inputs import InputError
from labhelpers.records import FinderSpec, Trial
from labhelpers.workloads import Workload, batch_of

MIB, GIB = 2**20, 2**30
TERMS = Terms(
    strategy="exact", top=1000, maximum="dataset", headroom=0.1, multiple_of=1,
    powers_of_two=False, limit_bytes=8 * GIB, cap_bytes=8 * GIB, total_bytes=139 * GIB,
    emulated=True, device_name="a card", dataset_size=1000, batch_norm=True,
)  # fmt: skip


def trial(
    batch_size: int, outcome: str = "ok", *, terms: Terms = TERMS, purpose: str = "search",
    live_mib: float | None = None, reserved_mib: float | None = None, cap_mib: int | None = None,
    device: str = "cuda:0", **facts,
) -> Trial:  # fmt: skip
    """A trial of ResNet50-like memory, 650 MiB and 82 MiB a sample, unless told otherwise."""
    ran = outcome == "ok"
    live = live_mib if live_mib is not None else 650 + 82 * batch_size
    reserved = reserved_mib if reserved_mib is not None else min(1.04 * live, 8192)
    peaks = {
        "first_allocated": int(0.9 * live * MIB), "steady_allocated": int(live * MIB),
        "first_reserved": int(reserved * MIB), "steady_reserved": int(reserved * MIB),
    }  # fmt: skip
    if device == "cpu":
        peaks |= {"first_reserved": None, "steady_reserved": None}
    about = {
        "batch_size": batch_size, "workload": "net", "device": device, "precision": "fp32",
        "variant": "v" + (HEADROOM_MARK if purpose == "headroom" else ""),
        "cap_bytes": None if cap_mib is None else cap_mib * MIB,
    }  # fmt: skip
    timed = {"images": 4 * batch_size, "steps": 4, "epoch_s": 0.4 + 0.001 * batch_size}
    known = {"outcome": outcome, "peaks": peaks if ran else {}, "wall_s": 0.5, "start_s": 2.0}
    return trial_of({**known, **(timed if ran else {}), **facts}, about, terms, purpose)


def report(trials: list[Trial], terms: Terms = TERMS) -> BatchSizeReport:
    searched = [t for t in trials if t.details["purpose"] == "search"]
    return BatchSizeReport("net", "v", terms, result_of(searched, terms), tuple(trials))


USUAL = [trial(2), trial(20), trial(84), trial(90), trial(93, "oom"), trial(91), trial(92, "oom")]


# Terms


def facts(device: str = "cuda:0", **changes) -> dict:
    environment = {"device": device, "device_name": "a card"}
    return {
        "environment": environment, "batch_norm": False, "dataset_size": None,
        "room_bytes": 20 * GIB, "total_bytes": 24 * GIB, **changes,
    }  # fmt: skip


def test_what_may_be_used_is_what_is_free_or_less():
    terms = terms_of(FinderSpec(), facts())
    assert (terms.limit_bytes, terms.emulated, terms.card_bytes) == (20 * GIB, False, 24 * GIB)
    terms = terms_of(FinderSpec(limit_bytes=8 * GIB), facts())
    assert (terms.limit_bytes, terms.cap_bytes, terms.card_bytes) == (8 * GIB,) * 3
    terms = terms_of(FinderSpec(limit_bytes=80 * GIB), facts())
    assert terms.limit_bytes == 20 * GIB


def test_the_cpu_has_a_budget_always():
    terms = terms_of(FinderSpec(), facts("cpu"))
    assert terms.limit_bytes == terms.cap_bytes == CPU_LIMIT_BYTES
    terms = terms_of(FinderSpec(), facts("cpu", room_bytes=GIB))
    assert terms.limit_bytes == GIB // 2
    assert terms_of(FinderSpec(limit_bytes=3 * GIB), facts("cpu")).limit_bytes == 3 * GIB


def test_on_wsl2_a_cap_makes_the_end_of_the_card_an_error(monkeypatch):
    monkeypatch.setattr("platform.release", lambda: "6.6.87.2-Microsoft-standard-WSL2")
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert terms_of(FinderSpec(), facts()).cap_bytes == 20 * GIB
    monkeypatch.setattr("platform.release", lambda: "6.1.0")
    assert terms_of(FinderSpec(), facts()).cap_bytes is None


@pytest.mark.parametrize(
    ("asked", "known", "top", "maximum"),
    [
        ({}, None, 2**20, "maximum"),
        ({"dataset_size": 10}, None, 10, "dataset"),
        ({"dataset_size": 10}, 50, 10, "dataset"),
        ({}, 50, 50, "dataset"),
        ({"max_batch_size": 20}, 50, 20, "maximum"),
        ({"max_batch_size": 50}, 50, 50, "dataset"),
    ],
)
def test_the_top_is_the_data_set_or_the_maximum(asked, known, top, maximum):
    terms = terms_of(FinderSpec(**asked), facts(dataset_size=known))
    assert (terms.top, terms.maximum) == (top, maximum)


def test_whatever_changes_the_trials_changes_the_variant():
    asked = [
        {}, {"limit_bytes": GIB}, {"strategy": "doubling"}, {"num_iterations": 7},
        {"input_shape": (3, 8, 8)}, {"optimizer": "sgd"}, {"multiple_of": 8},
        {"powers_of_two": True}, {"headroom": 0.2}, {"dataset_size": 9}, {"max_batch_size": 9},
    ]  # fmt: skip
    names = [variant_of(FinderSpec(**each)) for each in asked]
    assert len(set(names)) == len(asked)


# How a trial ended


def test_both_peaks_are_kept_and_the_larger_one_counts():
    """The first step may take the most: 9.849 GB, and 5.016 GB from then on."""
    peaks = {"first_allocated": 9_849_000_000, "steady_allocated": 5_016_000_000}
    seen = trial_of({"outcome": "ok", "peaks": peaks}, {"batch_size": 4}, TERMS, "search")
    assert seen.first_step_peak_bytes == 9_849_000_000
    assert seen.peak_allocated_bytes == 5_016_000_000
    assert probe_result(seen).peak_bytes == 9_849_000_000


def test_more_than_the_budget_does_not_fit_on_the_cpu():
    terms = replace(TERMS, limit_bytes=100 * MIB, cap_bytes=100 * MIB)
    inside, outside = (trial(4, live_mib=size, device="cpu", terms=terms) for size in (99, 101))
    assert outcome_of(judged(inside, [], terms)) == "ok"
    assert outcome_of(judged(outside, [], terms)) == "oversubscribed"


@pytest.mark.parametrize(
    ("release", "live_mib", "expected"),
    [
        ("5.15-microsoft-standard-WSL2", 9000, "oversubscribed"),
        ("5.15-microsoft-standard-WSL2", 8000, "ok"),
        ("6.1.0", 9000, "ok"),
        ("6.1.0", 140 * 1024, "oversubscribed"),
    ],
)
def test_silent_oversubscription_does_not_fit(monkeypatch, release, live_mib, expected):
    """30 GiB on a 16 GiB card is certain; past what was free it spills where drivers do that."""
    monkeypatch.setattr("platform.release", lambda: release)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    seen = trial(4, live_mib=live_mib, reserved_mib=live_mib)
    assert outcome_of(judged(seen, [], TERMS)) == expected


def test_a_library_limit_is_an_error_with_a_name():
    seen = trial(1025, "error", library_limit=True)
    assert (seen.outcome, outcome_of(seen)) == ("error", "library_limit")
    assert probe_result(seen).peak_bytes is None


# Headroom


def test_what_leaves_the_headroom():
    allowed_mib = TERMS.allowed_bytes / MIB
    assert leaves_headroom(trial(8, reserved_mib=allowed_mib), TERMS)
    assert not leaves_headroom(trial(8, reserved_mib=allowed_mib + 1), TERMS)
    assert not leaves_headroom(trial(8, "oom"), TERMS)
    assert leaves_headroom(trial(91), replace(TERMS, headroom=0.0))


def test_candidates_lie_between_what_is_known_and_the_largest():
    sizes = candidates(USUAL, TERMS, found_end=True)
    assert sizes == sorted(sizes, reverse=True)
    assert with_headroom(USUAL, TERMS) == 20 < sizes[-1] <= sizes[0] < 91
    assert 650 + 82 * sizes[0] < 0.9 * 8192
    multiples = candidates(USUAL, replace(TERMS, multiple_of=8), found_end=True)
    assert multiples
    assert all(size % 8 == 0 for size in multiples)
    powers = candidates(USUAL, replace(TERMS, strategy="doubling"), found_end=True)
    assert set(powers) <= {32, 64}


def test_nothing_is_proved_where_the_largest_leaves_enough():
    assert candidates([trial(2), trial(16)], TERMS, found_end=False) == []
    assert candidates(USUAL, replace(TERMS, headroom=0.0), found_end=True) == []


def test_candidates_end_at_the_smallest_size():
    sizes = candidates([trial(2, live_mib=8000, reserved_mib=8190)], TERMS, found_end=True)
    assert sizes
    assert sizes[-1] == 1


# Reports


def test_a_report_is_derived_from_its_trials():
    proof = trial(82, purpose="headroom", cap_mib=7372, reserved_mib=7300)
    found = report([*USUAL, proof])
    assert (found.largest, found.with_headroom, found.oom_count) == (91, 82, 2)
    assert found.ended == "memory"
    assert found.result.closed
    assert found.utilisation == 1
    assert found.utilisation_at(82) == pytest.approx(7300 / 8192)
    assert found.search_s == pytest.approx(4.0)
    assert found.start_s == 2.0
    assert found.fastest_sensible == 84
    assert found.at(82) == [proof]
    data = json.loads(json.dumps(found.to_dict()))
    assert [probe["batch_size"] for probe in data["probes"]] == [2, 20, 84, 90, 93, 91, 92, 82]
    assert data["line"]["bytes_per_sample"] > 80 * MIB
    assert len(data["line"]["residuals_bytes"]) == 5


@pytest.mark.parametrize(
    ("trials", "terms", "ended_by", "closed"),
    [
        ([trial(2), trial(1000)], TERMS, "dataset", True),
        ([trial(2), trial(64)], TERMS, "time", False),
        ([trial(2), trial(4), trial(8, "oom")], TERMS, "time", False),
        (
            [trial(2), trial(4), trial(8, "oom")], replace(TERMS, strategy="doubling"),
            "memory", False,
        ),
        ([trial(2), trial(3, "killed")], TERMS, "killed", True),
        ([trial(8), trial(16, "timeout")], replace(TERMS, multiple_of=8), "timeout", True),
        ([trial(2, "oom"), trial(1)], TERMS, "memory", True),
    ],
)  # fmt: skip
def test_what_ended_a_search_follows_from_its_trials(trials, terms, ended_by, closed):
    result = result_of(trials, terms)
    assert (result.ended_by, result.closed) == (ended_by, closed)
    assert result.largest == max(sizes_that_ran(trials))


def test_without_a_size_that_ran_there_is_no_result():
    assert result_of([trial(2, "oom"), trial(1, "oom")], TERMS) is None


def test_peaks_that_fall_are_called_not_monotonic():
    fallen = [trial(4213, live_mib=1425), trial(4297, live_mib=1149), trial(4298, "oom")]
    found = report(fallen, replace(TERMS, limit_bytes=int(1.4 * GIB), top=60_000))
    assert not found.monotonic
    assert found.ended == "memory; the peaks are not monotonic"
    assert any("not" in note and "larger one might" in note for note in notes_of(found, "cuda:0"))
    noise = [trial(2, live_mib=3), trial(3, live_mib=2.5), trial(4, "oom")]
    assert report(noise).monotonic


def test_a_last_batch_of_one_is_noted_only_where_it_matters():
    for size, terms, noted in (
        (2, replace(TERMS, dataset_size=59_999, top=2, maximum="maximum"), True),
        (2, replace(TERMS, dataset_size=60_000, top=2, maximum="maximum"), False),
        (2, replace(TERMS, dataset_size=59_999, top=2, batch_norm=False), False),
        (1, replace(TERMS, dataset_size=3, top=1, maximum="maximum"), False),
    ):
        notes = notes_of(report([trial(size)], terms), "cpu")
        assert any("last batch of 1" in note for note in notes) is noted


# Micro-batches


@pytest.mark.parametrize(
    ("effective", "largest", "pieces"),
    [
        (1024, 84, (64,) * 16), (1024, 2048, (1024,)), (100, 100, (100,)), (100, 50, (50, 50)),
        (1021, 84, (79,) * 7 + (78,) * 6), (7, 3, (3, 2, 2)), (5, 1, (1,) * 5),
    ],
)  # fmt: skip
def test_an_effective_batch_is_split_evenly(effective, largest, pieces):
    assert split_effective(effective, largest) == pieces


@pytest.mark.parametrize("effective", range(1, 60))
def test_no_piece_is_too_large_and_none_is_lost(effective):
    for largest in range(1, 60):
        pieces = split_effective(effective, largest)
        assert sum(pieces) == effective
        assert max(pieces) <= largest
        assert max(pieces) - min(pieces) <= 1


def test_a_split_of_nothing_is_refused():
    with pytest.raises(InputError, match="effective: got 0"):
        split_effective(0, 8)


# Words and pictures


def test_the_answer_in_words():
    found = report([*USUAL, trial(82, purpose="headroom", reserved_mib=7300)])
    said = narrative.answer(found)
    assert said == (
        "Train **net** with **82** samples a step in 8.00 GiB of memory on a card, with 10 % of "
        "it kept free. **91** is the largest size that ran: 92 does not fit."
    )
    assert "8 probes, 2 of them out of memory, in 4.00 s" in narrative.how(found)
    assert narrative.split_in_words(found, 1024) == (
        "For an effective batch of 1,024, at most 82 at a time: 16 micro-batches of 64, then one "
        "update (gradient accumulation over 16 steps)."
    )
    assert narrative.split_in_words(found, 64) == (
        "For an effective batch of 64 take one step of 64: up to 82 fit, so no accumulation is "
        "needed."
    )
    assert "84 is the smallest that is nearly as fast" in narrative.speed(found)
    table = narrative.probe_table(found)
    assert list(table["batch"]) == ["2", "20", "84", "90", "93", "91", "92", "82"]
    assert list(table["outcome"])[4:] == [
        "out of memory", "ran", "out of memory", "ran (headroom kept free)",
    ]  # fmt: skip
    assert table["steady MiB"][4] == "n/a"


def test_other_endings_in_words():
    whole = report([trial(2), trial(1000)], replace(TERMS, limit_bytes=139 * GIB, headroom=0.0))
    assert narrative.answer(whole).endswith(
        "It is the largest size that ran: the data set holds no more."
    )
    full = report([trial(1, live_mib=8000, reserved_mib=8192), trial(2, "oom")])
    assert "no size leaves 10 % of it free" in narrative.answer(full)
    killed = report([trial(2), trial(3, "killed")])
    assert "killed at the next size" in narrative.answer(killed)
    assert [r.next_size_failed for r in (whole, full, killed)] == [False, True, True]
    on_cpu = report([replace_device(trial(2)), trial(1000)], replace(TERMS, device_name="a chip"))
    assert "in a budget of 8.00 GiB on a chip" in narrative.answer(on_cpu)


def replace_device(found: Trial) -> Trial:
    return found.model_copy(update={"device": "cpu"})


@pytest.mark.parametrize(
    ("made", "what"),
    [
        ((1, 2, 3), "tuple of 3"),
        ([1], "list of 1"),
        (torch.zeros(2, 3), "Tensor"),
        (None, "NoneType"),
    ],
    ids=str,
)
def test_a_batch_that_is_no_pair_is_named(made, what):
    job = Workload("a job", lambda: nn.Linear(1, 1), lambda *_: made)
    with pytest.raises(TypeError, match=f"make_batch returned a {what}; must be a pair"):
        batch_of(job, 2, torch.device("cpu"))


def test_an_error_is_placed_in_the_users_own_code():
    def forward() -> None:
        torch.zeros(2) + torch.zeros(3)

    try:
        forward()
    except RuntimeError as error:
        place = failure_facts(error, host_limit=False)["where"]
    line = forward.__code__.co_firstlineno + 1
    assert place == f"test_finder_parts.py, line {line}, in forward"
    assert failure_facts(ValueError("raised nowhere"), host_limit=False)["where"] is None


def test_one_is_not_several():
    one = report([trial(1)], replace(TERMS, dataset_size=1, top=1))
    assert "with **1** sample a step" in narrative.answer(one)
    assert narrative.how(one).startswith("1 probe, 0 of them")
    assert narrative.utilisation(one, one.trials[0]).startswith("At 1 sample a step, of")
    three = report([trial(3)], replace(TERMS, dataset_size=3, top=3))
    assert "1 micro-batch of 3 and 2 of 2, then" in narrative.split_in_words(three, 7)
    said = narrative.training(one, trial(1, images=1))
    assert said.startswith("One epoch of 1 made-up image took")
    spec = FinderSpec(input_shape=(1, 2, 2), classes=1, dataset_size=5)
    assert "1 class, a data set of 5" in narrative.plan(spec)


@pytest.mark.parametrize("second_mib", [20.0, 19.99, 20.0000001])
def test_peaks_that_do_not_grow_have_no_bytes_a_sample(second_mib):
    peaks = {2: 20.0, 64: second_mib}
    flat = report([trial(size, live_mib=mib, device="cpu") for size, mib in peaks.items()])
    said = narrative.how(flat)
    assert said.endswith("The peaks do not grow with the batch, or by less than can be told apart.")
    assert "bytes a sample" not in said
    assert "MiB a sample, off by at most" in narrative.how(report(USUAL))


def test_cards_stand_beside_the_articles():
    card = {"card": "RTX 2080", "batch_size": 8, "utilisation": 0.668}
    table = narrative.cards_table([report(USUAL, replace(TERMS, headroom=0.0))], [card])
    assert list(table["batch"]) == ["91", "8"]
    assert list(table["of the card"]) == ["100.0 %", "66.8 %"]


def test_the_figure_shows_probes_line_limit_and_answer():
    proof = trial(82, purpose="headroom", cap_mib=7372, reserved_mib=7300)
    figure = search_sheet("Where memory ends", [report([*USUAL, proof])] * 3)
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 3
    axes = figure.axes[0]
    _, labels = axes.get_legend_handles_labels()
    assert {"limit", "headroom begins", "answer", "line through peaks"} <= set(labels)
    assert axes.get_xlabel() == "batch size (samples)"
    assert axes.get_ylabel() == "peak memory (MiB)"
    assert "82\n(largest 91)" in [text.get_text() for text in axes.texts]
