"""Say and keep what a search on all ranks found: table, sentence, one trial a size and rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pandas as pd

from labhelpers.distributed_finder import SharedSize
from labhelpers.distributed_records import PROVEN, ROOMY, SEARCHED
from labhelpers.distributed_search import RankAnswer, ranks_of, said_of
from labhelpers.distributed_tables import counted, seat
from labhelpers.environment import environment_id
from labhelpers.finder_narrative import NOTHING_FAILED, OUTCOMES, many
from labhelpers.finder_report import split_effective
from labhelpers.formats import show_bytes, show_rate, show_share
from labhelpers.records import FinderSpec, Outcome, Trial
from labhelpers.search import ProbeOutcome, ProbeResult
from labhelpers.store import RunDirectory

_AS_TRIAL: dict[ProbeOutcome, Outcome] = {
    "ok": "ok", "oom": "oom", "oversubscribed": "oom", "killed": "killed", "timeout": "timeout",
    "library_limit": "error", "error": "error",
}  # fmt: skip


def probe_table(found: SharedSize) -> pd.DataFrame:
    """Return one row a size tried, in order: how it ended on each rank, and the peaks, as text."""
    rows = [
        {
            "searched": what, "batch per rank": f"{probe.batch_size:,}",
            "all ranks": OUTCOMES[probe.outcome],
        }
        | {f"rank {rank}": _cell(answer) for rank, answer in enumerate(ranks_of(probe))}
        for what, probe in _probes(found)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _probes(found: SharedSize) -> list[tuple[str, ProbeResult]]:
    """Return all probes in order, each with what it was to find."""
    roomy = () if found.roomy is None else found.roomy.probes
    largest = [("the largest size", probe) for probe in found.search.probes]
    return largest + [(f"{show_share(found.headroom, 0)} kept free", probe) for probe in roomy]


def _cell(answer: RankAnswer) -> str:
    if answer.peak_bytes is None:
        return OUTCOMES[answer.outcome]
    return f"{OUTCOMES[answer.outcome]}, {show_bytes(answer.peak_bytes)}"


def found_answer(found: SharedSize, device: str) -> str:
    """Say the size all ranks agreed on, what limits it, and how fast it is."""
    what, size = seat(device), found.batch_size
    whole = size * found.world_size
    lines = [
        f"All {counted(found.world_size, device)} agree: **{size:,} per {what}**, a global batch "
        f"of {whole:,}.",
        f"Up to {found.largest:,} ran on all: {_end(found)}.",
    ]
    if found.headroom:
        lines.append(f"{size:,} leaves {show_share(found.headroom, 0)} {_of_what(found)}.")
    lines.append(f"Trained together at this size: {show_rate(whole / found.update_s)}.")
    return " ".join(lines)


def _end(found: SharedSize) -> str:
    """Say why no larger size is the largest."""
    ended_by, failed = found.search.ended_by, found.smallest_failure
    if ended_by in NOTHING_FAILED:
        return NOTHING_FAILED[ended_by]
    if ended_by == "memory":
        return f"more does not fit on {_limits(found, found.limiting_ranks)}"
    if ended_by == "time":
        return "then the time was up, and more may fit"
    if ended_by == "probes" or failed is None:
        return "more may fit"
    return f"more fails ({said_of(failed)})"


def _of_what(found: SharedSize) -> str:
    """Say of how much memory the headroom is a share."""
    limits = set(found.limits_bytes)
    if len(limits) == 1:
        return f"of the {show_bytes(limits.pop())} free that every rank may use"
    return f"of every rank's memory free: {_limits(found, range(found.world_size))}"


def _limits(found: SharedSize, ranks: Iterable[int]) -> str:
    """Name ranks with the memory that each may use."""
    shown = [(rank, found.limits_bytes[rank]) for rank in ranks]
    return ", ".join(f"rank {rank} ({show_bytes(limit)})" for rank, limit in shown)


def found_dict(found: SharedSize, effective: int | None) -> dict[str, Any]:
    """Return everything that was found as JSON-able values."""
    names = ("batch_size", "largest", "world_size", "headroom", "limits_bytes", "update_s")
    return {name: getattr(found, name) for name in names} | {
        "global_batch_size": found.batch_size * found.world_size,
        "ended_by": found.search.ended_by, "limiting_ranks": found.limiting_ranks,
        "micro_batches": None if effective is None else _micro_batches(found, effective),
        "probes": [
            {
                "searched": what, "batch_size": probe.batch_size, "outcome": probe.outcome,
                "ranks": [asdict(answer) for answer in ranks_of(probe)],
            }
            for what, probe in _probes(found)
        ],
    }  # fmt: skip


def split_together(found: SharedSize, effective: int) -> str:
    """Say how all ranks together reach an effective batch with the size they agreed on."""
    pieces = _micro_batches(found, effective)
    steps = {size: pieces.count(size) for size in pieces}
    said = " and ".join(f"{count} of {size:,} on all ranks" for size, count in steps.items())
    return (
        f"For an effective batch of {effective:,} on {found.world_size} ranks: "
        f"{many(len(pieces), 'micro-batch', 'micro-batches')} ({said}), then one update."
    )


def _micro_batches(found: SharedSize, effective: int) -> list[int]:
    """Split an effective batch into global micro-batches, as equal as can be."""
    return list(split_effective(effective, found.batch_size * found.world_size))


def keep(
    run: RunDirectory, found: SharedSize, spec: FinderSpec, device: str, facts: Mapping[str, Any]
) -> None:
    """Write what was asked and found into a run; `facts` describe the job."""
    name = environment_id(facts)
    with run.writing():
        run.note_spec("finder", spec)
        run.note_environment(name, facts)
        run.append(*finder_trials(found, spec, device, name))


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
