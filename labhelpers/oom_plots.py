"""Figures about running out of memory and its remedies: they draw and compute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from labhelpers.formats import mib, show_bytes
from labhelpers.plots import new_figure
from labhelpers.records import Trial
from labhelpers.remedies import Remedied
from labhelpers.remedy_plan import PLAIN, remedy_named

_FITS, _FAILS, _AGAIN, _OTHER = "#0b5cad", "#c81e3a", "#3a7d44", "#8fb4d9"


def cap_figure(trials: Sequence[Trial], title: str) -> Figure:
    """Draw the peak of each trial of a series as a bar, and the cap as a line."""
    figure, (axes,) = _sheet(1, (7.2, 3.8), title)
    for position, trial in enumerate(trials):
        colour, label = _kind(trial)
        peak = mib(trial.peak_allocated_bytes) or 0
        hatch = "//" if trial.outcome == "oom" else None
        axes.bar(position, peak, color=colour, label=label, hatch=hatch, edgecolor="white")
    limit = trials[0].cap_bytes
    on_cpu = trials[0].device == "cpu"
    what = "budget" if on_cpu else "cap"
    axes.axhline(
        mib(limit) or 0, color="black", linestyle="--", linewidth=1,
        label=f"{what}: {show_bytes(limit)}",
    )  # fmt: skip
    axes.set_xticks(range(len(trials)), [f"{trial.batch_size:,}" for trial in trials])
    axes.set_xlabel("batch size (images), in the order they ran")
    axes.set_ylabel("peak resident above the start (MiB)" if on_cpu else "peak allocated (MiB)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(True, axis="y", alpha=0.25)
    _legend(figure, axes)
    return figure


def remedies_figure(found: Remedied, title: str) -> Figure:
    """Draw peak memory and images/s of each training remedy as bars, the plain step first."""
    trials = [t for t in found.trials if remedy_named(t.variant or "").training]
    height = 1.4 + 0.36 * len(trials)
    figure, (left, right) = _sheet(2, (9.6, height), title)
    _bars(left, trials, [mib(t.peak_allocated_bytes) for t in trials], "peak allocated (MiB)")
    _bars(right, trials, [t.images_per_s for t in trials], "images/s")
    right.set_yticklabels([])
    return figure


def _bars(axes: Axes, trials: Sequence[Trial], values: Sequence[float | None], label: str) -> None:
    names = [trial.variant or "" for trial in trials]
    for row, (trial, value) in enumerate(zip(trials, values, strict=True)):
        same = remedy_named(trial.variant or "").same_input
        axes.barh(row, value or 0, color=_FITS if same else _OTHER)
        text = f"{value:,.0f}" if value and value >= 100 else f"{value:,.1f}" if value else ""
        text = text if trial.outcome == "ok" else "out of memory"
        axes.annotate(
            text or "n/a", (value or 0, row), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8, color="black" if trial.outcome == "ok" else _FAILS,
            bbox={"facecolor": "white", "linewidth": 0, "pad": 0.6},
        )  # fmt: skip
    plain = next((v for t, v in zip(trials, values, strict=True) if t.variant == PLAIN), None)
    if plain:
        axes.axvline(plain, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max([value or 0 for value in values] or [1]) * 1.18 or 1)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel(label)
    axes.grid(True, axis="x", alpha=0.25)


def _kind(trial: Trial) -> tuple[str, str]:
    if trial.outcome == "oom":
        return _FAILS, "out of memory (peak up to the error)"
    after = bool((trial.details or {}).get("after_oom"))
    return (_AGAIN, "trained after the error") if after else (_FITS, "trained")


def _sheet(columns: int, size: tuple[float, float], title: str) -> tuple[Figure, Any]:
    figure = new_figure(size, title)
    return figure, figure.subplots(1, columns, squeeze=False).ravel()


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=2, fontsize=8)
