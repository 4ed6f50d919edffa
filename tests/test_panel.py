"""The panel without its widgets: entries, buttons, run directories, what is said."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import measures
import pytest

from labhelpers import probe_panel, sweep_panel
from labhelpers.finder_panel import FINDER, finder_figure, finder_rows
from labhelpers.inputs import InputError
from labhelpers.panel import Measurement, Panel, failures_told, notes_told, share_done, status
from labhelpers.probe_panel import PROBE
from labhelpers.records import FinderSpec, ProbeSpec, SweepSpec, Trial
from labhelpers.sessions import Session
from labhelpers.store import RunDirectory
from labhelpers.sweep import Planned, Progress, run_sweep
from labhelpers.sweep_panel import SWEEP
from labhelpers.worker import Worker

LIMIT_S = 60
pytestmark = pytest.mark.usefixtures("no_sessions")
TEXTS = {
    "batch_sizes": "1, 8", "repeats": "2", "images": "1000", "feed": "article",
    "precision": "fp32", "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def kind() -> Iterator[Measurement]:
    with Worker(measures.no_warm_up) as worker:
        runner = partial(run_sweep, worker=worker, measure=measures.FAILING)
        yield replace(SWEEP, runner=runner, sources=lambda run: [("as before", run.trials())])


@pytest.fixture
def panel(kind: Measurement, run: RunDirectory) -> Panel:
    return Panel(kind, SweepSpec(workload="mine:w"), run)


def nobody(_: Session) -> None:
    """Watch nothing."""


def measure(panel: Panel, **changes: str) -> None:
    panel.start(TEXTS | changes, nobody)
    assert panel.session is not None
    assert panel.session.wait(LIMIT_S)


# Entries


def test_entries_hold_what_suits_the_device(panel: Panel):
    cpu, gpu = panel.texts("cpu"), panel.texts("cuda:0")
    assert (cpu["batch_sizes"], cpu["images"]) == ("32, 64, 128, 256, 512, 1024", "4096")
    assert (gpu["images"], gpu["repeats"], gpu["device"]) == ("60000", "3", "auto")


def test_bad_entries_are_told_by_field(kind: Measurement, run: RunDirectory):
    panel = Panel(kind, SweepSpec(), run)
    found = panel.reasons(TEXTS | {"batch_sizes": "2, x", "repeats": "none of it"})
    assert set(found) == {"batch_sizes", "repeats"}
    assert panel.reasons(TEXTS | {"images": "70000"}) == {
        "images": "got 70,000; FashionMNIST has 60,000 training images"
    }
    assert panel.reasons(TEXTS) == {}


def test_a_bad_entry_measures_nothing(panel: Panel, run: RunDirectory):
    with pytest.raises(InputError, match="'x' is not a batch size"):
        panel.start(TEXTS | {"batch_sizes": "x"}, nobody)
    assert panel.session is None
    assert run.trials() == []


# Measuring


def test_the_first_run_fills_the_notebooks_directory(panel: Panel, run: RunDirectory):
    measure(panel)
    assert panel.run is run
    assert len(run.trials()) == 4
    assert not panel.can_resume
    spec, chosen = panel.chosen()
    assert (spec.batch_sizes, chosen) == ((1, 8), run)


def test_the_next_run_has_a_directory_of_its_own(panel: Panel, run: RunDirectory):
    measure(panel)
    measure(panel, batch_sizes="8")
    assert panel.run.path != run.path
    assert panel.run.path.parent == run.path.parent
    assert {trial.batch_size for trial in panel.run.trials()} == {8}
    assert len(run.trials()) == 4


def test_while_measuring_the_cells_below_must_wait(
    panel: Panel, run: RunDirectory, kind: Measurement
):
    panel.start(TEXTS | {"batch_sizes": "4", "repeats": "1"}, nobody)  # batch 4 hangs
    assert panel.active
    assert not panel.can_resume
    with pytest.raises(InputError, match="still measuring"):
        panel.chosen()
    again = Panel(kind, SweepSpec(), run)
    assert again.session is panel.session
    panel.stop()
    assert panel.session is not None
    assert panel.session.wait(LIMIT_S)
    assert panel.session.state == "stopped"
    assert panel.can_resume


def test_an_interrupted_run_of_another_kernel_can_be_resumed(kind: Measurement, run: RunDirectory):
    asked = SweepSpec(workload="mine:w", batch_sizes=(1, 8), repeats=2, device="cpu", images=1000)
    with run.writing():
        run.note_spec("sweep", asked)
        run.append(Trial(**measures.measure(asked.model_dump(mode="json"), 1, 0, 0)))
    panel = Panel(kind, SweepSpec(), run)
    assert panel.spec == asked
    assert panel.can_resume
    panel.resume(nobody)
    assert panel.session is not None
    assert panel.session.wait(LIMIT_S)
    assert len(run.trials()) == 4
    assert not panel.can_resume


def test_failures_are_told_and_do_not_end_it(panel: Panel):
    measure(panel, batch_sizes="1, 2, 5", repeats="1")
    said = failures_told(panel)
    assert len(said) == 2
    assert said[0].startswith("batch 2, repeat 1: killed: the worker process was killed")
    assert said[1] == "batch 5, repeat 1: oom: batch 5 does not fit"
    assert len(sweep_panel.sweep_rows(panel.run)) == 3


def test_it_does_not_measure_beside_the_notebooks_own_cell(panel: Panel, run: RunDirectory):
    with run.writing(), pytest.raises(InputError, match="measuring already"):
        panel.start(TEXTS, nobody)
    with run.writing(), pytest.raises(InputError, match="measuring already"):
        panel.resume(nobody)
    assert panel.session is None


def test_a_batch_above_the_data_set_is_noted(kind: Measurement, run: RunDirectory):
    panel = Panel(kind, SweepSpec(), run)
    assert notes_told(panel) == ()
    panel.session = session_in(run, "running", Progress(1, 0, None, notes=("above the data set",)))
    assert notes_told(panel) == ("above the data set",)


# What is said


def session_in(run: RunDirectory, state: str, progress: Progress | None = None) -> Session:
    session = Session("sweep", run, SweepSpec(), nobody)
    session.state, session.progress = state, progress  # type: ignore[assignment]
    return session


def test_the_status_line(run: RunDirectory):
    halfway = Progress(8, 3, Planned(256, 1, 3), remaining_s=40)
    assert status(session_in(run, "running")).startswith("starting the worker")
    assert status(session_in(run, "running", halfway)) == (
        "3 of 8 trials done · now batch 256 · about 40.0 s left"
    )
    assert status(session_in(run, "stopping", halfway)) == "stopping …"
    assert "3 of 8 trials done, and kept. Resume" in status(session_in(run, "stopped", halfway))
    assert "nothing was measured" in status(session_in(run, "stopped"))
    assert status(session_in(run, "done", halfway)).endswith(f"results in {run.path}")
    assert share_done(session_in(run, "running", halfway)) == 3 / 8
    assert share_done(session_in(run, "running")) == 0


def test_the_estimate(panel: Panel):
    assert panel.estimate(TEXTS, "cpu") == "4 trials; how long they take is known after the first"
    assert panel.estimate(TEXTS | {"repeats": "x"}, "cpu") == ""
    measure(panel, images="1000")  # the tests' trials take 1 / batch size seconds
    panel.refresh()
    assert panel.estimate(TEXTS | {"images": "2000"}, "cpu") == "4 trials, about 4.50 s (as before)"
    # A CPU's speed says nothing about a GPU.
    assert "known after" in panel.estimate(TEXTS | {"device": "cuda:0"}, "cpu")


def test_automatic_repeats_are_estimated_from_below(panel: Panel):
    assert panel.estimate(TEXTS | {"repeats": "auto"}, "cpu").startswith("at least 12 trials")


def test_what_an_estimate_rests_on(run: RunDirectory):
    earlier = RunDirectory.create(run.path.parent / "earlier")
    with earlier.writing():
        earlier.append(Trial(kind="sweep", batch_size=8, images=100, epoch_s=1.0))
    found = sweep_panel.sources_of("sweep", run)
    assert [whose for whose, _ in found][:2] == [
        "as fast as in this run",
        "as fast as your run before",
    ]
    assert len(found[1][1]) == 1
    (earlier.path / "trials.jsonl").write_text("{broken}\n{broken}\n")
    assert "as fast as your run before" not in dict(sweep_panel.sources_of("sweep", run))


def test_the_figure_before_and_after(panel: Panel):
    before = sweep_panel.sweep_figure(panel.run)
    measure(panel)
    after = sweep_panel.sweep_figure(panel.run)
    drawn = [len(figure.axes[0].get_lines()) for figure in (before, after)]
    assert drawn[1] == drawn[0] + 1


# The probe's panel


def test_the_probes_panel(run: RunDirectory):
    panel = Panel(PROBE, ProbeSpec(), run)
    texts = panel.texts("cpu")
    assert (texts["probe_sizes"], texts["time_budget_s"]) == ("128, 256, 512, 1024, 2048", "300")
    assert panel.reasons(texts) == {}
    assert panel.estimate(texts, "cpu").startswith("up to 6 trials")
    assert set(panel.reasons(texts | {"device": "tpu", "steps": "0"})) == {"steps"}
    assert panel.reasons(texts | {"device": "tpu"})["device"].startswith("got 'tpu'")
    assert (panel.can_resume, len(probe_panel.probe_rows(run))) == (False, 0)
    with run.writing():
        run.note_environment("here", {"system": "Linux", "memory_total_bytes": 2**33})
        run.note_spec("probe", ProbeSpec(probe_sizes=(8, 16), device="cpu"))
        run.append(
            Trial(kind="probe", batch_size=8, feed="synthetic", images=8, steps=1, epoch_s=0.1)
        )
    assert panel.can_resume
    assert len(probe_panel.probe_rows(run)) == 1
    assert probe_panel.probe_figure(run).axes


# The finder's panel


def test_the_finders_panel(run: RunDirectory):
    panel = Panel(FINDER, FinderSpec(num_iterations=1, headroom=0.0), run)
    texts = panel.texts("cpu") | {"max_batch_size": "4", "device": "cpu"}
    assert texts["workload"] == "fashion_cnn"
    assert panel.reasons(texts) == {}
    assert set(panel.reasons(texts | {"headroom": "1", "strategy": "guess"})) == {
        "headroom", "strategy",
    }  # fmt: skip
    assert "at most 10 min" in panel.estimate(texts, "cpu")
    assert (len(finder_rows(run)), len(finder_figure(run).axes)) == (0, 0)
    seen: list[float] = []
    panel.start(texts, lambda session: seen.append(share_done(session)))
    assert panel.session is not None
    assert panel.session.wait(LIMIT_S)
    assert (panel.session.state, panel.session.message) == ("done", "")
    assert seen == sorted(seen)
    assert seen[-1] == 1
    assert "4" in list(finder_rows(run)["batch"])
    assert finder_figure(run).axes
