"""The live panel: entries, Run, Stop, Resume, progress, a figure that grows, a table that fills.

Callbacks come on any thread, and so do the measurement's reports; nothing here waits.
"""

from __future__ import annotations

import base64
import html
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ipywidgets
from IPython.display import display
from matplotlib.figure import Figure

from labhelpers.forms import Field, likely_device, preset, remark_on, text_of
from labhelpers.inputs import InputError
from labhelpers.notebooks import WIDTH_PER_INCH
from labhelpers.panel import (
    Measurement,
    Panel,
    failures_told,
    notes_told,
    share_done,
    status,
)
from labhelpers.plots import png_bytes
from labhelpers.records import Spec
from labhelpers.sessions import Session
from labhelpers.store import RunDirectory
from labhelpers.worker import Worker

REDRAW_S = 1.0
"""The figure is drawn at most so often: drawing takes time from the next trial."""
_FRONTENDS = ("JPY_SESSION_NAME", "VSCODE_PID")
_ALT = "What is measured so far, beside references"


def in_frontend() -> bool:
    """Tell whether somebody can click: the kernel was started by JupyterLab or VS Code."""
    return any(name in os.environ for name in _FRONTENDS)


def show_panel(
    kind: Measurement, spec: Spec, run: RunDirectory, worker: Worker | None = None
) -> Panel:
    """Show the panel for a kind of measurement, and return what is behind it.

    Nothing waits for it: run from top to bottom, the notebook measures its parameters. Without
    anybody to click (papermill, nbval, export) a sentence stands in its place. `worker` is the
    notebook's own, where it keeps one: a second would take memory from the device.
    """
    if worker is not None:
        kind = replace(kind, runner=partial(kind.runner, worker=worker))
    panel = Panel(kind, spec, run)
    if in_frontend():
        PanelView(panel).show()
    else:
        print("The panel is shown in JupyterLab; here the parameters above are measured.")
    return panel


class PanelView:
    """The widgets of one panel; `show` displays them with a figure and a table below."""

    def __init__(self, panel: Panel) -> None:
        self.panel = panel
        self._drawn_at = 0.0
        self._device = likely_device()
        self._fields = {field.name: field for field in panel.kind.fields()}
        self._defaults = panel.texts(self._device)
        self._entries = {f.name: _entry(f, self._defaults[f.name]) for f in self._fields.values()}
        self._remarks = {name: ipywidgets.HTML() for name in self._fields}
        self._estimate = ipywidgets.HTML()
        self._run = _button("Run", "success", "Measure what the entries ask for", self._on_run)
        self._stop = _button("Stop", "danger", "Keep what is finished, end the rest", self._on_stop)
        self._resume = _button("Resume", "info", "Go on where it stopped", self._on_resume)
        self._bar = ipywidgets.FloatProgress(min=0, max=1, layout=ipywidgets.Layout(width="14em"))
        self._status, self._said = ipywidgets.HTML(), ipywidgets.HTML()
        for entry in self._entries.values():
            entry.observe(self._on_edit, names="value")

    def show(self) -> None:
        """Display the panel, its figure and its table, and watch the measurement."""
        display_widget(self._layout())
        self._figure = display({"text/plain": ""}, raw=True, display_id=True)
        self._table = display({"text/plain": ""}, raw=True, display_id=True)
        self._on_edit(None)
        self._draw()
        if self.panel.session is not None:
            self.panel.session.watcher = self._update
        self._update_now()

    def _layout(self) -> ipywidgets.VBox:
        rows: list[Any] = []
        for field in self._fields.values():
            if field.sizes:
                rows.append(self._sizes_row(field))
        small = [self._cell(field) for field in self._fields.values() if not field.sizes]
        flow = ipywidgets.Layout(display="flex", flex_flow="row wrap", align_items="flex-start")
        buttons = [self._run, self._stop, self._resume, self._bar, self._status]
        rows += [ipywidgets.Box(small, layout=flow), self._estimate]
        rows += [ipywidgets.Box(buttons, layout=flow), self._said]
        return ipywidgets.VBox(rows, layout=ipywidgets.Layout(width="100%")).add_class(
            "labhelpers-panel"
        )

    def _cell(self, field: Field) -> ipywidgets.VBox:
        return ipywidgets.VBox([self._entries[field.name], self._remarks[field.name]])

    def _sizes_row(self, field: Field) -> ipywidgets.VBox:
        up_to = ipywidgets.Text("2048", layout=ipywidgets.Layout(width="6em"))
        up_to.tooltip = "largest size of 'powers of two up to'"

        def fill(name: str) -> Callable[[Any], None]:
            return lambda _: self._on_preset(field.name, name, up_to.value)

        buttons = [
            _button("article", "", "The first article's nine sizes", fill("article")),
            _button("small", "", "For a first look", fill("small")),
            _button("powers of two up to", "", "8, 16, 32, … up to the size at the right",
                    fill("powers of two"), "13em"),
        ]  # fmt: skip
        presets = ipywidgets.HBox([ipywidgets.Label("Presets"), *buttons, up_to])
        return ipywidgets.VBox([self._cell(field), presets], layout=ipywidgets.Layout(width="100%"))

    # What the reader does

    def _texts(self) -> dict[str, str]:
        return {name: str(entry.value) for name, entry in self._entries.items()}

    def _on_preset(self, field: str, name: str, up_to: str) -> None:
        try:
            self._entries[field].value = text_of(preset(name, up_to))
        except InputError as error:
            self._remarks[field].value = _red(str(error))

    def _on_edit(self, change: Any) -> None:
        if change is not None and change["owner"] is self._entries.get("device"):
            self._suit_device(change["new"])
        texts = self._texts()
        reasons = self.panel.reasons(texts)
        for name, remark in self._remarks.items():
            soft = "" if name in reasons else remark_on(self._fields[name], texts[name])
            remark.value = _red(reasons.get(name, "")) or _soft(soft)
        whole = _red(reasons.get("", ""))
        self._estimate.value = whole or _soft(self.panel.estimate(texts, self._device))
        self._enable(not reasons)

    def _suit_device(self, device: str) -> None:
        """Give entries that still hold their default the one that suits the chosen device."""
        new = self.panel.texts(likely_device() if device == "auto" else device)
        for name, text in new.items():
            if name != "device" and self._entries[name].value == self._defaults[name]:
                self._entries[name].value = text
        self._defaults = new

    def _on_run(self, _: Any) -> None:
        self._try(lambda: self.panel.start(self._texts(), self._update))

    def _on_resume(self, _: Any) -> None:
        self._try(lambda: self.panel.resume(self._update))

    def _try(self, begin: Callable[[], None]) -> None:
        try:
            begin()
        except (InputError, OSError) as error:
            self._said.value = _red(str(error))
        else:
            self._update_now()

    def _on_stop(self, _: Any) -> None:
        self.panel.stop()

    # What the measurement reports

    def _update_now(self) -> None:
        if self.panel.session is not None:
            self._update(self.panel.session)

    def _update(self, session: Session) -> None:
        """Show where the measurement stands; called after every change, on any thread."""
        ended = not session.active
        if ended:
            self.panel.refresh()
            self._on_edit(None)
        else:
            self._enable(True)
        self._bar.value = share_done(session)
        words = status(session)
        self._status.value = _red(words) if session.state == "failed" else html.escape(words)
        trial_came = session.progress is not None and session.progress.trial is not None
        if ended or (trial_came and time.monotonic() - self._drawn_at > REDRAW_S):
            self._draw()

    def _enable(self, valid: bool) -> None:
        self._run.disabled = self.panel.active or not valid
        self._stop.disabled = not self.panel.active
        self._resume.disabled = not self.panel.can_resume

    def _draw(self) -> None:
        run, kind = self.panel.run, self.panel.kind
        notes = [_soft(line) for line in notes_told(self.panel)]
        self._said.value = "".join([*notes, *map(_red, failures_told(self.panel))])
        show_in(self._figure, kind.figure(run), _ALT)
        table = kind.table(run)
        text = table.to_html(index=False, border=0, justify="right") if len(table) else ""
        plain = table.to_string(index=False) if len(table) else ""
        self._table.update({"text/html": text, "text/plain": plain}, raw=True)
        self._drawn_at = time.monotonic()


def _entry(field: Field, text: str) -> Any:
    label = {"description": field.label, "style": {"description_width": "7em"}}
    if field.choices:
        # A parameter may hold what is not listed, such as 'cuda', or the feed of a workload's own.
        options = field.choices if text in field.choices else (*field.choices, text)
        return ipywidgets.Dropdown(
            options=options, value=text, layout=ipywidgets.Layout(width="14em"), **label
        )
    width = "47em" if field.sizes else "32em" if field.wide else "13em"
    layout = ipywidgets.Layout(width=width, max_width="100%")
    return ipywidgets.Text(text, placeholder=field.hint, layout=layout, **label)


def _button(
    text: str, style: str, help_text: str, clicked: Callable[[Any], None], width: str = "6em"
) -> ipywidgets.Button:
    button = ipywidgets.Button(
        description=text, button_style=style, tooltip=help_text,
        layout=ipywidgets.Layout(width=width),
    )  # fmt: skip
    button.on_click(clicked)
    return button


def show_in(handle: Any, figure: Figure, alt: str) -> None:
    """Show a figure in an output that is there already, at half its pixels, as a plain PNG."""
    png = base64.b64encode(png_bytes(figure)).decode()
    about = {"width": figure.get_figwidth() * WIDTH_PER_INCH, "alt": alt}
    shown = {"image/png": png, "text/plain": alt}
    handle.update(shown, raw=True, metadata={"image/png": about})


def display_widget(widget: ipywidgets.Widget) -> None:
    """Display a widget with a sentence for a page that cannot show it (a saved notebook)."""
    plain = "Run this cell in JupyterLab to get the panel."
    bundle = {
        "application/vnd.jupyter.widget-view+json": {
            "version_major": 2, "version_minor": 0, "model_id": widget.model_id,
        },
        "text/html": f"<i>{plain}</i>", "text/plain": plain,
    }  # fmt: skip
    display(bundle, raw=True)


def _red(text: str) -> str:
    return f'<div style="color:#b3152f;line-height:1.4">{html.escape(text)}</div>' if text else ""


def _soft(text: str) -> str:
    return f'<div style="color:#5b6875;line-height:1.4">{html.escape(text)}</div>' if text else ""
