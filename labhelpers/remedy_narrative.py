"""Tables and sentences about remedies and accumulation; every number comes from a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from labhelpers.formats import NOT_AVAILABLE, show_bytes, show_share, show_times
from labhelpers.oom_narrative import without_unmeasured
from labhelpers.records import Trial
from labhelpers.remedies import Remedied
from labhelpers.remedy_plan import PLAIN, REMEDIES, remedy_named
from labhelpers.tables import BUSY_SHARE

if TYPE_CHECKING:
    from labhelpers.accumulation_proof import Comparison

_LEAST_SAVING = 0.02


def remedy_table(found: Remedied) -> pd.DataFrame:
    """Return one row a training remedy: memory, speed, and what it changes in one update.

    Changes are relative norms against the plain FP32 step with the same weights and batch.
    """
    plain = trial_of(found, PLAIN)
    measured = {t.variant: _row(t, plain) for t in found.trials}
    names = [r.name for r in REMEDIES if r.training and r.name in (*measured, *found.not_run)]
    rows = [measured.get(name, {"remedy": name}) for name in names]
    return without_unmeasured(pd.DataFrame(rows).fillna(NOT_AVAILABLE))


def notes(found: Remedied) -> str:
    """Say what each remedy does, why one was not run, failed, or was disturbed."""
    lines = []
    for remedy in REMEDIES:
        trial = next((t for t in found.trials if t.variant == remedy.name), None)
        reason = found.not_run.get(remedy.name)
        if not remedy.training or (trial is None and reason is None):
            continue
        ending = f" **Not run: {reason}.**" if reason else ""
        if trial is not None and trial.outcome != "ok":
            ending = f" **{_failure(trial)}.**"
        lines.append(f"- *{remedy.name}*: {remedy.what}.{ending}")
    return "\n".join([*lines, *_disturbed(found)])


def evaluation_table(found: Remedied) -> pd.DataFrame:
    """Return what a kept loss costs where nothing runs backward: forward passes only."""
    rows = [
        {
            "forward passes": remedy_named(trial.variant or "").name.removeprefix("evaluation: "),
            "losses kept": f"{(trial.details or {}).get('losses_kept', 0):,}",
            "images in each": f"{trial.batch_size:,}",
            "peak allocated": show_bytes(trial.peak_allocated_bytes),
            "": "" if trial.outcome == "ok" else "out of memory",
        }
        for trial in found.trials
        if not remedy_named(trial.variant or "").training
    ]
    return pd.DataFrame(rows)


def remedy_answer(found: Remedied) -> str:
    """Say which remedies save memory on the same input, how much, and at which speed."""
    plain = trial_of(found, PLAIN)
    if plain is None or plain.peak_allocated_bytes is None:
        return "The plain FP32 step did not fit, so there is nothing to compare with."
    savers = sorted(_savers(found, plain), key=lambda pair: pair[1])
    if not savers:
        return (
            "No remedy saved memory here: weights, gradients and Adam's moments, which no "
            "remedy of these makes smaller, outweigh the activations at this size."
        )
    told = [
        f"**{trial.variant}** takes {show_share(share, 0)} of the memory at "
        f"{show_times(_ratio(trial.images_per_s, plain.images_per_s), 2)} the speed"
        for trial, share in savers
    ]
    return f"Against the plain FP32 step, on the same images: {'; '.join(told)}."


def rounding_answer(found: Remedied) -> str:
    """Give the yardstick for the gradient column: what another order of additions moves."""
    same_sums = trial_of(found, "channels_last")
    change = _detail(same_sums, "gradient_change")
    if change is None:
        return ""
    text = (
        "`channels_last` computes the same sums in another order, so the "
        f"{_percent(change)} it moves the gradient is rounding alone: the yardstick for this model "
        "and batch."
    )
    if change > 1e-3:
        text += (
            " It is large because fresh weights behind many BatchNorm layers magnify rounding; "
            "read the other rows against it."
        )
    return text


def accumulation_answer(found: Remedied, proof: Sequence[Comparison]) -> str:
    """Say that accumulation is exact without BatchNorm and how far BatchNorm takes it off."""
    exact = next(c for c in proof if c.equal)
    batch_norm = next(c for c in proof if c.what == "BatchNorm")
    text = (
        f"Without a layer that mixes samples the accumulated gradient is the whole batch's to "
        f"{exact.gradient_change or 0:.0e} of its length, in float64. With one BatchNorm layer it "
        f"is {_percent(batch_norm.gradient_change)} away: each micro-batch is normalised by its "
        "own mean and variance."
    )
    trial = trial_of(found, "accumulation")
    change = _detail(trial, "gradient_change")
    if change is None or trial is None:
        return text
    size = (trial.details or {}).get("micro_batch_size")
    return (
        f"{text} The accumulated step measured above, {found.spec.workload.rpartition(':')[2]} in "
        f"micro-batches of {size}, is {_percent(change)} away from its whole batch."
    )


def proof_table(proof: Sequence[Comparison]) -> pd.DataFrame:
    """Return one row a kind of layer: how far the accumulated gradient is off, and the verdict."""
    rows = [
        {
            "layer": c.what,
            "micro-batches": " + ".join(str(size) for size in c.micro_sizes),
            "each mean loss": c.recipe,
            "gradient moves by": _percent(c.gradient_change),
            "": "equal to rounding" if c.equal else "not the same",
        }
        for c in proof
    ]
    return pd.DataFrame(rows)


def trial_of(found: Remedied, name: str) -> Trial | None:
    """Return the measured trial of a remedy; None where there is none that ended well."""
    return next((t for t in found.trials if t.variant == name and t.outcome == "ok"), None)


def _row(trial: Trial, plain: Trial | None) -> dict[str, Any]:
    peak, rate = trial.peak_allocated_bytes, trial.images_per_s
    base = plain or trial
    return {
        "remedy": trial.variant,
        "peak": show_bytes(peak),
        "of plain": show_share(_ratio(peak, base.peak_allocated_bytes), 0),
        "reserved": show_bytes(trial.peak_reserved_bytes),
        "images/s": NOT_AVAILABLE if rate is None else f"{rate:,.1f}",
        "speed": show_times(_ratio(rate, base.images_per_s), 2),
        "loss moves": _percent(_detail(trial, "loss_change")),
        "gradient moves": _percent(_detail(trial, "gradient_change")),
        "statistics move": _percent(_detail(trial, "statistics_change")),
    }


def _disturbed(found: Remedied) -> list[str]:
    """Warn where other programs used the CPU while the steps were timed."""
    shares = [_detail(trial, "cpu_of_others") or 0 for trial in found.trials]
    if found.spec.device != "cpu" or max(shares, default=0) <= BUSY_SHARE:
        return []
    return [
        f"- **Other programs used up to {show_share(max(shares), 0)} of the CPU meanwhile: do not "
        "rely on the speeds.**"
    ]


def _failure(trial: Trial) -> str:
    if trial.outcome == "oom":
        return "Out of memory"
    return f"{trial.outcome}: {(trial.error_text or '').splitlines()[0][:80]}"


def _savers(found: Remedied, plain: Trial) -> list[tuple[Trial, float]]:
    """Return the remedies on the same input that need clearly less memory, with their shares."""
    savers = []
    for trial in found.trials:
        remedy = remedy_named(trial.variant or "")
        share = _ratio(trial.peak_allocated_bytes, plain.peak_allocated_bytes)
        usable = remedy.training and remedy.same_input and trial.outcome == "ok"
        if usable and share is not None and share < 1 - _LEAST_SAVING:
            savers.append((trial, share))
    return savers


def _detail(trial: Trial | None, name: str) -> float | None:
    return None if trial is None else (trial.details or {}).get(name)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _percent(change: float | None) -> str:
    """Write a relative change: 0.0463 is `4.6 %`, and small ones as powers of ten."""
    if change is None:
        return NOT_AVAILABLE
    if change == 0:
        return "0"
    return f"{change:.0e}" if change < 1e-3 else f"{change * 100:,.3g} %"
