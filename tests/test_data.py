"""FashionMNIST on disk: every way to get it, every way it can be damaged, and the look-alike."""

import gzip
import hashlib
import http.server
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import numpy as np
import pytest

from labhelpers import data
from labhelpers.data import (
    RAW,
    check_data,
    data_root,
    download_with_torchvision,
    fetch_fashion_mnist,
    load_arrays,
    unpack_debian_package,
)
from labhelpers.idx import REAL, SYNTHETIC, DataError, both_splits
from labhelpers.inputs import InputError
from labhelpers.synthetic import draw_lookalike

NAMES = [file.name for file in both_splits(SYNTHETIC)]
IMAGES = "t10k-images-idx3-ubyte"
LABELS = "t10k-labels-idx1-ubyte"

Folder = Callable[[], Path]


def silent(_: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with the look-alike; not to be changed."""
    folder = tmp_path_factory.mktemp("drawn")
    fetch_fashion_mnist(folder, synthetic=True, say=silent)
    return folder


@pytest.fixture
def own(drawn: Path, tmp_path: Path) -> Path:
    """A copy of the look-alike's raw folder that a test may damage; `tmp_path` is its data_dir."""
    raw = data_root(tmp_path, synthetic=True) / RAW
    shutil.copytree(data_root(drawn, synthetic=True) / RAW, raw, copy_function=copy_or_link)
    return raw


def copy_or_link(source: str, target: str) -> None:
    """Copy labels, which tests damage in place; link the large images, which they only replace."""
    if "labels" in source:
        shutil.copy2(source, target)
    else:
        os.link(source, target)


def files_under(folder: Path) -> set[str]:
    """All names under a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def fetch_lookalike(folder: Path) -> list[str]:
    """Fetch the look-alike and return what was said."""
    said: list[str] = []
    fetch_fashion_mnist(folder, synthetic=True, say=said.append)
    return said


# --- the look-alike -------------------------------------------------------------------------


def test_the_lookalike_is_drawn_once_and_then_found(tmp_path: Path) -> None:
    first = fetch_fashion_mnist(tmp_path, synthetic=True, say=silent)
    raw = first.root / RAW
    times = {name: (raw / name).stat().st_mtime_ns for name in NAMES}
    second = fetch_fashion_mnist(tmp_path, synthetic=True, say=silent)
    assert (first.source, second.source) == ("drawing it", "what is there")
    assert first.synthetic
    assert "synthetic" in first.name
    assert first.name in str(first)
    assert first.sha256 == second.sha256 == {f.name: f.sha256 for f in both_splits(SYNTHETIC)}
    assert {name: (raw / name).stat().st_mtime_ns for name in NAMES} == times
    assert files_under(raw) == set(NAMES)


def test_the_lookalike_lies_apart_and_never_passes_for_the_real_one(
    drawn: Path,
) -> None:
    assert data_root(drawn, synthetic=True) == drawn / "synthetic"
    assert data_root(drawn) == drawn
    with pytest.raises(DataError, match="is missing"):
        load_arrays(drawn)
    shared = {f.sha256 for f in both_splits(REAL)} & {f.sha256 for f in both_splits(SYNTHETIC)}
    assert not shared


def test_a_lookalike_moved_to_the_place_of_the_real_one_is_refused(
    own: Path, tmp_path: Path
) -> None:
    shutil.move(own.parent, tmp_path / "FashionMNIST")
    with pytest.raises(DataError, match="corrupt: SHA-256"):
        load_arrays(tmp_path, "test")


def test_every_class_of_the_lookalike_is_equally_frequent_and_can_be_learnt() -> None:
    images, labels = draw_lookalike("test")
    assert np.bincount(labels).tolist() == [1000] * 10
    pixels = images.reshape(len(images), -1).astype(np.float64)
    means = np.stack([pixels[:5000][labels[:5000] == c].mean(axis=0) for c in range(10)])
    nearest = ((means**2).sum(axis=1) - 2 * pixels[5000:] @ means.T).argmin(axis=1)
    assert (nearest == labels[5000:]).mean() > 0.8
    # Images of one class differ, so that an epoch is not ten images repeated.
    assert len(np.unique(images[labels == 3], axis=0)) == 1000


# --- reading --------------------------------------------------------------------------------


@pytest.mark.parametrize(("split", "count"), [("train", 60_000), ("test", 10_000)])
def test_arrays_have_the_shapes_and_types_promised(drawn: Path, split: str, count: int) -> None:
    images, labels = load_arrays(drawn, split, synthetic=True)
    assert (images.shape, labels.shape) == ((count, 28, 28), (count,))
    assert images.dtype == labels.dtype == np.uint8
    assert images.flags.writeable
    assert labels.max() == 9


@pytest.mark.parametrize("train", [True, False])
def test_torchvision_reads_the_lookalike_as_we_do(drawn: Path, train: bool) -> None:
    from torchvision.datasets import FashionMNIST

    seen = FashionMNIST(str(data_root(drawn, synthetic=True)), train=train)
    images, labels = load_arrays(drawn, "train" if train else "test", synthetic=True)
    assert np.array_equal(seen.data.numpy(), images)
    assert np.array_equal(seen.targets.numpy(), labels)


@pytest.mark.parametrize("train", [True, False])
def test_torchvision_reads_the_real_data_as_we_do(
    data_report: data.DataReport, train: bool
) -> None:
    from torchvision.datasets import FashionMNIST

    if data_report.synthetic:
        pytest.skip("the real FashionMNIST cannot be had here")
    seen = FashionMNIST(str(data_report.root), train=train)
    images, labels = load_arrays(data_report.data_dir, "train" if train else "test")
    assert np.array_equal(seen.data.numpy(), images)
    assert np.array_equal(seen.targets.numpy(), labels)
    # Published facts: balanced classes, and the mean pixel of the training images, 0.2860.
    assert len(set(np.bincount(labels))) == 1
    assert round(float(images.mean()) / 255, 2) == 0.29


def test_an_unknown_split_is_refused(drawn: Path) -> None:
    with pytest.raises(DataError, match="'t10k' does not exist; choose one of train, test"):
        load_arrays(drawn, "t10k", synthetic=True)


def test_importing_loads_no_torch_and_no_pydantic() -> None:
    code = (
        "import sys, labhelpers.data; print([m for m in ('torch','pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- damage ---------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    """Change the last byte, and neither size nor time."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(path: Path) -> None:
    """Lose the last byte."""
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    """Gain bytes."""
    path.write_bytes(path.read_bytes() + b"xyz")


def empty(path: Path) -> None:
    """Lose everything."""
    os.truncate(path, 0)


def make_directory(path: Path) -> None:
    """Put a directory in the place of the file."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_a_bit, r"is corrupt: SHA-256 [0-9a-f]{64}, expected 2c849c93"),
        (cut, r"is corrupt: 10,007 bytes instead of 10,008"),
        (lengthen, r"is corrupt: more than 10,008 bytes instead of 10,008"),
        (empty, r"is corrupt: 0 bytes instead of 10,008"),
        (make_directory, r"cannot be read: Is a directory"),
        (Path.unlink, r"is missing"),
    ],
)
def test_damage_is_named_in_one_line_with_the_fix(
    own: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(own / LABELS)
    with pytest.raises(InputError) as caught:
        check_data(tmp_path, synthetic=True)
    message = str(caught.value)
    assert re.search(rf"{re.escape(str(own / LABELS))} {words}", message)
    assert message.endswith(f"labhelpers data --data-dir {tmp_path} --synthetic")
    assert "\n" not in message


@pytest.mark.parametrize("damage", [flip_a_bit, cut, lengthen, empty, Path.unlink])
def test_fetching_again_mends_only_what_is_damaged(
    own: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(own / LABELS)
    said = fetch_lookalike(tmp_path)
    check_data(tmp_path, synthetic=True)
    assert "1 of 4 files written" in said[-1]
    assert files_under(own) == set(NAMES)


def test_files_of_torchvisions_early_versions_are_not_let_through(
    own: Path, tmp_path: Path
) -> None:
    old = own.parent / "processed"
    old.mkdir()
    for name in ("training.pt", "test.pt"):
        (old / name).write_bytes(b"")
    with pytest.raises(DataError, match="processed would be read instead"):
        load_arrays(tmp_path, synthetic=True)
    with pytest.raises(DataError, match="processed would be read instead"):
        fetch_lookalike(tmp_path)


# --- packed files ---------------------------------------------------------------------------


def pack(path: Path, level: int, name: str) -> None:
    """Replace a file by its .gz, with the level and header name of this or that packer."""
    with (
        open(f"{path}.gz", "wb") as stream,
        gzip.GzipFile(name, "wb", level, stream, mtime=12345) as packed,
    ):
        packed.write(path.read_bytes())
    path.unlink()


@pytest.mark.parametrize(("level", "name"), [(1, ""), (6, "another-name"), (0, LABELS)])
def test_packed_files_are_unpacked_whoever_packed_them(
    own: Path, tmp_path: Path, level: int, name: str
) -> None:
    for file in NAMES:
        pack(own / file, 0 if "images" in file else level, name)
    report = fetch_fashion_mnist(tmp_path, synthetic=True, say=silent)
    assert report.source == "what is there"
    assert check_data(tmp_path, synthetic=True).sha256 == report.sha256
    assert files_under(own) == {*NAMES, *(f"{file}.gz" for file in NAMES)}


@pytest.mark.parametrize("damage", [cut, empty, lambda path: path.write_bytes(b"not gzip" * 9)])
def test_a_damaged_archive_is_reported_and_the_next_way_is_tried(
    own: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    pack(own / LABELS, 6, LABELS)
    damage(own / f"{LABELS}.gz")
    said = fetch_lookalike(tmp_path)
    assert re.search(rf"what is there: .*{LABELS} is missing, and .*{LABELS}\.gz ", said[0])
    assert "(drawing it; 1 of 4 files written)" in said[-1]


def test_an_archive_with_other_content_is_refused(own: Path, tmp_path: Path) -> None:
    flip_a_bit(own / LABELS)
    pack(own / LABELS, 6, LABELS)
    assert f"{LABELS}.gz is corrupt: SHA-256" in fetch_lookalike(tmp_path)[0]


# --- whole or not at all --------------------------------------------------------------------


def run_child(code: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start Python on a few lines."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    # A limit on file size stands for the full disk: writing the first large file fails for real.
    code = (
        "import resource, sys; from labhelpers.data import fetch_fashion_mnist\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "fetch_fashion_mnist(sys.argv[1], synthetic=True)"
    )
    child = run_child(code, str(tmp_path))
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "cannot write in" in errors
    assert "File too large" in errors
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_kill_in_the_middle_leaves_no_partial_file_in_place(tmp_path: Path) -> None:
    code = (
        "import sys; from labhelpers.data import *; "
        "fetch_fashion_mnist(sys.argv[1], synthetic=True)"
    )
    raw = data_root(tmp_path, synthetic=True) / RAW
    child = run_child(code, str(tmp_path))
    while child.poll() is None and not any(names for _, _, names in os.walk(raw)):
        time.sleep(0.0005)
    child.kill()
    child.communicate()
    for file in both_splits(SYNTHETIC):
        path = raw / file.name
        assert not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
    fetch_lookalike(tmp_path)
    check_data(tmp_path, synthetic=True)


def test_a_folder_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write in .*: Not a directory") as caught:
        fetch_lookalike(tmp_path / "file")
    assert "use --synthetic" not in str(caught.value)


# --- the network ----------------------------------------------------------------------------


def use_proxy(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Send every connection of urllib and apt to a port of this machine."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_when_nothing_works_one_line_names_the_three_ways_and_the_lookalike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    port = listener.getsockname()[1]
    listener.close()
    use_proxy(monkeypatch, port)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError) as caught:
        fetch_fashion_mnist(tmp_path, say=silent)
    message = str(caught.value)
    for words in (
        r"\(1\) what is there: .*train-images-idx3-ubyte is missing",
        r"\(2\) torchvision's download: .*[Cc]onnection refused",
        r"\(3\) the Debian package dataset-fashion-mnist: apt-get does not run here: No such file",
        r"or use --synthetic",
    ):
        assert re.search(words, message), message
    assert "\n" not in message
    assert not files_under(tmp_path)


def test_a_network_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    monkeypatch.setattr(data, "SILENCE_S", 0.2)
    use_proxy(monkeypatch, listener.getsockname()[1])
    with pytest.raises(DataError, match="timed out"):
        download_with_torchvision(tmp_path)
    assert not files_under(tmp_path)


def test_a_download_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    monkeypatch.setattr(data, "DOWNLOAD_LIMIT_S", 0.5)
    use_proxy(monkeypatch, listener.getsockname()[1])
    started = time.monotonic()
    with pytest.raises(DataError, match=r"did not end within 0\.5 s"):
        download_with_torchvision(tmp_path)
    assert time.monotonic() - started < 10
    assert not files_under(tmp_path)


# --- the Debian package, and torchvision with the archives that it expects --------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Debian package's folder of archives, unpacked; skips where apt cannot fetch it."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("apt-get or dpkg is missing")
    folder = tmp_path_factory.mktemp("package")
    command = ["apt-get", "download", data.DEBIAN_PACKAGE]
    found = subprocess.run(
        [*command, "--print-uris"],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
    )
    if found.returncode:
        pytest.skip(f"apt-get does not know {data.DEBIAN_PACKAGE}: sudo apt-get update")
    if subprocess.run(
        [*command, "-oAcquire::http::Timeout=5", "-qq"], check=False, cwd=folder
    ).returncode:
        pytest.skip("the Debian mirror cannot be reached")
    (archive,) = folder.glob("*.deb")
    subprocess.run(["dpkg", "-x", archive.name, "unpacked"], cwd=folder, check=True)
    return folder / "unpacked" / data.DEBIAN_FOLDER


def test_the_debian_package_gives_the_four_files(package: Path, tmp_path: Path) -> None:
    contents = unpack_debian_package(tmp_path)
    assert {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()} == {
        file.name: file.sha256 for file in both_splits(REAL)
    }
    assert not files_under(tmp_path)


def test_missing_package_lists_are_named(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "apt.conf"
    config.write_text(f'Dir::State::lists "{tmp_path}/no-lists";\n')
    monkeypatch.setenv("APT_CONFIG", str(config))
    with pytest.raises(DataError, match=r"Unable to locate package .*sudo apt-get update"):
        unpack_debian_package(tmp_path / "data")


def as_published(archive: Path) -> bytes:
    """Put the name and time that Debian strips back into a gzip header."""
    packed = archive.read_bytes()
    written = 1_504_176_606 if "train" in archive.name else 1_504_176_627
    return (
        struct.pack("<BBBBIBB", 0x1F, 0x8B, 8, 8, written, 0, 3)
        + archive.name.removesuffix(".gz").encode()
        + b"\0"
        + packed[10:]
    )


class Mirror(http.server.BaseHTTPRequestHandler):
    """A proxy that serves the published archives in the mirror's stead."""

    archives: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        """Answer with an archive, or 404."""
        content = self.archives.get(urlsplit(self.path).path.rpartition("/")[2])
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    # apt asks for a tunnel where its sources are https.
    do_CONNECT = do_GET

    def log_message(self, *_: object) -> None:
        """Keep the test output clean."""


@pytest.fixture
def mirror(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """Stand in for torchvision's mirror; yields the archives that it serves."""
    archives = {path.name: as_published(path) for path in package.glob("*.gz")}
    monkeypatch.setattr(Mirror, "archives", archives)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        use_proxy(monkeypatch, server.server_address[1])
        yield archives
        server.shutdown()


def test_torchvisions_checksums_are_those_of_the_same_bytes(package: Path) -> None:
    from torchvision.datasets import FashionMNIST

    published = {path.name: hashlib.md5(as_published(path)) for path in package.glob("*.gz")}
    assert {name: md5.hexdigest() for name, md5 in published.items()} == dict(
        FashionMNIST.resources
    )


def test_torchvisions_own_download_gives_the_four_files(
    mirror: dict[str, bytes], tmp_path: Path
) -> None:
    report = fetch_fashion_mnist(tmp_path, say=silent)
    assert report.source == "torchvision's download"
    assert files_under(tmp_path / RAW) == set(NAMES)
    assert check_data(tmp_path).sha256 == report.sha256


def test_a_mirror_with_other_files_is_refused(mirror: dict[str, bytes], tmp_path: Path) -> None:
    mirror.update({name: gzip.compress(b"other") for name in mirror})
    with pytest.raises(DataError, match="File not found or corrupted"):
        download_with_torchvision(tmp_path)
    assert not files_under(tmp_path)


def test_only_apt_is_sent_to_its_package_lists_by_a_404(
    mirror: dict[str, bytes], tmp_path: Path
) -> None:
    mirror.clear()
    with pytest.raises(DataError) as caught:
        fetch_fashion_mnist(tmp_path, say=silent)
    _, torchvision, debian = re.split(r"\(\d\) ", str(caught.value))[1:]
    assert "404" in torchvision
    assert "apt-get update" not in torchvision
    assert "404" in debian
    assert "sudo apt-get update" in debian
    assert not files_under(tmp_path)
