"""What a reader types into a panel becomes a spec, or the reason in one line; no widgets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from labhelpers.drivers import ask_nvml
from labhelpers.inputs import InputError, duplicates
from labhelpers.records import (
    ARTICLE_BATCH_SIZES,
    FeedName,
    Precision,
    Spec,
    ask,
)

SMALL_BATCH_SIZES = (8, 16, 32, 64, 128)
SMALLEST_POWER, LARGEST_POWER = 8, 2**20


@dataclass(frozen=True)
class Field:
    """One entry of a panel: a spec's field, its label, and its choices (none: free text).

    `sizes` marks the editable list that the presets fill; `wide` an entry for long texts.
    """

    name: str
    label: str
    choices: tuple[str, ...] = ()
    sizes: bool = False
    wide: bool = False
    hint: str = ""


def likely_device() -> str:
    """Return the device that `auto` will probably mean, `cuda:0` or `cpu`, without loading torch.

    Where torch is loaded already it is asked; else the driver is.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if ask_nvml("nvmlDeviceGetCount") else "cpu"


def device_choices() -> tuple[str, ...]:
    """Return what can be chosen as device here: auto, cpu, and each GPU the driver knows."""
    count = ask_nvml("nvmlDeviceGetCount") or 0
    return ("auto", "cpu", *(f"cuda:{index}" for index in range(count)))


PRECISION = Field("precision", "Precision", choices=get_args(Precision))
FEED = Field(
    "feed", "Feed", choices=tuple(name for name in get_args(FeedName) if name != "own")
)  # fmt: skip


def device_field() -> Field:
    """Return the entry for the device, with what is there."""
    return Field("device", "Device", choices=device_choices())


def preset(name: str, up_to: Any = None) -> tuple[int, ...]:
    """Return the sizes of a preset: `article`, `small`, or `powers of two` up to a size.

    Raises:
        InputError: `up_to` is no whole number from 8 to 1,048,576.
    """
    if name == "article":
        return ARTICLE_BATCH_SIZES
    if name == "small":
        return SMALL_BATCH_SIZES
    try:
        largest = int(str(up_to).replace(",", "").strip())
    except ValueError:
        largest = 0
    if not SMALLEST_POWER <= largest <= LARGEST_POWER:
        raise InputError(
            f"powers of two up to {up_to!r}: give a whole number from {SMALLEST_POWER} to "
            f"{LARGEST_POWER:,}"
        )
    powers = range(SMALLEST_POWER.bit_length() - 1, largest.bit_length())
    return tuple(2**power for power in powers)


def text_of(value: Any) -> str:
    """Write a spec's value as a reader would type it; empty for None."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ", ".join(str(entry) for entry in value)
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return str(value)


def given_value(base: Spec, name: str, text: str) -> Any:
    """Return what a text means for a field: None where it is empty and None is allowed."""
    optional = type(base).model_fields[name].default is None
    return None if optional and not text.strip() else text


def reason_against(base: Spec, name: str, text: str) -> str:
    """Say why a text cannot be a field's value, without the field's name; empty if it can."""
    try:
        ask(type(base), {name: given_value(base, name, text)})
    except InputError as error:
        return str(error).removeprefix(f"{name}: ")
    return ""


def remark_on(field: Field, text: str) -> str:
    """Say what a reader should know about a text that is allowed; empty for nothing."""
    if not field.sizes:
        return ""
    twice = ", ".join(f"{size:,}" for size in duplicates(text))
    return f"{twice}: given twice, measured once" if twice else ""


def spec_from(base: Spec, texts: Mapping[str, str]) -> Spec:
    """Build the spec that the texts ask for; what the panel does not show stays as in `base`.

    Raises:
        InputError: one line with the field, the value and what is allowed.
    """
    given = {name: given_value(base, name, text) for name, text in texts.items()}
    return ask(type(base), {**base.model_dump(), **given})


def blamed(message: str, names: Mapping[str, Any]) -> tuple[str, str]:
    """Split an error line into the field it begins with and the reason (`""` for no field)."""
    name, sign, reason = message.partition(": ")
    return (name, reason) if sign and name in names else ("", message)
