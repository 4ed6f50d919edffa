"""The explorer: sliders over saved results, the recommended batch in words; measures nothing."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets
from IPython.display import display
from matplotlib.figure import Figure

from labhelpers.formats import GIB, MIB, show_bytes
from labhelpers.plots import sheet, throughput, throughput_against_memory
from labhelpers.recommendation import Recommendation, in_words, recommend
from labhelpers.references import Curve
from labhelpers.widgets import display_widget, in_frontend, show_in

NO_LIMIT = 0
BUDGETS_BYTES = (NO_LIMIT, *(64 * MIB * 2**power for power in range(12)))
"""No limit, then 64 MiB to 128 GiB."""
EFFECTIVE_BATCHES = (NO_LIMIT, *(2**power for power in range(5, 17)))
_ALT = "The chosen curves, recommended batches starred"
_HOW_TO_SLIDE = "(In JupyterLab, run this cell to get the sliders.)"
_STAR = "#d0021b"


def show_explorer(curves: Sequence[Curve], share: float) -> None:
    """Show sliders over curves; without anybody to click, the answer at the given share."""
    if in_frontend():
        Explorer(curves, share).show()
        return
    found = {curve.label: recommend(curve, share) for curve in curves}
    said = [*(in_words(found[c.label], c) for c in curves), _HOW_TO_SLIDE]
    text = "".join(f"<p>{as_html(each)}</p>" for each in said)
    plain = "\n".join(each.replace("**", "") for each in said)
    display({"text/html": text, "text/plain": plain}, raw=True)


class Explorer:
    """Checkboxes for runs, sliders for share, memory budget and effective batch."""

    def __init__(self, curves: Sequence[Curve], share: float) -> None:
        self._curves = list(curves)
        self._chosen = [
            ipywidgets.Checkbox(True, description=c.label, indent=False) for c in curves
        ]
        style = {"description_width": "13em"}
        layout = ipywidgets.Layout(width="36em", max_width="100%")
        self._share = ipywidgets.FloatSlider(
            share, min=0.5, max=1.0, step=0.01, readout_format=".0%", style=style, layout=layout,
            description="Share of the best speed", continuous_update=False,
        )  # fmt: skip
        self._budget = ipywidgets.SelectionSlider(
            options=[(_budget_name(value), value) for value in BUDGETS_BYTES], style=style,
            description="Memory budget", continuous_update=False, layout=layout,
        )  # fmt: skip
        self._effective = ipywidgets.SelectionSlider(
            options=[(_effective_name(value), value) for value in EFFECTIVE_BATCHES], style=style,
            description="Effective batch", continuous_update=False,
            layout=layout,
        )  # fmt: skip
        self._words = ipywidgets.HTML(layout=ipywidgets.Layout(width="100%"))
        for control in (*self._chosen, self._share, self._budget, self._effective):
            control.observe(self._on_change, names="value")

    def show(self) -> None:
        """Display the sliders, the words, and a figure that follows them."""
        flow = ipywidgets.Layout(display="flex", flex_flow="row wrap")
        rows = [
            ipywidgets.Box(self._chosen, layout=flow), self._share, self._budget, self._effective,
            self._words,
        ]  # fmt: skip
        display_widget(ipywidgets.VBox(rows).add_class("labhelpers-explorer"))
        self._figure = display({"text/plain": ""}, raw=True, display_id=True)
        self._on_change(None)

    def _on_change(self, _: Any) -> None:
        marked = [box.value for box in self._chosen]
        curves = [curve for curve, on in zip(self._curves, marked, strict=True) if on]
        # A selection slider takes no None.
        limits = (self._budget.value or None, self._effective.value or None)
        found = {c.label: recommend(c, self._share.value, *limits) for c in curves}
        words = [as_html(in_words(found[curve.label], curve)) for curve in curves]
        told = "".join(f'<p style="line-height:1.5">{text}</p>' for text in words)
        self._words.value = told or "Choose a run."
        if curves:
            show_in(self._figure, explorer_figure(curves, found), _ALT)
        else:
            self._figure.update({"text/plain": "no run is chosen"}, raw=True)


def explorer_figure(curves: Sequence[Curve], found: Mapping[str, Recommendation]) -> Figure:
    """Draw speed against batch size and memory, each recommended batch with a star."""
    title = "Recommended batches (stars)"
    figure = sheet(title, [throughput, throughput_against_memory], curves)
    for curve in curves:
        chosen = found[curve.label]
        row = curve.table[curve.table["batch_size"] == chosen.batch_size]
        for axes, column in zip(figure.axes, ("batch_size", "allocated_mib"), strict=True):
            axes.scatter(row[column], row["images_per_s"], marker="*", s=150, color=_STAR, zorder=5)
    return figure


def as_html(markdown: str) -> str:
    """Turn a sentence with **bold** parts into HTML."""
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(markdown))


def _budget_name(value: int) -> str:
    if value == NO_LIMIT:
        return "no limit"
    return f"{value // GIB} GiB" if value >= GIB else show_bytes(value).replace(".0", "")


def _effective_name(value: int) -> str:
    return "as the batch" if value == NO_LIMIT else f"{value:,}"
