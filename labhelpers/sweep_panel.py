"""What the sweep's panel measures and shows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from labhelpers.formats import show_seconds
from labhelpers.forms import FEED, PRECISION, Field, device_field
from labhelpers.inputs import InputError
from labhelpers.panel import Measurement, Source
from labhelpers.planning import due, estimate_s, plan, resolved
from labhelpers.plots import memory, sheet, throughput
from labhelpers.records import SweepSpec, Trial
from labhelpers.references import curve_of, reference_curves, reference_runs
from labhelpers.store import RunDirectory, find_runs, open_run
from labhelpers.sweep import matching, run_sweep, trials_of
from labhelpers.sweep_checks import check_request
from labhelpers.tables import SPEED, median_rates, readable, sweep_table

_TABLE = (*SPEED[:6], "allocated_mib", "updates")


def sources_of(kind: str, run: RunDirectory) -> list[Source]:
    """Return what the time of a measurement can be estimated from, the nearest first.

    This run, the newest earlier run with trials of that kind, and the committed runs.
    """
    found: list[Source] = [("as fast as in this run", run.trials(kind))]
    for path in reversed(find_runs(run.path.parent)):
        earlier = [] if path.resolve() == run.path.resolve() else _readable_trials(path, kind)
        if earlier:
            found.append(("as fast as your run before", earlier))
            break
    for name, committed in reference_runs().items():
        found.append((f"if this machine were as fast as {name.upper()}", committed.trials(kind)))
    return found


def _readable_trials(path: Path, kind: str) -> list[Trial]:
    """Return a run's trials; none where it is damaged: an estimate can do without it."""
    with suppress(InputError):
        return open_run(path).trials(kind)
    return []


def sweep_fields() -> tuple[Field, ...]:
    """Return the entries of the sweep's panel."""
    return (
        Field("batch_sizes", "Batch sizes", sizes=True),
        Field("repeats", "Repeats"),
        Field("images", "Images"),
        FEED,
        PRECISION,
        device_field(),
    )


def sweep_estimate(spec: SweepSpec, sources: Sequence[Source]) -> str:
    """Say how many trials a filled request has, and how long they take."""
    planned = plan(spec)
    trials = f"{len(planned)} trials" if len(planned) != 1 else "1 trial"
    trials = f"at least {trials}" if spec.repeats == "auto" else trials
    kind = spec.device.partition(":")[0]
    for whose, known in sources:
        same = [t for t in matching(known, spec) if t.device.partition(":")[0] == kind]
        rates = median_rates(same)
        seconds = {size: [(spec.images or 0) / rate] for size, rate in rates.items()}
        estimated = estimate_s(planned, seconds)
        if estimated is not None:
            return f"{trials}, about {show_seconds(estimated)} ({whose})"
    return f"{trials}; how long they take is known after the first"


def sweep_unfinished(run: RunDirectory) -> bool:
    """Tell whether a run holds a sweep that was asked for and not finished."""
    asked = run.info.specs.get("sweep")
    if not asked:
        return False
    spec = SweepSpec(**asked)
    return bool(due(spec, {(t.batch_size, t.repeat): t for t in trials_of(run)}))


def sweep_figure(run: RunDirectory) -> Figure:
    """Draw speed and memory of what is measured so far beside the reference curves."""
    own = curve_of(run)
    curves = [*([own] if own else []), *reference_curves(leave_out=run.path)]
    return sheet("Speed and memory, trial by trial", [throughput, memory], curves)


def sweep_rows(run: RunDirectory) -> pd.DataFrame:
    """Return the table of what is measured so far, as text."""
    table = sweep_table(trials_of(run))
    shown = readable(table, _TABLE)
    shown.insert(1, "measured", [f"{count}×" for count in table["repeats"]])
    return shown


SWEEP = Measurement(
    name="sweep",
    fields=sweep_fields,
    filled=resolved,
    check=check_request,
    runner=run_sweep,
    unfinished=sweep_unfinished,
    estimate=sweep_estimate,
    sources=lambda run: sources_of("sweep", run),
    figure=sweep_figure,
    table=sweep_rows,
)
