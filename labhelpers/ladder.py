"""Climb the ladder: the same training, one change after the other, resumable, one worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labhelpers.environment import environment_id, usable_cpus
from labhelpers.inputs import InputError
from labhelpers.ladder_plan import CEILINGS, Ladder, check_rungs, ladder_for
from labhelpers.planning import Planned, estimate_s
from labhelpers.records import FASHION, TRAINING_IMAGES, LadderSpec, SweepSpec, Trial
from labhelpers.store import RunDirectory
from labhelpers.sweep import Progress, failure_facts, start_device
from labhelpers.sweep_checks import check_before as check_sweep
from labhelpers.sweep_checks import check_same_request
from labhelpers.worker import Worker, worker_at_hand

# What suits a device where nothing was asked: (batch sizes, images, most steps, repeats).
_GPU_DEFAULTS = ((32, 256, 2048, 8192), TRAINING_IMAGES, 500, 2)
_GPU_QUICK = ((32, 8192), TRAINING_IMAGES, 200, 1)
_CPU_DEFAULTS = ((32, 256), 2000, 500, 2)
_CPU_QUICK = ((32, 256), 1000, 500, 1)
_FIXED = ("images", "max_steps", "seed", "learning_rate", "synthetic", "device")


def resolved(spec: LadderSpec, device: str) -> LadderSpec:
    """Fill in what was left open, with what suits the device (`cpu` or `cuda:N`)."""
    table = {
        (True, False): _GPU_DEFAULTS, (True, True): _GPU_QUICK,
        (False, False): _CPU_DEFAULTS, (False, True): _CPU_QUICK,
    }  # fmt: skip
    sizes, images, most_steps, repeats = table[device != "cpu", spec.quick]
    return spec.model_copy(
        update={
            "device": device,
            "batch_sizes": tuple(sorted(spec.batch_sizes or sizes)),
            "images": spec.images or images,
            "max_steps": spec.max_steps or most_steps,
            "repeats": spec.repeats or repeats,
            "workers": tuple(sorted(spec.workers or default_workers(usable_cpus()))),
        }
    )


def default_workers(cpus: int) -> set[int]:
    """Return the numbers of loader workers worth trying: a quarter and half of the CPUs."""
    return {max(1, cpus // 4), max(1, cpus // 2)}


def check_request(spec: LadderSpec) -> None:
    """Refuse a ladder that cannot be climbed, in one line, before anything starts."""
    if spec.workload != FASHION:
        raise InputError(
            f"workload: got {spec.workload!r}; the ladder changes how FashionMNIST is fed and "
            "trained; for your own training use: labhelpers sweep --workload"
        )
    if spec.precision != "fp32":
        raise InputError(
            f"precision: got {spec.precision!r}; each rung has its own; choose them with rungs"
        )
    check_rungs(spec.rungs)
    same = ("device", "images", "data_dir", "synthetic", "require_gpu")
    check_sweep(SweepSpec(**{name: getattr(spec, name) for name in same}))


def run_ladder(
    spec: LadderSpec, run: RunDirectory, *, worker: Worker | None = None,
    on_progress: Callable[[Progress], None] | None = None, stop: threading.Event | None = None,
) -> list[Trial]:  # fmt: skip
    """Measure the machine's ceilings and every rung that `run` does not hold yet; return all.

    The repeats of a rung at one batch size follow one another, because preparing it (compiling,
    capturing) takes longer than its epochs. A rung that fails is an outcome; the next one runs.

    Raises:
        InputError: bad input, before anything is measured.
        Stopped: `stop` was set; finished trials are kept and the run can be resumed.
    """
    check_request(spec)
    with worker_at_hand(worker) as hired, run.writing():
        climb = _Climb(spec, run, hired, on_progress or (lambda _: None), stop)
        return climb.measure()


def ladder_trials_of(run: RunDirectory) -> list[Trial]:
    """Return the trials of a run's ladder, without that of the ceilings."""
    return [trial for trial in run.trials("ladder") if trial.variant != CEILINGS]


def ceilings_of(run: RunDirectory) -> dict[str, Any]:
    """Return what the run holds of ceilings, counted work and missing rungs; `{}` if nothing."""
    found = [trial for trial in run.trials("ladder") if trial.variant == CEILINGS]
    return dict(found[-1].details or {}) if found else {}


def plan(spec: LadderSpec, ladder: Ladder) -> list[Planned]:
    """List the trials of a resolved spec: batch size by batch size, rung by rung."""
    planned: list[Planned] = []
    for size in spec.batch_sizes or ():
        for name in ladder.setups:
            for repeat in range(spec.repeats or 0):
                planned.append(Planned(size, repeat, len(planned) + 1, name))
    return planned


def waiting(planned: Sequence[Planned], finished: Mapping[tuple[Any, ...], Trial]) -> list[Planned]:
    """Leave out what is finished, and the other repeats of a rung that failed at a size."""
    failed = {key[:2] for key, trial in finished.items() if trial.outcome != "ok"}
    return [
        p
        for p in planned
        if (p.variant, p.batch_size, p.repeat) not in finished
        and (p.variant, p.batch_size) not in failed
    ]


class _Climb:
    """One ladder while it is climbed: what was asked, where it goes, and what is finished."""

    def __init__(
        self, spec: LadderSpec, run: RunDirectory, worker: Worker,
        on_progress: Callable[[Progress], None], stop: threading.Event | None,
    ) -> None:  # fmt: skip
        facts = start_device(spec, worker, stop)
        self._spec = resolved(spec, facts["device"])
        self._ladder = ladder_for(self._spec, facts)
        check_same_request(run, self._spec, "ladder", _FIXED)
        run.note_environment(environment_id(facts), facts)
        run.note_spec("ladder", self._spec)
        self._run, self._worker, self._stop = run, worker, stop
        self._on_progress = on_progress
        self._finished = {(t.variant, t.batch_size, t.repeat): t for t in ladder_trials_of(run)}
        self._seconds: dict[int, list[float]] = {}

    def measure(self) -> list[Trial]:
        """Measure the ceilings, then trial after trial; note what all of it took."""
        started, known = time.perf_counter(), set(self._finished)
        try:
            if not ceilings_of(self._run):
                self._measure_ceilings()
            planned = plan(self._spec, self._ladder)
            while left := waiting(planned, self._finished):
                self._one(left)
        finally:
            new = [trial for key, trial in self._finished.items() if key not in known]
            self._run.note_timing(
                "ladder", wall_s=time.perf_counter() - started, trials=len(new),
                epochs_s=sum(trial.epoch_s or 0.0 for trial in new),
            )  # fmt: skip
        asked = {(p.variant, p.batch_size, p.repeat) for p in planned}
        return [trial for key, trial in self._finished.items() if key in asked]

    def _measure_ceilings(self) -> None:
        from labhelpers.ceiling_trials import measure_ceilings

        answer = self._worker.run(
            measure_ceilings, self._spec.model_dump(mode="json"),
            timeout_s=self._spec.trial_timeout_s, stop=self._stop,
        )  # fmt: skip
        if answer.outcome != "ok":
            self._run.note(f"the ceilings could not be measured: {answer.error_text}")
            return
        trial = Trial(**answer.value)
        details = {**(trial.details or {}), "missing": self._ladder.missing}
        self._run.append(trial.model_copy(update={"details": details}))

    def _one(self, left: list[Planned]) -> None:
        """Measure the first of the trials left, keep it on disk and tell the progress."""
        planned, done = left[0], len(self._finished)
        progress = Progress(
            done + len(left), done, planned, remaining_s=estimate_s(left, self._seconds),
            worker_start_s=self._worker.start_s,
        )  # fmt: skip
        self._on_progress(progress)
        trial, wall_s = self._measured(planned)
        self._run.append(trial)
        self._finished[planned.variant, planned.batch_size, planned.repeat] = trial
        self._seconds.setdefault(planned.batch_size, []).append(wall_s)
        progress.trial, progress.done = trial, done + 1
        progress.remaining_s = estimate_s(left[1:], self._seconds)
        self._on_progress(progress)

    def _measured(self, planned: Planned) -> tuple[Trial, float]:
        from labhelpers.rungs import measure_rung

        name = str(planned.variant)
        setup, base = self._ladder.setups[name], self._ladder.bases[name]
        place = (planned.batch_size, planned.repeat, planned.position)
        answer = self._worker.run(
            measure_rung, self._spec.model_dump(mode="json"), setup.to_dict(), (name, base), place,
            timeout_s=self._spec.trial_timeout_s, stop=self._stop,
        )  # fmt: skip
        if answer.outcome == "ok":
            return Trial(**answer.value), answer.wall_s
        failed = Trial(
            kind="ladder", variant=name, batch_size=planned.batch_size, repeat=planned.repeat,
            position=planned.position, feed=setup.feed, precision=setup.precision,
            device=self._spec.device, synthetic=self._spec.synthetic,
            details={"setup": setup.to_dict(), "base": base}, **failure_facts(answer),
        )  # fmt: skip
        return failed, answer.wall_s
