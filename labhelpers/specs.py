"""What can be asked: one frozen record for each kind of measurement; no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from labhelpers.fields import (
    Boolean,
    Headroom,
    Integer,
    Names,
    Number,
    Positive,
    Repeats,
    Seconds,
    Seed,
    Shape,
    Share,
    Sizes,
    Text,
)
from labhelpers.inputs import is_nothing

FASHION = "fashion_cnn"
"""Name of the article's workload."""

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
FeedName = Literal["article", "workers", "host", "resident", "own"]
Order = Literal["article", "ascending", "descending", "shuffled"]


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
    workload: Text = FASHION
    trial_timeout_s: Seconds = 600.0

    auto_means_auto: ClassVar[frozenset[str]] = frozenset()
    """Fields for which 'auto' is a value of its own and does not mean "not given"."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_none(cls, given: Any) -> Any:
        """Read papermill's text 'None' as None wherever None is allowed."""
        optional = {name for name, field in cls.model_fields.items() if field.default is None}
        optional -= {name for name in cls.auto_means_auto if _is_auto(given.get(name))}
        return {k: None if k in optional and _unset(v) else v for k, v in dict(given).items()}


def _unset(value: Any) -> bool:
    return is_nothing(value) and value != ""


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() == "auto"


class SweepSpec(Spec):
    """Ask for images/s and memory over batch sizes (first article).

    `None` means "what suits the device"; `sweep.resolved` fills it in before anything runs.
    `repeats="auto"`: at least six, in random order, until the medians are settled or the
    measured epochs took `time_budget_s`. `limits`: also find out what limits each size.
    """

    batch_sizes: Sizes | None = None
    repeats: Repeats | None = None
    images: Positive | None = None
    order: Order = "article"
    feed: FeedName = "article"
    workers: Annotated[Integer, Field(ge=0, le=256)] = 0
    share: Share = 0.93
    time_budget_s: Seconds = 600.0
    limits: Boolean = True
    quick: Boolean = False

    auto_means_auto: ClassVar[frozenset[str]] = frozenset({"repeats"})

    @model_validator(mode="before")
    @classmethod
    def _own_loader(cls, given: Any) -> Any:
        """Name the feed of a workload that is not the article's: it brings its own loader."""
        asked = dict(given)
        own = str(asked.get("workload", FASHION)).strip() != FASHION
        if own and asked.get("feed", "article") == "article":
            asked["feed"] = "own"
        return asked


class LadderSpec(Spec):
    """Ask how fast the same training can go, one change after the other.

    At batch size B an epoch has `images`, but never more than `max_steps` steps. `workers` are
    the numbers of DataLoader workers to try. `None` means "what suits the device".
    """

    batch_sizes: Sizes | None = None
    repeats: Positive | None = None
    images: Positive | None = None
    max_steps: Positive | None = None
    rungs: Names | None = None
    workers: Sizes | None = None
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
    """Ask for the largest batch size that fits (second article).

    `limit_bytes` is what the trials may use: a cap on a GPU, a budget on the CPU; None for all
    that is free on a GPU, and a part of it on the CPU. `optimizer` names one of torch's; None
    for the workload's own. `card_mib` are cards to emulate. The other `None` mean "what suits
    the device".
    """

    input_shape: Shape | None = None
    classes: Positive | None = None
    optimizer: Text | None = None
    dataset_size: Positive | None = None
    max_batch_size: Positive | None = None
    num_iterations: Positive = 5
    strategy: Literal["exact", "doubling", "bisect"] = "exact"
    headroom: Headroom = 0.1
    multiple_of: Positive = 1
    powers_of_two: Boolean = False
    limit_bytes: Positive | None = None
    trial_timeout_s: Seconds = 120.0
    time_budget_s: Seconds = 600.0
    card_mib: Sizes | None = None
    quick: Boolean = False


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
