"""How far the hardware lets a training step go: counted work, measured ceilings, shares. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from labhelpers.formats import show_share

COUNTING_RULE = (
    "A multiply and an add are two operations; only convolutions and matrix products are counted, "
    "as torch's flop counter does. Bytes: every operator of a step reads each of its inputs once "
    "and writes each of its outputs once (views move nothing). Where kernels are fused, only the "
    "convolutions and matrix products are counted so, because what lies between them need not be "
    "written: it is the least that such a step must move."
)


@dataclass(frozen=True)
class Layer:
    """One convolution or linear layer of FashionCNN: multiply-adds per image, forward.

    `passes_gradient` tells whether its input needs a gradient: the first layer's does not.
    """

    name: str
    multiply_adds: int
    passes_gradient: bool = True


FASHION_LAYERS = (
    Layer("convolution 1 → 16, 3×3, on 28×28", 28 * 28 * 16 * 1 * 9, passes_gradient=False),
    Layer("convolution 16 → 32, 3×3, on 14×14", 14 * 14 * 32 * 16 * 9),
    Layer("linear 1568 → 64", 32 * 7 * 7 * 64),
    Layer("linear 64 → 10", 64 * 10),
)


@dataclass(frozen=True)
class Work:
    """What one image costs: operations, and bytes with and without fused kernels.

    `…_step` is what a step moves besides, whatever the batch: weights, gradients, Adam's state.
    """

    forward_flops: int
    backward_flops: int
    eager_bytes: float
    eager_bytes_step: float
    fused_bytes: float
    fused_bytes_step: float

    @property
    def flops(self) -> int:
        """Operations of a whole training step, per image."""
        return self.forward_flops + self.backward_flops

    def bytes_per_image(self, batch_size: int, *, fused: bool) -> float:
        """Bytes that a step moves per image at one batch size."""
        if fused:
            return self.fused_bytes + self.fused_bytes_step / batch_size
        return self.eager_bytes + self.eager_bytes_step / batch_size


@dataclass(frozen=True)
class CeilingShare:
    """How much of the machine's measured ceilings a speed takes; None where one is unknown.

    `nearest` is the ceiling that is reached first: arithmetic or memory bandwidth.
    """

    compute: float | None
    memory: float | None
    nearest: Literal["arithmetic", "memory bandwidth"] | None

    @property
    def share(self) -> float | None:
        """The share of the nearest ceiling."""
        return self.compute if self.nearest == "arithmetic" else self.memory


def hand_count() -> tuple[int, int]:
    """Return FashionCNN's operations per image, forward and backward, counted by hand.

    Backward takes each layer's forward work once for the weights and, but for the first layer,
    once more for its input.
    """
    forward = sum(2 * layer.multiply_adds for layer in FASHION_LAYERS)
    backward = sum(
        2 * layer.multiply_adds * (2 if layer.passes_gradient else 1) for layer in FASHION_LAYERS
    )
    return forward, backward


def share_of_ceiling(
    images_per_s: float, work: Work, batch_size: int, *, fused: bool,
    flops_per_s: float | None, bytes_per_s: float | None,
) -> CeilingShare:  # fmt: skip
    """Set a speed beside what the machine was measured to do at most.

    Args:
        fused: whether the rung's kernels are fused (compiled).
        flops_per_s: of a large matrix product in the same precision.
        bytes_per_s: of a large copy on the device, bytes read plus bytes written.
    """
    compute = images_per_s * work.flops / flops_per_s if flops_per_s else None
    moved = images_per_s * work.bytes_per_image(batch_size, fused=fused)
    memory = moved / bytes_per_s if bytes_per_s else None
    if compute is None and memory is None:
        return CeilingShare(None, None, None)
    nearest: Literal["arithmetic", "memory bandwidth"] = (
        "arithmetic" if (compute or 0) >= (memory or 0) else "memory bandwidth"
    )
    return CeilingShare(compute, memory, nearest)


def describe_share(share: CeilingShare) -> str:
    """Say a share in a few words for a table: `23 % of memory bandwidth`."""
    if share.nearest is None or share.share is None:
        return "n/a"
    return f"{show_share(share.share, 1)} of {share.nearest}"


def work_from(details: Mapping[str, Any]) -> Work:
    """Return the counted work that a trial of the ceilings holds."""
    return Work(**details["work"])
