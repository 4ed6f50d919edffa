"""The finder on this machine's CPU: real trials, in the worker and in this process."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import finder_workloads as cases
import pytest
import torch
from torch import nn

from labhelpers.finder import find_batch_size, run_finder, search_batch_size
from labhelpers.finder_report import read_reports
from labhelpers.finder_shapes import shapes_workload
from labhelpers.finder_trials import outcome_of
from labhelpers.inputs import InputError
from labhelpers.records import FinderSpec, ask
from labhelpers.search import NothingFits
from labhelpers.store import RunDirectory, open_run
from labhelpers.worker import Stopped

MIB = 2**20
ROOT = Path(__file__).resolve().parents[1]
QUICK = {"device": "cpu", "num_iterations": 3, "headroom": 0.0}


def tried(report) -> list[int]:
    return [trial.batch_size for trial in report.trials]


def outcomes(report) -> dict[int, str]:
    return {trial.batch_size: outcome_of(trial) for trial in report.trials}


# What fits, for real


def test_exact_under_a_budget(worker):
    """The largest ran three steps or more; the next one did not fit into 24 MiB."""
    report = search_batch_size(cases.job(), worker=worker, limit_bytes=24 * MIB, **QUICK)
    found = outcomes(report)
    assert found[report.largest] == "ok"
    assert found[report.largest + 1] in ("oom", "oversubscribed")
    assert report.result.ended_by == "memory"
    assert 4 < report.largest < 50
    assert report.oom_count >= 1
    for trial in report.trials:
        if outcome_of(trial) == "ok":
            assert trial.updates == trial.steps + 1 == 3
            assert trial.first_step_peak_bytes <= 24 * MIB
            assert trial.peak_allocated_bytes <= 24 * MIB
            assert trial.images == 2 * trial.batch_size
            assert trial.images_per_s > 0
    assert 0.5 < report.utilisation <= 1
    assert report.start_s > 0
    assert report.search_s > 0
    assert report.result.fit.slope > cases.FEATURES * 4


def test_the_headroom_is_proved(worker):
    report = search_batch_size(
        cases.job(), worker=worker, limit_bytes=24 * MIB, **{**QUICK, "headroom": 0.3}
    )
    size = report.with_headroom
    assert size < report.largest
    proof = report.at(size)[-1]
    assert max(proof.first_step_peak_bytes, proof.peak_allocated_bytes) <= 0.7 * 24 * MIB
    assert proof.updates >= 3


def test_more_budget_gives_a_larger_size_and_multiples_are_kept(worker):
    small, large = (
        search_batch_size(cases.job(), worker=worker, limit_bytes=mib * MIB, multiple_of=4, **QUICK)
        for mib in (24, 48)
    )
    assert all(size % 4 == 0 for size in tried(small) + tried(large))
    assert small.largest < large.largest


def test_a_data_set_bounds_the_size_and_its_name_is_said(worker):
    report = search_batch_size(cases.job(dataset_size=12), worker=worker, **QUICK)
    assert (report.largest, report.result.ended_by) == (12, "dataset")
    assert report.ended == "the size of the data set"
    assert max(tried(report)) == 12
    report = search_batch_size(cases.job(dataset_size=12), worker=worker, max_batch_size=5, **QUICK)
    assert (report.largest, report.result.ended_by) == (5, "maximum")


@pytest.mark.parametrize("limit", ["dataset_size", "max_batch_size"])
def test_a_data_set_or_maximum_of_one(worker, limit):
    report = search_batch_size(cases.job(), worker=worker, **{limit: 1}, **QUICK)
    assert (report.largest, tried(report)) == (1, [1])


@pytest.mark.parametrize("limit", ["dataset_size", "max_batch_size", "num_iterations"])
def test_nothing_to_train_is_refused(limit):
    with pytest.raises(InputError, match=f"{limit}: got 0; must be greater than or equal to 1"):
        search_batch_size(cases.job(), **{**QUICK, limit: 0})


def test_doubling_is_the_articles_own(worker):
    report = search_batch_size(
        cases.job(), worker=worker, strategy="doubling", max_batch_size=20, **QUICK
    )
    assert tried(report) == [2, 4, 8, 16, 20]
    report = search_batch_size(
        cases.job(), worker=worker, strategy="doubling", limit_bytes=24 * MIB, **QUICK
    )
    sizes = tried(report)
    assert sizes == [2**power for power in range(1, len(sizes) + 1)]
    assert report.largest == sizes[-2]


def test_several_integer_inputs(worker):
    report = search_batch_size(cases.tokens(), worker=worker, max_batch_size=64, **QUICK)
    assert report.largest == 64


# How trials end otherwise


def test_a_hang_ends_at_its_time_limit_and_does_not_fit(worker):
    started = time.monotonic()
    report = search_batch_size(
        cases.job(cases.HangsAbove4), worker=worker, max_batch_size=5, trial_timeout_s=10, **QUICK
    )
    assert report.largest == 4
    assert {size for size, how in outcomes(report).items() if how == "timeout"} == {5}
    assert report.result.ended_by == "timeout"
    assert "time limit" in report.ended
    assert time.monotonic() - started < 100


@pytest.mark.parametrize("model", [cases.DiesAbove4, cases.CrashesAbove4])
def test_a_dead_process_does_not_fit(worker, model):
    report = search_batch_size(cases.job(model), worker=worker, max_batch_size=6, **QUICK)
    assert report.largest == 4
    assert outcomes(report)[5] == "killed"
    assert report.result.ended_by == "killed"
    dead = next(trial for trial in report.trials if trial.batch_size == 5)
    assert "signal" in dead.error_text


def test_a_slow_step_ends_without_losing_the_process(worker):
    worker.warm_up()
    started_s = worker.start_s
    report = search_batch_size(
        cases.job(cases.SlowAbove4), worker=worker, max_batch_size=5, trial_timeout_s=5,
        **{**QUICK, "num_iterations": 20},
    )  # fmt: skip
    assert outcomes(report)[5] == "timeout"
    assert report.largest == 4
    assert worker.start_s == started_s


@pytest.mark.parametrize("isolate", [True, False])
def test_an_error_above_some_size_is_named(worker, isolate):
    report = search_batch_size(
        cases.job(cases.FailsAbove4), worker=worker, isolate=isolate, max_batch_size=9, **QUICK
    )
    assert (report.largest, report.result.ended_by) == (4, "error")
    failed = next(trial for trial in report.trials if trial.batch_size == 5)
    assert (failed.error_class, failed.error_text) == ("LookupError", "five is right out")


def test_a_librarys_limit_is_not_called_memory(worker):
    report = search_batch_size(
        cases.job(cases.LibraryLimitAbove4), worker=worker, max_batch_size=9, **QUICK
    )
    assert report.largest == 4
    assert report.ended == "library limit, not memory"
    assert report.oom_count == 0


@pytest.mark.parametrize("isolate", [True, False])
def test_out_of_memory_above_1_and_an_error_at_1_gives_the_error(worker, isolate):
    with pytest.raises(ValueError, match="expected more than 1 value") as caught:
        search_batch_size(
            cases.job(cases.OutOfMemoryAbove1), worker=worker, isolate=isolate, **QUICK
        )
    assert type(caught.value) is ValueError
    assert "2 (oom), 1 (error)" in caught.value.__notes__[0]


@pytest.mark.parametrize("isolate", [True, False])
def test_all_failing_ends_after_two_trials(worker, isolate):
    with pytest.raises(NothingFits, match=r"tried batch size 2 \(oom\), 1 \(oom\)"):
        search_batch_size(cases.job(cases.OutOfMemory), worker=worker, isolate=isolate, **QUICK)


def test_the_whole_search_has_a_time_limit(worker):
    started = time.monotonic()
    report = search_batch_size(
        cases.job(cases.SlowAbove4), worker=worker, time_budget_s=8, limit_bytes=500 * MIB, **QUICK
    )
    assert report.result.ended_by == "time"
    assert outcomes(report)[report.largest] == "ok"
    assert time.monotonic() - started < 60


def test_stop_ends_the_search(worker):
    stop = threading.Event()

    def stop_at_the_second(progress) -> None:
        if progress.trial is not None:
            stop.set()

    for isolate in (True, False):
        stop.clear()
        with pytest.raises(Stopped):
            search_batch_size(
                cases.job(), worker=worker, isolate=isolate, stop=stop,
                on_progress=stop_at_the_second, **QUICK,
            )  # fmt: skip


# Where a workload runs


def test_a_class_of_a_notebook_cell_travels():
    """In a notebook, as in `python -c`, a class lives in __main__, which no child can import."""
    script = """
import torch
from labhelpers.finder import search_batch_size
from labhelpers.workloads import Workload

class Cell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, inputs):
        return self.layer(inputs)

def make_batch(batch_size, device):
    return torch.rand(batch_size, 4, device=device), torch.rand(batch_size, 2, device=device)

job = Workload("cell", Cell, make_batch, torch.nn.functional.mse_loss)
report = search_batch_size(job, isolate=True, device="cpu", max_batch_size=16, headroom=0)
print(report.largest, torch.get_num_threads() > 0, report.notes)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["16", "True", "()"]


def test_what_cannot_travel_stays_here_and_says_so(worker):
    lock = threading.Lock()

    def make_model() -> nn.Module:
        with lock:
            return cases.Wide()

    job = cases.job(make_model)
    report = search_batch_size(job, worker=worker, max_batch_size=4, **QUICK)
    assert report.largest == 4
    assert "cannot travel to a worker process" in report.notes[0]
    with pytest.raises(InputError, match="isolate: the workload cannot travel"):
        search_batch_size(job, worker=worker, isolate=True, **QUICK)


def test_a_module_the_worker_cannot_import_is_tried_here(worker, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("from finder_workloads import *\nclass Own(Wide): pass")
    worker.warm_up()
    monkeypatch.syspath_prepend(tmp_path)  # after the worker has started: it does not know it
    import only_here

    report = search_batch_size(cases.job(only_here.Own), worker=worker, max_batch_size=4, **QUICK)
    assert report.largest == 4
    assert "ModuleNotFoundError" in report.notes[0]


def test_bad_input_is_one_line(worker):
    for asked, told in (
        ({"device": "cuda:99"}, "device: got 'cuda:99'"),
        ({"device": "gpu"}, "device: got 'gpu'"),
        ({"optimizer": "adamm"}, "optimizer: got 'adamm'; must be one of adadelta"),
        ({"strategy": "guess"}, "strategy: got 'guess'"),
        ({"headrom": 0.2}, "did you mean 'headroom'"),
        ({"multiple_of": 8, "max_batch_size": 4}, "multiple_of=8"),
    ):
        with pytest.raises(InputError) as caught:
            search_batch_size(cases.job(), worker=worker, **{**QUICK, **asked})
        assert told in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="cannot import no_such_module"):
        search_batch_size("no_such_module:Net", worker=worker, **QUICK)


def test_a_model_that_cannot_be_built_gives_its_own_error(worker):
    def broken() -> nn.Module:
        raise LookupError("no weights")

    with pytest.raises(LookupError, match="no weights"):
        search_batch_size(cases.job(broken), worker=worker, **QUICK)


# Records


def test_each_probe_is_kept_and_a_second_search_tries_nothing_again(worker, tmp_path):
    spec = ask(FinderSpec, {**QUICK, "workload": "Wide", "max_batch_size": 6, "headroom": 0.1})
    run = RunDirectory.create(tmp_path / "run")
    seen = []
    first = run_finder(
        spec, run, workload=cases.job(), worker=worker,
        on_progress=lambda p: seen.append((p.batch_size, p.trial is not None)),
    )  # fmt: skip
    assert seen[::2] == [(size, False) for size in tried(first)]
    kept = open_run(tmp_path / "run").trials("finder")
    assert [trial.batch_size for trial in kept] == tried(first)
    assert {trial.environment_id for trial in kept} == set(open_run(run.path).info.environments)
    again = run_finder(spec, run, workload=cases.job(), worker=worker)
    assert again.trials == first.trials == tuple(kept)
    (read,) = read_reports(open_run(run.path))
    assert read.result == again.result
    assert (read.largest, read.with_headroom, read.terms) == (6, 6, first.terms)


# The second article's function


def test_find_batch_size_takes_the_articles_arguments():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    found = find_batch_size(
        model=model, input_shape=(3, 2, 2), output_shape=(3,), dataset_size=100,
        device=torch.device("cpu"), max_batch_size=None, num_iterations=3, isolate=False,
    )  # fmt: skip
    assert found == 100


def test_a_last_batch_of_one_is_warned_of():
    """59,999 images at 2 leave one, on which BatchNorm fails in training."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.warns(UserWarning, match="59,999 samples in batches of 2 leave a last batch of 1"):
        found = find_batch_size(
            model, (2,), (2,), 59_999, "cpu", max_batch_size=2, isolate=False, headroom=0
        )
    assert found == 2
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        find_batch_size(model, (2,), (2,), 1, "cpu", isolate=False)


def test_the_winner_has_trained_with_all_of_adams_state():
    """Linear(1000, 10): 2 × 40,040 bytes of parameters and 4 bytes for each of two tensors."""
    cases.Recorded.notes.clear()

    def make_optimizer(parameters, learning_rate):
        return cases.Recorded(parameters, lr=learning_rate)

    def make_batch(batch_size, device):
        return torch.rand(batch_size, 1000), torch.rand(batch_size, 10)

    job = cases.Workload(
        "linear", lambda: nn.Linear(1000, 10), make_batch, nn.functional.mse_loss, make_optimizer
    )
    report = search_batch_size(
        job, isolate=False, device="cpu", max_batch_size=2, num_iterations=1, headroom=0
    )
    assert report.largest == 2
    trial = cases.Recorded.notes[-3:]  # before them: the step that starts threads
    assert trial == [(0, 80_088), (80_088, 80_088), (80_088, 80_088)]


def test_bad_models_and_shapes_are_one_line():
    model = nn.Linear(2, 2)
    for arguments, told in (
        ((nn.Linear, (2,), (2,), 10), "model: got type"),
        ((model, "2", (0,), 10), "output_shape: got (0,)"),
        ((model, (2.5,), (2,), 10), "input_shape: got (2.5,)"),
        ((model, (2,), (2,), 0), "dataset_size: got 0"),
        ((model, (2,), (2,), 10, "tpu"), "device: got 'tpu'"),
    ):
        with pytest.raises(InputError) as caught:
            find_batch_size(*arguments)
        assert told in str(caught.value)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
def test_inputs_and_targets_have_the_models_dtype(kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(kind)
    assert find_batch_size(model, (4,), (2,), 4, "cpu", isolate=False) == 4
    batch = shapes_workload(model, (4,), (2,)).make_batch(3, torch.device("cpu"))
    assert [tensor.dtype for tensor in batch] == [kind, kind]


def test_without_a_floating_point_parameter_the_default_dtype_is_used():
    model = nn.Module()
    model.count = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
    batch = shapes_workload(model, (4,), (2,)).make_batch(3, torch.device("cpu"))
    assert {tensor.dtype for tensor in batch} == {torch.get_default_dtype()}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (nn.Linear(2, 2), r"workload: got a model \(Linear\); call find_batch_size"),
        (3, "workload: got int; must be a Workload or a reference"),
        (nn.Linear, "workload: got type; .*find_batch_size"),
        (None, "workload: got NoneType; "),
    ],
)
def test_what_is_no_workload_is_one_line(given, told):
    with pytest.raises(InputError, match=told) as caught:
        search_batch_size(given, **QUICK)
    assert "\n" not in str(caught.value)
    if given is not None:  # there, None means the spec's reference
        with pytest.raises(InputError, match=told):
            run_finder(ask(FinderSpec, QUICK), workload=given)


def test_a_mismatched_shape_raises_the_models_own_error():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        find_batch_size(nn.Linear(2, 2), (3,), (2,), 10, "cpu", isolate=False)


def test_the_parent_loads_no_torch_for_a_reference(tmp_path):
    """The command line's process leaves torch, and the GPU, to the worker."""
    script = (
        "import sys, labhelpers.finder, labhelpers.finder_report, labhelpers.cli_find;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.strip() == "False"
