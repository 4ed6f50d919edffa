"""The recommended batch against figures worked out by hand, and its promises on any curve."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labhelpers.formats import MIB
from labhelpers.inputs import InputError
from labhelpers.recommendation import in_words, recommend, split
from labhelpers.references import Curve, article_curve
from labhelpers.tables import SWEEP_COLUMNS


def curve_from(rows: list[tuple[int, float | None, float | None]], images: int = 1000) -> Curve:
    """Make a curve of (batch size, images/s, peak in MiB)."""
    table = pd.DataFrame(columns=list(SWEEP_COLUMNS))
    for name, column in zip(
        ("batch_size", "images_per_s", "allocated_mib"), zip(*rows, strict=True), strict=True
    ):
        table[name] = pd.Series(column, dtype="float64")
    return Curve("a machine", table, False, images, "a device")


STEEP = curve_from([(10, 50, 1.0), (20, 90, 2.0), (40, 100, 4.0), (80, 99, 8.0)])


# The article's figures: batch 256 reaches 93.05 % of the best with 106.2 MiB


def test_the_articles_answer():
    found = recommend(article_curve(), 0.93)
    assert (found.batch_size, found.images_per_s, found.limited_by) == (256, 34738, "share")
    assert found.share_of_best == pytest.approx(34738 / 37332)
    assert found.peak_bytes == pytest.approx(106.2 * MIB)
    assert (found.updates_per_epoch, found.micro_batches) == (235, (256,))


@pytest.mark.parametrize(
    ("share", "size"), [(0.90, 256), (0.931, 512), (0.95, 1024), (1.0, 2048), (0.3, 32)]
)
def test_the_share_moves_it(share: float, size: int):
    assert recommend(article_curve(), share).batch_size == size


def test_a_memory_budget_takes_the_fastest_that_fits():
    found = recommend(article_curve(), 0.93, memory_budget_bytes=100 * MIB)
    assert (found.batch_size, found.limited_by) == (128, "memory budget")
    assert "memory budget of 100.0 MiB limits it" in in_words(found, article_curve())


def test_an_effective_batch_is_split():
    found = recommend(article_curve(), 0.93, effective_batch=1024)
    assert found.micro_batches == (256, 256, 256, 256)
    assert found.updates_per_epoch == math.ceil(60_000 / 1024)
    assert "4 micro-batches per update (4 × 256 = 1,024 images)" in in_words(found, article_curve())


def test_an_uneven_effective_batch_names_the_last_piece():
    found = recommend(article_curve(), 0.93, effective_batch=1000)
    assert found.micro_batches == (256, 256, 256, 232)
    assert "(3 × 256 + 232 = 1,000 images)" in in_words(found, article_curve())


def test_a_small_effective_batch_limits():
    found = recommend(article_curve(), 0.93, effective_batch=100)
    assert (found.batch_size, found.micro_batches) == (64, (64, 36))
    assert found.limited_by == "effective batch"
    assert "effective batch of 100 limits it" in in_words(found, article_curve())


# Where there is nothing to recommend, it says why


def test_nothing_fits():
    found = recommend(article_curve(), 0.93, memory_budget_bytes=MIB)
    assert (found.batch_size, found.peak_bytes, found.updates_per_epoch) == (None, None, None)
    assert "the smallest peak measured is 70.7 MiB" in in_words(found, article_curve())


def test_no_size_is_as_small_as_the_effective_batch():
    found = recommend(article_curve(), 0.93, effective_batch=8)
    assert (found.batch_size, found.limited_by) == (None, "effective batch")
    assert "the smallest is 32" in in_words(found, article_curve())


def test_memory_that_was_not_measured_does_not_fit():
    unknown = curve_from([(10, 50, None), (20, 90, None)])
    found = recommend(unknown, 0.93, memory_budget_bytes=2**40)
    assert found.batch_size is None
    assert "Memory was not measured here" in in_words(found, unknown)
    assert recommend(unknown, 0.93).batch_size == 20
    assert "peak memory not measured" in in_words(recommend(unknown, 0.93), unknown)


def test_a_faster_size_of_unknown_memory_is_said():
    partly = curve_from([(10, 95, None), (20, 100, 2.0)])
    found = recommend(partly, 0.9, memory_budget_bytes=3 * MIB)
    assert (found.batch_size, found.limited_by) == (20, "memory budget")
    assert "not known to fit into 3.0 MiB" in in_words(found, partly)


def test_sizes_that_failed_are_never_recommended():
    failed = curve_from([(10, 50, 1.0), (20, None, 2.0)])
    assert recommend(failed, 1.0).batch_size == 10
    nothing = recommend(curve_from([(10, None, None)]), 0.93)
    assert (nothing.batch_size, nothing.limited_by) == (None, "nothing measured")
    assert "No batch size was measured" in in_words(nothing, curve_from([(10, None, None)]))


@pytest.mark.parametrize(
    ("given_values", "what"),
    [
        ({"share": 0}, "share"),
        ({"share": 1.1}, "share"),
        ({"share": 0.9, "memory_budget_bytes": 0}, "memory_budget_bytes"),
        ({"share": 0.9, "effective_batch": -4}, "effective_batch"),
    ],
)
def test_bad_input_is_refused(given_values: dict[str, float], what: str):
    with pytest.raises(InputError, match=what):
        recommend(STEEP, **given_values)


# Promises for any curve

rates = st.floats(1, 1e6)
peaks = st.none() | st.floats(0.1, 1e5)
curves = st.dictionaries(st.integers(1, 10_000), st.tuples(rates, peaks), min_size=1).map(
    lambda rows: curve_from([(size, *values) for size, values in sorted(rows.items())])
)


@given(
    curves, st.floats(0.01, 1), st.none() | st.integers(1, 2**37), st.none() | st.integers(1, 20000)
)
def test_what_is_recommended_is_allowed(
    curve: Curve, share: float, budget: int | None, effective: int | None
):
    found = recommend(curve, share, budget, effective)
    assert in_words(found, curve)
    if found.batch_size is None:
        return
    assert budget is None or (found.peak_bytes is not None and found.peak_bytes <= budget)
    assert effective is None or found.batch_size <= effective
    assert sum(found.micro_batches) == (effective or found.batch_size)
    reaches = found.share_of_best is not None and found.share_of_best >= share * (1 - 1e-12)
    assert reaches or found.limited_by != "share"


@given(curves, st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_higher_share_never_asks_for_a_smaller_batch(curve: Curve, one: float, other: float):
    low, high = sorted((one, other))
    small, large = recommend(curve, low).batch_size, recommend(curve, high).batch_size
    assert small is not None
    assert large is not None
    assert small <= large


@given(st.integers(1, 100_000), st.integers(1, 10_000))
def test_a_split_holds_every_image_once(effective: int, size: int):
    pieces = split(effective, size)
    assert sum(pieces) == effective
    assert all(piece == size for piece in pieces[:-1])
    assert 0 < pieces[-1] <= size
