"""Start the command line in a process of its own, and look at what a run directory holds."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from tally import count

from labhelpers.records import Trial
from labhelpers.store import RUN_FILE, TRIALS_FILE, open_run

COMMAND = Path(__file__).with_name("command.py")
SIZES, REPEATS = (4, 8, 16, 32, 64), 2
PLANNED = {(size, repeat) for size in SIZES for repeat in range(REPEATS)}
OWN = ["--workload", "mine:workload"]
SWEEP = [
    "sweep", "--batch-sizes", ",".join(map(str, SIZES)), "--repeats", str(REPEATS),
    *OWN, "--device", "cpu",
]  # fmt: skip


def start(
    *arguments: object, before: Callable[[], None] | None = None, **environment: object
) -> subprocess.Popen[str]:
    """Start `labhelpers ...` without torch, in a session of its own; `before` runs in it first."""
    return subprocess.Popen(
        [sys.executable, str(COMMAND), *map(str, arguments)], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=before,
        env=os.environ | {name: str(value) for name, value in environment.items()},
    )  # fmt: skip


def finished(process: subprocess.Popen[str], timeout_s: float = 60) -> tuple[int, str]:
    """Wait for a process; return its exit code and what it said, and see that it left nobody."""
    _, errors = process.communicate(timeout=timeout_s)
    wait_until(lambda: not members(process.pid))
    assert "Traceback" not in errors, errors
    return process.returncode, errors


def call(*arguments: object, **options: Any) -> tuple[int, str]:
    """Run `labhelpers ...` to its end; options as for `start`."""
    return finished(start(*arguments, **options))


def members(session: int) -> list[int]:
    """Return the living processes of a session (a zombie is dead)."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            alive = process.info["status"] != psutil.STATUS_ZOMBIE
            if alive and os.getsid(process.pid) == session:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def wait_until(true: Callable[[], Any], within_s: float = 20.0) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def kept(path: Path) -> list[Trial]:
    """The trials a run holds; none before there is a run."""
    return open_run(path).trials() if (path / RUN_FILE).exists() else []


def check_whole(path: Path, planned: set[tuple[int, int]] = PLANNED) -> list[Trial]:
    """The run holds every planned trial, each exactly once, also in the raw file."""
    lines = (path / TRIALS_FILE).read_text().splitlines()
    trials = [Trial(**json.loads(line)) for line in lines]
    found = {(t.batch_size, t.repeat) for t in trials}
    count("trials lost", len(planned - found))
    count("trials doubled", len(trials) - len(found))
    count("trials found once, as planned", len(planned & found))
    assert sorted((t.batch_size, t.repeat) for t in trials) == sorted(planned)
    assert kept(path) == trials
    return trials


def resume(path: Path, before: list[Trial], **environment: object) -> list[Trial]:
    """Resume a run: what was finished stays as it was, and the set becomes whole."""
    code, errors = call("resume", path, *OWN, **environment)
    assert code in (0, 1), errors
    trials = check_whole(path)
    assert trials[: len(before)] == before
    return trials
