"""What runs inside the worker for a search: a session that stays open between the trials.

The parent imports this module to name its functions; torch is loaded only where they run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labhelpers.inputs import InputError
from labhelpers.records import FinderSpec
from labhelpers.worker import unpacked

if TYPE_CHECKING:
    from labhelpers.finder_probes import Session
    from labhelpers.workloads import Workload

_sessions: dict[str, Session] = {}


def open_session(
    token: str, asked: dict[str, Any], source: bytes | None, settings: dict[str, Any] | None
) -> dict[str, Any]:
    """Open a session under a name, in the place of any other, and return its facts.

    Where that fails the answer says why: `cannot_load` if the packed workload cannot be
    unpacked here, the facts of a failure if its model cannot be built.

    Raises:
        InputError: the device does not exist here, or the reference is none of a workload.
    """
    from labhelpers.environment import resolve_device
    from labhelpers.finder_room import keep_heap_small

    for name in list(_sessions):
        close_session(name)
    spec = FinderSpec(**asked)
    if resolve_device(spec.device, require_gpu=spec.require_gpu) == "cpu":
        keep_heap_small()
    if source is None:
        return opened(token, None, spec, settings, own_process=True)
    try:
        workload = unpacked(source)
    except Exception as error:  # noqa: BLE001 - the parent then keeps it at home
        return {"cannot_load": f"{type(error).__name__}: {error}"}
    return opened(token, workload, spec, settings, own_process=True)


def opened(
    token: str, workload: Workload | None, spec: FinderSpec, settings: dict[str, Any] | None, *,
    own_process: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Build a session and keep it under a name; return its facts or its failure.

    `workload` None means the spec's reference.
    """
    from labhelpers.finder_failures import failure_facts
    from labhelpers.finder_probes import Session
    from labhelpers.oom import is_oom

    try:
        job = workload or _named(spec)
        _sessions[token] = Session(job, spec, settings, own_process=own_process)
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


def _named(spec: FinderSpec) -> Workload:
    from labhelpers.workloads import workload_from

    return workload_from(spec.workload, input_shape=spec.input_shape, classes=spec.classes)
