"""What does measuring cost? The article's bare loop and ours, alternately, in one process.

Prints, for each batch size, the median images/s of both and their ratio (1.00: free).

    python benchmarks/harness_tax.py [--device cuda:0] [--repeats 5] [--images 60000]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

from labhelpers.capture import capture_for
from labhelpers.environment import resolve_device
from labhelpers.feeds import count_steps, make_feed
from labhelpers.training import make_step, run_epoch, set_precision
from labhelpers.workloads import fashion_cnn, fashion_workload

BATCH_SIZES = (32, 2048)
SEED = 42


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bare_images_per_s(data: FashionMNIST, batch_size: int, device: torch.device) -> float:
    """Time the article's loop with nothing around it."""
    torch.manual_seed(SEED)
    model = fashion_cnn().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_function = nn.functional.cross_entropy
    generator = torch.Generator().manual_seed(SEED)
    loader = DataLoader(
        data, batch_size, shuffle=True, pin_memory=device.type == "cuda", generator=generator
    )
    images = torch.rand(batch_size, 1, 28, 28, device=device)
    labels = torch.randint(10, (batch_size,), device=device)
    loss_function(model(images), labels).backward()
    optimizer.step()
    synchronize(device)
    seen = 0
    started = time.perf_counter()
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_function(model(images), labels)
        loss.backward()
        optimizer.step()
        seen += len(labels)
    synchronize(device)
    return seen / (time.perf_counter() - started)


def our_images_per_s(images: int, data_dir: str, batch_size: int, device: torch.device) -> float:
    """Time the same epoch as the sweep does: step marks, feed waits, peaks."""
    torch.manual_seed(SEED)
    workload, capture = fashion_workload(), capture_for(device)
    model = workload.make_model().to(device)
    optimizer = workload.make_optimizer(model.parameters(), 1e-3)
    step = make_step(model, optimizer, workload.loss, "fp32", device)
    feed = make_feed(
        "article", data_dir, batch_size=batch_size, seed=SEED, device=device, images=images
    )
    step(*workload.make_batch(batch_size, device))
    capture.prepare(count_steps(images, batch_size))
    capture.reset_peak()
    epoch = run_epoch(step, feed, capture, batch_size=batch_size)
    assert len(epoch.step_times_s) == epoch.steps
    return epoch.images / epoch.epoch_s


def main() -> None:
    """Measure both sides alternately and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--data-dir", default="data")
    asked = parser.parse_args()
    device = torch.device(resolve_device(asked.device))
    set_precision("fp32")
    whole = FashionMNIST(asked.data_dir, train=True, transform=ToTensor())
    data = whole if asked.images == len(whole) else Subset(whole, range(asked.images))
    print(f"harness tax on {device}, {asked.images:,} images, medians of {asked.repeats}")
    for batch_size in BATCH_SIZES:
        rates: dict[str, list[float]] = {"bare": [], "ours": []}
        for number in range(asked.repeats):
            for side in ("bare", "ours") if number % 2 == 0 else ("ours", "bare"):
                rate = (
                    bare_images_per_s(data, batch_size, device)
                    if side == "bare"
                    else our_images_per_s(asked.images, asked.data_dir, batch_size, device)
                )
                rates[side].append(rate)
        bare, ours = statistics.median(rates["bare"]), statistics.median(rates["ours"])
        print(
            f"batch {batch_size:>5,}: bare {bare:>9,.0f} images/s, "
            f"ours {ours:>9,.0f} images/s, ratio {ours / bare:.3f}"
        )


if __name__ == "__main__":
    main()
