"""Measuring functions that go wrong inside the worker as they are told; no torch.

LABHELPERS_TEST_FAULTS holds JSON: {"16": ["hang", 60]} makes batch 16 hang for a minute. A fault
happens once: it leaves a mark in LABHELPERS_TEST_MARKS, so that a resumed run goes on.
"""

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measures

from labhelpers.sweep import Measure

MIB = 2**20


def fill_disk(file: str) -> None:
    """Write until the disk is full."""
    with open(file, "wb", buffering=0) as stream:
        try:
            while stream.write(b"\0" * 4096):
                pass
        except OSError:
            return


def use_up_memory(budget_mib: int) -> None:
    """Take memory until the limit says no: an address-space limit if a budget is given."""
    if budget_mib:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + budget_mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    taken = []
    while True:
        taken.append(bytearray(16 * MIB))


def set_clock(file: str, hang_s: float) -> None:
    """Set the clock, as `clock.c` understands it, in the middle of a trial."""
    Path(file).touch()
    time.sleep(hang_s)


FAULTS: dict[str, Callable[..., None]] = {
    "hang": time.sleep, "fill": fill_disk, "memory": use_up_memory, "clock": set_clock,
}  # fmt: skip


def measure(spec: dict[str, Any], batch_size: int, repeat: int, position: int) -> dict[str, Any]:
    """Return a trial like `measures.measure`, after the fault that is asked for this size."""
    fault = json.loads(os.environ.get("LABHELPERS_TEST_FAULTS", "{}")).get(str(batch_size))
    mark = Path(os.environ.get("LABHELPERS_TEST_MARKS", "."), f"fault-{batch_size}")
    if fault and not mark.exists():
        mark.touch()
        FAULTS[fault[0]](*fault[1:])
    trial = measures.measure(spec, batch_size, repeat, position)
    # As long as a real trial's, so that it does not fit into the file's last page.
    return trial | {"step_times_s": [0.001] * 800}


FAULTY = Measure(measures.prepare, measure)
