"""A reader's own model and DataLoader: from Python, in a notebook, on the command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labhelpers.export import exported
from labhelpers.inputs import InputError
from labhelpers.limit_views import limits_in
from labhelpers.records import SweepSpec, ask
from labhelpers.report import NOTEBOOKS, run_notebook
from labhelpers.store import RunDirectory, open_run
from labhelpers.sweep import run_sweep, training
from labhelpers.sweep_checks import check_request

MODULE = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from labhelpers.workloads import Workload, image_batches

DATA = TensorDataset(torch.rand(50, 3, 8, 8), torch.randint(5, (50,)))


def make_loader(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(DATA, batch_size, shuffle=True, generator=generator)


def make_workload():
    return Workload(
        "mine",
        lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5)),
        image_batches((3, 8, 8), 5),
        make_loader=make_loader,
        dataset_size=len(DATA),
    )
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the reader's own module in it."""
    (tmp_path / "mymodule.py").write_text(MODULE)
    return tmp_path


def check(run: RunDirectory, repeats: int = 1) -> None:
    """Hold a run to what the module's loader gives at batch 20: three steps, the last of 10."""
    trials = run.trials("sweep")
    assert len(trials) == repeats
    for trial in trials:
        assert (trial.outcome, trial.feed, trial.device) == ("ok", "own", "cpu")
        assert (trial.images, trial.steps, trial.last_batch, trial.updates) == (50, 3, 10, 3)
        assert trial.images_per_s is not None
        assert trial.final_loss is not None
    assert limits_in(run)[20].verdict in ("feed", "compute", "undecided")
    assert len(exported(run).sweep) == repeats


def test_from_python_by_file(folder):
    run = RunDirectory.create(folder / "run")
    spec = ask(SweepSpec, {
        "workload": f"{folder / 'mymodule.py'}:make_workload", "batch_sizes": [20], "repeats": 2,
        "device": "cpu",
    })  # fmt: skip
    trials = run_sweep(spec, run)
    check(run, repeats=2)
    assert trials[0].final_loss == trials[1].final_loss  # the loader's seed is the spec's


def test_from_python_with_a_workload_that_was_made_here(folder):
    namespace: dict[str, object] = {}
    exec(MODULE, namespace)
    workload = namespace["make_workload"]()
    run = RunDirectory.create(folder / "run")
    spec = ask(SweepSpec, {
        "workload": "made here", "batch_sizes": [20], "repeats": 1, "device": "cpu",
    })  # fmt: skip
    run_sweep(spec, run, measure=training(workload))
    check(run)


def test_on_the_command_line(folder):
    command = [sys.executable, "-m", "labhelpers", "sweep", "--batch-sizes", "20", "--repeats", "1",
               "--device", "cpu", "--output", "run"]  # fmt: skip
    for workload in ("mymodule.py:make_workload", "mymodule:make_workload"):
        output = folder / workload.replace(":", "-")
        done = subprocess.run(
            [*command[:-1], str(output), "--workload", workload],
            cwd=folder, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "limited by" in done.stdout
        check(open_run(output))


@pytest.mark.timeout(600)
def test_as_a_notebook_parameter(folder, monkeypatch):
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    parameters = {
        "workload": "mymodule:make_workload", "batch_sizes": [20], "repeats": 1, "device": "cpu",
        "run_dir": str(folder / "run"),
    }  # fmt: skip
    result = run_notebook(
        NOTEBOOKS / "01_batch_sweep.ipynb", folder / "out.ipynb", parameters, cell_timeout_s=240
    )
    assert (result.exit_code, result.why) == (0, "")
    check(open_run(folder / "run"))


def test_an_own_loader_leaves_no_choice_of_feed():
    spec = ask(SweepSpec, {"workload": "mymodule:make_workload"})
    assert spec.feed == "own"
    check_request(spec)
    for feed in ("workers", "host", "resident"):
        asked = ask(SweepSpec, {"workload": "mymodule:make_workload", "feed": feed})
        with pytest.raises(InputError, match="brings its own loader; leave feed away"):
            check_request(asked)
    assert ask(SweepSpec, {"workload": " fashion_cnn "}).feed == "article"
