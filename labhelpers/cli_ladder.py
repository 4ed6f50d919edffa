"""`labhelpers sweep --ladder`: climb the ladder from a terminal, and print what it showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from labhelpers.store import RunDirectory

EXIT_DONE, EXIT_FAILED = 0, 1
_NOT_FOR_A_LADDER = ("feed", "order", "time_budget_s")


def climb(given: Mapping[str, Any], output: str | None) -> int:
    """Climb the ladder that the options ask for, in a new run; return the exit code.

    Raises:
        InputError: bad input, before anything is measured.
    """
    from labhelpers.ladder import check_request
    from labhelpers.records import LadderSpec, ask
    from labhelpers.store import new_run_path

    refuse_options(given)
    spec = ask(LadderSpec, given)
    check_request(spec)
    path = Path(output) if output else new_run_path("results")
    run = RunDirectory.create(path, specs={"ladder": spec})
    click.echo(f"results go to {path}", err=True)
    return _climbed(spec, run)


def climb_on(run: RunDirectory, moved: Mapping[str, Any]) -> int:
    """Go on with the ladder of a run, with some fields changed; return the exit code."""
    from labhelpers.records import LadderSpec, ask

    return _climbed(ask(LadderSpec, run.info.specs["ladder"] | dict(moved)), run)


def refuse_options(given: Mapping[str, Any]) -> None:
    """Refuse options of a sweep that mean nothing to a ladder, in one line."""
    from labhelpers.inputs import InputError

    for name in _NOT_FOR_A_LADDER:
        if name in given:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option}: goes with a sweep only; each rung has its own")


def _climbed(spec: Any, run: RunDirectory) -> int:
    from labhelpers.ladder import run_ladder
    from labhelpers.progress import TerminalProgress, describe_failure
    from labhelpers.sweep import failures

    with TerminalProgress() as progress:
        trials = run_ladder(spec, run, on_progress=progress)
    click.echo("\n".join(ladder_lines(trials, run)))
    failed = failures(trials)
    for trial in failed:
        click.echo(f"failed: {trial.variant}, {describe_failure(trial)}", err=True)
    return EXIT_FAILED if failed else EXIT_DONE


def ladder_lines(trials: Sequence[Any], run: RunDirectory) -> list[str]:
    """Return the tables and sentences of a ladder as plain text for a terminal."""
    from labhelpers import ladder_views as views
    from labhelpers.ladder import ceilings_of
    from labhelpers.ladder_table import ladder_rows
    from labhelpers.narrative import overhead

    ceilings = ceilings_of(run)
    rows = ladder_rows(trials, ceilings)
    tables = {
        "images/s (over its base)": views.speed_table(rows),
        "loss after the same images": views.loss_table(rows),
        "share of the nearest ceiling": views.ceiling_table(rows),
    }
    lines = []
    for title, table in tables.items():
        lines += [title, table.to_string(index=False), ""]
    missing = ceilings.get("missing", {})
    lines += [views.summit(rows), views.made_slower(rows), views.loss_verdict(rows)]
    lines += [views.not_here(rows, missing), overhead(run, "ladder")]
    return [line.replace("**", "").replace("`", "") for line in lines]
