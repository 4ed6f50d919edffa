"""Figures: `(curve, axes) -> axes`, and sheets of them. They draw and compute nothing."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from labhelpers.references import Curve
from labhelpers.tables import disturbed

Plot = Callable[[Curve, Axes], Axes]

_OWN = "#0b5cad"
_REFERENCES = ("#c2541b", "#3a7d44", "#7a4fa3", "#8a6d00")
_FLAG = "#c81e3a"
DPI = 144
FAR_APART = 4
"""From this ratio of best speeds on, curves share a logarithmic axis."""
MOST_NAMES, LOW = 10, 0.08
"""How many points of a curve get names; the share of the best speed below which is far down."""
ROOM_FOR_NAMES = 0.2
"""Room for the name at the right of the last point, as a share of what the points span."""


def batch_axis(axes: Axes, sizes: Sequence[int]) -> Axes:
    """Give the axes a log-2 batch axis with a tick at each measured size."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.tick_params(axis="x", rotation=40)
    axes.set_xlabel("batch size (images)")
    axes.grid(True, which="major", alpha=0.25)
    return axes


def throughput(curve: Curve, axes: Axes) -> Axes:
    """Draw images per second against batch size."""
    draw_line(curve, axes, "batch_size", "images_per_s")
    return _rate_axis(axes)


def memory(curve: Curve, axes: Axes) -> Axes:
    """Draw the peak of allocated memory against batch size, both on log-2 axes."""
    draw_line(curve, axes, "batch_size", "allocated_mib")
    return log_axis(axes, "peak allocated (MiB)")


def step_time(curve: Curve, axes: Axes) -> Axes:
    """Draw the time of a step (epoch / steps) against batch size, both on log-2 axes."""
    draw_line(curve, axes, "batch_size", "step_ms")
    return log_axis(axes, "step time (ms): epoch / steps")


def throughput_against_memory(curve: Curve, axes: Axes) -> Axes:
    """Draw images per second against peak memory, each point named with its batch size."""
    draw_line(curve, axes, "allocated_mib", "images_per_s")
    axes.set_xscale("log", base=2)
    if not curve.reference:
        _name_points(curve, axes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("peak allocated (MiB)")
    axes.grid(True, alpha=0.25)
    return _rate_axis(axes)


def _name_points(curve: Curve, axes: Axes) -> None:
    """Write batch sizes beside their points, of many points every second, third, … one.

    A name stands below its point, but above one where the curve falls, or that is far down.
    """
    points = curve.table.dropna(subset=["allocated_mib", "images_per_s"])
    points = points[points["allocated_mib"] > 0]
    if points.empty:
        return
    rates, each = points["images_per_s"], -(-len(points) // MOST_NAMES)
    # Nothing follows the last point, so that it does not fall.
    above = (rates >= rates.shift(-1)) | (rates < LOW * rates.max())
    for row in points.assign(above=above).iloc[(len(points) - 1) % each :: each].itertuples():
        axes.annotate(
            f"{row.batch_size:,}", (row.allocated_mib, row.images_per_s), fontsize=7, color=_OWN,
            textcoords="offset points", xytext=(0, 5) if row.above else (4, -11),
            ha="center" if row.above else "left",
        )  # fmt: skip
    least, most = points["allocated_mib"].min(), points["allocated_mib"].max()
    room = (most * (most / least) ** ROOM_FOR_NAMES, rates.iloc[-1])
    axes.update_datalim([room], updatey=False)  # later curves may still widen the axis
    axes.autoscale_view(scaley=False)


def final_loss(curve: Curve, axes: Axes) -> Axes:
    """Draw the training loss at the end of the epoch against batch size."""
    draw_line(curve, axes, "batch_size", "final_loss")
    axes.set_ylabel("training loss after one epoch")
    axes.autoscale(axis="y")
    axes.set_ylim(bottom=0)
    return axes


def mark_sweet_spot(axes: Axes, batch_size: int, share: float) -> Axes:
    """Draw a line at the sweet spot and name it, on the side where there is room."""
    axes.axvline(batch_size, color=_OWN, linewidth=1, linestyle=":")
    at_pixel = axes.transData.transform((batch_size, axes.get_ylim()[0]))
    on_right = axes.transAxes.inverted().transform(at_pixel)[0] < 0.6
    axes.annotate(
        f"sweet spot {batch_size:,}\n(≥ {share:.0%} of the best)", (batch_size, 0.03),
        xycoords=("data", "axes fraction"), textcoords="offset points",
        xytext=(5 if on_right else -5, 0), ha="left" if on_right else "right",
        fontsize=8, color=_OWN,
    )  # fmt: skip
    return axes


def new_figure(size: tuple[float, float], title: str = "") -> Figure:
    """Return an empty figure of a size in inches, ready to be drawn on from any thread."""
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def sheet(
    title: str, plots: Sequence[Plot], curves: Sequence[Curve], *, columns: int = 2
) -> Figure:
    """Draw each plot for all curves: a figure with a shared legend below it."""
    rows = -(-len(plots) // columns)
    figure = new_figure((5.2 * columns, 3.7 * rows + 0.7), title)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, plot in zip(grid, plots, strict=False):
        _draw(plot, curves, axes)
    for axes in grid[len(plots) :]:
        axes.remove()
    handles, labels = grid[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _draw(plot: Plot, curves: Sequence[Curve], axes: Axes) -> None:
    drawn = [plot(curve, axes) for curve in curves if _has_points(curve, plot)]
    sizes = {int(size) for curve in curves for size in curve.table["batch_size"]}
    if plot is not throughput_against_memory and sizes:
        batch_axis(axes, sorted(sizes))
    if not drawn:
        axes.text(0.5, 0.5, "not available here", ha="center", transform=axes.transAxes)


def _rate_axis(axes: Axes) -> Axes:
    """Start images/s at 0; where machines differ too much to compare shapes, use a log axis."""
    axes.set_ylabel("images/s (median)")
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    lines = [values for values in drawn if len(values)]
    peaks = [float(max(values)) for values in lines]
    if peaks and max(peaks) > FAR_APART * min(peaks):
        axes.set_yscale("log", base=2)
        axes.set_ylim(min(float(min(values)) for values in lines) / 1.5, 1.5 * max(peaks))
    else:
        axes.set_yscale("linear")
        axes.set_ylim(0, 1.08 * max(peaks, default=1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return axes


def _has_points(curve: Curve, plot: Plot) -> bool:
    needs_memory = plot in (memory, throughput_against_memory)
    return not needs_memory or bool(curve.table["allocated_mib"].notna().any())


def draw_line(curve: Curve, axes: Axes, x: str, y: str) -> None:
    """Draw one column of a curve against another: own solid, references dashed."""
    table = curve.table.dropna(subset=[x, y])
    color = _reference_color(curve, axes) if curve.reference else _OWN
    style: dict[str, Any] = {"linestyle": "--", "linewidth": 1.4, "markersize": 3, "alpha": 0.9}
    if not curve.reference:
        style = {"linestyle": "-", "linewidth": 2, "markersize": 5, "zorder": 3}
    axes.plot(table[x], table[y], marker="o", color=color, label=curve.label, **style)
    _ring_flagged(table, axes, x, y)


def _ring_flagged(table: pd.DataFrame, axes: Axes, x: str, y: str) -> None:
    """Ring the points that were disturbed, so that nobody reads them as clean."""
    flagged = disturbed(table)
    if len(flagged):
        axes.scatter(
            flagged[x], flagged[y], s=90, facecolors="none", edgecolors=_FLAG, zorder=4,
            label="disturbed (see flags in the table)",
        )  # fmt: skip


def _reference_color(curve: Curve, axes: Axes) -> str:
    """Give the article one colour in all figures, also where another has nothing of it."""
    article, *others = _REFERENCES
    if "(article)" in curve.label:
        return article
    dashed = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
    drawn = [line for line in dashed if line.get_color() != article]
    return others[len(drawn) % len(others)]


def log_axis(axes: Axes, label: str) -> Axes:
    """Give the axes a log-2 y axis with plain numbers."""
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:.4g}")
    )
    axes.set_ylabel(label)
    return axes


def png_bytes(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, making its folder; return the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png_bytes(figure))
    return path
