"""What runs inside the worker for one rung of the ladder: prepare once, then epoch by epoch."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from labhelpers.capture import capture_for
from labhelpers.cpu_load import CpuLoad
from labhelpers.feeds import epoch_order, image_tensors, make_feed, pixel_table
from labhelpers.graphs import GraphedStep
from labhelpers.ladder_plan import SYNTHETIC, Setup
from labhelpers.records import LadderSpec, Trial
from labhelpers.training import (
    LOSS_IMAGES,
    Epoch,
    Step,
    make_step,
    read_precision,
    run_epoch,
    set_precision,
)
from labhelpers.trials import opening_facts, surroundings
from labhelpers.workloads import Batch, Loss, fashion_workload

_SLOT: dict[str, PreparedRung] = {}
"""The rung that was prepared last: its repeats follow one another and share it."""


def measure_rung(
    spec: dict[str, Any], setup: dict[str, Any], names: tuple[str, str | None],
    place: tuple[int, int, int],
) -> dict[str, Any]:  # fmt: skip
    """Train one epoch as a rung does and return the trial, JSON-able.

    `spec` is a resolved LadderSpec, `names` the rung and its base, `place` the batch size, the
    repeat and the position. Every epoch begins with the same weights and the same order.
    """
    asked, wanted = LadderSpec(**spec), Setup(**setup)
    rung = prepared(asked, wanted, place[0])
    gc.freeze()  # no search for garbage among torch's modules shall fall into a short epoch
    facts = opening_facts("ladder", asked, place, feed=wanted.feed, precision=wanted.precision)
    facts |= {"variant": names[0]} | surroundings(rung.capture, "before")
    load = CpuLoad()
    epoch = rung.epoch()
    facts |= asdict(epoch) | {
        "updates": epoch.steps,
        "peak_allocated_bytes": rung.peak_allocated_bytes,
        "peak_reserved_bytes": rung.peak_reserved_bytes,
        "details": {
            "setup": setup, "base": names[1], "prepare_s": rung.prepare_s,
            "cpu_of_others": load.share_of_others(),
        },
    }  # fmt: skip
    if wanted.feed == SYNTHETIC:
        facts["final_loss"] = None  # of one batch, learnt by heart
    facts |= surroundings(rung.capture, "after") | {"precision_after": read_precision()}
    return Trial(**facts).model_dump(mode="json", exclude_none=True)


def prepared(asked: LadderSpec, setup: Setup, batch_size: int) -> PreparedRung:
    """Return the rung of a setup at a batch size, built unless it was the last one used."""
    key = f"{asked!r} {setup!r} {batch_size}"
    if key not in _SLOT:
        forget()
        _SLOT[key] = PreparedRung(asked, setup, batch_size)
    return _SLOT[key]


def forget() -> None:
    """Let go of the prepared rung, its graphs and its compiled code."""
    _SLOT.clear()
    if "torch._dynamo" in sys.modules:
        # Otherwise compiled versions add up until the compiler gives up, without a word.
        torch._dynamo.reset()
    gc.unfreeze()  # compiled code is in cycles, and holds the images


def images_of(asked: LadderSpec, batch_size: int) -> int:
    """Return how many images an epoch of a resolved spec has at one batch size."""
    return min(asked.images or 0, (asked.max_steps or 0) * batch_size)


class PreparedRung:
    """One setup at one batch size: model, optimizer and step, compiled and captured.

    `prepare_s` is what that took; the peaks of memory are those of preparing and of every
    epoch so far, because a replayed graph uses memory that was taken when it was captured.
    """

    def __init__(self, asked: LadderSpec, setup: Setup, batch_size: int) -> None:
        started = time.perf_counter()
        self.capture = capture_for(torch.device(asked.device))
        self._asked, self._setup, self._batch_size = asked, setup, batch_size
        self._images = images_of(asked, batch_size)
        self.capture.empty_cache()
        self.capture.reset_peak()
        set_precision(setup.precision)
        torch.backends.cudnn.benchmark = setup.autotuned
        self._model, self._optimizer = _model_of(asked, setup, self.capture.device)
        self._initial = [parameter.detach().clone() for parameter in self._model.parameters()]
        enabled = setup.precision == "fp16"
        self._scaler = torch.amp.GradScaler(self.capture.device.type, enabled=enabled)
        self._initial_scale = self._scaler.state_dict()
        order = epoch_order(self._images, asked.seed).to(self.capture.device)
        self._batches = order.split(batch_size)
        self._step, self._feed = self._built()
        self.capture.synchronize()
        self.prepare_s = time.perf_counter() - started

    @property
    def peak_allocated_bytes(self) -> int | None:
        """The peak of memory in use since the rung began to be prepared."""
        return self.capture.peak_allocated_bytes()

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The peak of memory held by the allocator since then."""
        return self.capture.peak_reserved_bytes()

    def epoch(self) -> Epoch:
        """Train one timed epoch from the initial weights."""
        self._restore()
        feed = self._feed()
        self.capture.prepare(len(self._batches))
        return run_epoch(self._step, feed, self.capture, batch_size=self._batch_size)

    def _built(self) -> tuple[Step, Callable[[], Iterable[Batch]]]:
        """Return the warm step, and what gives an epoch's batches."""
        if self._setup.graph or self._setup.compiled:
            return self._indexed()
        step = self._make_step(self._model, fashion_workload().loss)
        for images, labels in self._made_up():
            step(images, labels)
        return step, self._named_feed()

    def _indexed(self) -> tuple[Step, Callable[[], Iterable[Batch]]]:
        """Return a step that picks its images itself, compiled or captured as asked."""
        device = self.capture.device
        pixels, labels = image_tensors(
            self._asked.data_dir, self._images, self._asked.synthetic
        )  # fmt: skip
        loss_of = picked_loss(self._model, pixels.to(device), labels.to(device))
        if self._setup.compiled:
            loss_of = torch.compile(loss_of, dynamic=False, fullgraph=True)
        step = self._make_step(loss_of, lambda loss, _: loss)
        feed = [(chosen, chosen) for chosen in self._batches]
        if self._setup.graph:
            kept = -(-LOSS_IMAGES // self._batch_size)
            return GraphedStep(step, self._batches, kept), lambda: feed
        for length in lengths_of(self._batches):
            step(self._batches[0][:length], self._batches[0][:length])
        return step, lambda: feed

    def _make_step(self, model: Callable[..., Any], loss: Loss) -> Step:
        device = self.capture.device
        return make_step(model, self._optimizer, loss, self._setup.precision, device, self._scaler)

    def _named_feed(self) -> Callable[[], Iterable[Batch]]:
        asked, setup = self._asked, self._setup
        if setup.feed == SYNTHETIC:
            batches = {len(images): (images, labels) for images, labels in self._made_up()}
            epoch = [batches[len(chosen)] for chosen in self._batches]
            return lambda: epoch

        def made() -> Iterable[Batch]:
            return make_feed(
                setup.feed, asked.data_dir, batch_size=self._batch_size, seed=asked.seed,
                device=self.capture.device, images=self._images, workers=setup.workers,
                synthetic=asked.synthetic,
            )  # fmt: skip

        # A DataLoader goes on to the next order in its next epoch; tensors have one order.
        feed = made() if setup.feed in ("host", "resident") else None
        return made if feed is None else lambda: feed

    def _made_up(self) -> list[Batch]:
        """Return one made-up batch of each length that the epoch has."""
        make_batch = fashion_workload().make_batch
        lengths = lengths_of(self._batches)
        return [make_batch(length, self.capture.device) for length in lengths]

    def _restore(self) -> None:
        """Put weights, optimizer state and loss scale back, in place: graphs hold their places."""
        with torch.no_grad():
            for parameter, initial in zip(self._model.parameters(), self._initial, strict=True):
                parameter.copy_(initial)
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        self._scaler.load_state_dict(self._initial_scale)
        if isinstance(self._step, GraphedStep):
            self._step.restart()
        self.capture.synchronize()


def picked_loss(model: nn.Module, pixels: Tensor, labels: Tensor) -> Callable[[Tensor], Tensor]:
    """Return `loss_of(chosen)`: pick images by index, scale them, forward and loss.

    Args:
        pixels: (M, 28, 28) uint8, on the device.
        labels: (M,) int64, on the device.
    """
    table = pixel_table(pixels.device)

    def loss_of(chosen: Tensor) -> Tensor:
        images = table[pixels[chosen].int()].unsqueeze(1)
        return nn.functional.cross_entropy(model(images), labels[chosen])

    return loss_of


def _model_of(
    asked: LadderSpec, setup: Setup, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model and its optimizer; equal seeds give equal weights."""
    torch.manual_seed(asked.seed)
    model = fashion_workload().make_model().to(device).train()
    if setup.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    options: dict[str, Any] = {"fused": True} if setup.fused_adam else {}
    if setup.graph:
        options["capturable"] = True  # torch refuses to capture an optimizer without it
    return model, torch.optim.Adam(model.parameters(), lr=asked.learning_rate, **options)


def lengths_of(batches: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the different lengths of an epoch's batches, in the order they occur."""
    return tuple(dict.fromkeys(len(batch) for batch in batches))
