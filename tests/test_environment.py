"""The machine: which device, why no GPU, facts without names, an id that is stable."""

import getpass
import json
import socket
from pathlib import Path

import pytest
import torch

from labhelpers import drivers
from labhelpers.environment import (
    check_device_name,
    describe,
    environment_id,
    is_wsl2,
    resolve_device,
    usable_cpus,
)
from labhelpers.inputs import InputError
from labhelpers.records import Clocks, DriverMemory

NO_GPU = not torch.cuda.is_available()


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:17"])
def test_names_of_devices(name):
    assert check_device_name(name) == name


@pytest.mark.parametrize("name", ["gpu", "CPU", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "cpu\n"])
def test_other_names_are_bad_input(name):
    with pytest.raises(InputError) as caught:
        check_device_name(name)
    assert str(caught.value) == (f"device: got {name!r}; must be 'auto', 'cpu', 'cuda' or 'cuda:N'")


def test_the_cpu_is_always_there_but_never_when_a_gpu_is_required():
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(InputError, match="a GPU is required"):
        resolve_device("cpu", require_gpu=True)


@pytest.mark.skipif(not NO_GPU, reason="this machine has a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_others_say_why():
    assert resolve_device("auto") == "cpu"
    with pytest.raises(InputError, match="a GPU is required"):
        resolve_device("auto", require_gpu=True)
    for name in ("cuda", "cuda:7"):
        with pytest.raises(InputError) as caught:
            resolve_device(name)
        assert str(caught.value).startswith(f"device: got {name!r}, but ")
        assert str(caught.value).endswith("; use --device auto or cpu")


@pytest.mark.parametrize(
    ("count", "cuda", "driver", "said"),
    [
        (0, None, None, "is a CPU-only build"),
        (0, "13.0", "535.1", "cannot use driver 535.1 (too old for CUDA 13.0?); update the driver"),
        (0, "13.0", None, "this machine has no NVIDIA driver"),
        (2, "13.0", "580.1", "it has cuda:0 to cuda:1"),
    ],
)
def test_why_a_gpu_cannot_be_used(monkeypatch, count, cuda, driver, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr("labhelpers.environment.driver_version", lambda: driver)
    with pytest.raises(InputError) as caught:
        resolve_device("cuda:7")
    assert said in str(caught.value)


def test_the_facts_can_be_stored_and_name_neither_user_nor_host():
    facts = describe("cpu")
    assert str(Path.home()) not in json.dumps(facts)
    assert facts["device"] == "cpu"
    assert facts["device_name"] == facts["cpu"]
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["cpu_count"] == usable_cpus() >= 1
    for private in (socket.gethostname(), getpass.getuser()):
        assert private not in {value for value in facts.values() if isinstance(value, str)}


def test_equal_facts_have_one_id_and_others_another():
    facts = describe("cpu")
    assert environment_id(facts) == environment_id(json.loads(json.dumps(facts)))
    assert environment_id(facts | {"memory_total_bytes": 1}) == environment_id(facts)
    assert environment_id(facts | {"driver": "1"}) != environment_id(facts)
    assert len(environment_id(facts)) == 12


@pytest.mark.parametrize(
    ("kernel", "wsl2"),
    [("5.15.167.4-microsoft-standard-WSL2", True), ("6.6.0-MICROSOFT-x", True), ("6.1.0", False)],
)
def test_wsl2_is_known_by_its_kernel_in_any_case(kernel, wsl2):
    assert is_wsl2(kernel) is wsl2


@pytest.mark.skipif(not NO_GPU, reason="this machine has a driver")
def test_without_a_driver_nothing_is_known_and_nothing_is_zero():
    assert drivers.ask_nvml("nvmlSystemGetDriverVersion") is None
    assert drivers.driver_version() is None
    assert drivers.other_processes(None) is None
    assert drivers.clocks(None) == Clocks()
    assert drivers.driver_memory(None, 1, 2) == DriverMemory(free_bytes=1, total_bytes=2)
