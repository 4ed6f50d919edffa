"""Sentences whose numbers come from results: the only place where prose meets figures."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pandas as pd

from labhelpers.formats import MIB, show_bytes, show_rate, show_seconds, show_share, show_times
from labhelpers.references import Curve, is_committed
from labhelpers.store import RunDirectory
from labhelpers.tables import disturbed, readable
from labhelpers.verdicts import Readings, read_sweep, sweet_spot

MOSTLY, HARDLY = 0.6, 0.2
"""Shares of an epoch spent waiting for images from which the loader is, or is not, the limit."""


def sweep_text(curve: Curve, share: float) -> str:
    """Return the table and the answer of a sweep as plain text for a terminal."""
    lines = [readable(curve.table).to_string(index=False), ""]
    said = (answer, knife_edge, going_further)
    return "\n".join(lines + [tell(curve, share).replace("**", "") for tell in said])


def readings(curve: Curve, share: float) -> Readings:
    """Derive the article's readings from a curve's table."""
    table = curve.table.set_index("batch_size")
    rates = _known(table["images_per_s"])
    peaks = {size: value * MIB for size, value in _known(table["allocated_mib"]).items()}
    return read_sweep(rates, peaks, curve.images, share)


def answer(curve: Curve, share: float) -> str:
    """Say the recommended batch size in one sentence, with speed and memory."""
    spot = readings(curve, share).sweet_spot
    row = _row(curve, spot.batch_size)
    beside = (
        "the fastest of all"
        if spot.batch_size == spot.best_batch_size
        else f"{show_share(spot.share_of_best)} of what batch {spot.best_batch_size:,} gives "
        f"({show_rate(spot.best_images_per_s)})"
    )
    return (
        f"On **{curve.device}**, batch **{spot.batch_size:,}** is the smallest that reaches "
        f"{show_share(share, 0)} of the best speed measured: {show_rate(spot.images_per_s)}, "
        f"{beside}, at a peak of {_memory(row)}."
    )


def in_short(curve: Curve, share: float) -> str:
    """Say the recommended batch, what more would bring, and what holds back, in three lines."""
    said = (answer, going_further, feed_wait, passes_alone, caution)
    lines = [line for tell in said if (line := tell(curve, share))]
    size = readings(curve, share).sweet_spot.batch_size
    return "\n>\n".join(f"> {line}" for line in (f"**Train with batches of {size:,}.**", *lines))


def knife_edge(curve: Curve, share: float) -> str:
    """Say what the sweet spot would be at neighbouring shares, and whether it is a close call."""
    spot = readings(curve, share).sweet_spot
    others = [f"{size:,} at {show_share(at, 0)}" for at, size in spot.at.items() if at != share]
    close = abs(spot.share_of_best - share) < 0.005
    edge = (
        f" It passes by {(spot.share_of_best - share) * 100:.2f} percentage points: a knife's "
        "edge that another run may tip." if close else ""
    )  # fmt: skip
    choice = f"The share is a choice: the sweet spot would be {' and '.join(others)}.{edge}"
    return f"{choice} {passes_alone(curve, share)}".rstrip()


def passes_alone(curve: Curve, share: float) -> str:
    """Say which batch each pass by itself would recommend; "" where all of them agree."""
    spots = Counter(sweet_spot(rates, share).batch_size for rates in curve.passes)
    if len(spots) < 2:
        return ""
    many = len(curve.passes)
    told = [f"{size:,} ({count} of {many})" for size, count in spots.most_common()]
    return (
        f"Taken one by one, the passes say {' and '.join(told)}: the speeds are too close to "
        "tell these sizes apart, so take the one that suits you, or measure with more repeats."
    )


def caution(curve: Curve, share: float) -> str:  # noqa: ARG001 - told like the others
    """Say what keeps these speeds from being relied on: one repeat, disturbances; "" if nothing."""
    table = curve.table.dropna(subset=["images_per_s"])
    many, flagged = len(table), len(disturbed(table))
    once = "Each size was measured once: a first look." if table["repeats"].max() == 1 else ""
    others = (
        f"Something else slowed {flagged} of the {many} sizes down (see flags in the table): "
        "measure again on a quiet machine." if flagged else ""
    )  # fmt: skip
    return f"{once} {others}".strip()


def feed_wait(curve: Curve, share: float) -> str:
    """Say how much of the sweet spot's epoch is waiting for images, and what that means."""
    return waiting_at(curve, readings(curve, share).sweet_spot.batch_size)


def waiting_at(curve: Curve, batch_size: int) -> str:
    """Say how much of an epoch at one batch size is waiting for images, and what that means."""
    spot = _row(curve, batch_size)
    if pd.isna(spot["feed_wait"]):
        return "How long the loop waited for images was not recorded."
    waiting = show_share(spot["feed_wait"], 0)
    if spot["feed_wait"] >= MOSTLY:
        verdict = "the loader is the limit, and a faster device would not help"
    elif spot["feed_wait"] <= HARDLY:
        verdict = "the loader is not the limit: launching and computing are"
    else:
        verdict = "the loader and the device share the time"
    return f"At batch {batch_size:,}, {waiting} of the epoch is waiting for images: {verdict}."


def going_further(curve: Curve, share: float) -> str:
    """Say what going beyond the sweet spot saves in time and costs in memory."""
    found = readings(curve, share)
    spot = found.sweet_spot
    if spot.batch_size == found.largest_batch_size:
        return "The sweet spot is the largest batch measured; a larger one may still be faster."
    saved = (
        f"Going on from {spot.batch_size:,} to the fastest, {spot.best_batch_size:,}, saves "
        f"{show_seconds(found.saved_s)} per epoch of {curve.images:,} images."
        if spot.best_batch_size != spot.batch_size
        else f"No other batch size is faster than {spot.batch_size:,}."
    )
    memory = (
        f" The largest, {found.largest_batch_size:,}, takes {show_times(found.memory_ratio)} the "
        "memory of the sweet spot." if found.memory_ratio else ""
    )  # fmt: skip
    return saved + memory


def step_against_epoch(curve: Curve, share: float) -> str:
    """Say how step time and epoch time change from the smallest batch to the sweet spot."""
    spot = readings(curve, share).sweet_spot.batch_size
    measured = curve.table.dropna(subset=["images_per_s"])
    small, chosen = measured.iloc[0], _row(curve, spot)
    if small["batch_size"] == spot:
        return "The smallest batch measured already is the sweet spot."
    return (
        f"From batch {small['batch_size']:,.0f} to {spot:,} a step takes "
        f"{show_times(chosen['step_ms'] / small['step_ms'], 2)} as long but holds "
        f"{show_times(spot / small['batch_size'], 0)} the images, so the epoch is "
        f"{show_times(small['epoch_s'] / chosen['epoch_s'], 2)} as fast "
        f"({show_seconds(small['epoch_s'])} → {show_seconds(chosen['epoch_s'])})."
    )


def overhead(run: RunDirectory, name: str = "sweep") -> str:
    """Say what measuring cost besides the measured epochs; the worker's start is not in it."""
    took = run.info.timings.get(name, {})
    wall_s, epochs_s = took.get("wall_s"), took.get("epochs_s")
    if not wall_s or not epochs_s:
        return "How long all of it took was not recorded."
    return (
        f"{took['trials']:,.0f} trials took {show_seconds(wall_s)} for {show_seconds(epochs_s)} of "
        f"measured epochs: {show_times(wall_s / epochs_s, 2)}. The rest is building models, "
        "warming up and reading the device; the worker's start comes on top."
    )


def updates(curve: Curve) -> str:
    """Say how many optimizer updates an epoch holds at both ends, and what loss they reached."""
    measured = curve.table.dropna(subset=["updates"])
    first, last = measured.iloc[0], measured.iloc[-1]
    text = (
        f"An epoch of {curve.images:,} images is {first['updates']:,.0f} optimizer updates at "
        f"batch {first['batch_size']:,.0f} and {last['updates']:,.0f} at batch "
        f"{last['batch_size']:,.0f}: the same images, not the same training."
    )
    if pd.notna(first["final_loss"]) and pd.notna(last["final_loss"]):
        text += (
            f" After that one epoch the training loss stood at {first['final_loss']:.3f} and "
            f"{last['final_loss']:.3f}. Speed is measured here, not accuracy."
        )
    return text


def with_losses(curves: list[Curve]) -> list[Curve]:
    """Keep the curves whose final loss was recorded (the article printed none)."""
    return [curve for curve in curves if curve.table["final_loss"].notna().any()]


def updates_table(curve: Curve) -> pd.DataFrame:
    """Return steps, last batch, updates and final loss of each batch size, as text."""
    columns = ["batch", "steps", "last batch", "updates/epoch", "final loss"]
    return readable(curve.table.dropna(subset=["updates"]))[columns]


def whose(run: RunDirectory, curve: Curve) -> str:
    """Say whose results these are, and whether a CPU stands behind them."""
    if is_committed(run):
        return (
            f"These are the results of **{curve.label}** that comes with the project. "
            "`make report` puts your machine in its place."
        )
    cpu = ", a CPU: nothing here speaks for a GPU" if curve.label.find(", CPU") >= 0 else ""
    return f"These are the results of **{curve.label}**{cpu}."


def environment_table(run: RunDirectory) -> pd.DataFrame:
    """Return the facts of the machine that a run was measured on, one a row."""
    facts = run.environment()
    packages = facts.get("packages", {})
    gpu = facts.get("gpu") or {}
    rows = {
        "device": f"{facts.get('device_name')} ({facts.get('device')})",
        "device memory": show_bytes(gpu.get("total_bytes")),
        "driver / CUDA": f"{facts.get('driver') or 'none'} / {facts.get('cuda') or 'none'}",
        "torch / torchvision": f"{packages.get('torch')} / {packages.get('torchvision')}",
        "system": f"{facts.get('system')}{' on WSL2' if facts.get('wsl2') else ''}",
        "CPU": f"{facts.get('cpu')}, {facts.get('cpu_count')} usable",
        "torch threads": str(facts.get("torch_threads")),
        "Python": str(facts.get("python")),
        "run": run.info.run_id,
        "measured at": run.info.created_at,
    }
    return pd.DataFrame({"what": list(rows), "value": list(rows.values())})


def gains_table(curve: Curve, share: float) -> pd.DataFrame:
    """Return what each doubling of the batch gains in images/s."""
    rows = [
        {"from": f"{gain.from_batch:,}", "to": f"{gain.to_batch:,}",
         "speed per doubling": show_times(gain.ratio, 2)}
        for gain in readings(curve, share).gains
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["from", "to", "speed per doubling"])


def side_by_side(curves: list[Curve], share: float) -> pd.DataFrame:
    """Return one row a machine: sweet spot, its speed and memory, the best, and the ends."""
    return pd.DataFrame([_machine(curve, share) for curve in curves])


def _machine(curve: Curve, share: float) -> dict[str, Any]:
    spot = readings(curve, share).sweet_spot
    return {
        "machine": curve.label,
        "images": f"{curve.images:,}",
        "sweet spot": f"{spot.batch_size:,}",
        "of best": show_share(spot.share_of_best),
        "images/s there": f"{spot.images_per_s:,.0f}",
        "peak there": _memory(_row(curve, spot.batch_size)),
        "best batch": f"{spot.best_batch_size:,}",
        "best images/s": f"{spot.best_images_per_s:,.0f}",
    }


def _row(curve: Curve, size: int) -> pd.Series[Any]:
    return curve.table[curve.table["batch_size"] == size].iloc[0]


def _memory(row: pd.Series[Any]) -> str:
    value = row["allocated_mib"]
    if value == 0:
        return "nothing that could be told apart"  # less than a page of a process's memory
    return show_bytes(None if pd.isna(value) else value * MIB)


def _known(column: pd.Series[Any]) -> dict[int, float]:
    return {int(str(size)): float(value) for size, value in column.dropna().items()}
