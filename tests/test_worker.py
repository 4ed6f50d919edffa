"""The worker process: every way a call can end, and that nothing outlives its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import measures
import psutil
import pytest

from labhelpers.inputs import InputError
from labhelpers.worker import Answer, Stopped, Worker, children, packed, unpacked

WARM_WITH = measures.no_warm_up
QUICK_S = 60.0
TESTS = Path(__file__).parent


def run(worker: Worker, function: Callable[..., object], *arguments: object) -> Answer:
    return worker.run(function, *arguments, timeout_s=QUICK_S)


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Tell whether a process ends within a time (a zombie has ended)."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_a_value_comes_back_and_the_process_stays(worker):
    answer = run(worker, measures.echo, {"a": [1, 2.5, None]})
    assert (answer.outcome, answer.value) == ("ok", {"a": [1, 2.5, None]})
    assert answer.error_class is answer.error_text is None
    assert 0 < answer.wall_s < QUICK_S
    pids = {run(worker, measures.process_id).value for _ in range(3)}
    assert len(pids) == 1
    assert pids == set(children())
    assert os.getpid() not in pids


def test_an_error_is_an_outcome_and_the_process_stays(worker):
    before = run(worker, measures.process_id).value
    answer = run(worker, measures.fail, "no\0such \udcff thing")
    assert (answer.outcome, answer.error_class) == ("error", "ValueError")
    assert answer.error_text == "nosuch ? thing"  # as it can be stored
    assert run(worker, measures.process_id).value == before


@pytest.mark.parametrize(
    ("function", "name", "text"),
    [
        (measures.fail_without_words, "Unprintable", "a Unprintable that cannot be printed"),
        (measures.quit_python, "SystemExit", "3"),
    ],
)
def test_an_error_of_any_kind_never_ends_the_caller(worker, function, name, text):
    arguments = (3,) if name == "SystemExit" else ()
    answer = run(worker, function, *arguments)
    assert (answer.outcome, answer.error_class, answer.error_text) == ("error", name, text)


def test_bad_input_passes_as_bad_input(worker):
    with pytest.raises(InputError) as caught:
        run(worker, measures.refuse, "batch: got 0")
    assert str(caught.value) == "batch: got 0"
    assert run(worker, measures.echo, 1).value == 1


@pytest.mark.parametrize(
    ("function", "argument", "text"),
    [
        (measures.die, signal.SIGKILL, "the worker process was killed by signal 9, SIGKILL (the "
         "system ended it: host memory was probably used up)"),
        (measures.die, signal.SIGABRT, "the worker process was killed by signal 6, SIGABRT"),
        (measures.leave, 7, "the worker process ended by itself with exit code 7"),
    ],
)  # fmt: skip
def test_a_dead_process_is_an_outcome_and_the_next_call_runs(worker, function, argument, text):
    before = run(worker, measures.process_id).value
    answer = run(worker, function, int(argument))
    assert (answer.outcome, answer.error_class) == ("killed", "ProcessExpired")
    assert answer.error_text == text
    after = run(worker, measures.process_id)
    assert after.outcome == "ok"
    assert after.value != before


def test_a_crash_in_c_is_an_outcome(worker):
    answer = run(worker, measures.crash)
    assert answer.outcome == "killed"
    assert answer.error_text == "the worker process was killed by signal 11, SIGSEGV"


def test_a_process_that_dies_between_calls_costs_at_most_one_call(worker):
    pid = run(worker, measures.process_id).value
    os.kill(pid, signal.SIGKILL)
    assert run(worker, measures.echo, 1).outcome in ("ok", "killed")
    assert run(worker, measures.echo, 2).value == 2


@pytest.mark.parametrize(
    "function", [lambda: measures.hang(60), measures.spin, measures.hold_the_interpreter]
)
def test_a_hang_ends_at_its_time_limit_in_python_and_in_c(worker, function):
    worker.warm_up()
    answer = worker.run(function, timeout_s=0.3)
    assert (answer.outcome, answer.error_class) == ("timeout", "TimeoutError")
    assert answer.error_text == "took longer than its time limit of 0.3 s and was ended"
    assert 0.3 <= answer.wall_s < QUICK_S
    assert run(worker, measures.echo, 1).value == 1


@pytest.mark.parametrize("function", [lambda: measures.hang(60), measures.hold_the_interpreter])
def test_stop_ends_a_call_within_three_seconds(worker, function):
    pid = run(worker, measures.process_id).value
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        worker.run(function, timeout_s=QUICK_S, stop=stop)
    assert time.monotonic() - began < 3.3
    assert gone(pid)
    assert run(worker, measures.echo, 1).value == 1


def test_stop_before_the_start_is_a_stop(worker):
    worker.close()
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        worker.run(measures.echo, 1, timeout_s=QUICK_S, stop=stop)
    assert children() == []


def test_close_ends_the_process_and_a_call_starts_a_new_one(worker):
    pid = run(worker, measures.process_id).value
    worker.restart()
    assert gone(pid)
    assert children() == []
    assert run(worker, measures.process_id).value != pid


def test_the_process_outlives_the_thread_that_started_it(worker):
    worker.close()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(run(worker, measures.process_id).value))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert run(worker, measures.process_id).value == found[0]


def test_functions_and_classes_of_a_cell_travel(worker):
    class Cell:
        def __init__(self, size: int) -> None:
            self.size = size

    Cell.__module__ = "__main__"  # as in a notebook: the child cannot import it
    answer = run(worker, lambda cell: type(cell)(cell.size * 2), Cell(4))
    assert answer.value.size == 8
    assert unpacked(packed(Cell))(3).size == 3


def test_what_the_child_starts_itself_starts_as_in_the_caller(worker):
    import multiprocessing

    # Spawned DataLoader workers would import torch anew inside the timed epoch.
    assert run(worker, measures.start_method).value == multiprocessing.get_start_method()


def test_a_worker_without_warm_up_loads_no_torch(worker):
    worker.restart()
    assert "torch" not in run(worker, measures.loaded_modules).value


def test_a_real_out_of_memory_error_of_the_cpus_allocator():
    with Worker() as own:
        assert "torch" in run(own, measures.loaded_modules).value
        answer = run(own, measures.ask_for_a_petabyte)
        assert (answer.outcome, answer.error_class) == ("oom", "RuntimeError")
        assert "DefaultCPUAllocator: can't allocate memory" in answer.error_text
        assert own.start_s > 0


# Parent and child, in processes of their own

PARENT = """
import sys
sys.path.insert(0, {tests!r})
import measures
from labhelpers.worker import Worker
print("started", flush=True)
worker = Worker(measures.no_warm_up)
try:
    print(worker.run(measures.{function}, *{arguments!r}, timeout_s=60).outcome, flush=True)
finally:
    worker.close()
"""


def parent(tmp_path: Path, function: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a script, without a main guard, that calls a worker."""
    script = tmp_path / "script.py"
    script.write_text(PARENT.format(tests=str(TESTS), function=function, arguments=arguments))
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_text(file: Path, within_s: float = 30.0) -> str:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if file.exists() and file.read_text():
            return file.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{file.name} was not written")


def test_a_script_without_a_main_guard_is_not_run_twice(tmp_path):
    output, errors = parent(tmp_path, "echo", 1).communicate(timeout=60)
    assert output.split() == ["started", "ok"]
    assert errors == ""


@pytest.mark.parametrize("function", ["say_and_hang", "say_and_hold"])
def test_the_child_dies_with_a_parent_that_was_killed(tmp_path, function):
    file = tmp_path / "pid"
    process = parent(tmp_path, function, str(file))
    pid = int(wait_for_text(file))
    process.kill()
    process.communicate()
    assert gone(pid)


def test_ctrl_c_ends_the_call_and_the_child_leaves_the_decision_to_its_parent(tmp_path):
    file = tmp_path / "pid"
    process = parent(tmp_path, "say_and_hang", str(file))
    pid = int(wait_for_text(file))
    os.kill(pid, signal.SIGINT)  # a terminal sends it to the whole group
    assert not gone(pid, within_s=0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert gone(pid)
