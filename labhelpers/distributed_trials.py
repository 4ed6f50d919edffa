"""One measurement on every rank of a job: make, rehearse, warm up, time, compare, read peaks.

Each rank measures in its own process, not in a worker of ours: torchrun has started a process
for it already, watches that one and ends the whole job when it dies. A worker's death would be
hidden from it, and its GPU would have to be given to a second process.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from labhelpers.capture import Capture, capture_for
from labhelpers.cpu_load import CpuLoad
from labhelpers.distributed import Team
from labhelpers.distributed_records import DistributedSpec, variant_of
from labhelpers.distributed_shares import Shared, shared_feed
from labhelpers.distributed_training import Member, SharedStep, run_shared_epoch, time_updates
from labhelpers.inputs import InputError
from labhelpers.records import Trial
from labhelpers.sweep import failure_facts
from labhelpers.training import read_precision, set_precision
from labhelpers.trials import surroundings
from labhelpers.workloads import Workload, batch_of, workload_from


@dataclass(frozen=True)
class Task:
    """One measurement to come: by rank 0 alone, or by all ranks together."""

    batch_size: int
    repeat: int
    position: int
    alone: bool


def measure_task(spec: DistributedSpec, task: Task, team: Team, environment_id: str) -> Trial:
    """Train one epoch and return this rank's trial; every rank of the team calls it.

    An OOM or an error of one rank, met before the ranks depend on each other, is the outcome
    of all. One that comes later ends this rank, and with it the job.

    Raises:
        InputError: a workload, a feed or a number of images that cannot be measured.
    """
    capture = capture_for(torch.device(team.device))
    capture.empty_cache()
    gc.freeze()  # searching torch's modules for garbage takes 0.1 s, four times a trial
    facts: dict[str, Any] = {
        "kind": "ddp", "workload": spec.workload, "batch_size": task.batch_size,
        "variant": variant_of(spec.accumulation, alone=task.alone), "repeat": task.repeat,
        "position": task.position, "feed": spec.feed, "precision": spec.precision,
        "device": team.device, "rank": team.rank, "world_size": team.world_size,
        "synthetic": spec.synthetic, "environment_id": environment_id,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "precision_before": set_precision(spec.precision),
    }  # fmt: skip
    facts |= surroundings(capture, "before")
    load = CpuLoad()
    facts |= _measured(spec, task, team, capture)
    facts["details"] = _sizes(spec, task, team) | facts.get("details", {})
    if task.alone:  # otherwise the others are the other ranks
        facts["details"]["cpu_of_others"] = load.share_of_others()
    facts |= surroundings(capture, "after") | {"precision_after": read_precision()}
    capture.empty_cache()
    return Trial(**facts)


def _sizes(spec: DistributedSpec, task: Task, team: Team) -> dict[str, Any]:
    """Name what "batch size" may mean, so that nobody has to guess."""
    return {
        "accumulation": spec.accumulation,
        "per_gpu_batch_size": task.batch_size,
        "global_batch_size": task.batch_size * team.world_size,
        "effective_batch_size": task.batch_size * team.world_size * spec.accumulation,
    }


def _measured(spec: DistributedSpec, task: Task, team: Team, capture: Capture) -> dict[str, Any]:
    """Go through the phases; the ranks agree on how each ended before the next begins."""
    workload = workload_from(spec.workload)
    made = team.settle(_make, spec, workload, task.batch_size, team)
    if made.outcome != "ok":
        return failure_facts(made)
    member, shared = made.value
    _check_shares(shared, team)
    optimizer = workload.make_optimizer(member.parameters(), spec.learning_rate)
    step = SharedStep(member, optimizer, workload.loss, spec.precision, team)
    rehearsed = team.settle(rehearse, step, workload, task.batch_size, capture)
    if rehearsed.outcome != "ok":
        return failure_facts(rehearsed)
    # The ranks' random numbers differ from here on, as dropout's should.
    torch.manual_seed(spec.seed + team.rank)
    # No name for this batch: it would count in the epoch's peak.
    time_updates(
        step, batch_of(workload, task.batch_size, capture.device), capture, team,
        steps=0, sync=True,
    )  # fmt: skip
    facts = _timed(spec, step, shared, capture, team)
    facts["first_step_peak_bytes"] = rehearsed.value
    if team.group is not None and task.repeat == 0:
        batch = batch_of(workload, task.batch_size, capture.device)
        facts["details"] = _compared(spec, step, batch, capture, team)
    return facts


def _make(
    spec: DistributedSpec, workload: Workload, batch_size: int, team: Team
) -> tuple[Member, Shared]:
    """Make a model on the device and this rank's part of the epoch; equal seeds, equal weights."""
    torch.manual_seed(spec.seed)
    member = Member(workload.make_model().to(team.device).train())
    return member, shared_feed(spec, workload, batch_size, team)


def _check_shares(shared: Shared, team: Team) -> None:
    if not shared.counts:
        raise InputError("workload: there is nothing to train on; its loader, or images, is empty")
    if len(set(team.gather((len(shared.counts), shared.order)))) > 1:
        raise InputError(
            "workload: its loader has another order on every rank; let make_loader shuffle with "
            "the seed that it is given"
        )


def rehearse(
    step: SharedStep, workload: Workload, batch_size: int, capture: Capture, steps: int = 1
) -> int | None:
    """Run steps of this rank alone at one size, from a new peak; return that peak in bytes."""
    capture.reset_peak()
    for _ in range(steps):
        step.rehearse(*batch_of(workload, batch_size, capture.device))
    capture.synchronize()
    return capture.peak_allocated_bytes()


def _timed(
    spec: DistributedSpec, step: SharedStep, shared: Shared, capture: Capture, team: Team
) -> dict[str, Any]:
    retries = capture.alloc_retries()
    updates = -(-len(shared.counts) // spec.accumulation)
    capture.prepare(updates)
    capture.reset_peak()
    epoch = run_shared_epoch(step, shared, capture, team, accumulation=spec.accumulation)
    now = capture.alloc_retries()
    return asdict(epoch) | {
        "updates": updates,
        "synthetic": shared.synthetic or spec.synthetic,
        "peak_allocated_bytes": capture.peak_allocated_bytes(),
        "peak_reserved_bytes": capture.peak_reserved_bytes(),
        "alloc_retries": None if now is None or retries is None else now - retries,
    }


def _compared(
    spec: DistributedSpec, step: SharedStep, batch: Any, capture: Capture, team: Team
) -> dict[str, Any]:
    """Time updates with and without the all-reduce, twice in turn, so that a drift hits both."""
    times: dict[bool, tuple[float, ...]] = {True: (), False: ()}
    steps = spec.compared_steps or 1
    for sync in (True, False, True, False):
        times[sync] += time_updates(step, batch, capture, team, steps=steps, sync=sync)
    return {"synced_step_times_s": times[True], "unsynced_step_times_s": times[False]}
