"""Measurements in the background of a notebook's kernel; closing the page does not end them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from labhelpers.records import Spec
from labhelpers.store import RunDirectory
from labhelpers.sweep import Progress
from labhelpers.worker import Stopped

State = Literal["ready", "running", "stopping", "stopped", "done", "failed"]
Runner = Callable[..., Any]
"""`runner(spec, run, on_progress=…, stop=…)`: measures what is missing; raises Stopped."""

_SESSIONS: dict[tuple[str, Path], Session] = {}


class Session:
    """One request being measured into one run directory, in a thread of its own.

    `watcher` is called with the session after every change, mostly on the measuring thread.
    There is one: a panel that is shown again takes the place of the old. `origin` is the run
    directory of the notebook that asked, if it is another than the one measured into.
    """

    def __init__(
        self, name: str, run: RunDirectory, spec: Spec, runner: Runner,
        origin: RunDirectory | None = None,
    ) -> None:  # fmt: skip
        self.name, self.run, self.spec = name, run, spec
        self.origin = origin or run
        self.state: State = "ready"
        self.progress: Progress | None = None
        self.message = ""
        self.watcher: Callable[[Session], None] = _nobody
        self._runner = runner
        self._stop = threading.Event()
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def active(self) -> bool:
        """Tell whether it is measuring, or about to stop."""
        return self.state in ("running", "stopping")

    def start(self) -> None:
        """Measure in the background what the run directory does not hold yet.

        Does nothing while it is measuring already.
        """
        with self._changing:
            if self.active:
                return
            self.state = "running"
        self._stop.clear()
        self.message, self.progress = "", None
        _SESSIONS[self.name, self.origin.path.resolve()] = self
        # A daemon: a kernel that is shut down need not wait, finished trials are on disk.
        self._thread = threading.Thread(target=self._measure, name=self.name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the trial that is being measured; finished ones are kept. Returns at once."""
        with self._changing:
            if self.state != "running":
                return
            self.state = "stopping"
        self._stop.set()
        self._tell()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is not measuring any more; tell whether that is so."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.active

    def _measure(self) -> None:
        state: State = "done"
        try:
            self._runner(self.spec, self.run, on_progress=self._advance, stop=self._stop)
        except Stopped:
            state = "stopped"
        except Exception as error:  # noqa: BLE001 - a thread has no caller: the panel shows it
            state = "failed"
            self.message = _in_one_line(error)
        with self._changing:
            self.state = state
        self._tell()

    def _advance(self, progress: Progress) -> None:
        self.progress = progress
        self._tell()

    def _tell(self) -> None:
        try:
            self.watcher(self)
        except Exception as error:  # noqa: BLE001 - a page that is gone must not end a measurement
            self.message = f"the panel cannot be drawn: {_in_one_line(error)}"


def session_of(name: str, run: RunDirectory) -> Session | None:
    """Return the kernel's session to show for a kind of measurement; None if there is none.

    It is the one that is measuring now, whatever its run directory: a reader who comes back
    and runs the cells again has made a new directory, but means this one. Else it is the last
    one that was asked for by a notebook with the given run.
    """
    for (kind, _), session in _SESSIONS.items():
        if kind == name and session.active:
            return session
    return _SESSIONS.get((name, run.path.resolve()))


def _nobody(_: Session) -> None:
    """Stand in where nobody watches."""


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    known = isinstance(error, (ValueError, RuntimeError, OSError))
    return text if known else f"{type(error).__name__}: {text}"
