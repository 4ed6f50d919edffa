"""What limits each batch size, as a figure, a table and advice in words."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from labhelpers.formats import show_share
from labhelpers.limits import LimitVerdict, limits_of
from labhelpers.plots import new_figure
from labhelpers.store import RunDirectory
from labhelpers.sweep import trials_of

_PARTS = {
    "feed": ("waiting for images", "#c2541b", ""),
    "launch": ("launching", "#e0a93a", "//"),
    "memory": ("asking for memory again", "#7a4fa3", "xx"),
    "compute": ("computing", "#0b5cad", ""),
}
_UNKNOWN = ("launching or computing: not told apart", "#c9ccd1", "..")
_ON_CPU = "computing (on the CPU launching is a part of it)"
Verdicts = Mapping[int, LimitVerdict]


def limits_in(run: RunDirectory, name: str = "sweep") -> dict[int, LimitVerdict]:
    """Judge what limits each batch size of a run's sweep; `{}` if it has none measured."""
    return limits_of(trials_of(run, name=name), trials_of(run, kind="limits", name=name))


def limit_figure(verdicts: Verdicts, title: str) -> Figure:
    """Stack the shares of the epoch against batch size, with the verdict above each bar."""
    figure = new_figure((7.2, 3.9))
    axes = figure.subplots()
    places, bottoms = range(len(verdicts)), [0.0] * len(verdicts)
    for (label, colour, hatch), heights in _stacks(verdicts).items():
        axes.bar(
            places, heights, bottom=bottoms, label=label, color=colour, hatch=hatch,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, found in zip(places, verdicts.values(), strict=True):
        axes.annotate(found.verdict, (place, 1.01), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(list(places), [f"{size:,}" for size in verdicts], rotation=40)
    axes.set_ylim(0, 1.08)
    axes.set_xlabel("batch size (images)")
    axes.set_ylabel("share of the epoch")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title(title, fontsize=11)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _stacks(verdicts: Verdicts) -> dict[tuple[str, str, str], list[float]]:
    """Return the heights of each part over the batch sizes, without parts that never occur."""
    on_cpu = any(found.shares.on_cpu for found in verdicts.values())
    stacks = {}
    for name, part in _PARTS.items():
        label = _ON_CPU if name == "compute" and on_cpu else part[0]
        heights = [found.shares.known().get(name, 0.0) for found in verdicts.values()]
        stacks[label, part[1], part[2]] = heights
    stacks[_UNKNOWN] = [
        1 - sum(found.shares.known().values()) if found.shares.compute is None else 0.0
        for found in verdicts.values()
    ]
    return {part: heights for part, heights in stacks.items() if any(heights)}


def limit_table(verdicts: Verdicts) -> pd.DataFrame:
    """Return one row per batch size: the verdict and the shares that it was read from, as text."""
    again = any(found.shares.memory for found in verdicts.values())
    parts = {name: part[0] for name, part in _PARTS.items() if name != "memory" or again}
    rows = []
    for size, found in verdicts.items():
        row = {"batch": f"{size:,}", "limited by": found.verdict}
        for name, label in parts.items():
            row[label] = show_share(getattr(found.shares, name), 0)
        rows.append(row)
    return pd.DataFrame(rows, columns=["batch", "limited by", *parts.values()])


def limit_advice(verdicts: Verdicts) -> str:
    """Say for each stretch of batch sizes with one verdict why, and what to do: a list."""
    if not verdicts:
        return "This run holds no measured sweep, so there is nothing to judge."
    lines = []
    for _, stretch in itertools.groupby(verdicts.items(), key=lambda item: item[1].verdict):
        members = list(stretch)
        lines.append(f"- {_stretch(members[0][0], members[-1][0])} {_told(members)}")
    if not any(found.shares.on_cpu or found.shares.compute for found in verdicts.values()):
        lines.append(
            "- No profiled steps are in this run, or the profiler returned no kernels: only the "
            "wait for images is known."
        )
    return "\n".join(lines)


def _stretch(first: int, last: int) -> str:
    return f"**Batch {first:,}**" if first == last else f"**Batch {first:,} to {last:,}**"


def _told(members: list[tuple[int, LimitVerdict]]) -> str:
    """Say one verdict, with the evidence of its first size and its advice."""
    found = members[0][1]
    limit = "undecided" if found.verdict == "undecided" else f"limited by **{found.verdict}**"
    where = f" (at {members[0][0]:,})" if len(members) > 1 else ""
    return f"{limit}: {'; '.join(found.evidence)}{where}. Advice: {found.advice}."
