"""Read the facts that a memory verdict needs from records or mappings; absent is unknown."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from labhelpers.inputs import InputError
from labhelpers.platforms import clean_driver_value

_LARGEST_BATCH = 2**31 - 1

# Where a fact stands in a plain row, and where in a `Trial`; the first that is known counts.
_PLACES: dict[str, tuple[str, ...]] = {
    "free_bytes": ("free_bytes", "memory_after.free_bytes"),
    "clock_mhz": ("clock_mhz", "clocks_after.sm_mhz"),
    "throttled": ("throttled", "clocks_after.throttle_reasons"),
    "kernels": ("kernels", "details.kernels"),
}


@dataclass(frozen=True)
class MemoryRow:
    """What is known of one batch size; every field but the batch size may be unknown (None).

    `other_processes` is a count or a number of bytes: only its growth is looked at.
    `alloc_retries` are those of this row alone. `position` orders the rows in time.
    """

    batch_size: int
    position: tuple[float, int]
    images_per_s: float | None = None
    peak_allocated_bytes: float | None = None
    peak_reserved_bytes: float | None = None
    alloc_retries: float | None = None
    free_bytes: float | None = None
    clock_mhz: float | None = None
    throttle_reasons: frozenset[str] | None = None
    other_processes: float | None = None
    kernels: frozenset[str] | None = None
    outcome: str | None = None

    @property
    def ran(self) -> bool:
        """Tell whether the row is a measurement that ended well, as far as is known."""
        return self.outcome in (None, "ok")

    def past(self, total_bytes: float) -> bool:
        """Tell whether the allocator's peaks are above what the card holds."""
        peaks = (self.peak_allocated_bytes, self.peak_reserved_bytes)
        return any(peak is not None and peak > total_bytes for peak in peaks)


def read_rows(rows: Iterable[Any]) -> list[MemoryRow]:
    """Read rows in the order given; rows without any position are in time order as given.

    Raises:
        InputError: one line with the row, the field and the value.
    """
    if isinstance(rows, (str, Mapping)) or not isinstance(rows, Iterable):
        raise InputError(f"rows is {type(rows).__name__}; it must be a list of records or mappings")
    given = list(rows)
    positions = [_number(row, "position", index) for index, row in enumerate(given)]
    if any(position is None for position in positions):
        positions = [0.0] * len(given)
    return [_read(row, index, positions[index] or 0.0) for index, row in enumerate(given)]


def number_above_zero(name: str, value: Any) -> float:
    """Return a finite number above 0; InputError with the name and the value otherwise."""
    number = _finite(name, value)
    if number <= 0:
        raise InputError(f"{name} is {value!r}; it must be above 0")
    return number


def _read(row: Any, index: int, position: float) -> MemoryRow:
    reasons = _reasons(_fact(row, "throttled"), f"rows[{index}].throttled")
    idle = reasons is not None and any("idle" in reason.lower() for reason in reasons)
    outcome = _fact(row, "outcome")
    return MemoryRow(
        batch_size=_batch_size(row, index),
        position=(position, index),
        images_per_s=_speed(row, index),
        peak_allocated_bytes=_number(row, "peak_allocated_bytes", index),
        peak_reserved_bytes=_number(row, "peak_reserved_bytes", index),
        alloc_retries=_number(row, "alloc_retries", index),
        free_bytes=_number(row, "free_bytes", index),
        # An idle device lowers its clock: such a reading says nothing about the measurement.
        clock_mhz=None if idle else _number(row, "clock_mhz", index),
        throttle_reasons=None if idle else reasons,
        other_processes=_others(row, index),
        kernels=_names(_fact(row, "kernels"), _name(index, "kernels")),
        outcome=None if outcome is None else str(outcome),
    )


def _name(index: int, field: str) -> str:
    return f"rows[{index}].{field}"


def _fact(row: Any, field: str) -> Any:
    for place in _PLACES.get(field, (field,)):
        value = row
        for part in place.split("."):
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        if value is not None:
            return value
    return None


def _batch_size(row: Any, index: int) -> int:
    value = _fact(row, "batch_size")
    try:
        size = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = 0
    if not 1 <= size <= _LARGEST_BATCH:
        raise InputError(
            f"{_name(index, 'batch_size')} is {value!r}; it must be a whole number from 1 to"
            f" {_LARGEST_BATCH:,}"
        )
    return size


def _speed(row: Any, index: int) -> float | None:
    value = _fact(row, "images_per_s")
    return None if value is None else number_above_zero(_name(index, "images_per_s"), value)


def _number(row: Any, field: str, index: int) -> float | None:
    value = _fact(row, field)
    # NaN is refused below, not cleaned away: only the driver's own marks mean "unknown".
    cleaned = value if isinstance(value, float) and math.isnan(value) else clean_driver_value(value)
    if cleaned is None:
        return None
    number = _finite(_name(index, field), cleaned)
    if number < 0:
        raise InputError(f"{_name(index, field)} is {value!r}; it must be 0 or more, or None")
    return number


def _finite(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{name} is {value!r}; it must be a finite number (None if not measured)")
    return number


def _others(row: Any, index: int) -> float | None:
    value = _fact(row, "other_processes")
    if isinstance(value, Collection) and not isinstance(value, str):
        return float(len(value))
    return _number(row, "other_processes", index)


def _reasons(value: Any, name: str) -> frozenset[str] | None:
    if isinstance(value, bool):
        return frozenset({"throttled"}) if value else frozenset()
    return _names(value, name)


def _names(value: Any, name: str) -> frozenset[str] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InputError(f"{name} is {value!r}; it must be a list or set of names, None if unknown")
    return frozenset(str(entry) for entry in value)
