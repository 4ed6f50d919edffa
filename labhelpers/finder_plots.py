"""Figures of a search: its probes, the line through them, the limit and the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from labhelpers.finder_report import BatchSizeReport
from labhelpers.finder_trials import live_bytes, outcome_of, taken_bytes
from labhelpers.formats import MIB, show_bytes
from labhelpers.plots import new_figure
from labhelpers.records import Trial

_TAKEN, _LIVE, _FAILED, _LIMIT, _ANSWER = "#0b5cad", "#58a0e0", "#c81e3a", "#333333", "#3a7d44"


def search_sheet(title: str, reports: Sequence[BatchSizeReport]) -> Figure:
    """Draw one panel for each search, with a shared legend below."""
    columns = min(2, len(reports))
    rows = -(-len(reports) // columns)
    figure = new_figure((5.4 * columns, 4.0 * rows + 0.8), title)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, report in zip(grid, reports, strict=False):
        search_panel(report, axes)
    for axes in grid[len(reports) :]:
        axes.remove()
    named = dict(pair for axes in figure.axes for pair in _legend(axes))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def search_panel(report: BatchSizeReport, axes: Axes) -> Axes:
    """Draw peak memory against batch size: probes, line, limit, headroom and answer."""
    ran = [trial for trial in report.trials if outcome_of(trial) == "ok"]
    failed = [trial for trial in report.trials if outcome_of(trial) != "ok"]
    _draw_probes(axes, ran)
    _draw_line(axes, report)
    limit_mib = report.terms.limit_bytes / MIB
    axes.axhline(limit_mib, color=_LIMIT, linewidth=1.2, label="limit")
    if report.terms.headroom:
        allowed_mib = report.terms.allowed_bytes / MIB
        axes.axhline(allowed_mib, color=_LIMIT, linewidth=1, linestyle=":", label="headroom begins")
    heights = [_mib(trial.cap_bytes or report.terms.limit_bytes) for trial in failed]
    axes.scatter(
        [trial.batch_size for trial in failed], heights, marker="x", color=_FAILED, zorder=4,
        label="did not fit (drawn at its limit)",
    )  # fmt: skip
    _mark_answer(axes, report)
    return _dressed(axes, report)


def _draw_probes(axes: Axes, ran: Sequence[Trial]) -> None:
    sizes = [trial.batch_size for trial in ran]
    taken = [_mib(taken_bytes(trial)) for trial in ran]
    on_gpu = any(trial.peak_reserved_bytes is not None for trial in ran)
    label = "ran: peak reserved" if on_gpu else "ran: peak of the process"
    axes.scatter(sizes, taken, color=_TAKEN, zorder=3, label=label)
    if on_gpu:
        live = [_mib(live_bytes(trial)) for trial in ran]
        axes.scatter(
            sizes, live, facecolors="none", edgecolors=_LIVE, zorder=3, label="ran: peak allocated"
        )


def _draw_line(axes: Axes, report: BatchSizeReport) -> None:
    fit = report.result.fit
    if fit is None:
        return
    ends = (0, max(trial.batch_size for trial in report.trials))
    heights = [(fit.intercept + fit.slope * size) / MIB for size in ends]
    axes.plot(ends, heights, color=_TAKEN, linewidth=1, linestyle="--", label="line through peaks")


def _mark_answer(axes: Axes, report: BatchSizeReport) -> None:
    size = report.with_headroom or report.largest
    axes.axvline(size, color=_ANSWER, linewidth=1.2, label="answer")
    axes.annotate(
        f"{size:,}" + (f"\n(largest {report.largest:,})" if size != report.largest else ""),
        (size, 0.05), xycoords=("data", "axes fraction"), textcoords="offset points",
        xytext=(-6, 0), ha="right", fontsize=8, color=_ANSWER,
    )  # fmt: skip


def _dressed(axes: Axes, report: BatchSizeReport) -> Axes:
    terms = report.terms
    axes.set_title(f"{show_bytes(terms.limit_bytes)}, {terms.strategy}: {report.ended}", fontsize=9)
    axes.set_xlabel("batch size (samples)")
    axes.set_ylabel("peak memory (MiB)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylim(0, 1.15 * terms.limit_bytes / MIB)
    axes.set_xlim(0, None)
    axes.grid(True, alpha=0.25)
    return axes


def _mib(size_bytes: int | None) -> float:
    return math.nan if size_bytes is None else size_bytes / MIB


def _legend(axes: Axes) -> list[tuple[str, Artist]]:
    handles, labels = axes.get_legend_handles_labels()
    return list(zip(labels, handles, strict=True))
