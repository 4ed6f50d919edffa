"""What limits a batch size, on a real GPU: planted cases, and what the profiler returns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from labhelpers.limits import LimitVerdict, limits_of
from labhelpers.profiling import measure_limits
from labhelpers.records import SweepSpec, Trial, ask
from labhelpers.store import RunDirectory
from labhelpers.sweep import resolved, run_sweep, trials_of
from labhelpers.tables import sweep_table
from labhelpers.trials import measure_sweep_trial

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PLANTED = Path(__file__).parents[1] / "planted_workloads.py"
CASES = {"sleeping_feed": (8, "feed"), "tiny_layers": (1, "launch"),
         "large_convolution": (8, "compute")}  # fmt: skip


def planted_spec(name: str) -> dict[str, Any]:
    asked = {"workload": f"{PLANTED}:{name}", "device": "cuda:0"}
    return resolved(ask(SweepSpec, asked), "cuda:0").model_dump(mode="json")


@pytest.fixture(scope="module")
def judged(worker) -> dict[str, LimitVerdict]:
    """Measure all planted cases, then profile them: the profiler runs after everything timed."""

    def run(function: Callable[..., Any], *arguments: Any) -> Trial:
        answer = worker.run(function, *arguments, timeout_s=120)
        assert answer.outcome == "ok", answer.error_text
        return Trial(**answer.value)

    specs = {name: planted_spec(name) for name in CASES}
    trials = {n: run(measure_sweep_trial, specs[n], size, 0, 0) for n, (size, _) in CASES.items()}
    profiles = {n: run(measure_limits, specs[n], size) for n, (size, _) in CASES.items()}
    return {n: limits_of([trials[n]], [profiles[n]])[size] for n, (size, _) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_planted_cases(judged, name):
    found = judged[name]
    assert found.verdict == CASES[name][1], found


def test_all_shares_are_known_and_add_up(judged):
    for found in judged.values():
        shares = found.shares.known()
        assert set(shares) == {"feed", "launch", "compute", "memory"}
        assert sum(shares.values()) == pytest.approx(1)


def test_a_sweep_finds_out_what_limits_each_size(tmp_path, worker, data_report):
    asked = ask(SweepSpec, {
        "device": "cuda:0", "batch_sizes": [32, 4096], "images": 8192, "repeats": 1,
        "data_dir": data_report.data_dir, "synthetic": data_report.synthetic,
    })  # fmt: skip
    run = RunDirectory.create(tmp_path / "run")
    trials = run_sweep(asked, run, worker=worker)
    profiled = trials_of(run, kind="limits")
    assert [trial.batch_size for trial in profiled] == [32, 4096]
    for trial in profiled:
        found = trial.details["limits"]
        assert found["why"] is None
        assert 0 < found["kernel_s"] <= found["wall_s"]
        assert found["images"] == found["steps"] * trial.batch_size
    table = sweep_table(trials, profiled).set_index("batch_size")
    assert table.loc[4096, "limited_by"] == "feed"  # a DataLoader without workers
    before = len(run.trials())
    run_sweep(asked, run, worker=worker)
    assert len(run.trials()) == before  # neither measured nor profiled again
