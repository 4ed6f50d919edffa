"""Progress on a terminal: a plain bar with the current batch, speed and time left.

Where the output is no terminal (a CI log, a file) the bar is off and only single lines are
printed.
"""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

from labhelpers.formats import show_bytes, show_rate, show_seconds
from labhelpers.records import Trial
from labhelpers.sweep import Progress


class TerminalProgress:
    """Show `sweep.Progress` as a bar on stderr; use it as a context manager and call it."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None  # type: ignore[type-arg]
        self._said: set[str] = set()

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._bar is not None:
            self._bar.close()

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            self._begin(progress)
        assert self._bar is not None
        if progress.trial is None:
            self._bar.set_description_str(_current(progress))
            return
        self._bar.total = progress.total  # automatic repeats add trials as they go
        self._bar.update(progress.done - self._bar.n)
        self._bar.set_postfix_str(_seen(progress))
        self._estimate(progress)
        if progress.trial.outcome != "ok":
            self._say(describe_failure(progress.trial))

    def _begin(self, progress: Progress) -> None:
        if progress.worker_start_s:
            self._say(f"worker started in {show_seconds(progress.worker_start_s)}")
        for note in progress.notes:
            self._say(f"note: {note}")
        self._bar = tqdm(
            total=progress.total, initial=progress.done, disable=None, unit="trial",
            file=sys.stderr, dynamic_ncols=True,
        )  # fmt: skip

    def _estimate(self, progress: Progress) -> None:
        if progress.remaining_s and not any(line.startswith("estimate") for line in self._said):
            left = progress.total - progress.done
            self._say(
                f"estimate after the first trial: about {show_seconds(progress.remaining_s)} for "
                f"{left} more, less if larger batches are faster"
            )

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            tqdm.write(line, file=sys.stderr)


def describe_failure(trial: Trial) -> str:
    """Say in one line how a trial ended that is not ok."""
    first_line = (trial.error_text or "").splitlines()[:1]
    reason = first_line[0] if first_line else trial.error_class
    if first_line and trial.outcome == "error" and trial.error_class:
        reason = f"{trial.error_class}: {reason}"
    return f"batch {trial.batch_size:,}, repeat {trial.repeat + 1}: {trial.outcome}: {reason}"


def _current(progress: Progress) -> str:
    if progress.current is None:
        return ""
    variant = f", {progress.current.variant}" if progress.current.variant else ""
    return f"batch {progress.current.batch_size:,}{variant}"


def _seen(progress: Progress) -> str:
    trial = progress.trial
    if trial is None or trial.outcome != "ok":
        return ""
    left = show_seconds(progress.remaining_s or 0)
    peak = show_bytes(trial.peak_allocated_bytes)
    return f"{show_rate(trial.images_per_s)}, {peak}, about {left} left"
