"""Judge what `doctor` found: pure functions of facts, one line of the page each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from labhelpers.formats import GIB, show_bytes, show_seconds

Facts = Mapping[str, Any]
LITTLE_MEMORY_BYTES = 2 * GIB


@dataclass(frozen=True)
class Line:
    """One check: how it stands, what was seen, and what to do if that is not good."""

    status: Literal["ok", "warning", "problem"]
    name: str
    text: str
    advice: str = ""


def worker_line(facts: Facts) -> Line:
    """Judge whether the measuring process starts."""
    if facts["worker"]:
        return Line("problem", "worker", facts["worker"], "python -c 'import torch' shows why")
    return Line("ok", "worker", f"starts in {show_seconds(facts['start_s'])} and answers")


def device_line(facts: Facts) -> Line | None:
    """Say what measurements run on; no GPU is a warning, a device that does not start a problem."""
    if "device_error" in facts:
        return Line(
            "problem", "device", f"does not start: {facts['device_error']}",
            "free it of other programs, or restart the computer; --device cpu measures the CPU",
        )  # fmt: skip
    environment = facts.get("environment")
    if environment is None:
        return None
    gpu = environment.get("gpu")
    if gpu:
        return Line(
            "ok", "device", f"{environment['device']}: {gpu['name']}, "
            f"{show_bytes(gpu['total_bytes'])}, compute capability {gpu['capability']}",
        )  # fmt: skip
    text = f"cpu: {environment['cpu']}, {environment['cpu_count']} usable"
    if facts["asked"] == "cpu":
        return Line("ok", "device", text)
    return Line(
        "warning", "device", f"no usable GPU; {text}", "results will be the CPU's, and smaller"
    )


def driver_line(facts: Facts) -> Line | None:
    """Judge the driver against the CUDA version that torch was built for."""
    environment = facts.get("environment")
    if environment is None:
        return None
    driver, build = environment.get("driver"), environment.get("cuda")
    if not driver:
        if facts["asked"] == "cpu" or build is None:
            return Line("ok", "driver", "no NVIDIA driver, and none is needed for this")
        if environment.get("gpu"):
            return Line(
                "warning", "driver", "does not tell its version", "nvidia-smi shows whether it runs"
            )
        return Line(
            "warning", "driver", "no NVIDIA driver was found; the CPU will be measured",
            "if there is a card: install its driver (under WSL2 it is the driver of Windows)",
        )  # fmt: skip
    text, known = f"{driver}{_highest(facts)}", facts.get("driver_cuda")
    too_old = bool(build and known and known // 1000 < int(build.split(".")[0]))
    if too_old:
        return Line(
            "problem", "driver", f"{text} is too old for this torch, built for CUDA {build}",
            "update the driver (under WSL2 that of Windows), or install a torch for an older CUDA",
        )  # fmt: skip
    return Line("ok", "driver", text)


def _highest(facts: Facts) -> str:
    known = facts.get("driver_cuda")
    return f", up to CUDA {known // 1000}.{known % 1000 // 10}" if known else ""


def torch_line(facts: Facts) -> Line | None:
    """Judge whether torch can use the GPU that the driver shows."""
    environment = facts.get("environment")
    if environment is None:
        return None
    version, cuda = environment["packages"].get("torch"), environment.get("cuda")
    text = f"{version}, " + (f"CUDA {cuda}" if cuda else "CPU-only build")
    if cuda and environment.get("cudnn"):
        text += f", cuDNN {environment['cudnn']}"
    text += f", Python {facts['python']}"
    if environment.get("driver") and not cuda:
        return Line("problem", "torch", text, "there is a GPU: install a torch built for CUDA")
    if environment.get("driver") and not environment.get("gpu") and facts["asked"] != "cpu":
        return Line(
            "problem", "torch", f"{text}, cannot use the GPU that the driver shows",
            "see the line on the driver; is CUDA_VISIBLE_DEVICES set?",
        )  # fmt: skip
    return Line("ok", "torch", text)


def wsl2_line(facts: Facts) -> Line | None:
    """Say whether this is WSL2, and what follows."""
    environment = facts.get("environment")
    if environment is None:
        return None
    system = f"{environment['system']} {environment['kernel']}"
    if not environment.get("wsl2"):
        return Line("ok", "system", f"{system}, not WSL2")
    return Line(
        "warning" if environment.get("gpu") else "ok", "system", f"WSL2 ({system})",
        "past the card's memory the Windows driver may go on in system memory, slowly and without "
        "an error; per-process figures are often missing; memory for Linux is set in .wslconfig",
    )  # fmt: skip


def memory_line(facts: Facts) -> Line | None:
    """Judge the free memory of the device, and say who else holds some."""
    seen = (facts.get("device") or {}).get("value") or {}
    memory = seen.get("memory") or {}
    if not memory.get("total_bytes") or not facts["environment"].get("gpu"):
        return None  # a CPU's memory is the host's
    free_bytes, others = memory["free_bytes"], seen.get("others")
    text = f"{show_bytes(free_bytes)} of {show_bytes(memory['total_bytes'])} free"
    if others is None:
        return Line("ok", "device memory", f"{text}; the driver does not tell who holds the rest")
    held = ", ".join(f"process {o['pid']}: {show_bytes(o['used_bytes'])}" for o in others)
    if others:
        return Line(
            "warning", "device memory", f"{text}; held by {held}",
            "end these programs: they take memory and time from every measurement",
        )  # fmt: skip
    return Line("ok", "device memory", f"{text}; no other program holds any")


def host_line(facts: Facts) -> Line:
    """Judge the host's free memory."""
    free_bytes = facts["host_free_bytes"]
    text = f"{show_bytes(free_bytes)} of {show_bytes(facts['host_total_bytes'])} free"
    if free_bytes < LITTLE_MEMORY_BYTES:
        return Line("warning", "host memory", text, "close other programs; 2 GiB should be free")
    return Line("ok", "host memory", text)


def clocks_line(facts: Facts) -> Line | None:
    """Judge whether the device holds itself back."""
    clocks = ((facts.get("device") or {}).get("value") or {}).get("clocks")
    if not clocks or clocks.get("sm_mhz") is None:
        return None
    text = f"{clocks['sm_mhz']} MHz, {clocks['temperature_c']} °C"
    reasons = clocks.get("throttle_reasons")
    if reasons:
        return Line(
            "warning", "clocks", f"{text}, throttled: {', '.join(reasons)}",
            "let it cool down, or raise its power limit, before you measure",
        )  # fmt: skip
    told = "not throttled" if reasons is not None else "throttling is not told"
    return Line("ok", "clocks", f"{text}, {told}")


def precision_line(facts: Facts) -> Line | None:
    """Judge whether FP32 is read back as it was set."""
    found = facts.get("precision")
    if found is None:
        return None
    value = found["value"] or {}
    if value.get("both") == "ieee":
        return Line("ok", "precision", "FP32 is set and read back as ieee (TF32 off)")
    seen = found["error"] or f"read back as {value}"
    return Line("problem", "precision", f"FP32 cannot be set: {seen}", "update torch")


def pinned_line(facts: Facts) -> Line | None:
    """Judge whether pinned memory works."""
    found = facts.get("pinned")
    if found is None:
        return None
    if found["value"]:
        return Line("ok", "pinned memory", "works")
    return Line(
        "problem", "pinned memory", f"does not work: {found['error'] or 'the copy differs'}",
        "raise the limit of locked memory (ulimit -l), or the memory of WSL2",
    )  # fmt: skip


def cap_line(facts: Facts) -> Line | None:
    """Judge whether a memory cap gives a real out-of-memory error."""
    found = facts.get("cap")
    if found is None:
        return None
    if found["value"]:
        return Line("ok", "memory cap", "works: more than the cap is a real out-of-memory error")
    why = found["error"] or "more than the cap was given out"
    return Line("warning", "memory cap", f"does not work: {why}", "notebook 03 needs it")


def data_line(facts: Facts) -> Line:
    """Judge whether the data are there."""
    if facts["data"] is None:
        return Line("ok", "data", "FashionMNIST is present and verified")
    return Line("warning", "data", facts["data"], "labhelpers data, or --synthetic")


def chromium_line(facts: Facts) -> Line:
    """Say whether the browser tests can run."""
    if facts["chromium"]:
        return Line("ok", "Chromium", "present (the browser tests need it)")
    return Line(
        "warning", "Chromium", "not found", "only the browser tests need it; they are skipped"
    )


LINES: tuple[Callable[[Facts], Line | None], ...] = (
    device_line, driver_line, torch_line, wsl2_line, memory_line, host_line, clocks_line,
    precision_line, pinned_line, cap_line, worker_line, data_line, chromium_line,
)  # fmt: skip
