"""Run directories: `run.json`, `trials.jsonl`, a lock, export and load.

Each trial is one line of JSON, flushed and synced before the next trial begins. A line cut
off by a crash is recognised and dropped: it never was a finished trial.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

import filelock
from pydantic import ValidationError

from labhelpers import __version__
from labhelpers.files import (
    decoded,
    is_json,
    parse_json,
    read_bytes,
    sync_directory,
    writable,
    write_atomically,
)
from labhelpers.inputs import InputError
from labhelpers.records import RunInfo, Trial, ask, one_line
from labhelpers.specs import FinderSpec, LadderSpec, ProbeSpec, RemedySpec, Spec, SweepSpec

RUN_FILE = "run.json"
TRIALS_FILE = "trials.jsonl"
LOCK_FILE = ".lock"

_ASKED: dict[str, type[Spec]] = {
    "sweep": SweepSpec, "probe": ProbeSpec, "cap": RemedySpec, "remedy": RemedySpec,
    "finder": FinderSpec, "ladder": LadderSpec,
}  # fmt: skip


class RunDirectory:
    """One report run on disk. Read at any time; write only inside `writing()`.

    Args:
        path: the directory; `create` makes it, `open_run` opens an existing one.
    """

    def __init__(self, path: Path, info: RunInfo) -> None:
        self.path = path
        self.info = info
        self._file: FileIO | None = None

    @classmethod
    def create(
        cls, path: str | Path, *, synthetic: bool = False, specs: Mapping[str, Spec] | None = None
    ) -> RunDirectory:
        """Make a run directory that does not hold a run yet, with what is asked of it.

        Raises:
            InputError: the path is a file, cannot be written, or already holds a run.
        """
        path = Path(path)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        asked = specs or {}
        info = RunInfo(
            labhelpers_version=__version__, run_id=path.name, created_at=now,
            synthetic=synthetic or any(spec.synthetic for spec in asked.values()),
            specs={name: spec.model_dump(mode="json") for name, spec in asked.items()},
        )  # fmt: skip
        with writable(path):
            path.mkdir(parents=True, exist_ok=True)
        # Locked, so that of two programs that make the same run only one does.
        lock = _locked(path)
        try:
            if (path / RUN_FILE).exists():
                raise InputError(f"{path} already holds a run; resume it or choose another")
            with writable(path):
                write_atomically(path / RUN_FILE, info.model_dump_json(indent=1))
        finally:
            lock.release()
        return cls(path, info)

    @contextlib.contextmanager
    def writing(self) -> Iterator[RunDirectory]:
        """Hold the directory's lock, so that no second run writes to it.

        Raises:
            InputError: another process holds it, or the directory cannot be written.
        """
        lock = _locked(self.path)
        try:
            self.info = read_info(self.path)
            with writable(self.path):
                repair_last_line(self.path / TRIALS_FILE)
                # Unbuffered: after a full disk nothing is left behind to be written once more.
                stream = open(self.path / TRIALS_FILE, "ab", buffering=0)  # noqa: SIM115
            with stream as self._file:
                sync_directory(self.path)
                yield self
        finally:
            self._file = None
            lock.release()

    @property
    def being_written(self) -> bool:
        """Tell whether this very object is inside `writing()` now, on whatever thread."""
        return self._file is not None

    def append(self, *trials: Trial) -> None:
        """Write finished trials to disk, all in one write: synced when this returns."""
        if self._file is None:
            raise RuntimeError("append() is only allowed inside writing()")
        lines = [trial.model_dump_json(exclude_none=True).encode() + b"\n" for trial in trials]
        rest = memoryview(b"".join(lines))
        start = self._file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise OSError(errno.ENOENT, "its file was removed in the meantime")
        except OSError as error:
            # A full disk leaves half a line; take it away so that the file stays readable.
            with contextlib.suppress(OSError):
                os.truncate(self.path / TRIALS_FILE, start)
            raise OSError(
                error.errno, f"a finished trial cannot be kept ({error.strerror})", str(self.path)
            ) from None

    def note_spec(self, name: str, spec: Spec) -> None:
        """Keep what was asked in `run.json`."""
        specs = {**self.info.specs, name: spec.model_dump(mode="json")}
        self._replace_info(specs=specs, synthetic=self.info.synthetic or spec.synthetic)

    def note_environment(self, environment_id: str, environment: Mapping[str, Any]) -> None:
        """Keep the facts of the machine in `run.json`, once for each environment."""
        if environment_id not in self.info.environments:
            environments = {**self.info.environments, environment_id: dict(environment)}
            self._replace_info(environments=environments)

    def note(self, *notes: str) -> None:
        """Keep sentences that a reader of the results should see, each once."""
        self._replace_info(notes=tuple(dict.fromkeys((*self.info.notes, *notes))))

    def note_timing(self, name: str, **measured: float) -> None:
        """Add seconds and counts to what a request took so far (it may have been resumed)."""
        earlier = self.info.timings.get(name, {})
        total = {key: earlier.get(key, 0) + value for key, value in measured.items()}
        self._replace_info(timings={**self.info.timings, name: earlier | total})

    def trials(self, kind: str | None = None) -> list[Trial]:
        """Read the finished trials in the order they were made, optionally of one kind."""
        found = list(read_trials(self.path / TRIALS_FILE))
        return found if kind is None else [trial for trial in found if trial.kind == kind]

    def environment(self) -> dict[str, Any]:
        """Return the facts of the newest environment of this run (`{}` before the first)."""
        return next(reversed(self.info.environments.values()), {})

    def _replace_info(self, **changes: Any) -> None:
        self.info = self.info.model_copy(update=changes)
        write_atomically(self.path / RUN_FILE, self.info.model_dump_json(indent=1))


def _locked(path: Path) -> filelock.BaseFileLock:
    for name in (RUN_FILE, TRIALS_FILE, LOCK_FILE):
        if (path / name).is_symlink():
            raise InputError(f"{path / name} is a link; a run is written within its directory only")
    lock = filelock.FileLock(path / LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise InputError(
            f"{path} is in use by another run; wait for it to end or choose another directory"
        ) from None
    except OSError as error:
        with writable(path):
            raise error
    return lock


def open_run(path: str | Path) -> RunDirectory:
    """Open a run directory for reading (and for `writing()`).

    Raises:
        InputError: there is no run, it is not ours, or it is newer than this program.
    """
    return RunDirectory(Path(path), read_info(Path(path)))


def read_info(path: Path) -> RunInfo:
    """Read and check `run.json` of a run directory; InputError says what is wrong."""
    file = path / RUN_FILE
    value = parse_json(
        decoded(read_bytes(file, f"{path} holds no run (no {RUN_FILE})"), file), file
    )
    if not isinstance(value, dict) or "schema_version" not in value:
        raise InputError(f"{file} is not a results file of labhelpers (no schema_version)")
    try:
        info = RunInfo(**value)
    except ValidationError as error:
        raise InputError(f"{file}: {one_line(error)}") from None
    for name, asked in info.specs.items():
        _check_asked(name, asked, file)
    return info


def _check_asked(name: str, asked: Mapping[str, Any], file: Path) -> None:
    """Refuse a request that no program of ours wrote; every reader may then rely on it."""
    kind = _ASKED.get(name.partition(" ")[0])
    if kind is not None:
        try:
            ask(kind, asked)
        except InputError as error:
            raise InputError(f"{file}: what was asked ({name}): {error}") from None


def read_trials(file: Path) -> Iterator[Trial]:
    """Yield the finished trials of a `trials.jsonl`, each key once; InputError if it is broken."""
    if not file.exists():
        return
    seen = set()
    # Bytes, not text: a crash may cut a line within a character.
    *lines, last = read_bytes(file, f"{file} cannot be read").split(b"\n")
    for number, line in enumerate([*lines, last if is_json(last) else b""], start=1):
        if not line.strip():
            continue
        trial = _trial_of(decoded(line, file), f"{file} line {number}")
        if trial.key not in seen:
            seen.add(trial.key)
            yield trial


def _trial_of(line: str, where: str) -> Trial:
    value = parse_json(line, where)
    if not isinstance(value, dict):
        raise InputError(f"{where}: not a trial (a JSON object is expected)")
    try:
        return Trial(**value)
    except ValidationError as error:
        raise InputError(f"{where}: {one_line(error)}") from None


def repair_last_line(file: Path) -> None:
    """Cut an unfinished last line, or end a finished one that lacks its newline."""
    if not file.exists():
        return
    data = read_bytes(file, f"{file} cannot be read")
    keep = data.rfind(b"\n") + 1
    tail = data[keep:]
    if tail and is_json(tail):
        with open(file, "ab") as stream:
            stream.write(b"\n")
    elif tail:
        os.truncate(file, keep)


def find_runs(results_dir: str | Path) -> list[Path]:
    """Return a user's own run directories, oldest first (reference runs are left out).

    A run from the future was made under a wrong clock: it counts as older than any other, or it
    would be the newest for as long as the clock was wrong.
    """
    now, found = datetime.now(UTC).isoformat(), []
    for file in Path(results_dir).glob(f"*/{RUN_FILE}"):
        with contextlib.suppress(InputError):
            created_at = read_info(file.parent).created_at
            found.append((created_at <= now, created_at, file.parent))
    return [path for *_, path in sorted(found)]


def new_run_path(results_dir: str | Path) -> Path:
    """Name a run directory after the time (UTC); never one that exists."""
    base = Path(results_dir) / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path, count = base, 1
    while path.exists():
        count += 1
        path = base.with_name(f"{base.name}-{count}")
    return path
