"""One contender of the finders' benchmark in a fresh process; prints one line of JSON.

    python benchmarks/finder_contenders.py NAME --model REFERENCE --cap-bytes N [...]

Every contender trains the same model in the same way: FP32 without TF32, Adam, cross-entropy,
made-up batches that are born on the device. Its clock starts when process, device, libraries
and model stand ready.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

STEPS = 5
FIRST_OF_ACCELERATE = 512
SAMPLES = 100_000


def ours(asked: argparse.Namespace) -> dict[str, Any]:
    """Search as the command line does; torch is loaded by the worker alone."""
    from labhelpers.finder import search_batch_size

    report = search_batch_size(
        asked.model, input_shape=asked.input, classes=asked.classes, device=asked.device,
        limit_bytes=asked.cap_bytes, dataset_size=SAMPLES,
    )  # fmt: skip
    return {
        "batch_size": report.largest, "with_headroom": report.with_headroom,
        "seconds": report.search_s, "start_s": report.start_s, "ooms": report.oom_count,
        "tries": len(report.result.probes), "closed": report.result.closed,
        "proofs": len(report.trials) - len(report.result.probes),
        "monotonic": report.monotonic,
        "sizes": [_tried(probe) for probe in report.to_dict()["probes"]],
    }  # fmt: skip


def _tried(probe: dict[str, Any]) -> str:
    """Return the size of a probe, with a mark if it did not fit."""
    return f"{probe['batch_size']}{'' if probe['outcome'] == 'ok' else '!'}"


class Training:
    """The plain training that all contenders share, under the cap from the start."""

    def __init__(self, asked: argparse.Namespace) -> None:
        import torch

        from labhelpers.finder_room import memory_limit, start_libraries
        from labhelpers.training import set_precision
        from labhelpers.workloads import workload_from

        self.device = torch.device(asked.device)
        self.workload = workload_from(asked.model, input_shape=asked.input, classes=asked.classes)
        set_precision("fp32")
        if self.device.type == "cuda" and asked.contender != "fits":
            start_libraries(self.device)
        # For the life of this process: it ends with the contender.
        self.limit = memory_limit(self.device, asked.cap_bytes)
        self.limit.__enter__()

    def model(self) -> Any:
        """Build the model on the device, in training mode."""
        import torch

        torch.manual_seed(42)
        return self.workload.make_model().to(self.device).train()

    def steps(self, batch_size: int, model: Any) -> None:
        """Train a few whole steps on one batch."""
        from labhelpers.training import make_step

        optimizer = self.workload.make_optimizer(model.parameters(), 1e-3)
        step = make_step(model, optimizer, self.workload.loss, "fp32", self.device)
        batch = self.workload.make_batch(batch_size, self.device)
        for _ in range(STEPS):
            float(step(*batch).detach())


def fits(asked: argparse.Namespace) -> dict[str, Any]:
    """Train at one size and say whether it ran: the truth."""
    from labhelpers.oom import attempt

    training = Training(asked)
    model = training.model()
    return {"batch_size": asked.size, "ran": attempt(training.steps, asked.size, model).ok}


def accelerate(asked: argparse.Namespace) -> dict[str, Any]:
    """Let accelerate shrink the batch until the function that it is given runs."""
    from accelerate.utils import find_executable_batch_size

    training, tried = Training(asked), []

    @find_executable_batch_size(starting_batch_size=FIRST_OF_ACCELERATE)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        training.steps(batch_size, training.model())
        return batch_size

    started = time.perf_counter()
    found = train()
    seconds = time.perf_counter() - started
    return {
        "batch_size": found, "seconds": seconds, "tries": len(tried), "ooms": len(tried) - 1,
        "sizes": tried,
    }  # fmt: skip


def lightning(mode: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """Return the contender that lets Lightning's tuner scale the batch size."""

    def run(asked: argparse.Namespace) -> dict[str, Any]:
        return _tuned(asked, mode)

    return run


def _tuned(asked: argparse.Namespace, mode: str) -> dict[str, Any]:
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    training = Training(asked)
    module = _module(training)
    trainer = pl.Trainer(
        accelerator="gpu" if training.device.type == "cuda" else "cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        max_epochs=1, default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    started = time.perf_counter()
    found = Tuner(trainer).scale_batch_size(module, mode=mode)
    seconds = time.perf_counter() - started
    sizes = [size for size, _ in module.tried]
    return {
        "batch_size": found, "seconds": seconds, "tries": len(sizes),
        "ooms": sum(not finished for _, finished in module.tried), "sizes": sizes,
    }  # fmt: skip


def _module(training: Training) -> Any:
    """Wrap the workload in a LightningModule that notes what is tried."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    workload, device = training.workload, training.device

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.net = 2, training.model()
            self.tried: list[list[Any]] = []

        def train_dataloader(self) -> Any:
            return DataLoader(
                range(SAMPLES), self.batch_size,
                collate_fn=lambda indices: workload.make_batch(len(indices), device),
            )  # fmt: skip

        def on_train_start(self) -> None:
            self.tried.append([self.batch_size, False])

        def training_step(self, batch: Any, _: int) -> Any:
            return workload.loss(self.net(batch[0]), batch[1])

        def on_train_end(self) -> None:
            self.tried[-1][1] = True

        def configure_optimizers(self) -> Any:
            return workload.make_optimizer(self.net.parameters(), 1e-3)

    return Module()


CONTENDERS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "ours": ours,
    "fits": fits,
    "accelerate": accelerate,
    "lightning power": lightning("power"),
    "lightning binsearch": lightning("binsearch"),
}


def main() -> None:
    """Run one contender and print what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--input", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--classes", type=int)
    parser.add_argument("--cap-bytes", type=int, required=True)
    parser.add_argument("--size", type=int)
    parser.add_argument("--device", default="cuda:0")
    asked = parser.parse_args()
    print(json.dumps(CONTENDERS[asked.contender](asked)), flush=True)


if __name__ == "__main__":
    main()
