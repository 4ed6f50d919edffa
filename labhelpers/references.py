"""Published and measured figures that a reader's own run is set beside."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from labhelpers.formats import mib, ms
from labhelpers.records import Trial
from labhelpers.store import RUN_FILE, RunDirectory, find_runs, open_run
from labhelpers.sweep import trials_of
from labhelpers.tables import SWEEP_COLUMNS, sweep_table, whole_passes

PROJECT = Path(__file__).resolve().parent.parent
ARTICLE_FILE = PROJECT / "data" / "reference" / "rtx5070ti_article.json"
REFERENCE_RUNS = PROJECT / "results" / "reference"


@dataclass(frozen=True)
class Curve:
    """A sweep to draw or to quote: its name, its table, and whether it is a reference.

    `passes` are images/s by batch size of each repeat that measured every size; the article's
    were not printed.
    """

    label: str
    table: pd.DataFrame
    reference: bool
    images: int
    device: str
    passes: tuple[dict[int, float], ...] = field(default=(), kw_only=True)


def article_curve() -> Curve:
    """Return the first article's figures (RTX 5070 Ti, WSL2), as printed there."""
    published = json.loads(ARTICLE_FILE.read_text(encoding="utf-8"))
    images = published["protocol"]["images"]
    rows = [_article_row(row, images) for row in published["sweep"]]
    table = pd.DataFrame(rows, columns=list(SWEEP_COLUMNS))
    table["share_of_best"] = table["images_per_s"] / table["images_per_s"].max()
    return Curve("RTX 5070 Ti (article)", table, True, images, published["environment"]["gpu"])


def _article_row(row: dict[str, float], images: int) -> dict[str, float | str | None]:
    size, steps = int(row["batch_size"]), int(row["steps"])
    # From the speed, not from the rounded epoch: so it gives the step times printed there.
    step_ms = ms(images / row["images_per_s"] / steps)
    return {
        "batch_size": size, "images_per_s": row["images_per_s"], "epoch_s": row["epoch_s"],
        "step_ms": step_ms, "allocated_mib": row["peak_allocated_mib"],
        "steps": steps, "last_batch": images - (steps - 1) * size, "updates": steps,
        "repeats": 3, "flags": "",
    }  # fmt: skip


def article() -> dict[str, object]:
    """Return the article's published figures as they stand in `data/reference`."""
    return dict(json.loads(ARTICLE_FILE.read_text(encoding="utf-8")))


def reference_runs() -> dict[str, RunDirectory]:
    """Return the committed runs by name, such as `h200`."""
    found = sorted(REFERENCE_RUNS.glob(f"*/{RUN_FILE}"))
    return {file.parent.name: open_run(file.parent) for file in found}


def newest_run(results_dir: str | Path) -> RunDirectory | None:
    """Return the reader's newest own run; None if there is none yet."""
    runs = find_runs(results_dir)
    return open_run(runs[-1]) if runs else None


def curve_of(
    run: RunDirectory, *, reference: bool = False, trials: list[Trial] | None = None
) -> Curve | None:
    """Return the sweep of a run as a curve; None if it holds no measured sweep.

    `reference` says how it is drawn (dashed, beside another); the label says whose it is.
    `trials` may be others than those of the run's sweep.
    """
    trials = trials_of(run) if trials is None else trials
    if not any(trial.images_per_s for trial in trials):
        return None
    device = str(run.environment().get("device_name", "unknown device"))
    many = trials[0].world_size
    if many > 1:
        on_cpu = trials[0].device == "cpu"
        device = f"{device}, {many} processes" if on_cpu else f"{many} × {device}"
    label = f"{device} ({'committed run' if is_committed(run) else 'this machine'})"
    label += "" if trials[0].device != "cpu" else ", CPU"
    label += ", synthetic images" if trials[0].synthetic else ""
    images = next(trial.images for trial in trials if trial.images)
    table, passes = sweep_table(trials), whole_passes(trials)
    return Curve(label, table, reference, images, device, passes=passes)


def is_committed(run: RunDirectory) -> bool:
    """Tell whether a run is one of those that come with the project."""
    return run.path.resolve().is_relative_to(REFERENCE_RUNS)


def reference_curves(leave_out: Path | None = None) -> list[Curve]:
    """Return the article's curve and those of the committed runs (except one's own)."""
    curves = [article_curve()]
    for run in reference_runs().values():
        own = leave_out is not None and run.path.resolve() == leave_out.resolve()
        curve = None if own else curve_of(run, reference=True)
        curves += [curve] if curve else []
    return curves


def total_memory_mib(trials: list[Trial]) -> float | None:
    """Return the memory of the device the trials ran on, in MiB; None where unknown."""
    known = [t.memory_before.total_bytes for t in trials if t.memory_before]
    return mib(known[0]) if known else None
