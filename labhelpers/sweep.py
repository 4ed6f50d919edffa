"""Trials over batch sizes in the article's order, resumable, one worker for all."""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from labhelpers.environment import environment_id
from labhelpers.records import ARTICLE_BATCH_SIZES, TRAINING_IMAGES, Spec, SweepSpec, Trial
from labhelpers.store import RunDirectory
from labhelpers.sweep_checks import check_before, check_same_request
from labhelpers.worker import Answer, StartError, Worker

PREPARE_TIMEOUT_S = 300.0

# What suits a device where nothing was asked: (batch sizes, images, repeats).
_GPU_DEFAULTS = (ARTICLE_BATCH_SIZES, TRAINING_IMAGES, 3)
_GPU_QUICK = ((32, 256, 2048, 8192), TRAINING_IMAGES, 1)
_CPU_DEFAULTS = ((32, 64, 128, 256, 512, 1024), 4096, 3)
_CPU_QUICK = ((32, 128, 512), 2048, 1)
_FIXED = ("images", "seed", "learning_rate", "synthetic", "device")


@dataclass(frozen=True)
class Planned:
    """One trial to come: its batch size, repeat and place in the order."""

    batch_size: int
    repeat: int
    position: int


@dataclass(frozen=True)
class Measure:
    """What runs in the worker: module-level functions with JSON-able arguments and values.

    `prepare(device, require_gpu)` gives the facts of the environment, `trial(spec, batch_size,
    repeat, position)` one trial.
    """

    prepare: Callable[[str, bool], dict[str, Any]]
    trial: Callable[[dict[str, Any], int, int, int], dict[str, Any]]


def training() -> Measure:
    """Return what measures the training of a workload; this loads torch."""
    from labhelpers.trials import measure_sweep_trial, prepare

    return Measure(prepare, measure_sweep_trial)


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


def resolved(spec: SweepSpec, device: str) -> SweepSpec:
    """Fill in what was left open, with what suits the device (`cpu` or `cuda:N`)."""
    table = {
        (True, False): _GPU_DEFAULTS, (True, True): _GPU_QUICK,
        (False, False): _CPU_DEFAULTS, (False, True): _CPU_QUICK,
    }  # fmt: skip
    sizes, images, repeats = table[device != "cpu", spec.quick]
    return spec.model_copy(
        update={
            "device": device,
            "batch_sizes": spec.batch_sizes or sizes,
            "images": spec.images or images,
            "repeats": spec.repeats or repeats,
        }
    )


def plan(spec: SweepSpec) -> list[Planned]:
    """List the trials of a resolved spec in the order they run.

    `article` is ascending, descending, ascending, …; `shuffled` draws a new order for every
    repeat from the seed.
    """
    sizes, repeats = spec.batch_sizes or (), spec.repeats or 0
    draw = random.Random(spec.seed)
    trials: list[Planned] = []
    for repeat in range(repeats):
        ordered = sorted(sizes)
        if spec.order == "shuffled":
            draw.shuffle(ordered)
        elif spec.order == "descending" or (spec.order == "article" and repeat % 2):
            ordered.reverse()
        trials += [Planned(size, repeat, len(trials) + i) for i, size in enumerate(ordered)]
    return trials


def notes_of(spec: SweepSpec) -> tuple[str, ...]:
    """Return what a reader should know about a resolved request, in sentences."""
    images = spec.images or 0
    above = [f"{size:,}" for size in spec.batch_sizes or () if size > images]
    notes = []
    if above and spec.workload == "fashion_cnn":
        notes.append(
            f"batch {', '.join(above)}: above the data set of {images:,} images, so an epoch is "
            "1 step"
        )
    if spec.synthetic:
        notes.append("synthetic images: speed is real, loss says nothing about FashionMNIST")
    return tuple(notes)


def run_sweep(
    spec: SweepSpec, run: RunDirectory, *, worker: Worker | None = None,
    on_progress: Callable[[Progress], None] | None = None, stop: threading.Event | None = None,
    measure: Measure | None = None,
) -> list[Trial]:  # fmt: skip
    """Measure every trial of `spec` that `run` does not hold yet, and return all of them.

    Each finished trial is on disk before the next begins. A crash, kill, time limit or OOM is
    the outcome of its trial; the next trial runs.

    Raises:
        InputError: bad input, before anything is measured.
        Stopped: `stop` was set; finished trials are kept and the run can be resumed.
    """
    check_before(spec)
    own = worker is None
    worker = worker or Worker()
    try:
        with run.writing():
            measure = measure or training()
            return _run(spec, run, worker, measure, on_progress or (lambda _: None), stop)
    finally:
        if own:
            worker.close()


def _run(
    spec: SweepSpec, run: RunDirectory, worker: Worker, measure: Measure,
    on_progress: Callable[[Progress], None], stop: threading.Event | None,
) -> list[Trial]:  # fmt: skip
    spec = _prepared(spec, run, start_device(spec, worker, stop, measure.prepare))
    finished = {(t.batch_size, t.repeat): t for t in matching(run.trials("sweep"), spec)}
    trials = plan(spec)
    waiting = [p for p in trials if (p.batch_size, p.repeat) not in finished]
    seconds: dict[int, list[float]] = {}
    for number, planned in enumerate(waiting):
        progress = Progress(
            len(trials), len(trials) - len(waiting) + number, planned,
            remaining_s=estimate_s(waiting[number:], seconds), notes=notes_of(spec),
            worker_start_s=worker.start_s,
        )  # fmt: skip
        on_progress(progress)
        trial, wall_s = _one(spec, planned, worker, stop, measure)
        run.append(trial)
        finished[planned.batch_size, planned.repeat] = trial
        seconds.setdefault(planned.batch_size, []).append(wall_s)
        progress.trial, progress.done = trial, progress.done + 1
        progress.remaining_s = estimate_s(waiting[number + 1 :], seconds)
        on_progress(progress)
    return [finished[p.batch_size, p.repeat] for p in trials]


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


def _prepared(spec: SweepSpec, run: RunDirectory, facts: dict[str, Any]) -> SweepSpec:
    """Resolve the spec for the device that was started, and keep both in `run.json`."""
    spec = resolved(spec, facts["device"])
    check_same_request(run, spec, "sweep", _FIXED)
    run.note_environment(environment_id(facts), facts)
    run.note_spec("sweep", spec)
    run.note(*notes_of(spec))
    return spec


def _one(
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
    wanted = (spec.workload, spec.feed, spec.precision)
    return [t for t in trials if (t.workload, t.feed, t.precision) == wanted]


def trials_of(run: RunDirectory) -> list[Trial]:
    """Return the sweep that a run was last asked for (a run may hold several precisions)."""
    asked = run.info.specs.get("sweep")
    trials = run.trials("sweep")
    return matching(trials, SweepSpec(**asked)) if asked else trials


def estimate_s(waiting: Sequence[Planned], seconds: dict[int, list[float]]) -> float | None:
    """Estimate the seconds that waiting trials take, from those measured; None before the first.

    A size not measured yet takes what the nearest measured size took.
    """
    if not seconds:
        return None

    def one(size: int) -> float:
        nearest = min(seconds, key=lambda known: abs(known.bit_length() - size.bit_length()))
        return statistics.median(seconds.get(size, seconds[nearest]))

    return sum(one(planned.batch_size) for planned in waiting)


def failures(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials that failed; an OOM is a result, not a failure."""
    return [trial for trial in trials if trial.outcome in ("killed", "timeout", "error")]
