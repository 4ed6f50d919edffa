"""Progress: a bar on a terminal, single lines in a log, and one line for a failure."""

import io
from types import SimpleNamespace

import pytest
from IPython.core.events import EventManager
from IPython.display import HTML

from labhelpers import notebooks
from labhelpers.progress import TerminalProgress, describe_failure
from labhelpers.records import Trial
from labhelpers.sweep import Planned, Progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


OK = Trial(
    kind="sweep", batch_size=32, images=1000, epoch_s=0.5, peak_allocated_bytes=3 * 2**20, steps=2
)
FAILED = Trial(kind="sweep", batch_size=64, repeat=1, outcome="timeout", error_text="too long\nx")


def show(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """Play a sweep of two trials to a stream and return what it shows."""
    monkeypatch.setattr("sys.stderr", stream)
    first, second = Planned(32, 0, 0), Planned(64, 1, 1)
    notes = {"notes": ("images are made up",), "worker_start_s": 2.0}
    with TerminalProgress() as progress:
        progress(Progress(2, 0, first, None, None, **notes))
        progress(Progress(2, 1, first, OK, 30.0, **notes))
        progress(Progress(2, 1, second, None, 30.0, **notes))
        progress(Progress(2, 2, second, FAILED, 0.0, **notes))
    return stream.getvalue()


def test_a_log_gets_single_lines_and_no_bar(monkeypatch):
    assert show(io.StringIO(), monkeypatch).splitlines() == [
        "worker started in 2.00 s",
        "note: images are made up",
        "estimate after the first trial: about 30.0 s for 1 more, less if larger batches are "
        "faster",
        "batch 64, repeat 2: timeout: too long",
    ]


def test_a_terminal_gets_a_bar_with_batch_speed_memory_and_time_left(monkeypatch):
    text = show(Terminal(), monkeypatch)
    assert "\r" in text
    assert "batch 32" in text
    assert "2,000 images/s, 3.0 MiB, about 30.0 s left" in text
    assert "2/2" in text
    assert text.count("estimate after the first trial") == 1


def test_a_resumed_sweep_begins_where_it_stood(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with TerminalProgress() as progress:
        progress(Progress(27, 20, Planned(32, 0, 20)))
    assert "20/27" in stream.getvalue()


def test_a_failure_is_told_in_one_line():
    assert describe_failure(FAILED) == "batch 64, repeat 2: timeout: too long"
    without_text = Trial(kind="sweep", batch_size=8, outcome="error", error_class="ValueError")
    assert describe_failure(without_text) == "batch 8, repeat 1: error: ValueError"


# In a notebook


class Line:
    """What a display handle does, and what it shows."""

    def __init__(self) -> None:
        self.text = ""

    def update(self, shown: HTML) -> None:
        self.text = shown.data


@pytest.fixture
def cell(monkeypatch):
    """Return a shell's events and the line that is displayed under its cell."""
    events = EventManager(None, {"post_run_cell": lambda _: None})
    line = Line()

    def display(shown: HTML, **_: object) -> Line:
        line.update(shown)
        return line

    monkeypatch.setattr(notebooks, "get_ipython", lambda: SimpleNamespace(events=events))
    monkeypatch.setattr(notebooks, "display", display)
    return events, line


@pytest.mark.parametrize(
    ("success", "left"),
    [(True, "nothing was left to measure: the run holds it"), (False, "starting the worker …")],
)
def test_a_cell_that_measured_nothing_does_not_end_with_its_first_words(cell, success, left):
    events, line = cell
    notebooks.NotebookProgress()
    assert line.text == "starting the worker …"
    events.trigger("post_run_cell", SimpleNamespace(success=success))
    assert line.text == left
    assert events.callbacks["post_run_cell"] == []


def test_a_cell_that_measured_ends_with_what_it_did(cell):
    events, line = cell
    told = notebooks.NotebookProgress()
    told(Progress(3, 1, Planned(64, 0, 0, "host"), remaining_s=4.0))
    assert line.text == "1 of 3 trials done, batch 64, host, about 4.00 s left"
    told(Progress(3, 3, None))
    events.trigger("post_run_cell", SimpleNamespace(success=True))
    assert line.text == "3 of 3 trials done"
