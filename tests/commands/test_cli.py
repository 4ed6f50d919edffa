"""The command line: bad input is one line and exit code 2, interruptions are resumable."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from labhelpers import __version__
from labhelpers.data import RAW
from labhelpers.records import Trial
from labhelpers.store import RUN_FILE, TRIALS_FILE, RunDirectory, open_run

Call = Callable[..., tuple[int, str, str]]
NOT_A_SIZE = "is not a batch size; each must be a whole number from 1 to 2,147,483,647"


@pytest.fixture
def data_options(data_report) -> list[str]:
    options = ["--data-dir", str(data_report.data_dir)]
    return [*options, "--synthetic"] if data_report.synthetic else options


def refusal(call: Call, *arguments: object) -> str:
    """The one line that a bad call gives, with exit code 2 and nothing written."""
    before = sorted(Path.cwd().rglob("*"))
    code, output, errors = call(*arguments)
    assert code == 2
    assert output == ""
    assert errors.startswith("labhelpers: ")
    assert errors.count("\n") == 1
    assert sorted(Path.cwd().rglob("*")) == before
    return errors.removeprefix("labhelpers: ").strip()


SAID = [
    (["--batch-sizes", ""], "batch_sizes: got ''; the batch list is empty; give at least one "
     "size, for example [32, 256]"),
    (["--batch-sizes", "[]"], "batch_sizes: got '[]'; the batch list is empty; give at least one "
     "size, for example [32, 256]"),
    (["--batch-sizes", "0"], f"batch_sizes: got '0'; '0' {NOT_A_SIZE}"),
    (["--batch-sizes", "32,-1"], f"batch_sizes: got '32,-1'; '-1' {NOT_A_SIZE}"),
    (["--batch-sizes", "2.5"], f"batch_sizes: got '2.5'; '2.5' {NOT_A_SIZE}"),
    (["--batch-sizes", "abc"], f"batch_sizes: got 'abc'; 'abc' {NOT_A_SIZE}"),
    (["--repeats", "0"], "repeats: got '0'; must be greater than or equal to 1"),
    (["--device", "tpu"], "device: got 'tpu'; must be 'auto', 'cpu', 'cuda' or 'cuda:N'"),
    (["--precision", "fp8"], "precision: got 'fp8'; must be 'fp32', 'tf32', 'bf16' or 'fp16'"),
    (["--feed", "tape"], "feed: got 'tape'; must be 'article', 'workers', 'host', 'resident' or "
     "'own'"),
    (["--images", "60001"], "images: got 60,001; FashionMNIST has 60,000 training images"),
    (["--seed", "-1"], "seed: got '-1'; must be greater than or equal to 0"),
    (["--share", "93"], "share: got '93'; must be less than or equal to 1"),
    (["--batch-size", "32"], "No such option '--batch-size'. Did you mean '--batch-sizes'?"),
    (["again"], "Got unexpected extra argument (again)"),
]  # fmt: skip


@pytest.mark.parametrize("command", ["sweep", "report"])
@pytest.mark.parametrize(("options", "said"), SAID)
def test_bad_input_is_one_line_before_anything_is_written(call, command, options, said):
    assert refusal(call, command, *options, "--data-dir", "nowhere") == said


@pytest.mark.parametrize("command", ["sweep", "report"])
def test_a_gpu_that_is_not_there_is_bad_input(call, command, data_options):
    import torch

    last = torch.cuda.device_count() if torch.cuda.is_available() else 0
    said = refusal(call, command, "--device", f"cuda:{last + 7}", *data_options)
    assert said.startswith(f"device: got 'cuda:{last + 7}', but ")
    if not last:
        assert refusal(call, command, "--require-gpu", *data_options).startswith(
            "a GPU is required (require_gpu), but "
        )


def test_a_corrupt_or_missing_data_file_is_bad_input(call, tmp_path, data_report):
    said = refusal(call, "sweep", "--data-dir", "nowhere")
    assert said.endswith("is missing; to fetch it: labhelpers data --data-dir nowhere")
    own = tmp_path / "own" / RAW
    own.mkdir(parents=True)
    for file in (data_report.root / RAW).glob("*-ubyte"):
        (own / file.name).symlink_to(file)
    (own / "train-labels-idx1-ubyte").unlink()
    (own / "train-labels-idx1-ubyte").write_bytes(b"\0" * 60_008)
    said = refusal(call, "sweep", "--data-dir", tmp_path / "own")
    assert "is corrupt: SHA-256" in said
    assert "to fetch it: labhelpers data --data-dir" in said


def test_a_place_that_cannot_be_written_is_bad_input(call, tmp_path, data_options):
    (tmp_path / "file").write_text("")
    said = refusal(call, "sweep", "--output", "file/run", "--device", "cpu", *data_options)
    assert said == (
        "cannot write results to file/run: Not a directory; choose a directory that can be written"
    )


def test_a_run_that_exists_or_is_in_use_is_bad_input(call, data_options):
    run = RunDirectory.create("run")
    said = refusal(call, "sweep", "--output", "run", "--device", "cpu", *data_options)
    assert said == "run already holds a run; resume it or choose another"
    assert refusal(call, "resume", "run") == (
        "run has no sweep to continue; start one with: labhelpers sweep"
    )
    spec = cli_spec(data_options)
    run = RunDirectory.create("asked", specs={"sweep": spec})
    with run.writing():
        said = refusal(call, "resume", "asked")
    assert said == (
        "asked is in use by another run; wait for it to end or choose another directory"
    )


def cli_spec(data_options: list[str]):
    from labhelpers.records import SweepSpec, ask

    return ask(SweepSpec, {
        "data_dir": data_options[1], "synthetic": "--synthetic" in data_options, "device": "cpu",
        "batch_sizes": [32], "images": 64, "repeats": 1,
    })  # fmt: skip


@pytest.mark.parametrize("command", ["resume", "export"])
def test_a_results_file_that_is_not_ours_or_is_newer_is_bad_input(call, command):
    assert refusal(call, command, "nowhere") == "nowhere holds no run (no run.json)"
    run = RunDirectory.create("run")
    facts = json.loads((run.path / RUN_FILE).read_text())
    (run.path / RUN_FILE).write_text('{"results": []}')
    assert refusal(call, command, "run") == (
        "run/run.json is not a results file of labhelpers (no schema_version)"
    )
    (run.path / RUN_FILE).write_text(json.dumps(facts | {"schema_version": 99}))
    assert "schema version 99 is newer than this program knows" in refusal(call, command, "run")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-p", "batch_sizs=3"], "unknown parameter 'batch_sizs': did you mean 'batch_sizes'?"),
        (["-p", "repeats"], "--parameter: got 'repeats'; must be NAME=VALUE"),
        (["--notebooks", "77"], "notebooks: there is no '77'; there are 00_report, 01_batch_sweep"),
        (["--figure", "figure.pdf"], "--figure: got 'figure.pdf'; must be the name of a .png file"),
        (["--figure", "no/a.png"], "--figure: the folder of 'no/a.png' cannot be written"),
        (["--cell-timeout-s", "0"], "--cell-timeout-s: got '0'; must be a number of seconds"),
    ],
)  # fmt: skip
def test_bad_options_of_the_report_alone(call, options, said):
    assert refusal(call, "report", *options).startswith(said)


def test_no_command_shows_the_help_and_an_unknown_one_is_refused(call):
    code, output, errors = call()
    assert (code, output) == (2, "")
    assert "\n  sweep " in errors
    assert refusal(call, "sweeep").startswith("No such command 'sweeep'.")
    assert refusal(call, "sweep", "--repeats") == "Option '--repeats' requires an argument."
    code, output, _ = call("--version")
    assert code == 0
    assert __version__ in output


@pytest.mark.parametrize("command", ["data", "sweep", "resume", "report", "export"])
def test_every_command_explains_itself(call, command):
    code, output, errors = call(command, "--help")
    assert (code, errors) == (0, "")
    assert output.startswith(f"Usage: labhelpers {command}")
    assert len(output.splitlines()) > 5


def test_export_writes_both_files_and_names_them(call, tmp_path):
    run = RunDirectory.create("run")
    with run.writing():
        run.append(Trial(kind="sweep", batch_size=8))
    assert call("export", "run") == (0, "run/export.json\nrun/trials.csv\n", "")
    assert call("export", "run", "--output", "there")[1] == "there/export.json\nthere/trials.csv\n"
    assert json.loads(Path("there/export.json").read_text())["sweep"][0]["batch_size"] == 8


# Real sweeps in processes of their own


def start(*arguments: str, **options: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "labhelpers", *arguments]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)


def group_ends(group: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


SMALL = ["sweep", "--batch-sizes", "[8, 16, 8]", "--repeats", "1", "--images", "64"]
LONG = ["sweep", "--batch-sizes", "1,2,4,8", "--images", "2000", "--repeats", "9"]
CPU = ["--device", "cpu", "--output", "run"]


def test_a_sweep_ends_with_its_table_and_keeps_a_log_quiet(tmp_path, data_options):
    process = start(*SMALL, *CPU, *data_options, cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "images/s" in output
    assert "of the best speed measured" in output
    lines = errors.splitlines()
    assert lines[:2] == [
        "note: batch 8 was given twice; it is measured once", "results go to run",
    ]  # fmt: skip
    assert any(line.startswith("estimate after the first trial: about") for line in lines)
    assert "\r" not in errors
    assert len(lines) <= 6
    assert len((tmp_path / "run" / TRIALS_FILE).read_text().splitlines()) == 2


def test_a_failed_trial_is_exit_code_1_and_the_rest_is_measured(tmp_path):
    workload = Path(__file__).parents[1] / "failing_workload.py"
    options = ["--workload", f"{workload}:failing", "--batch-sizes", "3,8", "--repeats", "1"]
    process = start("sweep", *options, *CPU, cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "failed: batch 3, repeat 1: error: ValueError: three is" in errors
    assert "Traceback" not in errors
    assert [trial.outcome for trial in open_run(tmp_path / "run").trials()] == ["error", "ok"]
    assert "batch 8 is the smallest" in output


def test_a_loader_of_bare_tensors_is_refused_not_taken_apart(call):
    workload = Path(__file__).parents[1] / "failing_workload.py"
    options = ["--workload", f"{workload}:bare", "--batch-sizes", "8", "--repeats", "1"]
    code, output, errors = call("sweep", *options, *CPU)
    assert (code, output) == (2, "")
    assert "each batch must be a pair (inputs, targets)" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "labhelpers: interrupted; finished trials are kept: labhelpers"),
        (signal.SIGTERM, 143, ""),
    ],
)  # fmt: skip
def test_an_interrupted_sweep_keeps_its_trials_and_resumes(
    tmp_path, data_options, number, code, said
):
    process = start(*LONG, *CPU, *data_options, cwd=tmp_path, start_new_session=True)
    file, deadline = tmp_path / "run" / TRIALS_FILE, time.monotonic() + 90
    while not (file.exists() and b"\n" in file.read_bytes()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    os.killpg(process.pid, number)  # as a terminal does: the worker gets it too
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert said in errors
    assert "Traceback" not in errors
    run = open_run(tmp_path / "run")
    kept = run.trials()
    assert kept
    assert {trial.outcome for trial in kept} == {"ok"}
    with run.writing():  # nobody holds the lock any more
        pass
    assert group_ends(process.pid)  # and no child is left
