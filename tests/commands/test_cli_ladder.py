"""The ladder on the command line: tables and sentences, bad input in one line, resumed."""

import subprocess
import sys
from pathlib import Path

import pytest

from labhelpers.ladder import ladder_trials_of
from labhelpers.store import TRIALS_FILE, open_run


def call(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "labhelpers", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_a_ladder_is_climbed_shown_and_resumed(tmp_path: Path, data_report):
    output = tmp_path / "run"
    data = ["--data-dir", data_report.data_dir]
    data += ["--synthetic"] if data_report.synthetic else []
    done = call("sweep", "--ladder", "--rungs", "host,cuda_graph", "--batch-sizes", "32,16",
                "--images", "48", "--repeats", "1", "--device", "cpu", "--output", output,
                *data)  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    for said in (
        "images/s (over its base)", "loss after the same images", "share of the nearest ceiling",
        "batch 16", "batch 32", "After the same images every rung's loss is the article's",
        "- cuda_graph: needs an NVIDIA GPU", "4 trials took",
    ):  # fmt: skip
        assert said in shown
    trials = ladder_trials_of(open_run(output))
    assert [(t.batch_size, t.variant) for t in trials] == [
        (16, "article"), (16, "host"), (32, "article"), (32, "host"),
    ]  # fmt: skip
    lines = (output / TRIALS_FILE).read_text().splitlines(keepends=True)
    (output / TRIALS_FILE).write_text("".join(lines[:-1]))
    again = call("resume", output)
    assert again.returncode == 0, again.stderr
    resumed = ladder_trials_of(open_run(output))
    assert [trial.key for trial in resumed] == [trial.key for trial in trials]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--feed", "host"], "--feed: goes with a sweep only; each rung has its own"),
        (["--order", "shuffled"], "--order: goes with a sweep only; each rung has its own"),
        (["--precision", "bf16"], "precision: got 'bf16'; each rung has its own; choose them with"),
        (["--rungs", "nothing"], "rungs: got 'nothing'; must be among article, workers, host,"),
        (["--workload", "m.py:w"], "workload: got 'm.py:w'; the ladder changes how FashionMNIST"),
        (["--repeats", "0"], "repeats: got '0'; must be greater than or equal to 1"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(tmp_path: Path, options, said):
    done = call("sweep", "--ladder", *options, "--output", tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.startswith(f"labhelpers: {said}")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
