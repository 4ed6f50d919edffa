"""The report's sections that other notebooks measured: own results, or committed ones instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from labhelpers import cliffs, oom_narrative, probe_narrative
from labhelpers.notebooks import say, show_figure, show_table
from labhelpers.oom_check import check_oom_message
from labhelpers.probe import probe_trials_of, why_it_stopped
from labhelpers.probe_curves import ProbeCurve, article_probe, h200_probe, probe_of
from labhelpers.probe_plots import card_share, probe_sheet, speed
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
    device = source.environment().get("device_name", source.path.name)
    if not is_committed(source):
        return f"*Measured in this run, on {device}. {link} has the details.*"
    whose = f"these are the committed results of the {device}. {link} measures yours.*"
    if source.path.resolve() == run.path.resolve():
        return f"*As above, {whose}"
    return f"*Not run here: {whose}"


def past_the_card(run: RunDirectory) -> list[Piece]:
    """Tell the probe past the card: two recorded cliffs, one's own curve, and the verdict."""
    source = source_of(run, "probe")
    article, h200 = article_probe(), h200_probe()
    own = probe_of(source, reference=is_committed(source)) if source is not None else None
    pieces: list[Piece] = [cliffs.two_cliffs(article, h200), _cliff_figure(own, [article, h200])]
    pieces.append(origin(run, source, "02_wsl2_oversubscription"))
    if own is not None and source is not None:
        stop = why_it_stopped(probe_trials_of(source))
        pieces += [cliffs.cliff(own), probe_narrative.stopped(stop, own)]
        pieces.append(probe_narrative.safe_batch(own))
    return pieces


def out_of_memory(run: RunDirectory) -> list[Piece]:
    """Tell the controlled error: what fitted, what failed, what the message said, recovery."""
    source = source_of(run, "cap")
    pieces: list[Piece] = [origin(run, source, "03_oom_recovery")]
    if source is None:
        table = oom_narrative.article_cap_table()
        return [*pieces, TablePiece(table, "Growing batches under a cap: RTX 5070 Ti (article)")]
    trials = source.trials("cap")
    device = source.environment().get("device_name", "unknown device")
    pieces.append(
        TablePiece(oom_narrative.cap_table(trials), f"Growing batches under a cap: {device}")
    )
    pieces += [oom_narrative.cap_answer(trials), oom_narrative.recovery_answer(trials)]
    told = oom_narrative.message_of(trials)
    if told is not None:
        message, observed, platform = told
        disagreements = check_oom_message(message, observed)
        pieces.append(oom_narrative.message_answer(message, disagreements, platform))
    return pieces


def _cliff_figure(own: ProbeCurve | None, recorded: Sequence[ProbeCurve]) -> FigurePiece:
    curves = [*([own] if own is not None else []), *recorded]
    names = ", ".join(curve.label for curve in curves)
    return FigurePiece(
        probe_sheet("Past the card", [speed, card_share], curves),
        f"Images per second and the share of the card reserved, against batch size: {names}",
    )


def _has(run: RunDirectory, kind: str) -> bool:
    return any(trial.outcome == "ok" for trial in run.trials(kind))
