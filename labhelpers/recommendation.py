"""Recommend a batch size from a measured curve: share of the best, memory, effective batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from labhelpers.formats import MIB, show_bytes, show_rate, show_share
from labhelpers.inputs import InputError
from labhelpers.narrative import waiting_at
from labhelpers.references import Curve
from labhelpers.verdicts import checked_share

Limit = Literal["share", "memory budget", "effective batch", "nothing measured"]


@dataclass(frozen=True)
class Recommendation:
    """The batch to train with, what it gives and costs, and what kept it from being another.

    `batch_size` is None where no measured size is allowed. `micro_batches` are the pieces of
    one update, in order; one piece is plain training. A peak that was not measured is None.
    """

    batch_size: int | None
    images_per_s: float | None
    share_of_best: float | None
    peak_bytes: float | None
    updates_per_epoch: int | None
    micro_batches: tuple[int, ...]
    limited_by: Limit
    share: float
    memory_budget_bytes: int | None
    effective_batch: int | None


def recommend(
    curve: Curve, share: float, memory_budget_bytes: int | None = None,
    effective_batch: int | None = None,
) -> Recommendation:  # fmt: skip
    """Choose the smallest measured size that reaches a share of the best and is allowed.

    Where no allowed size reaches the share, it is the fastest allowed one.

    Args:
        curve: a measured sweep; its best speed is what the share is taken of.
        share: above 0, at most 1.
        memory_budget_bytes: largest peak of allocated memory; None for no limit. A size whose
            peak was not measured is not known to fit.
        effective_batch: images per optimizer update, reached by accumulation where it is larger
            than the chosen size; None for one update per batch.

    Raises:
        InputError: for a share out of range, or a budget or effective batch below 1.
    """
    share = checked_share(share)
    _check_positive("memory_budget_bytes", memory_budget_bytes)
    _check_positive("effective_batch", effective_batch)
    rates = _column(curve, "images_per_s")
    peaks = {size: value * MIB for size, value in _column(curve, "allocated_mib").items()}
    fits = [s for s in rates if _fits(peaks.get(s), memory_budget_bytes)]
    allowed = [s for s in fits if effective_batch is None or s <= effective_batch]
    size, limit = _choice(rates, fits, allowed, share)
    pieces = () if size is None else split(effective_batch or size, size)
    return Recommendation(
        batch_size=size,
        images_per_s=None if size is None else rates[size],
        share_of_best=None if size is None else rates[size] / max(rates.values()),
        peak_bytes=None if size is None else peaks.get(size),
        updates_per_epoch=-(-curve.images // sum(pieces)) if pieces else None,
        micro_batches=pieces,
        limited_by=limit,
        share=share,
        memory_budget_bytes=memory_budget_bytes,
        effective_batch=effective_batch,
    )


def split(effective_batch: int, batch_size: int) -> tuple[int, ...]:
    """Split an update's images into micro-batches; the last holds what is left over."""
    full, rest = divmod(effective_batch, batch_size)
    return (batch_size,) * full + ((rest,) if rest else ())


def in_words(found: Recommendation, curve: Curve) -> str:
    """Say a recommendation as Markdown sentences: what to do, what it gives, what limits it."""
    if found.batch_size is None:
        return f"**{curve.label}**: no recommendation. {_why_none(found, curve)}"
    images_per_s, share = show_rate(found.images_per_s), show_share(found.share_of_best)
    peak = "not measured" if found.peak_bytes is None else show_bytes(found.peak_bytes)
    return " ".join(
        [
            f"**{curve.label}: train with batches of {found.batch_size:,}.**",
            f"{images_per_s}, {share} of the best measured; peak memory {peak}.",
            _updates(found, curve),
            _limit(found, curve),
            waiting_at(curve, found.batch_size),
        ]
    )


def _choice(
    rates: Mapping[int, float], fits: list[int], allowed: list[int], share: float
) -> tuple[int | None, Limit]:
    best = max(rates.values(), default=0.0)
    reaching = [size for size in rates if rates[size] >= share * best]
    good = [size for size in allowed if size in reaching]
    if not rates:
        return None, "nothing measured"
    if good:
        # A smaller size that is fast enough but not known to fit would have been the choice.
        return min(good), "share" if min(good) == min(reaching) else "memory budget"
    limit: Limit = "effective batch" if set(fits) & set(reaching) else "memory budget"
    if not allowed:
        return None, "effective batch" if fits else "memory budget"
    return max(allowed, key=lambda size: (rates[size], -size)), limit


def _updates(found: Recommendation, curve: Curve) -> str:
    updates = f"{found.updates_per_epoch:,} updates" if found.updates_per_epoch != 1 else "1 update"
    epoch = f"{updates} per epoch of {curve.images:,} images"
    if len(found.micro_batches) < 2:
        return f"That is {epoch}, without accumulation."
    *_, last = found.micro_batches
    full = sum(piece == found.batch_size for piece in found.micro_batches)
    rest = f" + {last:,}" if last != found.batch_size else ""
    return (
        f"Accumulate {len(found.micro_batches)} micro-batches per update "
        f"({full} × {found.batch_size:,}{rest} = {found.effective_batch:,} images): {epoch}."
    )


def _limit(found: Recommendation, curve: Curve) -> str:
    share = show_share(found.share, 0)
    if found.limited_by == "share":
        if found.batch_size == max(_column(curve, "images_per_s")):
            return f"No smaller size reaches {share}, and none larger was measured."
        return f"No smaller size reaches {share}; a larger one would add less than the rest."
    if found.limited_by == "effective batch":
        return (
            f"The effective batch of {found.effective_batch:,} limits it: "
            f"no size up to there reaches {share}."
        )
    budget = show_bytes(found.memory_budget_bytes)
    if (found.share_of_best or 0) >= found.share:
        return f"A smaller size is fast enough, but is not known to fit into {budget}."
    return f"The memory budget of {budget} limits it: nothing that fits reaches {share}."


def _why_none(found: Recommendation, curve: Curve) -> str:
    if found.limited_by == "nothing measured":
        return "No batch size was measured."
    if found.limited_by == "effective batch":
        smallest = int(curve.table.dropna(subset=["images_per_s"])["batch_size"].min())
        return (
            f"No size up to the effective batch of {found.effective_batch:,} was measured "
            f"(the smallest is {smallest:,})."
        )
    budget = show_bytes(found.memory_budget_bytes)
    peaks = _column(curve, "allocated_mib")
    if not peaks:
        return f"Memory was not measured here, so nothing is known to fit into {budget}."
    least = show_bytes(min(peaks.values()) * MIB)
    return f"Nothing fits into {budget}; the smallest peak measured is {least}."


def _fits(peak_bytes: float | None, budget_bytes: int | None) -> bool:
    return budget_bytes is None or (peak_bytes is not None and peak_bytes <= budget_bytes)


def _column(curve: Curve, name: str) -> dict[int, float]:
    known = curve.table.dropna(subset=[name])
    pairs = zip(known["batch_size"], known[name], strict=True)
    return {int(size): float(value) for size, value in pairs}


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InputError(f"{name} is {value!r}; it must be at least 1, or None for no limit")
