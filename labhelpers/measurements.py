"""What a panel can measure: the batch sweep, the probe past the card."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from labhelpers.environment import check_device_name
from labhelpers.formats import show_seconds
from labhelpers.forms import FEED, PRECISION, Field, device_field
from labhelpers.inputs import InputError
from labhelpers.panel import Measurement, Source
from labhelpers.planning import due, estimate_s, plan, resolved
from labhelpers.plots import memory, sheet, throughput
from labhelpers.probe import probe_trials_of, run_probe, why_it_stopped
from labhelpers.probe import resolved as filled_probe
from labhelpers.probe_curves import probe_of, reference_probes
from labhelpers.probe_narrative import verdict_table
from labhelpers.probe_plots import own_memory, probe_sheet, speed
from labhelpers.records import ProbeSpec, SweepSpec, Trial
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


def probe_fields() -> tuple[Field, ...]:
    """Return the entries of the probe's panel."""
    return (
        Field("probe_sizes", "Batch sizes", sizes=True),
        Field("steps", "Steps"),
        Field("warmup_steps", "Warm-up"),
        Field("memory_budget_bytes", "Max. bytes", hint="default"),
        Field("time_budget_s", "Max. seconds"),
        PRECISION,
        device_field(),
    )


def check_probe(spec: ProbeSpec) -> None:
    """Refuse a probe that cannot go well, in one line."""
    check_device_name(spec.device)


def probe_estimate(spec: ProbeSpec, _: Sequence[Source]) -> str:
    """Say how many sizes a filled request has, and what ends it."""
    count = len(spec.probe_sizes or ()) + 1
    limit = show_seconds(spec.time_budget_s)
    return f"up to {count} trials (the smallest twice), at most {limit}; a limit may end it before"


def probe_unfinished(run: RunDirectory) -> bool:
    """Tell whether a run holds a probe that was asked for and interrupted."""
    return "probe" in run.info.specs and why_it_stopped(probe_trials_of(run)) is None


def probe_figure(run: RunDirectory) -> Figure:
    """Draw speed and memory of the probe so far beside the recorded curves."""
    own = probe_of(run)
    curves = [*([own] if own else []), *reference_probes(leave_out=run.path)]
    return probe_sheet("Past the card, size by size", [speed, own_memory], curves)


def probe_rows(run: RunDirectory) -> pd.DataFrame:
    """Return the verdicts so far, as text."""
    own = probe_of(run)
    return pd.DataFrame() if own is None else verdict_table(own)


PROBE = Measurement(
    name="probe",
    fields=probe_fields,
    filled=filled_probe,
    check=check_probe,
    runner=run_probe,
    unfinished=probe_unfinished,
    estimate=probe_estimate,
    sources=lambda _: [],
    figure=probe_figure,
    table=probe_rows,
)


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
