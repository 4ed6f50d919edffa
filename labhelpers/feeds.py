"""FashionMNIST from disk to device, four ways that give the same images in the same order.

- `article`: torchvision dataset, ToTensor, DataLoader without workers, pinned on CUDA.
- `workers`: the same with N worker processes.
- `host`: uint8 tensors in host memory, indexed by batch, pinned, scaled on the device.
- `resident`: uint8 tensors on the device, indexed and scaled there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from labhelpers.data import data_root, load_arrays
from labhelpers.inputs import InputError

Pair = tuple[Tensor, Tensor]


class Feed(Protocol):
    """One epoch of batches each time it is iterated: images (N, 1, 28, 28), labels (N,)."""

    def __iter__(self) -> Iterator[Pair]: ...


def count_steps(images: int, batch_size: int) -> int:
    """Count the steps of an epoch; the short last batch is one of them."""
    return -(-images // batch_size)


def last_batch_size(images: int, batch_size: int) -> int:
    """Return how many images the last batch of an epoch holds."""
    return images - (count_steps(images, batch_size) - 1) * batch_size


def epoch_order(images: int, seed: int) -> Tensor:
    """Return the order in which a shuffling DataLoader with this seed gives its images.

    DataLoader draws a base seed from the generator before its sampler draws the permutation;
    the same two draws in the same order give the same epoch (torch 2.9 to 2.14).
    """
    generator = torch.Generator().manual_seed(seed)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return torch.randperm(images, generator=generator)


def pixel_table(device: torch.device) -> Tensor:
    """Return the 256 float32 values that ToTensor makes of a byte, computed once on the CPU.

    A division on the device may round differently; looking values up is bit-equal.
    """
    return (torch.arange(256, dtype=torch.float32) / 255).to(device)


def make_feed(
    name: str, data_dir: str, *, batch_size: int, seed: int, device: torch.device,
    images: int, workers: int = 0, synthetic: bool = False, order: Tensor | None = None,
) -> Feed:  # fmt: skip
    """Return the named feed over the first `images` training images.

    `order` (`host` and `resident` only) says which of them to give, in place of the seed's.

    Raises:
        InputError: an unknown feed, or more images than the data set has.
    """
    if name in ("article", "workers"):
        count = workers if name == "workers" else 0
        data = _dataset(data_dir, images, synthetic)
        return _loader(data, batch_size, seed, device, count)
    if name in ("host", "resident"):
        pixels, labels = image_tensors(data_dir, images, synthetic)
        where = device if name == "resident" else torch.device("cpu")
        return TensorFeed(pixels.to(where), labels.to(where), batch_size, seed, device, order)
    raise InputError(f"feed: got {name!r}; must be 'article', 'workers', 'host' or 'resident'")


def _loader(
    data: Dataset[Pair], batch_size: int, seed: int, device: torch.device, workers: int
) -> DataLoader[Pair]:
    return DataLoader(
        data,
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(seed),
    )


class TensorFeed:
    """Index uint8 images by batch where they lie, and scale them on the device.

    Args:
        pixels: (M, 28, 28) uint8, on the host or on the device.
        labels: (M,) int64, beside the pixels.
        device: where the batches are wanted.
        order: (K,) int64, which images to give in which order; by default those of the seed.
    """

    def __init__(
        self, pixels: Tensor, labels: Tensor, batch_size: int, seed: int, device: torch.device,
        order: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._pixels, self._labels = pixels, labels
        self._batch_size = batch_size
        order = epoch_order(len(pixels), seed) if order is None else order
        self._order = order.to(pixels.device)
        self._device = device
        self._table = pixel_table(device)
        self._pin = device.type == "cuda" and pixels.device.type == "cpu"

    def __len__(self) -> int:
        return count_steps(len(self._order), self._batch_size)

    def __iter__(self) -> Iterator[Pair]:
        for chosen in self._order.split(self._batch_size):
            pixels, labels = self._moved(self._pixels[chosen]), self._moved(self._labels[chosen])
            yield self._table[pixels.int()].unsqueeze(1), labels

    def _moved(self, batch: Tensor) -> Tensor:
        return (batch.pin_memory() if self._pin else batch).to(self._device, non_blocking=True)


# What was read and verified once is kept: a sweep makes a feed for every trial.
@functools.lru_cache(maxsize=2)
def _dataset(data_dir: str, images: int, synthetic: bool) -> Dataset[Pair]:
    from torchvision.datasets import FashionMNIST
    from torchvision.transforms import ToTensor

    # Check the files first: torchvision would read a damaged one without a word.
    _check_count(images, len(load_arrays(data_dir, synthetic=synthetic)[1]))
    root = data_root(data_dir, synthetic)
    data = FashionMNIST(str(root), train=True, transform=ToTensor(), download=False)
    return data if images == len(data) else Subset(data, range(images))


@functools.lru_cache(maxsize=2)
def image_tensors(data_dir: str, images: int, synthetic: bool) -> Pair:
    """Return the first training images, (M, 28, 28) uint8, and their labels, (M,) int64.

    They are shared between calls: read only. InputError: the data set has fewer images.
    """
    pixels, labels = load_arrays(data_dir, synthetic=synthetic)
    _check_count(images, len(labels))
    return torch.tensor(pixels[:images]), torch.tensor(labels[:images], dtype=torch.int64)


def _check_count(images: int, available: int) -> None:
    if images > available:
        raise InputError(f"images: got {images:,}; the data set has {available:,}")
