"""Why a trial of a batch size failed: facts to store, and the exception itself, packed."""

from __future__ import annotations

import os
import re
import site
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from labhelpers.inputs import error_text
from labhelpers.oom import is_context_lost, suspected_limit
from labhelpers.worker import packed, unpacked

_LIBRARIES = tuple(map(Path, (*site.getsitepackages(), os.path.dirname(os.__file__))))
_HERE = Path(__file__).parent
_ONEDNN = re.compile(r"could not (?:create|execute|initialize) a ")


class TooSlow(TimeoutError):
    """A trial went past its time limit between two steps."""


def failure_facts(error: Exception, *, host_limit: bool) -> dict[str, Any]:
    """Return outcome, class and text of an error that is not about memory, and its bytes.

    With `host_limit` (an address-space limit on the CPU) it may be: the CPU's kernel library
    then says only that it could not create something, and says so ever after. `spoiled` tells
    that the process, or that thread of it, is of no more use.
    """
    outcome, spoiled = "error", is_context_lost(error)
    if isinstance(error, TooSlow):
        outcome = "timeout"
    elif host_limit and isinstance(error, RuntimeError) and _ONEDNN.match(str(error)):
        outcome, spoiled = "oom", True
    return {
        "outcome": outcome,
        "spoiled": spoiled,
        "error_class": type(error).__name__,
        "error_text": " ".join(error_text(error).split()),
        "where": _place_in_own_code(error),
        "library_limit": suspected_limit(error) is not None,
        "error": _packed(error),
    }


def _place_in_own_code(error: Exception) -> str | None:
    """Return file, line and function of the innermost frame outside libraries and this package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_foreign(Path(frame.filename))]
    if not own:
        return None
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name}"


def _is_foreign(path: Path) -> bool:
    """Tell whether a file is a library's, Python's or this package's."""
    return str(path).startswith("<") or any(map(path.is_relative_to, (*_LIBRARIES, _HERE)))


def own_error(data: bytes | None) -> Exception | None:
    """Return the workload's own exception from its bytes; None where it could not travel."""
    if data is None:
        return None
    with suppress(Exception):
        error = unpacked(data)
        return error if isinstance(error, Exception) else None
    return None


def _packed(error: Exception) -> bytes | None:
    """Pack an exception without its traceback, whose frames would keep the tensors."""
    with suppress(Exception):
        return packed(error)
    return None
