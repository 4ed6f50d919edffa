"""Say and keep what a search on all ranks found: table, sentence, one trial a size and rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from labhelpers.distributed_finder import SharedSize
from labhelpers.distributed_records import PROVEN, ROOMY, SEARCHED
from labhelpers.distributed_search import RankAnswer, ranks_of
from labhelpers.distributed_tables import counted, seat
from labhelpers.formats import show_bytes, show_rate, show_share
from labhelpers.records import FinderSpec, Outcome, Trial
from labhelpers.search import ProbeOutcome, ProbeResult

_AS_TRIAL: dict[ProbeOutcome, Outcome] = {
    "ok": "ok", "oom": "oom", "oversubscribed": "oom", "killed": "killed", "timeout": "timeout",
    "library_limit": "error", "error": "error",
}  # fmt: skip


def probe_table(found: SharedSize) -> pd.DataFrame:
    """Return one row a size tried, in order: how it ended on each rank, and the peaks, as text."""
    rows = [
        {"to find": what, "batch per rank": f"{probe.batch_size:,}", "all ranks": probe.outcome}
        | {f"rank {rank}": _cell(answer) for rank, answer in enumerate(ranks_of(probe))}
        for what, probe in _probes(found)
    ]
    return pd.DataFrame(rows)


def _probes(found: SharedSize) -> list[tuple[str, ProbeResult]]:
    """Return all probes in order, each with what it was to find."""
    roomy = () if found.roomy is None else found.roomy.probes
    largest = [("the largest", probe) for probe in found.search.probes]
    return largest + [(f"{show_share(found.headroom, 0)} free", probe) for probe in roomy]


def _cell(answer: RankAnswer) -> str:
    if answer.peak_bytes is None:
        return answer.outcome
    return f"{answer.outcome}, {show_bytes(answer.peak_bytes)}"


def found_answer(found: SharedSize, device: str) -> str:
    """Say the size all ranks agreed on, what limits it, and how fast it is."""
    what, size = seat(device), found.batch_size
    whole = size * found.world_size
    lines = [
        f"All {counted(found.world_size, device)} agree: **{size:,} per {what}**, a global batch "
        f"of {whole:,}."
    ]
    if found.limiting_ranks:
        named = ", ".join(str(rank) for rank in found.limiting_ranks)
        lines.append(f"Up to {found.largest:,} ran on all; more does not fit on rank {named}.")
    if found.largest != size:
        lines.append(
            f"{size:,} leaves {show_share(found.headroom, 0)} of every rank's memory free."
        )
    lines.append(f"Trained together at this size: {show_rate(whole / found.update_s)}.")
    return " ".join(lines)


def finder_trials(
    found: SharedSize, spec: FinderSpec, device: str, environment_id: str
) -> list[Trial]:
    """Return one trial for each size tried and rank, in order, and one a rank for the answer."""
    about: dict[str, Any] = {
        "kind": "finder", "workload": spec.workload, "precision": spec.precision,
        "device": device.partition(":")[0], "world_size": found.world_size, "synthetic": True,
        "environment_id": environment_id,
    }  # fmt: skip
    searched = len(found.search.probes)
    tried = [
        _tried(probe.batch_size, position, rank, answer, about, roomy=position >= searched)
        for position, (_, probe) in enumerate(_probes(found))
        for rank, answer in enumerate(ranks_of(probe))
    ]
    size, steps = found.batch_size, found.proven_steps
    answered = [
        Trial(
            **about, variant=PROVEN, batch_size=size, rank=rank, position=len(tried),
            images=size * steps, steps=steps, updates=steps, last_batch=size,
            epoch_s=found.update_s * steps,
            details={"purpose": PROVEN, "headroom": found.headroom, **_sizes(size, about)},
        )
        for rank in range(found.world_size)
    ]  # fmt: skip
    return tried + answered


def _tried(
    size: int, position: int, rank: int, answer: RankAnswer, about: Mapping[str, Any], *,
    roomy: bool,
) -> Trial:  # fmt: skip
    on_cpu, purpose = about["device"] == "cpu", ROOMY if roomy else SEARCHED
    return Trial(
        **about, variant=purpose, batch_size=size, rank=rank, position=position,
        outcome=_AS_TRIAL[answer.outcome], peak_allocated_bytes=answer.live_bytes,
        peak_reserved_bytes=None if on_cpu else answer.peak_bytes, error_text=answer.text,
        details={
            "purpose": purpose, "search_outcome": answer.outcome,
            "limit_bytes": answer.limit_bytes, **_sizes(size, about),
        },
    )  # fmt: skip


def _sizes(size: int, about: Mapping[str, Any]) -> dict[str, int]:
    return {"per_gpu_batch_size": size, "global_batch_size": size * about["world_size"]}
