"""What is typed into a panel: presets, reasons against bad entries, and the spec it makes."""

import pytest

from labhelpers.forms import (
    Field,
    blamed,
    device_choices,
    likely_device,
    preset,
    reason_against,
    remark_on,
    spec_from,
    text_of,
)
from labhelpers.inputs import InputError
from labhelpers.records import ARTICLE_BATCH_SIZES, FinderSpec, ProbeSpec, SweepSpec

SIZES = Field("batch_sizes", "Batch sizes", sizes=True)


def test_presets():
    assert preset("article") == ARTICLE_BATCH_SIZES
    assert preset("small") == (8, 16, 32, 64, 128)
    assert preset("powers of two", "100") == (8, 16, 32, 64)
    assert preset("powers of two", " 1,024 ")[-1] == 1024
    assert preset("powers of two", 8) == (8,)


@pytest.mark.parametrize("up_to", ["7", "", "many", None, "2000000", "-64", "64.5"])
def test_a_preset_that_cannot_be(up_to: object):
    with pytest.raises(InputError, match="whole number from 8 to 1,048,576"):
        preset("powers of two", up_to)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("batch_sizes", "32, many", "'many' is not a batch size"),
        ("batch_sizes", "0", "'0' is not a batch size"),
        ("batch_sizes", "1,024", "'024' is not a batch size"),
        ("repeats", "two", "must be a number"),
        ("repeats", "0", "greater than or equal to 1"),
        ("images", "-5", "greater than or equal to 1"),
        ("precision", "fp8", "'fp32'"),
    ],
)
def test_a_bad_entry_is_told_without_its_name(name: str, text: str, reason: str):
    found = reason_against(SweepSpec(), name, text)
    assert reason in found
    assert not found.startswith(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [("batch_sizes", "32 64; 128"), ("batch_sizes", ""), ("repeats", "3.0"), ("images", " ")],
)
def test_a_good_entry_has_no_reason_against_it(name: str, text: str):
    assert reason_against(SweepSpec(), name, text) == ""


def test_an_entry_that_must_be_given_is_missed():
    assert "must be a number" in reason_against(ProbeSpec(), "steps", "")


def test_duplicates_are_remarked_not_refused():
    assert remark_on(SIZES, "32, 64, 32") == "32: given twice, measured once"
    assert remark_on(SIZES, "32, 64") == ""
    assert remark_on(Field("repeats", "Repeats"), "3") == ""


def test_the_spec_keeps_what_the_panel_does_not_show():
    base = SweepSpec(seed=7, data_dir="elsewhere", repeats=5)
    made = spec_from(base, {"batch_sizes": "64, 32", "repeats": "2", "images": ""})
    assert made == SweepSpec(
        seed=7, data_dir="elsewhere", repeats=2, batch_sizes=(64, 32), images=None
    )
    with pytest.raises(InputError, match="repeats: got 'x'"):
        spec_from(base, {"repeats": "x"})


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), ((32, 64), "32, 64"), (3, "3"), (300.0, "300"), (0.1, "0.1"), ("auto", "auto")],
)
def test_a_value_is_written_as_it_is_typed(value: object, text: str):
    assert text_of(value) == text


def test_what_is_written_is_read_back():
    spec = FinderSpec(max_batch_size=64, headroom=0.25)
    texts = {name: text_of(getattr(spec, name)) for name in ("max_batch_size", "headroom")}
    assert spec_from(FinderSpec(), texts) == spec


def test_an_error_line_blames_its_field():
    texts = {"images": "", "device": ""}
    assert blamed("images: got 70,000; too many", texts) == ("images", "got 70,000; too many")
    assert blamed("other: text", texts) == ("", "other: text")
    assert blamed("no field at all", texts) == ("", "no field at all")


def test_the_device_that_is_there():
    assert device_choices()[:2] == ("auto", "cpu")
    assert likely_device() in ("cpu", "cuda:0")
