"""The machine a result comes from: GPU, driver, torch, WSL2, CPU. No user or host name."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from labhelpers.drivers import driver_version
from labhelpers.inputs import InputError

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
_PACKAGES = ("torch", "torchvision", "numpy", "pandas", "matplotlib", "papermill", "jupyterlab")


def check_device_name(name: str) -> str:
    """Return the name of a device if it is well-formed; InputError otherwise."""
    if not _DEVICE.fullmatch(name):
        raise InputError(f"device: got {name!r}; must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
    return name


def resolve_device(name: str, *, require_gpu: bool = False) -> str:
    """Return the device to measure on: `cpu` or `cuda:N`; `auto` takes the best there is.

    Raises:
        InputError: the device does not exist here, or a GPU is required and there is none.
    """
    import torch

    check_device_name(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda:0" if count else "cpu"
    if name == "cpu":
        if require_gpu:
            raise InputError(f"a GPU is required (require_gpu), but {_why_no_gpu(count)}")
        return name
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        have = f"it has cuda:0 to cuda:{count - 1}" if count else _why_no_gpu(count)
        raise InputError(f"device: got {name!r}, but {have}; use --device auto or cpu")
    return f"cuda:{index}"


def _why_no_gpu(count: int) -> str:
    """Say why torch uses no GPU: none, a CPU-only torch, or a driver too old for it."""
    import torch

    if count:
        return "the CPU was asked for"
    driver = driver_version()
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU-only build"
    if driver:
        return (
            f"torch {torch.__version__} cannot use driver {driver} (too old for CUDA "
            f"{torch.version.cuda}?); update the driver"
        )
    return "this machine has no NVIDIA driver"


def describe(device: str) -> dict[str, Any]:
    """Return the facts that a result from `device` depends on, as JSON-able values."""
    import torch

    gpu = _gpu_facts(device) if device.startswith("cuda") else None
    return {
        "device": device,
        "device_name": gpu["name"] if gpu else cpu_model(),
        "gpu": gpu,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "torch_threads": torch.get_num_threads(),
        "cpu": cpu_model(),
        "cpu_count": usable_cpus(),
        "memory_total_bytes": _memory_total_bytes(),
        "system": platform.system(),
        "kernel": platform.release(),
        "wsl2": is_wsl2(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def environment_id(environment: Mapping[str, Any]) -> str:
    """Return a short name that is equal for equal facts (a growing machine's memory apart)."""
    facts = {k: v for k, v in environment.items() if k != "memory_total_bytes"}
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_wsl2(kernel: str | None = None) -> bool:
    """Tell whether a kernel release (default: this machine's) is WSL2's."""
    release = platform.release() if kernel is None else kernel
    return "microsoft" in release.lower()


def cpu_model() -> str:
    """Return the CPU's name as the system gives it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """Count the CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpu_facts(device: str) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "total_bytes": torch.cuda.mem_get_info(device)[1],
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


def _memory_total_bytes() -> int | None:
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _version(package: str) -> str | None:
    if package in sys.modules and hasattr(sys.modules[package], "__version__"):
        return str(sys.modules[package].__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
