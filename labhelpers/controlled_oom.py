"""Run out of memory on purpose, under a cap, in the caller's own process, and go on.

Recovery inside one process is the subject, so nothing here runs in a worker.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch

from labhelpers.cap_series import bytes_per_image, first_size, next_size, size_after_oom
from labhelpers.caps import Cap, memory_cap
from labhelpers.capture import Capture, capture_for
from labhelpers.environment import environment_id
from labhelpers.formats import MIB, show_bytes, show_share
from labhelpers.host_memory import host_free_bytes
from labhelpers.inputs import InputError
from labhelpers.oom import Attempt, attempt
from labhelpers.oom_report import oom_report
from labhelpers.records import RemedySpec, Trial
from labhelpers.store import RunDirectory
from labhelpers.training import mean_loss, read_precision, set_precision
from labhelpers.trials import environment_id_of, new_step, prepare, surroundings
from labhelpers.workloads import Workload, batch_of, fashion_workload

STEPS = 3
"""Steps of each trial: the optimizer's state is there from the second on."""

_PROBES = {"cpu": (128, 512), "cuda": (1024, 4096)}
_CPU_BUDGET_BYTES, _CPU_QUICK_BYTES = 256 * MIB, 128 * MIB


def run_controlled_oom(
    spec: RemedySpec, run: RunDirectory, workload: Workload | None = None
) -> list[Trial]:
    """Train growing batches under a cap until one runs out of memory, then train again.

    On a GPU the cap is `cap_fraction` of its memory; on the CPU this process may map
    `cap_budget_bytes` more than it has mapped. Sizes are chosen from what is there, unless
    `cap_batch_sizes` gives them. After an OOM a size that fitted is trained once more, under
    the same cap: its outcome says whether the process recovered.

    Args:
        workload: what is trained; FashionCNN by default.

    Returns:
        The trials in their order, all written to the run. On a CPU without such a limit
        (macOS, Windows) none, and a note in the run says so.

    Raises:
        InputError: bad input, before anything is measured.
    """
    facts = prepare(spec.device, spec.require_gpu)
    spec = spec.model_copy(update={"device": facts["device"]})
    with run.writing():
        run.note_environment(environment_id(facts), facts)
        run.note_spec("cap", spec)
        reason = why_not(spec.device)
        if reason:
            run.note(f"controlled OOM: not run: {reason}")
            return []
        series = _Series(spec, workload or fashion_workload(), run)
        return list(series.trials())


def why_not(device: str) -> str | None:
    """Say why no cap can be set here; None where one can."""
    if device == "cpu" and sys.platform != "linux":
        return "this system cannot limit the memory of a running process (Linux and WSL2 can)"
    return None


class _Series:
    def __init__(self, spec: RemedySpec, workload: Workload, run: RunDirectory) -> None:
        self.spec, self.workload, self.run = spec, workload, run
        self.capture: Capture = capture_for(torch.device(spec.device))

    def trials(self) -> Iterator[Trial]:
        """Measure one size after the other; each is on disk before the next begins."""
        set_precision(self.spec.precision)
        budget_bytes = self._budget_bytes()
        tried: list[tuple[int, bool]] = []
        for size in self._sizes(tried, budget_bytes):
            trial = self._one(size, len(tried), budget_bytes)
            tried.append((size, trial.outcome == "ok"))
            yield trial
        again = size_after_oom(tried)
        if again is not None:
            yield self._one(again, len(tried), budget_bytes, after_oom=True)

    def _sizes(self, tried: list[tuple[int, bool]], budget_bytes: int | None) -> Iterator[int]:
        if self.spec.cap_batch_sizes:
            yield from self.spec.cap_batch_sizes
            return
        first = first_size(self._room_bytes(budget_bytes), self._slope_bytes())
        while (size := next_size(first, tried)) is not None:
            yield size

    def _one(
        self, size: int, position: int, budget_bytes: int | None, *, after_oom: bool = False
    ) -> Trial:
        """Train at one size under the cap; what is kept of an OOM is text and numbers."""
        capture = self.capture
        capture.empty_cache()
        facts: dict[str, Any] = {
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment_id": environment_id_of(self.spec.device),
            "precision_before": read_precision(),
            **surroundings(capture, "before"),
        }
        capture.reset_peak()
        with self._cap(budget_bytes) as cap:
            found = attempt(self._train, size)
        facts |= self._outcome(found, cap, size, after_oom)
        facts |= surroundings(capture, "after") | {"precision_after": read_precision()}
        trial = Trial(
            kind="cap", workload=self.workload.name, variant=self._variant(budget_bytes),
            batch_size=size, position=position, feed="synthetic", device=self.spec.device,
            precision=self.spec.precision, synthetic=True, cap_bytes=_cap_bytes(cap), **facts,
        )  # fmt: skip
        trial = trial.model_copy(update={"repeat": self._repeats()[trial.key]})
        self.run.append(trial)
        return trial

    def _train(self, size: int) -> float | None:
        step = new_step(self.spec, self.workload, self.capture.device)
        batch = batch_of(self.workload, size, self.capture.device)
        losses = [step(*batch).detach() for _ in range(STEPS)]
        return mean_loss(losses[-1:])

    def _outcome(self, found: Attempt, cap: Cap, size: int, after_oom: bool) -> dict[str, Any]:
        capture = self.capture
        peaks = {
            "peak_allocated_bytes": capture.peak_allocated_bytes(),
            "peak_reserved_bytes": capture.peak_reserved_bytes(),
        }
        about = {"cap": asdict(cap), "after_oom": after_oom}
        if found.ok:
            done = {"steps": STEPS, "updates": STEPS, "images": STEPS * size, "last_batch": size}
            return {**peaks, **done, "final_loss": found.value, "details": about}
        total_bytes = None if cap.fraction else capture.driver_memory().total_bytes
        observed = {**peaks, "batch_size": size, "fraction": cap.fraction,
                    "total_bytes": total_bytes}  # fmt: skip
        report = oom_report(found, observed)
        released = None if found.released is None else asdict(found.released)
        return {
            **peaks, "outcome": "oom", "error_class": found.error_class, "error_text": found.text,
            "oom": report["parsed"], "details": {**report, **about, "released": released},
        }  # fmt: skip

    def _cap(self, budget_bytes: int | None) -> Any:
        if budget_bytes is not None:
            return memory_cap(budget_bytes=budget_bytes)
        return memory_cap(fraction=self.spec.cap_fraction, device=self.spec.device)

    def _budget_bytes(self) -> int | None:
        """Return what the process may map on the CPU: never more than a quarter of what is free."""
        if self.spec.device != "cpu":
            return None
        default_bytes = _CPU_QUICK_BYTES if self.spec.quick else _CPU_BUDGET_BYTES
        return self.spec.cap_budget_bytes or min(default_bytes, host_free_bytes() // 4)

    def _room_bytes(self, budget_bytes: int | None) -> int:
        if budget_bytes is not None:
            return budget_bytes
        total_bytes = torch.cuda.get_device_properties(self.spec.device).total_memory
        held_bytes = torch.cuda.memory_allocated(self.spec.device)
        return max(0, int(self.spec.cap_fraction * total_bytes) - held_bytes)

    def _slope_bytes(self) -> float | None:
        """Return the memory of an image, from two small batches without a cap."""
        peaks = []
        for size in _PROBES[self.capture.device.type]:
            found = attempt(self._measured_peak, size)
            if not found.ok:
                raise InputError(
                    f"not even batch {size:,} trains without a cap: {found.text}; free memory first"
                )
            peaks.append((size, found.value))
        return bytes_per_image(peaks)

    def _measured_peak(self, size: int) -> int | None:
        capture = self.capture
        self._train(1)  # what the libraries load on first use is no image's memory
        capture.empty_cache()
        capture.reset_peak()
        self._train(size)
        return capture.peak_allocated_bytes()

    def _variant(self, budget_bytes: int | None) -> str:
        """Name the cap, so that trials under another cap stay apart."""
        if budget_bytes is not None:
            return f"budget {show_bytes(budget_bytes)}"
        return f"cap {show_share(self.spec.cap_fraction, 0)}"

    def _repeats(self) -> dict[tuple[Any, ...], int]:
        """Count the trials there are: a later one of the same key is the next repeat."""
        earlier = [t.model_copy(update={"repeat": 0}).key for t in self.run.trials("cap")]
        return collections.Counter(earlier)


def _cap_bytes(cap: Cap) -> int:
    return cap.allowed_bytes if cap.budget_bytes is None else cap.budget_bytes
