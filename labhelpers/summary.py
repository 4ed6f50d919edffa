"""`summary.md`: what a pull request comment or a job summary should show of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from labhelpers import narrative
from labhelpers.files import write_atomically
from labhelpers.progress import describe_failure
from labhelpers.records import SweepSpec, Trial
from labhelpers.references import article_curve, curve_of
from labhelpers.report import NotebookResult
from labhelpers.store import RunDirectory
from labhelpers.tables import readable

_COLUMNS = ["batch", "images/s", "of best", "spread", "step ms", "allocated MiB", "updates/epoch"]


def write_summary(run: RunDirectory, results: Sequence[NotebookResult] = ()) -> Path:
    """Write `summary.md` into the run directory; return its path."""
    write_atomically(run.path / "summary.md", "\n".join(summary_lines(run, results)))
    return run.path / "summary.md"


def answer_of(run: RunDirectory) -> str:
    """Return the recommended batch of a run in one sentence; "" if it holds no sweep."""
    curve = curve_of(run)
    return narrative.answer(curve, _share_of(run)).replace("**", "") if curve else ""


def _share_of(run: RunDirectory) -> float:
    return SweepSpec(**run.info.specs.get("sweep", {})).share


def summary_lines(run: RunDirectory, results: Sequence[NotebookResult]) -> list[str]:
    """Return the lines of the summary: answer, table, what failed, where it was measured."""
    lines = ["# Batch size report", ""]
    curve = curve_of(run)
    if curve is not None:
        share = _share_of(run)
        lines += [narrative.answer(curve, share), "", narrative.knife_edge(curve, share), ""]
        cautious = narrative.caution(curve, share)
        lines += [cautious, ""] if cautious else []
        lines += [markdown_table(readable(curve.table)[_COLUMNS]), ""]
        lines += [f"For comparison: {narrative.answer(article_curve(), share)}", ""]
    lines += [line for note in run.info.notes for line in (f"> {note}", "")]
    lines += failure_lines(run.trials(), results)
    return [*lines, *environment_lines(run)]


def failure_lines(trials: Sequence[Trial], results: Sequence[NotebookResult]) -> list[str]:
    """List trials and notebooks that did not end well; nothing if all did."""
    news = [t for t in trials if t.outcome != "ok" and not t.found_its_limit]
    lines = [f"- {describe_failure(trial)}" for trial in news]
    lines += [f"- {r.name}: exit {r.exit_code}: {r.why}" for r in results if r.exit_code]
    return ["## Not measured", "", *lines, ""] if lines else []


def environment_lines(run: RunDirectory) -> list[str]:
    """Return the machine and versions as a short list."""
    facts = run.environment()
    packages = facts.get("packages", {})
    return [
        "## Measured on",
        "",
        f"- device: {facts.get('device_name', 'unknown')} ({facts.get('device', 'unknown')})",
        f"- torch {packages.get('torch')}, CUDA {facts.get('cuda')}, driver {facts.get('driver')}",
        f"- {facts.get('system')} {facts.get('kernel')}" + (", WSL2" if facts.get("wsl2") else ""),
        f"- CPU: {facts.get('cpu')}, {facts.get('cpu_count')} usable, "
        f"{facts.get('torch_threads')} torch threads",
    ]


def markdown_table(table: pd.DataFrame) -> str:
    """Return a table of text as Markdown, right-aligned."""
    head = f"| {' | '.join(table.columns)} |"
    line = f"|{'|'.join('---:' for _ in table.columns)}|"
    rows = [f"| {' | '.join(row)} |" for row in table.itertuples(index=False)]
    return "\n".join([head, line, *rows])
