"""How far does the same training go? Ratios from one run, each beside what it must be.

    python benchmarks/ladder.py [--run results/reference/h200]

Reads the run's ladder (`labhelpers sweep --ladder`, notebook 05), its sweeps under several feeds
(notebook 05) and what its sweep cost (notebook 01); a ladder that is not there is measured. Exits
with 1 if a ratio is missed, or cannot be read from this run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from labhelpers.ceilings import describe_share
from labhelpers.knee import knee_rates
from labhelpers.ladder import ceilings_of, ladder_trials_of, run_ladder
from labhelpers.ladder_table import Row, best_workers, ladder_rows, rung_at, top_rung
from labhelpers.progress import TerminalProgress
from labhelpers.records import LadderSpec, ask
from labhelpers.store import RUN_FILE, RunDirectory, open_run

# What is asked: a name, the ratio and its limit; `at most` where smaller is better.
Check = tuple[str, float | None, float, str]
LEAST, MOST = "at least", "at most"


def ratio(of: Row | None, over: Row | None) -> float | None:
    """Return one rung's speed over another's; None where either was not measured."""
    if of is None or over is None or not of.images_per_s or not over.images_per_s:
        return None
    return of.images_per_s / over.images_per_s


def ladder_checks(rows: Sequence[Row]) -> Iterator[Check]:
    """Yield what the ladder itself must show."""
    for size, over_article, over_resident in ((32, 15.0, 8.0), (8192, 50.0, 1.5)):
        top = top_rung(rows, size)
        name = top.rung if top else "no rung"
        article, resident = rung_at(rows, "article", size), rung_at(rows, "resident", size)
        yield f"{name} over article, batch {size:,}", ratio(top, article), over_article, LEAST
        yield f"{name} over resident, batch {size:,}", ratio(top, resident), over_resident, LEAST
    resident, synthetic = rung_at(rows, "resident", 8192), rung_at(rows, "synthetic", 8192)
    yield "resident over a synthetic batch, 8,192", ratio(resident, synthetic), 0.95, LEAST
    for size in sorted({row.batch_size for row in rows}):
        best, host = best_workers(rows, size), rung_at(rows, "host", size)
        name = best.rung if best else "workers"
        yield f"host over {name}, batch {size:,}", ratio(host, best), 1.0, LEAST


def sweep_checks(run: RunDirectory) -> Iterator[Check]:
    """Yield what the sweeps must show: host against workers at every batch, and the overhead."""
    rates = knee_rates(run)
    for size, workers in rates.get("workers", {}).items():
        host = rates.get("host", {}).get(size)
        value = host / workers if host else None
        yield f"host over workers, whole epochs, batch {size:,}", value, 1.0, LEAST
    took = run.info.timings.get("sweep", {})
    value = took["wall_s"] / took["epochs_s"] if took.get("epochs_s") else None
    yield "wall time of the sweep over its epochs", value, 1.15, MOST


def held(check: Check) -> bool:
    """Print one check and tell whether it holds."""
    name, value, limit, sense = check
    good = value is not None and (value >= limit if sense == LEAST else value <= limit)
    shown = "not in this run" if value is None else f"{value:,.3f}"
    print(f"{'ok  ' if good else 'MISS'} {name:<48} {shown:>16}  ({sense} {limit:g})")
    return good


def print_rungs(rows: Sequence[Row]) -> None:
    """Print every rung with its share of the nearest ceiling: speeds depend on the host's CPU."""
    for row in rows:
        rate = "failed" if row.images_per_s is None else f"{row.images_per_s:,.0f} images/s"
        share = describe_share(row.ceiling) if row.ceiling else ""
        loss = "" if row.loss is None else f"loss {row.loss:.4f}"
        print(f"batch {row.batch_size:>5,} {row.rung:<14} {rate:>20}  {share:<28} {loss}")


def main() -> int:
    """Print the rungs and the ratios; return 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("results/reference/h200"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", default="data")
    asked = parser.parse_args()
    exists = (asked.run / RUN_FILE).exists()
    run = open_run(asked.run) if exists else RunDirectory.create(asked.run)
    trials = ladder_trials_of(run)
    if not trials:
        spec = ask(LadderSpec, {"device": asked.device, "data_dir": asked.data_dir})
        with TerminalProgress() as progress:
            trials = run_ladder(spec, run, on_progress=progress)
    rows = ladder_rows(trials, ceilings_of(run))
    print_rungs(rows)
    print(f"on {run.environment().get('device_name')}, {run.environment().get('cpu')}")
    good = [held(check) for check in (*ladder_checks(rows), *sweep_checks(run))]
    print(f"{sum(good)} of {len(good)} hold")
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
