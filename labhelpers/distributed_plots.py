"""Figures of a job on several GPUs: they draw a scaling table and compute nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from labhelpers.distributed_tables import counted, seat
from labhelpers.plots import batch_axis, log_axis, new_figure

_ALONE = "#777777"
_JOBS = ("#0b5cad", "#c2541b", "#3a7d44", "#7a4fa3")


def scaling_figure(table: pd.DataFrame, title: str) -> Figure:
    """Draw global speed, efficiency, the all-reduce's share and the highest peak."""
    figure = new_figure((10.4, 8.1), title)
    grid = figure.subplots(2, 2).ravel()
    global_speed(table, grid[0])
    efficiency(table, grid[1])
    all_reduce_share(table, grid[2])
    highest_peak(table, grid[3])
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def global_speed(table: pd.DataFrame, axes: Axes) -> Axes:
    """Draw images/s of all GPUs against the global batch, beside one GPU and perfect scaling."""
    what = seat(table["device"].iloc[0])
    alone = table.dropna(subset=["alone_images_per_s"]).drop_duplicates("per_gpu_batch")
    axes.plot(
        alone["per_gpu_batch"], alone["alone_images_per_s"], "o--", color=_ALONE,
        label=f"one {what} alone", linewidth=1.4, markersize=4,
    )  # fmt: skip
    for color, name, rows in _jobs(table):
        axes.plot(
            rows["global_batch"], rows["perfect_images_per_s"], ":", color=color,
            label=f"perfect scaling: {name}", linewidth=1.4,
        )  # fmt: skip
        _line(axes, rows, "global_batch", "images_per_s", color, f"{name} together")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("images/s of all (median)")
    batch_axis(axes, sorted({*table["global_batch"], *table["per_gpu_batch"]}))
    axes.set_xlabel(f"global batch (images): that of one {what} × how many there are")
    return axes


def efficiency(table: pd.DataFrame, axes: Axes) -> Axes:
    """Draw the share of perfect scaling against the per-GPU batch."""
    _by_job(table, axes, "efficiency")
    axes.axhline(1, color=_ALONE, linewidth=1, linestyle=":")
    axes.set_ylabel("scaling efficiency")
    return _share_axis(table, axes)


def all_reduce_share(table: pd.DataFrame, axes: Axes) -> Axes:
    """Draw the share of a step spent waiting for the all-reduce."""
    _by_job(table, axes, "all_reduce_share")
    axes.set_ylabel("share of a step in all-reduce")
    return _share_axis(table, axes)


def highest_peak(table: pd.DataFrame, axes: Axes) -> Axes:
    """Draw the peak of allocated memory on the rank that took most."""
    _by_job(table, axes, "allocated_mib")
    log_axis(axes, "highest peak of a rank (MiB)")
    return _per_gpu_axis(table, axes)


def _jobs(table: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield a color, a name and the rows of each number of ranks and accumulation."""
    colors = itertools.cycle(_JOBS)
    for _, rows in table.groupby(["world_size", "accumulation"]):
        first = rows.iloc[0]
        often = f", accumulation {first['accumulation']}" if first["accumulation"] > 1 else ""
        yield next(colors), f"{counted(first['world_size'], first['device'])}{often}", rows


def _by_job(table: pd.DataFrame, axes: Axes, column: str) -> None:
    for color, _, rows in _jobs(table):
        _line(axes, rows, "per_gpu_batch", column, color)
    if table[column].isna().all():
        axes.text(0.5, 0.5, "not measured here", ha="center", transform=axes.transAxes)


def _line(
    axes: Axes, rows: pd.DataFrame, x: str, y: str, color: str, label: str | None = None
) -> None:
    known = rows.dropna(subset=[y]).sort_values(x)
    axes.plot(known[x], known[y], "o-", color=color, label=label, linewidth=2, markersize=5)


def _share_axis(table: pd.DataFrame, axes: Axes) -> Axes:
    axes.set_ylim(0, max(1.1, axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return _per_gpu_axis(table, axes)


def _per_gpu_axis(table: pd.DataFrame, axes: Axes) -> Axes:
    batch_axis(axes, sorted(set(table["per_gpu_batch"])))
    axes.set_xlabel(f"batch per {seat(table['device'].iloc[0])} (images)")
    return axes
