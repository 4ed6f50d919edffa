"""Figures of probes and of the residency map: speed, memory, the card's size, the blocks."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from labhelpers.formats import GB, mib, show_bandwidth
from labhelpers.plots import Plot, draw_line, log_axis, new_figure, sheet, throughput
from labhelpers.probe_curves import ProbeCurve
from labhelpers.references import Curve
from labhelpers.residency import BlockJudgement, Place, ResidencyMap

_PAST, _NEAR, _KERNELS = "#c81e3a", "#d98200", "#5b2a86"
_ALLOCATED, _RESERVED, _CARD = "#0b5cad", "#58a0e0", "#333333"
_PLACES: dict[Place, tuple[str, str]] = {
    "card": ("#3a7d44", "in video memory"),
    "between": ("#d98200", "partly outside"),
    "system": ("#c81e3a", "in system memory"),
    "undecided": ("#8c8c8c", "undecided"),
    "host": ("#6b7a8f", "in the host's memory (CPU)"),
}


def probe_sheet(title: str, plots: Sequence[Plot], curves: Sequence[Curve]) -> Figure:
    """Draw each plot for all curves, with room for sizes that lie close together."""
    figure = sheet(title, plots, curves)
    for axes, plot in zip(figure.axes, plots, strict=True):
        drawn = [c for c in curves if plot is not own_memory or not c.reference]
        sizes = [int(size) for curve in drawn for size in curve.table["batch_size"]]
        axes.tick_params(axis="x", rotation=90, labelsize=8)
        if sizes:
            axes.set_xlim(min(sizes) / 1.4, max(sizes) * 1.4)
    return figure


def speed(curve: Curve, axes: Axes) -> Axes:
    """Draw images per second against batch size; verdicts and out-of-memory errors marked."""
    throughput(curve, axes)
    axes.set_ylabel("images/s")
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    _mark_oom(curve, axes)
    return _mark_verdicts(curve, axes, "images_per_s")


def speed_share(curve: Curve, axes: Axes) -> Axes:
    """Draw each speed as a share of its curve's best, with the verdicts marked."""
    draw_line(curve, axes, "batch_size", "share_of_best")
    axes.set_ylabel("images/s, share of the curve's best")
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return _mark_verdicts(curve, axes, "share_of_best")


def card_share(curve: Curve, axes: Axes) -> Axes:
    """Draw reserved memory as a share of each curve's card, with the card as a line."""
    draw_line(curve, axes, "batch_size", "card_share")
    if not any(line.get_gid() == "card" for line in axes.get_lines()):
        axes.axhline(1.0, color=_CARD, linewidth=1.2, gid="card")
        axes.annotate(
            "all that the card holds", (0.02, 1.0), xycoords=("axes fraction", "data"),
            xytext=(0, 4), textcoords="offset points", fontsize=8, color=_CARD,
        )  # fmt: skip
    axes.set_ylabel("peak reserved, share of the card")
    _from_zero(axes)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return axes


def memory_per_image(curve: Curve, axes: Axes) -> Axes:
    """Draw allocated memory per image: a step in it says that other kernels ran."""
    draw_line(curve, axes, "batch_size", "kib_per_image")
    axes.set_ylabel("peak allocated per image (KiB)")
    return _from_zero(axes)


def own_memory(curve: Curve, axes: Axes) -> Axes:
    """Draw allocated and reserved memory of one's own probe, with the card as a line."""
    log_axis(axes, "peak memory (MiB)")
    if curve.reference or not isinstance(curve, ProbeCurve):
        return axes
    for column, color, name in (
        ("reserved_mib", _RESERVED, "reserved"), ("allocated_mib", _ALLOCATED, "allocated"),
    ):  # fmt: skip
        known = curve.table.dropna(subset=[column])
        if len(known):
            axes.plot(known["batch_size"], known[column], marker="o", color=color, label=name)
    if not curve.on_cpu:
        total_mib = mib(curve.total_bytes) or 0.0
        axes.axhline(total_mib, color=_CARD, linewidth=1.2, label=f"the card: {total_mib:,.0f} MiB")
    axes.legend(loc="upper left", fontsize=8)
    return axes


def residency_figure(found: ResidencyMap, title: str) -> Figure:
    """Draw a bar per block: its fill, a dot for its read, and card and bus as lines."""
    figure = new_figure((10.4, 4.6))
    axes = figure.subplots()
    fills, reads = found.fill_judgements, found.read_judgements
    axes.bar(
        [judged.index for judged in fills], [judged.bandwidth / GB for judged in fills],
        width=1.0, linewidth=0.3, edgecolor="white",
        color=[_PLACES[judged.place][0] for judged in fills],
    )  # fmt: skip
    axes.plot(
        [judged.index for judged in reads], [judged.bandwidth / GB for judged in reads],
        linestyle="none", marker=".", markersize=4, color="black", label="read of the block",
    )  # fmt: skip
    _bandwidth_lines(found, axes)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(f"block, in the order of allocation ({mib(found.block_bytes):,.0f} MiB each)")
    axes.set_ylabel("bandwidth (GB/s), better of two passes")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylim(bottom=0)
    _residency_legend(figure, axes, fills)
    return figure


def _bandwidth_lines(found: ResidencyMap, axes: Axes) -> None:
    what = "host memory" if found.device == "cpu" else "the card"
    lines = (
        (found.card_fill, "--", f"{what}: fill of a fresh block"),
        (found.card_read, ":", f"{what}: read of a fresh block"),
        (found.bus_from_device, "-.", "the bus: pinned copy from the device"),
        (found.bus_to_device, "-", "the bus: pinned copy to the device"),
    )
    for bandwidth, style, name in lines:
        if bandwidth is not None:
            axes.axhline(
                bandwidth / GB, linestyle=style, color=_CARD, linewidth=1.2,
                label=f"{name}, {show_bandwidth(bandwidth)}",
            )  # fmt: skip


def _residency_legend(figure: Figure, axes: Axes, fills: Sequence[BlockJudgement]) -> None:
    places = dict.fromkeys(judged.place for judged in fills)
    bars = [Patch(color=_PLACES[p][0], label=f"fill: {_PLACES[p][1]}") for p in places]
    handles, _ = axes.get_legend_handles_labels()
    figure.legend(handles=[*bars, *handles], loc="outside lower center", ncols=2, fontsize=8)


def _from_zero(axes: Axes) -> Axes:
    """Start the y axis at 0 and leave room above the highest point of all curves so far."""
    axes.autoscale(axis="y")
    axes.set_ylim(bottom=0)
    return axes


def _mark_oom(curve: Curve, axes: Axes) -> None:
    """Mark sizes that ended in an out-of-memory error: they have no speed to draw."""
    failed = curve.table[curve.table["outcome"] == "oom"]
    if len(failed):
        axes.scatter(
            failed["batch_size"], [0.04] * len(failed), marker="x", s=45, color=_CARD,
            transform=axes.get_xaxis_transform(), label=f"out of memory: {curve.label}", zorder=4,
        )  # fmt: skip


def _mark_verdicts(curve: Curve, axes: Axes, column: str) -> Axes:
    """Mark the points that ran past the card, may have, or ran other kernels."""
    table = curve.table.dropna(subset=[column])
    kernels = table["causes"].str.contains("kernel_change") & (table["verdict"] == "no")
    marks = (
        (table["verdict"] == "certain", "o", _PAST, "certainly past the card"),
        (table["verdict"] == "suspected", "o", _NEAR, "suspected past the card"),
        (kernels, "D", _KERNELS, "slower: other kernels ran"),
    )
    for chosen, marker, color, name in marks:
        _ring(table[chosen], axes, column, marker, color, name)
    return axes


def _ring(
    points: pd.DataFrame, axes: Axes, column: str, marker: str, color: str, name: str
) -> None:
    if len(points):
        axes.scatter(
            points["batch_size"], points[column], s=95, marker=marker, facecolors="none",
            edgecolors=color, linewidths=1.4, zorder=4, label=name,
        )  # fmt: skip
