"""Fixtures that several test modules share."""

import os
from pathlib import Path

import pytest

from labhelpers.data import DataReport, fetch_fashion_mnist
from labhelpers.idx import DataError

# The tests' networks are tiny; several threads would mostly wait for each other on busy cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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
