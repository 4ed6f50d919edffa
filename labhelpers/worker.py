"""One spawned process that measures: time limits, crashes, stop; it dies with its parent.

The process stays warm between calls, so that torch's import and the device's context are paid
once. What travels, there and back, are bytes made by `cloudpickle` (see `packed`): functions
and classes of a notebook cell travel whole, and no tensor shares storage with the caller's, as
torch's own pickling would have it.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pebble

from labhelpers.inputs import InputError, StartError, error_text
from labhelpers.records import Outcome
from labhelpers.spawning import WorkerContext, prepare_child

POLL_S = 0.05
START_TIMEOUT_S = 300.0
STARTS = 3
GOODBYE_S = 0.5
# A child that is asked to end may clean up for so long; Stop shall take less than 3 s.
pebble.CONSTS.term_timeout = 1.0


def import_torch() -> None:
    """Import torch and start its threads: what makes a fresh child slow."""
    import torch

    torch.set_num_threads(torch.get_num_threads())


@dataclass(frozen=True)
class Answer:
    """How a call ended: its value, or why there is none (`oom`, `killed`, `timeout`, `error`)."""

    outcome: Outcome
    value: Any = None
    error_class: str | None = None
    error_text: str | None = None
    wall_s: float = 0.0


class Stopped(Exception):
    """The caller's stop event was set; the call was ended and its process replaced."""


class TimeLimit(Exception):
    """A call took longer than it may."""


class _OneChildPool(pebble.ProcessPool):  # type: ignore[misc]
    """A pool that does not replace its child when that dies: the pool is closed then.

    A replacement would be ended while it starts, and its last words would stand among ours.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        manager = self._pool_manager.worker_manager
        create = [manager.create_workers]
        manager.create_workers = lambda: create.pop()() if create else None  # type: ignore[method-assign]


class Worker:
    """Run functions in one warm child process, one at a time.

    Use it as a context manager. `start_s` is the time that starting the process took;
    `warm_with` is what the child runs before its first call.
    """

    def __init__(self, warm_with: Callable[[], None] = import_torch) -> None:
        self.start_s = 0.0
        self._warm_with = warm_with
        self._pool: pebble.ProcessPool | None = None
        self._starter: ThreadPoolExecutor | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float,
        stop: threading.Event | None = None,
    ) -> Answer:  # fmt: skip
        """Run `function(*arguments)` in the child and say how it ended.

        The time limit holds for the function alone: the child is started before, if need be.

        Raises:
            InputError: the function refused its input (raised anew here).
            Stopped: `stop` was set; the child was ended, or the call not begun.
        """
        if stop is not None and stop.is_set():
            raise Stopped
        self.warm_up(stop=stop)
        answer = self._submit(function, arguments, timeout_s, stop)
        if answer.error_class == "InputError":
            raise InputError(answer.error_text)
        return answer

    def warm_up(self, stop: threading.Event | None = None) -> None:
        """Start the child and warm it, unless it is warm already.

        A child that is killed while it starts is started anew.

        Raises:
            StartError: the child does not start.
        """
        if self._pool is not None and self._pool.active:
            return
        started = time.perf_counter()
        for _ in range(STARTS):
            answer = self._start(stop)
            if answer.outcome != "killed":
                break
        self.start_s += time.perf_counter() - started
        if answer.outcome != "ok":
            self.close()
            raise StartError(f"the worker process does not start: {answer.error_text}")

    def _start(self, stop: threading.Event | None) -> Answer:
        self.close()
        # The kernel ends the child with the thread that started it, so one thread stays for it.
        self._starter = ThreadPoolExecutor(max_workers=1)
        self._pool = _OneChildPool(
            max_workers=1,
            context=WorkerContext(),
            initializer=prepare_child,
            initargs=(os.getpid(),),
        )
        return self._submit(self._warm_with, (), START_TIMEOUT_S, stop)

    def restart(self) -> None:
        """End the child, so that the next call begins in a fresh process."""
        self.close()

    def close(self) -> None:
        """End the child at once and wait until it is gone."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()
        starter, self._starter = self._starter, None
        if starter is not None:
            starter.shutdown()

    def _submit(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float,
        stop: threading.Event | None,
    ) -> Answer:  # fmt: skip
        assert self._pool is not None
        assert self._starter is not None
        call = packed((function, arguments))
        started = time.perf_counter()
        schedule = self._pool.schedule
        future = self._starter.submit(schedule, _guarded, (call,)).result()
        try:
            while not concurrent.futures.wait([future], timeout=POLL_S).done:
                if stop is not None and stop.is_set():
                    raise Stopped
                # Pebble's own limit would follow the system's clock, which may be set.
                if time.perf_counter() - started > timeout_s:
                    raise TimeLimit
                # A pool whose child died at its very start may end without telling its futures.
                if not self._pool.active:
                    concurrent.futures.wait([future], timeout=GOODBYE_S)
                    break
        except TimeLimit:
            future.cancel()
            self.close()
            text = f"took longer than its time limit of {timeout_s:g} s and was ended"
            wall_s = time.perf_counter() - started
            return Answer("timeout", None, "TimeoutError", text, wall_s)
        except BaseException:  # also Ctrl-C: the child must not go on measuring
            future.cancel()
            self.close()
            raise
        return self._answer(future, time.perf_counter() - started)

    def _answer(self, future: Any, wall_s: float) -> Answer:
        try:
            outcome, packed_value, name, text = future.result(timeout=0)
            value = unpacked(packed_value)
        except (pebble.ProcessExpired, BrokenProcessPool, TimeoutError) as error:
            self.close()
            code = getattr(error, "exitcode", None)
            return Answer("killed", None, "ProcessExpired", _death(code), wall_s)
        if name == "ContextLost":
            self.close()
        return Answer(outcome, value, name, text, wall_s)


@contextmanager
def worker_at_hand(worker: Worker | None) -> Iterator[Worker]:
    """Yield the caller's worker, or one of our own that ends with the block."""
    if worker is not None:
        yield worker
        return
    with Worker() as own:
        yield own


def packed(value: Any) -> bytes:
    """Pack a value (also a class from a notebook cell) so that it can travel to a worker."""
    data: bytes = cloudpickle.dumps(value)
    return data


def unpacked(data: bytes) -> Any:
    """Unpack what `packed` packed; only ever used on bytes from our own parent process."""
    return cloudpickle.loads(data)


def _death(exitcode: int | None) -> str:
    """Say how a child ended, from its exit code."""
    if exitcode is not None and exitcode < 0:
        number = -exitcode
        name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
        hint = " (the system ended it: host memory was probably used up)" if number == 9 else ""
        return f"the worker process was killed by signal {number}, {name}{hint}"
    if exitcode is None:
        return "the worker process was gone before the call began"
    return f"the worker process ended by itself with exit code {exitcode}"


def _guarded(call: bytes) -> tuple[Any, ...]:
    """Run in the child; return (outcome, packed value, error class, text), never an exception."""
    from labhelpers.oom import is_context_lost, is_oom

    try:
        function, arguments = unpacked(call)
        return "ok", packed(function(*arguments)), None, None
    except BaseException as error:  # noqa: BLE001 - SystemExit too: it is the call's outcome
        outcome = "oom" if is_oom(error) else "error"
        name = "ContextLost" if is_context_lost(error) else type(error).__name__
        name = "InputError" if isinstance(error, InputError) else name
        text = error_text(error)
    # Outside the handler: inside it the exception's frames still hold the tensors.
    _clean_up()
    return outcome, packed(None), name, text


def _clean_up() -> None:
    from labhelpers.freeing import release_memory

    with suppress(Exception):  # a second error must not hide the first
        release_memory()


def children() -> list[int]:
    """Return the process ids of this process's living children (for tests and doctor)."""
    return [process.pid for process in multiprocessing.active_children() if process.pid]
