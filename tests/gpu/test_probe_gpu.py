"""The probe and the residency map on a real GPU."""

import statistics

import pytest
import torch

from labhelpers.oversubscription import best_safe_batch, judge_memory
from labhelpers.platforms import SPILLING_PLATFORMS
from labhelpers.probe import probe_trials_of, run_probe, this_platform, why_it_stopped
from labhelpers.records import ProbeSpec, ask
from labhelpers.residency import residency_map
from labhelpers.residency_run import run_residency
from labhelpers.store import RunDirectory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
native_linux = pytest.mark.skipif(
    this_platform() in SPILLING_PLATFORMS, reason="this driver may spill, and then rightly so"
)


@pytest.fixture(scope="module")
def probed(worker, tmp_path_factory):
    run = RunDirectory.create(tmp_path_factory.mktemp("probe") / "run")
    return run, run_probe(ask(ProbeSpec, {"quick": True}), run, worker=worker)


@pytest.fixture(scope="module")
def mapped(worker, tmp_path_factory):
    run = RunDirectory.create(tmp_path_factory.mktemp("residency") / "run")
    return run_residency(ask(ProbeSpec, {}), run, worker=worker)


def test_the_trials_hold_what_a_gpu_can_tell(probed):
    _, trials = probed
    for trial in trials:
        assert trial.outcome == "ok"
        assert trial.device.startswith("cuda")
        assert trial.peak_reserved_bytes >= trial.peak_allocated_bytes > 0
        assert trial.memory_after.total_bytes > trial.memory_after.free_bytes
        assert trial.alloc_retries == 0
        assert len(trial.step_times_s) == 5
        assert sum(trial.step_times_s) == pytest.approx(trial.epoch_s, rel=0.1)


def test_the_profiler_named_kernels_and_they_repeat(probed):
    """The same size runs the same kernels; None is allowed, an empty list is not."""
    _, trials = probed
    names = [(trial.details or {}).get("kernels") for trial in (trials[0], trials[-1])]
    assert names[0] == names[1]
    assert names[0] is None or len(names[0]) > 3


@native_linux
def test_no_size_of_a_fresh_probe_is_past_the_card(probed):
    run, trials = probed
    assert probe_trials_of(run) == trials
    total_bytes = trials[0].memory_before.total_bytes
    judged = judge_memory(trials, total_bytes, "linux")
    assert {judgement.verdict for judgement in judged} == {"no"}
    assert all("oversubscription" not in judgement.causes for judgement in judged)
    assert best_safe_batch(judged) in {trial.batch_size for trial in trials}


@native_linux
def test_it_ended_without_using_the_card_up(probed):
    _, trials = probed
    assert why_it_stopped(trials).reason in ("done", "memory_budget")
    free_bytes = trials[0].memory_before.free_bytes
    assert max(trial.peak_reserved_bytes for trial in trials) <= 0.91 * free_bytes


def test_the_budget_is_a_cap_that_the_allocator_keeps(worker, tmp_path):
    budget_bytes = 256 * 1024**2
    spec = ask(ProbeSpec, {"probe_sizes": [32_768], "memory_budget_bytes": budget_bytes})
    (trial,) = run_probe(spec, RunDirectory.create(tmp_path / "run"), worker=worker)
    assert trial.outcome == "oom"
    assert trial.cap_bytes == budget_bytes
    assert "cap" in trial.oom["causes"]
    assert why_it_stopped([trial]).reason == "memory_budget"


@native_linux
def test_every_block_is_filled_within_a_fifth_of_the_cards_bandwidth(mapped):
    found = residency_map(mapped)
    assert found.ended is None
    assert len(found.fill_judgements) >= 2
    for judged in found.fill_judgements:
        assert judged.bandwidth == pytest.approx(found.card_fill, rel=0.2)
    assert found.slow_blocks == []


def test_the_bus_is_slower_than_the_card_and_both_were_measured(mapped):
    found = residency_map(mapped)
    assert found.bus_to_device is not None
    assert found.bus_from_device is not None
    assert 0 < found.bus_to_device < found.card_read
    assert found.card_copy > found.bus_to_device


@native_linux
def test_reads_are_steady_too(mapped):
    found = residency_map(mapped)
    typical = statistics.median(judged.bandwidth for judged in found.read_judgements)
    for judged in found.read_judgements:
        assert judged.bandwidth == pytest.approx(typical, rel=0.25)
