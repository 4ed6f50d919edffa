"""Repeats that know when to stop: randomised, resumable, within a budget. No torch."""

import random
import threading
from dataclasses import replace

import measures
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labhelpers.noise import MIN_REPEATS, settled
from labhelpers.planning import MOST_ROUNDS, due, measured, plan
from labhelpers.records import SweepSpec, Trial, ask
from labhelpers.store import open_run
from labhelpers.sweep import Progress, run_sweep, trials_of
from labhelpers.worker import Stopped

WARM_WITH = measures.no_warm_up
SIZES = (8, 16, 32)


def spec_of(**given: object) -> SweepSpec:
    asked = {"workload": "mine:workload", "device": "cpu", "repeats": "auto", "batch_sizes": SIZES}
    return ask(SweepSpec, asked | given)


def trial(size: int, repeat: int, rate: float | None, position: int = 0) -> Trial:
    took = {"images": 1000, "epoch_s": 1000 / rate} if rate else {"outcome": "oom"}
    return Trial(kind="sweep", batch_size=size, repeat=repeat, position=position, **took)


def climb(spec: SweepSpec, rate, stop_after: int | None = None, finished=None) -> dict:
    """Run a sweep whose trial has the speed `rate(size, repeat)`."""
    finished = dict(finished or {})
    while waiting := due(spec, finished):
        for planned in waiting:
            if stop_after is not None and len(finished) >= stop_after:
                return finished
            made = rate(planned.batch_size, planned.repeat)
            key = planned.batch_size, planned.repeat
            assert key not in finished
            finished[key] = trial(*key, made, planned.position)
    return finished


def test_automatic_repeats_begin_with_six_in_random_order():
    planned = plan(spec_of())
    assert len(planned) == MIN_REPEATS * len(SIZES)
    rounds = [[p.batch_size for p in planned if p.repeat == repeat] for repeat in range(6)]
    assert all(sorted(each) == list(SIZES) for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert plan(spec_of()) == planned
    assert plan(spec_of(seed=7)) != planned


def test_steady_sizes_stop_at_six_and_noisy_ones_go_on():
    dice = random.Random(1)

    def rate(size: int, repeat: int) -> float:
        return 1000.0 if size != 16 else 1000 * dice.uniform(0.9, 1.1)

    finished = climb(spec_of(time_budget_s=60), rate)
    counts = {size: sum(key[0] == size for key in finished) for size in SIZES}
    assert counts[8] == counts[32] == MIN_REPEATS
    assert counts[16] > MIN_REPEATS
    rates = [t.images_per_s for key, t in finished.items() if key[0] == 16]
    assert settled(rates) or sum(t.epoch_s for t in finished.values()) >= 60


def test_the_budget_ends_what_never_settles_but_not_before_six():
    dice = random.Random(2)
    finished = climb(spec_of(time_budget_s=0.001), lambda *_: 1000 * dice.uniform(0.5, 1.5))
    assert len(finished) == MIN_REPEATS * len(SIZES)
    few = climb(spec_of(time_budget_s=30, batch_sizes=[8]), lambda *_: dice.uniform(500, 1500))
    assert 30 <= sum(t.epoch_s for t in few.values()) < 34
    many = climb(spec_of(time_budget_s=1e6, batch_sizes=[8]), lambda *_: dice.uniform(500, 1500))
    assert MIN_REPEATS < len(many) <= MOST_ROUNDS


def test_a_size_that_does_not_fit_is_not_tried_for_ever():
    finished = climb(spec_of(), lambda size, _: None if size == 32 else 1000.0)
    assert len(finished) == MIN_REPEATS * len(SIZES)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(0, 99))
def test_an_interrupted_sweep_goes_on_as_it_would_have(cut, seed):
    def rate(size: int, repeat: int) -> float:
        return 1000 * random.Random(f"{size} {repeat} {seed}").uniform(0.97, 1.03)

    spec = spec_of(time_budget_s=40)
    whole = climb(spec, rate)
    half = climb(spec, rate, stop_after=cut)
    assert climb(spec, rate, finished=half).keys() == whole.keys()


def test_all_automatic_trials_are_returned_in_order():
    finished = climb(spec_of(), lambda *_: 1000.0)
    finished[99, 0] = trial(99, 0, 5.0)
    found = measured(spec_of(), finished)
    assert len(found) == MIN_REPEATS * len(SIZES)
    assert [t.repeat for t in found] == sorted(t.repeat for t in found)
    assert {t.batch_size for t in found} == set(SIZES)


# Through the sweep


def test_a_sweep_with_automatic_repeats_can_be_stopped_and_resumed(run, worker):
    stop = threading.Event()
    totals: list[int] = []

    def stop_at_eleven(progress: Progress) -> None:
        totals.append(progress.total)
        if progress.done == 11:
            stop.set()

    asked = spec_of(repeats=" Auto ")
    with pytest.raises(Stopped):
        run_sweep(
            asked, run, worker=worker, stop=stop, on_progress=stop_at_eleven,
            measure=measures.WITHOUT_TORCH,
        )  # fmt: skip
    assert set(totals) == {18}
    again = open_run(run.path)
    assert again.info.specs["sweep"]["repeats"] == "auto"
    asked = ask(SweepSpec, again.info.specs["sweep"])
    trials = run_sweep(asked, again, worker=worker, measure=measures.WITHOUT_TORCH)
    assert len(trials) == 18 == len(trials_of(again))
    assert again.info.timings["sweep"]["trials"] == 18


def test_the_overhead_of_a_sweep_adds_up_over_its_calls(run, worker):
    measure = measures.WITHOUT_TORCH
    run_sweep(spec_of(repeats=1), run, worker=worker, measure=measure)
    first = dict(run.info.timings["sweep"])
    assert first["trials"] == 3
    assert first["epochs_s"] == pytest.approx(1 / 8 + 1 / 16 + 1 / 32)
    assert first["wall_s"] > 0
    run_sweep(spec_of(repeats=1), run, worker=worker, measure=measure)
    assert run.info.timings["sweep"] == first  # nothing was measured, nothing was added
    run_sweep(spec_of(repeats=2), run, worker=worker, measure=measure)
    assert run.info.timings["sweep"]["trials"] == 6
    assert run.info.timings["sweep"]["epochs_s"] == pytest.approx(2 * first["epochs_s"])


def test_a_sweep_of_another_name_stands_beside_the_runs_own(run, worker):
    measure, own = measures.WITHOUT_TORCH, spec_of(repeats=1)
    run_sweep(own, run, worker=worker, measure=measure)
    other = own.model_copy(update={"feed": "host", "batch_sizes": (4,)})
    run_sweep_of = {"worker": worker, "measure": measure, "name": "sweep:host"}
    with pytest.raises(Exception, match="brings its own loader"):
        run_sweep(other, run, **run_sweep_of)
    other = other.model_copy(update={"feed": "own", "precision": "bf16"})
    run_sweep(other, run, **run_sweep_of)
    assert [t.batch_size for t in trials_of(run)] == list(SIZES)
    assert [t.batch_size for t in trials_of(run, name="sweep:host")] == [4]
    mixed = other.model_copy(update={"images": 5})
    with pytest.raises(Exception, match="images: got 5, but"):
        run_sweep(mixed, run, **(run_sweep_of | {"name": "sweep:third"}))


def profile(spec: dict, batch_size: int) -> dict:
    """Stand for a profiler: fail at 16."""
    if batch_size == 16:
        raise RuntimeError("CUPTI is busy")
    return {"kind": "limits", "workload": spec["workload"], "batch_size": batch_size,
            "feed": spec["feed"], "details": {"limits": {"kernel_s": 1.0}}}  # fmt: skip


def on_a_gpu(device: str, require_gpu: bool) -> dict:
    return measures.prepare(device, require_gpu) | {"device": "cuda:0"}


def test_each_size_is_profiled_once_after_all_trials_in_a_process_that_ends(run, worker):
    measure = replace(measures.WITHOUT_TORCH, prepare=on_a_gpu, profile=profile)
    asked = spec_of(repeats=2)
    before = worker.run(measures.process_id, timeout_s=30).value
    run_sweep(asked, run, worker=worker, measure=measure)
    assert [t.kind for t in run.trials()] == ["sweep"] * 6 + ["limits"] * 2
    assert [t.batch_size for t in trials_of(run, kind="limits")] == [8, 32]
    assert run.info.notes[-1] == "batch 16 could not be profiled: CUPTI is busy"
    assert worker.run(measures.process_id, timeout_s=30).value != before
    run_sweep(asked, run, worker=worker, measure=measure)
    assert len(run.trials("limits")) == 2


@pytest.mark.parametrize("given", [{"limits": False}, {}])
def test_nothing_is_profiled_on_a_cpu_or_where_it_is_not_wanted(run, worker, given):
    prepare = on_a_gpu if given else measures.prepare
    measure = replace(measures.WITHOUT_TORCH, prepare=prepare, profile=profile)
    before = worker.run(measures.process_id, timeout_s=30).value
    run_sweep(spec_of(repeats=1, **given), run, worker=worker, measure=measure)
    assert run.trials("limits") == []
    assert worker.run(measures.process_id, timeout_s=30).value == before
