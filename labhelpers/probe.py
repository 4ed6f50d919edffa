"""Probe past the loader: one synthetic batch on the device, growing until a limit."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from labhelpers.environment import check_device_name, environment_id
from labhelpers.host_memory import host_free_bytes, host_total_bytes
from labhelpers.inputs import InputError
from labhelpers.platforms import Platform, platform_of
from labhelpers.probe_plan import (
    Limits,
    Moment,
    Stop,
    default_limits,
    ended_by,
    next_size,
    predicted_peak_bytes,
)
from labhelpers.records import ProbeSpec, Trial
from labhelpers.store import RunDirectory
from labhelpers.sweep import (
    PREPARE_TIMEOUT_S,
    Planned,
    Progress,
    failure_facts,
    start_device,
)
from labhelpers.sweep_checks import check_same_request
from labhelpers.worker import Worker, worker_at_hand

# To the article's sizes and past them; the budgets end the list, not its length.
_GPU_SIZES = (
    1024, 4096, 8192, 16_384, 32_768, 49_152, 65_536, 98_304, 131_072, 262_144, 524_288,
    1_048_576,
)  # fmt: skip
_GPU_QUICK = (1024, 16_384, 32_768, 49_152, 65_536, 131_072)
_CPU_SIZES = (128, 256, 512, 1024, 2048)
_CPU_QUICK = (64, 256, 512)
_LEAST_LIMIT_S = 30.0
_FIXED = ("steps", "warmup_steps", "seed", "learning_rate", "device")


def resolved(spec: ProbeSpec, device: str) -> ProbeSpec:
    """Fill in the sizes that were left open, with what suits the device (`cpu` or `cuda:N`)."""
    table = {
        (True, False): _GPU_SIZES, (True, True): _GPU_QUICK,
        (False, False): _CPU_SIZES, (False, True): _CPU_QUICK,
    }  # fmt: skip
    sizes = spec.probe_sizes or table[device != "cpu", spec.quick]
    return spec.model_copy(update={"device": device, "probe_sizes": tuple(sorted(sizes))})


def run_probe(
    spec: ProbeSpec, run: RunDirectory, *, worker: Worker | None = None,
    on_progress: Callable[[Progress], None] | None = None, stop: threading.Event | None = None,
) -> list[Trial]:  # fmt: skip
    """Measure growing batches until a limit, the smallest again at the end, and return all.

    It ends at an out-of-memory error, at a size that certainly ran past the card, at its own
    memory or time budget, or when host memory runs low; `why_it_stopped` tells which. Sizes
    that `run` holds already are not measured again.

    Raises:
        InputError: bad input, before anything is measured.
        Stopped: `stop` was set; finished trials are kept and the probe can be resumed.
    """
    check_device_name(spec.device)
    with worker_at_hand(worker) as hired, run.writing():
        probe = _Probe(spec, run, hired, on_progress or (lambda _: None), stop)
        return probe.measure()


def why_it_stopped(trials: Sequence[Trial]) -> Stop | None:
    """Return why a probe ended; None for one that was interrupted."""
    kept = (trials[-1].details or {}).get("stopped") if trials else None
    if kept is not None:
        return Stop(**kept)
    failed = next((trial for trial in trials if trial.outcome != "ok"), None)
    return None if failed is None else ended_by(failed)


def probe_trials_of(run: RunDirectory) -> list[Trial]:
    """Return the probe that a run was last asked for, in the order of time."""
    asked = run.info.specs.get("probe")
    trials = run.trials("probe")
    return matching(trials, ProbeSpec(**asked)) if asked else trials


def matching(trials: Iterable[Trial], spec: ProbeSpec) -> list[Trial]:
    """Keep the trials that a spec asks for: same workload and precision."""
    wanted = (spec.workload, spec.precision)
    return [trial for trial in trials if (trial.workload, trial.precision) == wanted]


def this_platform() -> Platform | None:
    """Name the platform of this machine; None where there are no NVIDIA drivers (macOS)."""
    return platform_from({"kernel": platform.release(), "system": platform.system()})


def platform_from(environment: dict[str, Any]) -> Platform | None:
    """Name the platform of an environment; None where there are no NVIDIA drivers (macOS)."""
    try:
        return platform_of(environment.get("kernel"), str(environment.get("system")))
    except InputError:
        return None


class _Probe:
    """One probe while it runs: what was asked, what it may use, and what it has seen."""

    def __init__(
        self, spec: ProbeSpec, run: RunDirectory, worker: Worker,
        on_progress: Callable[[Progress], None], stop: threading.Event | None,
    ) -> None:  # fmt: skip
        self._run, self._worker, self._stop = run, worker, stop
        self._on_progress = on_progress
        self._spec, self._limits = _prepared(spec, run, worker, stop)
        self._seen = matching(run.trials("probe"), self._spec)
        self._known = len(self._seen)
        self._started = time.monotonic()

    def measure(self) -> list[Trial]:
        """Measure size after size until the plan says stop, then the smallest once more."""
        while not isinstance(chosen := self._next(), Stop):
            self._one(chosen, 0, None)
        new = len(self._seen) > self._known
        if new or why_it_stopped(self._seen) is None:
            self._repeat_smallest(chosen)
        return self._seen

    def _next(self) -> int | Stop:
        now = Moment(self._elapsed_s(), host_free_bytes())
        return next_size(self._spec, self._seen, self._limits, now)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _repeat_smallest(self, ended: Stop) -> None:
        """Run the smallest size again: what is slower now drifted, and kept no memory."""
        sizes = [trial.batch_size for trial in self._seen if trial.outcome == "ok"]
        if not sizes:
            return
        earlier = sum(trial.batch_size == min(sizes) for trial in self._seen)
        self._one(min(sizes), earlier, ended)

    def _one(self, size: int, repeat: int, ended: Stop | None) -> None:
        """Measure one size, keep it on disk and tell the progress."""
        planned = Planned(size, repeat, len(self._seen))
        total = max(len(self._spec.probe_sizes or ()) + 1, len(self._seen) + 1)
        progress = Progress(total, len(self._seen), planned, worker_start_s=self._worker.start_s)
        self._on_progress(progress)
        trial = self._measured(planned)
        if ended is not None:
            details = {**(trial.details or {}), "stopped": ended.to_dict()}
            trial = trial.model_copy(update={"details": details})
        self._run.append(trial)
        self._seen.append(trial)
        progress.trial, progress.done = trial, len(self._seen)
        progress.total = total if ended is None else progress.done
        self._on_progress(progress)

    def _measured(self, planned: Planned) -> Trial:
        from labhelpers.probe_trials import FEED, measure_probe_trial

        size, spec = planned.batch_size, self._spec
        cap_bytes = self._limits.cap_bytes(
            predicted=predicted_peak_bytes(self._seen, size) is not None
        )
        left_s = self._limits.time_budget_s - self._elapsed_s()
        answer = self._worker.run(
            measure_probe_trial, spec.model_dump(mode="json"), size, planned.repeat,
            planned.position, cap_bytes,
            timeout_s=min(spec.trial_timeout_s, max(left_s, _LEAST_LIMIT_S)), stop=self._stop,
        )  # fmt: skip
        if answer.outcome == "ok":
            return Trial(**answer.value)
        return Trial(
            kind="probe", workload=spec.workload, batch_size=size, repeat=planned.repeat,
            position=planned.position, feed=FEED, precision=spec.precision, device=spec.device,
            synthetic=True, cap_bytes=cap_bytes, **failure_facts(answer),
        )  # fmt: skip


def _prepared(
    spec: ProbeSpec, run: RunDirectory, worker: Worker, stop: threading.Event | None
) -> tuple[ProbeSpec, Limits]:
    """Start the worker, fill in sizes and budgets, and keep what was asked in `run.json`."""
    facts = start_device(spec, worker, stop)
    spec = resolved(spec, facts["device"])
    limits = device_limits(spec, facts, worker)
    spec = spec.model_copy(update={"memory_budget_bytes": limits.memory_budget_bytes})
    check_same_request(run, spec, "probe", _FIXED)
    run.note_environment(environment_id(facts), facts)
    run.note_spec("probe", spec)
    return spec, limits


def device_limits(spec: ProbeSpec, facts: dict[str, Any], worker: Worker) -> Limits:
    """Read what the device has free now, and set the budgets that were left open."""
    from labhelpers.probe_trials import read_device_memory

    total_bytes, free_bytes = host_total_bytes(), host_free_bytes()
    if spec.device != "cpu":
        answer = worker.run(read_device_memory, spec.device, timeout_s=PREPARE_TIMEOUT_S)
        if answer.outcome != "ok":
            raise RuntimeError(f"the device's memory cannot be read: {answer.error_text}")
        total_bytes, free_bytes = answer.value["total_bytes"], answer.value["free_bytes"]
    return default_limits(
        spec, spec.device, platform_from(facts), total_bytes=total_bytes, free_bytes=free_bytes,
        host_total_bytes=host_total_bytes(),
    )  # fmt: skip
