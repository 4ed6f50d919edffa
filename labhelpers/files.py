"""Whole files: written so that nobody sees half of one, read strictly."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from labhelpers.inputs import InputError

LARGEST_FILE_BYTES = 512 * 1024**2


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old or the new one, never half."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):  # a full disk's error does not say which file
            raise OSError(error.errno, error.strerror, str(path)) from None
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


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write into an InputError that says what to do."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write results to {path}: {error.strerror or error}; choose a directory that "
            "can be written"
        ) from None


def read_bytes(file: Path, absent: str) -> bytes:
    """Read a whole file; InputError if it is not there (`absent`), not readable or too large."""
    try:
        if not file.is_file() and file.exists():
            # A pipe would make the reader wait for ever, and some devices never end.
            raise InputError(f"{file} is not a regular file: not a run")
        if file.stat().st_size > LARGEST_FILE_BYTES:
            raise InputError(f"{file} is larger than {LARGEST_FILE_BYTES:,} bytes: not a run")
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(absent) from None
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror or error}") from None


def decoded(data: bytes, file: Path) -> str:
    """Decode a file's bytes as UTF-8; InputError names the file if they are none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{file} is not text: it is binary or damaged") from None


def parse_json(text: str, where: object) -> Any:
    """Parse strict JSON; InputError names the place for duplicate keys, NaN and broken text."""
    try:
        value = json.loads(
            text, object_pairs_hook=_once, parse_constant=_refuse_constant, parse_int=_integer
        )
        if "\\ud" in text.lower():  # half of a pair is no character: it could not be written again
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON: {str(error).splitlines()[0]}") from None


def is_json(data: bytes) -> bool:
    """Tell whether bytes are one whole JSON value."""
    try:
        json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return True


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} stands twice")
        result[key] = value
    return result


def _integer(digits: str) -> int:
    number = int(digits)
    if abs(number) >= 2**64:
        raise ValueError("an integer of more than 64 bits is not allowed")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")
