"""Sentences on results: the article's figures give the article's readings, others theirs."""

import re
from dataclasses import replace

import pandas as pd
import pytest

from labhelpers import narrative, references
from labhelpers.inputs import InputError
from labhelpers.records import SweepSpec, Trial
from labhelpers.references import Curve, article_curve
from labhelpers.store import RunDirectory
from labhelpers.tables import sweep_table


def curve_of(speeds: dict[int, float], **facts: object) -> Curve:
    trials = [
        Trial(kind="sweep", batch_size=size, images=1000, steps=-(-1000 // size), updates=3,
              epoch_s=1000 / speed, **facts)
        for size, speed in speeds.items()
    ]  # fmt: skip
    return Curve("a test (this machine)", sweep_table(trials), False, 1000, "a test")


ARTICLE = article_curve()


def test_readings_of_the_article():
    found = narrative.readings(ARTICLE, 0.93)
    assert (found.sweet_spot.batch_size, found.sweet_spot.best_batch_size) == (256, 2048)
    assert round(found.sweet_spot.share_of_best, 3) == 0.931
    assert found.largest_batch_size == 8192
    assert round(found.memory_ratio, 1) == 25.5
    assert round(found.saved_s, 2) == 0.12


def test_the_article_in_words():
    assert narrative.answer(ARTICLE, 0.93) == (
        "On **GeForce RTX 5070 Ti 16 GB**, batch **256** is the smallest that reaches 93 % of the "
        "best speed measured: 34,738 images/s, 93.1 % of what batch 2,048 gives (37,332 images/s), "
        "at a peak of 106.2 MiB."
    )
    assert narrative.knife_edge(ARTICLE, 0.93) == (
        "The share is a choice: the sweet spot would be 256 at 90 % and 1,024 at 95 %. It passes "
        "by 0.05 percentage points: a knife's edge that another run may tip."
    )
    assert narrative.going_further(ARTICLE, 0.93) == (
        "Going on from 256 to the fastest, 2,048, saves 0.12 s per epoch of 60,000 images. The "
        "largest, 8,192, takes 25.5× the memory of the sweet spot."
    )


def test_other_words_of_the_article():
    assert "a step takes 3.69× as long but holds 8× the images" in narrative.step_against_epoch(
        ARTICLE, 0.93
    )
    assert narrative.updates(ARTICLE).startswith(
        "An epoch of 60,000 images is 1,875 optimizer updates at batch 32 and 8 at batch 8,192"
    )
    assert list(narrative.gains_table(ARTICLE, 0.93)["speed per doubling"])[:3] == [
        "1.40×", "1.33×", "1.16×",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("share", "edge"), [(0.90, False), (0.93, True), (0.9305, True), (0.95, False), (1.0, True)]
)
def test_a_close_call_is_called_one(share, edge):
    assert ("a knife's edge" in narrative.knife_edge(ARTICLE, share)) is edge


@pytest.mark.parametrize(
    ("repeats", "said"),
    [
        (
            [{8: 90, 16: 100}, {8: 91, 16: 100}, {8: 95, 16: 100}],
            " say 16 (2 of 3) and 8 (1 of 3):",
        ),
        ([{8: 90, 16: 100}, {8: 91, 16: 100}], ""),
        ([{8: 90, 16: 100}, {8: 95}], ""),  # the second did not measure every size
    ],
)
def test_passes_that_disagree_are_named_beside_the_answer(tmp_path, repeats, said):
    run = RunDirectory.create(tmp_path / "run", specs={"sweep": SweepSpec(batch_sizes=(8, 16))})
    trials = [
        Trial(kind="sweep", batch_size=size, repeat=repeat, images=1000, epoch_s=1000 / speed)
        for repeat, speeds in enumerate(repeats)
        for size, speed in speeds.items()
    ]
    curve = references.curve_of(run, trials=trials)
    for sentences in (narrative.knife_edge(curve, 0.93), narrative.in_short(curve, 0.93)):
        assert ("Taken one by one, the passes" in sentences) == bool(said)
        assert said in sentences


def test_what_speaks_against_relying_on_the_speeds_is_said():
    calm = curve_of({8: 10, 16: 20})
    busy = curve_of({8: 10, 16: 20}, details={"cpu_of_others": 0.9}, device="cpu")
    assert narrative.caution(calm, 0.93) == "Each size was measured once: a first look."
    assert "slowed 2 of the 2 sizes down" in narrative.caution(busy, 0.93)
    assert "slowed 2 of the 2 sizes down" in narrative.in_short(busy, 0.93)
    assert narrative.caution(ARTICLE, 0.93) == ""


def test_a_peak_of_nothing_is_no_figure():
    curve = curve_of({8: 10, 16: 20}, peak_allocated_bytes=0)
    assert "at a peak of nothing that could be told apart" in narrative.answer(curve, 0.93)


def test_a_sweep_that_is_still_rising_says_so():
    rising = curve_of({8: 10, 16: 20, 32: 40})
    assert narrative.going_further(rising, 0.93) == (
        "The sweet spot is the largest batch measured; a larger one may still be faster."
    )


def test_a_sweep_that_only_falls_says_so():
    falling = curve_of({8: 40, 16: 20})
    assert narrative.going_further(falling, 0.93) == "No other batch size is faster than 8."
    assert narrative.step_against_epoch(falling, 0.93) == (
        "The smallest batch measured already is the sweet spot."
    )


def test_memory_that_was_not_measured_is_not_told_as_a_number():
    text = narrative.answer(curve_of({8: 10.0}), 0.93)
    assert text.endswith("at a peak of n/a.")
    assert "nan" not in text


def test_one_batch_size_has_no_gains():
    assert len(narrative.gains_table(curve_of({8: 10.0}), 0.93)) == 0


def test_nothing_measured_is_one_clear_line():
    trials = [Trial(kind="sweep", batch_size=8, outcome="oom")]
    with pytest.raises(InputError, match="no batch size has a measured speed"):
        narrative.readings(replace(curve_of({8: 1.0}), table=sweep_table(trials)), 0.93)


def test_losses_are_told_only_where_they_are_known_and_never_as_accuracy():
    assert "loss" not in narrative.updates(curve_of({8: 10, 16: 20}))
    told = narrative.updates(curve_of({8: 10, 16: 20}, final_loss=2.25))
    assert "the training loss stood at 2.250 and 2.250" in told
    assert "Speed is measured here, not accuracy." in told


def test_machines_stand_side_by_side():
    table = narrative.side_by_side([curve_of({8: 10.0, 16: 20.0}), ARTICLE], 0.93)
    assert list(table["machine"]) == ["a test (this machine)", "RTX 5070 Ti (article)"]
    assert list(table["sweet spot"]) == ["16", "256"]
    assert list(table["peak there"]) == ["n/a", "106.2 MiB"]


def test_the_terminals_text_is_plain():
    text = narrative.sweep_text(ARTICLE, 0.93)
    assert "**" not in text
    assert "batch 256 is the smallest that reaches 93 %" in text
    assert len(re.findall(r"^ *(32|256|8,192) ", text, flags=re.M)) == 3


def test_no_sentence_has_a_number_that_was_not_given():
    """Every number in the prose comes from the table, the share or the article's name."""
    slow = replace(ARTICLE, table=ARTICLE.table.assign(
        images_per_s=ARTICLE.table["images_per_s"] / 7, epoch_s=ARTICLE.table["epoch_s"] * 7
    ))  # fmt: skip
    for tell in (narrative.answer, narrative.going_further):
        assert tell(slow, 0.93) != tell(ARTICLE, 0.93)
    assert "0.84 s per epoch" in narrative.going_further(slow, 0.93)
    assert isinstance(slow.table, pd.DataFrame)
