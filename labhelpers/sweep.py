"""Trials over batch sizes in the article's order, resumable, one worker for all."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labhelpers.environment import environment_id
from labhelpers.inputs import StartError
from labhelpers.planning import (
    Planned,
    due,
    estimate_s,
    measured,
    notes_of,
    plan,
    resolved,
)
from labhelpers.records import Spec, SweepSpec, Trial
from labhelpers.store import RunDirectory
from labhelpers.sweep_checks import check_before, check_same_request
from labhelpers.worker import Answer, Worker, worker_at_hand

if TYPE_CHECKING:
    from labhelpers.workloads import Workload

__all__ = [
    "PREPARE_TIMEOUT_S", "Measure", "Planned", "Progress", "estimate_s", "failure_facts",
    "failures", "matching", "notes_of", "plan", "resolved", "run_sweep", "start_device",
    "training", "trials_of",
]  # fmt: skip

PREPARE_TIMEOUT_S = 300.0

_FIXED = ("images", "seed", "learning_rate", "synthetic", "device")


@dataclass(frozen=True)
class Measure:
    """What runs in the worker: module-level functions with JSON-able arguments and values.

    `prepare(device, require_gpu)` gives the facts of the environment, `trial(spec, batch_size,
    repeat, position)` one trial, `profile(spec, batch_size)` what the device did in a few
    untimed steps (None: nothing is profiled).
    """

    prepare: Callable[[str, bool], dict[str, Any]]
    trial: Callable[[dict[str, Any], int, int, int], dict[str, Any]]
    profile: Callable[[dict[str, Any], int], dict[str, Any]] | None = None


def training(workload: Workload | None = None) -> Measure:
    """Return what measures the training of a workload; this loads torch.

    Give a `Workload` that was made here, for example in a notebook cell; None takes the one
    that the spec names.
    """
    from labhelpers.profiling import measure_limits
    from labhelpers.trials import measure_sweep_trial, prepare_training

    trial = functools.partial(measure_sweep_trial, workload=workload)
    profile = functools.partial(measure_limits, workload=workload)
    return Measure(prepare_training, trial, profile)


@dataclass
class Progress:
    """How far a sweep is; handed to `on_progress` after every trial and when it begins."""

    total: int
    done: int
    current: Planned | None
    trial: Trial | None = None
    remaining_s: float | None = None
    worker_start_s: float = 0.0
    notes: tuple[str, ...] = field(default=())


def run_sweep(
    spec: SweepSpec, run: RunDirectory, *, worker: Worker | None = None,
    on_progress: Callable[[Progress], None] | None = None, stop: threading.Event | None = None,
    measure: Measure | None = None, name: str = "sweep",
) -> list[Trial]:  # fmt: skip
    """Measure every trial of `spec` that `run` does not hold yet, and return all of them.

    Each finished trial is on disk before the next begins. A crash, kill, time limit or OOM is
    the outcome of its trial; the next trial runs. What limits each size is found out after all
    trials, in a few untimed steps. `name` is how the run keeps the request: what is not named
    `sweep` stands beside the run's own sweep and does not take its place.

    Raises:
        InputError: bad input, before anything is measured.
        Stopped: `stop` was set; finished trials are kept and the run can be resumed.
    """
    check_before(spec)
    with worker_at_hand(worker) as hired, run.writing():
        measure = measure or training()
        sweep = _Sweep(spec, run, hired, measure, on_progress or (lambda _: None), stop, name)
        return sweep.measure()


class _Sweep:
    """One sweep while it runs: what was asked, where it goes, and what is finished."""

    def __init__(
        self, spec: SweepSpec, run: RunDirectory, worker: Worker, measure: Measure,
        on_progress: Callable[[Progress], None], stop: threading.Event | None, name: str,
    ) -> None:  # fmt: skip
        facts = start_device(spec, worker, stop, measure.prepare)
        self._spec = _prepared(spec, run, facts, name)
        self._run, self._worker, self._stop, self._name = run, worker, stop, name
        self._measure, self._on_progress = measure, on_progress
        known = matching(run.trials("sweep"), self._spec)
        self._finished = {(t.batch_size, t.repeat): _without_steps(t) for t in known}
        self._known = set(self._finished)
        self._seconds: dict[int, list[float]] = {}

    def measure(self) -> list[Trial]:
        """Measure trial after trial, then what limits each size; note what all of it took."""
        started, profiled = time.perf_counter(), False
        try:
            while waiting := due(self._spec, self._finished):
                for number in range(len(waiting)):
                    self._one(waiting[number:])
            profiled = self._profile()
        finally:
            # On a full disk the trial that could not be kept is what is worth saying.
            with suppress(OSError):
                self._note_timing(time.perf_counter() - started)
        if profiled:
            # A profiler that was once started may slow down what its process launches later.
            self._worker.restart()
        whole = matching(self._run.trials("sweep"), self._spec)
        return measured(self._spec, {(trial.batch_size, trial.repeat): trial for trial in whole})

    def _one(self, waiting: list[Planned]) -> None:
        """Measure the first of the waiting trials, keep it on disk and tell the progress."""
        planned, done = waiting[0], len(self._finished)
        progress = Progress(
            done + len(waiting), done, planned, notes=notes_of(self._spec),
            remaining_s=estimate_s(waiting, self._seconds), worker_start_s=self._worker.start_s,
        )  # fmt: skip
        self._on_progress(progress)
        trial, wall_s = _measured(self._spec, planned, self._worker, self._stop, self._measure)
        self._run.append(trial)
        self._finished[planned.batch_size, planned.repeat] = _without_steps(trial)
        self._seconds.setdefault(planned.batch_size, []).append(wall_s)
        progress.trial, progress.done = trial, done + 1
        progress.remaining_s = estimate_s(waiting[1:], self._seconds)
        self._on_progress(progress)

    def _profile(self) -> bool:
        """Profile a few steps of each size that ran, after all timed trials; tell if any was.

        A profiler that fails costs a note only.
        """
        profile, spec = self._measure.profile, self._spec
        if profile is None or not spec.limits or spec.device == "cpu":
            return False
        known = {trial.batch_size for trial in matching(self._run.trials("limits"), spec)}
        ran = {size for (size, _), trial in self._finished.items() if trial.outcome == "ok"}
        waiting = sorted(ran & set(spec.batch_sizes or ()) - known)
        for size in waiting:
            answer = self._worker.run(
                profile, spec.model_dump(mode="json"), size,
                timeout_s=spec.trial_timeout_s, stop=self._stop,
            )  # fmt: skip
            if answer.outcome == "ok":
                self._run.append(Trial(**answer.value))
            else:
                self._run.note(f"batch {size:,} could not be profiled: {answer.error_text}")
        return bool(waiting)

    def _note_timing(self, wall_s: float) -> None:
        new = [trial for key, trial in self._finished.items() if key not in self._known]
        epochs_s = sum(trial.epoch_s or 0.0 for trial in new)
        if new:
            self._run.note_timing(self._name, wall_s=wall_s, epochs_s=epochs_s, trials=len(new))


def _without_steps(trial: Trial) -> Trial:
    """Leave the step times on disk: of hundreds of trials they would fill the memory."""
    return trial.model_copy(update={"step_times_s": None})


def start_device(
    spec: Spec, worker: Worker, stop: threading.Event | None,
    prepare: Callable[[str, bool], dict[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Start the worker and the device that is asked for; return the facts of the environment.

    Raises:
        InputError: the device does not exist here, or a GPU is required and there is none.
        StartError: it cannot be started.
    """
    answer = worker.run(
        prepare or training().prepare, spec.device, spec.require_gpu,
        timeout_s=PREPARE_TIMEOUT_S, stop=stop,
    )  # fmt: skip
    if answer.outcome != "ok":
        raise StartError(f"the device cannot be started: {answer.error_text}")
    facts: dict[str, Any] = answer.value
    return facts


def _prepared(spec: SweepSpec, run: RunDirectory, facts: dict[str, Any], name: str) -> SweepSpec:
    """Resolve the spec for the device that was started, and keep both in `run.json`."""
    spec = resolved(spec, facts["device"])
    for other, asked in run.info.specs.items():
        same_trials = other.partition(":")[0] == "sweep" and _kin(SweepSpec(**asked), spec)
        if other == name or same_trials:
            check_same_request(run, spec, "sweep", _FIXED, name=other)
    run.note_environment(environment_id(facts), facts)
    run.note_spec(name, spec)
    run.note(*notes_of(spec))
    return spec


def _measured(
    spec: SweepSpec, planned: Planned, worker: Worker, stop: threading.Event | None,
    measure: Measure,
) -> tuple[Trial, float]:  # fmt: skip
    asked = spec.model_dump(mode="json")
    answer = worker.run(
        measure.trial, asked, planned.batch_size, planned.repeat, planned.position,
        timeout_s=spec.trial_timeout_s, stop=stop,
    )  # fmt: skip
    if answer.outcome == "ok":
        return Trial(**answer.value), answer.wall_s
    failed = Trial(
        kind="sweep", workload=spec.workload, batch_size=planned.batch_size,
        repeat=planned.repeat, position=planned.position, feed=spec.feed,
        precision=spec.precision, device=spec.device, synthetic=spec.synthetic,
        **failure_facts(answer),
    )  # fmt: skip
    return failed, answer.wall_s


def failure_facts(answer: Answer) -> dict[str, Any]:
    """Return what a trial keeps of a call that gave no value: outcome, error, OOM fields."""
    from labhelpers.oom_message import parse_oom_message

    message = parse_oom_message(answer.error_text or "")
    return {
        "outcome": answer.outcome, "error_class": answer.error_class,
        "error_text": answer.error_text, "oom": message.to_dict() if message else None,
    }  # fmt: skip


def matching(trials: Iterable[Trial], spec: SweepSpec) -> list[Trial]:
    """Keep the trials that a resolved spec asks for: same workload, feed and precision."""
    return [trial for trial in trials if _kin(trial, spec)]


def _kin(one: Trial | SweepSpec, other: Trial | SweepSpec) -> bool:
    """Tell whether two belong to the same set of trials."""
    names = ("workload", "feed", "precision")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def trials_of(run: RunDirectory, *, kind: str = "sweep", name: str = "sweep") -> list[Trial]:
    """Return the sweep that a run was last asked for (a run may hold several precisions).

    `kind="limits"` gives its profiled steps; `name` is the request's, as `run_sweep` took it.
    """
    asked = run.info.specs.get(name)
    trials = run.trials(kind)
    return matching(trials, SweepSpec(**asked)) if asked else trials


def failures(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials that failed; an OOM, or an end that was looked for, is a result."""
    return [t for t in trials if t.outcome not in ("ok", "oom") and not t.found_its_limit]
