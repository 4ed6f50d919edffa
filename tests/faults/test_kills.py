"""SIGKILL at random moments: of the main process, of the worker, of a notebook's kernel."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import measures
import nbformat
import psutil
import pytest
from runs import (
    OWN,
    REPEATS,
    SIZES,
    SWEEP,
    check_whole,
    kept,
    members,
    resume,
    start,
    wait_until,
)
from tally import count

from labhelpers.records import SweepSpec, ask
from labhelpers.report import EXIT_DONE, EXIT_KERNEL_DIED, run_notebook
from labhelpers.store import RUN_FILE, RunDirectory
from labhelpers.sweep import run_sweep
from labhelpers.worker import Worker, children

TESTS = Path(__file__).parents[1]


def spec() -> SweepSpec:
    return ask(SweepSpec, {
        "batch_sizes": SIZES, "repeats": REPEATS, "workload": "mine:workload", "device": "cpu",
    })  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_main_process(tmp_path, seed):
    chance, path, before = random.Random(seed), tmp_path / "run", []
    for _ in range(3):
        command = (
            ["resume", path, *OWN] if (path / RUN_FILE).exists() else [*SWEEP, "--output", path]
        )
        process = start(*command, LABHELPERS_TEST_SLEEP_S=0.15)
        wait_until(
            lambda process=process: len(members(process.pid)) > 1 or process.poll() is not None
        )
        time.sleep(chance.uniform(0, 0.45))
        assert process.poll() is None
        process.kill()
        process.communicate()
        wait_until(lambda process=process: not members(process.pid))  # no orphan goes on
        now = kept(path)
        assert now[: len(before)] == before
        before = now
        count("kills of the main process")
    resume(path, before)


@pytest.mark.parametrize("seed", range(4))
def test_worker(tmp_path, monkeypatch, seed):
    monkeypatch.setenv("LABHELPERS_TEST_SLEEP_S", "0.15")
    chance, run = random.Random(seed), RunDirectory.create(tmp_path / "run")
    kills, ended = [], threading.Event()

    def kill_now_and_then() -> None:
        while len(kills) < 3 and not ended.wait(chance.uniform(0, 0.4)):
            for pid in children():
                os.kill(pid, signal.SIGKILL)
                kills.append(pid)

    killer = threading.Thread(target=kill_now_and_then)
    with Worker(measures.no_warm_up) as worker:
        worker.warm_up()
        killer.start()
        try:
            run_sweep(spec(), run, worker=worker, measure=measures.WITHOUT_TORCH)
        finally:
            ended.set()
            killer.join()
    trials = check_whole(run.path)
    killed = [trial for trial in trials if trial.outcome == "killed"]
    assert {trial.outcome for trial in trials} <= {"ok", "killed"}
    assert len(killed) <= len(kills)  # a kill costs one trial at most
    assert not [pid for pid in kills if psutil.pid_exists(pid)]
    count("kills of the worker", len(kills))


NOTEBOOK = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}]
import measures
from labhelpers.notebooks import run_for_measuring
from labhelpers.records import SweepSpec, ask
from labhelpers.sweep import run_sweep
from labhelpers.worker import Worker
given = dict(batch_sizes={SIZES}, repeats={REPEATS}, workload="mine:workload", device="cpu")
with Worker(measures.no_warm_up) as worker:
    run_sweep(ask(SweepSpec, given), run_for_measuring(run_dir, fresh=True), worker=worker,
              measure=measures.WITHOUT_TORCH);
"""


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    """A notebook that measures a sweep without torch."""
    cell = nbformat.v4.new_code_cell(
        "run_dir: str = ''  # where", metadata={"tags": ["parameters"]}
    )
    content = nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_code_cell(NOTEBOOK)])
    content.metadata.kernelspec = {"name": "python3", "language": "python", "display_name": "p"}
    content.metadata.language_info = {"name": "python"}
    nbformat.write(content, tmp_path / "01_sweep.ipynb")
    return tmp_path / "01_sweep.ipynb"


def kill_kernel(path: Path, after_trials: int, after_s: float, family: list[int]) -> None:
    """Kill this process's kernel some time after it started, or kept so many trials more."""
    before = len(kept(path))

    def kernels() -> list[psutil.Process]:
        own = psutil.Process().children()
        return [p for p in own if any("ipykernel" in part for part in p.cmdline())]

    wait_until(kernels)
    wait_until(lambda: len(kept(path)) >= before + after_trials, within_s=60)
    time.sleep(after_s)
    for kernel in kernels():
        family += [kernel.pid, *(child.pid for child in kernel.children(recursive=True))]
        kernel.kill()


def test_kernel(tmp_path, notebook, monkeypatch):
    monkeypatch.setenv("LABHELPERS_TEST_SLEEP_S", "0.3")
    chance, path, before = random.Random(5), tmp_path / "run", []
    for number in range(6):
        family: list[int] = []
        # The first two before the kernel answers, the others while it measures.
        after_trials = 0 if number < 2 else 1
        moment = (path, after_trials, chance.uniform(0, 0.3), family)
        killer = threading.Thread(target=kill_kernel, args=moment)
        killer.start()
        result = run_notebook(notebook, tmp_path / "out.ipynb", {"run_dir": str(path)})
        killer.join()
        assert family
        assert (result.exit_code, result.path.name) == (EXIT_KERNEL_DIED, "out.partial.ipynb")
        assert "died" in result.why.lower()
        count("kills of a notebook's kernel")
        wait_until(lambda family=family: not any(map(psutil.pid_exists, family)))
        now = kept(path)
        assert now[: len(before)] == before
        before = now
    assert (
        run_notebook(notebook, tmp_path / "out.ipynb", {"run_dir": str(path)}).exit_code
        == EXIT_DONE
    )
    assert check_whole(path)[: len(before)] == before


HEADLESS = """
import signal, sys
from pathlib import Path
from labhelpers import cli
from labhelpers.report import run_notebook
signal.signal(signal.SIGTERM, cli._terminated)
run_notebook(Path(sys.argv[1]), Path(sys.argv[2]), {"run_dir": sys.argv[3]})
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_whoever_ends_a_headless_run_ends_its_kernel_and_its_worker(tmp_path, notebook, number):
    path = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", HEADLESS, notebook, tmp_path / "out.ipynb", path],
        env=os.environ | {"LABHELPERS_TEST_SLEEP_S": "0.5"}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: kept(path), within_s=60)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.send_signal(number)
    process.wait(timeout=30)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    before = kept(path)
    assert len(before) < len(SIZES) * REPEATS
    assert not (tmp_path / "out.ipynb").exists()
    resume(path, before)
    count("headless runs ended by a signal")
