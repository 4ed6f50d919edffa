"""Fixtures that several test modules share."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from labhelpers.data import DataReport, fetch_fashion_mnist
from labhelpers.idx import DataError
from labhelpers.sessions import _SESSIONS

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
