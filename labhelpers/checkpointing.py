"""Let a model compute the inside of its blocks again in backward, instead of keeping it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def checkpoint_blocks(model: nn.Module) -> int:
    """Checkpoint the blocks of a model in place and return how many there are.

    A block is a part, with parts of its own, of an `nn.Sequential` or `nn.ModuleList`; the
    outermost ones are taken. A plain `nn.Sequential` of layers is cut into about as many
    segments as the square root of their number, the last of which is kept as it is.
    0 where there is nothing of the kind, and the model is left as it was.

    BatchNorm counts a batch twice that way: its running statistics move further.
    """
    blocks = list(_outermost_blocks(model))
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if blocks or not isinstance(model, nn.Sequential) or len(model) < 4:
        return len(blocks)
    segments = math.isqrt(len(model))
    layers = nn.Sequential(*model)
    model.forward = functools.partial(  # type: ignore[method-assign]
        checkpoint_sequential, layers, segments, use_reentrant=False
    )
    return segments - 1


def _outermost_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        held = isinstance(module, (nn.Sequential, nn.ModuleList))
        if held and any(True for _ in child.children()):
            yield child
        else:
            yield from _outermost_blocks(child)
