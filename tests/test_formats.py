"""Units for people: the only place where bytes become MiB and seconds become ms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labhelpers.formats import (
    bytes_of_mib,
    gib,
    mib,
    ms,
    show_bytes,
    show_count,
    show_rate,
    show_seconds,
    show_share,
    show_times,
)


def test_units():
    assert (mib(2**20), gib(2**30), ms(0.00735)) == (1, 1, 7.35)
    assert bytes_of_mib(106.2) == 111_358_771


@given(st.integers(0, 2**50))
def test_mib_and_bytes_are_inverse(size_bytes):
    assert bytes_of_mib(mib(size_bytes)) == size_bytes


def test_not_measured_is_never_a_number():
    assert mib(None) is gib(None) is ms(None) is bytes_of_mib(None) is None
    shows = (show_bytes, show_seconds, show_rate, show_share, show_times, show_count)
    assert {show(None) for show in shows} == {"n/a"}


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (show_bytes, 0, "0 bytes"), (show_bytes, 80_088, "80,088 bytes"),
        (show_bytes, 111_358_771, "106.2 MiB"), (show_bytes, 4_273_492_459, "3.98 GiB"),
        (show_bytes, 150_109_880_320, "139.8 GiB"),
        (show_seconds, 0.00735, "7.35 ms"), (show_seconds, 3.735, "3.73 s"),
        (show_seconds, 0.1157, "0.12 s"), (show_seconds, 12.34, "12.3 s"),
        (show_seconds, 125.4, "2 min 05 s"), (show_seconds, 3725, "1 h 02 min"),
        (show_seconds, 59.96, "1 min 00 s"), (show_seconds, 0, "0.00 ms"),
        (show_rate, 34738.4, "34,738 images/s"),
        (show_share, 0.9305, "93.0 %"), (show_share, 0.93054, "93.1 %"),
        (show_times, 25.464, "25.5×"), (show_count, 1875, "1,875"),
    ],
)  # fmt: skip
def test_values_as_people_write_them(show, value, text):
    assert show(value) == text


def test_a_count_may_have_a_noun_and_shares_other_digits():
    assert show_count(1875, "updates") == "1,875 updates"
    assert show_share(0.93, 0) == "93 %"
    assert show_times(3.689, 2) == "3.69×"
