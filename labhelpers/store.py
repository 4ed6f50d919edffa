"""Run directories: `run.json`, `trials.jsonl`, a lock, export and load.

Each trial is one line of JSON, flushed and synced before the next trial begins. A line cut
off by a crash is recognised and dropped: it never was a finished trial.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

import filelock
from pydantic import ValidationError

from labhelpers import __version__
from labhelpers.inputs import InputError
from labhelpers.records import RunInfo, Spec, Trial, one_line

RUN_FILE = "run.json"
TRIALS_FILE = "trials.jsonl"
LOCK_FILE = ".lock"
LARGEST_FILE_BYTES = 512 * 1024**2


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
    def create(cls, path: str | Path, *, synthetic: bool = False) -> RunDirectory:
        """Make a run directory that does not hold a run yet.

        Raises:
            InputError: the path is a file, cannot be written, or already holds a run.
        """
        path = Path(path)
        if (path / RUN_FILE).exists():
            raise InputError(f"{path} already holds a run; resume it or choose another directory")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        info = RunInfo(
            labhelpers_version=__version__, run_id=path.name, created_at=now, synthetic=synthetic
        )
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / RUN_FILE, info.model_dump_json(indent=1))
        except OSError as error:
            raise InputError(
                f"cannot write results to {path}: {error.strerror or error}; choose a directory "
                "that can be written"
            ) from None
        return cls(path, info)

    @contextlib.contextmanager
    def writing(self) -> Iterator[RunDirectory]:
        """Hold the directory's lock, so that no second run writes to it.

        Raises:
            InputError: another process holds it, or the directory cannot be written.
        """
        lock = filelock.FileLock(self.path / LOCK_FILE, timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise InputError(
                f"{self.path} is in use by another run; wait for it to end or choose another "
                "directory"
            ) from None
        except OSError as error:
            raise InputError(
                f"cannot write to {self.path}: {error.strerror or error}; choose a directory "
                "that can be written"
            ) from None
        try:
            self.info = read_info(self.path)
            repair_last_line(self.path / TRIALS_FILE)
            # Unbuffered: after a full disk nothing is left behind to be written once more.
            with open(self.path / TRIALS_FILE, "ab", buffering=0) as self._file:
                sync_directory(self.path)
                yield self
        finally:
            self._file = None
            lock.release()

    def append(self, trial: Trial) -> None:
        """Write a finished trial to disk: flushed and synced when this returns."""
        if self._file is None:
            raise RuntimeError("append() is only allowed inside writing()")
        rest = memoryview(trial.model_dump_json(exclude_none=True).encode() + b"\n")
        start = self._file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError:
            # A full disk leaves half a line; take it away so that the file stays readable.
            with contextlib.suppress(OSError):
                os.truncate(self.path / TRIALS_FILE, start)
            raise

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


def open_run(path: str | Path) -> RunDirectory:
    """Open a run directory for reading (and for `writing()`).

    Raises:
        InputError: there is no run, it is not ours, or it is newer than this program.
    """
    return RunDirectory(Path(path), read_info(Path(path)))


def read_info(path: Path) -> RunInfo:
    """Read and check `run.json` of a run directory; InputError says what is wrong."""
    file = path / RUN_FILE
    value = parse_json(_text_of(file, f"{path} holds no run (no {RUN_FILE})"), file)
    if not isinstance(value, dict) or "schema_version" not in value:
        raise InputError(f"{file} is not a results file of labhelpers (no schema_version)")
    try:
        return RunInfo(**value)
    except ValidationError as error:
        raise InputError(f"{file}: {one_line(error)}") from None


def read_trials(file: Path) -> Iterator[Trial]:
    """Yield the finished trials of a `trials.jsonl`, each key once; InputError if it is broken."""
    if not file.exists():
        return
    seen = set()
    lines = _text_of(file, f"{file} cannot be read").split("\n")
    for number, line in enumerate(lines, start=1):
        unfinished = number == len(lines)
        if not line.strip() or (unfinished and not _is_json(line)):
            continue
        trial = _trial_of(line, f"{file} line {number}")
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
    data = file.read_bytes()
    keep = data.rfind(b"\n") + 1
    tail = data[keep:]
    if tail and _is_json(tail.decode("utf-8", "replace")):
        with open(file, "ab") as stream:
            stream.write(b"\n")
    elif tail:
        os.truncate(file, keep)


def find_runs(results_dir: str | Path) -> list[Path]:
    """Return a user's own run directories, oldest first (reference runs are left out)."""
    found = []
    for file in Path(results_dir).glob(f"*/{RUN_FILE}"):
        with contextlib.suppress(InputError):
            found.append((read_info(file.parent).created_at, file.parent))
    return [path for _, path in sorted(found)]


def new_run_path(results_dir: str | Path) -> Path:
    """Name a run directory after the time (UTC); never one that exists."""
    base = Path(results_dir) / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path, count = base, 1
    while path.exists():
        count += 1
        path = base.with_name(f"{base.name}-{count}")
    return path


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old or the new one, never half."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as stream:
        try:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())
            os.fchmod(stream.fileno(), 0o644)
            os.replace(stream.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(stream.name)
            raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync a directory's entries to disk, where the system allows it (not on Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def parse_json(text: str, where: object) -> Any:
    """Parse strict JSON; InputError names the place for duplicate keys, NaN and broken text."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {str(error).splitlines()[0]}") from None


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} stands twice")
        result[key] = value
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _text_of(file: Path, absent: str) -> str:
    try:
        if file.stat().st_size > LARGEST_FILE_BYTES:
            raise InputError(f"{file} is larger than {LARGEST_FILE_BYTES:,} bytes: not a run")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(absent) from None
    except UnicodeDecodeError:
        raise InputError(f"{file} is not text: it is binary or damaged") from None
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from None
