"""What does measuring cost? A bare hand-written loop and ours, alternately, in one process.

Prints, for each feed and batch size, the median images/s of both and their ratio (1.00: free),
and exits with 1 if a ratio is below 0.98.

    python benchmarks/harness_tax.py [--feeds article,workers,host,resident] [--batch-sizes 32]
        [--device cuda:0] [--repeats 5] [--images 60000] [--workers 4]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

from labhelpers.capture import capture_for
from labhelpers.environment import resolve_device
from labhelpers.feeds import count_steps, make_feed
from labhelpers.training import make_step, run_epoch, set_precision
from labhelpers.workloads import fashion_cnn, fashion_workload

SEED = 42
LEAST_RATIO = 0.98
Pair = tuple[Tensor, Tensor]


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bare_loader(
    data: Dataset[Pair], batch_size: int, device: torch.device, workers: int
) -> Iterable[Pair]:
    """Return the article's DataLoader."""
    return DataLoader(
        data, batch_size, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(SEED),
    )  # fmt: skip


def bare_tensors(
    data: FashionMNIST, images: int, batch_size: int, device: torch.device, resident: bool
) -> Iterator[Pair]:
    """Index bytes by the batch, on the host or on the device, and scale them there."""
    where = device if resident else torch.device("cpu")
    pixels, labels = data.data[:images].to(where), data.targets[:images].to(where)
    table = (torch.arange(256) / 255).to(device)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(SEED)).to(where)
    pin = device.type == "cuda" and not resident
    synchronize(device)

    def batches() -> Iterator[Pair]:
        for start in range(0, images, batch_size):
            chosen = order[start : start + batch_size]
            some, names = pixels[chosen], labels[chosen]
            if pin:
                some, names = some.pin_memory(), names.pin_memory()
            some = some.to(device, non_blocking=True)
            yield table[some.int()].unsqueeze(1), names.to(device, non_blocking=True)

    return batches()


def bare_images_per_s(batches: Iterable[Pair], batch_size: int, device: torch.device) -> float:
    """Time an epoch with nothing around it."""
    torch.manual_seed(SEED)
    model = fashion_cnn().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_function = nn.functional.cross_entropy
    images = torch.rand(batch_size, 1, 28, 28, device=device)
    labels = torch.randint(10, (batch_size,), device=device)
    loss_function(model(images), labels).backward()
    optimizer.step()
    synchronize(device)
    seen = 0
    started = time.perf_counter()
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_function(model(images), labels)
        loss.backward()
        optimizer.step()
        seen += len(labels)
    synchronize(device)
    return seen / (time.perf_counter() - started)


def our_images_per_s(
    feed: Iterable[Pair], images: int, batch_size: int, device: torch.device
) -> float:
    """Time the same epoch as the sweep does: step marks, feed waits, peaks."""
    torch.manual_seed(SEED)
    workload, capture = fashion_workload(), capture_for(device)
    model = workload.make_model().to(device)
    optimizer = workload.make_optimizer(model.parameters(), 1e-3)
    step = make_step(model, optimizer, workload.loss, "fp32", device)
    step(*workload.make_batch(batch_size, device))
    capture.prepare(count_steps(images, batch_size))
    capture.reset_peak()
    epoch = run_epoch(step, feed, capture, batch_size=batch_size)
    assert len(epoch.step_times_s) == epoch.steps
    return epoch.images / epoch.epoch_s


def one_rate(
    side: str, feed: str, batch_size: int, asked: argparse.Namespace, whole: FashionMNIST,
    device: torch.device,
) -> float:  # fmt: skip
    """Return the images/s of one epoch of one side."""
    workers = asked.workers if feed == "workers" else 0
    if side == "ours":
        ours = make_feed(
            feed, asked.data_dir, batch_size=batch_size, seed=SEED, device=device,
            images=asked.images, workers=workers,
        )  # fmt: skip
        return our_images_per_s(ours, asked.images, batch_size, device)
    if feed in ("article", "workers"):
        data = whole if asked.images == len(whole) else Subset(whole, range(asked.images))
        return bare_images_per_s(bare_loader(data, batch_size, device, workers), batch_size, device)
    batches = bare_tensors(whole, asked.images, batch_size, device, feed == "resident")
    return bare_images_per_s(batches, batch_size, device)


def main() -> int:
    """Measure both sides alternately and print the ratios; return 1 if one is too low."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--feeds", default="article")
    parser.add_argument("--batch-sizes", default="32,2048")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--data-dir", default="data")
    asked = parser.parse_args()
    device = torch.device(resolve_device(asked.device))
    set_precision("fp32")
    whole = FashionMNIST(asked.data_dir, train=True, transform=ToTensor())
    print(f"harness tax on {device}, {asked.images:,} images, medians of {asked.repeats}")
    lowest = 1.0
    for feed in asked.feeds.split(","):
        for batch_size in map(int, asked.batch_sizes.split(",")):
            rates: dict[str, list[float]] = {"bare": [], "ours": []}
            for number in range(asked.repeats):
                for side in ("bare", "ours") if number % 2 == 0 else ("ours", "bare"):
                    rates[side].append(one_rate(side, feed, batch_size, asked, whole, device))
            bare, ours = statistics.median(rates["bare"]), statistics.median(rates["ours"])
            lowest = min(lowest, ours / bare)
            print(
                f"{feed:<8} batch {batch_size:>5,}: bare {bare:>9,.0f} images/s, "
                f"ours {ours:>9,.0f} images/s, ratio {ours / bare:.3f}"
            )
    return int(lowest < LEAST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
