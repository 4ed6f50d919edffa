"""What was asked (specs) and what was seen (trials): frozen, validated, versioned."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from labhelpers.inputs import InputError, shown
from labhelpers.specs import (
    FASHION,
    FeedName,
    FinderSpec,
    LadderSpec,
    Order,
    Precision,
    ProbeSpec,
    Record,
    RemedySpec,
    Spec,
    SweepSpec,
)

__all__ = [
    "ARTICLE_BATCH_SIZES", "FASHION", "SCHEMA_VERSION", "TRAINING_IMAGES", "Clocks",
    "DriverMemory", "FeedName", "FinderSpec", "Kind", "LadderSpec", "Order", "OtherProcess",
    "Outcome", "Precision", "ProbeSpec", "Record", "RemedySpec", "RunInfo", "Spec", "SweepSpec",
    "Trial", "ask", "one_line", "refuse_unknown_names",
]  # fmt: skip

SCHEMA_VERSION = 1
"""Version of the files a run directory holds; raise it when a reader must know."""

ARTICLE_BATCH_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
TRAINING_IMAGES = 60_000

Outcome = Literal["ok", "oom", "killed", "timeout", "error"]
Kind = Literal["sweep", "limits", "probe", "residency", "cap", "remedy", "finder", "ladder", "ddp"]

_LOOKED_FOR: dict[str, tuple[str, ...]] = {
    "cap": ("oom",),
    "probe": ("oom", "killed", "timeout"),
    "finder": ("oom", "killed", "timeout", "error"),
}
"""How trials may end that go on until something ends them: that end is their result."""

S = TypeVar("S", bound=Spec)


class DriverMemory(Record):
    """What the driver says of the device, in bytes; `None` where it does not say."""

    free_bytes: int | None = None
    total_bytes: int | None = None
    process_bytes: int | None = None
    device_used_bytes: int | None = None


class Clocks(Record):
    """Clock speeds, heat and why the device holds back, read once."""

    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle_reasons: tuple[str, ...] | None = None


class OtherProcess(Record):
    """Another process that held memory on the device while we measured."""

    pid: int
    used_bytes: int | None = None


class Trial(Record):
    """One measurement as it was seen. Not measured is `None`, never 0."""

    kind: Kind
    workload: str = FASHION
    variant: str | None = None
    batch_size: int = Field(ge=1)
    repeat: int = 0
    position: int = 0
    feed: str | None = None
    precision: str = "fp32"
    device: str = "cpu"
    cap_bytes: int | None = None
    rank: int = 0
    world_size: int = 1
    synthetic: bool = False
    images: int | None = None
    steps: int | None = None
    last_batch: int | None = None
    updates: int | None = None
    epoch_s: float | None = None
    step_times_s: tuple[float, ...] | None = None
    feed_wait_s: float | None = None
    first_step_peak_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    memory_before: DriverMemory | None = None
    memory_after: DriverMemory | None = None
    alloc_retries: int | None = None
    clocks_before: Clocks | None = None
    clocks_after: Clocks | None = None
    other_processes: tuple[OtherProcess, ...] | None = None
    precision_before: dict[str, str] | None = None
    precision_after: dict[str, str] | None = None
    final_loss: float | None = None
    outcome: Outcome = "ok"
    error_class: str | None = None
    error_text: str | None = None
    oom: dict[str, Any] | None = None
    details: dict[str, Any] | None = None
    environment_id: str | None = None
    started_at: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Identify the trial within a run: one key, one trial."""
        return (
            self.kind, self.workload, self.variant, self.feed, self.precision,
            self.batch_size, self.repeat, self.rank, self.world_size,
        )  # fmt: skip

    @property
    def found_its_limit(self) -> bool:
        """Whether the trial did not run to its end, and that was what it was to find out."""
        return self.outcome in _LOOKED_FOR.get(self.kind, ())

    @property
    def images_per_s(self) -> float | None:
        """Images really seen per second; `None` unless the trial was timed."""
        return rate_of(self.outcome, self.images, self.epoch_s)

    @property
    def mean_step_s(self) -> float | None:
        """Step time as the article prints it: seconds of the epoch / steps."""
        if self.outcome != "ok" or not self.steps or self.epoch_s is None:
            return None
        return self.epoch_s / self.steps


def rate_of(outcome: str, images: int | None, epoch_s: float | None) -> float | None:
    """Return images per second; None unless they were trained and timed."""
    if outcome != "ok" or not images or not epoch_s:
        return None
    return images / epoch_s


class RunInfo(Record):
    """What `run.json` holds: versions, what was asked, and where it ran."""

    schema_version: int = SCHEMA_VERSION
    labhelpers_version: str
    run_id: str
    created_at: str
    synthetic: bool = False
    specs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    environments: dict[str, dict[str, Any]] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timings: dict[str, dict[str, float]] = Field(default_factory=dict)

    @field_validator("environments")
    @classmethod
    def _sets_of_facts(cls, given: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for facts in given.values():
            if not isinstance(facts.get("packages", {}), dict):
                raise ValueError("packages must be names with versions")
        return given

    @model_validator(mode="before")
    @classmethod
    def _known_version(cls, given: Any) -> Any:
        # Before the fields: a newer file may have some that are unknown here.
        version = dict(given).get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise ValueError(
                f"schema version {shown(version)} is newer than this program knows "
                f"({SCHEMA_VERSION}); update labhelpers"
            )
        return given


def ask(spec: type[S], given: Mapping[str, Any]) -> S:
    """Build a spec from names and values, as a notebook, papermill or a command gives them.

    Raises:
        InputError: one line with the field, the value and what is allowed; for an unknown
            name, the nearest right one.
    """
    refuse_unknown_names(given, spec.model_fields)
    try:
        return spec(**given)
    except ValidationError as error:
        raise InputError(one_line(error)) from None


def refuse_unknown_names(given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise InputError for the first name that is not allowed, with the nearest that is."""
    names = sorted(allowed)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(f"unknown parameter {name!r}: {hint}(allowed: {', '.join(names)})")


def one_line(error: ValidationError) -> str:
    """Say a pydantic error in one line: field, value, what is allowed."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"] if not str(part).startswith("function"))
        reason = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        given = shown(item.get("input"))
        lines.append(f"{where}: got {given}; {reason}" if where else reason)
    return "; ".join(dict.fromkeys(lines))
