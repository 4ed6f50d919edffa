"""What tries a batch size: one model, kept, whose state is put back after every trial.

It runs in the worker, or in the caller's process, which gets everything back as it was.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from labhelpers.capture import Capture, capture_for
from labhelpers.environment import describe, resolve_device
from labhelpers.finder_failures import TooSlow, failure_facts
from labhelpers.finder_room import (
    empty_device,
    little_to_collect,
    memory_limit,
    room_of,
    start_libraries,
)
from labhelpers.handback import (
    Places,
    apply_settings,
    model_handed_back,
    process_handed_back,
)
from labhelpers.oom import Attempt, attempt
from labhelpers.optimizers import optimizer_named
from labhelpers.records import FinderSpec
from labhelpers.state import TrainingState, restore_state, save_state
from labhelpers.training import Step, make_step, read_precision, set_precision
from labhelpers.trials import environment_id_of, surroundings
from labhelpers.workloads import Workload, batch_of

OWN_PRECISION = "own"
"""How trials name the precision where the caller's settings are left as they are."""
WARM_UP_SIZE = 2


class Session:
    """One model on one device, tried at one batch size after another; `close` hands it back.

    Args:
        workload: what is trained.
        asked: device, precision, optimizer, iterations and seed are used.
        settings: process-wide settings to run under (see `handback.read_settings`); None sets
            the precision that is asked for.
        own_process: whether this process is there for the session alone.
    """

    def __init__(
        self, workload: Workload, asked: FinderSpec, settings: dict[str, Any] | None = None, *,
        own_process: bool = False,
    ) -> None:  # fmt: skip
        device = resolve_device(asked.device, require_gpu=asked.require_gpu)
        self.device = torch.device(device)
        self._workload, self._asked, self._own = workload, asked, settings is not None
        self._own_process = own_process
        name = asked.optimizer
        self._make_optimizer = workload.make_optimizer if name is None else optimizer_named(name)
        self._warm = self.device.type != "cpu"
        if self.device.type == "cuda":
            torch.cuda.init()
        with ExitStack() as stack:  # an error while building hands everything back too
            stack.enter_context(process_handed_back())
            self._capture = self._prepared(settings)
            self._model, self._start = self._built(stack)
            self._places = Places(self._model)
            if own_process:
                stack.enter_context(little_to_collect())
            self._stack = stack.pop_all()

    def facts(self) -> dict[str, Any]:
        """Return the environment and what the trials may use, JSON-able."""
        normal = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self._model.modules())
        return {
            "environment": describe(str(self.device)),
            "batch_norm": normal,
            "dataset_size": self._workload.dataset_size,
            **room_of(self._capture),
        }

    def try_size(self, batch_size: int, cap_bytes: int | None, limit_s: float) -> dict[str, Any]:
        """Train `num_iterations` steps, at least three, from an emptied cache.

        Returns the facts of a trial, JSON-able, and beside them under `error` the bytes of an
        exception that was not about memory.
        """
        seen: dict[str, Any] = {"optimizers": []}
        began = time.perf_counter()
        facts = self._about(batch_size, cap_bytes)
        empty_device(self._capture, workspaces=self._own_process)
        try:
            facts |= self._outcome(lambda: self._train(batch_size, cap_bytes, limit_s, seen), seen)
            if not facts.get("spoiled"):
                facts |= surroundings(self._capture, "after")
        finally:
            # A device whose context is lost takes nothing back, and its error came first.
            with suppress(RuntimeError) if facts.get("spoiled") else nullcontext():
                self._put_back(seen.pop("optimizers"))
        facts["precision_after"] = read_precision()
        return facts | {"peaks": seen, "seconds": time.perf_counter() - began}

    def close(self) -> None:
        """Hand the model and the process back as they were when the session began."""
        self._stack.close()
        del self._model, self._places, self._start
        empty_device(self._capture, workspaces=self._own_process)

    def _prepared(self, settings: dict[str, Any] | None) -> Capture:
        capture = capture_for(self.device)
        if settings is None:
            set_precision(self._asked.precision)
        else:
            apply_settings(settings)
        if self.device.type == "cuda":
            start_libraries(self.device)
            empty_device(capture, workspaces=self._own_process)
        return capture

    def _built(self, stack: ExitStack) -> tuple[nn.Module, TrainingState]:
        """Build the model on the device, and keep the state that each trial starts from."""
        torch.manual_seed(self._asked.seed)
        model = self._workload.make_model()
        state = stack.enter_context(model_handed_back(model))
        model.to(self.device).train()
        # The caller's gradients come back at the end; between the trials there are none.
        start = dataclasses.replace(state, gradients=dict.fromkeys(state.gradients))
        return model, start

    def _about(self, batch_size: int, cap_bytes: int | None) -> dict[str, Any]:
        return {
            "batch_size": batch_size, "device": str(self.device), "cap_bytes": cap_bytes,
            "workload": self._workload.name, "synthetic": True,
            "precision": OWN_PRECISION if self._own else self._asked.precision,
            "precision_before": read_precision(),
            "environment_id": environment_id_of(str(self.device)),
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip

    def _outcome(self, train: Callable[[], dict[str, Any]], seen: dict[str, Any]) -> dict[str, Any]:
        try:
            tried = self._attempt(train, seen)
        except Exception as error:  # noqa: BLE001 - whatever the workload raises is its outcome
            return failure_facts(error, host_limit=self.device.type == "cpu")
        if tried.failure is None:
            return dict(tried.value)
        return {
            "outcome": tried.outcome, "error_class": tried.error_class, "error_text": tried.text,
            "oom": tried.failure.message.to_dict(), "spoiled": tried.context_lost,
        }  # fmt: skip

    def _attempt(self, train: Callable[[], dict[str, Any]], seen: dict[str, Any]) -> Attempt:
        if self._own_process or self.device.type != "cpu":
            return attempt(train)
        # Once out of memory, the CPU's kernel library fails for ever in that thread, so it must
        # not be the caller's. (Its heap gives less back, so the peaks are noisier.)
        with ThreadPoolExecutor(max_workers=1) as pool:
            try:
                return pool.submit(attempt, train).result()
            except BaseException:
                seen["ended"] = True  # Ctrl-C came to this thread: the other one ends its steps
                raise

    def _train(
        self, batch_size: int, cap_bytes: int | None, limit_s: float, seen: dict[str, Any]
    ) -> dict[str, Any]:
        with torch.inference_mode(False), torch.enable_grad():
            if not self._warm:
                self._warm_up(min(batch_size, WARM_UP_SIZE), seen)
            self._capture.reset_peak()
            with memory_limit(self.device, cap_bytes):
                return self._steps(batch_size, time.perf_counter() + limit_s, seen)

    def _steps(self, batch_size: int, deadline: float, seen: dict[str, Any]) -> dict[str, Any]:
        """Run one step, read its peak, and time the others."""
        capture, steps = self._capture, max(2, self._asked.num_iterations - 1)
        retries = capture.alloc_retries()
        step = self._new_step(seen)
        batch = batch_of(self._workload, batch_size, self.device)
        capture.prepare(steps)
        try:
            step(*batch)
            capture.synchronize()
            seen["first_allocated"] = capture.peak_allocated_bytes()
            seen["first_reserved"] = capture.peak_reserved_bytes()
            capture.restart_peak()
            started = capture.start()
            for _ in range(steps):
                if time.perf_counter() > deadline or "ended" in seen:
                    raise TooSlow("took longer than its time limit and was ended between steps")
                step(*batch)
                capture.mark()
            epoch_s = capture.stop(started)
        finally:
            name = "steady" if "first_allocated" in seen else "first"
            seen[f"{name}_allocated"] = capture.peak_allocated_bytes()
            seen[f"{name}_reserved"] = capture.peak_reserved_bytes()
        now = capture.alloc_retries()
        return {
            "outcome": "ok", "steps": steps, "updates": steps + 1, "epoch_s": epoch_s,
            "images": batch_size * steps, "last_batch": batch_size,
            "step_times_s": capture.step_times_s(),
            "alloc_retries": None if now is None or retries is None else now - retries,
        }  # fmt: skip

    def _new_step(self, seen: dict[str, Any]) -> Step:
        asked = self._asked
        optimizer = self._make_optimizer(self._model.parameters(), asked.learning_rate)
        # It may be the caller's own, with a state that must come back.
        seen["optimizers"].append((optimizer, save_state(nn.Module(), optimizer)))
        precision = "fp32" if self._own else asked.precision
        return make_step(self._model, optimizer, self._workload.loss, precision, self.device)

    def _warm_up(self, batch_size: int, seen: dict[str, Any]) -> None:
        """Start what a first step starts, such as threads, before a limit counts."""
        self._new_step(seen)(*batch_of(self._workload, batch_size, self.device))
        self._warm = True
        self._put_back(seen["optimizers"])
        seen["optimizers"] = []

    def _put_back(self, optimizers: list[tuple[torch.optim.Optimizer, TrainingState]]) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        for optimizer, state in optimizers:
            restore_state(state, nn.Module(), optimizer)
        self._places.put_back()
        restore_state(self._start, self._model)
        self._model.train()
