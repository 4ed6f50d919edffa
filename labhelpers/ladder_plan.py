"""The rungs of the ladder: each one change over a base, and why one may not exist here."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from labhelpers.inputs import InputError
from labhelpers.records import LadderSpec

SYNTHETIC = "synthetic"
"""The yardstick: eager training on one batch that stays where it is, without any feed."""
CEILINGS = "ceilings"
"""How the trial that holds the machine's measured ceilings is called."""


@dataclass(frozen=True)
class Setup:
    """How one rung trains. `feed` is one of `feeds.make_feed`, or `synthetic`."""

    feed: str = "article"
    workers: int = 0
    fused_adam: bool = False
    precision: str = "fp32"
    graph: bool = False
    compiled: bool = False
    channels_last: bool = False
    autotuned: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return asdict(self)


@dataclass(frozen=True)
class Rung:
    """One change over the nearest of its bases that exists.

    `what` says the change; `slower` says what to think of it where it made things slower.
    """

    name: str
    bases: tuple[str, ...]
    change: Mapping[str, Any]
    what: str
    slower: str


@dataclass(frozen=True)
class Ladder:
    """The rungs that exist on a device, in order, and the reasons why others do not."""

    setups: dict[str, Setup]
    bases: dict[str, str | None]
    missing: dict[str, str] = field(default_factory=dict)


RUNGS = (
    Rung("article", (), {}, "torchvision's dataset, ToTensor, a DataLoader without workers", ""),
    Rung(
        "workers", ("article",), {"feed": "workers"},
        "the same DataLoader with worker processes",
        "starting workers and passing batches between processes costs more than they save",
    ),
    Rung(
        "host", ("article",), {"feed": "host"},
        "images kept as bytes on the host, indexed by the batch, scaled on the device",
        "copying each batch costs more than decoding its images one by one: unusual",
    ),
    Rung(
        "resident", ("host",), {"feed": "resident"},
        "the same bytes kept on the device: nothing crosses the bus",
        "the device indexes its batches itself, in kernels of its own; where launching is the "
        "limit, those cost more than a copy that runs beside the training",
    ),
    Rung(
        SYNTHETIC, ("resident", "host"), {"feed": SYNTHETIC},
        "no feed at all: one batch again and again (a yardstick, not a rung)",
        "a yardstick below what it measures is noise",
    ),
    Rung(
        "fused_adam", ("resident", "host"), {"fused_adam": True},
        "Adam's update of all parameters in one kernel",
        "with so few parameters the fused kernel has nothing to gain",
    ),
    Rung(
        "tf32", ("fused_adam",), {"precision": "tf32"},
        "matrix products and convolutions may round their inputs to TF32",
        "these layers are too small to fill the matrix units, and other kernels are chosen",
    ),
    Rung(
        "cuda_graph", ("tf32", "fused_adam"), {"graph": True},
        "the whole step, picking the images included, captured once and replayed in one launch",
        "launching was not the limit here",
    ),
    Rung(
        "compile", ("tf32", "fused_adam"), {"compiled": True},
        "torch.compile: picking, scaling, forward, loss and backward in few fused kernels",
        "the compiled code is called from Python in pieces, with checks before each; where "
        "launching is the limit, that costs more than the fused kernels save",
    ),
    Rung(
        "compile_graph", ("cuda_graph",), {"compiled": True},
        "the compiled step captured in a CUDA graph: fewer kernels, one launch",
        "the fused kernels are no better here than the library's own",
    ),
    Rung(
        "bf16", ("cuda_graph", "fused_adam"), {"precision": "bf16"},
        "autocast to bfloat16 in place of TF32",
        "casting every input and weight costs more than these narrow layers save: with 1, 16 and "
        "32 channels the matrix units stay nearly empty",
    ),
    Rung(
        "fp16", ("cuda_graph", "fused_adam"), {"precision": "fp16"},
        "autocast to float16 with loss scaling, in place of TF32",
        "the same casts as bfloat16, and a check of all gradients for the loss scale on top",
    ),
    Rung(
        "channels_last", ("cuda_graph", "fused_adam"), {"channels_last": True},
        "weights and activations with the channels last in memory",
        "with 1 and 16 channels a pixel's channels fill no cache line; the layout pays from about "
        "64 channels on",
    ),
    Rung(
        "autotuned", ("compile_graph", "cuda_graph"), {"autotuned": True},
        "cuDNN tries its convolutions once and keeps the fastest",
        "its own guess was as good; what is left is noise",
    ),
)  # fmt: skip
NAMES = tuple(rung.name for rung in RUNGS)


def ladder_for(spec: LadderSpec, facts: Mapping[str, Any]) -> Ladder:
    """Return the rungs that a spec asks for and the device has, and why others are missing.

    `workers` becomes one rung for each number of workers asked for, `workers-4` and so on. A
    rung whose base is missing is built over its nearest other base. Bases are measured even
    where they were not asked for, so that each rung stands beside what it changes.

    Args:
        spec: a resolved spec.
        facts: of the environment, as a run keeps them.

    Raises:
        InputError: an unknown rung, or none of those asked for exists here.
    """
    setups: dict[str, Setup] = {}
    bases: dict[str, str | None] = {}
    missing: dict[str, str] = {}
    for rung in RUNGS:
        reason = reason_missing(rung.name, facts, rung.name in (spec.rungs or ()))
        if reason:
            missing[rung.name] = reason
            continue
        base = next((name for name in rung.bases if name in setups), None)
        setup = replace(setups[base] if base else Setup(), **rung.change)
        for name, variant in _variants(rung.name, setup, spec):
            setups[name], bases[name] = variant, base
    wanted = _wanted(spec, bases, missing)
    return Ladder(
        {name: setups[name] for name in setups if name in wanted},
        {name: bases[name] for name in bases if name in wanted},
        missing,
    )


def rung_of(name: str) -> Rung:
    """Return the rung that a variant such as `workers-4` belongs to."""
    return next(rung for rung in RUNGS if rung.name == name.partition("-")[0])


def check_rungs(names: tuple[str, ...] | None) -> None:
    """Refuse a rung that there is not; InputError names those that there are."""
    for name in names or ():
        if name not in NAMES:
            raise InputError(f"rungs: got {name!r}; must be among {', '.join(NAMES)}")


def reason_missing(name: str, facts: Mapping[str, Any], asked: bool) -> str | None:
    """Say why a rung does not exist on a device; None if it does."""
    gpu = facts.get("gpu")
    if gpu is None:
        return _missing_on_cpu(name, asked)
    major = int(str(gpu.get("capability", "0")).partition(".")[0])
    if name in ("tf32", "bf16") and major < 8:
        return f"this GPU has compute capability {gpu.get('capability')}; 8.0 or newer has it"
    return _missing_compiler() if name in ("compile", "compile_graph") else None


def _missing_on_cpu(name: str, asked: bool) -> str | None:
    if name == "resident":
        return "on the CPU the host is the device: the same as host"
    if name in ("tf32", "cuda_graph", "compile_graph", "autotuned"):
        return "needs an NVIDIA GPU"
    if name == "fp16":
        return "needs a GPU: processors have no fast float16 arithmetic for training"
    if name == "compile":
        why = "compiling for a CPU takes a minute or two; ask for it with rungs=compile"
        return _missing_compiler() if asked else why
    return None


def _missing_compiler() -> str | None:
    """Say what torch.compile lacks here: a C compiler, or Python's headers."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "g++", "clang")):
        return "torch.compile needs a C compiler; install gcc"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    return None if headers.exists() else "torch.compile needs Python's headers (python3-dev)"


def _variants(name: str, setup: Setup, spec: LadderSpec) -> list[tuple[str, Setup]]:
    if name != "workers":
        return [(name, setup)]
    return [(f"workers-{n}", replace(setup, workers=n)) for n in spec.workers or (1,)]


def _wanted(
    spec: LadderSpec, bases: Mapping[str, str | None], missing: Mapping[str, str]
) -> set[str]:
    """Return the rungs asked for, and the bases that they stand on."""
    check_rungs(spec.rungs)
    if spec.rungs is None:
        return set(bases)
    wanted: set[str] = set()
    for name in bases:
        link: str | None = name if name.partition("-")[0] in spec.rungs else None
        while link is not None and link not in wanted:
            wanted.add(link)
            link = bases[link]
    if not wanted:
        reasons = "; ".join(f"{name}: {missing[name]}" for name in spec.rungs)
        raise InputError(f"rungs: none of those asked for exists here ({reasons})")
    return wanted
