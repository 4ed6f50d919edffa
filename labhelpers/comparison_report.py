"""Say how runs compare with a baseline: `summary.md`, a figure, and the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from labhelpers import plots
from labhelpers.comparability import differences, disturbed, ended, measured_sweep, samples
from labhelpers.comparison import Change, Limits, SizeChange, compare_sizes, is_worse
from labhelpers.distributed_records import swept
from labhelpers.files import writable, write_atomically
from labhelpers.formats import NOT_AVAILABLE, show_bytes, show_rate, show_share
from labhelpers.inputs import InputError
from labhelpers.references import Curve, curve_of
from labhelpers.store import RunDirectory
from labhelpers.summary import environment_lines, markdown_table

EXIT_DONE, EXIT_WORSE, EXIT_NOT_COMPARABLE = 0, 1, 4


@dataclass(frozen=True)
class Verdict:
    """What came of one run: `rows` if it was compared, else what `differs`.

    `disturbed` trials of both runs were left out: other programs used the CPU.
    """

    run: RunDirectory
    rows: tuple[SizeChange, ...] = ()
    differs: tuple[str, ...] = ()
    disturbed: int = 0

    @property
    def exit_code(self) -> int:
        """Return 0 for no worse, 1 for worse, 4 for not comparable."""
        if self.differs:
            return EXIT_NOT_COMPARABLE
        return EXIT_WORSE if is_worse(self.rows) else EXIT_DONE


def judge(baseline: RunDirectory, run: RunDirectory, limits: Limits) -> Verdict:
    """Compare a run with a baseline if their conditions are alike.

    Raises:
        InputError: one of them holds no measured sweep.
    """
    before, now = measured_sweep(baseline), measured_sweep(run)
    differs, busy = differences(baseline, run), disturbed([*before, *now])
    if not differs and not set(samples(before)[0]) & set(samples(now)[0]):
        why = "while other programs left the CPU alone" if busy else "in both"
        differs = [f"batch sizes: no size was measured {why}"]
    if differs:
        return Verdict(run, differs=tuple(differs), disturbed=busy)
    known = ended(before)
    failed = {size: how for size, how in ended(now).items() if size not in known}
    try:
        rows = compare_sizes(samples(before), samples(now), limits, failed)
    except InputError as error:
        return Verdict(run, differs=(str(error),), disturbed=busy)
    return Verdict(run, rows=tuple(rows), disturbed=busy)


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
    if any(verdict.differs for verdict in verdicts):
        lines += ["## Side by side", "", markdown_table(side_by_side(curves)), ""]
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
    busy = f" Left out as disturbed by other programs on the CPU: {verdict.disturbed} trials."
    busy = busy if verdict.disturbed else ""
    if verdict.differs:
        return f"**Not comparable.** {'; '.join(verdict.differs)}.{busy}"
    worse = [f"batch {r.batch_size:,}: {', '.join(r.worse)}" for r in verdict.rows if r.worse]
    missing = [f"{r.batch_size:,}" for r in verdict.rows if r.speed is None and not r.failed]
    left_out = f" Not measured in this run: batch {', '.join(missing)}." if missing else ""
    if worse:
        return f"**Worse.** {'; '.join(worse)}.{left_out}{busy}"
    return f"**No batch size got worse.**{left_out}{busy}"


def sensitivity(rows: Sequence[SizeChange]) -> str:
    """Say from what slowdown on this comparison could see one, given the spread of both runs."""
    allowed = {row.batch_size: row.speed.allowed - 1 for row in rows if row.speed is not None}
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
            "verdict": ", ".join(row.worse) or ("ok" if row.speed else "not measured"),
        }
        for row in rows
    )  # fmt: skip


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
