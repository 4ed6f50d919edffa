"""Draw a look-alike of FashionMNIST for machines that cannot fetch the real one.

Same shapes, counts and balance; ten classes that a small CNN can tell apart. Integer arithmetic
on raw PCG64 output only: NumPy promises that stream across versions (NEP 19), which it does not
for ``Generator`` methods, so the files have one SHA-256 everywhere.
"""

import numpy as np
import numpy.typing as npt

IMAGE_SIDE = 28
CLASSES = 10
COUNTS = {"train": 60_000, "test": 10_000}

_BLOCK = 4
_SHIFTS = 4
_SEEDS = {"patterns": 42, "train": 43, "test": 44}

UInt8Array = npt.NDArray[np.uint8]


def draw_lookalike(split: str) -> tuple[UInt8Array, UInt8Array]:
    """Draw the images and labels of one split ("train" or "test"), always the same ones.

    Returns images (N, 28, 28) and labels (N,), both uint8; every class appears N/10 times.
    """
    count = COUNTS[split]
    bits = np.random.PCG64(_SEEDS[split])
    order = np.argsort(bits.random_raw(count), kind="stable")
    labels = (order % CLASSES).astype(np.uint8)
    shift = _draw_bytes(bits, count) % (_SHIFTS * _SHIFTS)
    noise = _draw_bytes(bits, count * IMAGE_SIDE * IMAGE_SIDE).reshape(-1, IMAGE_SIDE, IMAGE_SIDE)
    # Pattern and noise take half of the range each, so that the sum fits in a byte.
    images = _shifted_patterns()[shift, labels]
    images += noise >> 1
    return images, labels


def _shifted_patterns() -> UInt8Array:
    """Return the ten class patterns at each of 16 offsets, (16, 10, 28, 28), values below 128."""
    cells = IMAGE_SIDE // _BLOCK
    drawn = _draw_bytes(np.random.PCG64(_SEEDS["patterns"]), CLASSES * cells * cells) >> 1
    patterns = drawn.reshape(CLASSES, cells, cells).repeat(_BLOCK, axis=1).repeat(_BLOCK, axis=2)
    offsets = [(down, right) for down in range(_SHIFTS) for right in range(_SHIFTS)]
    return np.stack([np.roll(patterns, offset, axis=(1, 2)) for offset in offsets])


def _draw_bytes(bits: np.random.PCG64, count: int) -> UInt8Array:
    words = bits.random_raw(-(-count // 8))
    return np.asarray(words).astype("<u8").view(np.uint8)[:count]
