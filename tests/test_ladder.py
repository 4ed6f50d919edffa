"""Climbing for real on the CPU: the same training on every rung, resumable, bad rungs survive."""

import threading

import pytest

from labhelpers.inputs import InputError
from labhelpers.ladder import ceilings_of, ladder_trials_of, run_ladder
from labhelpers.ladder_plan import Setup
from labhelpers.ladder_table import ladder_rows
from labhelpers.records import LadderSpec, Trial, ask
from labhelpers.rungs import _SLOT, PreparedRung, forget, images_of, measure_rung, prepared
from labhelpers.store import RunDirectory, open_run
from labhelpers.sweep import Progress
from labhelpers.worker import Stopped


@pytest.fixture(scope="module")
def spec_of(data_report):
    def spec(**given: object) -> LadderSpec:
        known = {
            "device": "cpu", "images": 80, "batch_sizes": [32], "repeats": 2, "max_steps": 500,
            "data_dir": str(data_report.data_dir), "synthetic": data_report.synthetic,
            "workers": [1],
        }  # fmt: skip
        return ask(LadderSpec, known | given)

    return spec


def test_every_rung_trains_the_same_and_sees_the_short_last_batch(run, worker, spec_of):
    trials = run_ladder(spec_of(), run, worker=worker)
    assert {trial.outcome for trial in trials} == {"ok"}
    assert {t.variant for t in trials} == {
        "article", "workers-1", "host", "synthetic", "fused_adam", "bf16", "channels_last",
    }  # fmt: skip
    assert {(t.images, t.steps, t.last_batch) for t in trials} == {(80, 3, 16)}
    losses = {(t.variant, t.repeat): t.final_loss for t in trials}
    for name in ("workers-1", "host"):
        assert losses[name, 0] == losses[name, 1] == losses["article", 0]
    for name in ("fused_adam", "channels_last"):
        assert losses[name, 0] == losses[name, 1] == pytest.approx(losses["article", 0], rel=1e-5)
    assert losses["bf16", 0] == losses["bf16", 1] == pytest.approx(losses["article", 0], rel=0.05)
    assert losses["synthetic", 0] is None
    rows = ladder_rows(trials, ceilings_of(run))
    assert all(row.ceiling is not None and row.failure is None for row in rows)
    assert ceilings_of(run)["missing"]["cuda_graph"] == "needs an NVIDIA GPU"
    assert run.info.timings["ladder"]["trials"] == len(trials) == 14


def test_a_stopped_ladder_goes_on_where_it_was(run, worker, spec_of):
    stop = threading.Event()

    def stop_after_three(progress: Progress) -> None:
        if progress.done == 3:
            stop.set()

    asked = spec_of(rungs="host")
    with pytest.raises(Stopped):
        run_ladder(asked, run, worker=worker, on_progress=stop_after_three, stop=stop)
    kept = ladder_trials_of(run)
    assert [(t.variant, t.repeat) for t in kept] == [("article", 0), ("article", 1), ("host", 0)]
    again = open_run(run.path)
    trials = run_ladder(ask(LadderSpec, again.info.specs["ladder"]), again, worker=worker)
    assert [trial.key for trial in trials[:3]] == [trial.key for trial in kept]
    assert [(t.variant, t.repeat) for t in trials[3:]] == [("host", 1)]
    assert len(open_run(run.path).trials("ladder")) == 5  # and the ceilings, once
    with pytest.raises(InputError, match="images: got 5, but"):
        run_ladder(spec_of(images=5), again, worker=worker)


def test_a_rung_that_fails_is_tried_once_and_the_others_go_on(run, worker, spec_of, monkeypatch):
    from labhelpers import ladder_plan

    broken = ladder_plan.Rung("fused_adam", ("host",), {"precision": "fp8"}, "breaks", "breaks")
    rungs = tuple(broken if rung.name == "fused_adam" else rung for rung in ladder_plan.RUNGS)
    monkeypatch.setattr(ladder_plan, "RUNGS", rungs)
    with pytest.raises(InputError, match="precision: got 'fp8'"):
        run_ladder(spec_of(rungs="fused_adam"), run, worker=worker)

    def killed(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.undo()
    monkeypatch.setattr("labhelpers.rungs.measure_rung", killed)
    again = RunDirectory.create(run.path.with_name("again"))
    trials = run_ladder(spec_of(rungs="host"), again, worker=worker)
    assert [(t.variant, t.repeat, t.outcome) for t in trials] == [
        ("article", 0, "oom"), ("host", 0, "oom"),
    ]  # fmt: skip
    assert trials[1].details["base"] == "article"


# One rung, in this process


def test_an_epoch_has_the_images_or_the_most_steps_whichever_is_less(spec_of):
    assert images_of(spec_of(images=1000, max_steps=10), 32) == 320
    assert images_of(spec_of(images=1000, max_steps=10), 512) == 1000


def test_repeats_share_one_prepared_rung_and_another_takes_its_place(spec_of):
    asked = spec_of()
    first = prepared(asked, Setup(feed="host"), 32)
    assert prepared(asked, Setup(feed="host"), 32) is first
    other = prepared(asked, Setup(feed="host", fused_adam=True), 32)
    assert other is not first
    assert list(_SLOT.values()) == [other]
    forget()
    assert _SLOT == {}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_epoch_begins_with_the_same_weights_state_and_scale(spec_of, precision):
    setup = Setup(feed="host", fused_adam=True, precision=precision)
    rung = PreparedRung(spec_of(), setup, 32)
    assert rung.epoch().final_loss == rung.epoch().final_loss == rung.epoch().final_loss


@pytest.mark.timeout(600)
def test_a_compiled_rung_picks_its_own_images_and_trains_the_same(spec_of):
    asked = spec_of(images=40)
    plain = PreparedRung(asked, Setup(feed="host", fused_adam=True), 32).epoch()
    compiled = Setup(feed="host", fused_adam=True, compiled=True).to_dict()
    place = (32, 0, 1)
    trials = [
        Trial(**measure_rung(asked.model_dump(mode="json"), compiled, ("compile", "x"), place))
        for _ in range(2)
    ]
    forget()
    assert [trial.final_loss for trial in trials] == pytest.approx([plain.final_loss] * 2, rel=1e-5)
    assert (trials[0].images, trials[0].steps, trials[0].last_batch) == (40, 2, 8)
    assert trials[0].details["prepare_s"] == trials[1].details["prepare_s"] > 0
