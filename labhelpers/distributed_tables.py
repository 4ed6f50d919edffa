"""Tables of a job on several GPUs: per-GPU, global and effective batch, speed and efficiency."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from labhelpers.distributed_records import (
    SPEC_NAME,
    Group,
    accumulation_of,
    alike,
    groups_of,
    is_alone,
    stored_request,
)
from labhelpers.formats import NOT_AVAILABLE, mib, ms, show_bytes, show_seconds
from labhelpers.records import Trial
from labhelpers.store import RunDirectory
from labhelpers.tables import flags
from labhelpers.verdicts import median, spread

SCALING_COLUMNS = (
    "world_size", "accumulation", "per_gpu_batch", "global_batch", "effective_batch",
    "images_per_s", "spread", "alone_images_per_s", "perfect_images_per_s", "efficiency",
    "all_reduce_share", "update_ms", "allocated_mib", "fullest_rank", "slowest_rank", "steps",
    "last_global_batch", "updates", "repeats", "device", "flags",
)  # fmt: skip

Key = tuple[int, int, int]


def scaling_table(trials: Iterable[Trial]) -> pd.DataFrame:
    """Return one row per number of GPUs, accumulation and per-GPU batch: medians of the repeats.

    `images_per_s` are those of all GPUs, by the slowest rank; `efficiency` is that over GPUs ×
    what one GPU does alone at the same per-GPU batch, without DistributedDataParallel.
    """
    groups = groups_of(trials)
    alone = _gathered(group for group in groups if is_alone(group.first))
    together = _gathered(group for group in groups if not is_alone(group.first))
    rows = [_row(together[key], alone.get((1, *key[1:]), [])) for key in sorted(together)]
    return pd.DataFrame(rows, columns=list(SCALING_COLUMNS))


def scaling_of(run: RunDirectory) -> pd.DataFrame:
    """Return the table of the job that a run was last asked for; empty if there was none.

    A run may hold several: all numbers of GPUs, and all accumulations, are in it.
    """
    spec = stored_request(run)
    return scaling_table([] if spec is None else alike(spec, run.trials(SPEC_NAME)))


def _gathered(groups: Iterable[Group]) -> dict[Key, list[Group]]:
    found: dict[Key, list[Group]] = {}
    for group in groups:
        first = group.first
        key = (first.world_size, accumulation_of(first), first.batch_size)
        found.setdefault(key, []).append(group)
    return found


def _row(groups: Sequence[Group], alone: Sequence[Group]) -> dict[str, Any]:
    measured = next((group for group in groups if group.outcome == "ok"), groups[0])
    first, size = measured.first, measured.first.batch_size * measured.first.world_size
    rate = median(group.images_per_s for group in groups)
    single = median(group.images_per_s for group in alone)
    perfect = None if single is None else single * first.world_size
    fullest = _fullest(measured)
    return {
        "world_size": first.world_size,
        "accumulation": accumulation_of(first),
        "per_gpu_batch": first.batch_size,
        "global_batch": size,
        "effective_batch": size * accumulation_of(first),
        "images_per_s": rate,
        "spread": spread(group.images_per_s for group in groups),
        "alone_images_per_s": single,
        "perfect_images_per_s": perfect,
        "efficiency": rate / perfect if rate and perfect else None,
        "all_reduce_share": median(group.all_reduce_share for group in groups),
        "update_ms": ms(median(_update_s(group) for group in groups)),
        "allocated_mib": mib(fullest.peak_allocated_bytes) if fullest else None,
        "fullest_rank": fullest.rank if fullest else None,
        "slowest_rank": measured.slowest_rank,
        "steps": first.steps,
        "last_global_batch": sum(trial.last_batch or 0 for trial in measured.trials) or None,
        "updates": first.updates,
        "repeats": sum(group.outcome == "ok" for group in groups),
        "device": first.device.partition(":")[0],
        "flags": ", ".join(flags(trial for group in groups for trial in group.trials)),
    }


def _update_s(group: Group) -> float | None:
    seconds, updates = group.epoch_s, group.first.updates
    return seconds / updates if seconds is not None and updates else None


def _fullest(group: Group) -> Trial | None:
    known = [trial for trial in group.trials if trial.peak_allocated_bytes is not None]
    return max(known, key=lambda trial: trial.peak_allocated_bytes or 0, default=None)


def seat(device: str) -> str:
    """Name what each rank has for itself: a GPU, or on the CPU only its process."""
    return "process" if device.startswith("cpu") else "GPU"


def counted(ranks: int, device: str) -> str:
    """Count what the ranks have for themselves: '2 GPUs', '1 process'."""
    what = seat(device)
    plural = "processes" if what == "process" else "GPUs"
    return f"{ranks} {what if ranks == 1 else plural}"


JOB_SPEED = ("world_size", "per_gpu_batch", "global_batch", "accumulation", "images_per_s",
             "alone_images_per_s", "efficiency", "all_reduce_share")  # fmt: skip
JOB_COST = ("world_size", "per_gpu_batch", "global_batch", "effective_batch", "update_ms",
            "spread", "allocated_mib", "updates", "last_global_batch")  # fmt: skip


def readable_scaling(
    table: pd.DataFrame, columns: Iterable[str] = (*JOB_SPEED, *JOB_COST[3:])
) -> pd.DataFrame:
    """Return the table as text for people: units in the heads, `n/a` where not measured.

    `columns` may be `JOB_SPEED` or `JOB_COST`, so that a table fits a page.
    """
    heads = _heads(seat(table["device"].iloc[0]) if len(table) else "GPU")
    plain = bool((table["accumulation"] == 1).all())
    text = {
        heads[name][0]: [
            NOT_AVAILABLE if pd.isna(value) else heads[name][1].format(value)
            for value in table[name]
        ]
        for name in columns
        if not (plain and name in ("accumulation", "effective_batch"))
    }
    if table["flags"].any():
        text["flags"] = list(table["flags"])
    return pd.DataFrame(text)


def _heads(what: str) -> dict[str, tuple[str, str]]:
    """Return head and form of each column, for a job whose ranks have a GPU or a process each."""
    return {
        "world_size": (counted(2, "cpu" if what == "process" else "cuda")[2:], "{:,.0f}"),
        "per_gpu_batch": (f"batch per {what}", "{:,.0f}"),
        "global_batch": ("global batch", "{:,.0f}"),
        "accumulation": ("accumulation", "{:,.0f}"),
        "effective_batch": ("effective batch", "{:,.0f}"),
        "images_per_s": ("images/s (all)", "{:,.0f}"), "spread": ("spread", "{:.1%}"),
        "alone_images_per_s": (f"images/s (one {what} alone)", "{:,.0f}"),
        "efficiency": ("efficiency", "{:.1%}"),
        "all_reduce_share": ("in all-reduce", "{:.1%}"), "update_ms": ("update ms", "{:.2f}"),
        "allocated_mib": ("highest peak MiB", "{:,.1f}"), "updates": ("updates/epoch", "{:,.0f}"),
        "last_global_batch": ("last global batch", "{:,.0f}"),
    }  # fmt: skip


def rank_table(trials: Iterable[Trial]) -> pd.DataFrame:
    """Return one row per measurement and rank: its images, seconds and peaks, as text."""
    rows = [
        {
            "batch": f"{t.batch_size:,} × {t.world_size} = {t.batch_size * t.world_size:,}",
            "repeat": t.repeat + 1,
            "rank": t.rank,
            "images": NOT_AVAILABLE if t.images is None else f"{t.images:,}",
            "epoch": show_seconds(t.epoch_s),
            "peak allocated": show_bytes(t.peak_allocated_bytes),
            "peak reserved": show_bytes(t.peak_reserved_bytes),
            "outcome": t.outcome,
        }
        for group in groups_of(trials)
        if not is_alone(group.first)
        for t in group.trials
    ]
    return pd.DataFrame(rows)
