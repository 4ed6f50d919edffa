"""What the panel of the probe past the card measures and shows."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from labhelpers.environment import check_device_name
from labhelpers.formats import show_seconds
from labhelpers.forms import PRECISION, Field, device_field
from labhelpers.panel import Measurement, Source
from labhelpers.probe import probe_trials_of, run_probe, why_it_stopped
from labhelpers.probe import resolved as filled_probe
from labhelpers.probe_curves import probe_of, reference_probes
from labhelpers.probe_narrative import verdict_table
from labhelpers.probe_plots import own_memory, probe_sheet, speed
from labhelpers.records import ProbeSpec
from labhelpers.store import RunDirectory


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
