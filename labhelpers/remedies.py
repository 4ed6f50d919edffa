"""Measure what each remedy against running out of memory saves, costs and changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labhelpers.environment import environment_id
from labhelpers.inputs import InputError
from labhelpers.platforms import platform_of
from labhelpers.records import RemedySpec, Trial, ask
from labhelpers.remedy_plan import Remedy, chosen_remedies, resolved, why_not
from labhelpers.store import RunDirectory
from labhelpers.sweep import Planned, Progress, failure_facts, start_device
from labhelpers.worker import Answer, Worker, packed, worker_at_hand

if TYPE_CHECKING:
    from labhelpers.workloads import Workload

ALLOCATOR = "PYTORCH_ALLOC_CONF"
OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # still read, and before the other
_SPEC_NAME = "remedy "
_FIXED = (
    "input_shape", "classes", "micro_batches", "steps", "seed", "learning_rate", "device",
)  # fmt: skip


@dataclass(frozen=True)
class Remedied:
    """What was measured, what was not and why, and the request with all its gaps filled."""

    trials: tuple[Trial, ...]
    not_run: dict[str, str]
    spec: RemedySpec


def measure_remedies(
    workload: str | Workload, batch_size: int | None = None, *, run: RunDirectory,
    worker: Worker | None = None, on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None, **request: Any,
) -> Remedied:  # fmt: skip
    """Measure the remedies for any model.

    Args:
        workload: `package.module:name` or `file.py:name` of a model or Workload, or a Workload.
        batch_size: the batch to be trained; None takes what suits the device.
        request: more fields of `RemedySpec`, such as `input_shape=(3, 224, 224)` and
            `classes=1000` (needed where `workload` names a model), `remedies` or `device`.

    Raises:
        InputError: bad input, before anything is measured.
    """
    name = workload if isinstance(workload, str) else workload.name
    spec = ask(RemedySpec, {**request, "workload": name, "batch_size": batch_size})
    given = None if isinstance(workload, str) else workload
    return run_remedies(
        spec, run, workload=given, worker=worker, on_progress=on_progress, stop=stop
    )


def run_remedies(
    spec: RemedySpec, run: RunDirectory, *, workload: Workload | None = None,
    worker: Worker | None = None, on_progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
) -> Remedied:  # fmt: skip
    """Measure every remedy of `spec` that `run` does not hold yet, and return all of them.

    Each runs in the worker: the same weights and the same batch, one update to compare with
    the plain FP32 step, one more, then the timed ones. Each finished trial is on disk before
    the next begins. An OOM is an outcome.

    Args:
        workload: the job itself, where `spec.workload` only names it.

    Raises:
        InputError: bad input, before anything is measured.
        Stopped: `stop` was set; finished trials are kept and the run can be resumed.
    """
    chosen = chosen_remedies(spec)
    with worker_at_hand(worker) as hired, run.writing():
        facts = start_device(spec, hired, stop)
        spec = resolved(spec, facts)
        _check_same_request(run, spec)
        run.note_environment(environment_id(facts), facts)
        run.note_spec(_spec_name(spec), spec)
        session = _Session(spec, run, hired, stop, workload, on_progress or (lambda _: None))
        return session.measure(chosen, facts)


@dataclass(frozen=True)
class _Session:
    spec: RemedySpec
    run: RunDirectory
    worker: Worker
    stop: threading.Event | None
    workload: Workload | None
    on_progress: Callable[[Progress], None]

    def measure(self, chosen: Sequence[Remedy], facts: dict[str, Any]) -> Remedied:
        """Measure one remedy after the other; what the run holds already is not measured again."""
        trials: dict[str, Trial] = {t.variant or "": t for t in trials_of(self.run, self.spec)}
        not_run: dict[str, str] = {}
        total = len(chosen)
        for position, remedy in enumerate(chosen):
            planned = Planned(self.spec.batch_size or 1, 0, position)
            self.on_progress(Progress(total, position, planned, worker_start_s=self.worker.start_s))
            if remedy.name not in trials:
                reason = why_not(remedy, self.spec, _platform(facts))
                found = reason or self._one(remedy, position)
                if isinstance(found, str):
                    not_run[remedy.name] = found
                    self.run.note(f"remedy {remedy.name!r} of {self.spec.workload}: {found}")
                    continue
                self.run.append(found)
                trials[remedy.name] = found
        self.on_progress(Progress(total, total, None, worker_start_s=self.worker.start_s))
        names = [remedy.name for remedy in chosen if remedy.name in trials]
        return Remedied(tuple(trials[name] for name in names), not_run, self.spec)

    def _one(self, remedy: Remedy, position: int) -> Trial | str:
        """Return the trial of a remedy, or the reason why it does not apply to this model."""
        if remedy.expandable:
            # The allocator reads its settings once, when a process first uses the device.
            with allocator_setting("expandable_segments:True"), Worker() as fresh:
                answer = self._ask(fresh, remedy, position)
        else:
            answer = self._ask(self.worker, remedy, position)
        if answer.outcome == "ok":
            reason: str | None = answer.value.get("not_run")
            return reason or Trial(**answer.value)
        return Trial(
            kind="remedy", workload=self.spec.workload, variant=remedy.name,
            batch_size=self.spec.batch_size or 1, position=position, feed="synthetic",
            precision=remedy.precision, device=self.spec.device, synthetic=True,
            **failure_facts(answer),
        )  # fmt: skip

    def _ask(self, worker: Worker, remedy: Remedy, position: int) -> Answer:
        from labhelpers.remedy_trials import measure_remedy

        data = None if self.workload is None else packed(self.workload)
        return worker.run(
            measure_remedy, self.spec.model_dump(mode="json"), remedy.name, position, data,
            timeout_s=self.spec.trial_timeout_s, stop=self.stop,
        )  # fmt: skip


def trials_of(run: RunDirectory, spec: RemedySpec) -> list[Trial]:
    """Return a run's remedies for the model and batch of a resolved spec."""
    wanted = (spec.workload, spec.batch_size)
    return [t for t in run.trials("remedy") if (t.workload, _whole_batch(t)) == wanted]


def measured_in(run: RunDirectory) -> Remedied | None:
    """Return the remedies of a run's last request; None if it holds none."""
    asked = [spec for name, spec in run.info.specs.items() if name.startswith(_SPEC_NAME)]
    if not asked:
        return None
    spec = RemedySpec(**asked[-1])
    trials = trials_of(run, spec)
    return Remedied(tuple(trials), {}, spec) if trials else None


def _whole_batch(trial: Trial) -> int:
    """Return the batch that was asked for: an evaluation takes a part of it."""
    return int((trial.details or {}).get("whole_batch", trial.batch_size))


def _spec_name(spec: RemedySpec) -> str:
    return f"{_SPEC_NAME}{spec.workload}"


def _check_same_request(run: RunDirectory, spec: RemedySpec) -> None:
    """Refuse to mix different requests for one model in one run."""
    earlier = run.info.specs.get(_spec_name(spec))
    if not earlier or not any(t.workload == spec.workload for t in run.trials("remedy")):
        return
    now = spec.model_dump(mode="json")
    for name in _FIXED:
        if now[name] != earlier.get(name):
            raise InputError(
                f"{name}: got {now[name]!r}, but {run.path} was measured with "
                f"{earlier.get(name)!r}; use that, or a new run directory"
            )


def _platform(facts: dict[str, Any]) -> str | None:
    try:
        return platform_of(facts["kernel"], facts["system"])
    except InputError:
        return None


@contextmanager
def allocator_setting(value: str) -> Iterator[None]:
    """Set CUDA's allocator for processes that start inside the block."""
    kept = {name: os.environ.pop(name, None) for name in (ALLOCATOR, OLD_ALLOCATOR)}
    os.environ[ALLOCATOR] = value
    try:
        yield
    finally:
        del os.environ[ALLOCATOR]
        os.environ.update({name: old for name, old in kept.items() if old is not None})
