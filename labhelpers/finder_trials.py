"""Trials of a search: what they were held to, how they ended, and what they took."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from labhelpers.formats import show_bytes
from labhelpers.inputs import InputError
from labhelpers.oversubscription import judge_memory
from labhelpers.platforms import SPILLING_PLATFORMS, Platform, platform_of
from labhelpers.records import FinderSpec, Trial
from labhelpers.search_result import ProbeOutcome, ProbeResult
from labhelpers.search_steps import Strategy

MOST = 2**20
"""The largest size tried where neither a data set nor a maximum bounds it."""
CPU_SHARE, CPU_LIMIT_BYTES = 0.5, 2 * 2**30
"""On the CPU, what trials may use unless asked: a share of what is free, and not more."""

Purpose = Literal["search", "headroom", "training"]
HEADROOM_MARK = ", headroom kept free"
"""What the variant of a trial ends with that proves the headroom."""


@dataclass(frozen=True)
class Terms:
    """What a search was held to; sizes in bytes. Each of its trials keeps a copy.

    `limit_bytes` is what trials may use, `cap_bytes` what is enforced (None: the device's own
    end), `total_bytes` what the device holds.
    """

    strategy: Strategy
    top: int
    maximum: Literal["maximum", "dataset"]
    headroom: float
    multiple_of: int
    powers_of_two: bool
    limit_bytes: int
    cap_bytes: int | None
    total_bytes: int
    emulated: bool
    device_name: str
    dataset_size: int | None
    batch_norm: bool

    @property
    def allowed_bytes(self) -> int:
        """Return what a trial may take so that the headroom stays free."""
        return int((1 - self.headroom) * self.limit_bytes)

    @property
    def card_bytes(self) -> int:
        """Return what the card holds: the emulated one, or the real one."""
        return self.limit_bytes if self.emulated else self.total_bytes


def terms_of(spec: FinderSpec, facts: Mapping[str, Any]) -> Terms:
    """Settle what a search is held to, from what was asked and the facts of the device."""
    on_cpu = facts["environment"]["device"] == "cpu"
    room_bytes = facts["room_bytes"]
    limit_bytes = min(spec.limit_bytes or room_bytes, room_bytes)
    if on_cpu and spec.limit_bytes is None:
        limit_bytes = min(int(CPU_SHARE * room_bytes), CPU_LIMIT_BYTES)
    # Where the driver spills, only a cap turns the end of the card into an error.
    capped = on_cpu or spec.limit_bytes is not None or this_platform() in SPILLING_PLATFORMS
    dataset_size = spec.dataset_size or facts["dataset_size"]
    top = min(MOST, dataset_size or MOST, spec.max_batch_size or MOST)
    return Terms(
        strategy=spec.strategy,
        top=top,
        maximum="dataset" if dataset_size == top else "maximum",
        headroom=spec.headroom,
        multiple_of=spec.multiple_of,
        powers_of_two=spec.powers_of_two,
        limit_bytes=limit_bytes,
        cap_bytes=limit_bytes if capped else None,
        total_bytes=facts["total_bytes"],
        emulated=on_cpu or spec.limit_bytes is not None,
        device_name=facts["environment"]["device_name"],
        dataset_size=dataset_size,
        batch_norm=facts["batch_norm"],
    )


def variant_of(spec: FinderSpec) -> str:
    """Name a search among those of one workload in a run: everything that changes its trials."""
    shape = "x".join(map(str, spec.input_shape or ())) or "its own input"
    limit = "all memory" if spec.limit_bytes is None else show_bytes(spec.limit_bytes)
    multiple = "powers of two" if spec.powers_of_two else f"multiples of {spec.multiple_of}"
    parts = [
        limit, spec.strategy, f"{max(3, spec.num_iterations)} steps", shape,
        spec.optimizer or "its own optimizer", multiple if multiple != "multiples of 1" else "",
        f"{spec.headroom:.0%} headroom", _bounds(spec),
    ]  # fmt: skip
    return ", ".join(part for part in parts if part)


def _bounds(spec: FinderSpec) -> str:
    bounds = {"data set": spec.dataset_size, "maximum": spec.max_batch_size}
    return ", ".join(f"{name} {size:,}" for name, size in bounds.items() if size is not None)


def trial_of(
    facts: Mapping[str, Any], about: Mapping[str, Any], terms: Terms, purpose: Purpose
) -> Trial:
    """Make the record of a trial from what its place answered; `about` names it in the run."""
    known = {name: value for name, value in facts.items() if name in Trial.model_fields}
    peaks = facts.get("peaks", {})
    details = {
        "search": asdict(terms), "purpose": purpose, "wall_s": facts.get("wall_s"),
        "start_s": facts.get("start_s"), "where": facts.get("where"),
        "verdict": "library_limit" if facts.get("library_limit") else None,
    }  # fmt: skip
    return Trial(
        **{**known, **about},
        kind="finder",
        first_step_peak_bytes=peaks.get("first_allocated"),
        peak_allocated_bytes=peaks.get("steady_allocated"),
        peak_reserved_bytes=_most(peaks.get("first_reserved"), peaks.get("steady_reserved")),
        details=details,
    )


def live_bytes(trial: Trial) -> int | None:
    """Return the most that tensors held in any step; None where not measured."""
    return _most(trial.first_step_peak_bytes, trial.peak_allocated_bytes)


def taken_bytes(trial: Trial) -> int | None:
    """Return the most that was taken from the device; on the CPU what the process grew by."""
    return trial.peak_reserved_bytes or live_bytes(trial)


def outcome_of(trial: Trial) -> ProbeOutcome:
    """Return how a trial ended, as the search sees it."""
    verdict: ProbeOutcome | None = (trial.details or {}).get("verdict")
    return verdict or trial.outcome


def probe_result(trial: Trial, payload: object = None) -> ProbeResult:
    """Return a trial as the search sees it."""
    live = live_bytes(trial) or None
    peak = trial.peak_reserved_bytes or live
    return ProbeResult(
        trial.batch_size, outcome_of(trial), peak_bytes=peak,
        live_bytes=None if trial.peak_reserved_bytes is None else live,
        needed_bytes=needed_bytes(trial), payload=payload,
    )  # fmt: skip


def needed_bytes(trial: Trial) -> int | None:
    """Return what a trial held and asked for when it ran out of a GPU's memory; None if unknown.

    What was reserved but unallocated counts: the allocator gives back what it can before it
    fails, so the rest was in pieces that it could not use.
    """
    said = trial.oom or {}
    names = ("allocated_bytes", "reserved_unallocated_bytes", "requested_bytes")
    parts = [said.get(name) for name in names]
    if trial.device == "cpu" or None in parts:
        return None
    return sum(int(part or 0) for part in parts)


def judged(trial: Trial, earlier: Iterable[Trial], terms: Terms) -> Trial:
    """Mark a trial that ran, but only because memory outside the device or budget was used."""
    if trial.outcome != "ok":
        return trial
    live, where = live_bytes(trial), this_platform()
    cap_bytes = trial.cap_bytes or terms.limit_bytes
    may_exceed = trial.device == "cpu" or where in SPILLING_PLATFORMS
    over = may_exceed and live is not None and live > cap_bytes
    if not over and trial.device != "cpu" and where is not None:
        over = _certain(trial, earlier, terms, where)
    return _marked(trial) if over else trial


def _certain(trial: Trial, earlier: Iterable[Trial], terms: Terms, where: Platform) -> bool:
    rows = [_row(other) for other in (*earlier, trial) if other.outcome == "ok"]
    return judge_memory(rows, terms.total_bytes, where)[-1].verdict == "certain"


def _row(trial: Trial) -> dict[str, Any]:
    return {
        "batch_size": trial.batch_size, "images_per_s": trial.images_per_s,
        "peak_allocated_bytes": live_bytes(trial),
        "peak_reserved_bytes": trial.peak_reserved_bytes, "alloc_retries": trial.alloc_retries,
        "outcome": trial.outcome,
    }  # fmt: skip


def _marked(trial: Trial) -> Trial:
    details = {**(trial.details or {}), "verdict": "oversubscribed"}
    return trial.model_copy(update={"details": details})


def of_purpose(trials: Iterable[Trial], *purposes: Purpose) -> list[Trial]:
    """Keep the trials made for one of the purposes, in order."""
    return [t for t in trials if (t.details or {}).get("purpose") in purposes]


def this_platform() -> Platform | None:
    """Name this platform; None on a system without CUDA."""
    with suppress(InputError):
        return platform_of(platform.release(), platform.system())
    return None


def _most(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return max(known, default=None)


def sizes_that_ran(trials: Sequence[Trial]) -> list[int]:
    """Return the sizes of the trials that ran and fit, ascending, each once."""
    return sorted({trial.batch_size for trial in trials if outcome_of(trial) == "ok"})
