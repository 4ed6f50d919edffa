"""Records become tables: one row per batch size, units in the column names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from labhelpers.formats import NOT_AVAILABLE, mib, ms
from labhelpers.limits import limits_of
from labhelpers.noise import describe_difference, differences_from_best
from labhelpers.records import Trial
from labhelpers.verdicts import median, spread

SWEEP_COLUMNS = (
    "batch_size", "images_per_s", "spread", "share_of_best", "epoch_s", "step_ms",
    "event_step_ms", "feed_wait", "allocated_mib", "reserved_mib", "steps", "last_batch",
    "updates", "final_loss", "repeats", "flags", "limited_by", "against_best",
)  # fmt: skip


BUSY_SHARE = 0.1
"""From this share of the CPU on, other programs' work disturbs a measurement on the CPU."""


def by_batch_size(trials: Iterable[Trial]) -> dict[int, list[Trial]]:
    """Group trials by batch size, ascending."""
    groups: dict[int, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.batch_size, []).append(trial)
    return dict(sorted(groups.items()))


def median_rates(trials: Iterable[Trial]) -> dict[int, float]:
    """Return the median images/s of each batch size that was measured at least once."""
    medians = {s: median(t.images_per_s for t in g) for s, g in by_batch_size(trials).items()}
    return {size: rate for size, rate in medians.items() if rate is not None}


def whole_passes(trials: Iterable[Trial]) -> tuple[dict[int, float], ...]:
    """Return images/s by batch size of each repeat that measured as many sizes as any."""
    passes: dict[int, dict[int, float]] = {}
    for trial in trials:
        if trial.images_per_s is not None:
            passes.setdefault(trial.repeat, {})[trial.batch_size] = trial.images_per_s
    most = max(map(len, passes.values()), default=0)
    return tuple(rates for _, rates in sorted(passes.items()) if len(rates) == most)


def median_peaks(trials: Iterable[Trial]) -> dict[int, float]:
    """Return the median peak of allocated bytes of each batch size where it is known."""
    groups = by_batch_size(trials).items()
    medians = {size: median(t.peak_allocated_bytes for t in group) for size, group in groups}
    return {size: peak for size, peak in medians.items() if peak is not None}


def sweep_table(trials: Iterable[Trial], profiled: Iterable[Trial] = ()) -> pd.DataFrame:
    """Return one row per batch size: medians over the repeats, spread, flags, what limits it.

    `step_ms` is epoch seconds / steps, as the article prints it; `event_step_ms` is the
    median of the device's own step times: another quantity (it leaves the loader's pauses
    and the last short step out). `profiled` are the sweep's trials of kind `limits`;
    `against_best` is known from six repeats on.
    """
    trials = list(trials)
    best = max(median_rates(trials).values(), default=None)
    limits, standings = limits_of(trials, profiled), standings_of(trials)
    rows = [
        _row(size, group, best)
        | {"limited_by": limits[size].verdict if size in limits else None}
        | {"against_best": standings.get(size)}
        for size, group in by_batch_size(trials).items()
    ]
    return pd.DataFrame(rows, columns=list(SWEEP_COLUMNS))


def standings_of(trials: Iterable[Trial]) -> dict[int, str]:
    """Say for each batch size whether it differs from the fastest beyond noise and a margin."""
    rates = {size: [t.images_per_s for t in g] for size, g in by_batch_size(trials).items()}
    found = differences_from_best(rates)
    return {size: describe_difference(difference) for size, difference in found.items()}


def _row(size: int, group: Sequence[Trial], best: float | None) -> dict[str, Any]:
    rate = median(trial.images_per_s for trial in group)
    first = next((trial for trial in group if trial.outcome == "ok"), group[0])
    return {
        "batch_size": size,
        "images_per_s": rate,
        "spread": spread(t.images_per_s for t in group),
        "share_of_best": rate / best if rate and best else None,
        "epoch_s": median(t.epoch_s for t in group),
        "step_ms": ms(median(t.mean_step_s for t in group)),
        "event_step_ms": ms(median(_event_median(t) for t in group)),
        "feed_wait": median(_wait_share(t) for t in group),
        "allocated_mib": mib(median(t.peak_allocated_bytes for t in group)),
        "reserved_mib": mib(median(t.peak_reserved_bytes for t in group)),
        "steps": first.steps,
        "last_batch": first.last_batch,
        "updates": first.updates,
        "final_loss": median(t.final_loss for t in group),
        "repeats": sum(t.outcome == "ok" for t in group),
        "flags": ", ".join(flags(group)),
    }


def _event_median(trial: Trial) -> float | None:
    return median(trial.step_times_s or ())


def _wait_share(trial: Trial) -> float | None:
    if trial.feed_wait_s is None or not trial.epoch_s:
        return None
    return trial.feed_wait_s / trial.epoch_s


def cpu_was_busy(trial: Trial) -> bool:
    """Tell whether other programs took so much of the CPU that they disturbed the trial."""
    others = (trial.details or {}).get("cpu_of_others")
    return isinstance(others, float) and others > BUSY_SHARE


def flags(group: Iterable[Trial]) -> list[str]:
    """List what a reader must know of these trials: failures, other processes, throttling."""
    found: dict[str, None] = {}
    for trial in group:
        if trial.outcome != "ok":
            found[trial.outcome] = None
        if trial.other_processes:
            found["other process on the device"] = None
        if cpu_was_busy(trial):
            found["others used the CPU"] = None
        if (trial.details or {}).get("loss_not_finite"):
            found["the loss is not finite"] = None
        if not _has_the_steps_asked_for(trial):
            found["the loader's batches have another size"] = None
        if trial.alloc_retries:
            found["allocator retries"] = None
        if (trial.precision_after or {}).get("both") == "mixed":
            found["mixed precision settings"] = None
        for clocks in (trial.clocks_before, trial.clocks_after):
            if clocks and clocks.throttle_reasons:
                found["throttled: " + ", ".join(clocks.throttle_reasons)] = None
    return list(found)


def _has_the_steps_asked_for(trial: Trial) -> bool:
    """Tell whether as many steps were made as images in batches of that size need."""
    if trial.world_size > 1 or not trial.steps or not trial.images:
        return True
    return trial.steps == -(-trial.images // trial.batch_size)


def disturbed(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a sweep's table that something else than the batch size slowed down."""
    signs = "other process|others used|throttled|mixed"
    return table[table["flags"].str.contains(signs, na=False)]


_SHOWN = {
    "batch_size": ("batch", "{:,.0f}"), "images_per_s": ("images/s", "{:,.0f}"),
    "spread": ("spread", "{:.1%}"), "share_of_best": ("of best", "{:.1%}"),
    "epoch_s": ("epoch s", "{:.3f}"), "step_ms": ("step ms", "{:.2f}"),
    "event_step_ms": ("event ms", "{:.2f}"), "feed_wait": ("waiting for feed", "{:.0%}"),
    "allocated_mib": ("allocated MiB", "{:,.1f}"), "reserved_mib": ("reserved MiB", "{:,.0f}"),
    "steps": ("steps", "{:,.0f}"), "last_batch": ("last batch", "{:,.0f}"),
    "updates": ("updates/epoch", "{:,.0f}"), "final_loss": ("final loss", "{:.3f}"),
    "limited_by": ("limited by", "{}"), "against_best": ("against the best", "{}"),
}  # fmt: skip
_ONLY_WHERE_KNOWN = ("limited_by", "against_best")


SPEED = ("batch_size", "images_per_s", "spread", "share_of_best", "epoch_s", "step_ms",
         "event_step_ms", "feed_wait", "limited_by", "against_best")  # fmt: skip
COST = ("batch_size", "allocated_mib", "reserved_mib", "steps", "last_batch", "updates",
        "final_loss")  # fmt: skip


def readable(table: pd.DataFrame, columns: Iterable[str] = tuple(_SHOWN)) -> pd.DataFrame:
    """Return the table as text for people: units in the heads, `n/a` where not measured.

    `columns` may be `SPEED` or `COST`, so that a table fits a page.
    """
    shown = {
        _SHOWN[name][0]: [
            NOT_AVAILABLE if pd.isna(v) else _SHOWN[name][1].format(v) for v in table[name]
        ]
        for name in columns
        if name in table and (name not in _ONLY_WHERE_KNOWN or table[name].notna().any())
    }
    if table["flags"].any():
        shown["flags"] = list(table["flags"])
    return pd.DataFrame(shown)
