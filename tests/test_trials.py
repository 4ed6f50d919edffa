"""One trial as it is really measured, in a real worker on the CPU at tiny sizes."""

import math
from pathlib import Path

import pytest

from labhelpers.inputs import InputError
from labhelpers.records import SweepSpec, Trial, ask
from labhelpers.store import open_run
from labhelpers.sweep import run_sweep
from labhelpers.worker import Worker

WORKLOADS = Path(__file__).with_name("failing_workload.py")


@pytest.fixture
def spec_of(data_report):
    def make(**given: object) -> SweepSpec:
        return ask(
            SweepSpec,
            {"data_dir": data_report.data_dir, "synthetic": data_report.synthetic, "device": "cpu",
             "images": 100, "repeats": 1} | given,
        )  # fmt: skip

    return make


def test_a_trial_says_what_was_measured(run, worker, spec_of):
    first, second = run_sweep(spec_of(batch_sizes=[32], repeats=2), run, worker=worker)
    assert (first.images, first.steps, first.last_batch, first.updates) == (100, 4, 4, 4)
    assert len(first.step_times_s) == 4
    assert all(seconds > 0 for seconds in first.step_times_s)
    assert math.fsum(first.step_times_s) <= first.epoch_s
    assert 0 < first.feed_wait_s < first.epoch_s
    assert first.images_per_s == 100 / first.epoch_s
    assert first.peak_allocated_bytes > 0
    assert first.first_step_peak_bytes > 0
    assert first.peak_reserved_bytes is None  # the CPU has no caching allocator
    assert first.alloc_retries is first.clocks_before is None
    assert first.memory_before.total_bytes > first.memory_before.free_bytes > 0
    assert first.precision_before == first.precision_after == {
        "matmul": "ieee", "convolution": "ieee", "both": "ieee",
    }  # fmt: skip
    assert 2.0 < first.final_loss < 2.6  # ten classes, four updates: about ln 10
    assert first.final_loss == second.final_loss  # the same weights, the same order
    assert first.environment_id in run.info.environments
    assert (first.outcome, first.device, first.started_at is not None) == ("ok", "cpu", True)


def test_a_batch_above_the_data_set_is_one_step_and_noted(run, worker, spec_of):
    (trial,) = run_sweep(spec_of(batch_sizes=[4096]), run, worker=worker)
    assert (trial.steps, trial.last_batch, trial.images) == (1, 100, 100)
    assert "batch 4,096: above the data set of 100 images, so an epoch is 1 step" in run.info.notes


@pytest.mark.parametrize("feed", ["workers", "host", "resident"])
def test_other_feeds_train_on_the_same_images(run, worker, spec_of, feed):
    (article,) = run_sweep(spec_of(batch_sizes=[32]), run, worker=worker)
    (other,) = run_sweep(spec_of(batch_sizes=[32], feed=feed, workers=2), run, worker=worker)
    assert (other.outcome, other.feed) == ("ok", feed)
    assert other.final_loss == article.final_loss


@pytest.mark.parametrize(("precision", "both"), [("tf32", "tf32"), ("bf16", "ieee")])
def test_other_precisions_are_set_and_read_back(run, worker, spec_of, precision, both):
    (trial,) = run_sweep(spec_of(batch_sizes=[64], precision=precision), run, worker=worker)
    assert (trial.outcome, trial.precision) == ("ok", precision)
    assert trial.precision_before == trial.precision_after
    assert trial.precision_after["both"] == both


def test_a_loader_that_kills_raises_or_hangs_costs_its_own_trial(run, worker, spec_of):
    asked = spec_of(
        workload=f"{WORKLOADS}:failing",
        batch_sizes=range(1, 7),
        trial_timeout_s=8,
        order="shuffled",
    )
    trials = {trial.batch_size: trial for trial in run_sweep(asked, run, worker=worker)}
    assert {size: trials[size].outcome for size in sorted(trials)} == {
        1: "ok", 2: "killed", 3: "error", 4: "timeout", 5: "oom", 6: "ok",
    }  # fmt: skip
    assert "signal 9, SIGKILL" in trials[2].error_text
    assert (trials[3].error_class, trials[3].error_text) == ("ValueError", "three is\nrefused")
    assert "time limit of 8 s" in trials[4].error_text
    assert "DefaultCPUAllocator" in trials[5].error_text
    assert trials[5].oom["requested_bytes"] == 2**50
    assert (trials[6].images, trials[6].steps, trials[6].last_batch) == (40, 7, 4)
    assert sorted(t.batch_size for t in open_run(run.path).trials()) == list(range(1, 7))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("empty", "gives an empty loader; nothing to train on"),
        ("without_data", "has no data; give a Workload with make_loader to sweep it"),
        ("nobody", "has no 'nobody'; check the name after the colon"),
    ],
)
def test_a_workload_that_cannot_be_swept_is_bad_input(run, worker, spec_of, name, said):
    with pytest.raises(InputError) as caught:
        run_sweep(spec_of(workload=f"{WORKLOADS}:{name}", batch_sizes=[2]), run, worker=worker)
    assert str(caught.value).endswith(said)
    assert open_run(run.path).trials() == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "tpu"}, "device: got 'tpu'; must be 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"images": 60_001}, "images: got 60,001; FashionMNIST has 60,000 training images"),
        ({"feed": "own"}, "feed: got 'own'; FashionMNIST needs 'article', 'workers', 'host' or "
         "'resident'"),
        ({"data_dir": "/nowhere"}, "/nowhere/FashionMNIST/raw/train-images-idx3-ubyte is missing; "
         "to fetch it: labhelpers data --data-dir /nowhere"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_a_worker_starts(run, spec_of, given, said):
    own = Worker()
    with pytest.raises(InputError) as caught:
        run_sweep(spec_of(**{"synthetic": False} | given), run, worker=own)
    assert str(caught.value) == said
    assert own.start_s == 0


def test_a_trial_travels_as_json(run, worker, spec_of):
    (trial,) = run_sweep(spec_of(batch_sizes=[32]), run, worker=worker)
    assert Trial.model_validate_json(trial.model_dump_json(exclude_none=True)) == trial
