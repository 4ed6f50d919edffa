"""Put FashionMNIST on disk where torchvision looks for it, verified, and read it back."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from labhelpers.idx import (
    REAL,
    SYNTHETIC,
    DataError,
    both_splits,
    read_folder,
    read_plain,
    verified,
    write_whole,
)
from labhelpers.synthetic import UInt8Array, draw_lookalike

PathLike: TypeAlias = "str | os.PathLike[str]"
Say: TypeAlias = Callable[[str], object]

RAW = Path("FashionMNIST", "raw")
PRESENT = "what is there"
DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = Path("usr/share/datasets/fashion-mnist")
# A connection that says nothing for so long has failed; a slow one may take the longer time.
SILENCE_S = 15
DOWNLOAD_LIMIT_S = 600


@dataclass(frozen=True)
class DataReport:
    """What is on disk now: `root` is what torchvision's FashionMNIST takes.

    `source` says which way worked; `sha256` maps each of the four file names to the hash that
    its content was verified against.
    """

    data_dir: Path
    root: Path
    source: str
    synthetic: bool
    sha256: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name to show with every result made from this data."""
        return dataset_name(self.synthetic)

    def __str__(self) -> str:
        return (
            f"{self.name}: 60,000 training and 10,000 test images, all files verified; "
            f"root for torchvision: {self.root}"
        )


def dataset_name(synthetic: bool) -> str:
    """Name the data set so that the look-alike never passes for the real one."""
    return "synthetic look-alike of FashionMNIST" if synthetic else "FashionMNIST"


def data_root(data_dir: PathLike, synthetic: bool = False) -> Path:
    """Return the root for torchvision's FashionMNIST; the look-alike has a root of its own."""
    folder = Path(data_dir).expanduser().absolute()
    return folder / "synthetic" if synthetic else folder


def fetch_fashion_mnist(
    data_dir: PathLike, *, synthetic: bool = False, say: Say = print
) -> DataReport:
    """Put the four files of FashionMNIST, or of the look-alike, under `data_dir`, verified.

    Tries what is there (packed files are unpacked), torchvision's download and the Debian
    package, in this order; a damaged file is replaced. Raises DataError with what each way said
    if none works.
    """
    root = data_root(data_dir, synthetic)
    _refuse_legacy(root)
    name = dataset_name(synthetic)
    said = []
    for source, get in _ways(root, synthetic).items():
        try:
            written = _install(root / RAW, get())
        except DataError as error:
            said.append(f"{source}: {error}")
            say(f"{name}: {said[-1]}")
            continue
        say(f"{name}: complete in {root / RAW} ({source}; {len(written)} of 4 files written)")
        return _report(data_dir, source, synthetic)
    raise DataError(_no_way(root, said, synthetic))


def check_data(data_dir: PathLike, *, synthetic: bool = False) -> DataReport:
    """Verify all four files and write nothing; DataError names the bad file and the fix."""
    for split in REAL:
        load_arrays(data_dir, split, synthetic=synthetic)
    return _report(data_dir, PRESENT, synthetic)


def load_arrays(
    data_dir: PathLike, split: str = "train", *, synthetic: bool = False
) -> tuple[UInt8Array, UInt8Array]:
    """Load one split ("train" or "test") as images (N, 28, 28) and labels (N,), both uint8.

    Size and SHA-256 are checked on the very bytes that are returned. Raises DataError.
    """
    files = SYNTHETIC if synthetic else REAL
    if split not in files:
        raise DataError(f"split {split!r} does not exist; choose one of {', '.join(files)}")
    root = data_root(data_dir, synthetic)
    _refuse_legacy(root)
    try:
        images, labels = (file.decode(read_plain(root / RAW, file)) for file in files[split])
    except DataError as error:
        raise DataError(f"{error}; to fetch it: {_fetch_command(data_dir, synthetic)}") from None
    return images, labels


def _ways(root: Path, synthetic: bool) -> dict[str, Callable[[], dict[str, bytes]]]:
    if synthetic:
        return {
            PRESENT: partial(read_folder, root / RAW, both_splits(SYNTHETIC)),
            "drawing it": draw_synthetic,
        }
    return {
        PRESENT: partial(read_folder, root / RAW, both_splits(REAL)),
        "torchvision's download": partial(download_with_torchvision, root),
        f"the Debian package {DEBIAN_PACKAGE}": partial(unpack_debian_package, root),
    }


def draw_synthetic() -> dict[str, bytes]:
    """Draw the four files of the look-alike; DataError if this NumPy draws other bytes."""
    contents = {}
    for split, files in SYNTHETIC.items():
        for file, array in zip(files, draw_lookalike(split), strict=True):
            contents[file.name] = verified(file.encode(array), f"the drawn {file.name}", file)
    return contents


def download_with_torchvision(root: Path) -> dict[str, bytes]:
    """Let torchvision download into a folder that is thrown away; return verified contents.

    Runs in a process of its own: the silence limit of sockets is global to a process, a lookup
    that hangs can be ended, and torch stays out of the caller.
    """
    script = (
        f"import socket; socket.setdefaulttimeout({SILENCE_S}); "
        "from torchvision.datasets import FashionMNIST; FashionMNIST('.', download=True)"
    )
    with _scratch(root) as scratch:
        _run([sys.executable, "-c", script], scratch)
        return read_folder(scratch / RAW, both_splits(REAL))


def unpack_debian_package(root: Path) -> dict[str, bytes]:
    """Download Debian's package and unpack it without installing; return verified contents."""
    with _scratch(root) as scratch:
        limits = [f"-oAcquire::{kind}::Timeout={SILENCE_S}" for kind in ("http", "https")]
        _run(["apt-get", *limits, "-qq", "download", DEBIAN_PACKAGE], scratch)
        _run(
            ["dpkg", "-x", *(path.name for path in scratch.glob("*.deb")), "unpacked"],
            scratch,
        )
        return read_folder(scratch / "unpacked" / DEBIAN_FOLDER, both_splits(REAL))


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    # Beside the data, not in /tmp, which may be a small memory file system.
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=".fetch-", dir=root)
    except OSError as error:
        raise DataError(f"cannot write in {root}: {error.strerror}") from None
    with folder as name:
        yield Path(name)


def _run(command: Sequence[str], scratch: Path) -> None:
    """Run a command in the scratch folder; DataError with its last words unless it succeeds."""
    log = scratch / "log.txt"
    try:
        # A file, not a pipe: after a kill nobody waits for a grandchild that holds the pipe.
        with log.open("wb") as output:
            ended = subprocess.run(
                command,
                cwd=scratch,
                env={**os.environ, "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=DOWNLOAD_LIMIT_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise DataError(f"{command[0]} did not end within {DOWNLOAD_LIMIT_S} s") from None
    except OSError as error:
        raise DataError(f"{command[0]} does not run here: {error.strerror}") from None
    if ended.returncode:
        raise DataError(_last_words(log.read_text(errors="replace")))


def _last_words(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["no word"]
    words = lines[-1]
    if words.startswith("E: ") and ("Unable to locate package" in words or "404" in words):
        words += " (package lists are missing or old: sudo apt-get update)"
    return words


def _install(raw: Path, contents: Mapping[str, bytes]) -> list[str]:
    try:
        return write_whole(raw, contents)
    except OSError as error:
        raise DataError(f"cannot write in {raw}: {error.strerror}") from None


def _refuse_legacy(root: Path) -> None:
    # torchvision prefers this folder of its early versions over the verified files.
    old = root / "FashionMNIST" / "processed"
    if (old / "training.pt").exists() and (old / "test.pt").exists():
        raise DataError(f"{old} would be read instead of the verified files; remove it")


def _report(data_dir: PathLike, source: str, synthetic: bool) -> DataReport:
    files = both_splits(SYNTHETIC if synthetic else REAL)
    return DataReport(
        data_dir=Path(data_dir).expanduser().absolute(),
        root=data_root(data_dir, synthetic),
        source=source,
        synthetic=synthetic,
        sha256={file.name: file.sha256 for file in files},
    )


def _fetch_command(data_dir: PathLike, synthetic: bool) -> str:
    option = " --synthetic" if synthetic else ""
    return f"labhelpers data --data-dir {shlex.quote(os.fspath(data_dir))}{option}"


def _no_way(root: Path, said: Sequence[str], synthetic: bool) -> str:
    ways = "; ".join(f"({number}) {words}" for number, words in enumerate(said, start=1))
    message = f"{root / RAW} could not be filled: {ways}"
    if synthetic:
        return message
    return (
        f"{message}. Copy the four files there by hand, packed or not, "
        "or use --synthetic for a look-alike of the same shapes"
    )
