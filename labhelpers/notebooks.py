"""What the notebooks call: read the parameters, find the run, show figures and text."""

from __future__ import annotations

import ast
import difflib
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from IPython import get_ipython
from IPython.core.interactiveshell import ExecutionResult
from IPython.display import HTML, Image, Markdown, display
from matplotlib.figure import Figure

from labhelpers.formats import show_seconds
from labhelpers.inputs import InputError
from labhelpers.plots import png_bytes, save_figure
from labhelpers.records import Spec, ask
from labhelpers.references import Curve, curve_of, reference_curves, reference_runs
from labhelpers.store import RunDirectory, find_runs, new_run_path, open_run
from labhelpers.sweep import Progress

RUN_VARIABLE = "LABHELPERS_RUN_DIR"
"""Environment variable that names the run directory where a notebook's `run_dir` is empty."""

WIDTH_PER_INCH = 80
"""Points on the page for an inch of a figure: about half its pixels, so that it is sharp."""

_INJECTED = "# Parameters"
_OWN_NAMES = ("run_dir", "results_dir")

S = TypeVar("S", bound=Spec)


def read_parameters(spec: type[S], namespace: Mapping[str, Any]) -> S:
    """Build the spec from a notebook's variables, whoever set them: cell, papermill, widget.

    Args:
        spec: the kind of request, such as `SweepSpec`.
        namespace: the notebook's `globals()`.

    Raises:
        InputError: a bad value, or a name that is no parameter (with the nearest right one).
    """
    known = set(spec.model_fields) | set(_OWN_NAMES)
    for name in _suspects(namespace):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        injected = name in _injected_names(namespace)
        if name not in known and (injected or near):
            near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(
                f"unknown parameter {name!r}{hint} (allowed: {', '.join(sorted(known))})"
            )
    return ask(spec, {name: namespace[name] for name in spec.model_fields if name in namespace})


def _suspects(namespace: Mapping[str, Any]) -> list[str]:
    """List names that hold plain values: what a person or papermill may have set."""
    plain = (str, int, float, bool, list, tuple, dict, types.NoneType)
    shell = ("In", "Out")
    names = [name for name in namespace if not name.startswith("_") and name not in shell]
    return [name for name in names if isinstance(namespace[name], plain)]


def _injected_names(namespace: Mapping[str, Any]) -> set[str]:
    """Return the names that papermill's injected cell assigned, from the cell history."""
    names: set[str] = set()
    for source in namespace.get("In", []):
        if source.startswith(_INJECTED):
            targets = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Assign)]
            names |= {t.id for n in targets for t in n.targets if isinstance(t, ast.Name)}
    return names


def run_for_measuring(
    run_dir: str, *, results_dir: str = "../results", fresh: bool, synthetic: bool = False
) -> RunDirectory:
    """Return the run directory that a notebook writes to.

    A named `run_dir` is opened, or made if it is not there. Left empty, it is
    LABHELPERS_RUN_DIR if that is set, else a new run (`fresh`) or the newest there is.
    """
    named = run_dir or os.environ.get(RUN_VARIABLE, "")
    if named:
        path = Path(named)
        holds_run = (path / "run.json").exists()
        return open_run(path) if holds_run else RunDirectory.create(path, synthetic=synthetic)
    runs = find_runs(results_dir)
    if runs and not fresh:
        return open_run(runs[-1])
    return RunDirectory.create(new_run_path(results_dir), synthetic=synthetic)


def run_for_report(
    run_dir: str, *, results_dir: str = "../results"
) -> tuple[RunDirectory, Curve, list[Curve]]:
    """Return the run that the report is about, its curve, and all curves to draw.

    It is the named run, or the newest own one that holds a sweep, or a committed reference.

    Raises:
        InputError: a run was named that is not there, or there is no sweep anywhere.
    """
    named = run_dir or os.environ.get(RUN_VARIABLE, "")
    candidates = [Path(named)] if named else find_runs(results_dir)[::-1]
    for path in candidates:
        own = curve_of(open_run(path))
        if own is not None:
            return open_run(path), own, [own, *reference_curves(leave_out=path)]
    for run in reference_runs().values():
        curve = curve_of(run)
        if curve is not None and not named:
            return run, curve, [curve, *reference_curves(leave_out=run.path)]
    raise InputError(f"{named or results_dir} holds no measured sweep; run notebook 01 first")


def show_figure(figure: Figure, alt: str, save_as: Path | None = None) -> None:
    """Show a figure as PNG with an alternative text, and keep it as a file if asked."""
    if save_as is not None:
        save_figure(figure, save_as)
    display(
        Image(
            data=png_bytes(figure),
            format="png",
            alt=alt,
            width=figure.get_figwidth() * WIDTH_PER_INCH,
        )
    )


def show_table(table: pd.DataFrame, caption: str = "") -> None:
    """Show a table without an index, numbers right-aligned, as HTML and as text."""
    html = table.to_html(index=False, border=0, justify="right", classes="labhelpers")
    head = f"<p><b>{caption}</b></p>" if caption else ""
    plain = f"{caption}\n{table.to_string(index=False)}".strip()
    display({"text/html": head + html, "text/plain": plain}, raw=True)


def say(text: str) -> None:
    """Show a sentence whose numbers come from results, as Markdown."""
    display(Markdown(text))


class ChangingLine:
    """A line under a cell that changes while the cell works, and ends as plain text."""

    def __init__(self, first: str) -> None:
        self._handle = display(HTML(first), display_id=True)
        self._changed = False
        if (shell := get_ipython()) is not None:
            shell.events.register("post_run_cell", self._cell_ended)

    def change(self, line: str) -> None:
        """Show another text in its place."""
        self._changed = True
        self._handle.update(HTML(line))

    def _cell_ended(self, result: ExecutionResult) -> None:
        """Do not leave the first words behind a cell that had nothing to measure."""
        if (shell := get_ipython()) is not None:
            shell.events.unregister("post_run_cell", self._cell_ended)
        if result.success and not self._changed:
            self.change("nothing was left to measure: the run holds it")


class NotebookProgress:
    """Show a sweep's progress in one line that changes."""

    def __init__(self) -> None:
        self._line = ChangingLine("starting the worker …")

    def __call__(self, progress: Progress) -> None:
        left = progress.remaining_s
        time_left = f", about {show_seconds(left)} left" if left else ""
        current = f", batch {progress.current.batch_size:,}" if progress.current else ""
        if progress.current and progress.current.variant:
            current += f", {progress.current.variant}"
        line = f"{progress.done} of {progress.total} trials done{current}{time_left}"
        if progress.done == progress.total:
            line = f"{progress.total} of {progress.total} trials done"
        self._line.change(line)
