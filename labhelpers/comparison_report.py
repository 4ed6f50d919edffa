"""Say how runs compare with a baseline: `summary.md`, a figure, and the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from labhelpers import plots
from labhelpers.comparability import (
    LeftOut,
    differences,
    explained,
    left_out,
    measured_sweep,
    newly_failed,
    samples,
    tried_sweep,
)
from labhelpers.comparison import Change, Limits, SizeChange, compare_sizes, is_worse
from labhelpers.distributed_records import swept
from labhelpers.files import writable, write_atomically
from labhelpers.formats import NOT_AVAILABLE, show_bytes, show_rate, show_share
from labhelpers.inputs import InputError
from labhelpers.records import Trial
from labhelpers.references import Curve, curve_of
from labhelpers.store import RunDirectory
from labhelpers.summary import environment_lines, markdown_table

EXIT_DONE, EXIT_WORSE, EXIT_NOT_COMPARABLE = 0, 1, 4
_ONE_LEFT = (
    "no batch size has more than one undisturbed trial, so a change cannot be told from noise"
)


WITH_DISTURBED = "Side by side, the disturbed trials count too: that judges nothing."


@dataclass(frozen=True)
class Verdict:
    """What came of one run: `rows` if it was compared, else what `differs`.

    `left_out` counts trials of both runs that other programs on the CPU disturbed. `unjudged`
    says why only failures could be compared; "" if speed could be too.
    """

    run: RunDirectory
    rows: tuple[SizeChange, ...] = ()
    differs: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    unjudged: str = ""

    @property
    def exit_code(self) -> int:
        """Return 0 for no worse, 1 for worse, 4 for not comparable."""
        if self.differs:
            return EXIT_NOT_COMPARABLE
        return EXIT_WORSE if is_worse(self.rows) else EXIT_DONE

    @property
    def again(self) -> tuple[str, ...]:
        """Name the runs to measure again: most of their trials were left out."""
        return tuple(each.name for each in self.left_out if each.most)


def judge(baseline: RunDirectory, run: RunDirectory, limits: Limits) -> Verdict:
    """Compare a run with a baseline if their conditions are alike.

    Raises:
        InputError: the baseline holds no measured sweep or the run none at all, or one of them
            holds a trial without a speed.
    """
    before, now = measured_sweep(baseline), tried_sweep(run)
    verdict = Verdict(run, left_out=left_out((baseline, before), (run, now)))
    differs = differences(baseline, run)
    if not (differs or newly_failed(before, now) or samples(before)[0].keys() & samples(now)[0]):
        why = "while other programs left the CPU alone" if verdict.left_out else "in both"
        differs = [f"batch sizes: no size was measured {why}"]
    if differs:
        return replace(verdict, differs=tuple(differs))
    return _judged(verdict, before, now, limits)


def _judged(
    verdict: Verdict, before: Sequence[Trial], now: Sequence[Trial], limits: Limits
) -> Verdict:
    """Compare size by size; where noise is unknown, failures alone."""
    failed, unjudged = newly_failed(before, now), ""
    try:
        rows = compare_sizes(samples(before), samples(now), limits, failed)
    except InputError as error:
        unjudged = _ONE_LEFT if verdict.left_out else str(error)
        if not failed:
            return replace(verdict, differs=(unjudged,))
        rows = compare_sizes(({}, {}), ({}, {}), limits, failed)
    return replace(verdict, rows=explained(rows, before, now), unjudged=unjudged)


def exit_code_of(verdicts: Sequence[Verdict]) -> int:
    """Return 1 if any run got worse, else 4 if any could not be compared, else 0."""
    codes = {verdict.exit_code for verdict in verdicts}
    return next((code for code in (EXIT_WORSE, EXIT_NOT_COMPARABLE) if code in codes), EXIT_DONE)


def write_comparison(
    baseline: RunDirectory, verdicts: Sequence[Verdict], limits: Limits, folder: Path
) -> list[Path]:
    """Write `summary.md` and `comparison.png` into a folder and return their paths.

    Raises:
        InputError: the folder cannot be written.
    """
    curves = named_curves([baseline, *(verdict.run for verdict in verdicts)])
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lines = comparison_lines(baseline, verdicts, limits, curves)
        write_atomically(folder / "summary.md", "\n".join(lines))
        figure = plots.sheet("Beside the baseline", [plots.throughput, plots.memory], curves)
        plots.save_figure(figure, folder / "comparison.png")
    return [folder / "summary.md", folder / "comparison.png"]


def named_curves(runs: Sequence[RunDirectory]) -> list[Curve]:
    """Return the curves of runs, each named after its device and directory; first the baseline.

    The first run after it is drawn solid, all others dashed.
    """
    curves = []
    for number, run in enumerate(runs):
        curve = curve_of(run, reference=number != 1, trials=swept(run))
        if curve is not None:
            role = "baseline" if number == 0 else run.path.resolve().name
            curves.append(replace(curve, label=f"{curve.device} ({role})"))
    return curves


def comparison_lines(
    baseline: RunDirectory, verdicts: Sequence[Verdict], limits: Limits, curves: Sequence[Curve]
) -> list[str]:
    """Return the summary: what got worse, and why it is thought so; or what differs."""
    lines = ["# Comparison with the baseline", "", f"Baseline: {named(baseline)}", ""]
    for verdict in verdicts:
        lines += [f"## {named(verdict.run)}", "", headline(verdict), ""]
        if verdict.rows:
            lines += [markdown_table(change_table(verdict.rows)), "", sensitivity(verdict.rows), ""]
    if any(verdict.differs or verdict.again for verdict in verdicts):
        lines += ["## Side by side", "", markdown_table(side_by_side(curves)), ""]
    if any(verdict.again for verdict in verdicts):
        lines += [WITH_DISTURBED, ""]
    lines += [
        f"Allowed: {show_share(limits.max_slowdown)} more time per image and "
        f"{show_share(limits.max_memory)} more memory, and what the spread of both runs explains. "
        "The best repeat of each size is compared; the median must be past the margin too.", "",
        *environment_lines(verdicts[-1].run),
    ]  # fmt: skip
    return lines


def named(run: RunDirectory) -> str:
    """Name a run by its directory and time."""
    return f"{run.path.resolve().name} ({run.info.created_at})"


def headline(verdict: Verdict) -> str:
    """Say the result in one line: what got worse, that nothing did, or what differs."""
    busy = _said_of_disturbed(verdict)
    if verdict.differs:
        return f"**Not comparable.** {'; '.join(verdict.differs)}.{busy}"
    gaps = f"{_said_of_gaps(verdict)}{busy}"
    worse = [f"batch {r.batch_size:,}: {', '.join(r.worse)}" for r in verdict.rows if r.worse]
    if worse:
        return f"**Worse.** {'; '.join(worse)}.{gaps}"
    known = any(row.memory is not None for row in verdict.rows)
    return f"**No batch size got {'worse' if known else 'slower'}.**{gaps}"


def _said_of_gaps(verdict: Verdict) -> str:
    """Say which sizes were not compared, wholly or in their memory, and why."""
    rows = verdict.rows
    text = f" Only failures were compared: {verdict.unjudged}." if verdict.unjudged else ""
    if missing := [row for row in rows if row.gap == "not measured"]:
        text += f" Not measured in this run: {_batches(missing)}."
    if disturbed := [row for row in rows if row.gap == "disturbed"]:
        text += f" Not compared, as no undisturbed trial is left: {_batches(disturbed)}."
    reasons = dict.fromkeys(row.memory_gap for row in rows if row.memory_gap)
    gaps = [f"{_batches(r for r in rows if r.memory_gap == why)} ({why})" for why in reasons]
    return text + (f" Memory was not compared: {'; '.join(gaps)}." if gaps else "")


def _batches(rows: Iterable[SizeChange]) -> str:
    return f"batch {', '.join(f'{row.batch_size:,}' for row in rows)}"


def _said_of_disturbed(verdict: Verdict) -> str:
    """Say how many trials of which run were left out, and what to do if most were."""
    counts = [
        f"{each.disturbed} of {each.measured} trials of {each.name} "
        f"({each.measured - each.disturbed} left)"
        for each in verdict.left_out
    ]
    if not counts:
        return ""
    text = f" Left out as disturbed by other programs on the CPU: {'; '.join(counts)}."
    again = " and ".join(verdict.again)
    return text + (f" Measure {again} again on a quiet machine." if again else "")


def terminal_table(baseline: RunDirectory, verdict: Verdict) -> str:
    """Return both runs side by side as text if most trials of one were left out, else ""."""
    if not verdict.again:
        return ""
    table = side_by_side(named_curves([baseline, verdict.run]))
    return f"{table.to_string(index=False)}\n{WITH_DISTURBED}"


def sensitivity(rows: Sequence[SizeChange]) -> str:
    """Say from what slowdown on this comparison could see one, given the spread of both runs."""
    allowed = {row.batch_size: row.speed.allowed - 1 for row in rows if row.speed is not None}
    if not allowed:
        return "The speed of no batch size could be compared."
    least, most = (choose(allowed, key=lambda size: allowed[size]) for choose in (min, max))
    return (
        f"With the spread of these runs a slowdown counts from {show_share(allowed[least])} (batch "
        f"{least:,}) to {show_share(allowed[most])} (batch {most:,}); more repeats, or a feed that "
        "the host does not slow, see smaller ones."
    )


def change_table(rows: Sequence[SizeChange]) -> pd.DataFrame:
    """Return one row a batch size, as text."""
    return pd.DataFrame(
        {
            "batch": f"{row.batch_size:,}",
            "baseline": _rate(row.speed, new=False), "run": _rate(row.speed, new=True),
            "time per image": _percent(row.speed), "best": _best(row.speed),
            "allowed": _allowed(row.speed),
            "baseline memory": _bytes(row.memory, new=False),
            "run memory": _bytes(row.memory, new=True), "memory": _percent(row.memory),
            "allowed memory": _allowed(row.memory),
            "verdict": _told(row),
        }
        for row in rows
    )  # fmt: skip


def _told(row: SizeChange) -> str:
    memory = "memory not compared" if row.memory_gap else ""
    words = (", ".join(row.worse) or row.gap or "ok", memory)
    return ", ".join(word for word in words if word)


def side_by_side(curves: Sequence[Curve]) -> pd.DataFrame:
    """Return images/s and peak memory of several curves, one row a batch size, as text."""
    sizes = sorted({int(size) for curve in curves for size in curve.table["batch_size"]})
    columns: dict[str, list[str]] = {"batch": [f"{size:,}" for size in sizes]}
    for curve in curves:
        table = curve.table.set_index("batch_size").reindex(sizes)
        columns[f"{curve.label}, images/s"] = _texts(table["images_per_s"], "{:,.0f}")
        columns[f"{curve.label}, MiB"] = _texts(table["allocated_mib"], "{:,.1f}")
    return pd.DataFrame(columns)


def _texts(values: pd.Series[float], form: str) -> list[str]:
    return [NOT_AVAILABLE if pd.isna(value) else form.format(value) for value in values]


def _rate(change: Change | None, *, new: bool) -> str:
    return (
        NOT_AVAILABLE if change is None else show_rate(1 / (change.new if new else change.baseline))
    )


def _bytes(change: Change | None, *, new: bool) -> str:
    return show_bytes(None if change is None else change.new if new else change.baseline)


def _percent(change: Change | None) -> str:
    return NOT_AVAILABLE if change is None else f"{change.median_ratio - 1:+.1%}"


def _best(change: Change | None) -> str:
    return NOT_AVAILABLE if change is None else f"{change.best_ratio - 1:+.1%}"


def _allowed(change: Change | None) -> str:
    return NOT_AVAILABLE if change is None else f"{change.allowed - 1:+.1%}"
