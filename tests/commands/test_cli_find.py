"""`labhelpers find`: tables, words and JSON; bad input is one line and exit code 2."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labhelpers.cli_find import bytes_of
from labhelpers.inputs import InputError
from labhelpers.store import open_run

MODEL = """
import torch
from torch import nn
from labhelpers.workloads import Workload

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, images):
        return self.last(self.convolution(images).mean((2, 3)))

class Broken(Net):
    def forward(self, images):
        raise RuntimeError("three\\nlines\\nof text")

class Slow(Net):
    def forward(self, images):
        import time
        time.sleep(60)

def make_workload():
    def batch(batch_size, device):
        return torch.rand(batch_size, 4, device=device), torch.rand(batch_size, 1, device=device)
    return Workload("mine", lambda: nn.Linear(4, 1), batch, nn.functional.mse_loss, dataset_size=40)
"""
SHAPE = ("--input", "3,16,16", "--classes", "5", "--device", "cpu")


@pytest.fixture(autouse=True)
def _own_model(tmp_path):
    """A model of the user's own in the folder where the command runs."""
    (tmp_path / "mymodel.py").write_text(MODEL)


@pytest.fixture
def find(tmp_path, monkeypatch):
    """Run `labhelpers find` as a user does: as a process."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "labhelpers", "find", *arguments],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    return run


def test_a_class_of_the_users_own_file(find, tmp_path):
    code, output, errors = find(
        "mymodel.py:Net", *SHAPE, "--max", "24", "--multiple-of", "8", "--effective", "1024",
        "--optimizer", "sgd", "--output", "found",
    )  # fmt: skip
    assert code == 0, errors
    assert "Train mymodel.py:Net with 24 samples a step" in output
    assert "It is the largest size that ran: no more was asked for." in output
    assert "64 micro-batches of 16, then one update" in output
    assert errors.splitlines()[0].startswith("batch 8: ran, ")
    kept = open_run(tmp_path / "found").trials("finder")
    assert [trial.batch_size % 8 for trial in kept] == [0] * len(kept)
    assert kept[-1].batch_size == 24


def test_json_is_all_of_the_output(find):
    code, output, _ = find(
        "mymodel.py:make_workload", "--device", "cpu", "--json", "--effective", "100",
        "--iterations", "3",
    )  # fmt: skip
    data = json.loads(output)
    assert code == 0
    assert (data["largest"], data["with_headroom"], data["ended_by"]) == (40, 40, "dataset")
    assert data["micro_batches"] == [34, 33, 33] or sum(data["micro_batches"]) == 100
    assert {probe["outcome"] for probe in data["probes"]} == {"ok"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("mymodel.py:Nett", *SHAPE), "mymodel.py has no 'Nett'"),
        (("nofile.py:Net", *SHAPE), "cannot import nofile.py"),
        (("no_package:Net", *SHAPE), "cannot import no_package"),
        (("mymodel.py:Net", "--device", "cpu"), "its input shape and number of classes"),
        (("mymodel.py:Net", "--input", "3,x"), "input_shape: got '3,x'; must be whole numbers"),
        (("mymodel.py:Net", "--max", "0"), "max_batch_size: got '0'"),
        (("mymodel.py:Net", "--headroom", "1"), "headroom: got '1'; must be less than 1"),
        (("mymodel.py:Net", "--limit", "8GX"), "--limit: got '8GX'; must be such as 8GiB"),
        (("mymodel.py:Net", "--effective", "0"), "--effective: got '0'"),
        (("mymodel.py:Net", "--inputs", "3"), "No such option '--inputs'"),
        (("mymodel.py:Net", *SHAPE, "--optimizer", "adamx"), "optimizer: got 'adamx'"),
        (("mymodel.py:Net", "--device", "gpu"), "device: got 'gpu'"),
        ((), "Missing argument 'MODEL'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(call, arguments, told, tmp_path):
    code, output, errors = call("find", *arguments, *(("--output", "run") if arguments else ()))
    assert (code, output) == (2, "")
    assert told in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_model_that_fails_is_one_line_and_exit_code_1(find):
    code, output, errors = find("mymodel.py:Broken", *SHAPE)
    assert (code, output) == (1, "")
    *_, last = errors.splitlines()
    assert last == (
        "labhelpers: mymodel.py:Broken fails at batch size 2: RuntimeError: three lines of text "
        "(mymodel.py, line 16, in forward) (tried: 2 (error))"
    )


def test_ctrl_c_is_one_line_and_leaves_no_process(find, tmp_path):
    command = [sys.executable, "-m", "labhelpers", "find", "mymodel.py:Slow", *SHAPE]
    process = subprocess.Popen(
        [*command, "--output", "run"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not (tmp_path / "run" / "run.json").exists():
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert errors == "labhelpers: interrupted; no answer was found\n"
    time.sleep(0.5)
    assert _group(process.pid) == []


def _group(leader: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                pid = int(entry.name)
                zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if os.getpgid(pid) == leader and not zombie:
                    found.append(pid)
            except (ProcessLookupError, FileNotFoundError):
                continue
    return found


@pytest.mark.parametrize(
    ("text", "value"),
    [("8GiB", 8 * 2**30), ("1.5 GiB", 3 * 2**29), ("512mib", 2**29), ("1000", 1000),
     ("2GB", 2 * 10**9)],
)  # fmt: skip
def test_amounts_of_memory(text, value):
    assert bytes_of(text) == value


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 TiB", "1e9"])
def test_other_amounts_are_refused(text):
    with pytest.raises(InputError, match="--limit: got"):
        bytes_of(text)
