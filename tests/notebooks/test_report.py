"""`labhelpers report` from one command to a report, and what an interruption leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import psutil
import pytest
from pages import check_page

from labhelpers.export import export_schema
from labhelpers.store import TRIALS_FILE, open_run

WORKLOADS = Path(__file__).parents[1] / "failing_workload.py"


@pytest.fixture
def start(tmp_path, data_report):
    """Start a report in a process group of its own, working in the test's folder."""
    options = ["--device", "cpu", "--repeats", "1", "--output", "out"]
    options += ["--data-dir", str(data_report.data_dir)]
    options += ["--synthetic"] if data_report.synthetic else []

    def run(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "labhelpers", "report", *options, *arguments],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    return run


def test_one_command_makes_a_page_an_export_a_figure_and_a_summary(start, tmp_path):
    process = start(
        "--notebooks", "00,01", "--batch-sizes", "[32, 64, 32]", "--images", "256",
        "--figure", "figure.png", "-p", "share=0.9",
    )  # fmt: skip
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert "note: batch 32 was given twice; it is measured once" in errors
    assert errors.index("running 01_batch_sweep") < errors.index("running 00_report")
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} >= {
        "report.html", "01_batch_sweep.html", "export.json", "trials.csv", "summary.md",
        "run.json", "trials.jsonl", "notebooks", "figures",
    }  # fmt: skip
    check_page(out / "report.html")
    check_page(out / "01_batch_sweep.html")
    exported = json.loads((out / "export.json").read_text(encoding="utf-8"))
    jsonschema.validate(exported, export_schema())
    assert [trial["batch_size"] for trial in exported["sweep"]] == [32, 64]
    assert exported["run"]["specs"]["sweep"]["share"] == 0.9
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    assert "is the smallest that reaches 90 %" in (out / "summary.md").read_text(encoding="utf-8")
    assert list(out.glob("notebooks/*.partial.ipynb")) == []


def test_a_failing_trial_is_exit_code_1_and_everything_else_is_there(start, tmp_path):
    process = start(
        "--notebooks", "01", "--workload", f"{WORKLOADS}:failing", "--batch-sizes", "2,3,8,16"
    )
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 1, errors
    assert "2 trials failed; see out/summary.md" in errors
    outcomes = {t.batch_size: t.outcome for t in open_run(tmp_path / "out").trials()}
    assert outcomes == {2: "killed", 3: "error", 8: "ok", 16: "ok"}
    summary = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    assert "- batch 2, repeat 1: killed: the worker process was killed by signal 9" in summary
    assert (tmp_path / "out" / "01_batch_sweep.html").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_report_leaves_no_process_and_no_complete_notebook(
    start, tmp_path, number, code
):
    process = start("--notebooks", "01", "--batch-sizes", "1,2,4", "--images", "20000")
    file, deadline = tmp_path / "out" / TRIALS_FILE, time.monotonic() + 90
    family: list[psutil.Process] = []
    while len(family) < 2 or not file.exists():  # a kernel and its worker
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(family, timeout=15)
    assert alive == []
    names = [path.name for path in (tmp_path / "out" / "notebooks").iterdir()]
    assert names in ([], ["01_batch_sweep.partial.ipynb"])
    open_run(tmp_path / "out").trials()
