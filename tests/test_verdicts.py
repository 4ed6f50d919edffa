"""The sweet spot and the readings around it, held to the published figures."""

import dataclasses
import json
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labhelpers.inputs import InputError
from labhelpers.verdicts import (
    Gain,
    gain_per_doubling,
    median,
    memory_ratio,
    read_sweep,
    seconds_saved,
    spread,
    sweet_spot,
)

MIB = 1024**2
REFERENCE = Path(__file__).parents[1] / "data" / "reference"
ARTICLE = json.loads((REFERENCE / "rtx5070ti_article.json").read_text(encoding="utf-8"))
H200 = json.loads((REFERENCE / "h200_baseline.json").read_text(encoding="utf-8"))
MEDIANS = {row["batch_size"]: row["images_per_s"] for row in ARTICLE["sweep"]}
PEAKS = {row["batch_size"]: row["peak_allocated_mib"] * MIB for row in ARTICLE["sweep"]}
SPEED = st.floats(1e-3, 1e7)
SPEEDS = st.dictionaries(st.integers(1, 2**20), SPEED, min_size=1, max_size=12)
SHARES = st.floats(0, 1, exclude_min=True)


def test_sweet_spot_of_the_article():
    spot = sweet_spot(MEDIANS)
    assert (spot.batch_size, spot.best_batch_size) == (256, 2048)
    assert (spot.images_per_s, spot.best_images_per_s) == (34738, 37332)
    assert round(spot.share_of_best, 3) == ARTICLE["sweet_spot"]["share_of_best"]
    assert spot.at == {0.90: 256, 0.93: 256, 0.95: 1024}


def test_share_of_the_article_is_a_knifes_edge():
    assert sweet_spot(MEDIANS, 0.9305).batch_size == 256
    assert sweet_spot(MEDIANS, 0.9306).batch_size == 512
    assert sweet_spot(MEDIANS, 1).batch_size == 2048


def test_sweet_spot_of_the_h200_article_loop():
    loop = H200["images_per_s"]["article loop (DataLoader, num_workers=0, pin_memory)"]
    spot = sweet_spot({int(size): speed for size, speed in loop.items()})
    assert (spot.batch_size, spot.best_batch_size) == (4096, 8192)


def test_sweet_spot_leaves_out_what_was_not_measured():
    spot = sweet_spot({64: None, 32: 100.0, 128: None})
    assert (spot.batch_size, spot.share_of_best) == (32, 1.0)


def test_equally_fast_sizes_make_the_smaller_the_best():
    assert sweet_spot({64: 100.0, 32: 100.0}).best_batch_size == 32


def test_sweet_spot_is_frozen_hashable_and_travels():
    spot = sweet_spot(MEDIANS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spot.batch_size = 1
    assert pickle.loads(pickle.dumps(spot)) == spot
    assert hash(spot) == hash(sweet_spot(MEDIANS))


def test_gain_per_doubling_of_the_article():
    gains = gain_per_doubling(MEDIANS)
    assert [(g.from_batch, g.to_batch) for g in gains][:2] == [(32, 64), (64, 128)]
    assert len(gains) == len(MEDIANS) - 1
    assert math.prod(g.ratio for g in gains[:3]) == pytest.approx(34738 / 16062)
    assert round(34738 / 16062, 2) == 2.16


def test_gain_per_doubling_of_other_steps():
    assert gain_per_doubling({128: 225.0, 32: 100.0}) == [Gain(32, 128, pytest.approx(1.5))]
    assert gain_per_doubling({32: 100.0, 64: None, 128: 400.0}) == [Gain(32, 128, 2.0)]
    assert gain_per_doubling({100: 10.0, 150: 10.0}) == [Gain(100, 150, 1.0)]
    assert gain_per_doubling({32: 100.0}) == []


def test_memory_against_the_sweet_spot():
    assert round(memory_ratio(PEAKS, 8192, 256), 1) == 25.5
    assert round(memory_ratio(PEAKS, 2048, 256), 1) == 6.9


@pytest.mark.parametrize("peaks", [{}, {8: None, 4: 1}, {8: 1, 4: None}, {8: 1}, {8: 1, 4: 0}])
def test_memory_that_was_not_measured_is_none(peaks):
    assert memory_ratio(peaks, 8, 4) is None


def test_seconds_saved_by_going_further():
    assert round(seconds_saved(MEDIANS, 60_000, 256, 2048), 2) == 0.12
    assert seconds_saved(MEDIANS, 60_000, 2048, 256) < 0
    assert seconds_saved(MEDIANS, 60_000, 256, 3) is None


def test_read_sweep_derives_the_articles_readings():
    readings = read_sweep(MEDIANS, PEAKS, ARTICLE["protocol"]["images"])
    assert readings.sweet_spot == sweet_spot(MEDIANS)
    assert readings.gains == tuple(gain_per_doubling(MEDIANS))
    assert readings.largest_batch_size == 8192
    assert round(readings.memory_ratio, 1) == 25.5
    assert round(readings.saved_s, 2) == 0.12
    assert read_sweep(MEDIANS, {}, 60_000).memory_ratio is None


def test_median_and_spread():
    assert median([3, None, 1, 2]) == 2
    assert median([4, 1]) == 2.5
    assert median([None]) is None
    assert spread([100, 90, None, 110]) == pytest.approx(0.2)
    assert spread([100]) is None
    assert spread([]) is None


@pytest.mark.parametrize("share", [0, -0.1, 1.01, 93, float("nan"), float("inf"), "0.93", True])
def test_a_share_outside_0_to_1_is_one_clear_line(share):
    with pytest.raises(InputError) as caught:
        sweet_spot(MEDIANS, share)
    assert repr(share) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: sweet_spot({}), "no batch size"),
        (lambda: sweet_spot({32: None}), "no batch size"),
        (lambda: sweet_spot({32: float("nan")}), "batch 32: nan"),
        (lambda: sweet_spot({32: 0.0}), "batch 32: 0.0"),
        (lambda: gain_per_doubling({0: 1.0}), "batch size 0"),
        (lambda: seconds_saved(MEDIANS, 0, 32, 64), "images is 0"),
        (lambda: median([float("nan")]), "nan is not"),
        (lambda: spread([1.0, float("inf")]), "inf is not"),
    ],
)
def test_impossible_figures_are_one_clear_line(call, named):
    with pytest.raises(InputError) as caught:
        call()
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@given(SPEEDS, SHARES, SHARES)
def test_a_higher_share_never_gives_a_smaller_sweet_spot(medians, one, other):
    low, high = sorted((one, other))
    assert sweet_spot(medians, low).batch_size <= sweet_spot(medians, high).batch_size


@given(SPEEDS, SHARES)
def test_the_sweet_spot_is_the_smallest_that_reaches_the_share(medians, share):
    spot = sweet_spot(medians, share)
    assert medians[spot.batch_size] >= share * spot.best_images_per_s
    assert spot.batch_size <= spot.best_batch_size
    below = [speed for size, speed in medians.items() if size < spot.batch_size]
    assert all(speed < share * spot.best_images_per_s for speed in below)
    assert spot.at[share] == spot.batch_size


@given(st.dictionaries(st.sampled_from([2**n for n in range(20)] + [3, 12, 96, 1000]), SPEED))
def test_gains_multiply_to_the_whole_step(medians):
    gains = gain_per_doubling(medians)
    whole = sum(math.log2(g.ratio) * math.log2(g.to_batch / g.from_batch) for g in gains)
    first, last = (medians[min(medians)], medians[max(medians)]) if medians else (1, 1)
    assert whole == pytest.approx(math.log2(last / first), abs=1e-6)


@given(SPEEDS)
def test_gains_of_any_sizes_are_never_negative(medians):
    gains = gain_per_doubling(medians)
    assert [g.from_batch for g in gains] == sorted(medians)[:-1]
    assert all(g.ratio >= 0 for g in gains)


@given(st.lists(st.floats(1e-3, 1e9), min_size=2), st.floats(0.5, 100))
def test_spread_does_not_depend_on_the_unit(values, factor):
    scaled = [value * factor for value in values]
    assert spread(scaled) == pytest.approx(spread(values), rel=1e-6, abs=1e-9)
    assert spread(values) >= 0
