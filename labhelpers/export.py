"""One JSON and one CSV out of a run directory, with a published JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict

from labhelpers.files import write_atomically
from labhelpers.inputs import InputError
from labhelpers.records import SCHEMA_VERSION, RunInfo, Trial
from labhelpers.store import RunDirectory
from labhelpers.sweep import trials_of

SCHEMA_FILE = Path(__file__).with_name("export.schema.json")

# The article's names for what it measured, and ours for the rest.
_SECTIONS = {
    "sweep": "sweep", "limits": "limits", "probe": "natural_probe", "residency": "residency",
    "cap": "controlled_oom", "remedy": "remedies", "finder": "finder", "ladder": "ladder",
    "ddp": "distributed",
}  # fmt: skip

_TABLE_COLUMNS = (
    "kind", "workload", "variant", "batch_size", "repeat", "position", "feed", "precision",
    "device", "rank", "world_size", "synthetic", "outcome", "images", "steps", "last_batch",
    "updates", "epoch_s", "images_per_s", "mean_step_s", "feed_wait_s", "first_step_peak_bytes",
    "peak_allocated_bytes", "peak_reserved_bytes", "alloc_retries", "final_loss", "error_class",
    "environment_id",
)  # fmt: skip


class Export(BaseModel):
    """Everything one run measured: the exported JSON's form."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    run: RunInfo
    sweep: list[Trial] = []
    other_sweeps: list[Trial] = []
    limits: list[Trial] = []
    natural_probe: list[Trial] = []
    residency: list[Trial] = []
    controlled_oom: list[Trial] = []
    remedies: list[Trial] = []
    finder: list[Trial] = []
    ladder: list[Trial] = []
    distributed: list[Trial] = []


def export_run(run: RunDirectory, folder: Path | None = None) -> tuple[Path, Path]:
    """Write `export.json` (everything) and `trials.csv` (one row a trial); return their paths.

    Raises:
        InputError: the folder cannot be written, or the run is damaged.
    """
    folder = folder or run.path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "export.json", exported(run).model_dump_json(exclude_none=True))
        write_atomically(folder / "trials.csv", trials_frame(run.trials()).to_csv(index=False))
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from None
    return folder / "export.json", folder / "trials.csv"


def exported(run: RunDirectory) -> Export:
    """Sort the trials of a run into the article's sections.

    `sweep` is the sweep that the run was last asked for; under other feeds or precisions, the
    same batch sizes are in `other_sweeps`.
    """
    sections: dict[str, Any] = {name: [] for name in (*_SECTIONS.values(), "other_sweeps")}
    own = {trial.key for trial in trials_of(run)}
    for trial in run.trials():
        other = trial.kind == "sweep" and trial.key not in own
        sections["other_sweeps" if other else _SECTIONS[trial.kind]].append(trial)
    return Export(run=run.info, **sections)


def trials_frame(trials: list[Trial]) -> pd.DataFrame:
    """Return one row a trial: what was measured, in seconds and bytes, and the derived rates.

    `batch_size` is that of one device, `global_batch_size` that of all ranks together.
    """
    rows = [{name: getattr(trial, name) for name in _TABLE_COLUMNS} for trial in trials]
    frame = pd.DataFrame(rows, columns=list(_TABLE_COLUMNS))
    place = _TABLE_COLUMNS.index("batch_size") + 1
    frame.insert(place, "global_batch_size", frame["batch_size"] * frame["world_size"])
    return frame


def export_schema() -> dict[str, Any]:
    """Return the JSON Schema of the exported file, as it stands in `export.schema.json`."""
    return Export.model_json_schema()


def write_schema() -> None:
    """Write the schema into the package; run it after a change of the records."""
    write_atomically(SCHEMA_FILE, json.dumps(export_schema(), indent=1))


if __name__ == "__main__":
    write_schema()
