"""Sentences about a job on several GPUs, whose numbers come from its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from labhelpers.distributed_records import PROVEN, SEARCHED
from labhelpers.distributed_tables import counted, readable_scaling, scaling_of, seat
from labhelpers.formats import show_rate, show_share
from labhelpers.inputs import InputError
from labhelpers.recommendation import split
from labhelpers.references import is_committed, reference_runs
from labhelpers.store import RunDirectory

NEARLY_ALL = 0.95
"""From this efficiency on, another GPU is worth nearly what it could be."""


def run_to_show(run: RunDirectory | None) -> RunDirectory | None:
    """Return the run if it holds a job on several GPUs, else the committed one that does."""
    candidates = [*([run] if run is not None else []), *reference_runs().values()]
    return next((held for held in candidates if len(scaling_of(held))), None)


def whose_job(run: RunDirectory) -> str:
    """Say whose figures these are: how many of which device, how they are joined."""
    facts = run.environment()
    job = facts.get("job") or {}
    names = " and ".join(sorted(set(job.get("device_names") or [str(facts.get("device_name"))])))
    ranks, hosts = int(job.get("world_size", 1)), job.get("hosts") or 1
    where = f"on {hosts} hosts" if hosts > 1 else "on one host"
    source = " from the run that comes with the project" if is_committed(run) else ""
    backend = str(job.get("backend", "nccl")).upper()
    devices, note = f"{ranks} × {names}", ""
    if facts.get("device") == "cpu":
        devices = f"{counted(ranks, 'cpu')} on {names}"
        note = " The processes share a CPU, so nothing here speaks for GPUs."
    return f"These are figures of **{devices}** {where}, gradients sent by {backend}{source}.{note}"


def scaling_text(table: pd.DataFrame) -> str:
    """Return table and sentences as plain text for a terminal."""
    if table["images_per_s"].isna().all():
        return "no batch size could be measured on all ranks"
    said = (scaling_answer(table), all_reduce(table), effective_batch(table))
    lines = [readable_scaling(table).to_string(index=False), "", *said]
    return "\n".join(lines).replace("**", "")


def scaling_answer(table: pd.DataFrame) -> str:
    """Say from which per-GPU batch on the job scales, and what the ends give."""
    rows = _measured(table, "efficiency")
    if rows.empty:
        return "Scaling was not measured: the baseline on one device is missing."
    first, last = rows.iloc[0], rows.iloc[-1]
    good = rows[rows["efficiency"] >= NEARLY_ALL]
    what = seat(first["device"])
    ends = f"{_at(first)}: {_gain(first)}" + (
        "" if len(rows) == 1 else f". {_at(last)}: {_gain(last)}"
    )
    if good.empty:
        best = rows.sort_values("efficiency").iloc[-1]
        return (
            f"{ends}. No size reaches {show_share(NEARLY_ALL, 0)} of perfect scaling; the best is "
            f"{_at(best, start=False)} with {show_share(best['efficiency'])}."
        )
    return (
        f"{ends}. From batch **{good.iloc[0]['per_gpu_batch']:,.0f} per {what}** on, "
        f"{show_share(NEARLY_ALL, 0)} of perfect scaling is reached."
    )


def all_reduce(table: pd.DataFrame) -> str:
    """Say how much of a step the all-reduce takes at both ends, and what is left to blame."""
    rows = _measured(table, "all_reduce_share")
    if rows.empty:
        return "How long the all-reduce takes was not measured."
    first, last = rows.iloc[0], rows.iloc[-1]
    text = (
        f"Waiting for the gradients takes {show_share(first['all_reduce_share'])} of a step at "
        f"{_at(first, start=False)}"
    )
    if len(rows) > 1:
        text += f" and {show_share(last['all_reduce_share'])} at {_at(last, start=False)}"
    lost = None if pd.isna(first["efficiency"]) else 1 - first["efficiency"]
    if lost is not None and lost > first["all_reduce_share"] + 0.02:
        text += (
            f". The rest of the {show_share(lost)} lost at the small end is the wrapper's own "
            "work on the host and what the processes take from each other"
        )
    return text + "."


def effective_batch(table: pd.DataFrame) -> str:
    """Spell out the effective batch of the smallest and the largest row."""
    rows = table.dropna(subset=["images_per_s"])
    spelled = [_product(row) for _, row in rows.iloc[[0, -1]].drop_duplicates().iterrows()]
    return (
        f"One update is made of micro-batch × accumulation × {_plural(rows.iloc[0]['device'])}: "
        f"{'; '.join(spelled)}. The learning rate was tuned for some such number: when it changes, "
        "so does the training."
    )


def effective_batch_table(table: pd.DataFrame, effective_batch: int) -> pd.DataFrame:
    """Return for each measured per-GPU batch how it makes up an effective batch, as text.

    Sizes whose global batch is larger than the effective batch are left out.

    Raises:
        InputError: an effective batch below 1.
    """
    if effective_batch < 1:
        raise InputError(f"effective_batch: got {effective_batch!r}; must be at least 1")
    rows = [
        _made_up(row, effective_batch)
        for _, row in _measured(table, "images_per_s").iterrows()
        if row["global_batch"] <= effective_batch
    ]
    return pd.DataFrame(rows)


def _made_up(row: pd.Series[Any], effective_batch: int) -> dict[str, str]:
    pieces = split(effective_batch, int(row["global_batch"]))
    last = "full" if pieces[-1] == row["global_batch"] else f"{pieces[-1]:,} on all ranks together"
    return {
        "micro-batch": f"{row['per_gpu_batch']:,.0f}",
        "accumulation": f"{len(pieces)}",
        "ranks": f"{row['world_size']:,.0f}",
        "effective batch": f"{effective_batch:,}",
        "last step": last,
        "images/s as measured": f"{row['images_per_s']:,.0f}",
    }


def _product(row: pd.Series[Any]) -> str:
    return (
        f"{row['per_gpu_batch']:,.0f} × {row['accumulation']:,.0f} × {row['world_size']:,.0f} = "
        f"{row['effective_batch']:,.0f} images"
    )


def _plural(device: str) -> str:
    return counted(2, device).removeprefix("2 ")


def _at(row: pd.Series[Any], *, start: bool = True) -> str:
    name = f"batch {row['per_gpu_batch']:,.0f} per {seat(row['device'])}"
    many = counted(int(row["world_size"]), row["device"])
    return f"At {name} ({many}, global batch {row['global_batch']:,.0f})" if start else name


def _gain(row: pd.Series[Any]) -> str:
    return (
        f"{show_rate(row['images_per_s'])} against {show_rate(row['alone_images_per_s'])} on one, "
        f"**{show_share(row['efficiency'])}** of perfect scaling"
    )


def _measured(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Keep the rows of the largest job, with the least accumulation, where a column is known."""
    known: pd.DataFrame = table.dropna(subset=[column])
    for name, choose in (("world_size", max), ("accumulation", min)):
        if len(known):
            known = known[known[name] == choose(known[name])]
    return known


def found_together(run: RunDirectory) -> str | None:
    """Say what the run's newest search on all ranks found; None if it holds none."""
    answers = [trial for trial in run.trials("finder") if trial.variant == PROVEN]
    if not answers:
        return None
    answer = answers[-1]
    tried: dict[int, list[str]] = {}
    for trial in run.trials("finder"):
        if trial.variant == SEARCHED and trial.workload == answer.workload:
            tried.setdefault(trial.batch_size, []).append(trial.outcome)
    largest = max(size for size, outcomes in tried.items() if set(outcomes) == {"ok"})
    what, ranks = seat(answer.device), answer.world_size
    rate = (answer.images_per_s or 0) * ranks
    return (
        f"The search on all {counted(ranks, answer.device)} agreed: **{answer.workload}** trains "
        f"with up to {largest:,} samples per {what} on every one. With "
        f"{show_share((answer.details or {}).get('headroom'), 0)} of the memory kept free it is "
        f"**{answer.batch_size:,} per {what}**, a global batch of {answer.batch_size * ranks:,}, "
        f"trained together at {show_rate(rate)}."
    )


def narrations(run: RunDirectory) -> Sequence[str]:
    """Return the sentences of a report's section about several GPUs, in order."""
    table = scaling_of(run)
    found = found_together(run)
    said = (whose_job(run), scaling_answer(table), all_reduce(table), effective_batch(table))
    return said if found is None else (*said, found)
