"""The panel behind the widgets: what is asked, what runs, which buttons work, what is said."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from labhelpers.formats import show_seconds
from labhelpers.forms import Field, blamed, reason_against, spec_from, text_of
from labhelpers.inputs import InputError
from labhelpers.progress import describe_failure
from labhelpers.records import Spec, Trial
from labhelpers.sessions import Runner, Session, session_of
from labhelpers.store import RunDirectory, new_run_path

Source = tuple[str, Sequence[Trial]]
"""Trials that an estimate may rest on, and whose they are, in words."""


@dataclass(frozen=True)
class Measurement:
    """What a panel can measure: its request, what runs it, and how its results look.

    Args:
        name: the kind of its trials, and the request's name in `run.json`.
        fields: the entries to show; called, because devices are looked up.
        filled: a request with what was left open filled in, for a device.
        check: raises InputError for a request that cannot go well.
        unfinished: whether a run holds such a measurement that was interrupted.
        estimate: the time that a filled request takes, in words, from earlier trials.
        figure: what a run holds so far; it must use matplotlib's Figure, never pyplot.
        table: what a run holds so far, as text.
    """

    name: str
    fields: Callable[[], tuple[Field, ...]]
    filled: Callable[[Any, str], Spec]
    check: Callable[[Any], None]
    runner: Runner
    unfinished: Callable[[RunDirectory], bool]
    estimate: Callable[[Any, Sequence[Source]], str]
    sources: Callable[[RunDirectory], list[Source]]
    figure: Callable[[RunDirectory], Figure]
    table: Callable[[RunDirectory], pd.DataFrame]


class Panel:
    """One panel of a notebook: `run` and `spec` are what it last measured, or would measure.

    Made again for the same run, or while its measurement goes on, it takes that up.
    """

    def __init__(self, kind: Measurement, spec: Spec, run: RunDirectory) -> None:
        self.kind, self.spec, self.run, self._origin = kind, spec, run, run
        self.session = session_of(kind.name, run)
        if self.session is not None:
            self.spec, self.run = self.session.spec, self.session.run
        elif kind.name in run.info.specs and run.trials(kind.name):
            self.spec = type(spec)(**run.info.specs[kind.name])
        self.sources = kind.sources(self.run)

    @property
    def active(self) -> bool:
        """Tell whether it is measuring."""
        return self.session is not None and self.session.active

    @property
    def can_resume(self) -> bool:
        """Tell whether an interrupted measurement is there to go on with."""
        # Stopped while the worker was starting, nothing is on disk yet.
        stopped = self.session is not None and self.session.state == "stopped"
        return not self.active and (stopped or self.kind.unfinished(self.run))

    def texts(self, device: str) -> dict[str, str]:
        """Return what the entries hold at first, with what suits a device filled in."""
        filled = self.kind.filled(self.spec, device)
        shown = {field.name: getattr(filled, field.name) for field in self.kind.fields()}
        if "device" in shown:
            shown["device"] = self.spec.device
        return {name: text_of(value) for name, value in shown.items()}

    def reasons(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return why entries are refused, by field; `""` is the whole; nothing if all is well."""
        found = {name: reason_against(self.spec, name, text) for name, text in texts.items()}
        found = {name: reason for name, reason in found.items() if reason}
        if not found:
            try:
                self.kind.check(spec_from(self.spec, texts))
            except InputError as error:
                name, reason = blamed(str(error), texts)
                found[name] = reason
        return found

    def estimate(self, texts: Mapping[str, str], device: str) -> str:
        """Say how much there is to measure and how long it takes; empty for a bad entry."""
        if self.reasons(texts):
            return ""
        asked = spec_from(self.spec, texts)
        device = device if asked.device == "auto" else asked.device
        return self.kind.estimate(self.kind.filled(asked, device), self.sources)

    def start(self, texts: Mapping[str, str], watcher: Callable[[Session], None]) -> None:
        """Measure what the entries ask for, in a new run directory if this one is used.

        Raises:
            InputError: a bad entry, a directory that cannot be made, or the notebook measures.
        """
        spec = spec_from(self.spec, texts)
        self.kind.check(spec)
        self._refuse_second()
        if self.run.trials(self.kind.name):
            path = new_run_path(self.run.path.parent)
            self.run = RunDirectory.create(path, synthetic=spec.synthetic)
        self._begin(spec, watcher)

    def resume(self, watcher: Callable[[Session], None]) -> None:
        """Go on with the interrupted measurement, as it was asked; InputError as for `start`."""
        self._refuse_second()
        self._begin(self.spec, watcher)

    def _refuse_second(self) -> None:
        """Refuse to measure beside a cell of this notebook: they would disturb each other."""
        if self.active or self.run.being_written or self._origin.being_written:
            raise InputError("this notebook is measuring already; wait for it, or interrupt it")

    def _begin(self, spec: Spec, watcher: Callable[[Session], None]) -> None:
        self.spec = spec
        self.session = Session(self.kind.name, self.run, spec, self.kind.runner, self._origin)
        self.session.watcher = watcher
        self.session.start()

    def stop(self) -> None:
        """Stop measuring; finished trials are kept."""
        if self.session is not None:
            self.session.stop()

    def chosen(self) -> tuple[Any, RunDirectory]:
        """Return the request and the run that the cells below go on with.

        It is the notebook's parameters, until the panel has measured something else. Where a
        person sits before the panel, the cells below wait for its Run: measuring here would
        keep the kernel busy, and the panel from being used.

        Raises:
            InputError: the panel is still measuring, or waits to be used.
        """
        if self.active:
            raise InputError(
                "the panel above is still measuring; wait for it or press Stop, then run this "
                "cell again"
            )
        if self.session is None and not self.run.trials(self.kind.name) and someone_is_there():
            raise InputError(
                "nothing is measured yet: press Run in the panel above; when it is done, run this "
                "cell and those below it"
            )
        return self.spec, self.run

    def refresh(self) -> None:
        """Look up again what an estimate can rest on."""
        self.sources = self.kind.sources(self.run)


def someone_is_there() -> bool:
    """Tell whether this cell was run from a frontend with a person, not headlessly.

    A frontend says with each cell whether it could ask its user something; papermill, nbclient
    and nbval say no.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return bool(getattr(getattr(shell, "kernel", None), "_allow_stdin", False))


def status(session: Session) -> str:
    """Say in one line where a measurement stands."""
    progress = session.progress
    done = f"{progress.done} of {progress.total} trials done" if progress else ""
    if session.state == "running":
        return _going_on(session, done)
    words = {
        "ready": "",
        "stopping": "stopping …",
        "stopped": f"stopped; {done or 'nothing was measured'}, and kept. Resume goes on.",
        "done": f"done: {done}, results in {session.run.path}",
        "failed": f"ended: {session.message}",
    }
    return words[session.state]


def _going_on(session: Session, done: str) -> str:
    progress = session.progress
    if progress is None:
        return "starting the worker (it loads torch) …"
    current = progress.current if progress.trial is None else None
    now = f"now batch {current.batch_size:,}" if current else ""
    left = progress.remaining_s
    time_left = f"about {show_seconds(left)} left" if left else ""
    return " · ".join(part for part in (done, now, time_left, session.message) if part)


def share_done(session: Session) -> float:
    """Return how much of a measurement is done, from 0 to 1."""
    progress = session.progress
    return progress.done / progress.total if progress and progress.total else 0.0


def failures_told(panel: Panel) -> list[str]:
    """Say of each trial that failed how it ended."""
    found = panel.run.trials(panel.kind.name)
    return [describe_failure(trial) for trial in found if trial.outcome != "ok"]


def notes_told(panel: Panel) -> tuple[str, ...]:
    """Return what a reader should know of the request, in sentences."""
    return panel.session.progress.notes if panel.session and panel.session.progress else ()
