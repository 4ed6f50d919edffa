"""A sweep that is killed at random moments, resumed, and ends with the same set of trials."""

import collections
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labhelpers.records import Trial
from labhelpers.store import TRIALS_FILE, open_run

TESTS = Path(__file__).parents[1]
SIZES, REPEATS = (4, 8, 16, 32, 64), 3

SWEEP = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(TESTS)!r})
import measures
from labhelpers.records import SweepSpec, ask
from labhelpers.store import RunDirectory, open_run
from labhelpers.sweep import run_sweep
from labhelpers.worker import Worker

path = Path(sys.argv[1])
spec = ask(SweepSpec, dict(
    batch_sizes={SIZES}, repeats={REPEATS}, device="cpu", workload="mine:workload"))
held = (path / "run.json").exists()
run = open_run(path) if held else RunDirectory.create(path, specs=dict(sweep=spec))
with Worker(measures.no_warm_up) as worker:
    run_sweep(spec, run, worker=worker, measure=measures.WITHOUT_TORCH)
"""


def kept(path: Path) -> list[Trial]:
    """The trials a run directory holds; none before there is one."""
    return open_run(path).trials() if (path / "run.json").exists() else []


def kill_family(process: subprocess.Popen[bytes]) -> None:
    """Kill a process as the system would, and see that its children go with it."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def check_whole(path: Path, repeats: int = REPEATS) -> None:
    """The run holds every planned trial, each exactly once, also in the raw file."""
    planned = {(size, repeat) for size in SIZES for repeat in range(repeats)}
    assert {(t.batch_size, t.repeat) for t in kept(path)} == planned
    lines = (path / TRIALS_FILE).read_text().splitlines()
    assert len(lines) == len(planned)
    assert len({Trial(**json.loads(line)).key for line in lines}) == len(planned)


@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments_lose_and_double_no_trial(tmp_path, seed):
    chance, path, log = random.Random(seed), tmp_path / "run", tmp_path / "log"
    environment = os.environ | {
        "LABHELPERS_TEST_LOG": str(log), "LABHELPERS_TEST_SLEEP_S": "0.02",
    }  # fmt: skip
    command = [sys.executable, "-c", SWEEP, str(path)]
    before: list[Trial] = []
    kills = 0
    for _ in range(4):
        process = subprocess.Popen(command, env=environment)
        try:
            process.wait(timeout=chance.uniform(0.05, 2.0))
        except subprocess.TimeoutExpired:
            kill_family(process)
            kills += 1
        now = kept(path)
        assert now[: len(before)] == before  # what was on disk stays, unchanged
        before = now
    subprocess.run(command, env=environment, check=True, timeout=120)
    assert kept(path)[: len(before)] == before
    check_whole(path)
    measured = collections.Counter(log.read_text().split("\n")[:-1])
    assert len(measured) == len(SIZES) * REPEATS
    # Only a trial that was under way at a kill is measured again.
    assert measured.total() - len(measured) <= kills


def labhelpers(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "labhelpers", *arguments]


@pytest.mark.parametrize("finished", [0, 2])
def test_a_real_sweep_that_is_killed_resumes_to_the_same_set(tmp_path, data_report, finished):
    path = tmp_path / "run"
    options = ["--batch-sizes", "4,8,16,32,64", "--repeats", "1", "--images", "128"]
    options += ["--device", "cpu", "--data-dir", str(data_report.data_dir)]
    options += ["--synthetic"] if data_report.synthetic else []
    process = subprocess.Popen(
        labhelpers("sweep", *options, "--output", str(path)), stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(kept(path)) < finished or not (path / "run.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kill_family(process)
    before = kept(path)
    assert finished <= len(before) < len(SIZES)
    done = subprocess.run(labhelpers("resume", str(path)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert kept(path)[: len(before)] == before
    check_whole(path, repeats=1)
    assert all(trial.outcome == "ok" for trial in kept(path))
