"""Probes as curves: the article's, the H200's and one's own, each with its verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from labhelpers.formats import bytes_of_mib, mib
from labhelpers.oversubscription import MemoryJudgement, judge_memory
from labhelpers.platforms import Platform
from labhelpers.probe import platform_from, probe_trials_of
from labhelpers.records import Trial
from labhelpers.references import PROJECT, Curve, article, reference_runs
from labhelpers.store import RunDirectory
from labhelpers.tables import flags

H200_FILE = PROJECT / "data" / "reference" / "h200_baseline.json"
_COLUMNS = (
    "batch_size", "images_per_s", "share_of_best", "allocated_mib", "reserved_mib", "card_share",
    "kib_per_image", "outcome", "verdict", "causes", "flags",
)  # fmt: skip


@dataclass(frozen=True)
class ProbeCurve(Curve):
    """A probe to draw or to quote; `table` has one row per size, its first run.

    `images` is the largest batch. `rows` are all runs as they were measured or published, and
    `judgements` stand beside them, one each. `total_bytes` is what the card holds; on the CPU,
    the machine.
    """

    rows: tuple[Any, ...]
    judgements: tuple[MemoryJudgement, ...]
    total_bytes: int
    platform: Platform

    @property
    def on_cpu(self) -> bool:
        """Tell whether the CPU was measured: then there is no card to run past."""
        return bool(self.rows) and _get(self.rows[0], "device") == "cpu"

    def judged_rows(self) -> list[tuple[Any, MemoryJudgement]]:
        """Return each run with its judgement, in the order of time."""
        return list(zip(self.rows, self.judgements, strict=True))


def article_probe() -> ProbeCurve:
    """Return the first article's probe (RTX 5070 Ti, WSL2), as printed there."""
    published: dict[str, Any] = article()
    machine = published["environment"]
    return _curve(
        "RTX 5070 Ti, WSL2 (article)", machine["gpu"],
        [_published_row(row) for row in published["natural_probe"]["rows"]],
        bytes_of_mib(machine["mem_get_info_total_mib"]) or 0, "wsl2", reference=True,
    )  # fmt: skip


def h200_probe() -> ProbeCurve:
    """Return a bare loop's probe of an H200 on native Linux, as recorded."""
    recorded = json.loads(H200_FILE.read_text(encoding="utf-8"))
    rows = [_published_row(row) for row in recorded["natural_probe"]]
    total_bytes = int(recorded["mem_get_info_total_bytes"])
    return _curve(
        "H200, native Linux (bare loop)", "NVIDIA H200", rows, total_bytes, "linux", reference=True
    )


def probe_of(run: RunDirectory, *, reference: bool = False) -> ProbeCurve | None:
    """Return the probe of a run as a curve; None if it holds none that was measured."""
    trials = probe_trials_of(run)
    if not any(trial.outcome == "ok" for trial in trials):
        return None
    known = run.info.environments
    facts = known.get(trials[0].environment_id or "", run.environment())
    device = str(facts.get("device_name", "unknown device"))
    label = f"{device} ({'reference run' if reference else 'this machine'})"
    label += ", CPU" if trials[0].device == "cpu" else ""
    return _curve(
        label, device, trials, _total_bytes(facts, trials), platform_from(facts) or "linux",
        reference=reference,
    )  # fmt: skip


def reference_probes(leave_out: Path | None = None) -> list[ProbeCurve]:
    """Return the article's probe, the H200's, and those of the other committed runs."""
    curves = [article_probe(), h200_probe()]
    for run in reference_runs().values():
        own = leave_out is not None and run.path.resolve() == leave_out.resolve()
        curve = None if own else probe_of(run, reference=True)
        if curve is not None and all(curve.device != known.device for known in curves):
            curves.append(curve)
    return curves


def rows_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as mappings from column to value."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def flags_of(row: Any) -> str:
    """Return what a reader must know of a run: a failure, other programs, throttling."""
    return ", ".join(flags([row])) if isinstance(row, Trial) else ""


def _curve(
    label: str, device: str, rows: Sequence[Any], total_bytes: int, platform: Platform, *,
    reference: bool,
) -> ProbeCurve:  # fmt: skip
    judgements = tuple(judge_memory(_to_judge(rows), total_bytes, platform))
    return ProbeCurve(
        label=label,
        table=_table(rows, judgements, total_bytes),
        reference=reference,
        images=max(int(_get(row, "batch_size")) for row in rows),
        device=device,
        rows=tuple(rows),
        judgements=judgements,
        total_bytes=total_bytes,
        platform=platform,
    )


def _to_judge(rows: Sequence[Any]) -> list[Any]:
    """Return the facts that a verdict may use: on the CPU only speed and order.

    There the peak is that of a process, which allocators and libraries share: it says nothing
    about a card, nor about kernels.
    """
    if not all(_get(row, "device") == "cpu" for row in rows):
        return list(rows)
    names = ("batch_size", "images_per_s", "position", "outcome")
    return [{name: _get(row, name) for name in names} for row in rows]


def _table(
    rows: Sequence[Any], judgements: Sequence[MemoryJudgement], total_bytes: int
) -> pd.DataFrame:
    """Return one row per size in growing order: its first run, with shares and verdict."""
    first: dict[int, dict[str, Any]] = {}
    for row, judged in zip(rows, judgements, strict=True):
        first.setdefault(judged.batch_size, _table_row(row, judged, total_bytes))
    table = pd.DataFrame([first[size] for size in sorted(first)])
    table["images_per_s"] = table["images_per_s"].astype(float)
    table["share_of_best"] = table["images_per_s"] / table["images_per_s"].max()
    return table[list(_COLUMNS)]


def _table_row(row: Any, judged: MemoryJudgement, total_bytes: int) -> dict[str, Any]:
    allocated, reserved = (_get(row, f"peak_{kind}_bytes") for kind in ("allocated", "reserved"))
    return {
        "batch_size": judged.batch_size,
        "images_per_s": judged.images_per_s,
        "allocated_mib": mib(allocated),
        "reserved_mib": mib(reserved),
        "card_share": reserved / total_bytes if reserved else None,
        "kib_per_image": allocated / judged.batch_size / 1024 if allocated else None,
        "outcome": judged.outcome or "ok",
        "verdict": judged.verdict,
        "causes": ", ".join(judged.causes),
        "flags": flags_of(row),
    }


def _published_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a published row (MiB) into one in bytes, as a verdict reads it."""
    return {
        "batch_size": row["batch_size"],
        "images_per_s": row.get("images_per_s"),
        "peak_allocated_bytes": bytes_of_mib(row.get("peak_allocated_mib")),
        "peak_reserved_bytes": bytes_of_mib(row.get("peak_reserved_mib")),
        "outcome": "oom" if row.get("oom") else "ok",
    }


def _total_bytes(facts: Mapping[str, Any], trials: Sequence[Trial]) -> int:
    """Return what the device holds, from its facts or from what a trial's driver said."""
    gpu = facts.get("gpu") or {}
    said = [t.memory_before.total_bytes for t in trials if t.memory_before]
    known = [gpu.get("total_bytes"), *said, facts.get("memory_total_bytes")]
    return next(int(value) for value in known if value)


def _get(row: Any, name: str) -> Any:
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)
