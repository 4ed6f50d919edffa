"""Fixtures that several test modules share."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from labhelpers import cli
from labhelpers.data import DataReport, fetch_fashion_mnist
from labhelpers.idx import DataError
from labhelpers.sessions import _SESSIONS
from labhelpers.store import RunDirectory
from labhelpers.worker import Worker, import_torch

# The tests' networks are tiny; several threads would mostly wait for each other on busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what it puts in the background with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="session")
def data_report() -> DataReport:
    """FashionMNIST in the repository's data folder; the look-alike where it cannot be had."""
    try:
        return fetch_fashion_mnist(DATA)
    except DataError:
        return fetch_fashion_mnist(DATA, synthetic=True)


@pytest.fixture(scope="session")
def data_dir(data_report: DataReport) -> Path:
    """The folder to give as data directory; `data_report.synthetic` says what it holds."""
    return data_report.data_dir


@pytest.fixture
def no_sessions() -> Iterator[None]:
    """End what a test measures in the background, and forget it."""
    yield
    for session in _SESSIONS.values():
        session.stop()
        session.wait(60)
    _SESSIONS.clear()


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    """A run directory that holds the module's `TRIALS`, or none."""
    made = RunDirectory.create(tmp_path / "run")
    with made.writing():
        for trial in getattr(request.module, "TRIALS", ()):
            made.append(trial)
    return made


@pytest.fixture(scope="module")
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    """A worker, shared by a module's tests; it restarts by itself after a death.

    It is warm with torch, or with what the module names as `WARM_WITH`.
    """
    with Worker(getattr(request.module, "WARM_WITH", import_torch)) as shared:
        yield shared


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run `labhelpers ...` through its real entry point, in an empty folder.

    Returns exit code, output and errors.
    """
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["labhelpers", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output, errors = capfd.readouterr()
        return ended.value.code, output, errors

    yield run
    signal.signal(signal.SIGTERM, before)
