"""The second article's experiment, step by step as notebook 04 runs it."""

from __future__ import annotations

import threading
from typing import Any

from labhelpers.finder import run_finder
from labhelpers.finder_narrative import many
from labhelpers.finder_report import BatchSizeReport
from labhelpers.finder_search import FinderProgress, Report
from labhelpers.finder_trials import outcome_of, taken_bytes, trial_of
from labhelpers.formats import bytes_of_mib, show_bytes, show_rate
from labhelpers.records import FinderSpec, Trial
from labhelpers.store import RunDirectory
from labhelpers.sweep import start_device
from labhelpers.worker import Worker

AUTO = "auto"
TRAINING_MARK = ", training with {size:,}"

# What suits a device where nothing was asked: the article's numbers need a GPU.
_GPU: dict[str, Any] = {
    "workload": "torchvision.models:resnet50", "input_shape": (3, 224, 224), "classes": 1000,
    "dataset_size": 1000, "card_mib": (8192, 11264),
}  # fmt: skip
_CPU: dict[str, Any] = {
    "workload": "torchvision.models:mobilenet_v3_small", "input_shape": (3, 64, 64),
    "classes": 10, "dataset_size": 128, "card_mib": (96, 132),
}  # fmt: skip

ARTICLE_CARDS = (
    {"card": "RTX 2080, 8 GB (article)", "batch_size": 8, "utilisation": 0.668},
    {"card": "RTX 2080 Ti, 11 GB (article)", "batch_size": 16, "utilisation": 0.903},
)
"""What the second article printed."""


def settled(spec: FinderSpec, worker: Worker) -> FinderSpec:
    """Fill in what was left open, with what suits the device; starts the worker and the device."""
    device = start_device(spec, worker, None)["device"]
    suits = _CPU if device == "cpu" else _GPU
    open_fields = {
        name: value for name, value in suits.items() if getattr(spec, name) in (None, AUTO)
    }
    if spec.quick and "card_mib" in open_fields:
        open_fields["card_mib"] = suits["card_mib"][:1]
    return spec.model_copy(update={**open_fields, "device": device})


def find_on_card(
    spec: FinderSpec, card_mib: int, run: RunDirectory, worker: Worker, on_progress: Report,
    **changes: Any,
) -> BatchSizeReport:  # fmt: skip
    """Search on an emulated card of so many MiB; `changes` are fields of the spec."""
    asked = spec.model_copy(update={"limit_bytes": bytes_of_mib(card_mib), **changes})
    return run_finder(asked, run, worker=worker, on_progress=on_progress)


def find_on_cards(
    spec: FinderSpec, run: RunDirectory, worker: Worker, on_progress: Report
) -> list[BatchSizeReport]:
    """Search on each card twice: doubling as the article did, and exactly."""
    ways: tuple[dict[str, Any], ...] = ({"strategy": "doubling", "headroom": 0.0}, {})
    return [
        find_on_card(spec, card, run, worker, on_progress, **way)
        for card in spec.card_mib or ()
        for way in ways
    ]


def train_with(
    spec: FinderSpec, report: BatchSizeReport, run: RunDirectory, worker: Worker,
    stop: threading.Event | None = None,
) -> Trial:  # fmt: skip
    """Train one epoch with the size found, under the limits of its search; keep the trial.

    What the run holds already is not trained again.
    """
    from labhelpers.finder_training import measure_training

    size = report.with_headroom or report.largest
    about = {
        "batch_size": size, "workload": report.workload, "precision": spec.precision,
        "variant": report.variant + TRAINING_MARK.format(size=size), "device": spec.device,
        "synthetic": True,
    }  # fmt: skip
    for trial in run.trials("finder"):
        if all(getattr(trial, name) == value for name, value in about.items()):
            return trial
    answer = worker.run(
        measure_training, spec.model_dump(mode="json"), size, report.terms.cap_bytes,
        timeout_s=spec.trial_timeout_s + spec.time_budget_s, stop=stop,
    )  # fmt: skip
    facts = answer.value if answer.outcome == "ok" else {
        "outcome": answer.outcome, "error_class": answer.error_class,
        "error_text": answer.error_text,
    }  # fmt: skip
    trial = trial_of({**facts, "wall_s": answer.wall_s}, about, report.terms, "training")
    with run.writing():
        run.append(trial)
    return trial


class ProbeLine:
    """Show the probes of a search in one line that changes, in a notebook."""

    def __init__(self) -> None:
        from labhelpers.notebooks import ChangingLine

        self._line = ChangingLine("starting …")
        self._done = 0

    def __call__(self, progress: FinderProgress) -> None:
        self._done += progress.trial is not None
        self._line.change(f"{many(self._done, 'probe')} done; {self._now(progress)}")

    def _now(self, progress: FinderProgress) -> str:
        trial, size = progress.trial, f"batch {progress.batch_size:,}"
        if trial is None:
            return f"{size} …"
        if outcome_of(trial) != "ok":
            return f"{size} does not fit ({outcome_of(trial)})"
        return f"{size}: {show_bytes(taken_bytes(trial))}, {show_rate(trial.images_per_s)}"
