"""Say what a search for a batch size found: tables and sentences out of its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from labhelpers.finder_report import BatchSizeReport, read_reports, split_effective
from labhelpers.finder_trials import live_bytes, of_purpose, outcome_of
from labhelpers.formats import (
    NOT_AVAILABLE,
    mib,
    show_bytes,
    show_rate,
    show_seconds,
    show_share,
)
from labhelpers.records import Trial
from labhelpers.store import RunDirectory

OUTCOMES = {
    "ok": "ran", "oom": "out of memory", "oversubscribed": "took more than there is",
    "killed": "process killed", "timeout": "time limit", "error": "failed",
    "library_limit": "library limit",
}  # fmt: skip


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


def answer(report: BatchSizeReport) -> str:
    """Say the recommended batch size, the largest one, and what ended the search."""
    size, terms = report.with_headroom, report.terms
    limit = f"{show_bytes(terms.limit_bytes)} of memory on {terms.device_name}"
    if size is None:
        return (
            f"**{report.workload}** trains with at most **{report.largest:,}** samples a step in "
            f"{limit}, but no size leaves {show_share(terms.headroom, 0)} of it free."
        )
    kept = f", with {show_share(terms.headroom, 0)} of it kept free" if terms.headroom else ""
    largest = (
        f" The largest that ran is {report.largest:,}; {_end(report)}."
        if size != report.largest else f" Nothing larger was asked for or fits: {_end(report)}."
    )  # fmt: skip
    return (
        f"Train **{report.workload}** with **{size:,}** samples a step in {limit}{kept}.{largest}"
    )


def _end(report: BatchSizeReport) -> str:
    if report.result.ended_by == "memory" and report.result.closed:
        terms = report.terms
        another = terms.multiple_of > 1 or terms.powers_of_two
        return f"{'the next size asked for' if another else f'{report.largest + 1:,}'} does not fit"
    return f"what ended it: {report.ended}"


def speed(report: BatchSizeReport) -> str:
    """Say which of the probed sizes is fast enough, and how fast; a smaller one may do."""
    spot = report.fastest_sensible
    if spot is None:
        return "How fast the sizes are was not measured."
    rates = {t.batch_size: t.images_per_s for t in report.trials if t.images_per_s}
    best = max(rates, key=lambda size: rates[size] or 0.0)
    return (
        f"Of the sizes probed, {spot:,} is the smallest that is nearly as fast as the fastest "
        f"({show_rate(rates[spot])}; {show_rate(rates[best])} at {best:,}): each probe is a few "
        "steps, so take it as a first look."
    )


def how(report: BatchSizeReport) -> str:
    """Say what the search took: probes, failures, seconds, and how straight the line was."""
    count = len(report.trials)
    text = (
        f"{count} probes, {report.oom_count} of them out of memory, in "
        f"{show_seconds(report.search_s)} ({show_seconds(report.start_s)} before that to start)."
    )
    fit = report.result.fit
    if fit is None:
        return text
    sizes = [probe.batch_size for probe in report.result.successes]
    parts = [
        abs(residual) / (fit.intercept + fit.slope * size)
        for size, residual in zip(sizes, fit.residuals, strict=False)
        if fit.intercept + fit.slope * size > 0
    ]
    worst = f", at most {show_share(max(parts))} off" if parts else ""
    return (
        f"{text} The line through the peaks: {show_bytes(fit.intercept)} and "
        f"{show_bytes(fit.slope)} a sample{worst}."
    )


def split_in_words(report: BatchSizeReport, effective: int) -> str:
    """Say how to reach an effective batch with the recommended size and accumulation."""
    size = report.with_headroom or report.largest
    pieces = split_effective(effective, size)
    if len(pieces) == 1:
        return f"An effective batch of {effective:,} fits into one step: no accumulation is needed."
    larger, smaller = pieces[0], pieces[-1]
    many = f"{len(pieces)} micro-batches of {larger:,}"
    if larger != smaller:
        more = pieces.count(larger)
        many = f"{more} micro-batches of {larger:,} and {len(pieces) - more} of {smaller:,}"
    return (
        f"For an effective batch of {effective:,}: {many}, then one update "
        f"(gradient accumulation over {len(pieces)} steps)."
    )


def utilisation(report: BatchSizeReport, batch_size: int) -> str:
    """Say what a size that ran takes of the card, allocated and reserved."""
    trial = report.at(batch_size)[-1]
    card = report.terms.card_bytes
    taken = [("tensors", live_bytes(trial)), ("the allocator", trial.peak_reserved_bytes)]
    said = [f"{who} {show_share(size / card)}" for who, size in taken if size is not None]
    return f"At {batch_size:,}, of {show_bytes(card)}: {', '.join(said) or 'not measured'}."


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
    """Return one row a card: what was found and how full it gets, beside the article's figures."""
    rows = [_card(report) for report in reports]
    rows += [
        {
            "card": card["card"], "search": "the article's", "batch": f"{card['batch_size']:,}",
            "tensors": NOT_AVAILABLE, "reserved": show_share(card["utilisation"]),
            "probes": NOT_AVAILABLE,
        }
        for card in published
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _card(report: BatchSizeReport) -> dict[str, str]:
    best = report.with_headroom or report.largest
    trial, card = report.at(best)[-1], report.terms.card_bytes
    shares = [
        None if v is None else v / card for v in (live_bytes(trial), trial.peak_reserved_bytes)
    ]
    kept = f", {show_share(report.terms.headroom, 0)} free" if report.terms.headroom else ""
    return {
        "card": show_bytes(card), "search": f"{report.terms.strategy}{kept}",
        "batch": f"{best:,}", "tensors": show_share(shares[0]), "reserved": show_share(shares[1]),
        "probes": str(len(of_purpose(report.trials, "search", "headroom"))),
    }  # fmt: skip


def _mib(value_bytes: int | None) -> str:
    value = mib(value_bytes)
    return NOT_AVAILABLE if value is None else f"{value:,.1f}"
