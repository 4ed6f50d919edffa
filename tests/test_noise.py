"""A bootstrap that can be repeated: when repeats are enough, and what is beyond noise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labhelpers.inputs import InputError
from labhelpers.noise import (
    MIN_REPEATS,
    compare_medians,
    describe_difference,
    differences_from_best,
    median_interval,
    settled,
)

SPEEDS = st.lists(st.floats(1, 1e6), min_size=2, max_size=12)
STEADY = [100.0, 100.1, 99.9, 100.2, 99.8, 100.0]
NOISY = [100.0, 140.0, 70.0, 120.0, 90.0, 60.0]


@given(SPEEDS)
def test_an_interval_holds_the_median_and_lies_within_the_values(values):
    found = median_interval(values)
    assert found is not None
    assert found.middle == pytest.approx(float(np.median(values)))
    assert min(values) <= found.low <= found.middle * (1 + 1e-12)
    assert found.middle <= found.high * (1 + 1e-12)
    assert found.high <= max(values)


@given(SPEEDS, st.integers(0, 99), st.randoms())
def test_the_same_values_and_seed_give_the_same_interval_in_any_order(values, seed, dice):
    shuffled = dice.sample(values, len(values))
    assert median_interval(values, seed=seed) == median_interval(shuffled, seed=seed)


def test_fewer_than_two_values_have_no_interval():
    assert median_interval([]) is None
    assert median_interval([None, 5.0]) is None


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_what_is_no_speed_is_refused(value):
    with pytest.raises(InputError, match="is not a speed; it must be a finite number above 0"):
        median_interval([1.0, value])


def test_repeats_are_enough_from_six_on_and_when_the_median_is_steady():
    assert settled(STEADY)
    assert not settled(STEADY[:5])
    assert not settled(NOISY)
    assert settled(NOISY, target=2.0)
    assert not settled([])
    assert settled([7.0] * MIN_REPEATS)


@pytest.mark.parametrize(
    ("factor", "standing"), [(1.0, "same"), (0.9, "slower"), (1.1, "faster"), (0.98, "undecided")]
)
def test_steady_speeds_are_told_apart_beyond_the_margin_only(factor, standing):
    found = compare_medians([factor * value for value in STEADY], STEADY)
    assert found is not None
    assert found.standing == standing
    assert found.ratio.middle == pytest.approx(factor)


def test_noisy_speeds_are_not_told_apart():
    found = compare_medians([0.95 * value for value in NOISY], NOISY)
    assert found is not None
    assert found.standing == "undecided"
    assert compare_medians(NOISY[:5], NOISY) is None


def test_equal_noisy_sets_are_not_the_same_by_being_resampled_in_step():
    found = compare_medians(NOISY, NOISY)
    assert found is not None
    assert found.standing == "undecided"


def test_every_size_is_set_beside_the_fastest():
    rates = {
        32: [0.5 * value for value in STEADY], 64: STEADY, 128: [1.001 * value for value in STEADY],
        256: STEADY[:3], 512: [None] * 6,
    }  # fmt: skip
    found = differences_from_best(rates)
    assert {size: each.standing for size, each in found.items()} == {32: "slower", 64: "same"}
    assert differences_from_best({}) == {}


def test_a_difference_in_words():
    slower = compare_medians([0.5 * value for value in STEADY], STEADY)
    assert slower is not None
    assert describe_difference(slower) == "slower by 50.0 % (49.9 % to 50.1 %)"
    same, noisy = compare_medians(STEADY, STEADY), compare_medians(NOISY, NOISY)
    assert same is not None
    assert noisy is not None
    assert describe_difference(same) == "the same within 2 %"
    assert describe_difference(noisy) == "too noisy to tell"
