"""What runs inside the worker for the ceilings: count a step's work, measure the machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from labhelpers.capture import Capture, capture_for
from labhelpers.ceilings import Work
from labhelpers.ladder_plan import CEILINGS
from labhelpers.records import LadderSpec, Trial
from labhelpers.training import read_precision, set_precision
from labhelpers.trials import opening_facts
from labhelpers.verdicts import median
from labhelpers.workloads import fashion_workload

REPEATS = 7
_GPU_SIZE, _CPU_SIZE = 8192, 768
_GPU_COPY_BYTES, _CPU_COPY_BYTES = 2**30, 2**26
_COUNTED = (8, 24)
# Operators that end in a library's kernel: what lies between them can be fused.
_LIBRARY = ("convolution", "convolution_backward", "mm", "addmm", "bmm")
ADAM_PASSES = 7
"""Adam reads weight, gradient and two moments, and writes weight and moments: 4 bytes each."""


def measure_ceilings(spec: dict[str, Any]) -> dict[str, Any]:
    """Measure what this machine does at most and count what a step asks for; return a trial.

    `details` holds `flops_per_s` by precision, `bytes_per_s` of a copy, and `work`.
    """
    asked = LadderSpec(**spec)
    capture = capture_for(torch.device(asked.device))
    facts = opening_facts("ladder", asked, (1, 0, 0), feed="none", precision="fp32")
    names = ["fp32", "bf16"] if asked.device == "cpu" else ["fp32", "tf32", "bf16", "fp16"]
    rates = {name: matrix_flops_per_s(name, capture) for name in names}
    set_precision("fp32")
    facts["variant"] = CEILINGS
    facts["details"] = {
        "flops_per_s": rates, "bytes_per_s": copy_bytes_per_s(capture),
        "work": asdict(count_work()), "missing": {},
    }  # fmt: skip
    facts["precision_after"] = read_precision()
    capture.empty_cache()
    return Trial(**facts).model_dump(mode="json", exclude_none=True)


def matrix_flops_per_s(precision: str, capture: Capture) -> float:
    """Return the speed of a large square matrix product in one precision, in operations/s."""
    set_precision(precision)
    size = _CPU_SIZE if capture.device.type == "cpu" else _GPU_SIZE
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    left, right = (
        torch.randn(size, size, device=capture.device).to(kind) for _ in range(2)
    )  # fmt: skip
    out = torch.empty_like(left)
    seconds = _typical_s(lambda: torch.mm(left, right, out=out), capture)
    return 2 * size**3 / seconds


def copy_bytes_per_s(capture: Capture) -> float:
    """Return the bandwidth of a large copy on the device: bytes read plus bytes written, per s."""
    size = _CPU_COPY_BYTES if capture.device.type == "cpu" else _GPU_COPY_BYTES
    source = torch.randn(size // 4, device=capture.device)
    target = torch.empty_like(source)
    return 2 * size / _typical_s(lambda: target.copy_(source), capture)


def _typical_s(function: Callable[[], Any], capture: Capture) -> float:
    """Return the median seconds of a call on the device, after two that warm it up."""
    for _ in range(2):
        function()
    capture.prepare(REPEATS)
    capture.start()
    for _ in range(REPEATS):
        function()
        capture.mark()
    capture.synchronize()
    found = median(capture.step_times_s())
    assert found is not None
    return found


def count_work() -> Work:
    """Count the operations and bytes of FashionCNN's training step, on the CPU.

    Bytes grow in a straight line with the batch, so two batch sizes give both parts of them.
    """
    small, large = (_traffic(size) for size in _COUNTED)
    span = _COUNTED[1] - _COUNTED[0]
    slopes = [(b - a) / span for a, b in zip(small, large, strict=True)]
    fixed = [a - slope * _COUNTED[0] for a, slope in zip(small, slopes, strict=True)]
    model = fashion_workload().make_model()
    adam = ADAM_PASSES * 4 * sum(parameter.numel() for parameter in model.parameters())
    forward, backward = count_flops(_COUNTED[0])
    return Work(
        forward, backward, slopes[0], fixed[0] + adam, slopes[1], fixed[1] + adam
    )  # fmt: skip


def count_flops(batch_size: int) -> tuple[int, int]:
    """Return torch's count of operations per image, forward and backward."""
    workload = fashion_workload()
    model = workload.make_model()
    images, labels = workload.make_batch(batch_size, torch.device("cpu"))
    with FlopCounterMode(display=False) as forward:
        loss = workload.loss(model(images), labels)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    totals = forward.get_total_flops(), backward.get_total_flops()
    return totals[0] // batch_size, totals[1] // batch_size


def _traffic(batch_size: int) -> tuple[int, int]:
    """Return the bytes of a forward and backward pass: of all operators, of libraries' alone."""
    workload = fashion_workload()
    model = workload.make_model()
    images, labels = workload.make_batch(batch_size, torch.device("cpu"))
    with ByteCounter() as counter:
        workload.loss(model(images), labels).backward()
    return counter.all_bytes, counter.library_bytes


class ByteCounter(TorchDispatchMode):
    """Count the bytes that operators read and write, each tensor once per operator."""

    def __init__(self) -> None:
        super().__init__()
        self.all_bytes = 0
        self.library_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        results = func(*args, **(kwargs or {}))
        if not _is_view(func):
            moved = _bytes_in([args, kwargs, results])
            self.all_bytes += moved
            if func.overloadpacket.__name__ in _LIBRARY:
                self.library_bytes += moved
        return results


def _is_view(func: Any) -> bool:
    """Tell whether an operator only looks at its input in another way (or makes an empty one)."""
    alias = [value.alias_info for value in func._schema.returns]
    only_looks = any(info is not None and not info.is_write for info in alias)
    return only_looks or func.overloadpacket.__name__.startswith(("empty", "detach"))


def _bytes_in(values: Any) -> int:
    """Add up the bytes of all distinct tensors in nested lists, tuples and mappings."""
    found: dict[int, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = math.prod(value.shape) * value.element_size()
        elif isinstance(value, dict):
            look(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                look(item)

    look(values)
    return sum(found.values())
