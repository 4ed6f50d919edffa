"""Turn what people and papermill type into values, or say in one line why not.

papermill passes lists, booleans and some numbers as text (`'[256, 512]'`, `'false'`,
`'1e-3'`) and whole numbers as floats (`64.0`); each is converted or refused here.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any


class InputError(ValueError):
    """Bad input: one line with what was given, what is allowed and what to do."""

    def __init__(self, message: object = "") -> None:
        # Texts of other people's errors, quoted in ours, may have many lines.
        super().__init__(" ".join(str(message).splitlines()))

    def _render_traceback_(self) -> list[str]:
        """Let IPython show the line alone."""
        return [f"{type(self).__name__}: {self}"]


class StartError(RuntimeError):
    """The worker process, or the device in it, cannot be started."""


_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}
_NONE = {"none", "null", "auto", ""}
_LARGEST = 2**31 - 1
MOST_REPEATS = 1000


def error_text(error: BaseException) -> str:
    """Return an error's text in a form that can be stored, whatever it holds."""
    try:
        text = str(error) or repr(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide the error
        text = f"a {type(error).__name__} that cannot be printed"
    return text.replace("\0", "").encode("utf-8", "replace").decode("utf-8")


def to_boolean(value: Any) -> bool:
    """Convert true/false, yes/no, on/off, 1/0 in any case; ValueError otherwise."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    word = str(value).strip().lower()
    if isinstance(value, str) and word in _TRUE | _FALSE:
        return word in _TRUE
    raise ValueError("must be true or false")


def is_nothing(value: Any) -> bool:
    """Tell whether a value means "not given": None, or text such as 'None', 'auto' or ''."""
    return value is None or (isinstance(value, str) and value.strip().lower() in _NONE)


def to_integer(value: Any) -> int:
    """Convert 64, '64' and 64.0 to 64; ValueError for 64.5, booleans and words."""
    number = to_number(value)
    if number != int(number):
        raise ValueError("must be a whole number")
    # A large integer must not pass through a float and lose its last digits.
    with suppress(ValueError):
        return int(value) if isinstance(value, (int, str)) else int(number)
    return int(number)


def to_repeats(value: Any) -> int | str:
    """Convert a number of repeats from 1 to 1000, or 'auto'; ValueError otherwise."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    number = to_integer(value)
    if number < 1:
        raise ValueError("must be greater than or equal to 1")
    if number > MOST_REPEATS:
        raise ValueError(f"must be less than or equal to {MOST_REPEATS}")
    return number


def to_number(value: Any) -> float:
    """Convert 0.001, '1e-3' and 1 to a finite float; ValueError for booleans, NaN and words."""
    if isinstance(value, (bool, bytes, list, tuple, dict)):
        raise ValueError("must be a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("must be a number") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


def to_share(value: Any) -> float:
    """Convert 0.1, '0.1' and '10%' to a share, as `to_number` does with a number."""
    if isinstance(value, str) and value.strip().endswith("%"):
        return to_number(value.strip().removesuffix("%")) / 100
    return to_number(value)


def to_text(value: Any) -> str:
    """Convert text and paths to text; ValueError for numbers, lists and nothing."""
    if isinstance(value, str) and value.strip() and "\0" not in value:
        return value.strip()
    if hasattr(value, "__fspath__"):
        return str(value)
    raise ValueError("must be text that is not empty")


def shown(value: Any, limit: int = 80) -> str:
    """Return a value as an error line quotes it: its repr, cut off where it is long."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an integer of 5,000 digits, or somebody's broken repr
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def to_sizes(value: Any) -> tuple[int, ...]:
    """Convert a batch list to distinct whole numbers of at least 1, in the order given.

    Accepts a list, a single number, or text such as `[256, 512]`, `256, 512` or `256 512`.
    Duplicates are kept once; `duplicates` tells which there were.
    """
    sizes = tuple(_size(entry) for entry in size_entries(value))
    if not sizes:
        raise ValueError("the batch list is empty; give at least one size, for example [32, 256]")
    return tuple(dict.fromkeys(sizes))


def to_shape(value: Any) -> tuple[int, ...]:
    """Convert `3,224,224`, '[3, 224, 224]' or a list to the dimensions of one input, in order."""
    try:
        shape = tuple(to_integer(entry) for entry in size_entries(value))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ValueError("must be whole numbers from 1, for example 3,224,224")
    return shape


def to_names(value: Any) -> tuple[str, ...]:
    """Convert a list of names, or text with commas between them, to distinct names in order."""
    entries = value.strip("[]() ").split(",") if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ValueError("must be names with commas between them")
    return tuple(dict.fromkeys(to_text(entry).strip("'\" ") for entry in entries))


def duplicates(value: Any) -> tuple[int, ...]:
    """Return the sizes that a batch list names more than once (`()` for none or no list)."""
    if is_nothing(value):
        return ()
    sizes = [_size(entry) for entry in size_entries(value)]
    return tuple(dict.fromkeys(size for size in sizes if sizes.count(size) > 1))


def size_entries(value: Any) -> list[Any]:
    """Split a batch list into its entries, unconverted; ValueError if it is not one."""
    if isinstance(value, str):
        return _entries_of_text(value.strip())
    if isinstance(value, (bytes, dict, set)):
        raise ValueError("must be a list of batch sizes, for example [32, 256]")
    return list(value) if isinstance(value, Iterable) else [value]


def _entries_of_text(text: str) -> list[Any]:
    if text.startswith(("[", "(")):
        try:
            return list(ast.literal_eval(text))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            text = text.strip("[]() ")
    return [entry for entry in re.split(r"[,;\s]+", text) if entry]


def _size(entry: Any) -> int:
    try:
        # '1,024' falls into '1' and '024': nobody means a batch of 24.
        part = isinstance(entry, str) and entry.startswith("0")
        size = 0 if part else to_integer(entry)
    except ValueError:
        size = 0
    if not 1 <= size <= _LARGEST:
        raise ValueError(
            f"{shown(entry)} is not a batch size; each must be a whole number from 1 to "
            f"{_LARGEST:,}"
        )
    return size
