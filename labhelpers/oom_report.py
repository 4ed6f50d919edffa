"""Put an out-of-memory error, what was measured beside it and its versions into one record."""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from labhelpers.drivers import driver_version
from labhelpers.inputs import InputError
from labhelpers.oom import Attempt
from labhelpers.oom_advice import advice
from labhelpers.oom_check import Observed, as_observed, check_oom_message
from labhelpers.platforms import platform_of


def oom_report(attempt: Attempt, observed: Any = None) -> dict[str, Any]:
    """Report an out-of-memory attempt as JSON-able values, sizes in bytes.

    Args:
        attempt: one that ended out of memory.
        observed: what the caller measured or knows (`batch_size`, `fraction`, peaks, …), as for
            `check_oom_message`; it comes before what was read at the failure.

    Raises:
        InputError: the attempt ended well.
    """
    failure = attempt.failure
    if failure is None:
        raise InputError("oom_report: got an attempt that ended well; give one with outcome 'oom'")
    seen = _fill(as_observed(observed), attempt)
    where = _platform()
    return {
        "outcome": attempt.outcome,
        "error_class": failure.error_class,
        "text": failure.text,
        "parsed": failure.message.to_dict(),
        **asdict(seen),
        "requested_bytes_per_image": _per_image(failure.message.requested_bytes, seen.batch_size),
        "platform": where,
        "disagreements": check_oom_message(failure.message, seen),
        "advice": [*filter(None, [attempt.advice]), *advice(failure.message, where)],
        "cleanup_error": attempt.cleanup_error,
        "context_lost": attempt.context_lost,
    }


def _fill(given: Observed, attempt: Attempt) -> Observed:
    """Complete what the caller gave with what was read at the failure and the versions here."""
    memory = asdict(attempt.failure.memory) if attempt.failure else {}
    torch = sys.modules.get("torch")
    here = {
        "torch": getattr(torch, "__version__", None),
        "cuda": getattr(getattr(torch, "version", None), "cuda", None),
        "driver": driver_version(),
    }
    known = {name: str(value) for name, value in here.items() if value is not None}
    values = {
        name: value if value is not None else memory.get(name, known.get(name))
        for name, value in asdict(given).items()
    }
    return Observed(**values)


def _per_image(requested_bytes: int | None, batch_size: int | None) -> float | None:
    return requested_bytes / batch_size if requested_bytes and batch_size else None


def _platform() -> str | None:
    """Name the platform; None on a system without CUDA."""
    with suppress(InputError):
        return platform_of(platform.release(), platform.system())
    return None
