"""Split every batch of all ranks among them, so that each image is seen once an epoch.

torch's DistributedSampler repeats or drops images until the ranks have equally many. Here the
batches are those that one process with the whole batch would see, in the same order; the last
one is short, and its shares may be unequal or empty.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from labhelpers.accumulation import micro_batches
from labhelpers.distributed import Team
from labhelpers.distributed_records import DistributedSpec
from labhelpers.feeds import epoch_order, make_feed
from labhelpers.inputs import InputError
from labhelpers.workloads import Batch, Workload, batch_of

Items = TypeVar("Items", Tensor, Sequence[int])
Count = tuple[int, int]


@dataclass(frozen=True)
class Shared:
    """A rank's part of an epoch: its batches, and how many images each step holds.

    `counts` has (own, all ranks') for each step; where own is 0, the feed gives no batch.
    `order` is equal on ranks that share the same batches.
    """

    feed: Iterable[Batch]
    counts: tuple[Count, ...]
    synthetic: bool = False
    order: int = 0


def share_of(items: Items, rank: int, world_size: int) -> Items:
    """Return a rank's part of a batch; the first ranks take one more where it does not divide."""
    base, rest = divmod(len(items), world_size)
    start = rank * base + min(rank, rest)
    return items[start : start + base + (rank < rest)]  # type: ignore[return-value]


def shared_feed(spec: DistributedSpec, workload: Workload, batch_size: int, team: Team) -> Shared:
    """Return a rank's part of an epoch in which each rank's full batch has `batch_size` images.

    FashionMNIST comes through the feed that was asked for, a workload's own data through its
    loader; a workload without data trains on one made-up batch again and again.

    Raises:
        InputError: a loader that cannot be split, an unknown feed, or too many images.
    """
    if workload.make_loader is not None:
        return _split_loader(workload.make_loader(batch_size * team.world_size, spec.seed), team)
    if spec.workload != "fashion_cnn":
        return _fixed_batch(workload, batch_size, spec.images or 0, team)
    if spec.feed in ("host", "resident"):
        return _split_tensors(spec, batch_size, team)
    return _split_loader(_fashion(spec, batch_size * team.world_size, team), team)


def _fashion(
    spec: DistributedSpec, batch_size: int, team: Team, order: Tensor | None = None
) -> Any:
    return make_feed(
        spec.feed, spec.data_dir, batch_size=batch_size, seed=spec.seed,
        device=torch.device(team.device), images=spec.images or 0, workers=spec.workers,
        synthetic=spec.synthetic, order=order,
    )  # fmt: skip


def _split_tensors(spec: DistributedSpec, batch_size: int, team: Team) -> Shared:
    whole = epoch_order(spec.images or 0, spec.seed).split(batch_size * team.world_size)
    own = [share_of(batch, team.rank, team.world_size) for batch in whole]
    counts = tuple((len(mine), len(all_)) for mine, all_ in zip(own, whole, strict=True))
    # Only the last share is shorter than the rest, so the feed cuts the order at these places.
    return Shared(_fashion(spec, batch_size, team, torch.cat(own)), counts, spec.synthetic)


def _split_loader(loader: Any, team: Team) -> Shared:
    """Split a DataLoader over the batches of all ranks into this rank's."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        raise InputError(
            f"workload: its loader is a {type(loader).__name__}; under torchrun it must be a "
            "DataLoader over a data set with indices, so that each rank can take its share"
        )
    whole = _epoch_of(loader)
    own = [list(share_of(batch, team.rank, team.world_size)) for batch in whole]
    counts = tuple((len(mine), len(all_)) for mine, all_ in zip(own, whole, strict=True))
    feed = DataLoader(
        loader.dataset,
        batch_sampler=[mine for mine in own if mine],
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )
    return Shared(feed, counts, order=zlib.crc32(repr(whole).encode()))


def _epoch_of(loader: DataLoader[Any]) -> list[list[int]]:
    """Draw the batches of indices that the loader's next epoch would have.

    A DataLoader draws a seed for its workers first; without that draw the order is another.
    """
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    return [list(batch) for batch in loader.batch_sampler or ()]


def _fixed_batch(workload: Workload, batch_size: int, images: int, team: Team) -> Shared:
    whole = batch_size * team.world_size
    sizes = [min(whole, images - start) for start in range(0, images, whole)]
    own = [len(share_of(range(size), team.rank, team.world_size)) for size in sizes]
    feed = FixedBatch(batch_of(workload, batch_size, torch.device(team.device)), tuple(own))
    return Shared(feed, tuple(zip(own, sizes, strict=True)), synthetic=True)


@dataclass(frozen=True)
class FixedBatch:
    """The same batch on the device at every step, cut where a step holds fewer samples."""

    batch: Batch
    sizes: tuple[int, ...]

    def __iter__(self) -> Iterator[Batch]:
        for size in self.sizes:
            if size:
                yield micro_batches(*self.batch, size)[0]
