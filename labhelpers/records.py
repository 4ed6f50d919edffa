"""What was asked (specs) and what was seen (trials): frozen, validated, versioned."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from labhelpers.inputs import (
    InputError,
    is_nothing,
    shown,
    to_boolean,
    to_integer,
    to_names,
    to_number,
    to_shape,
    to_sizes,
    to_text,
)

SCHEMA_VERSION = 1
"""Version of the files a run directory holds; raise it when a reader must know."""

ARTICLE_BATCH_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
TRAINING_IMAGES = 60_000

Outcome = Literal["ok", "oom", "killed", "timeout", "error"]
Kind = Literal["sweep", "probe", "residency", "cap", "remedy", "finder", "ladder", "ddp"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
FeedName = Literal["article", "workers", "host", "resident", "own"]
Order = Literal["article", "ascending", "descending", "shuffled"]

Integer = Annotated[int, BeforeValidator(to_integer)]
Number = Annotated[float, BeforeValidator(to_number)]
Boolean = Annotated[bool, BeforeValidator(to_boolean)]
Text = Annotated[str, BeforeValidator(to_text)]
Sizes = Annotated[tuple[int, ...], BeforeValidator(to_sizes)]
Shape = Annotated[tuple[int, ...], BeforeValidator(to_shape)]
Names = Annotated[tuple[str, ...], BeforeValidator(to_names)]
Share = Annotated[Number, Field(gt=0, le=1)]
Positive = Annotated[Integer, Field(ge=1)]
Seconds = Annotated[Number, Field(gt=0)]
Repeats = Annotated[Integer, Field(ge=1, le=1000)]
Seed = Annotated[Integer, Field(ge=0, le=2**63 - 1)]

S = TypeVar("S", bound="Spec")


class Record(BaseModel):
    """Base of everything that is stored: frozen; unknown fields are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )


class Spec(Record):
    """Base of what was asked; build one with `ask`, which answers bad input in one line."""

    device: Text = "auto"
    precision: Precision = "fp32"
    seed: Seed = 42
    learning_rate: Annotated[Number, Field(gt=0)] = 1e-3
    data_dir: Text = "data"
    synthetic: Boolean = False
    require_gpu: Boolean = False
    workload: Text = "fashion_cnn"
    trial_timeout_s: Seconds = 600.0

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_none(cls, given: Any) -> Any:
        """Read papermill's text 'None' as None wherever None is allowed."""
        optional = {name for name, field in cls.model_fields.items() if field.default is None}
        return {k: None if k in optional and _unset(v) else v for k, v in dict(given).items()}


def _unset(value: Any) -> bool:
    return is_nothing(value) and value != ""


class SweepSpec(Spec):
    """Ask for images/s and memory over batch sizes (first article).

    `None` means "what suits the device"; `sweep.resolved` fills it in before anything runs.
    """

    batch_sizes: Sizes | None = None
    repeats: Repeats | None = None
    images: Positive | None = None
    order: Order = "article"
    feed: FeedName = "article"
    workers: Annotated[Integer, Field(ge=0, le=256)] = 0
    share: Share = 0.93
    quick: Boolean = False


class ProbeSpec(Spec):
    """Ask for large synthetic batches, growing until a limit (first article, second half).

    The last fields ask for the residency map: `residency_bytes` in blocks of `block_bytes`.
    `None` means "what suits the device"; `probe.resolved` fills it in.
    """

    probe_sizes: Sizes | None = None
    steps: Positive = 5
    warmup_steps: Annotated[Integer, Field(ge=0)] = 2
    memory_budget_bytes: Positive | None = None
    time_budget_s: Seconds = 300.0
    block_bytes: Annotated[Integer, Field(ge=2**20)] | None = None
    residency_bytes: Positive | None = None
    quick: Boolean = False


class FinderSpec(Spec):
    """Ask for the largest batch size that fits (second article)."""

    dataset_size: Positive | None = None
    max_batch_size: Positive | None = None
    num_iterations: Positive = 5
    strategy: Literal["exact", "doubling", "bisect"] = "exact"
    headroom: Annotated[Number, Field(ge=0, lt=1)] = 0.1
    multiple_of: Positive = 1
    powers_of_two: Boolean = False
    limit_bytes: Positive | None = None
    time_budget_s: Seconds = 600.0


class RemedySpec(Spec):
    """Ask for a controlled OOM (`cap_…`), and for what each remedy saves, costs and changes.

    `None` means "what suits the device, or the model"; it is filled in before anything runs.
    """

    workload: Text = "torchvision.models:resnet50"
    input_shape: Shape | None = None
    classes: Positive | None = None
    batch_size: Positive | None = None
    micro_batches: Annotated[Integer, Field(ge=2)] = 4
    steps: Positive | None = None
    remedies: Names | None = None
    cap_batch_sizes: Sizes | None = None
    cap_fraction: Share = 0.25
    cap_budget_bytes: Positive | None = None
    quick: Boolean = False


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
    workload: str = "fashion_cnn"
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
    def images_per_s(self) -> float | None:
        """Images really seen per second; `None` unless the trial was timed."""
        if self.outcome != "ok" or not self.images or not self.epoch_s:
            return None
        return self.images / self.epoch_s

    @property
    def mean_step_s(self) -> float | None:
        """Step time as the article prints it: seconds of the epoch / steps."""
        if self.outcome != "ok" or not self.steps or self.epoch_s is None:
            return None
        return self.epoch_s / self.steps


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
            hint = f"did you mean {near[0]!r}?" if near else "see --help-notebook or --help"
            raise InputError(f"unknown parameter {name!r}: {hint} (allowed: {', '.join(names)})")


def one_line(error: ValidationError) -> str:
    """Say a pydantic error in one line: field, value, what is allowed."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"] if not str(part).startswith("function"))
        reason = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        given = shown(item.get("input"))
        lines.append(f"{where}: got {given}; {reason}" if where else reason)
    return "; ".join(dict.fromkeys(lines))
