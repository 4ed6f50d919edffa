"""One page on whether this machine can measure: each line ok, a warning or a problem.

It is what a bug report asks for, so it names no user, host or home directory.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from labhelpers import __version__, drivers
from labhelpers.doctor_lines import LINES, Line
from labhelpers.host_memory import host_free_bytes, host_total_bytes
from labhelpers.inputs import InputError, StartError
from labhelpers.worker import Answer, Worker

PROBE_TIMEOUT_S = 120.0
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def examine(device: str = "auto", data_dir: str = "data") -> dict[str, Any]:
    """Gather the facts, each torch-side one in a worker: a crash there costs one line.

    Raises:
        InputError: a device that does not exist here was asked for.
    """
    facts: dict[str, Any] = {
        "labhelpers": __version__, "python": platform.python_version(), "asked": device,
        "data_dir": data_dir, "data": _data(data_dir),
        "host_free_bytes": host_free_bytes(), "host_total_bytes": host_total_bytes(),
        "driver_cuda": drivers.ask_nvml("nvmlSystemGetCudaDriverVersion"),
        "chromium": any(shutil.which(name) for name in CHROMIUM),
    }  # fmt: skip
    with Worker() as worker:
        try:
            worker.warm_up()
        except StartError as error:
            return facts | {"worker": str(error)}
        return facts | {"worker": None, "start_s": worker.start_s} | _probe(worker, device)


def _probe(worker: Worker, device: str) -> dict[str, Any]:
    from labhelpers.doctor_probes import look_at_device, try_cap, try_pinned_memory, try_precision
    from labhelpers.trials import prepare

    started = worker.run(prepare, device, False, timeout_s=PROBE_TIMEOUT_S)
    if started.outcome != "ok":
        return {"environment": None, "device_error": started.error_text}
    where = started.value["device"]
    probes: dict[str, Callable[[str], Any]] = {
        "device": look_at_device, "precision": try_precision, "cap": try_cap,
        "pinned": try_pinned_memory,
    }  # fmt: skip
    if where == "cpu":
        del probes["pinned"]
    found: dict[str, Any] = {"environment": started.value}
    for name, probe in probes.items():
        found[name] = _told(worker.run(probe, where, timeout_s=PROBE_TIMEOUT_S))
    return found


def _told(answer: Answer) -> dict[str, Any]:
    return {"value": answer.value, "error": answer.error_text}


def _data(data_dir: str) -> str | None:
    """Return why the data cannot be used; None if they can."""
    from labhelpers.data import load_arrays

    try:
        load_arrays(data_dir, synthetic=False)
    except (InputError, OSError, ValueError) as error:
        return str(error)
    return None


def page(facts: dict[str, Any]) -> tuple[list[str], int]:
    """Return the lines of the page and the exit code: 1 if there is a problem, else 0."""
    lines = [line for make in LINES if (line := make(facts)) is not None]
    width = max(len(line.name) for line in lines)
    text = [f"labhelpers {facts['labhelpers']} doctor"]
    for line in lines:
        text.append(f"{line.status:<8} {line.name:<{width}}  {line.text}")
        if line.advice:
            text.append(f"{'':<8} {'':<{width}}  -> {line.advice}")
    text.append(conclusion(lines))
    return [without_names(each) for each in text], int(_count(lines, "problem") > 0)


def conclusion(lines: list[Line]) -> str:
    """Count what was found in one line."""
    problems, warnings = _count(lines, "problem"), _count(lines, "warning")
    if not problems and not warnings:
        return f"All {len(lines)} checks are ok."
    return f"{len(lines)} checks: {problems} problems, {warnings} warnings."


def _count(lines: list[Line], status: Literal["problem", "warning"]) -> int:
    return sum(line.status == status for line in lines)


def without_names(text: str) -> str:
    """Take the user's name, the host's name and the home directory out of a line."""
    names = [socket.gethostname()]
    with suppress(Exception):  # a user without an entry in the system's list
        names.append(getpass.getuser())
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    for name in names:
        if name:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text)
    here = str(Path.cwd())
    return text.replace(here + os.sep, "") if len(here) > 1 else text
