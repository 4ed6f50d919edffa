"""What the report's sections are made of, whose results they show, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from labhelpers.notebooks import say, show_figure, show_table
from labhelpers.references import is_committed, reference_runs
from labhelpers.store import RunDirectory


@dataclass(frozen=True)
class TablePiece:
    """A table of a section, with its caption."""

    frame: pd.DataFrame
    caption: str


@dataclass(frozen=True)
class FigurePiece:
    """A figure of a section, with its alternative text."""

    figure: Figure
    alt: str


Piece = str | TablePiece | FigurePiece
"""What a section shows: Markdown, a table or a figure."""


def show_section(pieces: Sequence[Piece]) -> None:
    """Show a section in a notebook."""
    for piece in pieces:
        if isinstance(piece, str):
            say(piece)
        elif isinstance(piece, TablePiece):
            show_table(piece.frame, piece.caption)
        else:
            show_figure(piece.figure, piece.alt)


def source_of(run: RunDirectory, kind: str) -> RunDirectory | None:
    """Return the run to take a section from: this one, else a committed one; None if none has it.

    `kind` is that of its trials; at least one must have been measured.
    """
    candidates = [run, *reference_runs().values()]
    return next((each for each in candidates if _has(each, kind)), None)


def origin(run: RunDirectory, source: RunDirectory | None, notebook: str) -> str:
    """Say whether a section was measured in this run, and link the notebook that measures it."""
    link = f"[Notebook {notebook.partition('_')[0]}]({notebook}.ipynb)"
    if source is None:
        return f"*Not run here, nor in a committed run. {link} measures it.*"
    device = device_of(source)
    if not is_committed(source):
        return f"*Measured in this run, on {device}. {link} has the details.*"
    whose = f"these are the committed results of the {device}. {link} measures yours.*"
    if source.path.resolve() == run.path.resolve():
        return f"*As above, {whose}"
    return f"*Not run here: {whose}"


def device_of(run: RunDirectory) -> str:
    """Name the device a run was measured on."""
    return str(run.environment().get("device_name", "unknown device"))


def _has(run: RunDirectory, kind: str) -> bool:
    return any(trial.outcome == "ok" for trial in run.trials(kind))
