"""What runs inside the worker for a search: a session that stays open between the trials."""

from __future__ import annotations

from typing import Any

from labhelpers.environment import resolve_device
from labhelpers.finder_failures import failure_facts
from labhelpers.finder_probes import Session
from labhelpers.finder_room import keep_heap_small
from labhelpers.inputs import InputError
from labhelpers.oom import is_oom
from labhelpers.records import FinderSpec
from labhelpers.worker import unpacked
from labhelpers.workloads import Workload, workload_from

_sessions: dict[str, Session] = {}


def open_session(token: str, asked: dict[str, Any], source: bytes | None,
                 settings: dict[str, Any] | None) -> dict[str, Any]:  # fmt: skip
    """Open a session under a name, in the place of any other, and return its facts.

    Where that fails the answer says why: `cannot_load` if the packed workload cannot be
    unpacked here, the facts of a failure if its model cannot be built.

    Raises:
        InputError: the device does not exist here, or the reference is none of a workload.
    """
    for name in list(_sessions):
        _sessions.pop(name).close()
    spec = FinderSpec(**asked)
    if resolve_device(spec.device, require_gpu=spec.require_gpu) == "cpu":
        keep_heap_small()
    workload: Workload
    if source is None:
        workload = workload_from(spec.workload, input_shape=spec.input_shape, classes=spec.classes)
    else:
        try:
            workload = unpacked(source)
        except Exception as error:  # noqa: BLE001 - the parent then keeps it at home
            return {"cannot_load": f"{type(error).__name__}: {error}"}
    return opened(token, workload, spec, settings)


def opened(
    token: str, workload: Workload, spec: FinderSpec, settings: dict[str, Any] | None
) -> dict[str, Any]:
    """Build the workload's session and keep it under a name; return its facts or its failure."""
    try:
        _sessions[token] = Session(workload, spec, settings)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the workload raises is its outcome
        failed = failure_facts(error, host_limit=False)
        return failed | ({"outcome": "oom"} if is_oom(error) else {})
    return _sessions[token].facts()


def try_in_session(
    token: str, batch_size: int, cap_bytes: int | None, limit_s: float
) -> dict[str, Any] | None:
    """Try a size in an open session; None if there is no such session in this process."""
    session = _sessions.get(token)
    return None if session is None else session.try_size(batch_size, cap_bytes, limit_s)


def close_session(token: str) -> None:
    """Close a session, if it is open: what it kept on the device is freed."""
    session = _sessions.pop(token, None)
    if session is not None:
        session.close()
