"""Measure the residency map: how many blocks to ask for, and one worker call for all."""

from __future__ import annotations

import threading
from typing import Any

from labhelpers.environment import check_device_name, environment_id
from labhelpers.formats import GIB, MIB, show_bytes
from labhelpers.inputs import InputError
from labhelpers.probe import device_limits
from labhelpers.probe_plan import Limits
from labhelpers.records import ProbeSpec, Trial
from labhelpers.residency import LEAST_BLOCKS
from labhelpers.store import RunDirectory
from labhelpers.sweep import failure_facts, start_device
from labhelpers.worker import Answer, Worker, worker_at_hand

GPU_BLOCK_BYTES, CPU_BLOCK_BYTES = 256 * MIB, 32 * MIB
PAST_CARD_BYTES = 2 * GIB
"""How much more than the card the map asks for where the driver spills."""
SAFE_SHARE, QUICK_SHARE = 0.25, 0.05
"""Elsewhere, the share of what is free on the card that it asks for."""
CPU_BLOCKS = 8
WORKLOAD = "residency map"


def run_residency(
    spec: ProbeSpec, run: RunDirectory, *, worker: Worker | None = None,
    stop: threading.Event | None = None,
) -> Trial:  # fmt: skip
    """Measure the map that `spec` asks for, unless `run` holds it, and return its trial.

    `residency_map` reads the trial. A crash, kill or time limit is its outcome.

    Raises:
        InputError: bad input, before anything is measured.
        Stopped: `stop` was set.
    """
    check_device_name(spec.device)
    with worker_at_hand(worker) as hired, run.writing():
        return _run(spec, run, hired, stop)


def count_blocks(spec: ProbeSpec, limits: Limits) -> int:
    """Return how many blocks the map asks for.

    The card plus a little where the driver can spill; a safe part of what is free elsewhere;
    a few on the CPU, where there is only one place to lie in.

    Raises:
        InputError: the asked total is less than two blocks.
    """
    block_bytes = block_bytes_of(spec, limits.device)
    total_bytes = spec.residency_bytes or _default_bytes(spec, limits)
    blocks = total_bytes // block_bytes
    if blocks >= LEAST_BLOCKS:
        return blocks
    if spec.residency_bytes is None:
        return LEAST_BLOCKS
    raise InputError(
        f"residency_bytes: got {total_bytes:,}, less than {LEAST_BLOCKS} blocks of "
        f"{show_bytes(block_bytes)}: one block alone proves nothing"
    )


def block_bytes_of(spec: ProbeSpec, device: str) -> int:
    """Return the size of a block: what was asked for, or what suits the device."""
    return spec.block_bytes or (CPU_BLOCK_BYTES if device == "cpu" else GPU_BLOCK_BYTES)


def _default_bytes(spec: ProbeSpec, limits: Limits) -> int:
    if limits.device == "cpu":
        return CPU_BLOCKS * block_bytes_of(spec, "cpu")
    if limits.can_spill:
        return limits.total_bytes + PAST_CARD_BYTES
    return int((QUICK_SHARE if spec.quick else SAFE_SHARE) * limits.free_bytes)


def newest_residency(run: RunDirectory) -> Trial | None:
    """Return the map that a run measured last; None if it has none."""
    return next(reversed(run.trials("residency")), None)


def _run(spec: ProbeSpec, run: RunDirectory, worker: Worker, stop: threading.Event | None) -> Trial:
    from labhelpers.residency_trials import measure_residency_trial

    facts = start_device(spec, worker, stop)
    spec = spec.model_copy(update={"device": facts["device"]})
    limits = device_limits(spec, facts, worker)
    blocks, block_bytes = count_blocks(spec, limits), block_bytes_of(spec, spec.device)
    kept = _kept(run, spec, blocks, block_bytes)
    if kept is not None:
        return kept
    answer = worker.run(
        measure_residency_trial, spec.device, block_bytes, blocks, limits.host_reserve_bytes,
        timeout_s=spec.trial_timeout_s, stop=stop,
    )  # fmt: skip
    trial = Trial(
        kind="residency", workload=WORKLOAD, variant=_variant(block_bytes), device=spec.device,
        position=len(run.trials("residency")), environment_id=environment_id(facts),
        **_facts(answer, blocks),
    )  # fmt: skip
    run.note_environment(environment_id(facts), facts)
    run.append(trial)
    return trial


def _facts(answer: Answer, blocks: int) -> dict[str, Any]:
    """Return what the trial keeps; its batch size is the number of blocks."""
    if answer.outcome != "ok":
        return {"batch_size": blocks, **failure_facts(answer)}
    return {**answer.value, "batch_size": max(1, answer.value["details"]["blocks"])}


def _kept(run: RunDirectory, spec: ProbeSpec, blocks: int, block_bytes: int) -> Trial | None:
    """Return a map that this run holds already; where no total was asked for, any total."""
    for trial in run.trials("residency"):
        same = trial.device == spec.device and trial.variant == _variant(block_bytes)
        total = spec.residency_bytes is None or (trial.details or {}).get("asked_blocks") == blocks
        if same and total and trial.outcome == "ok":
            return trial
    return None


def _variant(block_bytes: int) -> str:
    return f"blocks of {show_bytes(block_bytes)}"
