"""What a search for a batch size found: everything a reader may ask, derived from its trials."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from labhelpers.finder_headroom import with_headroom
from labhelpers.finder_trials import (
    HEADROOM_MARK,
    Terms,
    live_bytes,
    of_purpose,
    outcome_of,
    probe_result,
    sizes_that_ran,
    taken_bytes,
)
from labhelpers.forecast import fit_line, has_fallen
from labhelpers.inputs import InputError
from labhelpers.records import Trial
from labhelpers.search_result import BOUNDS, EndedBy, SearchResult
from labhelpers.search_steps import Sizes, State
from labhelpers.store import RunDirectory
from labhelpers.verdicts import DEFAULT_SHARE, sweet_spot

ENDINGS: dict[EndedBy, str] = {
    "memory": "memory",
    "killed": "the process was killed at the next size",
    "timeout": "the next size took longer than its time limit",
    "error": "the workload failed at the next size",
    "library_limit": "library limit, not memory",
    "maximum": "the maximum asked for",
    "dataset": "the size of the data set",
    "time": "the time was up",
    "probes": "the search was not finished",
}

NOISE_SHARE, CPU_NOISE_SHARE = 0.02, 0.1
"""Part of the limit by which a peak may fall without being called not monotonic.

A GPU's allocator counts; on the CPU the peak is what the whole process grew by.
"""


@dataclass(frozen=True)
class BatchSizeReport:
    """The answer of a search and every probe behind it; sizes in bytes, times in seconds.

    `trials` are the probes in the order tried, those that prove the headroom last. `start_s`
    is what came before the first: the process, the device, its libraries, the model.
    """

    workload: str
    variant: str
    terms: Terms
    result: SearchResult
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> int:
        """Return the largest size that the search found to run."""
        return self.result.largest

    @property
    def with_headroom(self) -> int | None:
        """Return the largest size that ran and left the headroom free; None if none did."""
        return with_headroom(self.trials, self.terms)

    @property
    def fastest_sensible(self) -> int | None:
        """Return the smallest probed size that is nearly as fast as the fastest one."""
        rates = {t.batch_size: t.images_per_s for t in self.trials if outcome_of(t) == "ok"}
        known = {size: rate for size, rate in rates.items() if rate}
        return sweet_spot(known, DEFAULT_SHARE).batch_size if known else None

    @property
    def monotonic(self) -> bool:
        """Tell whether no peak lies below a smaller size's by more than the noise of measuring."""
        peaks = [(probe.live_bytes or probe.peak_bytes or 0) for probe in self.result.successes]
        falls = (before - after for before, after in itertools.pairwise(peaks))
        share = CPU_NOISE_SHARE if self.trials[0].device == "cpu" else NOISE_SHARE
        return self.result.monotonic or max(falls) < share * self.terms.limit_bytes

    @property
    def ended(self) -> str:
        """Say what ended the search."""
        how = ENDINGS[self.result.ended_by]
        return how if self.monotonic else f"{how}; the peaks are not monotonic"

    @property
    def utilisation(self) -> float | None:
        """Return what the largest size took of the card (or of the emulated one)."""
        return self.utilisation_at(self.largest)

    @property
    def next_size_failed(self) -> bool:
        """Tell whether the next allowed size was tried and did not run."""
        return self.result.closed and self.result.ended_by not in ("dataset", "maximum")

    @property
    def oom_count(self) -> int:
        """Return how many probes ran out of memory, silently or not."""
        return sum(outcome_of(trial) in ("oom", "oversubscribed") for trial in self.trials)

    @property
    def search_s(self) -> float:
        """Return the seconds that all probes took together, the worker's start apart."""
        return sum(_detail(trial, "wall_s") or 0.0 for trial in self.trials)

    @property
    def start_s(self) -> float:
        """Return the seconds before the first probe."""
        return float(_detail(self.trials[0], "start_s") or 0.0)

    def utilisation_at(self, batch_size: int) -> float | None:
        """Return what a size that ran took of the card; None where it was not measured."""
        # The last one: where the headroom was proved, it is the trial that kept it free.
        taken = next((taken_bytes(t) for t in reversed(self.at(batch_size))), None)
        return None if taken is None else taken / self.terms.card_bytes

    def at(self, batch_size: int) -> list[Trial]:
        """Return the trials of a size that ran, in order."""
        return [t for t in self.trials if t.batch_size == batch_size and outcome_of(t) == "ok"]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        fit = self.result.fit
        return {
            "workload": self.workload, "variant": self.variant, **asdict(self.terms),
            "largest": self.largest, "with_headroom": self.with_headroom,
            "fastest_sensible": self.fastest_sensible, "ended_by": self.result.ended_by,
            "monotonic": self.monotonic, "next_size_failed": self.next_size_failed,
            "utilisation": self.utilisation, "oom_count": self.oom_count,
            "search_s": self.search_s, "start_s": self.start_s, "notes": list(self.notes),
            "line": None if fit is None else {
                "bytes_per_sample": fit.slope, "bytes_at_zero": fit.intercept,
                "residuals_bytes": list(fit.residuals),
            },
            "probes": [_probe(trial) for trial in self.trials],
        }  # fmt: skip


def split_effective(effective: int, largest: int) -> tuple[int, ...]:
    """Split an effective batch into micro-batches of at most `largest`, all equal if possible.

    Equal ones are preferred while they hold at least half of `largest`; otherwise they differ
    by one at most, so that none is a batch of 1 beside large ones.

    Raises:
        InputError: a number below 1.
    """
    for name, value in (("effective", effective), ("largest", largest)):
        if value < 1:
            raise InputError(f"{name}: got {value}; must be a whole number of at least 1")
    fewest = -(-effective // largest)
    for count in range(fewest, 2 * fewest + 1):
        if effective % count == 0:
            return (effective // count,) * count
    size, more = divmod(effective, fewest)
    return (size + 1,) * more + (size,) * (fewest - more)


def read_reports(run: RunDirectory) -> list[BatchSizeReport]:
    """Return the searches that a run holds, oldest first; one in which nothing ran is left out."""
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for trial in of_purpose(run.trials("finder"), "search", "headroom"):
        variant = (trial.variant or "").removesuffix(HEADROOM_MARK)
        groups.setdefault((trial.workload, variant, trial.precision, trial.device), []).append(
            trial
        )
    reports = (_from_trials(key[0], key[1], trials) for key, trials in groups.items())
    return [report for report in reports if report is not None]


def _from_trials(workload: str, variant: str, trials: Sequence[Trial]) -> BatchSizeReport | None:
    terms = Terms(**_detail(trials[0], "search"))
    result = result_of(of_purpose(trials, "search"), terms)
    return (
        None if result is None else BatchSizeReport(workload, variant, terms, result, tuple(trials))
    )


def result_of(trials: Sequence[Trial], terms: Terms) -> SearchResult | None:
    """Derive what a search found from its trials alone; None if no size ran.

    It does not depend on the order in which sizes are tried, which may change.
    """
    ran = sizes_that_ran(trials)
    if not ran:
        return None
    probes = tuple(probe_result(trial) for trial in trials)
    failed = [p for p in probes if p.outcome != "ok" and p.batch_size > ran[-1]]
    first = min(failed, key=lambda p: p.batch_size, default=None)
    sizes = Sizes(terms.top, terms.multiple_of, terms.powers_of_two)
    closed = sizes.pick(ran[-1], first.batch_size if first else None, ran[-1]) is None
    if first is None:
        ended_by: EndedBy = terms.maximum if closed else "time"
    else:
        ended_by = BOUNDS[first.outcome] if closed or terms.strategy == "doubling" else "time"
    state = State(list(probes))
    peaks = state.readings("peak_bytes") or state.readings("live_bytes")
    return SearchResult(
        probes, ran[-1], fit_line(peaks), ended_by, not has_fallen(state.main_readings), closed
    )


def _probe(trial: Trial) -> dict[str, Any]:
    return {
        "batch_size": trial.batch_size, "outcome": outcome_of(trial),
        "purpose": _detail(trial, "purpose"), "cap_bytes": trial.cap_bytes,
        "first_step_peak_bytes": trial.first_step_peak_bytes,
        "steady_peak_bytes": trial.peak_allocated_bytes, "live_bytes": live_bytes(trial),
        "reserved_bytes": trial.peak_reserved_bytes, "images_per_s": trial.images_per_s,
        "seconds": _detail(trial, "wall_s"), "error_class": trial.error_class,
        "error_text": trial.error_text,
    }  # fmt: skip


def _detail(trial: Trial, name: str) -> Any:
    return (trial.details or {}).get(name)
