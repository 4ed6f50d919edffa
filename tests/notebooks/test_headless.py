"""How a headless run ends: honest exit codes, and a notebook that looks complete only if it is."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
import zmq
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labhelpers.headless import FIRST_LOOK
from labhelpers import report
from labhelpers.inputs import InputError
from labhelpers.report import (
    NotebookResult,
    count_unrun,
    exit_code_of,
    find_notebooks,
    parameters_of,
    run_notebook,
    shared_parameters,
)

Make = Callable[..., Path]
PARAMETERS = "rounds: int = 2  # How many\nrun_dir: str = ''  # Where"


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write a small notebook of code cells, the first one tagged `parameters`."""

    def write(*sources: str, parameters: str = PARAMETERS, tags: int = 1) -> Path:
        cells = [new_markdown_cell("# A test")]
        tagged = {"tags": ["parameters"]}
        cells += [new_code_cell(parameters, metadata=tagged) for _ in range(tags)]
        cells += [new_code_cell(source) for source in sources]
        path = tmp_path / "01_test.ipynb"
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python", "language": "python"}}
        nbformat.write(new_notebook(cells=cells, metadata=kernel), path)
        return path

    return write


def run(notebook: Path, timeout_s: float | None = None, **parameters: object) -> NotebookResult:
    output = notebook.parent / "out" / notebook.name
    return run_notebook(notebook, output, parameters, cell_timeout_s=timeout_s)


def check_partial(result: NotebookResult) -> None:
    """Only a partial notebook is left, with what ran in it."""
    assert [path.name for path in result.path.parent.iterdir()] == ["01_test.partial.ipynb"]
    assert result.path.name == "01_test.partial.ipynb"
    nbformat.validate(nbformat.read(result.path, as_version=4))


def test_a_complete_run_gets_its_name_and_its_parameters(make):
    result = run(make("print(rounds * 2)", ""), rounds=21)
    assert (result.exit_code, result.why, result.name) == (0, "", "01_test")
    assert [path.name for path in result.path.parent.iterdir()] == ["01_test.ipynb"]
    assert nbformat.read(result.path, as_version=4).cells[-2].outputs[0].text == "42\n"


@pytest.mark.skipif(not zmq.has("curve"), reason="needs a ZeroMQ that encrypts")
def test_the_kernel_is_talked_to_in_secret_and_warns_of_nothing(make, capfd):
    key = "import ipykernel.kernelapp as app\n"
    key += "print(len(app.IPKernelApp.instance().curve_secretkey or b''))"
    result = run(make(key))
    assert nbformat.read(result.path, as_version=4).cells[-1].outputs[0].text == "40\n"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("source", "code", "why"),
    [
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("from labhelpers.inputs import InputError\nraise InputError('rounds: got 2; no')", 2,
         "InputError: rounds: got 2; no"),
        ("from labhelpers.idx import DataError\nraise DataError('a file is missing')", 2,
         "DataError: a file is missing"),
        ("import sys\nsys.exit(0)", 3, "1 cells were not run"),
        ("import sys\nsys.exit(5)", 1, "SystemExit: 5"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", 138, "Kernel died"),
    ],
)  # fmt: skip
def test_a_run_that_ends_early_has_its_code_and_stays_partial(make, source, code, why):
    result = run(make(source, "print('the end')"))
    assert (result.exit_code, result.why) == (code, why)
    check_partial(result)


def test_a_cell_that_takes_too_long_is_ended(make):
    result = run(make("import time\ntime.sleep(600)", "print('the end')"), timeout_s=2)
    assert result.exit_code == 124
    assert "timed out" in result.why
    check_partial(result)


def test_a_failed_run_takes_an_earlier_complete_one_away(make):
    good = run(make("print(1)"))
    assert good.exit_code == 0
    bad = run(make("1 / 0"))
    assert bad.exit_code == 1
    assert not good.path.exists()
    assert run(make("print(2)")).path == good.path
    assert not bad.path.exists()


def test_an_unknown_parameter_is_refused_before_anything_runs(make):
    notebook = make("print(1)")
    with pytest.raises(InputError) as caught:
        run(notebook, round=3)
    assert str(caught.value) == (
        "unknown parameter 'round': did you mean 'rounds'? (allowed: rounds, run_dir)"
    )
    assert not (notebook.parent / "out").exists()


@pytest.mark.parametrize("tags", [0, 2])
def test_a_notebook_has_exactly_one_cell_of_parameters(make, tags):
    notebook = make("print(1)", tags=tags)
    with pytest.raises(InputError) as caught:
        parameters_of(notebook)
    assert str(caught.value) == (
        f"{notebook}: has {tags} cells tagged 'parameters'; exactly 1 is needed"
    )


def test_parameters_and_their_help_are_read(make):
    notebook = make()
    assert parameters_of(notebook) == {"rounds": "How many", "run_dir": "Where"}
    assert shared_parameters(notebook, {"rounds": 1, "device": "cpu"}) == {"rounds": 1}


def test_cells_that_were_not_run_are_counted(make):
    assert count_unrun(make("1", "", "  \n", "2")) == 3  # both, and the parameters


def test_the_first_code_that_is_not_0_is_the_reports():
    def result(code: int) -> NotebookResult:
        return NotebookResult("a", code, Path("a"))

    assert exit_code_of([]) == exit_code_of([result(0)]) == 0
    assert exit_code_of([result(0), result(3), result(1)]) == 3


def test_notebooks_are_found_in_the_order_they_run(tmp_path, monkeypatch):
    for name in ("00_report", "02_b", "01_a", "01_a.partial", "draft"):
        (tmp_path / f"{name}.ipynb").write_text("")
    monkeypatch.setattr(report, "NOTEBOOKS", tmp_path)
    assert [path.stem for path in find_notebooks()] == ["01_a", "02_b", "00_report"]
    assert [path.stem for path in find_notebooks(["00", "01"])] == ["01_a", "00_report"]
    with pytest.raises(InputError) as caught:
        find_notebooks(["7"])
    assert str(caught.value) == "notebooks: there is no '7'; there are 00_report, 01_a, 02_b"


def test_bare_papermill_stops_at_a_misspelt_parameter_too(tmp_path):
    (notebook,) = find_notebooks(["01"])
    done = subprocess.run(
        [sys.executable, "-m", "papermill", str(notebook), str(tmp_path / "out.ipynb"),
         "-p", "batch_size", "[8]", "--cwd", str(notebook.parent), "--no-progress-bar"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "InputError: unknown parameter 'batch_size'; did you mean 'batch_sizes'?" in done.stderr


def test_a_quick_report_leaves_out_the_ladder_alone():
    quick, every = find_notebooks(FIRST_LOOK), find_notebooks([])
    assert [path for path in every if path not in quick] == [every[-2]]
    assert every[-2].stem == "05_why_the_plateau"
    assert quick[-1] == every[-1]
