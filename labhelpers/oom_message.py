"""Read an out-of-memory message and judge its cause from the numbers alone."""

from __future__ import annotations

import codecs
from dataclasses import asdict, dataclass
from typing import Any

from labhelpers.formats import MIB
from labhelpers.inputs import InputError, shown
from labhelpers.oom_wordings import Figures, read_figures

UNDECIDED_BYTES = 2 * MIB
"""The allocator's smallest step: nearer to the cap than this, the numbers cannot tell."""


@dataclass(frozen=True)
class OomMessage:
    """What an out-of-memory text says, in bytes; what it does not give is None.

    `kind` is gpu, host or library; `backend` cuda, hip, xpu, mps or cpu. `causes` holds, by
    the numbers alone, any of `cap`, `fragmentation`, `oversubscribed`, else `card_full`; or
    one of `host`, `size_overflow`, `unknown`. In place of `cap` it holds `undecided` where
    the sum is within 2 MiB of the cap, on either side. `other_processes` are pairs of pid and
    bytes. `left_out` keeps, as printed, sizes of 1 EiB and more: marks for "not available".
    `wording` names the old releases that wrote such a text, None for the present wording.
    """

    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allowed_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    private_pools_bytes: int | None = None
    this_process_bytes: int | None = None
    other_processes: tuple[tuple[int, int | None], ...] = ()
    kind: str = "gpu"
    backend: str | None = None
    causes: tuple[str, ...] = ("unknown",)
    other_allocations_bytes: int | None = None
    left_out: tuple[str, ...] = ()
    device_index: int | None = None
    wording: str | None = None

    @property
    def reserved_bytes(self) -> int | None:
        """What the allocator holds: allocated and unallocated; None where one is unknown."""
        if self.allocated_bytes is None or self.reserved_unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.reserved_unallocated_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        return asdict(self)


def parse_oom_message(text: str | bytes) -> OomMessage | None:
    """Parse an out-of-memory text of any known PyTorch release, as raised or out of a log.

    Bytes are read as UTF-8, or UTF-16 where they begin with its mark.

    Returns:
        The message, or None for a text that is no out-of-memory error. No number is made up:
        each is in the text, or is `reserved in total` minus `already allocated`.

    Raises:
        InputError: it is neither text nor bytes.
    """
    figures = read_figures(_as_text(text))
    if figures is None:
        return None
    sizes = figures.sizes
    return OomMessage(
        requested_bytes=sizes.get("requested"),
        total_bytes=sizes.get("total"),
        free_bytes=sizes.get("free"),
        allowed_bytes=sizes.get("allowed"),
        allocated_bytes=sizes.get("allocated"),
        reserved_unallocated_bytes=_unallocated(sizes),
        private_pools_bytes=sizes.get("private_pools"),
        this_process_bytes=sizes.get("this_process"),
        other_processes=tuple(figures.processes),
        kind=figures.kind,
        backend=figures.backend,
        causes=_causes(figures),
        other_allocations_bytes=sizes.get("other_allocations"),
        left_out=tuple(figures.left_out),
        device_index=figures.device_index,
        wording=figures.wording,
    )


def _as_text(given: Any) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, (bytes, bytearray)):
        raise InputError(
            f"text: got {shown(given)}; must be the text of an error, such as str(error)"
        )
    wide = given.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return given.decode("utf-16" if wide else "utf-8", "replace")


def _unallocated(sizes: dict[str, int]) -> int | None:
    """Return what is reserved but unallocated; "in total" counts the live tensors too."""
    if "unallocated" in sizes:
        return sizes["unallocated"]
    difference = sizes.get("reserved", -1) - sizes.get("allocated", 0)
    return difference if "allocated" in sizes and difference >= 0 else None


def _causes(figures: Figures) -> tuple[str, ...]:
    if figures.kind == "host":
        return ("host",)
    if "Tried to allocate more than 1EB" in figures.text:
        return ("size_overflow",)
    sizes = figures.sizes
    requested, free, unallocated = sizes.get("requested"), sizes.get("free"), _unallocated(sizes)
    causes = [_cap_cause(sizes)]
    if requested is not None and unallocated is not None and unallocated >= requested:
        causes.append("fragmentation")
    if "total" in sizes and sizes.get("allocated", 0) > sizes["total"]:
        causes.append("oversubscribed")
    found = [cause for cause in causes if cause]
    if not found and requested is not None and free is not None and free < requested:
        found = ["card_full"]
    return tuple(found) or ("unknown",)


def _cap_cause(sizes: dict[str, int]) -> str:
    """Return "cap", "undecided" or "": what is held plus the request, against what is allowed.

    A part that the text does not give can only make the sum larger.
    """
    allowed, requested, free = (sizes.get(name) for name in ("allowed", "requested", "free"))
    if allowed is None or requested is None or (free is not None and free < requested):
        return ""
    held = (sizes.get("allocated"), _unallocated(sizes), sizes.get("other_allocations"))
    over_bytes = sum(part or 0 for part in held) + requested - allowed
    if abs(over_bytes) <= UNDECIDED_BYTES:
        return "undecided"
    return "cap" if over_bytes > 0 else ""
