"""The four IDX files of FashionMNIST: what they must contain, read verified, written whole."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from labhelpers.inputs import InputError
from labhelpers.synthetic import UInt8Array


class DataError(InputError):
    """The data set is missing, damaged or cannot be fetched: one line, with what to do."""


@dataclass(frozen=True)
class IdxFile:
    """One file of uint8: its name, the shape of its array, SHA-256 of its unpacked content."""

    name: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def header(self) -> bytes:
        """The IDX header: two zero bytes, 0x08 for uint8, the rank, the big-endian sizes."""
        return struct.pack(f">HBB{len(self.shape)}I", 0, 0x08, len(self.shape), *self.shape)

    @property
    def size_bytes(self) -> int:
        """The size of the unpacked file, header included."""
        return len(self.header) + math.prod(self.shape)

    def encode(self, array: UInt8Array) -> bytes:
        """Turn an array of this shape into the content of the file."""
        return self.header + array.tobytes()

    def decode(self, content: bytes) -> UInt8Array:
        """Turn verified content into a writable uint8 array of this shape."""
        return np.frombuffer(content, np.uint8, offset=len(self.header)).reshape(self.shape).copy()


def _files(
    train_images: str, train_labels: str, test_images: str, test_labels: str
) -> dict[str, tuple[IdxFile, IdxFile]]:
    return {
        "train": (
            IdxFile("train-images-idx3-ubyte", (60_000, 28, 28), train_images),
            IdxFile("train-labels-idx1-ubyte", (60_000,), train_labels),
        ),
        "test": (
            IdxFile("t10k-images-idx3-ubyte", (10_000, 28, 28), test_images),
            IdxFile("t10k-labels-idx1-ubyte", (10_000,), test_labels),
        ),
    }


# The hashes are those of Debian's dataset-fashion-mnist 0.0~git20200523.55506a9-1, which strips
# name and time from the gzip headers. With these put back, the four archives have the MD5 sums
# that torchvision ships, so both packers hold the same bytes (tests/test_data.py shows it).
REAL = _files(
    train_images="c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    train_labels="bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    test_images="5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    test_labels="0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
SYNTHETIC = _files(
    train_images="e45db7fa7af83fad5cf8c2e139e31f7761aebc20e31ce16ebbdb8f1e9e42e4c7",
    train_labels="fa03373ec2db840a36fcdcc896b313a19adf638ab5fd55cb1dd895822d8f5e38",
    test_images="6e7bc3f97fb96028296c6395d91eb93142550287471f0b5e73919ee76092f3c2",
    test_labels="2c849c93dd6ab5de3458c06eeb68c8e61c0bfc030f1e54ae5a3865646014c9df",
)


def both_splits(files: Mapping[str, tuple[IdxFile, IdxFile]]) -> tuple[IdxFile, ...]:
    """Return the four files of a data set, train first."""
    return files["train"] + files["test"]


def read_plain(folder: Path, expected: IdxFile) -> bytes:
    """Read one unpacked file; DataError unless its size and SHA-256 are the expected ones."""
    path = folder / expected.name
    try:
        with path.open("rb") as stream:
            content = stream.read(expected.size_bytes + 1)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return verified(content, str(path), expected)


def read_packed(folder: Path, expected: IdxFile) -> bytes:
    """Read one file from its `.gz`, whoever packed it; DataError unless the content is right."""
    path = folder / f"{expected.name}.gz"
    try:
        with gzip.open(path, "rb") as stream:
            content = stream.read(expected.size_bytes + 1)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path} cannot be unpacked: {error}") from None
    return verified(content, str(path), expected)


def read_folder(folder: Path, files: Iterable[IdxFile]) -> dict[str, bytes]:
    """Read the files from a folder, each unpacked or packed; DataError names the first bad one."""
    return {expected.name: _read_either(folder, expected) for expected in files}


def write_whole(folder: Path, contents: Mapping[str, bytes]) -> list[str]:
    """Write the files that differ from what is there and return their names.

    A file appears whole or not at all: all are written and synced beside their places before
    the first is moved. Raises OSError as it comes.
    """
    changed = {
        name: content for name, content in contents.items() if _differs(folder, name, content)
    }
    if not changed:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=folder) as incoming:
        for name, content in changed.items():
            with open(Path(incoming, name), "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        for name in changed:
            os.replace(Path(incoming, name), folder / name)
    return list(changed)


def verified(content: bytes, origin: str, expected: IdxFile) -> bytes:
    """Return the content if its size and SHA-256 are right; DataError naming `origin` if not."""
    if len(content) != expected.size_bytes:
        raise DataError(
            f"{origin} is corrupt: {_size(content, expected)} instead of {expected.size_bytes:,}"
        )
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected.sha256:
        raise DataError(f"{origin} is corrupt: SHA-256 {actual}, expected {expected.sha256}")
    return content


def _size(content: bytes, expected: IdxFile) -> str:
    # Reading stops one byte past the expected end, so the size of a longer file is not known.
    more = len(content) > expected.size_bytes
    return f"more than {expected.size_bytes:,} bytes" if more else f"{len(content):,} bytes"


def _read_either(folder: Path, expected: IdxFile) -> bytes:
    try:
        return read_plain(folder, expected)
    except DataError as plain:
        if not (folder / f"{expected.name}.gz").exists():
            raise
        try:
            return read_packed(folder, expected)
        except DataError as packed:
            raise DataError(f"{plain}, and {packed}") from None


def _differs(folder: Path, name: str, content: bytes) -> bool:
    path = folder / name
    return not path.exists() or path.read_bytes() != content
