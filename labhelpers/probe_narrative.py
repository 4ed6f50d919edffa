"""Sentences and tables about probes and the residency map; every number comes from results."""

from __future__ import annotations

from typing import Any

import pandas as pd

from labhelpers.formats import (
    MIB,
    NOT_AVAILABLE,
    mib,
    show_bandwidth,
    show_bytes,
    show_rate,
    show_share,
    show_times,
)
from labhelpers.oversubscription import MemoryJudgement, best_safe_batch
from labhelpers.platforms import PLATFORMS, Platform, fallback_policy
from labhelpers.probe_curves import ProbeCurve, flags_of, rows_of
from labhelpers.probe_plan import Stop
from labhelpers.residency import ResidencyMap
from labhelpers.slowdowns import DRIFT_RATIO

_PLATFORM_NAMES: dict[Platform, str] = {
    "linux": "native Linux", "wsl2": "WSL2", "windows": "Windows",
}  # fmt: skip


def verdict_table(curve: ProbeCurve) -> pd.DataFrame:
    """Return one row per run in the order of time: speed, memory, verdict and cause, as text."""
    rows = [_verdict_row(row, judged, curve) for row, judged in curve.judged_rows()]
    table = pd.DataFrame(rows)
    return table if table["flags"].any() else table.drop(columns="flags")


def evidence(curve: ProbeCurve) -> str:
    """List what the verdicts rest on, for every run that fell, failed or is not a plain no.

    Runs with the same verdict and the same causes are told once, by the first of them.
    """
    told: dict[tuple[Any, ...], list[MemoryJudgement]] = {}
    for judged in curve.judgements:
        failed = judged.outcome not in (None, "ok")
        if judged.causes or judged.verdict != "no" or failed:
            told.setdefault((judged.verdict, judged.causes, failed), []).append(judged)
    if not told:
        return "No run fell in speed and none came past the card: there is nothing to explain."
    return "\n".join(_evidence_line(group, curve) for group in told.values())


def _evidence_line(group: list[MemoryJudgement], curve: ProbeCurve) -> str:
    first = group[0]
    head = "" if curve.on_cpu else f" Past the card: **{first.verdict}**."
    # On the CPU the first two sentences would speak of a card that is not there.
    words = " ".join(first.evidence[2 if curve.on_cpu else 0 :])
    others = ", ".join(f"{judged.batch_size:,}" for judged in group[1:])
    return f"- Batch **{first.batch_size:,}**.{head} {words}" + (
        f" The same holds for {others}." if others else ""
    )


def stopped(stop: Stop | None, curve: ProbeCurve) -> str:
    """Say why the probe ended, and how far it came."""
    largest = max((j.batch_size for j in curve.judgements if j.outcome == "ok"), default=None)
    if stop is None:
        return "The probe was interrupted; run it again and it goes on where it stopped."
    return f"The largest batch that ran is **{largest:,}**. Then the probe ended: {stop.words}."


def drift(curve: ProbeCurve) -> str:
    """Say what the smallest size did when it ran once more at the end."""
    size = min(j.batch_size for j in curve.judgements)
    speeds = [j.images_per_s for j in curve.judgements if j.batch_size == size and j.images_per_s]
    if len(speeds) < 2:
        return "The smallest size was not run again, so drift is not known."
    ratio = speeds[0] / speeds[-1]
    meaning = (
        f"the machine slowed by {show_times(ratio, 2)} meanwhile, and falls of that size are drift"
        if ratio >= DRIFT_RATIO
        else "no drift, so what fell in between fell for another reason"
    )
    return (
        f"Batch {size:,} ran first and again last: {show_rate(speeds[0])}, then "
        f"{show_rate(speeds[-1])}: {meaning}."
    )


def safe_batch(curve: ProbeCurve) -> str:
    """Say which batch is the fastest that is safe, and what it needs."""
    size = best_safe_batch(curve.judgements)
    if size is None:
        return "**No size is safe here**: even the smallest came to the limit."
    row = next(row for row in rows_of(curve.table) if row["batch_size"] == size)
    words = f"**The fastest safe batch is {size:,}**: {show_rate(row['images_per_s'])}"
    peaks = [row[name] for name in ("reserved_mib", "allocated_mib") if pd.notna(row[name])]
    if peaks:
        words += f" with a peak of {show_bytes(peaks[0] * MIB)}"
    if curve.on_cpu:
        return f"{words}, on the CPU; it says nothing about a GPU."
    if not peaks:
        return f"{words}."
    return f"{words}, {show_share(peaks[0] * MIB / curve.total_bytes)} of the card."


def policies(here: Platform | None) -> str:
    """List what the driver does past the card on each platform, this machine's marked."""
    lines = [
        f"- **{_PLATFORM_NAMES[platform]}**{' (this machine)' if platform == here else ''}: "
        f"{fallback_policy(platform)}"
        for platform in PLATFORMS
    ]
    return "\n".join(lines)


def residency(found: ResidencyMap | None, platform: Platform | None) -> str:
    """Say what the residency map shows, and what it cannot show."""
    if found is None:
        return "The map could not be measured here: see the trial's error in the run directory."
    words = [_blocks_in_words(found)]
    if found.ended:
        words.append(f"It is smaller than asked: {found.ended}.")
    if found.device == "cpu":
        words.append(
            "On the CPU every block lies in the host's memory: the map runs, and there is "
            "nothing for it to find. It needs a GPU."
        )
        return " ".join(words)
    words.append(_places_in_words(found))
    if platform == "linux":
        words.append(
            "On native Linux the driver never moves a block out of the card, so all resident is "
            "the expected picture; the map was kept to a safe part of the card."
        )
    words.append("We have never run this map on WSL2; there it is untried.")
    return " ".join(words)


def _blocks_in_words(found: ResidencyMap) -> str:
    blocks = len(found.fill_judgements)
    slowest = min(judged.bandwidth for judged in found.fill_judgements)
    bus = found.bus_from_device
    across = f"a pinned copy over the bus runs at {show_bandwidth(bus)}, " if bus else ""
    return (
        f"{blocks} blocks of {show_bytes(found.block_bytes)}, "
        f"{show_bytes(blocks * found.block_bytes)} in all. A fresh block is filled at "
        f"{show_bandwidth(found.card_fill)}, {across}and the slowest block of the map is filled "
        f"at {show_bandwidth(slowest)}."
    )


def _places_in_words(found: ResidencyMap) -> str:
    slow, blocks = found.slow_blocks, len(found.fill_judgements)
    if any(judged.place == "undecided" for judged in found.fill_judgements):
        return "**Undecided**: card and bus are too close in speed to tell blocks apart."
    if not slow:
        return f"**All {blocks} blocks are resident**: each is filled or read at the card's speed."
    shown = ", ".join(str(index) for index in slow[:12]) + (" …" if len(slow) > 12 else "")
    return f"**{len(slow)} of {blocks} blocks are not, or not wholly, in video memory**: {shown}."


def _verdict_row(row: Any, judged: MemoryJudgement, curve: ProbeCurve) -> dict[str, str]:
    reserved = _bytes_of(row, "peak_reserved_bytes")
    share = None if reserved is None or curve.on_cpu else reserved / curve.total_bytes
    speed = NOT_AVAILABLE if judged.images_per_s is None else f"{judged.images_per_s:,.0f}"
    failed = judged.outcome not in (None, "ok")
    return {
        "batch": f"{judged.batch_size:,}",
        "images/s": str(judged.outcome) if failed else speed,
        "allocated MiB": _mib_text(_bytes_of(row, "peak_allocated_bytes")),
        "reserved MiB": _mib_text(reserved),
        "reserved / card": show_share(share),
        "past the card": "no card" if curve.on_cpu else judged.verdict,
        "cause of a fall": ", ".join(judged.causes) or "-",
        "flags": flags_of(row),
    }


def _mib_text(value_bytes: float | None) -> str:
    value = mib(value_bytes)
    return NOT_AVAILABLE if value is None else f"{value:,.0f}"


def _bytes_of(row: Any, name: str) -> float | None:
    value = row.get(name) if isinstance(row, dict) else getattr(row, name, None)
    return None if value is None else float(value)
