"""Functions that run inside a worker process in the tests; this module loads no torch."""

import collections
import ctypes
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from labhelpers.inputs import InputError
from labhelpers.sweep import Measure


def no_warm_up() -> None:
    """Warm nothing, so that a test's worker starts quickly."""


def echo(value: Any) -> Any:
    return value


def process_id() -> int:
    return os.getpid()


def fail(text: str) -> None:
    raise ValueError(text)


def refuse(text: str) -> None:
    raise InputError(text)


def quit_python(code: int) -> None:
    sys.exit(code)


def leave(code: int) -> None:
    os._exit(code)


def die(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)  # a signal may take a moment to arrive


def crash() -> None:
    ctypes.string_at(0)


def hang(seconds: float) -> None:
    time.sleep(seconds)


def spin() -> None:
    while True:
        pass


def hold_the_interpreter() -> None:
    """Loop in C without ever giving the interpreter's lock back, as a stuck library may."""
    collections.deque(itertools.repeat(0), maxlen=0)


def say_and_hang(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)


def say_and_hold(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    hold_the_interpreter()


def ask_for_a_petabyte() -> None:
    import torch

    torch.empty(2**50, dtype=torch.uint8)


def loaded_modules() -> list[str]:
    return sorted(sys.modules)


def start_method() -> str:
    import multiprocessing

    return multiprocessing.get_start_method()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def fail_without_words() -> None:
    raise Unprintable


# A sweep without torch


def prepare(device: str, require_gpu: bool) -> dict[str, Any]:
    return {"device": "cpu", "device_name": "a test", "asked": device, "gpu": require_gpu}


def measure(spec: dict[str, Any], batch_size: int, repeat: int, position: int) -> dict[str, Any]:
    """Return a trial at once; say in LABHELPERS_TEST_LOG which one was measured."""
    log = os.environ.get("LABHELPERS_TEST_LOG")
    if log:
        with open(log, "a") as stream:
            stream.write(json.dumps([batch_size, repeat]) + "\n")
    time.sleep(float(os.environ.get("LABHELPERS_TEST_SLEEP_S", "0")))
    return {
        "kind": "sweep", "workload": spec["workload"], "batch_size": batch_size,
        "repeat": repeat, "position": position, "feed": spec["feed"],
        "precision": spec["precision"], "device": "cpu", "images": 1000,
        "steps": -(-1000 // batch_size), "epoch_s": 1.0 / batch_size,
    }  # fmt: skip


def measure_or_fail(
    spec: dict[str, Any], batch_size: int, repeat: int, position: int
) -> dict[str, Any]:
    """Die at batch 2, raise at 3, hang at 4, run out of memory at 5, exit at 6."""
    ends = {
        2: lambda: die(signal.SIGKILL), 3: lambda: fail("three\nlines\nof text"),
        4: lambda: hang(60), 5: _out_of_memory, 6: lambda: leave(7),
    }  # fmt: skip
    ends.get(batch_size, lambda: None)()
    return measure(spec, batch_size, repeat, position)


def _out_of_memory() -> None:
    raise MemoryError("batch 5 does not fit")


WITHOUT_TORCH = Measure(prepare, measure)
FAILING = Measure(prepare, measure_or_fail)
