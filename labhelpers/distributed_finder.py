"""Find the batch size that every rank of a job can train with, and prove it together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from labhelpers.capture import Capture, capture_for
from labhelpers.distributed import Team
from labhelpers.distributed_search import Probe, ranks_of, search_together
from labhelpers.distributed_training import Member, SharedStep, time_updates
from labhelpers.distributed_trials import rehearse
from labhelpers.finder_room import keep_heap_small, memory_limit
from labhelpers.host_memory import host_free_bytes
from labhelpers.inputs import InputError
from labhelpers.oom import Attempt, attempt
from labhelpers.optimizers import optimizer_named
from labhelpers.records import FinderSpec
from labhelpers.search import NothingFits, ProbeResult, SearchError, SearchResult
from labhelpers.training import set_precision
from labhelpers.workloads import Batch, Workload, batch_of

LARGEST = 2**20
"""The largest size tried where neither a data set nor a maximum bounds it."""
CPU_LIMIT_BYTES = 2**30
"""On the CPU, what a rank's trials may use unless asked: a part of what is free, and not more."""
FEWEST_STEPS = 3


@dataclass(frozen=True)
class SharedSize:
    """The size all ranks agreed on: `largest` ran everywhere, `batch_size` leaves the headroom.

    The answers of the ranks are the payloads of the probes: `search` found the largest, and
    `roomy` the one that leaves the headroom (None where no second search was needed).
    `update_s` is the time of an update of all ranks at `batch_size`, gradients sent, over
    `proven_steps` of them.
    """

    batch_size: int
    largest: int
    world_size: int
    search: SearchResult
    roomy: SearchResult | None
    headroom: float
    limits_bytes: tuple[int | None, ...]
    update_s: float
    proven_steps: int

    @property
    def smallest_failure(self) -> ProbeResult | None:
        """The smallest size that failed on some rank; None if none did."""
        failed = [probe for probe in self.search.probes if probe.outcome != "ok"]
        return min(failed, key=lambda probe: probe.batch_size, default=None)

    @property
    def limiting_ranks(self) -> tuple[int, ...]:
        """The ranks on which the smallest size that failed did not fit."""
        failed = self.smallest_failure
        answers = () if failed is None else ranks_of(failed)
        return tuple(rank for rank, answer in enumerate(answers) if answer.outcome != "ok")


def find_together(
    workload: Workload, team: Team, spec: FinderSpec, *, limit_bytes: int | None = None
) -> SharedSize:
    """Find and prove the batch size that every rank of a job can train with.

    Memory counts as in the job: DistributedDataParallel's buckets and the optimizer's state
    are there. The answer has run `num_iterations` updates (at least three) of all ranks together.

    Args:
        limit_bytes: what this rank may use; default what its device, or the host, has free.

    Raises:
        NothingFits, WorkloadFailed: on all ranks alike.
        InputError: a workload that cannot be built, on all ranks alike.
    """
    set_precision(spec.precision)
    if team.device == "cpu":
        keep_heap_small()
    capture = capture_for(torch.device(team.device))
    step = _step(workload, team, spec)
    _settle_memory(step, workload, capture, team)
    limit = limit_bytes or spec.limit_bytes or free_bytes(capture, team)
    iterations = max(FEWEST_STEPS, spec.num_iterations)
    until = time.monotonic() + spec.time_budget_s
    choices: dict[str, Any] = {
        "multiple_of": spec.multiple_of, "powers_of_two": spec.powers_of_two,
        "strategy": spec.strategy, "time_left": lambda: until - time.monotonic(),
    }  # fmt: skip

    def probe(size: int) -> ProbeResult:
        return probe_alone(step, workload, size, capture, limit, iterations)

    found = search_together(
        probe, team, max_batch_size=_largest_allowed(spec, team), limit_bytes=limit,
        maximum="dataset" if _data_set_ends_it(spec, team) else "maximum", **choices,
    )  # fmt: skip
    size, roomy = with_headroom(found, spec.headroom, probe, team, limit, choices)
    ran = {p.batch_size for result in (found, roomy) if result for p in result.successes}
    sizes = sorted((other for other in ran if other <= size), reverse=True)
    proven, update_s = prove(sizes, step, workload, capture, team, iterations)
    limits = tuple(team.gather(limit))
    return SharedSize(
        proven, found.largest, team.world_size, found, roomy, spec.headroom, limits, update_s,
        iterations,
    )  # fmt: skip


def prove(
    sizes: Sequence[int], step: SharedStep, workload: Workload, capture: Capture, team: Team,
    iterations: int,
) -> tuple[int, float]:  # fmt: skip
    """Train together at the first size that all ranks can; return it, and seconds per update.

    At the last byte a size may run once and not again. So each rank first runs it alone once
    more, on the batch that it then keeps; only if all can do they depend on each other.

    Raises:
        NothingFits: none of the sizes runs any more.
    """
    for size in sizes:
        ready = team.settle(_ready, step, workload, size, capture, iterations)
        if ready.outcome == "ok":
            seconds = time_updates(step, ready.value, capture, team, steps=iterations, sync=True)
            return size, max(team.gather(sum(seconds) / len(seconds)))
    raise NothingFits(f"no size ran again: {', '.join(map(str, sizes))}; free memory", ())


def _ready(
    step: SharedStep, workload: Workload, size: int, capture: Capture, iterations: int
) -> Batch:
    capture.empty_cache()
    batch = batch_of(workload, size, capture.device)
    for _ in range(iterations):
        step.rehearse(*batch)
    capture.synchronize()
    return batch


def with_headroom(
    found: SearchResult, headroom: float, probe: Probe, team: Team, limit_bytes: int,
    choices: dict[str, Any],
) -> tuple[int, SearchResult | None]:  # fmt: skip
    """Return the largest size that leaves a share of every rank's limit free, and its search.

    It searches on from the sizes that are known to leave it, while there is time. On a GPU its
    trials may not take more: the allocator then gives back what it only keeps, of which it
    keeps the more the more there is.

    Raises:
        NothingFits: not even the smallest size leaves so much free.
    """
    if headroom == 0:
        return found.largest, None
    allowed_bytes = int(limit_bytes * (1 - headroom))
    shared_bytes = min(team.gather(allowed_bytes))
    ran = found.successes
    peaks = {result.batch_size: result.peak_bytes or 0 for result in ran}
    live = {result.batch_size: result.live_bytes or result.peak_bytes or 0 for result in ran}
    roomy = [size for size, peak in peaks.items() if peak <= shared_bytes]
    if found.largest in roomy:
        return found.largest, None
    first = max(roomy, default=min(peaks))
    # The smallest size above it whose tensors alone are too much is the end.
    above = [size - 1 for size in peaks if size > first and live[size] > shared_bytes]
    try:
        result = search_together(
            lambda size: _leaving_room(probe, size, allowed_bytes, team.device), team,
            max_batch_size=min(above, default=found.largest), start=first,
            limit_bytes=allowed_bytes, **choices,
        )  # fmt: skip
    except SearchError as error:
        if not roomy:
            raise NothingFits(
                f"up to {found.largest:,} ran on all, but no size was shown to leave "
                f"{headroom:.0%} of the memory free: {error}", error.probes,
            ) from None  # fmt: skip
        return first, None
    return result.largest, result


def _leaving_room(probe: Probe, size: int, allowed_bytes: int, device: str) -> ProbeResult:
    """Try a size with what may be taken; on the CPU, where that is no cap, more does not fit."""
    on_gpu = device != "cpu"
    with memory_limit(torch.device(device), allowed_bytes if on_gpu else None):
        own = probe(size)
    too_much = own.outcome == "ok" and (own.peak_bytes or 0) > allowed_bytes
    return replace(own, outcome="oversubscribed") if too_much else own


def probe_alone(
    step: SharedStep, workload: Workload, size: int, capture: Capture, limit_bytes: int | None,
    iterations: int,
) -> ProbeResult:  # fmt: skip
    """Try a size on this rank alone, from an emptied cache; more than the limit does not fit."""
    capture.empty_cache()
    done = attempt(rehearse, step, workload, size, capture, iterations)
    if not done.ok:
        step.begin()
        return ProbeResult(size, "oom", needed_bytes=_needed(done), payload=done.text)
    live, reserved = done.value or None, capture.peak_reserved_bytes()
    peak = reserved or live
    too_much = limit_bytes is not None and peak is not None and peak > limit_bytes
    return ProbeResult(
        size, "oversubscribed" if too_much else "ok", peak_bytes=peak, live_bytes=live
    )


def _needed(failed: Attempt) -> int | None:
    """Return what was held and asked for when a GPU's memory ended; None where unknown."""
    said = failed.message
    if said is None or said.kind != "gpu" or said.reserved_bytes is None:
        return None
    return said.reserved_bytes + said.requested_bytes if said.requested_bytes else None


def free_bytes(capture: Capture, team: Team) -> int:
    """Return what this rank's trials may use: free, or held by its allocator, and not capped."""
    device = capture.device
    if device.type == "cpu":
        return min(host_free_bytes() // (2 * team.world_size), CPU_LIMIT_BYTES)
    free, total = torch.cuda.mem_get_info(device)
    cap = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), cap)


def _step(workload: Workload, team: Team, spec: FinderSpec) -> SharedStep:
    make_optimizer = workload.make_optimizer
    if spec.optimizer is not None:
        make_optimizer = team.together(optimizer_named, spec.optimizer)

    def member() -> Member:
        torch.manual_seed(spec.seed)
        return Member(workload.make_model().to(team.device).train())

    made = team.settle(member)
    if made.outcome != "ok":
        raise InputError(f"the model cannot be built on the device: {made.error_text}")
    optimizer = make_optimizer(made.value.parameters(), spec.learning_rate)
    return SharedStep(made.value, optimizer, workload.loss, spec.precision, team)


def _settle_memory(step: SharedStep, workload: Workload, capture: Capture, team: Team) -> None:
    """Let DistributedDataParallel arrange its buckets, which it does after the first step."""
    size = 2  # BatchNorm needs two samples
    if team.settle(rehearse, step, workload, size, capture).outcome == "ok":
        batch = batch_of(workload, size, capture.device)
        time_updates(step, batch, capture, team, steps=0, sync=True)


def _largest_allowed(spec: FinderSpec, team: Team) -> int:
    """Return the upper limit of one rank's batch: all ranks' together never exceeds the data."""
    limits = [spec.max_batch_size or LARGEST]
    if spec.dataset_size is not None:
        limits.append(max(1, spec.dataset_size // team.world_size))
    return min(limits)


def _data_set_ends_it(spec: FinderSpec, team: Team) -> bool:
    return _largest_allowed(spec, team) < (spec.max_batch_size or LARGEST)
