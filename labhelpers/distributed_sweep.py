"""A sweep on all ranks: rank 0 plans, writes and resumes, every rank measures.

For each size and repeat rank 0 first measures alone, as one GPU without
DistributedDataParallel, while the others wait; then all measure together. Both are on disk
before the next begins. What is missing is measured; what is there is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from labhelpers.distributed import Team, describe_job
from labhelpers.distributed_records import (
    SPEC_NAME,
    DistributedSpec,
    Group,
    is_alone,
    matching,
)
from labhelpers.distributed_tables import seat
from labhelpers.distributed_trials import Task, measure_task
from labhelpers.distributed_watch import Deadline
from labhelpers.environment import environment_id
from labhelpers.formats import show_bytes, show_rate
from labhelpers.inputs import InputError
from labhelpers.planning import plan
from labhelpers.progress import describe_failure
from labhelpers.records import Spec, Trial
from labhelpers.store import RUN_FILE, RunDirectory, new_run_path, open_run
from labhelpers.sweep import notes_of, resolved
from labhelpers.sweep_checks import check_before, check_same_request

_FIXED = ("images", "seed", "learning_rate", "synthetic", "compared_steps")

_GPU_STEPS, _CPU_STEPS = 20, 3

Say = Callable[[str], None]


def open_or_create(path: str | None, name: str, spec: Spec) -> RunDirectory:
    """Open the run at the path, or make one there; by default one named after the time.

    torchrun restarts a job by the same command, so the same command goes on with its run.
    """
    if path is not None and (Path(path) / RUN_FILE).exists():
        return open_run(path)
    folder = new_run_path("results") if path is None else Path(path)
    return RunDirectory.create(folder, specs={name: spec})


def run_shared_sweep(
    spec: DistributedSpec, team: Team, open_run_for: Callable[[DistributedSpec], RunDirectory],
    say: Say = lambda _: None,
) -> list[Group]:  # fmt: skip
    """Measure on every rank what the run does not hold yet; every rank calls it.

    `open_run_for(spec)` is called on rank 0 only, after the request was checked. Returns the
    measurements of the whole request on rank 0, and nothing on the others.

    Raises:
        InputError: bad input, on all ranks alike, before anything is measured.
    """
    assert team.roll is not None
    team.together(_check, spec)
    spec = filled(spec, team.device)
    facts = describe_job(team)
    name = environment_id(facts)
    with ExitStack() as stack:
        run = team.together(_begin, spec, team, open_run_for, facts, stack)
        waiting = team.from_lead(missing_of(spec, run, team.world_size))
        for number, task in enumerate(waiting, start=1):
            what = describe_task(task, team)
            with Deadline(team.roll).within(spec.trial_timeout_s, what):
                trials = _measure(spec, task, team, name)
            if run is not None:
                run.append(*trials)
                say(f"[{number}/{len(waiting)}] {what}: {_seen(Group(tuple(trials)))}")
    return [] if run is None else measured(spec, run, team.world_size)


def filled(spec: DistributedSpec, device: str) -> DistributedSpec:
    """Fill in what was left open, with what suits the device.

    The device becomes `cpu` or `cuda` without a number: each rank has its own.
    """
    steps = spec.compared_steps or (_GPU_STEPS if device != "cpu" else _CPU_STEPS)
    found = resolved(spec, device).model_dump()
    own = {"device": device.partition(":")[0], "compared_steps": steps}
    return spec.model_copy(update=found | own)


def _check(spec: DistributedSpec) -> None:
    if spec.repeats == "auto":
        raise InputError("repeats: got 'auto', which one process can do; under torchrun give 3")
    check_before(spec)


def _begin(
    spec: DistributedSpec, team: Team, open_run_for: Callable[[DistributedSpec], RunDirectory],
    facts: dict[str, Any], stack: ExitStack,
) -> RunDirectory | None:  # fmt: skip
    """Take the run's lock on rank 0 and keep what was asked; None on the others."""
    if not team.leads:
        return None
    run = open_run_for(spec)
    stack.enter_context(run.writing())
    check_same_request(run, spec, SPEC_NAME, _FIXED)
    run.note_environment(environment_id(facts), facts)
    run.note_spec(SPEC_NAME, spec)
    run.note(*notes_of(spec))
    return run


def _measure(spec: DistributedSpec, task: Task, team: Team, environment: str) -> Sequence[Trial]:
    """Return the trials of all ranks that measured; on every rank."""
    if not task.alone:
        return team.gather(measure_task(spec, task, team, environment))
    own = team.together(_alone, spec, task, team, environment)
    return [team.from_lead(own)]


def _alone(spec: DistributedSpec, task: Task, team: Team, environment: str) -> Trial | None:
    return measure_task(spec, task, team.alone(), environment) if team.leads else None


def tasks(spec: DistributedSpec) -> list[Task]:
    """List the measurements of a resolved spec in their order: each size alone, then together."""
    return [
        Task(planned.batch_size, planned.repeat, planned.position, alone)
        for planned in plan(spec)
        for alone in (True, False)
    ]


def missing_of(
    spec: DistributedSpec, run: RunDirectory | None, world_size: int
) -> list[Task] | None:
    """List what a run lacks; None where there is no run, which is so on all but rank 0."""
    return None if run is None else missing(spec, run.trials(SPEC_NAME), world_size)


def missing(spec: DistributedSpec, trials: Iterable[Trial], world_size: int) -> list[Task]:
    """List the measurements that the trials do not hold with all their ranks."""
    held = {
        (group.first.batch_size, group.first.repeat, is_alone(group.first))
        for group in matching(spec, trials, world_size)
    }
    return [t for t in tasks(spec) if (t.batch_size, t.repeat, t.alone) not in held]


def measured(spec: DistributedSpec, run: RunDirectory, world_size: int) -> list[Group]:
    """Return a resolved spec's measurements as the run holds them, in their order."""
    found = {
        (g.first.batch_size, g.first.repeat, is_alone(g.first)): g
        for g in matching(spec, run.trials(SPEC_NAME), world_size)
    }
    keys = [(task.batch_size, task.repeat, task.alone) for task in tasks(spec)]
    return [found[key] for key in keys if key in found]


def describe_task(task: Task, team: Team) -> str:
    """Name a measurement with per-GPU and global batch."""
    what, repeat = seat(team.device), f"repeat {task.repeat + 1}"
    if task.alone:
        return f"batch {task.batch_size:,} on one {what}, {repeat}"
    whole = task.batch_size * team.world_size
    return f"batch {task.batch_size:,} per {what} × {team.world_size} = {whole:,}, {repeat}"


def _seen(group: Group) -> str:
    if group.outcome != "ok":
        return describe_failure(group.first)
    peaks = [trial.peak_allocated_bytes for trial in group.trials]
    known = [peak for peak in peaks if peak is not None]
    return f"{show_rate(group.images_per_s)}, peak {show_bytes(max(known, default=None))}"
