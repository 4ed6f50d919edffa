"""Measuring in the background: stop, resume, failure, and finding the session again."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import measures
import pytest

from labhelpers.inputs import InputError
from labhelpers.records import SweepSpec, ask
from labhelpers.sessions import Session, session_of
from labhelpers.store import RunDirectory
from labhelpers.sweep import run_sweep
from labhelpers.worker import Worker

WARM_WITH = measures.no_warm_up
LIMIT_S = 60
pytestmark = pytest.mark.usefixtures("no_sessions")


def spec_of(sizes: list[int]) -> SweepSpec:
    return ask(SweepSpec, {"workload": "mine:w", "device": "cpu", "batch_sizes": sizes})


def session_for(run: RunDirectory, worker: Worker, sizes: list[int], **more: Any) -> Session:
    runner = partial(run_sweep, worker=worker, measure=more.get("measure", measures.WITHOUT_TORCH))
    return Session("sweep", run, spec_of(sizes), runner)


def test_it_measures_in_the_background(run: RunDirectory, worker: Worker):
    session = session_for(run, worker, [1, 2])
    seen: list[tuple[str, int | None]] = []
    session.watcher = lambda s: seen.append((s.state, s.progress and s.progress.done))
    session.start()
    assert session.active
    assert session.wait(LIMIT_S)
    assert (session.state, session.message) == ("done", "")
    assert len(run.trials()) == 6
    assert seen[-1] == ("done", 6)
    assert [done for _, done in seen] == sorted(done or 0 for _, done in seen)


def test_stop_keeps_what_is_finished_and_start_goes_on(
    run: RunDirectory, worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LABHELPERS_TEST_SLEEP_S", "0.2")
    worker.restart()  # so that the child sees the variable
    session = session_for(run, worker, [1, 2, 4, 8])
    third = threading.Event()
    session.watcher = lambda s: third.set() if s.progress and s.progress.done >= 3 else None
    session.start()
    assert third.wait(LIMIT_S)
    session.stop()
    assert session.state == "stopping"
    assert session.wait(LIMIT_S)
    assert session.state == "stopped"
    kept = [trial.key for trial in run.trials()]
    assert 3 <= len(kept) < 12
    session.start()
    assert session.wait(LIMIT_S)
    assert session.state == "done"
    assert [trial.key for trial in run.trials()][: len(kept)] == kept
    assert len(run.trials()) == 12


def test_bad_input_is_told_and_nothing_is_measured(run: RunDirectory):
    def refuse(*_: Any, **__: Any) -> None:
        raise InputError("device: got 'cuda:9', but there is none")

    session = Session("sweep", run, spec_of([1]), refuse)
    session.start()
    assert session.wait(LIMIT_S)
    assert (session.state, session.message) == ("failed", "device: got 'cuda:9', but there is none")


def test_an_error_of_ours_names_its_class(run: RunDirectory):
    session = Session("sweep", run, spec_of([1]), lambda *_, **__: {}["lost"])
    session.start()
    assert session.wait(LIMIT_S)
    assert (session.state, session.message) == ("failed", "KeyError: 'lost'")


def test_trials_that_fail_do_not_end_it(run: RunDirectory, worker: Worker):
    session = session_for(run, worker, [1, 2, 5], measure=measures.FAILING)
    session.start()
    assert session.wait(LIMIT_S)
    assert session.state == "done"
    assert {t.batch_size: t.outcome for t in run.trials()} == {1: "ok", 2: "killed", 5: "oom"}


def test_a_view_that_fails_does_not_end_it(run: RunDirectory, worker: Worker):
    session = session_for(run, worker, [1])
    session.watcher = lambda _: [][0]
    session.start()
    assert session.wait(LIMIT_S)
    assert session.state == "done"
    assert "cannot be drawn" in session.message
    assert len(run.trials()) == 3


def test_two_at_once_cannot_write_one_run(run: RunDirectory, worker: Worker):
    with run.writing():
        session = session_for(run, worker, [1])
        session.start()
        assert session.wait(LIMIT_S)
    assert session.state == "failed"
    assert "in use by another run" in session.message


def test_the_session_is_found_again(run: RunDirectory, tmp_path: Path):
    release = threading.Event()
    session = Session("sweep", run, spec_of([1]), lambda *_, **__: release.wait(LIMIT_S))
    assert session_of("sweep", run) is None
    session.start()
    other = RunDirectory.create(tmp_path / "other")
    # A reader who comes back has made a new directory, but means the one that is measuring.
    assert session_of("sweep", other) is session
    assert session_of("probe", other) is None
    release.set()
    assert session.wait(LIMIT_S)
    assert session_of("sweep", run) is session
    assert session_of("sweep", other) is None


def test_start_while_measuring_and_stop_while_idle_do_nothing(run: RunDirectory, worker: Worker):
    session = session_for(run, worker, [1, 2])
    session.stop()
    assert session.state == "ready"
    session.start()
    session.start()
    assert session.wait(LIMIT_S)
    session.stop()
    assert session.state == "done"
    assert len(run.trials()) == 6
