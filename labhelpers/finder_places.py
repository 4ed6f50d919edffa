"""Where the trials of a search run: in the worker process, or in the caller's own."""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import suppress
from typing import Any, Protocol

from labhelpers.finder_worker import close_session, open_session, opened, try_in_session
from labhelpers.inputs import InputError
from labhelpers.records import FinderSpec
from labhelpers.worker import Stopped, Worker, packed

OPEN_TIMEOUT_S = 300.0
GRACE_S = 5.0
"""How much later than its limit a trial is ended from outside, together with its process."""
_CLOSE_TIMEOUT_S = 30.0


class Place(Protocol):
    """Where a session is opened, sizes are tried, and all is handed back."""

    start_s: float

    def open(self) -> dict[str, Any]:
        """Open the session and return its facts, or those of its failure."""

    def try_size(self, batch_size: int, cap_bytes: int | None, limit_s: float) -> dict[str, Any]:
        """Try a size and return the facts of its trial."""

    def close(self) -> None:
        """Hand everything back."""


class InWorker:
    """Trials in the worker: a crash, a kill and a hang are outcomes of theirs.

    `source` is the packed workload; None where the spec's reference is enough.
    """

    def __init__(
        self, spec: FinderSpec, source: bytes | None, settings: dict[str, Any] | None,
        worker: Worker | None, stop: threading.Event | None,
    ) -> None:  # fmt: skip
        self.start_s = 0.0
        self._asked, self._source, self._settings = spec.model_dump(mode="json"), source, settings
        self._own, self._worker, self._stop = worker is None, worker or Worker(), stop
        self._token = uuid.uuid4().hex

    def open(self) -> dict[str, Any]:
        before_s = self._worker.start_s
        answer = self._worker.run(
            open_session, self._token, self._asked, self._source, self._settings,
            timeout_s=OPEN_TIMEOUT_S, stop=self._stop,
        )  # fmt: skip
        self.start_s += self._worker.start_s - before_s + answer.wall_s
        return answer.value if answer.outcome == "ok" else _ended(answer)

    def try_size(self, batch_size: int, cap_bytes: int | None, limit_s: float) -> dict[str, Any]:
        while True:
            # Between two steps the session ends a slow trial itself, which keeps the process.
            answer = self._worker.run(
                try_in_session, self._token, batch_size, cap_bytes, limit_s,
                timeout_s=limit_s + GRACE_S, stop=self._stop,
            )  # fmt: skip
            if answer.outcome != "ok":
                return _ended(answer)
            if answer.value is not None:
                if answer.value.get("spoiled"):
                    self._worker.restart()
                return dict(answer.value, wall_s=answer.wall_s)
            failed = self.open()  # the process was replaced since
            if "outcome" in failed:
                return failed

    def close(self) -> None:
        if self._own:
            self._worker.close()
            return
        with suppress(Exception):  # it must not hide what ended the search
            self._worker.run(close_session, self._token, timeout_s=_CLOSE_TIMEOUT_S)


class InProcess:
    """Trials in this process; a hang between two steps ends at the time limit, no other."""

    def __init__(
        self, spec: FinderSpec, workload: Any, settings: dict[str, Any] | None,
        stop: threading.Event | None,
    ) -> None:  # fmt: skip
        self.start_s = 0.0
        self._spec, self._workload, self._settings = spec, workload, settings
        self._stop, self._token = stop, uuid.uuid4().hex

    def open(self) -> dict[str, Any]:
        started = time.perf_counter()
        facts = opened(self._token, self._workload, self._spec, self._settings)
        self.start_s += time.perf_counter() - started
        return facts

    def try_size(self, batch_size: int, cap_bytes: int | None, limit_s: float) -> dict[str, Any]:
        if self._stop is not None and self._stop.is_set():
            raise Stopped
        started = time.perf_counter()
        facts = try_in_session(self._token, batch_size, cap_bytes, limit_s)
        assert facts is not None
        return dict(facts, wall_s=time.perf_counter() - started)

    def close(self) -> None:
        close_session(self._token)


def choose_place(
    spec: FinderSpec, workload: Any, settings: dict[str, Any] | None, *, worker: Worker | None,
    isolate: bool | None, stop: threading.Event | None,
) -> tuple[Place, str | None]:  # fmt: skip
    """Return the place for a workload (None: the spec's reference), and a note if it stays here.

    Raises:
        InputError: isolation is demanded, and the workload cannot travel.
    """
    here = InProcess(spec, workload, settings, stop)
    if isolate is False:
        return here, None
    if workload is None:
        return InWorker(spec, None, settings, worker, stop), None
    try:
        source = packed(workload)
    except Exception as error:  # noqa: BLE001 - whatever keeps it from travelling
        return here, stays_here(isolate, f"{type(error).__name__}: {error}")
    return InWorker(spec, source, settings, worker, stop), None


def stays_here(isolate: bool | None, reason: str) -> str:
    """Say why a workload is tried in this process; InputError if that must not be."""
    why = f"the workload cannot travel to a worker process ({' '.join(reason.split())})"
    if isolate:
        raise InputError(f"isolate: {why}; give an import path, or leave isolate out")
    return f"{why}: it was tried in this process, where a crash or a hang would have ended it"


def _ended(answer: Any) -> dict[str, Any]:
    return {
        "outcome": answer.outcome, "error_class": answer.error_class,
        "error_text": answer.error_text, "wall_s": answer.wall_s,
    }  # fmt: skip
