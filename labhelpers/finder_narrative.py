"""Say what a search for a batch size found: tables and sentences out of its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from labhelpers.finder_report import BatchSizeReport, read_reports, split_effective
from labhelpers.finder_trials import live_bytes, of_purpose, outcome_of
from labhelpers.formats import (
    NOT_AVAILABLE,
    bytes_of_mib,
    mib,
    show_bytes,
    show_rate,
    show_seconds,
    show_share,
)
from labhelpers.records import FinderSpec, Trial
from labhelpers.store import RunDirectory

OUTCOMES = {
    "ok": "ran", "oom": "out of memory", "oversubscribed": "took more than there is",
    "killed": "process killed", "timeout": "time limit", "error": "failed",
    "library_limit": "library limit",
}  # fmt: skip
NOTHING_FAILED = {"dataset": "the data set holds no more", "maximum": "no more was asked for"}
"""Why no larger size was tried, where none failed."""

_SLOWER = (
    " (On a CPU the probes are slower than training: for its memory to be counted, every large "
    "tensor is mapped anew.)"
)


def probe_table(report: BatchSizeReport) -> pd.DataFrame:
    """Return one row a probe, in the order tried, as text with units in the heads."""
    return pd.DataFrame([_row(trial) for trial in report.trials])


def _row(trial: Trial) -> dict[str, str]:
    details = trial.details or {}
    proof = " (headroom kept free)" if details.get("purpose") == "headroom" else ""
    return {
        "batch": f"{trial.batch_size:,}",
        "outcome": OUTCOMES[outcome_of(trial)] + proof,
        "first step MiB": _mib(trial.first_step_peak_bytes),
        "steady MiB": _mib(trial.peak_allocated_bytes),
        "reserved MiB": _mib(trial.peak_reserved_bytes),
        "images/s": f"{trial.images_per_s:,.0f}" if trial.images_per_s else NOT_AVAILABLE,
        "seconds": f"{details['wall_s']:.2f}" if details.get("wall_s") else NOT_AVAILABLE,
    }


def many(count: int, one: str, several: str | None = None, *, mark: str = "") -> str:
    """Write a count, between marks such as `**`, with its noun: `1 probe`, `2 probes`."""
    noun = one if count == 1 else several or f"{one}s"
    return f"{mark}{count:,}{mark} {noun}"


def plan(spec: FinderSpec) -> str:
    """Say what a settled request is about to do."""
    shape = "×".join(map(str, spec.input_shape or ()))
    classes = many(spec.classes or 0, "class", "classes")
    cards = " and ".join(show_bytes(bytes_of_mib(card)) for card in spec.card_mib or ())
    return (
        f"**{spec.workload}** on **{spec.device}**, {spec.precision}, with "
        f"{spec.optimizer or 'Adam'}: images of {shape}, {classes}, a data set of "
        f"{spec.dataset_size:,}. Each probe trains {max(3, spec.num_iterations)} steps. Cards to "
        f"emulate: {cards}."
    )


def answer(report: BatchSizeReport) -> str:
    """Say the recommended batch size, the largest one, and what ended the search."""
    size, terms = report.with_headroom, report.terms
    on_cpu, given = report.trials[0].device == "cpu", show_bytes(terms.limit_bytes)
    limit = f"{f'a budget of {given}' if on_cpu else f'{given} of memory'} on {terms.device_name}"
    samples = many(report.largest if size is None else size, "sample", mark="**")
    if size is None:
        return (
            f"**{report.workload}** trains with at most {samples} a step in {limit}, "
            f"but no size leaves {show_share(terms.headroom, 0)} of it free."
        )
    kept = f", with {show_share(terms.headroom, 0)} of it kept free" if terms.headroom else ""
    train = f"Train **{report.workload}** with {samples} a step in {limit}{kept}."
    which = "It is" if size == report.largest else f"**{report.largest:,}** is"
    return f"{train} {which} the largest size that ran: {_end(report)}."


def _end(report: BatchSizeReport) -> str:
    """Say why no larger size is the largest."""
    if report.result.ended_by in NOTHING_FAILED:
        return NOTHING_FAILED[report.result.ended_by]
    failed = [t.batch_size for t in of_purpose(report.trials, "search") if outcome_of(t) != "ok"]
    above = [size for size in failed if size > report.largest]
    if report.result.ended_by == "memory" and above:
        return f"{min(above):,} does not fit"
    return report.ended


def speed(report: BatchSizeReport) -> str:
    """Say which of the probed sizes is fast enough, and how fast; a smaller one may do."""
    spot = report.fastest_sensible
    if spot is None:
        return "How fast the sizes are was not measured."
    rates = {t.batch_size: t.images_per_s or 0.0 for t in report.trials}
    best = max(rates, key=lambda size: rates[size])
    beside = "" if spot == best else f", {show_rate(rates[best])} at {best:,}"
    which = "as fast as any" if spot == best else "nearly as fast as the fastest"
    return (
        f"Of the sizes probed, {spot:,} is the smallest that is {which} "
        f"({show_rate(rates[spot])}{beside}). Each probe is a few steps: take it as a first look."
        f"{_SLOWER if report.trials[0].device == 'cpu' else ''}"
    )


def how(report: BatchSizeReport) -> str:
    """Say what the search took: probes, failures, seconds, and how straight the line was."""
    count = len(report.trials)
    text = (
        f"{many(count, 'probe')}, {report.oom_count} of them out of memory, in "
        f"{show_seconds(report.search_s)} ({show_seconds(report.start_s)} before that to start)."
    )
    fit = report.result.fit
    if fit is None:
        return text
    if round(fit.slope) <= 0:
        return f"{text} The peaks do not grow with the batch, or by less than can be told apart."
    successes = report.result.successes
    peaks = [probe.peak_bytes or probe.live_bytes or 0 for probe in successes]
    off = max(map(abs, fit.residuals), default=0.0)
    worst = f", off by at most {show_bytes(off)} ({show_share(off / max(peaks))} of the largest)"
    return (
        f"{text} The line through the peaks: {show_bytes(fit.intercept)} and "
        f"{show_bytes(fit.slope)} a sample{worst}."
    )


def split_in_words(report: BatchSizeReport, effective: int) -> str:
    """Say how to reach an effective batch with the recommended size and accumulation."""
    size = report.with_headroom or report.largest
    pieces = split_effective(effective, size)
    if len(pieces) == 1:
        return (
            f"For an effective batch of {effective:,} take one step of {effective:,}: up to "
            f"{size:,} fit, so no accumulation is needed."
        )
    larger, smaller = pieces[0], pieces[-1]
    said = f"{len(pieces)} micro-batches of {larger:,}"
    if larger != smaller:
        more = pieces.count(larger)
        which = many(more, "micro-batch", "micro-batches")
        said = f"{which} of {larger:,} and {len(pieces) - more} of {smaller:,}"
    return (
        f"For an effective batch of {effective:,}, at most {size:,} at a time: {said}, then one "
        f"update (gradient accumulation over {len(pieces)} steps)."
    )


def utilisation(report: BatchSizeReport, trial: Trial) -> str:
    """Say how much of the card a trial took: tensors, the allocator, and the driver's view."""
    card = report.terms.card_bytes
    driver = trial.memory_after.device_used_bytes if trial.memory_after else None
    taken = [
        ("tensors", live_bytes(trial)),
        ("with the allocator's caches", trial.peak_reserved_bytes),
        ("by the driver's count", None if report.terms.emulated else driver),
    ]
    said = [f"{show_share(size / card)} {who}" for who, size in taken if size is not None]
    return (
        f"At {many(trial.batch_size, 'sample')} a step, of {show_bytes(card)}: "
        f"{', '.join(said) or 'not measured'}."
    )


def training(report: BatchSizeReport, trial: Trial) -> str:
    """Say how an epoch with the size found went, and how full the card was."""
    if trial.outcome != "ok":
        return f"Training with {trial.batch_size:,} ended otherwise: {trial.outcome}."
    images = many(trial.images or 0, "made-up image")
    return (
        f"One epoch of {images} took {show_seconds(trial.epoch_s)} "
        f"({show_rate(trial.images_per_s)}, loader included). {utilisation(report, trial)}"
    )


def found_in(run: RunDirectory) -> str:
    """Say in two sentences what the searches of a run found (for the report's first page)."""
    reports = read_reports(run)
    if not reports:
        return "No batch size was searched in this run: notebook 04 does it."
    # The one with the most memory is about the machine itself, the others about smaller cards.
    report = max(reports, key=lambda r: r.terms.limit_bytes)
    return answer(report)


def cards_table(
    reports: Sequence[BatchSizeReport], published: Sequence[dict[str, Any]]
) -> pd.DataFrame:
    """Return one row a search: its size, how full that makes the card; the article's below."""
    theirs = [
        {
            "card": card["card"], "search": "the article's", "batch": f"{card['batch_size']:,}",
            "of the card": show_share(card["utilisation"]), "probes": NOT_AVAILABLE,
            "out of memory": NOT_AVAILABLE,
        }
        for card in published
    ]  # fmt: skip
    return pd.DataFrame([*(_card(report) for report in reports), *theirs])


def _card(report: BatchSizeReport) -> dict[str, str]:
    best = report.with_headroom or report.largest
    kept = f", {show_share(report.terms.headroom, 0)} free" if report.terms.headroom else ""
    return {
        "card": f"{show_bytes(report.terms.card_bytes)} (emulated)",
        "search": f"{report.terms.strategy}{kept}", "batch": f"{best:,}",
        "of the card": show_share(report.utilisation_at(best)),
        "probes": str(len(report.trials)), "out of memory": str(report.oom_count),
    }  # fmt: skip


def _mib(value_bytes: int | None) -> str:
    value = mib(value_bytes)
    return NOT_AVAILABLE if value is None else f"{value:,.1f}"
