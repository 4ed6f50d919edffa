"""The probe for real, on the CPU, through the worker."""

import threading
from pathlib import Path

import pytest
import torch

from labhelpers import drivers
from labhelpers.capture import capture_for
from labhelpers.inputs import InputError
from labhelpers.platforms import PLATFORMS
from labhelpers.probe import (
    platform_from,
    probe_trials_of,
    resolved,
    run_probe,
    this_platform,
    why_it_stopped,
)
from labhelpers.probe_trials import sum_by_name
from labhelpers.records import ARTICLE_BATCH_SIZES, ProbeSpec, ask
from labhelpers.store import RunDirectory, open_run
from labhelpers.worker import Stopped

WORKLOADS = Path(__file__).with_name("probe_workloads.py")


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run")


def asked(**given):
    return ask(ProbeSpec, {"device": "cpu", "steps": 3, "warmup_steps": 1, **given})


@pytest.fixture(scope="module")
def measured(worker, tmp_path_factory):
    """One probe of three sizes, shared by the tests that only look at it."""
    run = RunDirectory.create(tmp_path_factory.mktemp("probe") / "run")
    return run, run_probe(asked(probe_sizes=[32, 8, 16]), run, worker=worker)


def test_sizes_grow_and_the_smallest_comes_again_at_the_end(measured):
    _, trials = measured
    assert [(t.batch_size, t.repeat, t.position) for t in trials] == [
        (8, 0, 0), (16, 0, 1), (32, 0, 2), (8, 1, 3),
    ]  # fmt: skip
    assert why_it_stopped(trials).reason == "done"


def test_a_trial_holds_what_was_measured_and_nothing_made_up(measured):
    _, trials = measured
    for trial in trials:
        assert trial.kind == "probe"
        assert trial.outcome == "ok"
        assert trial.synthetic, "the batch is made up"
        assert (trial.images, trial.steps) == (3 * trial.batch_size, 3)
        assert len(trial.step_times_s) == 3
        assert sum(trial.step_times_s) <= trial.epoch_s
        assert trial.images_per_s > 0
        assert trial.peak_allocated_bytes >= trial.first_step_peak_bytes
        assert trial.peak_reserved_bytes is None
        assert trial.alloc_retries is None
        assert trial.clocks_after is None
        assert trial.details.get("kernels") is None
        assert trial.details.get("bus_traffic") is None
        assert trial.precision_after["both"] == "ieee"


def test_everything_is_on_disk(measured):
    run, trials = measured
    again = open_run(run.path)
    assert probe_trials_of(again) == trials
    assert again.info.specs["probe"]["probe_sizes"] == [8, 16, 32]
    assert again.info.specs["probe"]["memory_budget_bytes"] > 0
    assert trials[0].environment_id in again.info.environments


def test_a_probe_that_is_complete_measures_nothing_again(measured, worker):
    run, trials = measured
    assert run_probe(asked(probe_sizes=[8, 16, 32]), run, worker=worker) == trials


def test_a_probe_goes_on_with_the_sizes_it_lacks(run, worker):
    run_probe(asked(probe_sizes=[8]), run, worker=worker)
    trials = run_probe(asked(probe_sizes=[8, 16]), run, worker=worker)
    assert [(t.batch_size, t.repeat) for t in trials] == [(8, 0), (8, 1), (16, 0), (8, 2)]


def test_a_different_request_does_not_mix_into_a_run(measured, worker):
    run, _ = measured
    with pytest.raises(InputError, match="steps: got 4, but .* was measured with 3"):
        run_probe(asked(probe_sizes=[8], steps=4), run, worker=worker)


def test_progress_is_told_before_and_after_each_trial(run, worker):
    told = []
    run_probe(
        asked(probe_sizes=[8, 16]), run, worker=worker,
        on_progress=lambda p: told.append((p.done, p.total, p.current.batch_size, bool(p.trial))),
    )  # fmt: skip
    assert told == [
        (0, 3, 8, False), (1, 3, 8, True), (1, 3, 16, False), (2, 3, 16, True),
        (2, 3, 8, False), (3, 3, 8, True),
    ]  # fmt: skip


def test_the_memory_budget_stops_the_probe_before_a_size(run, worker):
    spec = asked(probe_sizes=[64, 128, 100_000], memory_budget_bytes=512 * 1024**2)
    trials = run_probe(spec, run, worker=worker)
    stop = why_it_stopped(trials)
    assert [t.batch_size for t in trials] == [64, 128, 64]
    assert (stop.reason, stop.batch_size) == ("memory_budget", 100_000)


def test_the_memory_budget_is_enforced_on_a_size_that_nothing_predicted(run, worker):
    """The allocator itself refuses it, and the probe says that the budget was its own."""
    spec = asked(probe_sizes=[60_000], memory_budget_bytes=64 * 1024**2)
    (trial,) = run_probe(spec, run, worker=worker)
    assert trial.outcome == "oom"
    assert "allocate memory" in trial.error_text
    assert trial.oom["kind"] == "host"
    assert trial.cap_bytes == 64 * 1024**2
    assert why_it_stopped([trial]).reason == "memory_budget"


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("dies", "killed", "signal 9"),
        ("refuses", "error", "are refused"),
        ("sleeps", "timeout", "longer than its time limit"),
    ],
)
def test_a_size_that_goes_wrong_ends_the_probe_and_the_smallest_still_runs_again(
    run, worker, name, outcome, words
):
    spec = asked(workload=f"{WORKLOADS}:{name}", probe_sizes=[8, 16, 32], trial_timeout_s=8)
    trials = run_probe(spec, run, worker=worker)
    assert [(t.batch_size, t.outcome) for t in trials] == [(8, "ok"), (16, outcome), (8, "ok")]
    stop = why_it_stopped(trials)
    assert (stop.reason, stop.batch_size) == ("failed", 16)
    assert words in stop.words


def test_a_stopped_probe_keeps_what_it_has_and_can_go_on(run, worker):
    stop = threading.Event()
    spec = asked(probe_sizes=[8, 16])

    def stop_after_first(progress):
        if progress.trial is not None:
            stop.set()

    with pytest.raises(Stopped):
        run_probe(spec, run, worker=worker, on_progress=stop_after_first, stop=stop)
    kept = open_run(run.path).trials("probe")
    assert [t.batch_size for t in kept] == [8]
    assert why_it_stopped(kept) is None
    trials = run_probe(spec, run, worker=worker)
    assert [t.batch_size for t in trials] == [8, 16, 8]
    assert trials[0] == kept[0]


def test_bad_input_is_refused_before_anything_runs(run):
    with pytest.raises(InputError, match="device: got 'gpu'"):
        run_probe(asked(device="gpu"), run)
    with pytest.raises(InputError, match="did you mean 'probe_sizes'"):
        asked(probe_size=[8])
    assert run.trials() == []


def test_the_default_sizes_go_past_the_articles_on_a_gpu_and_stay_small_on_a_cpu():
    gpu = resolved(ProbeSpec(), "cuda:0").probe_sizes
    assert {32_768, 49_152, 98_304, 131_072} < set(gpu)
    assert max(gpu) > 131_072
    assert max(resolved(ProbeSpec(), "cpu").probe_sizes) <= max(ARTICLE_BATCH_SIZES)
    quick = resolved(ProbeSpec(quick=True), "cuda:0").probe_sizes
    assert {32_768, 49_152, 65_536} < set(quick) < set(gpu)


def test_the_platform_is_read_from_an_environment():
    assert platform_from({"system": "Linux", "kernel": "6.6.87-Microsoft-standard"}) == "wsl2"
    assert platform_from({"system": "Windows", "kernel": "11"}) == "windows"
    assert platform_from({"system": "Darwin", "kernel": "24.0"}) is None
    assert this_platform() in (*PLATFORMS, None)


def test_kernels_are_summed_by_name_and_copies_are_none():
    found = [
        ("void implicit_convolve_sgemm<float>(int)", 0.25), ("Memcpy DtoD", 1.0),
        ("void implicit_convolve_sgemm<float>(int)", 0.5), ("Memset (Device)", 1.0),
        ("Optimizer.step#Adam.step", 2.0), ("sm90_xmma_fprop", 0.125),
    ]  # fmt: skip
    assert sum_by_name(found) == {
        "implicit_convolve_sgemm<float>(int)": 0.75, "sm90_xmma_fprop": 0.125,
    }  # fmt: skip


def test_bus_traffic_is_bytes_or_none(monkeypatch):
    assert drivers.bus_traffic(None) is None
    answers = {0: 3, 1: 20_000}
    monkeypatch.setattr(drivers, "ask_nvml", lambda *asked: answers[asked[-1]])
    assert drivers.bus_traffic("handle") == {
        "sent_bytes_per_s": 3000, "received_bytes_per_s": 20_000_000,
    }  # fmt: skip
    answers[1] = None
    assert drivers.bus_traffic("handle") is None


def test_the_capture_of_the_cpu_starts_no_gpu():
    assert capture_for(torch.device("cpu")).device == torch.device("cpu")
    assert not torch.cuda.is_initialized()
