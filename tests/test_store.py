"""Run directories: whole trials or none, one writer, on any disk."""

import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from labhelpers import store
from labhelpers.inputs import InputError
from labhelpers.records import SCHEMA_VERSION, SweepSpec, Trial, ask
from labhelpers.store import RUN_FILE, TRIALS_FILE, RunDirectory, open_run

# A text with characters of one to four bytes, so that a cut can fall within one.
TRIALS = [
    Trial(kind="sweep", batch_size=8 * 2**n, error_text="ascii, é, ×, 字, 🧪", epoch_s=1.5)
    for n in range(3)
]


# Writing


def test_what_was_written_is_read_in_order(run):
    assert open_run(run.path).trials() == TRIALS
    assert run.trials("sweep") == TRIALS
    assert run.trials("probe") == []


def test_a_trial_is_on_disk_before_append_returns(run):
    more = Trial(kind="probe", batch_size=7)
    with run.writing():
        run.append(more)
        assert open_run(run.path).trials() == [*TRIALS, more]  # another reader, file still open


def test_append_outside_of_writing_is_an_error(run):
    with pytest.raises(RuntimeError, match="only allowed inside writing"):
        run.append(TRIALS[0])


def test_a_run_remembers_what_was_asked_where_and_noted(run):
    spec = ask(SweepSpec, {"batch_sizes": [8], "synthetic": True})
    with run.writing():
        run.note_spec("sweep", spec)
        run.note_environment("abc", {"device": "cpu"})
        run.note_environment("abc", {"device": "another"})
        run.note("one", "two", "one")
    again = open_run(run.path)
    assert SweepSpec(**again.info.specs["sweep"]) == spec
    assert again.environment() == {"device": "cpu"}
    assert again.info.notes == ("one", "two")
    assert again.info.synthetic
    assert again.info.schema_version == SCHEMA_VERSION


def test_a_new_run_knows_from_the_first_moment_what_is_asked(tmp_path):
    spec = ask(SweepSpec, {"repeats": 2, "synthetic": True})
    RunDirectory.create(tmp_path / "run", specs={"sweep": spec})
    found = open_run(tmp_path / "run").info
    assert SweepSpec(**found.specs["sweep"]) == spec
    assert found.synthetic
    assert RunDirectory.create(tmp_path / "other").environment() == {}


def test_a_second_run_in_one_directory_is_refused(run):
    with pytest.raises(InputError) as caught:
        RunDirectory.create(run.path)
    assert str(caught.value) == f"{run.path} already holds a run; resume it or choose another"


# The lock

HOLD = """
import sys
from labhelpers.store import open_run
with open_run(sys.argv[1]).writing():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(run: RunDirectory) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run's lock until its input ends."""
    command = [sys.executable, "-c", HOLD, str(run.path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


IN_USE = "is in use by another run; wait for it to end or choose another directory"


def test_a_second_writer_is_refused_while_readers_are_not(run, held):
    with pytest.raises(InputError) as caught, run.writing():
        raise AssertionError("two writers in one directory")
    assert str(caught.value) == f"{run.path} {IN_USE}"
    assert open_run(run.path).trials() == TRIALS


def test_a_killed_writer_leaves_no_lock_behind(run, held):
    held.kill()
    held.wait()
    with run.writing():
        run.append(Trial(kind="probe", batch_size=1))
    assert len(run.trials()) == 4


def test_one_process_cannot_write_twice_either(run):
    with run.writing(), pytest.raises(InputError, match="is in use"), open_run(run.path).writing():
        raise AssertionError("two writers in one directory")
    with run.writing():  # and the lock is free again
        pass


# A line that was cut


def test_a_last_line_cut_at_any_byte_is_dropped_and_repaired(run):
    file = run.path / TRIALS_FILE
    whole = file.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    more = Trial(kind="probe", batch_size=1)
    for cut in range(start, len(whole) + 1):
        file.write_bytes(whole[:cut])
        # The line is whole from its last brace on, with or without its newline.
        kept = TRIALS if cut >= len(whole) - 1 else TRIALS[:-1]
        assert open_run(run.path).trials() == kept
        store.repair_last_line(file)
        with open(file, "ab") as stream:
            stream.write(more.model_dump_json().encode() + b"\n")
        assert open_run(run.path).trials() == [*kept, more]


def test_writing_repairs_a_cut_line(run):
    file = run.path / TRIALS_FILE
    file.write_bytes(file.read_bytes()[:-20])
    with run.writing():
        run.append(TRIALS[2])
    assert run.trials() == TRIALS
    assert file.read_bytes().count(b"\n") == 3


def test_zeros_after_a_power_cut_are_no_trial(run):
    file = run.path / TRIALS_FILE
    file.write_bytes(file.read_bytes() + b"\0" * 512)
    assert run.trials() == TRIALS
    with run.writing():
        pass
    assert b"\0" not in file.read_bytes()


def test_damage_before_the_last_line_is_refused_with_its_place(run):
    file = run.path / TRIALS_FILE
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:-9] + b"\n" + lines[2])
    with pytest.raises(InputError) as caught:
        run.trials()
    assert str(caught.value).startswith(f"{file} line 2 is not valid JSON: ")


def test_a_trial_written_twice_is_read_once(run):
    file = run.path / TRIALS_FILE
    file.write_bytes(file.read_bytes() * 2)
    assert run.trials() == TRIALS


# A disk that is full, a place that cannot be written


def test_a_full_disk_loses_one_trial_and_leaves_a_file_that_reads(run):
    before = (run.path / TRIALS_FILE).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with run.writing():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, hard))
        try:
            with pytest.raises(OSError, match="a finished trial cannot be kept") as caught:
                run.append(TRIALS[0])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.filename == str(run.path)
        assert (run.path / TRIALS_FILE).read_bytes() == before
        run.append(Trial(kind="probe", batch_size=1))
    assert len(run.trials()) == 4


def fill(run: RunDirectory, kept: list[Trial]) -> None:
    with run.writing():
        while True:
            kept.append(Trial(kind="sweep", batch_size=len(kept) + 1, error_text="x" * 900))
            run.append(kept[-1])


def test_a_really_full_disk(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "labhelpers-test", str(small)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        run = RunDirectory.create(small / "run")
        kept = []
        with pytest.raises(OSError, match="a finished trial cannot be kept"):
            fill(run, kept)
        assert len(kept) > 10
        assert open_run(run.path).trials() == kept[:-1]
        info = run.info
        with pytest.raises(OSError, match="No space left"), run.writing():
            run.note("y" * 100_000)
        assert open_run(run.path).info == info
        assert {p.name for p in run.path.iterdir()} == {RUN_FILE, TRIALS_FILE, ".lock"}
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("a file/run", "Not a directory"),
        ("a file", "File exists"),
        ("x" * 300, "File name too long"),
        ("/proc/labhelpers", "No such file or directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, place, reason):
    (tmp_path / "a file").write_text("")
    path = tmp_path / place
    with pytest.raises(InputError) as caught:
        RunDirectory.create(path)
    assert str(caught.value) == (
        f"cannot write results to {path}: {reason}; choose a directory that can be written"
    )


def test_a_file_that_cannot_be_locked_or_written_is_one_line(run):
    for name in (TRIALS_FILE, ".lock"):
        (run.path / name).unlink()
        (run.path / name).mkdir()
        with pytest.raises(InputError) as caught, run.writing():
            raise AssertionError("a directory was written to")
        assert "\n" not in str(caught.value)
        assert str(run.path) in str(caught.value)
        (run.path / name).rmdir()
