"""The guess where memory ends: lines, falls, bounds and quantiles."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labhelpers.forecast import Forecast, believe, fit_line, forecast, has_fallen


def test_a_line_goes_through_its_points():
    fit = fit_line([(2, 110), (8, 140), (32, 260)])
    assert fit is not None
    assert (fit.slope, fit.intercept) == (pytest.approx(5), pytest.approx(100))
    assert fit.residuals == pytest.approx([0, 0, 0], abs=1e-9)
    assert fit_line([(2, 110)]) is None
    assert fit_line([]) is None


def test_a_fall_of_more_than_two_percent_counts():
    assert not has_fallen([(4, 1000), (8, 985)])
    assert has_fallen([(4, 1000), (8, 979)])
    assert has_fallen([(4, 1000), (6, 985), (8, 979), (16, 2000)])


def test_the_guess_lies_between_its_two_bounds():
    live = [(n, 100 + 10 * n) for n in (10, 80)]
    reserved = [(n, 110 + 11 * n) for n in (10, 80)]
    lower, upper = forecast(reserved, 1100), forecast(live, 1100)
    both = believe(reserved, live, 1100, None)
    assert None not in (lower, upper, both)
    assert (lower.center, upper.center) == (pytest.approx(90), pytest.approx(100))
    assert lower.center < both.center < upper.center
    failed = believe(reserved, live, 1100, 95)
    assert lower.center < failed.center < 95
    assert failed.spread > both.spread
    assert believe([], live, 1100, None) == upper
    assert believe([], [], 1100, None) is None


@given(
    center=st.floats(-1e9, 1e9),
    spread=st.floats(0.25, 1e9),
    low=st.integers(0, 10**6),
    width=st.one_of(st.just(math.inf), st.integers(2, 10**6)),
    share=st.floats(0.01, 0.99),
)
def test_quantiles_grow_with_the_share(center, spread, low, width, share):
    guess = Forecast(center, spread)
    value = guess.quantile(low, low + width, share)
    assert math.isfinite(value)
    assert value <= guess.quantile(low, low + width, min(1.0, share + 0.005)) + 1e-6 * abs(value)
