"""The doctor's page: every line, every state, and nothing that names a person or a machine."""

import copy
import getpass
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from labhelpers.doctor import page, without_names
from labhelpers.formats import GIB

GPU = {
    "device": "cuda:0", "device_name": "NVIDIA H200", "driver": "580.159.04", "cuda": "13.0",
    "cudnn": 91900, "cpu": "a CPU", "cpu_count": 16, "system": "Linux", "kernel": "6.18",
    "wsl2": False, "packages": {"torch": "2.11.0+cu130"},
    "gpu": {"name": "NVIDIA H200", "total_bytes": 140 * GIB, "capability": "9.0"},
}  # fmt: skip
HEALTHY: dict[str, Any] = {
    "labhelpers": "0.1.0", "python": "3.12.3", "asked": "auto", "data_dir": "data", "data": None,
    "host_free_bytes": 100 * GIB, "host_total_bytes": 128 * GIB, "driver_cuda": 13000,
    "chromium": True, "worker": None, "start_s": 4.2, "environment": GPU,
    "precision": {"value": {"matmul": "ieee", "convolution": "ieee", "both": "ieee"},
                  "error": None},
    "cap": {"value": True, "error": None}, "pinned": {"value": True, "error": None},
    "device": {"error": None, "value": {
        "memory": {"free_bytes": 139 * GIB, "total_bytes": 140 * GIB}, "others": [],
        "clocks": {"sm_mhz": 1980, "temperature_c": 35, "throttle_reasons": []},
    }},
}  # fmt: skip


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The healthy machine with some facts changed; `a.b` is b within a."""
    facts = copy.deepcopy(HEALTHY)
    for name, value in changes.items():
        *way, last = name.split(".")
        inner = facts
        for part in way:
            inner = inner[part]
        inner[last] = value
    return facts


def test_a_healthy_machine_is_ok_in_every_line():
    lines, code = page(HEALTHY)
    assert code == 0
    assert [line.split()[0] for line in lines[1:-1]] == ["ok"] * 13
    assert lines[-1] == "All 13 checks are ok."
    text = "\n".join(lines)
    for part in (
        "cuda:0: NVIDIA H200, 140.0 GiB, compute capability 9.0", "580.159.04, up to CUDA 13.0",
        "2.11.0+cu130, CUDA 13.0, cuDNN 91900, Python 3.12.3", "Linux 6.18, not WSL2",
        "139.0 GiB of 140.0 GiB free; no other program holds any", "1980 MHz, 35 °C, not throttled",
        "100.0 GiB of 128.0 GiB free", "starts in 4.20 s and answers",
    ):  # fmt: skip
        assert part in text


CPU = GPU | {"device": "cpu", "gpu": None, "driver": None, "cudnn": None}
SICK = [
    ({"worker": "the worker process does not start: killed"}, "problem", "worker"),
    ({"device_error": "CUDA error: unknown"}, "problem", "device "),
    ({"environment": CPU, "driver_cuda": None}, "warning", "no NVIDIA driver was found"),
    ({"environment": CPU | {"driver": "470.1"}, "driver_cuda": 11040}, "problem",
     "470.1, up to CUDA 11.4 is too old for this torch, built for CUDA 13.0"),
    ({"environment": CPU | {"driver": "580.1"}}, "problem",
     "2.11.0+cu130, CUDA 13.0, Python 3.12.3, cannot use the GPU that the driver shows"),
    ({"environment": CPU | {"driver": "580.1", "cuda": None}}, "problem",
     "CPU-only build, Python 3.12.3"),
    ({"environment.wsl2": True}, "warning", "WSL2 (Linux 6.18)"),
    ({"device.value.others": [{"pid": 77, "used_bytes": GIB}]}, "warning",
     "held by process 77: 1.00 GiB"),
    ({"device.value.others": None}, "ok", "the driver does not tell who holds the rest"),
    ({"device.value.clocks.throttle_reasons": ["hw_slowdown"]}, "warning",
     "throttled: hw_slowdown"),
    ({"device.value.clocks.throttle_reasons": None}, "ok", "throttling is not told"),
    ({"host_free_bytes": GIB}, "warning", "1.00 GiB of 128.0 GiB free"),
    ({"precision": {"value": {"both": "mixed"}, "error": None}}, "problem",
     "FP32 cannot be set: read back as {'both': 'mixed'}"),
    ({"precision": {"value": None, "error": "no such switch"}}, "problem", "no such switch"),
    ({"pinned": {"value": None, "error": "CUDA error: out of memory"}}, "problem",
     "does not work: CUDA error: out of memory"),
    ({"pinned": {"value": False, "error": None}}, "problem", "the copy differs"),
    ({"cap": {"value": False, "error": None}}, "warning", "more than the cap was given out"),
    ({"cap": {"value": None, "error": "needs Linux"}}, "warning", "does not work: needs Linux"),
    ({"data": "data/x is missing"}, "warning", "data/x is missing"),
    ({"chromium": False}, "warning", "not found"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "status", "said"), SICK)
def test_what_is_wrong_is_named_with_what_to_do(changes, status, said):
    lines, code = page(changed(changes))
    number = next(n for n, line in enumerate(lines) if said in line)
    assert lines[number].startswith(status)
    assert (status == "ok") or lines[number + 1].lstrip().startswith("-> ")
    assert code == any(line.startswith("problem") for line in lines)
    assert code == 1 or status != "problem"


def test_without_a_card_nobody_is_told_to_install_a_driver():
    lines, code = page(changed({"environment": CPU, "driver_cuda": None}))
    number = next(n for n, line in enumerate(lines) if " driver " in line)
    assert lines[number].endswith("no NVIDIA driver was found; the CPU will be measured")
    assert lines[number + 1].lstrip() == (
        "-> if there is a card: install its driver (under WSL2 it is the driver of Windows)"
    )
    assert code == 0


def test_a_driver_that_does_not_answer_beside_a_gpu_is_not_called_missing():
    text = "\n".join(page(changed({"environment.driver": None, "driver_cuda": None}))[0])
    assert "does not tell its version" in text
    assert "the CPU will be measured" not in text


def test_the_cpu_by_choice_is_no_warning():
    environment = CPU | {"cuda": None}
    facts = changed({"environment": environment, "asked": "cpu"})
    for name in ("pinned", "device"):
        facts.pop(name)
    lines, code = page(facts)
    assert code == 0
    assert "no NVIDIA driver, and none is needed for this" in "\n".join(lines)
    assert not [line for line in lines if line.startswith("warning")]


def test_names_are_taken_out(monkeypatch):
    monkeypatch.setenv("HOME", "/home/zaphod")
    monkeypatch.setenv("LOGNAME", "zaphod")
    monkeypatch.setattr(socket, "gethostname", lambda: "heart-of-gold")
    assert without_names("/home/zaphod/data on heart-of-gold by zaphod") == "~/data on … by …"
    assert without_names("zaphods heart") == "zaphods heart"


def test_a_real_page_names_nobody(tmp_path):
    home = tmp_path / "somebody"
    home.mkdir()
    environment = os.environ | {"HOME": str(home), "LOGNAME": "somebody", "USER": "somebody"}
    command = [sys.executable, "-m", "labhelpers", "doctor", "--device", "cpu", "--data-dir"]
    done = subprocess.run(
        [*command, str(home / "data")], capture_output=True, text=True, env=environment,
        check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "ok       memory cap" in done.stdout
    assert "ok       worker" in done.stdout
    assert "warning  data" in done.stdout
    assert "~/data" in done.stdout
    for name in ("somebody", socket.gethostname(), str(tmp_path), f"/{getpass.getuser()}/"):
        assert name not in done.stdout


def test_a_device_that_is_not_one_is_bad_input():
    command = [sys.executable, "-m", "labhelpers", "doctor", "--device", "tpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "labhelpers: device: got 'tpu'; must be 'auto', 'cpu', 'cuda' or 'cuda:N'\n"
    )
