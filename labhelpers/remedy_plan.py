"""The remedies against running out of memory, and what suits which device and model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labhelpers.formats import MIB
from labhelpers.inputs import InputError
from labhelpers.records import Precision, RemedySpec

RESNET50 = "torchvision.models:resnet50"
PLAIN = "plain fp32"

_RESNET50_IMAGE_BYTES = 90 * MIB  # a training step in FP32 at 3×224×224, without the fixed part
_SHARE_OF_CARD = 0.4

QUICK_NAMES = ("accumulation", "bf16", "checkpointing", "smaller input")


@dataclass(frozen=True)
class Remedy:
    """One way to need less memory (or more), as a variant of the plain FP32 step."""

    name: str
    what: str
    precision: Precision = "fp32"
    training: bool = True
    same_input: bool = True
    accumulates: bool = False
    checkpoints: bool = False
    channels_last: bool = False
    expandable: bool = False
    keeps_losses: bool = False
    without_graph: bool = False


REMEDIES = (
    Remedy(PLAIN, "the step as it is"),
    Remedy("accumulation", "micro-batches one after the other, one update", accumulates=True),
    Remedy("bf16", "autocast to bfloat16", precision="bf16"),
    Remedy("fp16", "autocast to float16, the loss scaled", precision="fp16"),
    Remedy(
        "checkpointing", "what is inside each block is computed again in backward", checkpoints=True
    ),
    Remedy("smaller input", "images of half the side, another task", same_input=False),
    Remedy("channels_last", "the same sums in another layout", channels_last=True),
    Remedy(
        "losses kept",
        "each loss is kept with its graph, as `losses.append(loss)` does",
        keeps_losses=True,
    ),
    Remedy("evaluation: losses kept", "with their graphs", training=False, keeps_losses=True),
    Remedy("evaluation: losses detached", "their graphs go", training=False),
    Remedy("evaluation: no_grad", "there is no graph", training=False, without_graph=True),
    Remedy(
        "expandable segments",
        "the allocator's segments grow instead of being many",
        expandable=True,
    ),
)


def chosen_remedies(spec: RemedySpec) -> list[Remedy]:
    """Return the remedies that were asked for, the plain step always among them.

    Where none is named all apply, or the first ones to try for a quick look.

    Raises:
        InputError: a name that is none of them.
    """
    names = [remedy.name for remedy in REMEDIES]
    for name in spec.remedies or ():
        if name not in names:
            raise InputError(f"remedies: got {name!r}; must be among: {', '.join(names)}")
    standard = QUICK_NAMES if spec.quick else names
    wanted = {PLAIN, *(spec.remedies or standard)}
    return [remedy for remedy in REMEDIES if remedy.name in wanted]


def remedy_named(name: str) -> Remedy:
    """Return a remedy by its name."""
    return next(remedy for remedy in REMEDIES if remedy.name == name)


def resolved(spec: RemedySpec, facts: dict[str, Any]) -> RemedySpec:
    """Fill in what was left open, with what suits the device and the model."""
    on_gpu = facts["device"] != "cpu"
    side = 224 if on_gpu else 64
    known = spec.workload == RESNET50
    shape = spec.input_shape or ((3, side, side) if known else None)
    steps = (3 if spec.quick else 5) if on_gpu else (1 if spec.quick else 2)
    return spec.model_copy(
        update={
            "device": facts["device"],
            "input_shape": shape,
            "classes": spec.classes or (1000 if known else None),
            "batch_size": spec.batch_size or _default_batch(spec, facts),
            "steps": spec.steps or steps,
        }
    )


def _default_batch(spec: RemedySpec, facts: dict[str, Any]) -> int:
    """Return a batch that leaves a good part of the card free, or a small one."""
    if facts["gpu"] is None:
        return 8 if spec.quick else 16
    if spec.workload != RESNET50 or spec.input_shape is not None:
        return 32
    most = int(_SHARE_OF_CARD * facts["gpu"]["total_bytes"] / _RESNET50_IMAGE_BYTES)
    return min(64 if spec.quick else 256, 1 << max(2, most.bit_length() - 1))


def why_not(remedy: Remedy, spec: RemedySpec, platform: str | None) -> str | None:
    """Say why a remedy is not run on this device and platform; None where it is."""
    asked_by_name = remedy.name in (spec.remedies or ())
    if remedy.precision == "fp16" and spec.device == "cpu" and not asked_by_name:
        return "float16 is slow on the CPU, whose half precision is bfloat16; name it to run it"
    if remedy.expandable and spec.device == "cpu":
        return "these are segments of CUDA's allocator"
    if remedy.expandable and platform != "linux":
        return (
            f"not run on {platform or 'this system'}: people report failures there, so try it "
            "only in a process that may be lost"
        )
    return None
