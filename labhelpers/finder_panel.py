"""What the panel of the search for a batch size measures and shows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import get_args

import pandas as pd
from matplotlib.figure import Figure

from labhelpers.environment import check_device_name
from labhelpers.finder import run_finder
from labhelpers.finder_narrative import probe_table
from labhelpers.finder_plots import search_sheet
from labhelpers.finder_report import BatchSizeReport, read_reports
from labhelpers.finder_search import FinderProgress
from labhelpers.formats import show_seconds
from labhelpers.forms import PRECISION, Field, device_field
from labhelpers.panel import Measurement, Source
from labhelpers.records import FinderSpec
from labhelpers.store import RunDirectory
from labhelpers.sweep import Planned, Progress
from labhelpers.worker import Worker

USUAL_PROBES = 10
"""How many probes a search usually takes: the bar's length until it is known."""

_STRATEGIES = get_args(FinderSpec.model_fields["strategy"].annotation)


def finder_fields() -> tuple[Field, ...]:
    """Return the entries of the search's panel."""
    return (
        Field("workload", "Model", wide=True, hint="module:name or file.py:name"),
        Field("input_shape", "Input", hint="3, 224, 224"),
        Field("classes", "Classes", hint="1000"),
        Field("max_batch_size", "Max. batch", hint="no limit"),
        Field("headroom", "Headroom"),
        Field("limit_bytes", "Max. bytes", hint="default"),
        Field("time_budget_s", "Max. seconds"),
        Field("strategy", "Strategy", choices=_STRATEGIES),
        PRECISION,
        device_field(),
    )


def filled_finder(spec: FinderSpec, device: str) -> FinderSpec:
    """Return the request for a device; what is left open is settled by the search itself."""
    return spec.model_copy(update={"device": device})


def check_finder(spec: FinderSpec) -> None:
    """Refuse a search that cannot go well, in one line."""
    check_device_name(spec.device)


def search_in_background(
    spec: FinderSpec, run: RunDirectory, *, worker: Worker | None = None,
    on_progress: Callable[[Progress], None] | None = None, stop: threading.Event | None = None,
) -> BatchSizeReport:  # fmt: skip
    """Search as `run_finder` does, and tell each probe as a sweep tells a trial.

    How many probes there will be is not known before the end.
    """
    tell, done = on_progress or (lambda _: None), 0

    def told(probe: FinderProgress) -> None:
        nonlocal done
        planned = Planned(probe.batch_size, 0, done)
        done += probe.trial is not None
        total = max(USUAL_PROBES, done + 1)
        tell(Progress(total, done, planned, probe.trial, worker_start_s=probe.start_s))

    report = run_finder(spec, run, worker=worker, on_progress=told, stop=stop)
    tell(Progress(done, done, None))
    return report


def finder_estimate(spec: FinderSpec, _: Sequence[Source]) -> str:
    """Say what a search takes at most."""
    return f"usually about {USUAL_PROBES} probes, at most {show_seconds(spec.time_budget_s)}"


def finder_figure(run: RunDirectory) -> Figure:
    """Draw the probes of the newest search so far, with its line and its limit."""
    reports = read_reports(run)
    if not reports:
        return Figure(figsize=(5.4, 0.4))
    return search_sheet(f"Sizes tried for {reports[-1].workload}", reports[-1:])


def finder_rows(run: RunDirectory) -> pd.DataFrame:
    """Return the probes of the newest search so far, as text."""
    reports = read_reports(run)
    return probe_table(reports[-1]) if reports else pd.DataFrame()


FINDER = Measurement(
    name="finder",
    fields=finder_fields,
    filled=filled_finder,
    check=check_finder,
    runner=search_in_background,
    # A search is short: one that was cut off by another kernel is simply asked for again.
    unfinished=lambda _: False,
    estimate=finder_estimate,
    sources=lambda _: [],
    figure=finder_figure,
    table=finder_rows,
)
