"""Tables and sentences about running out of memory; every number comes from a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from labhelpers.formats import GIB, MIB, NOT_AVAILABLE, show_bytes, show_share
from labhelpers.oom_advice import advice
from labhelpers.oom_check import Observed, as_observed
from labhelpers.oom_message import OomMessage, parse_oom_message
from labhelpers.oom_wordings import print_size
from labhelpers.records import Trial
from labhelpers.references import article

if TYPE_CHECKING:
    from labhelpers.recovery_demos import Demonstration


def cap_table(trials: Sequence[Trial]) -> pd.DataFrame:
    """Return one row a trial of the series: what was tried, how it ended, what it took."""
    rows = [
        {
            "batch": f"{trial.batch_size:,}",
            "outcome": _outcome(trial),
            "peak allocated": show_bytes(trial.peak_allocated_bytes),
            "of the cap": _share_of_cap(trial),
            "peak reserved": show_bytes(trial.peak_reserved_bytes),
            "asked for when it failed": show_bytes((trial.oom or {}).get("requested_bytes")),
        }
        for trial in trials
    ]
    return without_unmeasured(pd.DataFrame(rows))


def without_unmeasured(table: pd.DataFrame) -> pd.DataFrame:
    """Leave out the columns that this system does not tell at all."""
    return table.loc[:, [not (table[name] == NOT_AVAILABLE).all() for name in table]]


def article_cap_table() -> pd.DataFrame:
    """Return the article's published series (RTX 5070 Ti) in the same columns."""
    published: Any = article()["controlled_oom"]
    allowed = published["allowed_gib"] * GIB
    rows = []
    for row in published["rows"]:
        peak = row.get("peak_allocated_mib", 0) * MIB or row.get("allocated_gib", 0) * GIB
        rows.append({
            "batch": f"{row['batch_size']:,}",
            "outcome": "out of memory" if row["oom"] else "trained",
            "peak allocated": show_bytes(peak) + (" (at the error)" if row["oom"] else ""),
            "of the cap": show_share(peak / allowed, 0),
            "asked for when it failed": show_bytes(row.get("requested_mib", 0) * MIB or None),
        })  # fmt: skip
    return pd.DataFrame(rows)


def cap_answer(trials: Sequence[Trial]) -> str:
    """Say what fitted, what failed, and that the limit was the cap and not the device."""
    if not trials:
        return "The controlled error was **not run** here; the run's notes say why."
    first = trials[0]
    limit = _limit(first)
    fitted = [t.batch_size for t in trials if t.outcome == "ok" and not _after_oom(t)]
    failed = [t for t in trials if t.outcome == "oom" and not _after_oom(t)]
    if not failed:
        return f"Under {limit} every size trained, up to batch **{max(fitted):,}**."
    worst = failed[0]
    if not fitted:
        return f"Under {limit} nothing trained: batch {worst.batch_size:,} failed already."
    asked = (worst.oom or {}).get("requested_bytes")
    return (
        f"Under {limit}, batch **{max(fitted):,}** trained and batch **{worst.batch_size:,}** ran "
        f"out of memory when it asked for {show_bytes(asked)} more. The cap is the limit here: "
        "this says nothing about the largest batch that the device can hold."
    )


def recovery_answer(trials: Sequence[Trial]) -> str:
    """Say whether the process trained again after the error, and what was given back."""
    again = [trial for trial in trials if _after_oom(trial)]
    failed = [trial for trial in trials if trial.outcome == "oom" and not _after_oom(trial)]
    if not again or not failed:
        return "There was no error to recover from."
    details = failed[0].details or {}
    before, after = (_held(details.get("released") or {}, when) for when in ("before", "after"))
    freed = (
        f"Clean-up took {before[0]} from {show_bytes(before[1])} to {show_bytes(after[1])}. "
        if before and after else ""
    )  # fmt: skip
    trained = again[0].outcome == "ok"
    size = f"batch {again[0].batch_size:,}, under the same cap,"
    verdict = (
        f"Then {size} trained again: this process, which had just run out of memory, **goes on**."
        if trained else f"Then {size} **failed**: memory is still held."
    )  # fmt: skip
    return freed + verdict


def message_of(trials: Sequence[Trial]) -> tuple[OomMessage, Observed, str | None] | None:
    """Return the first error of a series, parsed; what was measured beside it; the platform."""
    failed = [trial for trial in trials if trial.outcome == "oom"]
    message = parse_oom_message(failed[0].error_text or "") if failed else None
    if message is None:
        return None
    details = failed[0].details or {}
    return message, as_observed(details), details.get("platform")


def article_message() -> tuple[str, Observed]:
    """Return a message in the wording of torch 2.13 with the figures that the article prints.

    The article quotes figures, not the whole text; what it does not give is left out.
    """
    published: Any = article()
    series = published["controlled_oom"]
    row = next(row for row in series["rows"] if row["oom"])
    total_mib = published["environment"]["mem_get_info_total_mib"]
    text = (
        f"CUDA out of memory. Tried to allocate {row['requested_mib']:.2f} MiB. GPU 0 has a total "
        f"capacity of {total_mib / 1024:.2f} GiB. Including non-PyTorch memory, this process has "
        f"{row['absurd_process_gib']:.2f} GiB memory in use. {series['allowed_gib']:.2f} GiB "
        f"allowed; Of the allocated memory {row['allocated_gib']:.2f} GiB is allocated by "
        f"PyTorch, and {row['reserved_unallocated_mib']:.2f} MiB is reserved by PyTorch but "
        "unallocated."
    )
    observed = Observed(
        total_bytes=round(total_mib * MIB), fraction=series["memory_fraction"],
        batch_size=row["batch_size"], torch=published["environment"]["torch"],
    )  # fmt: skip
    return text, observed


def message_table(message: OomMessage, observed: Observed) -> pd.DataFrame:
    """Set each figure of a message beside what was measured of the same thing."""
    allowed = observed.allowed_bytes
    if allowed is None and observed.total_bytes and observed.fraction:
        allowed = int(observed.fraction * observed.total_bytes)
    reserved = message.reserved_unallocated_bytes
    pairs = (
        ("asked for", message.requested_bytes, None, ""),
        ("total", message.total_bytes, observed.total_bytes, "mem_get_info"),
        ("free", message.free_bytes, observed.free_bytes, "mem_get_info"),
        ("allowed", message.allowed_bytes, allowed, "int(fraction × total)"),
        ("allocated", message.allocated_bytes, observed.peak_allocated_bytes, "peak"),
        ("reserved, unallocated", reserved, None, ""),
        ("in use by this process", message.this_process_bytes, None, ""),
    )
    rows = [
        {"figure": name, "the message says": _size(said), "measured": _size(seen), "how": how}
        for name, said, seen, how in pairs
        if said is not None or (seen is not None and message.kind == "gpu")
    ]
    return pd.DataFrame(rows)


def message_answer(message: OomMessage, disagreements: Sequence[str], platform: str | None) -> str:
    """Say the cause by the numbers, each disagreement, and what to do."""
    lines = [f"Cause by the numbers: **{', '.join(message.causes)}**."]
    lines += [f"- The message {line}." for line in disagreements] or ["- No disagreement found."]
    lines += [f"- {line}" for line in advice(message, platform)]
    return "\n".join(lines)


def demonstration_table(demonstrations: Sequence[Demonstration]) -> pd.DataFrame:
    """Return one row a moment: what was done, what is held after it, and whether that helped."""
    rows = []
    for shown in demonstrations:
        for number, (moment, held) in enumerate(zip(shown.moments, shown.holds, strict=True)):
            rows.append({
                "what keeps it": shown.title if number == 0 else "",
                "done": moment.action,
                "held": show_bytes(moment.held_bytes),
                "cached": show_bytes(moment.cached_bytes),
                "": "still held" if held else "free",
            })  # fmt: skip
    return without_unmeasured(pd.DataFrame(rows))


def _outcome(trial: Trial) -> str:
    ending = "trained" if trial.outcome == "ok" else "out of memory"
    return f"{ending}, after the error" if _after_oom(trial) else ending


def _after_oom(trial: Trial) -> bool:
    return bool((trial.details or {}).get("after_oom"))


def _share_of_cap(trial: Trial) -> str:
    # On the CPU the budget counts addresses, and the peak counts pages: no share to speak of.
    if trial.device == "cpu" or not trial.cap_bytes or trial.peak_allocated_bytes is None:
        return NOT_AVAILABLE
    return show_share(trial.peak_allocated_bytes / trial.cap_bytes, 0)


def _limit(trial: Trial) -> str:
    if trial.device == "cpu":
        return f"a budget of {show_bytes(trial.cap_bytes)} more than the process had mapped"
    fraction = ((trial.details or {}).get("cap") or {}).get("fraction")
    return f"a cap of {show_bytes(trial.cap_bytes)} ({show_share(fraction, 0)} of the GPU)"


def _held(released: dict[str, Any], when: str) -> tuple[str, int] | None:
    """Return what a release was about, and its bytes: reserved on CUDA, resident on the CPU."""
    memory = released.get(when) or {}
    for name, words in (
        ("reserved_bytes", "what the allocator holds"),
        ("resident_bytes", "the process"),
    ):
        if memory.get(name) is not None:
            return words, memory[name]
    return None


def _size(value_bytes: int | None) -> str:
    return NOT_AVAILABLE if value_bytes is None else print_size(value_bytes)
