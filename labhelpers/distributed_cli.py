"""The command line under torchrun: every rank runs the same command, rank 0 speaks."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from labhelpers.inputs import InputError

if TYPE_CHECKING:
    from labhelpers.distributed import Team
    from labhelpers.distributed_finder import SharedSize
    from labhelpers.distributed_records import DistributedSpec
    from labhelpers.records import FinderSpec, Spec
    from labhelpers.store import RunDirectory

S = TypeVar("S", bound="Spec")

_NOTHING_KEPT = "nothing is kept; give the search more time, or a smaller --max"
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


def under_torchrun() -> bool:
    """Tell whether torchrun, or a launcher that sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def sweep_together(options: Mapping[str, Any], output: str | None) -> NoReturn:
    """Measure a sweep on all ranks, new or gone on with, and end with this rank's exit code."""
    from labhelpers.distributed_records import SPEC_NAME, DistributedSpec
    from labhelpers.distributed_sweep import open_or_create
    from labhelpers.records import ask

    given = {name: value for name, value in options.items() if value is not None}
    _sweep(
        lambda: ask(DistributedSpec, given), lambda spec: open_or_create(output, SPEC_NAME, spec)
    )


def resume_together(
    run_dir: str, data_dir: str | None = None, workload: str | None = None
) -> NoReturn:
    """Go on with the sweep that a run holds, on all ranks, and end with this rank's exit code.

    Only the host of rank 0 needs to have the directory. `data_dir` is where the data lie now,
    `workload` names the run's own code if it has some.
    """
    from labhelpers.distributed_records import stored_request
    from labhelpers.store import open_run
    from labhelpers.sweep_checks import check_trusted

    def asked() -> DistributedSpec:
        run = open_run(run_dir)
        check_trusted(run, workload)
        found = stored_request(run)
        if found is None:
            raise InputError(f"{run_dir} holds no sweep of several processes to go on with")
        return found if data_dir is None else found.model_copy(update={"data_dir": data_dir})

    _sweep(asked, lambda _: open_run(run_dir))


def refuse_accumulation(given: str | None) -> None:
    """Raise InputError if accumulation is asked of a sweep on one device."""
    if given is not None:
        raise InputError(
            f"accumulation: got {given!r}; a sweep on one device has one update per batch, only "
            "one under torchrun accumulates"
        )


def refuse_alone(run_dir: str, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise InputError for a run that one process cannot go on with, and say how to."""
    if "ddp" in specs and "sweep" not in specs:
        raise InputError(
            f"{run_dir} was measured by several processes; go on with: torchrun "
            f"--nproc-per-node=N -m -- labhelpers resume {run_dir}"
        )


def find_together(
    options: Mapping[str, Any], output: str | None, *, effective: int | None = None,
    as_json: bool = False,
) -> NoReturn:  # fmt: skip
    """Find the batch size that fits on all ranks, and end with this rank's exit code.

    `options` are those of a FinderSpec, the workload among them. With `output`, rank 0 keeps
    every size tried in a run directory, new or not. It prints words or JSON, with the split of
    an effective batch if one is given.
    """
    from labhelpers.records import FinderSpec, ask

    given = {name: value for name, value in options.items() if value is not None}

    def find(spec: FinderSpec, team: Team) -> int:
        return _find(spec, team, output, lambda found: _told(found, team, effective, as_json))

    _as_team(FinderSpec, lambda: ask(FinderSpec, given), find)


def _told(found: SharedSize, team: Team, effective: int | None, as_json: bool) -> str:
    """Return what rank 0 prints of a search."""
    from labhelpers import distributed_find_report as report

    if as_json:
        return json.dumps(report.found_dict(found, effective), indent=1)
    said = [report.found_answer(found, team.device).replace("**", "")]
    if effective is not None:
        said.append(report.split_together(found, effective))
    return "\n".join([report.probe_table(found).to_string(index=False), "", *said])


def _find(
    spec: FinderSpec, team: Team, output: str | None, told: Callable[[SharedSize], str]
) -> int:
    from labhelpers.distributed import describe_job
    from labhelpers.distributed_find_report import keep
    from labhelpers.distributed_finder import find_together
    from labhelpers.distributed_watch import Deadline
    from labhelpers.search import SearchError
    from labhelpers.workloads import workload_from

    workload = team.together(
        lambda: workload_from(spec.workload, input_shape=spec.input_shape, classes=spec.classes)
    )
    facts = describe_job(team)
    run = team.together(_run_for, output, spec, team.leads)
    assert team.roll is not None
    # What may follow the budget: the rest of a probe, and the proof, alone and together.
    most_s = spec.time_budget_s + 3 * spec.trial_timeout_s
    try:
        with Deadline(team.roll).within(most_s, "the search", advice=_NOTHING_KEPT):
            found = find_together(workload, team, spec)
    except SearchError as error:  # the same on every rank
        if team.leads:
            click.echo(f"labhelpers: {error}", err=True)
        return EXIT_FAILED
    if team.leads:
        click.echo(told(found))
        if run is not None:
            keep(run, found, spec, team.device, facts)
    return 0


def _run_for(output: str | None, spec: FinderSpec, leads: bool) -> RunDirectory | None:
    """Return the run that is to keep a search, on rank 0, before anything is tried.

    Raises:
        InputError: it cannot be written, or holds a search on all ranks already.
    """
    from labhelpers.distributed_records import PROVEN
    from labhelpers.distributed_sweep import open_or_create

    if output is None or not leads:
        return None
    run = open_or_create(output, "finder", spec)
    if any(t.variant == PROVEN and t.workload == spec.workload for t in run.trials("finder")):
        raise InputError(
            f"--output: got {output!r}, which holds a search of {spec.workload} on all ranks "
            "already; name another directory"
        )
    return run


def _sweep(
    asked: Callable[[], DistributedSpec], open_for: Callable[[DistributedSpec], RunDirectory]
) -> NoReturn:
    from labhelpers.distributed_records import DistributedSpec

    def measure(spec: DistributedSpec, team: Team) -> int:
        return _measure(spec, team, open_for)

    _as_team(DistributedSpec, asked, measure)


def _as_team(kind: type[S], asked: Callable[[], S], work: Callable[[S, Team], int]) -> NoReturn:
    """Join the job, take rank 0's request on all ranks, let them work on it together, and end.

    Raises:
        InputError: bad input, on rank 0; the others end without a word.
    """
    from labhelpers.distributed import leave, meet, team_of

    meeting = meet()
    try:
        spec = kind.model_validate_json(meeting.from_lead(lambda: asked().model_dump_json()))
        with team_of(
            meeting, spec.device, require_gpu=spec.require_gpu, timeout_s=spec.trial_timeout_s
        ) as team:
            code = guarded(team, work, spec, team)
    except InputError:
        if meeting.rank == 0:
            raise
        leave(EXIT_BAD_INPUT)
    leave(code)


def _measure(
    spec: DistributedSpec, team: Team, open_for: Callable[[DistributedSpec], RunDirectory]
) -> int:
    from labhelpers.distributed_narrative import scaling_text
    from labhelpers.distributed_sweep import run_shared_sweep
    from labhelpers.distributed_tables import scaling_table

    groups = run_shared_sweep(spec, team, open_for, say=lambda line: click.echo(line, err=True))
    if not team.leads:
        return 0
    trials = [trial for group in groups for trial in group.trials]
    click.echo(scaling_text(scaling_table(trials)))
    return EXIT_FAILED if any(g.outcome not in ("ok", "oom") for g in groups) else 0


def guarded(team: Team, function: Callable[..., int], *arguments: Any) -> int:
    """Call a function; after an error end this process at once, so that none waits for it."""
    from labhelpers.distributed import is_peer_failure, leave

    try:
        return function(*arguments)
    except InputError:
        raise  # all ranks raise it
    except Exception as error:  # noqa: BLE001 - whatever it is, this rank must end
        told = traceback.format_exc()
        if is_peer_failure(error) and team.roll is not None:
            # Named before this rank ends, because torchrun's report begins with the first to end.
            first_line = str(error).splitlines()[0]
            told = f"lost the other ranks ({first_line}); {team.roll.verdict()}"
        click.echo(f"labhelpers: rank {team.rank}: {told}", err=True)
        leave(EXIT_FAILED)
