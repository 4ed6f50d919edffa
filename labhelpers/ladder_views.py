"""The ladder as tables, a figure, and sentences with their numbers from results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from labhelpers.ceilings import describe_share, work_from
from labhelpers.formats import (
    NOT_AVAILABLE,
    show_bandwidth,
    show_bytes,
    show_rate,
    show_seconds,
    show_share,
    show_times,
)
from labhelpers.ladder_plan import RUNGS, SYNTHETIC, rung_of
from labhelpers.ladder_table import LOSS_TOLERANCE, Row, of_size, rung_at, sizes_of, top_rung
from labhelpers.plots import new_figure
from labhelpers.records import Trial
from labhelpers.tables import flags

_FASTER, _SLOWER, _YARDSTICK, _NO_CHANGE = "#0b5cad", "#c81e3a", "#9aa0a6", "#6f9bd1"
_UNCHANGED = 1.02
_LEGEND = {
    _FASTER: "faster than its base", _NO_CHANGE: "as fast, within 2 % or noise",
    _SLOWER: "slower", _YARDSTICK: "a yardstick, not a rung",
}  # fmt: skip


def rungs_table() -> pd.DataFrame:
    """Return what each rung changes, and over which rung."""
    rows = [
        {"rung": rung.name, "over": rung.bases[0] if rung.bases else "", "changes": rung.what}
        for rung in RUNGS
    ]
    return pd.DataFrame(rows, columns=["rung", "over", "changes"])


def speed_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return images/s by rung and batch size, each with its ratio to the rung's base."""
    return _by_size(rows, lambda row: f"{_rate(row)} ({show_times(row.over_base, 2)})"
                    if row.base else _rate(row))  # fmt: skip


def loss_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return the loss after the same number of images, by rung and batch size."""
    return _by_size(
        rows, lambda row: NOT_AVAILABLE if row.loss is None else f"{row.loss:.4f}{_mark(row)}"
    )


def ceiling_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return each rung's share of the nearest ceiling, and which one that is."""
    return _by_size(rows, lambda row: describe_share(row.ceiling) if row.ceiling else NOT_AVAILABLE)


def ladder_figure(rows: Sequence[Row], title: str) -> Figure:
    """Draw the rungs as bars, one panel per batch size; what made it slower is red."""
    sizes = sizes_of(rows)
    names = list(dict.fromkeys(row.rung for row in rows))
    columns = min(2, len(sizes))
    deep = -(-len(sizes) // columns)
    height = deep * (0.26 * len(names) + 1.0) + 0.6
    figure = new_figure((5.4 * columns, height), title)
    grid = figure.subplots(deep, columns, squeeze=False, sharey=True).ravel()
    for axes, size in zip(grid, sizes, strict=False):
        _panel(axes, {row.rung: row for row in of_size(rows, size)}, names, size)
    for axes in grid[len(sizes) :]:
        axes.remove()
    handles = [Patch(color=colour, label=label) for colour, label in _LEGEND.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _panel(axes: Axes, rows: Mapping[str, Row], names: Sequence[str], size: int) -> None:
    for place, name in enumerate(names):
        row = rows.get(name)
        rate = row.images_per_s if row else None
        if row is None or rate is None:
            axes.annotate("not measured", (0.02, place), xycoords=("axes fraction", "data"),
                          va="center", fontsize=7, color=_YARDSTICK)  # fmt: skip
            continue
        axes.barh(place, rate, color=_colour(row), height=0.72)
        over = f", {show_times(row.over_base, 2)} {row.base}" if row.base else ""
        axes.annotate(f"{rate:,.0f}{over}", (rate, place), textcoords="offset points",
                      xytext=(3, 0), va="center", fontsize=7)  # fmt: skip
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=8)
    axes.invert_yaxis() if not axes.yaxis_inverted() else None
    axes.set_title(f"batch {size:,}", fontsize=10)
    axes.set_xlabel("images/s (median)")
    axes.set_xlim(0, 1.65 * max((row.images_per_s or 0 for row in rows.values()), default=1) or 1)
    axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.grid(True, axis="x", alpha=0.25)


def _thousands(value: float, _place: int) -> str:
    return f"{value / 1000:,.0f}k" if value >= 10_000 else f"{value:,.0f}"


def _colour(row: Row) -> str:
    if row.rung == SYNTHETIC:
        return _YARDSTICK
    if row.slower:
        return _SLOWER
    return _FASTER if row.base is None or (row.over_base or 0) > _UNCHANGED else _NO_CHANGE


def summit(rows: Sequence[Row]) -> str:
    """Say for each batch size how much faster the fastest rung is, as a list."""
    lines = []
    for size in sizes_of(rows):
        top, article = top_rung(rows, size), rung_at(rows, "article", size)
        if top is None or article is None or top.rung == "article":
            lines.append(f"- Batch {size:,}: nothing is faster than the article's loop here.")
            continue
        eager = rung_at(rows, "resident", size) or rung_at(rows, "host", size)
        over = f", {show_times(_over(top, eager))} `{eager.rung}`" if eager else ""
        lines.append(
            f"- Batch {size:,}: **{top.rung}** trains {show_rate(top.images_per_s)}, "
            f"{show_times(top.over_article)} the article's loop ({_rate(article)}){over}."
        )
    return "\n".join(lines)


def made_slower(rows: Sequence[Row]) -> str:
    """Name every rung that made things slower than its base, with what to think of it."""
    if all(row.slower is None for row in rows):
        return "Each rung was measured once, and that cannot tell a slower rung from noise."
    lines: dict[str, list[str]] = {}
    for row in rows:
        if row.slower and row.rung != SYNTHETIC:
            lost = f"{show_times(row.over_base, 2)} at batch {row.batch_size:,}"
            lines.setdefault(row.rung, []).append(lost)
    if not lines:
        return "No rung made the training slower than what it stands on, beyond noise."
    return "\n".join(
        f"- **{name}** is slower than `{_base(rows, name)}` ({', '.join(lost)}): "
        f"{rung_of(name).slower}."
        for name, lost in lines.items()
    )


def disturbed(trials: Iterable[Trial]) -> str:
    """Say which trials other processes or throttled clocks disturbed."""
    found: dict[str, list[str]] = {}
    for trial in trials:
        for flag in flags([trial]):
            if flag not in ("oom", "killed", "timeout", "error"):
                found.setdefault(flag, []).append(f"{trial.variant} at {trial.batch_size:,}")
    if not found:
        return "Nothing disturbed the trials, as far as this system tells."
    lines = [f"- {flag}: {', '.join(dict.fromkeys(names))}" for flag, names in found.items()]
    return "\n".join(["Disturbed:", "", *lines])


def loss_verdict(rows: Sequence[Row]) -> str:
    """Say whether every rung still trains the same, by its loss."""
    off = [f"{row.rung} at batch {row.batch_size:,}" for row in rows if row.same_loss is False]
    within = show_share(LOSS_TOLERANCE, 0)
    if off:
        return (
            f"**Another loss** than the article's, by more than {within}: {', '.join(off)}. They "
            "do not count as faster."
        )
    return f"After the same images every rung's loss is the article's within {within}."


def not_here(rows: Sequence[Row], missing: Mapping[str, str]) -> str:
    """List the rungs that do not exist on this device, or failed, with the reason."""
    failed = {f"{row.rung} (batch {row.batch_size:,})": row.failure for row in rows if row.failure}
    lines = [f"- `{name}`: {reason}" for name, reason in {**missing, **failed}.items()]
    return "\n".join(lines) if lines else "Every rung exists here."


def ceiling_facts(ceilings: Mapping[str, Any]) -> str:
    """Say what was counted and what the machine was measured to do at most."""
    if not ceilings:
        return "The ceilings of this machine were not measured."
    work = work_from(ceilings)
    products = ", ".join(
        f"{_operations(rate)} ({name})" for name, rate in ceilings["flops_per_s"].items()
    )
    return (
        f"One image costs {work.flops / 1e6:.2f} million operations "
        f"({work.forward_flops / 1e6:.2f} forward, {work.backward_flops / 1e6:.2f} backward) and "
        f"moves {show_bytes(work.eager_bytes)}, or at least {show_bytes(work.fused_bytes)} with "
        f"fused kernels; each step moves {show_bytes(work.eager_bytes_step)} besides. Measured at "
        f"most: {products} in a large matrix product, and "
        f"{show_bandwidth(ceilings['bytes_per_s'])} in a large copy."
    )


def _operations(per_s: float) -> str:
    """Write operations per second in the unit a reader expects."""
    return f"{per_s / 1e12:,.1f} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:,.1f} GFLOP/s"


def preparation(rows: Sequence[Row]) -> str:
    """Say which rung took longest to prepare: what compiling and capturing costs once."""
    known = [row for row in rows if row.prepare_s is not None]
    if not known:
        return "How long the rungs took to prepare was not recorded."
    longest = max(known, key=lambda row: row.prepare_s or 0)
    return (
        f"Preparing is paid once and is not in these speeds. It took longest for {longest.rung} at "
        f"batch {longest.batch_size:,}: {show_seconds(longest.prepare_s)}."
    )


def _by_size(rows: Sequence[Row], show: Any) -> pd.DataFrame:
    """Lay rows out with a line per rung and a column per batch size."""
    lines = []
    for name in dict.fromkeys(row.rung for row in rows):
        line = {"rung": name}
        for size in sizes_of(rows):
            row = rung_at(rows, name, size)
            line[f"batch {size:,}"] = NOT_AVAILABLE if row is None else show(row)
        lines.append(line)
    return pd.DataFrame(lines, columns=["rung", *(f"batch {size:,}" for size in sizes_of(rows))])


def _rate(row: Row) -> str:
    return NOT_AVAILABLE if row.images_per_s is None else f"{row.images_per_s:,.0f}"


def _mark(row: Row) -> str:
    return " (differs)" if row.same_loss is False else ""


def _over(row: Row, other: Row) -> float | None:
    if not row.images_per_s or not other.images_per_s:
        return None
    return row.images_per_s / other.images_per_s


def _base(rows: Sequence[Row], name: str) -> str:
    return next(str(row.base) for row in rows if row.rung == name)
