"""One search for a batch size: try sizes in a place, keep their trials, build the report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from labhelpers.environment import environment_id
from labhelpers.finder_headroom import candidates
from labhelpers.finder_places import Place
from labhelpers.finder_report import BatchSizeReport
from labhelpers.finder_trials import (
    HEADROOM_MARK,
    Purpose,
    judged,
    of_purpose,
    outcome_of,
    probe_result,
    terms_of,
    trial_of,
    variant_of,
)
from labhelpers.formats import show_bytes
from labhelpers.records import FinderSpec, Trial
from labhelpers.search import NothingFits, WorkloadFailed, search_largest
from labhelpers.search_result import ProbeResult, SearchResult
from labhelpers.store import RunDirectory


@dataclass(frozen=True)
class FinderProgress:
    """Handed to `on_progress` before and after each probe; `trial` is None before."""

    batch_size: int
    purpose: Purpose
    trial: Trial | None = None
    start_s: float = 0.0


Report = Callable[[FinderProgress], None]


class Search:
    """One search: it tries sizes in a place, keeps their trials and builds the report."""

    def __init__(
        self, spec: FinderSpec, run: RunDirectory | None, place: Place, on_progress: Report,
        own_settings: bool,
    ) -> None:  # fmt: skip
        self.place = place
        self._spec, self._run, self._on_progress = spec, run, on_progress
        self._precision = "own" if own_settings else spec.precision
        self._variant = variant_of(spec)
        self._trials: list[Trial] = []
        self._errors: dict[int, bytes | None] = {}

    def open(self) -> str | None:
        """Open the place and settle the terms; return why the workload cannot be loaded there.

        Raises:
            NothingFits: the model alone does not fit.
            WorkloadFailed: it cannot be built.
        """
        facts = self.place.open()
        if "cannot_load" in facts:
            return str(facts["cannot_load"])
        if "outcome" in facts:
            _raise_not_built(facts)
        self._environment = facts["environment"]
        self._terms = terms_of(self._spec, facts)
        if self._run is not None:
            self._run.note_spec("finder", self._spec)
            self._run.note_environment(environment_id(self._environment), self._environment)
        return None

    def report(self, notes: list[str]) -> BatchSizeReport:
        """Search, prove the headroom, and report."""
        self._deadline = time.monotonic() + self._spec.time_budget_s
        result = self._searched()
        for size in candidates(self._trials, self._terms, found_end=result.ended_by == "memory"):
            if self._time_left() <= 0 or outcome_of(self._prove(size)) == "ok":
                break
        report = BatchSizeReport(
            self._spec.workload, self._variant, self._terms, result, tuple(self._trials)
        )
        said = notes_of(report, self._environment["device"])
        return replace(report, notes=(*notes, *said))

    def _searched(self) -> SearchResult:
        terms = self._terms
        try:
            return search_largest(
                self._probe, max_batch_size=terms.top, limit_bytes=terms.limit_bytes,
                multiple_of=terms.multiple_of, powers_of_two=terms.powers_of_two,
                strategy=terms.strategy, maximum=terms.maximum, time_left=self._time_left,
            )  # fmt: skip
        except WorkloadFailed as failed:
            raise WorkloadFailed(self._why_failed(failed), failed.probes) from None

    def _probe(self, batch_size: int) -> ProbeResult:
        trial = self._trial(batch_size, "search", self._terms.cap_bytes)
        return probe_result(trial, self._errors.get(batch_size))

    def _prove(self, batch_size: int) -> Trial:
        return self._trial(batch_size, "headroom", self._terms.allowed_bytes)

    def _trial(self, batch_size: int, purpose: Purpose, cap_bytes: int | None) -> Trial:
        """Return the trial of a size: the one that the run holds, or a new one."""
        about = self._about(batch_size, purpose)
        kept = self._kept(about)
        if kept is None:
            self._on_progress(FinderProgress(batch_size, purpose, None, self.place.start_s))
            trial = self._measured(about, purpose, cap_bytes)
            if self._run is not None:
                self._run.append(trial)
        else:
            trial = kept
        self._trials.append(trial)
        self._on_progress(FinderProgress(batch_size, purpose, trial, self.place.start_s))
        return trial

    def _measured(self, about: dict[str, Any], purpose: Purpose, cap_bytes: int | None) -> Trial:
        limit_s = max(0.1, min(self._spec.trial_timeout_s, self._time_left()))
        start_s = None if self._trials else self.place.start_s
        facts = self.place.try_size(about["batch_size"], cap_bytes, limit_s)
        self._errors[about["batch_size"]] = facts.get("error")
        known = {"cap_bytes": cap_bytes, "start_s": start_s, **facts}
        trial = trial_of(known, about, self._terms, purpose)
        return judged(trial, of_purpose(self._trials, "search"), self._terms)

    def _about(self, batch_size: int, purpose: Purpose) -> dict[str, Any]:
        mark = HEADROOM_MARK if purpose == "headroom" else ""
        return {
            "batch_size": batch_size, "workload": self._spec.workload,
            "variant": self._variant + mark, "precision": self._precision,
            "device": self._environment["device"], "synthetic": True,
            "position": len(self._trials),
            "environment_id": environment_id(self._environment),
        }  # fmt: skip

    def _kept(self, about: dict[str, Any]) -> Trial | None:
        names = ("batch_size", "workload", "variant", "precision", "device", "environment_id")
        trials = [] if self._run is None else self._run.trials("finder")
        same = (t for t in trials if all(getattr(t, name) == about[name] for name in names))
        return next(same, None)

    def _time_left(self) -> float:
        return self._deadline - time.monotonic()

    def _why_failed(self, failed: WorkloadFailed) -> str:
        trial = self._trials[-1]
        sizes = ", ".join(f"{p.batch_size} ({p.outcome})" for p in failed.probes)
        place = (trial.details or {}).get("where")
        where = f" ({place})" if place else ""
        return (
            f"{self._spec.workload} fails at batch size {trial.batch_size}: {trial.error_class}: "
            f"{trial.error_text}{where} (tried: {sizes})"
        )


def notes_of(report: BatchSizeReport, device: str) -> list[str]:
    """Return what a reader should know beside the answer, in sentences."""
    notes, terms = [], report.terms
    size = report.with_headroom or report.largest
    if terms.batch_norm and terms.dataset_size and size > 1 and terms.dataset_size % size == 1:
        notes.append(
            f"{terms.dataset_size:,} samples in batches of {size:,} leave a last batch of 1, on "
            "which BatchNorm fails in training: use drop_last=True or another size"
        )
    held = _held_here(device)
    if held:
        notes.append(
            f"this process holds {show_bytes(held)} on {device}, which the worker process could "
            "not use; isolate=False counts it in"
        )
    if not report.monotonic:
        notes.append(
            "the peaks fall somewhere with growing size (other kernels run there): the next "
            "size after the largest was tried and does not fit, but a larger one might"
        )
    return notes


def callers_cap_bytes(device: str) -> int | None:
    """Return the cap that this process has set on a GPU's allocator; None for none."""
    torch = _torch_on_gpu(device)
    if torch is None:
        return None
    where = None if device in ("auto", "cuda") else device
    fraction = torch.cuda.get_per_process_memory_fraction(where)
    if fraction >= 1:
        return None
    index = torch.cuda.current_device() if where is None else where
    return int(fraction * torch.cuda.get_device_properties(index).total_memory)


def _held_here(device: str) -> int:
    torch = _torch_on_gpu(device)
    return 0 if torch is None else int(torch.cuda.memory_reserved(device))


def _torch_on_gpu(device: str) -> Any | None:
    """Return torch if this process uses a GPU already; nothing is started."""
    torch = sys.modules.get("torch")
    started = torch is not None and torch.cuda.is_initialized()
    return torch if started and device != "cpu" else None


def _raise_not_built(facts: Mapping[str, Any]) -> NoReturn:
    text = f"{facts.get('error_class')}: {facts.get('error_text')}"
    if facts["outcome"] in ("oom", "killed"):
        raise NothingFits(f"the model alone does not fit: {text}", ())
    probe = ProbeResult(1, "error", payload=facts.get("error"))
    raise WorkloadFailed(f"the model cannot be built: {text}", (probe,))
