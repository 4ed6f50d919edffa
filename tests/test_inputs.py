"""What people and papermill type: converted, or refused in one line."""

import ast
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from labhelpers.inputs import (
    InputError,
    duplicates,
    is_nothing,
    shown,
    size_entries,
    to_boolean,
    to_integer,
    to_number,
    to_share,
    to_sizes,
    to_text,
)

LARGEST = 2**31 - 1
SIZES = st.lists(st.integers(1, LARGEST), min_size=1, max_size=20)
NOT_A_SIZE = "is not a batch size; each must be a whole number from 1 to 2,147,483,647"
EMPTY = "the batch list is empty; give at least one size, for example [32, 256]"


class Unprintable:
    """An object whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ([32, 256], (32, 256)),
        ((256, 32), (256, 32)),
        (range(3, 5), (3, 4)),
        ("[256, 512]", (256, 512)),  # papermill -p batch_sizes '[256, 512]'
        ("(32,)", (32,)),
        ("32,256", (32, 256)),
        (" 32 256 ", (32, 256)),
        ("32; 256\n64", (32, 256, 64)),
        ("64.0", (64,)),
        ("[1e3]", (1000,)),
        ("['32', 64.0]", (32, 64)),
        (64, (64,)),
        (64.0, (64,)),
        (["64", 128.0], (64, 128)),
        ([32, 64, 32], (32, 64)),  # kept once, in the order given
        ([LARGEST], (LARGEST,)),
    ],
)
def test_batch_lists_are_converted(given, sizes):
    assert to_sizes(given) == sizes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], EMPTY),
        ("", EMPTY),
        ("[]", EMPTY),
        (" , ", EMPTY),
        (0, f"0 {NOT_A_SIZE}"),
        ("0", f"'0' {NOT_A_SIZE}"),
        ([32, -1], f"-1 {NOT_A_SIZE}"),
        ("[32, 2.5]", f"2.5 {NOT_A_SIZE}"),
        ("abc", f"'abc' {NOT_A_SIZE}"),
        ("[32, abc]", f"'abc' {NOT_A_SIZE}"),
        (True, f"True {NOT_A_SIZE}"),
        ([False], f"False {NOT_A_SIZE}"),
        (None, f"None {NOT_A_SIZE}"),
        ([[32, 64]], f"[32, 64] {NOT_A_SIZE}"),
        ("[8 << 3]", f"'<<' {NOT_A_SIZE}"),  # no arithmetic, and never an eval
        (float("nan"), f"nan {NOT_A_SIZE}"),
        ([float("inf")], f"inf {NOT_A_SIZE}"),
        ([LARGEST + 1], f"2147483648 {NOT_A_SIZE}"),
        ([b"32"], f"b'32' {NOT_A_SIZE}"),
        ({32: 64}, "must be a list of batch sizes, for example [32, 256]"),
        ({32, 64}, "must be a list of batch sizes, for example [32, 256]"),
        (b"32", "must be a list of batch sizes, for example [32, 256]"),
    ],
)
def test_bad_batch_lists_are_refused_in_one_line(given, said):
    with pytest.raises(ValueError) as caught:
        to_sizes(given)
    assert str(caught.value) == said


def test_a_huge_or_unprintable_entry_is_quoted_short():
    for entry in ("9" * 5000, 10**5000, Unprintable(), "x" * 10**6):
        with pytest.raises(ValueError) as caught:
            to_sizes([entry])
        assert str(caught.value).endswith(NOT_A_SIZE)
        assert len(str(caught.value)) < 200


@given(SIZES)
def test_any_way_to_write_a_list_gives_the_same_sizes(sizes):
    expected = tuple(dict.fromkeys(sizes))
    words = [str(size) for size in sizes]
    ways = [sizes, tuple(sizes), str(sizes), ", ".join(words), " ".join(words), iter(sizes), words]
    assert all(to_sizes(way) == expected for way in ways)


@given(SIZES)
def test_duplicates_are_those_named_more_than_once(sizes):
    found = duplicates(str(sizes))
    assert set(found) == {size for size in sizes if sizes.count(size) > 1}
    assert len(to_sizes(sizes)) + sum(sizes.count(size) - 1 for size in found) == len(sizes)


@given(st.one_of(st.text(), st.lists(st.one_of(st.text(), st.integers(), st.floats()))))
@example("[" * 3000)
@example("[()")
@example("\0")
def test_any_list_gives_sizes_or_a_value_error_of_one_line(given):
    try:
        sizes, said = to_sizes(given), None
    except ValueError as error:
        sizes, said = (1,), str(error)
    assert said is None or len(said.splitlines()) == 1
    assert sizes
    assert all(1 <= size <= LARGEST for size in sizes)
    assert len(set(sizes)) == len(sizes)


def test_no_list_has_no_duplicates():
    assert duplicates(None) == duplicates("None") == duplicates("auto") == ()


def test_entries_are_split_but_not_converted():
    assert size_entries("[32, '64', 2.5]") == [32, "64", 2.5]
    assert size_entries("32,64") == ["32", "64"]
    assert size_entries(7) == [7]


@pytest.mark.parametrize(
    ("given", "number"),
    [(64, 64), ("64", 64), (64.0, 64), ("64.0", 64), ("1e3", 1000), (" 7 ", 7), ("-3", -3)],
)
def test_whole_numbers_are_converted(given, number):
    converted = to_integer(given)
    assert converted == number
    assert type(converted) is int


@given(st.integers(-(10**300), 10**300))
def test_no_integer_loses_a_digit(number):
    assert to_integer(number) == number
    assert to_integer(str(number)) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_an_integer_only_if_it_is_whole(number):
    if number == math.floor(number):
        assert to_integer(number) == number
        assert to_integer(repr(number)) == number
    else:
        with pytest.raises(ValueError, match="must be a whole number"):
            to_integer(number)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (64.5, "must be a whole number"),
        ("64.5", "must be a whole number"),
        (True, "must be a number"),
        ("abc", "must be a number"),
        ("", "must be a number"),
        (None, "must be a number"),
        ([64], "must be a number"),
        (b"64", "must be a number"),
        (1j, "must be a number"),
        (10**400, "must be a number"),
        (float("nan"), "must be a finite number"),
        ("inf", "must be a finite number"),
    ],
)
def test_other_things_are_no_whole_numbers(given, said):
    with pytest.raises(ValueError) as caught:
        to_integer(given)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("given", "number"), [("1e-3", 1e-3), (1, 1.0), ("0.93", 0.93), (0.5, 0.5), ("-2", -2.0)]
)
def test_numbers_are_converted(given, number):
    assert to_number(given) == number


@pytest.mark.parametrize(
    ("given", "share"), [("10%", 0.1), (" 93 % ", 0.93), ("0.1", 0.1), (0.5, 0.5), ("100%", 1.0)]
)
def test_shares_may_be_given_in_percent(given, share):
    assert to_share(given) == share


@pytest.mark.parametrize("given", ["%", "ten%", "10%%", True, None, "nan%"])
def test_other_things_are_no_shares(given):
    with pytest.raises(ValueError, match="must be a (finite )?number"):
        to_share(given)


@pytest.mark.parametrize("given", [True, 1, 1.0, "true", "True", " YES ", "on", "1"])
def test_words_for_true(given):
    assert to_boolean(given) is True


@pytest.mark.parametrize("given", [False, 0, 0.0, "false", "False", "no", "OFF", "0"])
def test_words_for_false(given):
    assert to_boolean(given) is False


@pytest.mark.parametrize("given", [None, "", "maybe", 2, -1, 0.5, [], [True], float("nan")])
def test_other_things_are_neither_true_nor_false(given):
    with pytest.raises(ValueError) as caught:
        to_boolean(given)
    assert str(caught.value) == "must be true or false"


def test_text_is_stripped_and_paths_are_text():
    assert to_text("  data ") == "data"
    assert to_text(Path("data")) == "data"


@pytest.mark.parametrize("given", ["", "  ", "a\0b", None, 5, ["data"], b"data"])
def test_other_things_are_no_text(given):
    with pytest.raises(ValueError) as caught:
        to_text(given)
    assert str(caught.value) == "must be text that is not empty"


@pytest.mark.parametrize(
    ("given", "nothing"),
    [(None, True), ("None", True), ("null", True), ("auto", True), ("", True), (0, False),
     (False, False), ("none of these", False), ([], False)],
)  # fmt: skip
def test_what_means_nothing(given, nothing):
    assert is_nothing(given) is nothing


def test_an_input_error_is_always_one_line_and_travels():
    error = InputError("first\nsecond\r\nthird")
    assert str(error) == "first second third"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, ValueError)


@given(st.one_of(st.text(), st.integers(), st.lists(st.integers())))
def test_what_is_shown_is_short_and_exact_where_it_fits(value):
    text = shown(value)
    assert len(text) <= 80
    assert text.endswith("...") or ast.literal_eval(text) == value


def test_what_cannot_be_printed_is_shown_by_its_class():
    assert shown(Unprintable()) == "<Unprintable>"
    assert shown(10**5000) == "<int>"
