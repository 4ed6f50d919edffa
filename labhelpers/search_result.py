"""What a search for a batch size is given and what it found: frozen records and errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from labhelpers.forecast import Line
from labhelpers.inputs import InputError

ProbeOutcome = Literal["ok", "oom", "killed", "timeout", "error", "library_limit", "oversubscribed"]
EndedBy = Literal[
    "memory", "killed", "timeout", "error", "library_limit", "maximum", "dataset", "time", "probes"
]
BOUNDS: dict[ProbeOutcome, EndedBy] = {
    "oom": "memory",
    "oversubscribed": "memory",
    "killed": "killed",
    "timeout": "timeout",
    "error": "error",
    "library_limit": "library_limit",
}
"""What a failure is called when it is what ends a search."""


@dataclass(frozen=True)
class ProbeResult:
    """What one trial of a batch size gave.

    `peak_bytes` is the most the allocator took from the device (peak reserved), `live_bytes`
    the most that tensors held (peak allocated); with only one known, give it as `peak_bytes`.
    `needed_bytes`, of a trial that ran out of memory, is what it held and asked for when it
    failed: at least so much was needed. Not measured is None. `payload` is the caller's own
    and is not looked at.
    """

    batch_size: int
    outcome: ProbeOutcome
    peak_bytes: int | None = None
    live_bytes: int | None = None
    payload: object = field(default=None, compare=False)
    needed_bytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown outcome and a peak of 0.

        Raises:
            InputError: one line with the field, the value and what is allowed.
        """
        if self.outcome not in get_args(ProbeOutcome):
            allowed = ", ".join(get_args(ProbeOutcome))
            raise InputError(f"outcome={self.outcome!r}: give one of {allowed}")
        for name in ("peak_bytes", "live_bytes", "needed_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name}={value}: must be above 0; give None if not measured")


class SearchError(RuntimeError):
    """No batch size ran. `probes` holds what was tried, in order."""

    def __init__(self, message: str, probes: tuple[ProbeResult, ...]) -> None:
        super().__init__(message)
        self.probes = probes

    def __reduce__(self) -> tuple[type[SearchError], tuple[str, tuple[ProbeResult, ...]]]:
        """Let the error travel between processes with its probes."""
        return type(self), (str(self), self.probes)


class NothingFits(SearchError):
    """Every size tried, down to the smallest allowed, did not fit, or the time was up first."""


class WorkloadFailed(SearchError):
    """A trial failed by an error that is not about memory, before any size had run.

    Its result is `probes[-1]`: a caller that keeps the exception's data in `payload` can raise
    the workload's own error from there.
    """


@dataclass(frozen=True)
class SearchResult:
    """What a search found: `largest` is a size that ran, checked when this is built.

    `probes` are in the order tried. `fit` is the line through the peaks of the sizes that ran,
    None below two. `closed` tells that the next allowed size failed or lies above the maximum.
    """

    probes: tuple[ProbeResult, ...]
    largest: int
    fit: Line | None
    ended_by: EndedBy
    monotonic: bool
    closed: bool

    def __post_init__(self) -> None:
        """Refuse an answer that did not run.

        Raises:
            InputError: `largest` is not among the successes.
        """
        if self.largest not in {probe.batch_size for probe in self.successes}:
            raise InputError(f"largest={self.largest} did not run; give a size that did")

    @property
    def successes(self) -> tuple[ProbeResult, ...]:
        """Return the probes that ran, by size."""
        ran = (probe for probe in self.probes if probe.outcome == "ok")
        return tuple(sorted(ran, key=lambda probe: probe.batch_size))

    @property
    def oom_count(self) -> int:
        """Return how many probes ran out of memory, silently or not."""
        return sum(BOUNDS.get(probe.outcome) == "memory" for probe in self.probes)
