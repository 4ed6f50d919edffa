"""Refuse a sweep that cannot go well, in one line, before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence

from labhelpers.environment import check_device_name, resolve_device
from labhelpers.inputs import InputError
from labhelpers.records import FASHION, TRAINING_IMAGES, Spec, SweepSpec
from labhelpers.store import RunDirectory


def check_request(spec: SweepSpec) -> None:
    """Check a request without touching a device or the data; InputError in one line."""
    check_device_name(spec.device)
    if spec.workload == FASHION and spec.feed == "own":
        raise InputError(
            "feed: got 'own'; FashionMNIST needs 'article', 'workers', 'host' or 'resident'"
        )
    if spec.workload != FASHION and spec.feed != "own":
        raise InputError(
            f"feed: got {spec.feed!r}, but {spec.workload} brings its own loader; leave feed away"
        )
    if spec.workload == FASHION and (spec.images or 0) > TRAINING_IMAGES:
        raise InputError(
            f"images: got {spec.images:,}; FashionMNIST has {TRAINING_IMAGES:,} training images"
        )


def check_device(spec: Spec) -> None:
    """Refuse a device that is not here; torch is loaded only where one is named."""
    if spec.require_gpu or spec.device not in ("auto", "cpu"):
        resolve_device(spec.device, require_gpu=spec.require_gpu)


def check_before(spec: SweepSpec) -> None:
    """Check a request, its device and its data before a worker is started."""
    check_request(spec)
    check_device(spec)
    if spec.workload == FASHION:
        from labhelpers.data import load_arrays

        load_arrays(spec.data_dir, synthetic=spec.synthetic)


def check_same_request(
    run: RunDirectory, spec: Spec, kind: str, names: Sequence[str], *, name: str | None = None
) -> None:
    """Refuse to mix trials of different requests in one run; sizes and repeats may grow.

    `names` are the fields of the spec that must be what they were; `name` is the earlier
    request's where it is not that of its kind of trials.
    """
    earlier = run.info.specs.get(name or kind)
    if not earlier or not run.trials(kind):
        return
    for name in names:
        given, before = getattr(spec, name), earlier.get(name)
        if given != before:
            raise InputError(
                f"{name}: got {given!r}, but {run.path} was measured with {before!r}; use that, "
                "or a new run directory"
            )


def check_trusted(run: RunDirectory, workload: str | None) -> None:
    """Refuse to run code that only a results file names; `workload` is what a person names.

    Raises:
        InputError: the run measures a workload of its own, and another one or none is named.
    """
    for name in ("sweep", "ddp"):
        named = run.info.specs.get(name, {}).get("workload", FASHION)
        if named not in (FASHION, workload):
            raise InputError(
                f"this run measures code of its own, {named}; if you trust it: labhelpers resume "
                f"{run.path} --workload {named}"
            )
