"""A disk that fills up in the middle of a trial, and results that cannot be written."""

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import OWN, PLANNED, SWEEP, call, check_whole, kept, resume
from tally import count

from labhelpers.store import TRIALS_FILE


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; skipped where none may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "labhelpers-test", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def check_cut_short(path: Path, code: int, errors: str, reason: str) -> None:
    """The run ended in one line that says why, and what was finished is whole."""
    assert code == 1
    assert errors.endswith(f"labhelpers: {path}: a finished trial cannot be kept ({reason})\n")
    assert 0 < len(kept(path)) < len(PLANNED)
    assert (path / TRIALS_FILE).read_bytes().endswith(b"\n")


def test_a_disk_that_is_filled_during_a_trial(tmp_path, small_disk):
    path, filler = small_disk / "run", small_disk / "filler"
    code, errors = call(
        *SWEEP, "--output", path, LABHELPERS_TEST_MARKS=tmp_path,
        LABHELPERS_TEST_FAULTS=f'{{"16": ["fill", "{filler}"]}}',
    )  # fmt: skip
    check_cut_short(path, code, errors, "No space left on device")
    before = kept(path)
    code, errors = call("resume", path, *OWN)  # the disk is still full
    assert code == 1
    assert "No space left on device" in errors
    assert kept(path) == before
    filler.unlink()
    resume(path, before)
    count("disks filled up")


def test_a_file_that_may_not_grow(tmp_path):
    path = tmp_path / "run"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    code, errors = call(*SWEEP, "--output", path, before=limited)
    check_cut_short(path, code, errors, "File too large")
    resume(path, kept(path))
    count("disks filled up")


def test_results_that_cannot_be_written_say_so_and_are_read_all_the_same(tmp_path, small_disk):
    path = small_disk / "run"
    assert call(*SWEEP, "--output", path)[0] == 0
    os.truncate(path / TRIALS_FILE, (path / TRIALS_FILE).stat().st_size - 30)
    before = kept(path)
    assert len(before) == len(PLANNED) - 1
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    refused = "Read-only file system; choose a directory that can be written"
    code, errors = call("resume", path, *OWN)
    assert (code, errors) == (2, f"labhelpers: cannot write results to {path}: {refused}\n")
    code, errors = call(*SWEEP, "--output", small_disk / "other")
    assert (code, errors) == (
        2, f"labhelpers: cannot write results to {small_disk / 'other'}: {refused}\n",
    )  # fmt: skip
    code, errors = call("export", path)
    assert (code, errors) == (
        2, f"labhelpers: cannot write to {path}: Read-only file system\n",
    )  # fmt: skip
    assert call("export", path, "--output", tmp_path / "there") == (0, "")
    assert (tmp_path / "there" / "export.json").exists()
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    resume(path, before)
    check_whole(path)
    count("read-only results")
