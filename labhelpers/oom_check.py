"""Hold an out-of-memory message to what was measured beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from labhelpers.oom_message import OomMessage
from labhelpers.oom_wordings import print_size, rounding_bytes


@dataclass(frozen=True)
class Observed:
    """What was measured beside a message; bytes, and None for what was not measured.

    `free_bytes` and `total_bytes` come from `mem_get_info` at the moment of the failure,
    `fraction` from the allocator's cap (1.0: none was set).
    """

    free_bytes: int | None = None
    total_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    fraction: float | None = None
    allowed_bytes: int | None = None
    batch_size: int | None = None
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None


def check_oom_message(message: OomMessage, observed: Any = None) -> list[str]:
    """Set a message beside what was measured and say each disagreement in words.

    Args:
        message: from `parse_oom_message`.
        observed: an `Observed`, or a mapping or object with some of its names; other names
            are ignored.

    Returns:
        One line for each disagreement beyond the rounding of the printed digits.
    """
    seen = as_observed(observed)
    return [
        *(f"says {size}: {_mark(size)}, left out" for size in message.left_out),
        *_against_itself(message),
        *_against_device(message, seen),
        *_against_peaks(message, seen),
        *_against_cap(message, seen),
        *_against_release(message, seen),
    ]


def as_observed(observed: Any) -> Observed:
    """Take the names of `Observed` from a mapping or an object; what is absent is None."""
    names = [item.name for item in fields(Observed)]
    if isinstance(observed, Mapping):
        return Observed(**{name: observed.get(name) for name in names})
    return Observed(**{name: getattr(observed, name, None) for name in names})


def _mark(size: str) -> str:
    no_cap = size.endswith("allowed")
    return "the mark for 'no cap was set'" if no_cap else "the driver's mark for 'not available'"


def _exceeds(larger: int | None, *smaller: int | None) -> bool:
    """Tell whether a size is larger than the sum of others by more than rounding explains."""
    if larger is None or None in smaller:
        return False
    parts = [part for part in smaller if part is not None]
    slack_bytes = rounding_bytes(larger) + sum(rounding_bytes(part) for part in parts)
    return larger - sum(parts) > slack_bytes


def _against_itself(message: OomMessage) -> list[str]:
    total, allocated = message.total_bytes, message.allocated_bytes
    reserved, process = message.reserved_bytes, message.this_process_bytes
    in_use = (process or 0) + sum(used or 0 for _, used in message.other_processes)
    pairs = (
        (message.free_bytes, "free", total, "in total"),
        (allocated, "allocated", total, "in total: more than the card holds"),
        (process, "in use by this process", total, "in total: more than the card holds"),
        (reserved, "allocated and reserved", process, "in use by this process"),
        (reserved, "allocated and reserved", message.allowed_bytes, "allowed"),
    )
    found = [
        f"says {print_size(a)} {what}, but {print_size(b)} {limit}"
        for a, what, b, limit in pairs
        if a is not None and b is not None and _exceeds(a, b)
    ]
    if total and in_use and message.free_bytes and not _exceeds(in_use, total):
        together = in_use + message.free_bytes
        if _exceeds(together, total):
            found.append(
                f"says {print_size(message.free_bytes)} free and {print_size(in_use)} in use, "
                f"together more than the {print_size(total)} in total"
            )
    return found


def _against_device(message: OomMessage, seen: Observed) -> list[str]:
    pairs = (
        (message.total_bytes, seen.total_bytes, "in total", "another device, or another text"),
        (message.free_bytes, seen.free_bytes, "free", "read at another moment, or other work"),
    )
    return [
        f"says {print_size(said)} {what}, but mem_get_info says {print_size(read)}: {why}"
        for said, read, what, why in pairs
        if said is not None and read is not None and abs(said - read) > rounding_bytes(read) + 1
    ]


def _against_peaks(message: OomMessage, seen: Observed) -> list[str]:
    found = [
        f"says {print_size(said)} {what}, but the measured peak is {print_size(peak)}: "
        "the peak was reset later, or belongs to another device"
        for said, peak, what in (
            (message.allocated_bytes, seen.peak_allocated_bytes, "allocated"),
            (message.reserved_bytes, seen.peak_reserved_bytes, "allocated and reserved"),
        )
        if said is not None and peak is not None and _exceeds(said, peak)
    ]
    total = seen.total_bytes or message.total_bytes
    if total and _exceeds(seen.peak_allocated_bytes, total):
        found.append(
            f"the measured peak of {print_size(seen.peak_allocated_bytes or 0)} is more than the "
            f"{print_size(total)} that the card holds: system memory took part"
        )
    return found


def _against_cap(message: OomMessage, seen: Observed) -> list[str]:
    if message.kind != "gpu" or (seen.fraction is None and seen.allowed_bytes is None):
        return []
    total = seen.total_bytes or message.total_bytes
    expected, slack_bytes = seen.allowed_bytes, 1.0
    if expected is None:
        if total is None or seen.fraction is None:
            return []
        expected = int(seen.fraction * total)
        # A total that is itself rounded must not raise a false alarm.
        slack_bytes += 0 if seen.total_bytes else seen.fraction * rounding_bytes(total)
    capped = seen.fraction is None or seen.fraction < 1
    said = message.allowed_bytes
    if said is None:
        unsaid = capped and message.total_bytes is not None and message.wording is None
        return [f"names no cap, but {print_size(expected)} were allowed"] if unsaid else []
    if not capped:
        return [f"says {print_size(said)} allowed, but no cap was set"]
    if abs(said - expected) > rounding_bytes(expected) + slack_bytes:
        return [f"says {print_size(said)} allowed, but the cap is {print_size(expected)}"]
    return []


def _against_release(message: OomMessage, seen: Observed) -> list[str]:
    """Compare the wording with the release that runs: an old text is someone else's."""
    running = re.match(r"(\d{1,3})\.(\d{1,3})", seen.torch or "")
    if message.wording is None or running is None:
        return []
    last = message.wording.rpartition(" ")[2]
    if (int(running[1]), int(running[2])) <= tuple(int(part) for part in last.split(".")):
        return []
    return [f"is worded as by {message.wording}, but torch {seen.torch} is running"]
