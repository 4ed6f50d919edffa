"""Say what to do after an out-of-memory error, from the numbers of its message."""

from __future__ import annotations

from labhelpers.formats import show_bytes
from labhelpers.oom_message import OomMessage


def advice(message: OomMessage, platform: str | None) -> list[str]:
    """Advise from a message's numbers, one line for each cause; never from its printed hint.

    Args:
        message: from `parse_oom_message`.
        platform: linux, wsl2 or windows; None (unknown) is treated with the same care as wsl2.
    """
    lines = {
        "cap": _advise_cap,
        "undecided": _advise_cap,
        "oversubscribed": _advise_oversubscribed,
        "card_full": _advise_card_full,
        "host": _advise_host,
    }
    found = []
    for cause in message.causes:
        if cause == "fragmentation":
            found += _advise_fragmentation(message, platform)
        elif cause in lines:
            found.append(lines[cause](message))
        elif cause == "size_overflow":
            found.append("A size was computed wrongly: look at the shapes; no batch size helps.")
    return found or [
        "The text gives no numbers that tell: read mem_get_info and the peaks before the next try."
    ]


def _advise_cap(message: OomMessage) -> str:
    held_bytes = sum(
        part or 0
        for part in (
            message.allocated_bytes, message.reserved_unallocated_bytes,
            message.other_allocations_bytes, message.requested_bytes,
        )
    )  # fmt: skip
    allowed = show_bytes(message.allowed_bytes)
    if "undecided" in message.causes:
        return f"Held and requested are within 2 MiB of the {allowed} allowed: too near to tell."
    return (
        f"The cap is the limit, not the card: {show_bytes(held_bytes)} held and requested, "
        f"{allowed} allowed. Raise the cap, or take a smaller batch."
    )


def _advise_fragmentation(message: OomMessage, platform: str | None) -> list[str]:
    lines = [
        f"{show_bytes(message.reserved_unallocated_bytes)} are reserved but unallocated, at least "
        f"the {show_bytes(message.requested_bytes)} requested: empty the cache between trials, and "
        "keep shapes constant."
    ]
    if platform == "linux":
        lines.append("If it stays so: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.")
    else:
        lines.append(
            "Warning: leave expandable segments off here; on WSL2 people report that they fail. "
            "max_split_size_mb is the safer setting."
        )
    return lines


def _advise_oversubscribed(message: OomMessage) -> str:
    return (
        f"{show_bytes(message.allocated_bytes)} were allocated on a card of "
        f"{show_bytes(message.total_bytes)}: system memory stood in long before this error. "
        "Go back to the last batch size that fitted the card."
    )


def _advise_card_full(message: OomMessage) -> str:
    others = [f"process {pid} ({show_bytes(used)})" for pid, used in message.other_processes]
    foreign = (
        f" Memory is also held by {', '.join(others)}; in a container that may be this process."
        if others
        else ""
    )
    return (
        f"The card is full: {show_bytes(message.requested_bytes)} requested, "
        f"{show_bytes(message.free_bytes)} free. Take a smaller batch, or a smaller micro-batch "
        f"with accumulation.{foreign}"
    )


def _advise_host(message: OomMessage) -> str:
    asked = f" for {show_bytes(message.requested_bytes)}" if message.requested_bytes else ""
    return (
        f"The system's memory, not a GPU's, had no room{asked}: take a smaller batch or fewer "
        "loader workers, or lift the limit on the process."
    )
