"""How a worker starts: without the caller's script, deaf to Ctrl-C, dying with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

_PREPARING = threading.Lock()


def prepare_child(parent: int) -> None:
    """Prepare the child: it ignores Ctrl-C (the parent decides) and dies with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: int) -> None:
    # Besides the kernel's signal: it does not exist everywhere, and may come before the prctl.
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C in this thread: a child started here never hears it, not even at its start."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Process(SpawnProcess):
    """A spawned process that does not run the caller's main script once more.

    Everything it needs is imported by path or comes as bytes; running the script again would
    start the measurement again wherever a script lacks `if __name__ == "__main__"`.
    """

    # The child's own children, such as a DataLoader's workers, start as they would in the caller.
    _start_method = None  # type: ignore[assignment]

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        from multiprocessing import spawn

        def without_main(name: str) -> dict[str, Any]:
            data = original(name)
            return {k: v for k, v in data.items() if not k.startswith("init_main_from")}

        with _PREPARING:
            original = spawn.get_preparation_data
            spawn.get_preparation_data = without_main
            try:
                with _deaf_to_ctrl_c():
                    return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]
            finally:
                spawn.get_preparation_data = original


class WorkerContext(SpawnContext):
    """How a worker is started: spawned, without the caller's main script."""

    Process = _Process  # type: ignore[assignment]
