"""Find the batch size that fits, for any model: predict, prove, hand everything back."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from labhelpers.environment import check_device_name
from labhelpers.finder_places import InProcess, choose_place, stays_here
from labhelpers.finder_report import BatchSizeReport
from labhelpers.finder_search import FinderProgress, Report, Search, callers_cap_bytes
from labhelpers.inputs import InputError
from labhelpers.records import FinderSpec, ask
from labhelpers.search import NothingFits, WorkloadFailed
from labhelpers.store import RunDirectory
from labhelpers.worker import Worker

__all__ = ["FinderProgress", "find_batch_size", "run_finder", "search_batch_size"]


def find_batch_size(
    model: Any, input_shape: Sequence[int], output_shape: Sequence[int], dataset_size: int,
    device: Any = None, max_batch_size: int | None = None, num_iterations: int = 5, *,
    strategy: str = "exact", headroom: float = 0.1, isolate: bool | None = None,
) -> int:  # fmt: skip
    """Return the largest batch size that ran and leaves the headroom free; `model` is untouched.

    Each size is trained `num_iterations` steps (at least three) with Adam and a mean squared
    error, on random inputs and targets, forward, backward and update, beginning at 2.

    Args:
        model: a torch model; it is handed back as it was, also after an error or Ctrl-C.
        input_shape, output_shape: of one sample, without the batch dimension.
        dataset_size, max_batch_size: no batch is larger.
        device: such as "cuda:1"; the best there is by default.
        strategy: "exact", "doubling" (the article's own) or "bisect".
        headroom: share of the usable memory to leave free; 0 for the largest that ran.
        isolate: False tries in this process, True never; the default prefers a worker process.

    Raises:
        InputError: bad input.
        NothingFits: no size runs, or none leaves the headroom free.
        Exception: the model's own error, where no size ran because of it.
    """
    from labhelpers.finder_shapes import shapes_workload
    from labhelpers.handback import read_settings

    workload = shapes_workload(model, input_shape, output_shape)
    asked = {
        "workload": workload.name, "device": "auto" if device is None else str(device),
        "dataset_size": dataset_size, "max_batch_size": max_batch_size, "strategy": strategy,
        "num_iterations": num_iterations, "headroom": headroom,
    }  # fmt: skip
    spec, settings = ask(FinderSpec, asked), read_settings()
    report = _or_own_error(
        lambda: run_finder(spec, workload=workload, settings=settings, isolate=isolate)
    )
    for note in report.notes:
        warnings.warn(note, stacklevel=2)
    if report.with_headroom is None:
        raise NothingFits(
            f"batch size {report.largest:,} runs, but no size leaves {headroom:.0%} of the memory "
            "free; free some, or give headroom=0", report.result.probes,
        )  # fmt: skip
    return report.with_headroom


def search_batch_size(
    workload: Any, *, run: RunDirectory | None = None, worker: Worker | None = None,
    isolate: bool | None = None, on_progress: Report | None = None,
    stop: threading.Event | None = None, **asked: Any,
) -> BatchSizeReport:  # fmt: skip
    """Search the largest batch size of a workload that fits, and report every probe.

    Args:
        workload: a `Workload`, or a reference such as "torchvision.models:resnet50" (then give
            `input_shape` and `classes` too).
        run: where each probe is kept as a trial; what it holds already is not tried again.
        worker: a warm worker to use; one of its own by default.
        isolate: as for `find_batch_size`.
        on_progress: called before and after each probe.
        stop: ends the search when it is set.
        asked: fields of `FinderSpec`.

    Raises:
        InputError: bad input.
        NothingFits: no size runs.
        Stopped: `stop` was set.
        Exception: the workload's own error, where no size ran because of it.
    """
    named = isinstance(workload, str)
    spec = ask(FinderSpec, {**asked, "workload": workload if named else _name_of(workload)})
    return _or_own_error(
        lambda: run_finder(
            spec, run, workload=None if named else workload, worker=worker, isolate=isolate,
            on_progress=on_progress, stop=stop,
        )
    )  # fmt: skip


def run_finder(
    spec: FinderSpec, run: RunDirectory | None = None, *, workload: Any = None,
    settings: Mapping[str, Any] | None = None, worker: Worker | None = None,
    isolate: bool | None = None, on_progress: Report | None = None,
    stop: threading.Event | None = None,
) -> BatchSizeReport:  # fmt: skip
    """Do what `search_batch_size` does, for a spec; `workload` None means the spec's reference.

    Raises:
        WorkloadFailed: in the place of the workload's own error.
    """
    if workload is not None:
        _name_of(workload)
    check_device_name(spec.device)
    cap_bytes = callers_cap_bytes(spec.device)
    if cap_bytes is not None:  # a worker process does not have it
        limit_bytes = min(spec.limit_bytes or cap_bytes, cap_bytes)
        spec = spec.model_copy(update={"limit_bytes": limit_bytes})
    own = None if settings is None else dict(settings)
    place, note = choose_place(spec, workload, own, worker=worker, isolate=isolate, stop=stop)
    search = Search(spec, run, place, on_progress or (lambda _: None), own is not None)
    with ExitStack() as stack:
        if run is not None:
            stack.enter_context(run.writing())
        stack.callback(lambda: search.place.close())
        refused = search.open()
        if refused is not None:
            note = stays_here(isolate, refused)
            search.place.close()
            search.place = InProcess(spec, workload, own, stop)
            search.open()
        return search.report([note] if note else [])


def _name_of(workload: Any) -> str:
    """Return what records call a workload.

    Raises:
        InputError: it is none, such as a model.
    """
    from torch import nn

    from labhelpers.workloads import Workload

    if isinstance(workload, Workload):
        return workload.name
    if isinstance(workload, nn.Module):
        raise InputError(
            f"workload: got a model ({type(workload).__name__}); call find_batch_size(model, "
            "input_shape, output_shape, dataset_size), or make a Workload of it"
        )
    raise InputError(
        f"workload: got {type(workload).__name__}; must be a Workload or a reference such as "
        "'torchvision.models:resnet50' (for a model there is find_batch_size)"
    )


def _or_own_error(search: Callable[[], BatchSizeReport]) -> BatchSizeReport:
    """Raise the workload's own error, with a note of where, instead of ours."""
    from labhelpers.finder_failures import own_error

    try:
        return search()
    except WorkloadFailed as failed:
        own = own_error(failed.probes[-1].payload)  # type: ignore[arg-type]
        if own is None:
            raise
        own.add_note(str(failed))
    raise own
