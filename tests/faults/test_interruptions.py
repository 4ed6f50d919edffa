"""Ctrl-C, SIGTERM, a hang, used-up memory, two runs at once, a lost line, a clock that is set."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import measures
import psutil
import pytest
from runs import (
    OWN,
    PLANNED,
    REPEATS,
    SIZES,
    SWEEP,
    call,
    check_whole,
    finished,
    kept,
    members,
    resume,
    start,
    wait_until,
)
from tally import count

from labhelpers.files import write_atomically
from labhelpers.records import SweepSpec, ask
from labhelpers.store import RUN_FILE, TRIALS_FILE, RunDirectory, find_runs, open_run
from labhelpers.sweep import run_sweep
from labhelpers.worker import Worker

GOES_ON = "finished trials are kept: labhelpers resume RUN"


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, f"interrupted; {GOES_ON}"), (signal.SIGTERM, 143, f"ended; {GOES_ON}")],
)
@pytest.mark.parametrize("seed", range(3))
def test_ctrl_c_and_sigterm_at_any_moment(tmp_path, number, code, said, seed):
    path = tmp_path / "run"
    process = start(*SWEEP, "--output", path, LABHELPERS_TEST_SLEEP_S=0.1)
    # The first time while the worker starts, then during trials.
    wait_until(lambda: len(members(process.pid)) > 1)
    if seed:
        wait_until(lambda: kept(path))
        time.sleep(random.Random(seed).uniform(0, 0.5))
    os.killpg(process.pid, number)  # as a terminal and a job manager do: to all of the group
    ended, errors = finished(process)
    assert ended == code
    assert errors.startswith(f"results go to {path}\n")
    assert errors.endswith(f"\nlabhelpers: {said}\n")
    count("interruptions by Ctrl-C and SIGTERM")
    resume(path, kept(path))


def test_a_hang_ends_at_its_limit_and_costs_one_trial(tmp_path):
    path = tmp_path / "run"
    code, errors = call(
        *SWEEP, "--output", path, "--trial-timeout-s", "0.5",
        LABHELPERS_TEST_FAULTS='{"16": ["hang", 600]}', LABHELPERS_TEST_MARKS=tmp_path,
    )  # fmt: skip
    assert code == 1
    assert (
        "failed: batch 16, repeat 1: timeout: took longer than its time limit of 0.5 s and was "
        "ended\n"
    ) in errors
    assert [t.outcome for t in check_whole(path)].count("ok") == len(PLANNED) - 1
    count("hanging trials ended at their limit")
    resume(path, kept(path))


def test_used_up_memory_under_a_limit_is_an_outcome(tmp_path):
    path = tmp_path / "run"
    code, errors = call(
        *SWEEP, "--output", path,
        LABHELPERS_TEST_FAULTS='{"16": ["memory", 100]}', LABHELPERS_TEST_MARKS=tmp_path,
    )  # fmt: skip
    assert code == 0, errors  # an OOM is a result
    assert {t.batch_size: t.outcome for t in check_whole(path) if t.outcome != "ok"} == {16: "oom"}
    assert "batch 16, repeat 1: oom: MemoryError" in errors
    count("trials that used up the memory allowed")
    resume(path, kept(path))


def test_a_worker_that_cannot_start_is_one_line(tmp_path):
    path = tmp_path / "run"
    process = start(*SWEEP, "--output", path)
    while process.poll() is None:
        for child in psutil.Process(process.pid).children():
            with suppress(psutil.NoSuchProcess):  # it is gone already
                if any("spawn_main" in part for part in child.cmdline()):
                    child.kill()
        time.sleep(0.01)
    code, errors = finished(process)
    assert (code, errors.count("\n")) == (1, 2)
    assert "\nlabhelpers: the worker process does not start: " in errors
    assert kept(path) == []
    count("workers that could not start")
    resume(path, [])


def test_a_run_that_is_removed_while_it_measures_ends_at_the_next_trial(tmp_path):
    path = tmp_path / "run"
    process = start(*SWEEP, "--output", path, LABHELPERS_TEST_SLEEP_S=1)
    wait_until(lambda: kept(path))
    shutil.rmtree(path)
    code, errors = finished(process)
    assert code == 1
    assert errors.endswith(
        f"labhelpers: {path}: a finished trial cannot be kept (its file was removed in the "
        "meantime)\n"
    )
    count("runs removed while they measured")


GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def small_group():
    """A control group of 300 MiB; skipped where the system does not let us make one."""
    second = (GROUPS / "cgroup.controllers").exists()
    group = (GROUPS if second else GROUPS / "memory") / f"labhelpers-test-{os.getpid()}"
    limit = group / ("memory.max" if second else "memory.limit_in_bytes")
    try:
        group.mkdir()
        limit.write_text(str(300 * 2**20))
        probe = "bytearray(400 * 2**20)"
        command = f"echo $$ > {group}/cgroup.procs && exec python3 -c '{probe}'"
        if subprocess.run(["sh", "-c", command], capture_output=True).returncode != -signal.SIGKILL:
            pytest.skip("this system does not enforce a control group's memory limit")
        yield group
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    finally:
        if group.exists():
            wait_until(lambda: not (group / "cgroup.procs").read_text())
            group.rmdir()


def test_a_worker_ended_by_the_system_for_its_memory_is_an_outcome(tmp_path, small_group):
    path = tmp_path / "run"
    process = start(
        *SWEEP, "--output", path, LABHELPERS_TEST_SLEEP_S=0.1,
        LABHELPERS_TEST_FAULTS='{"16": ["memory", 0]}', LABHELPERS_TEST_MARKS=tmp_path,
    )  # fmt: skip
    (small_group / "cgroup.procs").write_text(str(process.pid))
    code, errors = finished(process)
    assert code == 1
    assert (
        "failed: batch 16, repeat 1: killed: the worker process was killed by signal 9, SIGKILL "
        "(the system ended it: host memory was probably used up)\n"
    ) in errors
    check_whole(path)
    count("trials that used up the memory allowed")
    resume(path, kept(path))


def test_of_two_that_continue_one_run_one_is_refused(tmp_path):
    path = tmp_path / "run"
    first = start(*SWEEP, "--output", path, LABHELPERS_TEST_SLEEP_S=2)
    wait_until(lambda: kept(path))
    code, errors = call("resume", path, *OWN)
    assert (code, errors) == (2, (
        f"labhelpers: {path} is in use by another run; wait for it to end or choose another "
        "directory\n"
    ))  # fmt: skip
    first.send_signal(signal.SIGINT)
    assert finished(first)[0] == 130
    resume(path, kept(path))
    count("second runs refused")


def test_of_many_that_start_one_run_at_once_one_measures_it(tmp_path):
    path = tmp_path / "run"
    ends = [finished(process) for process in [start(*SWEEP, "--output", path) for _ in range(4)]]
    assert sorted(code for code, _ in ends) == [0, 2, 2, 2]
    for code, errors in ends:
        assert code == 0 or f"labhelpers: {path} " in errors
        assert code == 0 or ("already holds a run" in errors or "is in use by" in errors)
    check_whole(path)
    count("second runs refused", 3)


def test_power_lost_at_any_byte_of_the_last_line(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    given = {
        "batch_sizes": SIZES, "repeats": REPEATS, "workload": "mine:workload", "device": "cpu",
    }  # fmt: skip
    with Worker(measures.no_warm_up) as worker:

        def go_on() -> None:
            run_sweep(
                ask(SweepSpec, given), open_run(run.path), worker=worker,
                measure=measures.WITHOUT_TORCH,
            )  # fmt: skip

        go_on()
        before = check_whole(run.path)
        whole = (run.path / TRIALS_FILE).read_bytes()
        last = whole.rindex(b"\n", 0, -1) + 1
        for cut in range(last, len(whole)):
            (run.path / TRIALS_FILE).write_bytes(whole[:cut])
            assert kept(run.path)[: len(before) - 1] == before[:-1]
            go_on()
            assert check_whole(run.path)[:-1] == before[:-1]
            count("bytes at which the last line was cut")


# A clock that is set


@pytest.fixture(scope="module")
def clock(tmp_path_factory) -> Path:
    """A library that sets the clock of the programs that preload it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("setting a program's clock needs a C compiler (cc)")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize("days", [-1, 1])
@pytest.mark.parametrize(("hang_s", "outcome"), [(600, "timeout"), (0.3, "ok")])
def test_a_clock_set_during_a_trial_changes_no_outcome(tmp_path, clock, days, hang_s, outcome):
    path, switch = tmp_path / "run", tmp_path / "switch"
    code, errors = call(
        *SWEEP, "--output", path, "--trial-timeout-s", "3", LD_PRELOAD=clock, FAKE_CLOCK=switch,
        FAKE_CLOCK_S=days * 86_400, LABHELPERS_TEST_MARKS=tmp_path,
        LABHELPERS_TEST_FAULTS=json.dumps({"16": ["clock", str(switch), hang_s]}),
    )  # fmt: skip
    assert switch.exists()
    assert code == (outcome == "timeout"), errors
    trials = check_whole(path)
    assert {t.outcome for t in trials if t.batch_size != 16} == {"ok"}
    assert next(t.outcome for t in trials if t.batch_size == 16) == outcome
    count("clocks set during a trial")


def test_a_run_from_the_future_does_not_hide_newer_ones(tmp_path):
    now = datetime.now(UTC)
    for name, days in (("old", -2), ("future", 1), ("later future", 2), ("new", 0)):
        made = RunDirectory.create(tmp_path / name)
        created_at = (now + timedelta(days=days)).isoformat(timespec="seconds")
        info = made.info.model_copy(update={"created_at": created_at})
        write_atomically(made.path / RUN_FILE, info.model_dump_json())
    found = [path.name for path in find_runs(tmp_path)]
    assert found == ["future", "later future", "old", "new"]
