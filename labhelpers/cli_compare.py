"""The command `labhelpers compare`: a gate for CI."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import click

from labhelpers.inputs import InputError, to_share


@click.command()
@click.argument("baseline")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--max-slowdown", default="5%", show_default=True, help="More time per image.")
@click.option("--max-memory", default="2%", show_default=True, help="More peak memory.")
@click.option("--output", help="Folder for the result; default comparison/ in the first run.")
def compare(
    baseline: str, runs: tuple[str, ...], max_slowdown: str, max_memory: str, output: str | None
) -> None:
    """Compare sweeps with a baseline's: exit 1 if a batch size got slower or hungrier.

    Only like is compared with like: device, driver, torch, precision, feed, and the CPU where
    it feeds the device. Runs that differ in one of them are shown side by side, with exit 4.
    """
    from labhelpers.comparison import Limits
    from labhelpers.comparison_report import (
        exit_code_of,
        headline,
        judge,
        named,
        terminal_table,
        write_comparison,
    )
    from labhelpers.store import open_run

    limits = Limits(share("--max-slowdown", max_slowdown), share("--max-memory", max_memory))
    before = open_run(baseline)
    verdicts = [judge(before, open_run(run), limits) for run in runs]
    folder = Path(output) if output else Path(runs[0]) / "comparison"
    for path in write_comparison(before, verdicts, limits, folder):
        click.echo(f"wrote {path}", err=True)
    for verdict in verdicts:
        click.echo(f"{named(verdict.run)}: {headline(verdict).replace('**', '')}")
        if table := terminal_table(before, verdict):
            click.echo(table)
    sys.exit(exit_code_of(verdicts))


def share(name: str, text: str) -> float:
    """Read a limit such as `5%` or `0.05`; InputError for anything else, `5` included."""
    percent = text.strip().endswith("%")
    with suppress(ValueError):
        value = to_share(text)
        if value >= 0 and (percent or value < 1):
            return value
    raise InputError(f"{name}: got {text!r}; must be a share from 0 on, such as 5% or 0.05")
