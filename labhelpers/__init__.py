"""Timing and memory capture behind a report about batch size.

Public names are loaded when first used, so that `import labhelpers` stays quick and takes
neither torch nor matplotlib nor ipywidgets with it.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "InputError": "inputs",
    "SweepSpec": "records",
    "Trial": "records",
    "Workload": "workloads",
    "accumulate": "accumulation",
    "ask": "records",
    "attempt": "oom",
    "check_oom_message": "oom_check",
    "find_batch_size": "finder",
    "is_oom": "oom",
    "judge_memory": "oversubscription",
    "memory_cap": "caps",
    "open_run": "store",
    "parse_oom_message": "oom_message",
    "release_memory": "freeing",
    "run_sweep": "sweep",
    "search_batch_size": "finder",
    "sweet_spot": "verdicts",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'labhelpers' has no attribute {name!r}")
    return getattr(importlib.import_module(f"labhelpers.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
