"""Decide which batch size a probe tries next, or why it ends: no device, no clock, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from labhelpers.forecast import fit_line, latest_regime
from labhelpers.formats import GIB, show_bytes, show_seconds
from labhelpers.oversubscription import judge_memory
from labhelpers.platforms import SPILLING_PLATFORMS, Platform
from labhelpers.records import ProbeSpec, Trial

Reason = Literal[
    "done", "oom", "oversubscribed", "memory_budget", "time_budget", "host_memory", "failed"
]

SPILL_BUDGET_SHARE = 1.25
"""Where the driver spills, the probe may go this far past the card, so that a cliff is seen."""
SPILL_AIM_SHARE = 1.12
"""How far past it a size aims that is added for this: what the article's first slow size had."""
FREE_SHARE = 0.9
"""Elsewhere it may take this share of what was free on the card: others keep the rest."""
HOST_SHARE = 0.25
"""On the CPU, this share of the memory that was free on the host."""
HOST_RESERVE_SHARE = 0.1
UNTIMED_STEPS = 3
"""Steps that a trial runs besides warm-up and timed ones: profiled, watched, and overhead."""
ROUND_TO = 256


@dataclass(frozen=True)
class Limits:
    """What a measurement may use; on the CPU, total and free are the host's memory."""

    device: str
    platform: Platform | None
    total_bytes: int
    free_bytes: int
    memory_budget_bytes: int
    time_budget_s: float
    host_reserve_bytes: int

    @property
    def can_spill(self) -> bool:
        """Tell whether the driver may move part of the memory out of the card, unasked."""
        return self.device != "cpu" and self.platform in SPILLING_PLATFORMS

    def cap_bytes(self, *, predicted: bool) -> int | None:
        """Return the cap that a trial runs under; None for none.

        The budget is enforced, not only predicted. A cap cannot lie past the card, so there it
        is left away; but a size that nothing was predicted for never gets past the card. A cap
        on the CPU is one of Linux (also under WSL2).
        """
        if self.device == "cpu" and self.platform not in ("linux", "wsl2"):
            return None
        inside = self.memory_budget_bytes < self.total_bytes
        if inside or not predicted:
            return min(self.memory_budget_bytes, self.total_bytes)
        return None


@dataclass(frozen=True)
class Moment:
    """What was used and what is left when the next size is chosen."""

    elapsed_s: float
    host_free_bytes: int


@dataclass(frozen=True)
class Stop:
    """Why a probe ended; `batch_size` is the size that ended it, or that was not tried."""

    reason: Reason
    words: str
    batch_size: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        return asdict(self)


def default_limits(
    spec: ProbeSpec, device: str, platform: Platform | None, *, total_bytes: int, free_bytes: int,
    host_total_bytes: int,
) -> Limits:  # fmt: skip
    """Fill in the budgets that were left open, with what suits device and platform."""
    if device == "cpu":
        budget_bytes = int(HOST_SHARE * free_bytes)
    elif platform in SPILLING_PLATFORMS:
        budget_bytes = int(SPILL_BUDGET_SHARE * total_bytes)
    else:
        budget_bytes = int(FREE_SHARE * free_bytes)
    return Limits(
        device=device,
        platform=platform,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        memory_budget_bytes=spec.memory_budget_bytes or budget_bytes,
        time_budget_s=spec.time_budget_s,
        host_reserve_bytes=max(GIB, int(HOST_RESERVE_SHARE * host_total_bytes)),
    )


def next_size(spec: ProbeSpec, seen: Sequence[Trial], limits: Limits, now: Moment) -> int | Stop:
    """Return the next batch size to try, or why there is none.

    Args:
        spec: what was asked, its `probe_sizes` filled in.
        seen: the trials so far, in the order they ran.
        limits: what the probe may use.
        now: what it has used, and what the host has left.
    """
    ended = _ended(seen, limits)
    if ended is not None:
        return ended
    measured = {trial.batch_size for trial in seen}
    waiting = sorted(set(spec.probe_sizes or ()) - measured)
    if not waiting:
        return Stop("done", "every size that was asked for has run")
    refused = _refused(waiting[0], spec, seen, limits, now)
    if refused is None:
        return waiting[0]
    added = size_past_card(spec, seen, limits) if refused.reason == "memory_budget" else None
    if added is None or added >= waiting[0] or _refused(added, spec, seen, limits, now):
        return refused
    return added


def predicted_peak_bytes(seen: Sequence[Trial], batch_size: int) -> float | None:
    """Return the peak that the sizes before predict; None before the first has run.

    A line through the peaks since the last fall (other kernels run since then); through one
    peak alone, the line from zero.
    """
    regime = latest_regime(_peaks(seen))
    if not regime:
        return None
    line = fit_line(regime)
    size, peak_bytes = regime[-1]
    if line is None or line.slope <= 0:
        return peak_bytes * max(1.0, batch_size / size)
    return line.intercept + line.slope * batch_size


def size_past_card(spec: ProbeSpec, seen: Sequence[Trial], limits: Limits) -> int | None:
    """Return a size just past the card where the asked sizes would jump far past it.

    None where the driver does not spill, a size went past the card already, or one was added.
    """
    peaks = _peaks(seen)
    asked = set(spec.probe_sizes or ())
    if not limits.can_spill or any(t.batch_size not in asked for t in seen):
        return None
    line = fit_line(latest_regime(peaks))
    if line is None or line.slope <= 0 or any(peak > limits.total_bytes for _, peak in peaks):
        return None
    size = (SPILL_AIM_SHARE * limits.total_bytes - line.intercept) / line.slope
    rounded = math.floor(size / ROUND_TO) * ROUND_TO
    return rounded if rounded > max(size for size, _ in peaks) else None


def _ended(seen: Sequence[Trial], limits: Limits) -> Stop | None:
    """Say whether a trial so far ends the probe."""
    failed = next((trial for trial in seen if trial.outcome != "ok"), None)
    if failed is not None:
        return ended_by(failed)
    if limits.device == "cpu" or limits.platform is None:
        return None
    judged = judge_memory(seen, limits.total_bytes, limits.platform)
    certain = [j.batch_size for j in judged if j.verdict == "certain"]
    if not certain:
        return None
    words = f"batch {certain[0]:,} certainly ran past the card; larger ones would only be slower"
    return Stop("oversubscribed", words, certain[0])


def ended_by(failed: Trial) -> Stop:
    """Say why a probe ends with a trial that did not end well."""
    size, cap_bytes = failed.batch_size, failed.cap_bytes
    if failed.outcome != "oom":
        first_line = (failed.error_text or "no reason was given").splitlines()[0]
        return Stop("failed", f"batch {size:,} ended in {failed.outcome}: {first_line}", size)
    card_full = "card_full" in (failed.oom or {}).get("causes", ())
    if cap_bytes is None or card_full:
        return Stop("oom", f"batch {size:,} ended in an out-of-memory error", size)
    words = f"batch {size:,} did not fit into the probe's own budget of {show_bytes(cap_bytes)}"
    return Stop("memory_budget", words, size)


def _refused(
    size: int, spec: ProbeSpec, seen: Sequence[Trial], limits: Limits, now: Moment
) -> Stop | None:
    """Say why a size must not be tried; None if it may."""
    peak_bytes = predicted_peak_bytes(seen, size) or 0.0
    if peak_bytes > limits.memory_budget_bytes:
        words = (
            f"batch {size:,} is predicted to take {show_bytes(peak_bytes)}, more than the "
            f"probe's budget of {show_bytes(limits.memory_budget_bytes)}"
        )
        return Stop("memory_budget", words, size)
    on_host = peak_bytes if limits.device == "cpu" else max(0.0, peak_bytes - limits.total_bytes)
    if now.host_free_bytes - on_host < limits.host_reserve_bytes:
        words = (
            f"the host has {show_bytes(now.host_free_bytes)} free, and batch {size:,} must leave "
            f"{show_bytes(limits.host_reserve_bytes)} of it"
        )
        return Stop("host_memory", words, size)
    needed_s = now.elapsed_s + _predicted_s(spec, seen, size)
    if needed_s > limits.time_budget_s:
        words = (
            f"with batch {size:,} the probe would take about {show_seconds(needed_s)}, more than "
            f"its budget of {show_seconds(limits.time_budget_s)}"
        )
        return Stop("time_budget", words, size)
    return None


def _predicted_s(spec: ProbeSpec, seen: Sequence[Trial], size: int) -> float:
    """Predict how long a size takes if its images are as fast as those of the largest so far."""
    timed = [trial for trial in seen if trial.mean_step_s is not None]
    if not timed:
        return 0.0
    largest = max(timed, key=lambda trial: trial.batch_size)
    steps = spec.steps + spec.warmup_steps + UNTIMED_STEPS
    return (largest.mean_step_s or 0.0) * size / largest.batch_size * steps


def _peaks(seen: Sequence[Trial]) -> list[tuple[int, int]]:
    """Return sizes with what they took: reserved, or allocated where that is all there is."""
    peaks = {}
    for trial in seen:
        peak_bytes = trial.peak_reserved_bytes or trial.peak_allocated_bytes
        if trial.outcome == "ok" and peak_bytes:
            peaks[trial.batch_size] = peak_bytes
    return sorted(peaks.items())
