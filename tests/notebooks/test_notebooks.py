"""Every notebook, run with small parameters, as papermill and as nbval run it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from pages import check_page

from labhelpers.page import write_page
from labhelpers.report import (
    NOTEBOOKS,
    NotebookResult,
    find_notebooks,
    parameters_of,
    run_notebook,
    shared_parameters,
)
from labhelpers.store import RunDirectory, open_run

BUILD = NOTEBOOKS.parent / "build"
STEMS = [path.stem for path in find_notebooks()]
CELL_TIMEOUT_S = 240
# What a notebook does not know it does not get.
SMALL: dict[str, Any] = {
    "quick": True, "device": "cpu", "batch_sizes": [32, 64], "images": 256, "repeats": 1,
    "probe_sizes": [64, 128], "steps": 1, "warmup_steps": 1, "time_budget_s": 20,
    "input_shape": [3, 32, 32], "classes": 10, "batch_size": 4, "dataset_size": 32,
    "num_iterations": 3, "cap_batch_sizes": [256, 16384],
    "remedies": ["accumulation", "bf16", "checkpointing"],
}  # fmt: skip


class Runs:
    """Run each notebook once, in one run directory, when a test first asks for it."""

    def __init__(self, folder: Path, data_report) -> None:
        self.run = RunDirectory.create(folder / "run", synthetic=data_report.synthetic)
        self._small = SMALL | {
            "data_dir": str(data_report.data_dir), "synthetic": data_report.synthetic,
        }  # fmt: skip
        self._results: dict[str, NotebookResult] = {}

    def parameters(self, stem: str) -> dict[str, Any]:
        path = NOTEBOOKS / f"{stem}.ipynb"
        return shared_parameters(path, self._small) | {"run_dir": str(self.run.path)}

    def result(self, stem: str) -> NotebookResult:
        """Return how a notebook ended; those that come before it have run."""
        for each in STEMS[: STEMS.index(stem) + 1]:
            if each not in self._results:
                self._results[each] = run_notebook(
                    NOTEBOOKS / f"{each}.ipynb", self.run.path / "notebooks" / f"{each}.ipynb",
                    self.parameters(each), cell_timeout_s=CELL_TIMEOUT_S,
                )  # fmt: skip
        return self._results[stem]


@pytest.fixture(scope="session")
def runs(tmp_path_factory, data_report) -> Runs:
    return Runs(tmp_path_factory.mktemp("notebooks"), data_report)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stem", STEMS)
def test_a_notebook_runs_from_top_to_bottom(runs, stem):
    result = runs.result(stem)
    assert (result.exit_code, result.why) == (0, "")
    for cell in nbformat.read(result.path, as_version=4).cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("stem", STEMS)
def test_a_notebooks_page_needs_no_network_and_describes_its_figures(runs, stem, tmp_path):
    check_page(write_page(runs.result(stem).path, tmp_path / "page.html"))


@pytest.mark.timeout(900)
def test_everything_that_was_measured_is_in_the_one_run_and_says_cpu(runs):
    runs.result(STEMS[-1])
    trials = open_run(runs.run.path).trials()
    assert {trial.device for trial in trials} == {"cpu"}
    sweep = [trial for trial in trials if (trial.kind, trial.feed) == ("sweep", "article")]
    assert [(trial.batch_size, trial.outcome) for trial in sweep] == [(32, "ok"), (64, "ok")]
    assert (runs.run.path / "figures" / "batch_sweep.png").stat().st_size > 10_000


def checked_outputs(path: Path) -> int:
    cells = nbformat.read(path, as_version=4).cells
    return sum("nbval-check-output" in cell.metadata.get("tags", []) for cell in cells)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "stem", [stem for stem in STEMS if checked_outputs(NOTEBOOKS / f"{stem}.ipynb")]
)
def test_committed_outputs_that_hold_on_any_machine_hold_here(runs, stem):
    import papermill

    runs.result(stem)  # so that nothing is measured a second time below
    BUILD.mkdir(exist_ok=True)  # a sibling of notebooks/: relative paths hold there too
    copy = BUILD / f"{stem}.ipynb"
    papermill.execute_notebook(
        str(NOTEBOOKS / copy.name), str(copy), runs.parameters(stem), prepare_only=True,
        progress_bar=False,
    )  # fmt: skip
    command = [
        sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env",
        "--nbval-cell-timeout", str(CELL_TIMEOUT_S), "--timeout", "600", "-x",
        "-p", "no:cacheprovider", str(copy),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=BUILD, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    copy.unlink()


def test_every_notebook_can_be_asked_for_a_quick_run_on_a_device():
    for path in find_notebooks():
        names = parameters_of(path)
        assert "run_dir" in names
        assert path.stem.startswith("00") or {"quick", "device"} <= set(names)
