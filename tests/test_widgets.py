"""The panel's widgets without a browser: entries, buttons, what is drawn, what is left in files."""

from dataclasses import replace
from functools import partial
from typing import Any

import measures
import pytest

from labhelpers import widgets
from labhelpers.panel import Measurement, Panel
from labhelpers.records import SweepSpec
from labhelpers.store import RunDirectory
from labhelpers.sweep import run_sweep
from labhelpers.sweep_panel import SWEEP
from labhelpers.widgets import PanelView, in_frontend, show_panel
from labhelpers.worker import Worker

WARM_WITH = measures.no_warm_up
LIMIT_S = 60
pytestmark = pytest.mark.usefixtures("no_sessions")


class Handle:
    """Stand in for an output on the page: keep what is shown in it."""

    def __init__(self) -> None:
        self.updates: list[dict[str, str]] = []

    def update(self, bundle: dict[str, str], **_: Any) -> None:
        self.updates.append(bundle)


@pytest.fixture(scope="module")
def kind(worker: Worker) -> Measurement:
    return replace(SWEEP, runner=partial(run_sweep, worker=worker, measure=measures.FAILING))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def display(bundle: Any, **options: Any) -> Handle:
        found.append(Handle() if options.get("display_id") else bundle)
        return found[-1]

    monkeypatch.setattr(widgets, "display", display)
    return found


@pytest.fixture
def view(kind: Measurement, run: RunDirectory, shown: list[Any]) -> PanelView:
    made = PanelView(Panel(kind, SweepSpec(workload="mine:w", device="cpu"), run))
    made.show()
    return made


def fill(view: PanelView, **texts: str) -> None:
    for name, text in texts.items():
        view._entries[name].value = text


def press(button: Any) -> None:
    button.click()


def finish(view: PanelView) -> None:
    session = view.panel.session
    assert session is not None
    assert session.wait(LIMIT_S)


def test_a_bad_entry_is_told_in_place_and_run_waits(view: PanelView):
    fill(view, batch_sizes="1, many")
    assert "&#x27;many&#x27; is not a batch size" in view._remarks["batch_sizes"].value
    assert view._run.disabled
    assert view._estimate.value == ""
    fill(view, batch_sizes="1, 8, 8")
    assert "8: given twice, measured once" in view._remarks["batch_sizes"].value
    assert not view._run.disabled
    assert "6 trials" in view._estimate.value


def test_presets_fill_the_list(view: PanelView):
    view._on_preset("batch_sizes", "powers of two", "32")
    assert view._entries["batch_sizes"].value == "8, 16, 32"
    view._on_preset("batch_sizes", "powers of two", "x")
    assert "whole number from 8" in view._remarks["batch_sizes"].value
    assert view._entries["batch_sizes"].value == "8, 16, 32"


def test_a_parameter_that_is_not_listed_can_be_chosen(
    kind: Measurement, run: RunDirectory, shown: list[Any]
):
    view = PanelView(Panel(kind, SweepSpec(workload="mine:w", device="cuda"), run))
    assert view._entries["device"].value == "cuda"
    assert view._entries["feed"].value == "own"


def test_defaults_follow_the_device_until_they_are_edited(view: PanelView):
    fill(view, repeats="5")
    view._suit_device("cuda:0")
    assert view._entries["images"].value == "60000"
    assert view._entries["repeats"].value == "5"
    view._suit_device("cpu")
    assert view._entries["images"].value == "4096"


def test_it_measures_draws_and_fills_the_table(view: PanelView, shown: list[Any]):
    figure, table = (each for each in shown if isinstance(each, Handle))
    fill(view, batch_sizes="1, 2, 8", repeats="1", images="1000")
    press(view._run)
    finish(view)
    assert view._bar.value == 1
    assert "done: 3 of 3 trials done" in view._status.value
    assert (view._run.disabled, view._stop.disabled, view._resume.disabled) == (False, True, True)
    assert "batch 2, repeat 1: killed" in view._said.value
    assert figure.updates[-1]["image/png"]
    assert "<td>8</td>" in table.updates[-1]["text/html"]


def test_stop_and_resume(view: PanelView):
    fill(view, batch_sizes="4", repeats="1", images="1000")  # batch 4 hangs
    press(view._run)
    assert view._run.disabled
    assert not view._stop.disabled
    press(view._run)  # a second click while it measures is refused
    assert "measuring already" in view._said.value
    press(view._stop)
    finish(view)
    assert "stopped" in view._status.value
    assert not view._resume.disabled
    press(view._resume)
    assert view.panel.active
    press(view._stop)
    finish(view)


def test_a_panel_shown_again_takes_the_measurement_up(
    kind: Measurement, run: RunDirectory, shown: list[Any], view: PanelView
):
    fill(view, batch_sizes="4", repeats="1", images="1000")
    press(view._run)
    again = PanelView(Panel(kind, SweepSpec(device="cpu"), run))
    again.show()
    assert again._entries["batch_sizes"].value == "4"
    assert not again._stop.disabled
    press(again._stop)
    finish(again)
    assert "stopped" in again._status.value
    assert "stopped" not in view._status.value


def test_without_anybody_to_click_a_sentence_stands_there(
    kind: Measurement, run: RunDirectory, shown: list[Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    for name in widgets._FRONTENDS:
        monkeypatch.delenv(name, raising=False)
    assert not in_frontend()
    panel = show_panel(kind, SweepSpec(), run)
    assert shown == []
    assert "the parameters above are measured" in capsys.readouterr().out
    assert panel.chosen() == (SweepSpec(), run)
    monkeypatch.setenv("JPY_SESSION_NAME", "notebooks/01_batch_sweep.ipynb")
    show_panel(kind, SweepSpec(), run)
    assert "Run this cell in JupyterLab" in shown[0]["text/html"]


def test_the_notebooks_own_worker_is_used(
    run: RunDirectory, worker: Worker, shown: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JPY_SESSION_NAME", "")
    kind = replace(SWEEP, runner=partial(run_sweep, measure=measures.WITHOUT_TORCH))
    panel = show_panel(kind, SweepSpec(workload="mine:w", device="cpu"), run, worker)
    texts = panel.texts("cpu") | {"batch_sizes": "1", "repeats": "1"}
    panel.start(texts, lambda _: None)
    assert panel.session is not None
    assert panel.session.wait(LIMIT_S)
    assert len(run.trials()) == 1
    assert worker._pool is not None  # still warm: it is the notebook's to close
