"""Trials in order, one failing without the others, resumed without loss; mostly without torch."""

import threading
from dataclasses import replace

import measures
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labhelpers.inputs import InputError
from labhelpers.records import ARTICLE_BATCH_SIZES, SweepSpec, Trial, ask
from labhelpers.store import open_run
from labhelpers.sweep import (
    Planned,
    Progress,
    estimate_s,
    failures,
    matching,
    notes_of,
    plan,
    resolved,
    run_sweep,
    trials_of,
)
from labhelpers.worker import Stopped, Worker

WARM_WITH = measures.no_warm_up
MINE = "mine:workload"


def spec_of(**given: object) -> SweepSpec:
    return ask(SweepSpec, {"workload": MINE, "device": "cpu"} | given)


# What runs, and in which order


def test_what_is_left_open_suits_the_device():
    gpu = resolved(spec_of(device="auto"), "cuda:0")
    assert (gpu.device, gpu.batch_sizes, gpu.images, gpu.repeats) == (
        "cuda:0", ARTICLE_BATCH_SIZES, 60_000, 3,
    )  # fmt: skip
    assert len(plan(gpu)) == 27
    cpu = resolved(spec_of(), "cpu")
    assert (cpu.batch_sizes, cpu.images, cpu.repeats) == ((32, 64, 128, 256, 512, 1024), 4096, 3)
    quick = resolved(spec_of(quick=True), "cuda:0")
    assert (quick.batch_sizes, quick.repeats) == ((32, 256, 2048, 8192), 1)
    assert resolved(spec_of(quick=True), "cpu").images == 2048


def test_what_was_asked_stays():
    asked = spec_of(batch_sizes=[7, 3], repeats=2, images=100, quick=True)
    assert resolved(asked, "cpu") == asked


def test_the_articles_order_is_up_down_up():
    found = plan(spec_of(batch_sizes=[64, 32, 128], repeats=3))
    assert [(p.batch_size, p.repeat) for p in found] == [
        (32, 0), (64, 0), (128, 0), (128, 1), (64, 1), (32, 1), (32, 2), (64, 2), (128, 2),
    ]  # fmt: skip
    assert [p.position for p in found] == list(range(9))


@pytest.mark.parametrize(
    ("order", "sizes"),
    [("ascending", [1, 2, 3, 1, 2, 3]), ("descending", [3, 2, 1, 3, 2, 1])],
)
def test_other_orders(order, sizes):
    assert [p.batch_size for p in plan(spec_of(batch_sizes=[2, 3, 1], repeats=2, order=order))] == (
        sizes
    )


@given(st.sets(st.integers(1, 999), min_size=1, max_size=9), st.integers(1, 5), st.integers(0, 99))
def test_a_shuffled_order_has_every_trial_once_and_follows_the_seed(sizes, repeats, seed):
    asked = spec_of(batch_sizes=sorted(sizes), repeats=repeats, order="shuffled", seed=seed)
    found = plan(asked)
    assert found == plan(asked)
    assert {(p.batch_size, p.repeat) for p in found} == {
        (size, repeat) for size in sizes for repeat in range(repeats)
    }
    assert [p.repeat for p in found] == sorted(p.repeat for p in found)
    assert len(found) == len(sizes) * repeats


def test_a_shuffled_order_differs_between_repeats_and_seeds():
    def orders(seed: int) -> list[list[int]]:
        found = plan(spec_of(batch_sizes=range(1, 20), repeats=2, order="shuffled", seed=seed))
        return [[p.batch_size for p in found if p.repeat == repeat] for repeat in (0, 1)]

    assert orders(1)[0] != orders(1)[1]
    assert orders(1) != orders(2)


def test_notes_say_what_a_reader_should_know():
    asked = SweepSpec(batch_sizes=(32, 4096, 8192), images=2048, synthetic=True)
    assert notes_of(asked) == (
        "batch 4,096, 8,192: above the data set of 2,048 images, so an epoch is 1 step",
        "synthetic images: speed is real, loss says nothing about FashionMNIST",
    )
    assert notes_of(SweepSpec(batch_sizes=(2048,), images=2048)) == ()
    assert notes_of(spec_of(batch_sizes=[4096], images=2048)) == ()  # its data set is unknown


def test_the_estimate_takes_the_nearest_size_that_was_measured():
    waiting = [Planned(32, 1, 0), Planned(60, 1, 1), Planned(1024, 1, 2)]
    assert estimate_s(waiting, {}) is None
    assert estimate_s(waiting, {32: [4.0, 2.0, 9.0]}) == 12.0
    assert estimate_s(waiting, {32: [4.0], 512: [1.0]}) == 4.0 + 4.0 + 1.0
    assert estimate_s([], {32: [4.0]}) == 0


def test_failures_leave_out_what_is_a_result():
    trials = [
        Trial(kind="sweep", batch_size=1, outcome=outcome)
        for outcome in ("ok", "oom", "killed", "timeout", "error")
    ]
    assert [trial.outcome for trial in failures(trials)] == ["killed", "timeout", "error"]


@pytest.mark.parametrize(
    ("kind", "failed"),
    [("cap", ["killed", "timeout", "error"]), ("probe", ["error"]), ("finder", [])],
)
def test_the_end_of_a_trial_that_looks_for_it_is_no_failure(kind, failed):
    trials = [
        Trial(kind=kind, batch_size=1, outcome=outcome)
        for outcome in ("ok", "oom", "killed", "timeout", "error")
    ]
    assert [trial.outcome for trial in failures(trials)] == failed


def test_only_trials_of_the_same_workload_feed_and_precision_match():
    same = Trial(kind="sweep", batch_size=1, workload=MINE, feed="own")
    others = [{"workload": "x"}, {"feed": "host"}, {"precision": "bf16"}]
    trials = [same, *(same.model_copy(update=other) for other in others)]
    assert matching(trials, spec_of()) == [same]


# Running, with a measuring function without torch


def test_each_trial_is_on_disk_before_the_next_begins(run, worker):
    seen: list[tuple[int, int, int]] = []

    def look(progress: Progress) -> None:
        if progress.trial is None:
            seen.append((progress.done, len(open_run(run.path).trials()), progress.total))

    asked = spec_of(batch_sizes=[8, 16], repeats=2)
    trials = run_sweep(asked, run, worker=worker, on_progress=look, measure=measures.WITHOUT_TORCH)
    assert seen == [(0, 0, 4), (1, 1, 4), (2, 2, 4), (3, 3, 4)]
    assert [(t.batch_size, t.repeat) for t in trials] == [(8, 0), (16, 0), (16, 1), (8, 1)]
    again = open_run(run.path)
    assert again.trials("sweep") == trials == trials_of(again)
    assert again.environment()["device_name"] == "a test"
    assert again.info.specs["sweep"]["images"] == 4096  # what was resolved, not what was left open


def test_an_estimate_stands_from_the_first_trial_on(run, worker):
    left: list[float | None] = []
    run_sweep(
        spec_of(batch_sizes=[8, 16], repeats=1), run, worker=worker,
        on_progress=lambda progress: left.append(progress.remaining_s),
        measure=measures.WITHOUT_TORCH,
    )  # fmt: skip
    assert left[0] is None
    assert all(seconds is not None and seconds >= 0 for seconds in left[1:])
    assert left[-1] == 0


def test_a_failing_trial_is_an_outcome_and_the_others_survive(run, worker):
    asked = spec_of(batch_sizes=range(1, 8), repeats=1, trial_timeout_s=1.5)
    trials = run_sweep(asked, run, worker=worker, measure=measures.FAILING)
    assert {t.batch_size: t.outcome for t in trials} == {
        1: "ok", 2: "killed", 3: "error", 4: "timeout", 5: "oom", 6: "killed", 7: "ok",
    }  # fmt: skip
    said = {t.batch_size: (t.error_class, t.error_text) for t in trials}
    assert said[1] == (None, None)
    assert said[2][1].startswith("the worker process was killed by signal 9, SIGKILL")
    assert said[3] == ("ValueError", "three\nlines\nof text")
    assert said[4] == ("TimeoutError", "took longer than its time limit of 1.5 s and was ended")
    assert said[5] == ("MemoryError", "batch 5 does not fit")
    assert said[6] == ("ProcessExpired", "the worker process ended by itself with exit code 7")
    assert open_run(run.path).trials() == trials
    assert all(t.images_per_s is None for t in trials if t.outcome != "ok")


def test_a_finished_sweep_measures_nothing_again_and_may_grow(run, worker, monkeypatch, tmp_path):
    log = tmp_path / "log"
    monkeypatch.setenv("LABHELPERS_TEST_LOG", str(log))
    worker.restart()  # a new process, which has the variable
    asked = spec_of(batch_sizes=[8, 16], repeats=1)
    first = run_sweep(asked, run, worker=worker, measure=measures.WITHOUT_TORCH)
    assert run_sweep(asked, run, worker=worker, measure=measures.WITHOUT_TORCH) == first
    assert log.read_text().splitlines() == ["[8, 0]", "[16, 0]"]
    more = spec_of(batch_sizes=[8, 32, 16], repeats=2)
    trials = run_sweep(more, open_run(run.path), worker=worker, measure=measures.WITHOUT_TORCH)
    assert len(trials) == 6
    assert len(log.read_text().splitlines()) == 6
    worker.restart()


def test_stop_keeps_what_is_finished_and_the_rest_is_measured_later(run, worker):
    stop = threading.Event()
    asked = spec_of(batch_sizes=[8, 16, 32], repeats=1)

    def stop_after_two(progress: Progress) -> None:
        if progress.done == 2:
            stop.set()

    with pytest.raises(Stopped):
        run_sweep(
            asked, run, worker=worker, on_progress=stop_after_two, stop=stop,
            measure=measures.WITHOUT_TORCH,
        )  # fmt: skip
    kept = open_run(run.path).trials()
    assert [t.batch_size for t in kept] == [8, 16]
    trials = run_sweep(asked, run, worker=worker, measure=measures.WITHOUT_TORCH)
    assert trials[:2] == kept
    assert [t.batch_size for t in trials] == [8, 16, 32]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"images": 5}, "images: got 5, but {} was measured with 4096"),
        ({"seed": 1}, "seed: got 1, but {} was measured with 42"),
        ({"learning_rate": 0.1}, "learning_rate: got 0.1, but {} was measured with 0.001"),
        ({"synthetic": True}, "synthetic: got True, but {} was measured with False"),
    ],
)
def test_trials_of_different_requests_are_not_mixed(run, worker, change, said):
    measure = measures.WITHOUT_TORCH
    run_sweep(spec_of(batch_sizes=[8], repeats=1), run, worker=worker, measure=measure)
    with pytest.raises(InputError) as caught:
        run_sweep(spec_of(batch_sizes=[8], **change), run, worker=worker, measure=measure)
    assert str(caught.value) == said.format(run.path) + "; use that, or a new run directory"
    assert open_run(run.path).info.specs["sweep"]["seed"] == 42


def test_another_precision_is_another_set_of_trials_in_the_same_run(run, worker):
    measure = measures.WITHOUT_TORCH
    asked = spec_of(batch_sizes=[8], repeats=1)
    run_sweep(asked, run, worker=worker, measure=measure)
    run_sweep(
        asked.model_copy(update={"precision": "bf16"}), run, worker=worker, measure=measure
    )  # fmt: skip
    assert [t.precision for t in run.trials("sweep")] == ["fp32", "bf16"]
    assert [t.precision for t in trials_of(run)] == ["bf16"]


def test_a_device_that_does_not_start_is_an_error_of_one_line(run, worker):
    broken = replace(measures.WITHOUT_TORCH, prepare=lambda *_: measures.fail("no power"))
    with pytest.raises(RuntimeError, match="^the device cannot be started: no power$"):
        run_sweep(spec_of(batch_sizes=[8]), run, worker=worker, measure=broken)


def test_a_run_in_use_is_refused_before_a_worker_is_started(run):
    own = Worker(measures.no_warm_up)
    with run.writing(), pytest.raises(InputError, match="is in use by another run"):
        run_sweep(spec_of(), open_run(run.path), worker=own, measure=measures.WITHOUT_TORCH)
    assert own.start_s == 0
