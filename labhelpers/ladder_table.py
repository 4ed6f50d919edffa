"""A ladder's trials become rows: speed over the base, loss, share of the nearest ceiling. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labhelpers.ceilings import CeilingShare, share_of_ceiling, work_from
from labhelpers.ladder_plan import SYNTHETIC
from labhelpers.noise import MARGIN
from labhelpers.records import Trial
from labhelpers.verdicts import median, spread

LOSS_TOLERANCE = 0.05
"""A rung whose loss is farther from the article's than this share trains something else."""


@dataclass(frozen=True)
class Row:
    """One rung at one batch size; None is not measured.

    `slower`: measured twice or more, every repeat is below every repeat of its base, and the
    median by more than a margin; None where it was measured once, which cannot tell. `same_loss`
    tells whether its loss after the same images is the article's within a tolerance.
    """

    rung: str
    batch_size: int
    base: str | None
    images_per_s: float | None
    spread: float | None
    over_base: float | None
    over_article: float | None
    loss: float | None
    same_loss: bool | None
    slower: bool | None
    ceiling: CeilingShare | None
    prepare_s: float | None
    failure: str | None


def ladder_rows(trials: Iterable[Trial], ceilings: Mapping[str, Any]) -> list[Row]:
    """Return one row per rung and batch size, in the order measured.

    Args:
        ceilings: what `ladder.ceilings_of` returns, `{}` where there are none.
    """
    groups: dict[tuple[int, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.batch_size, str(trial.variant)), []).append(trial)
    return [_row(key, groups, ceilings) for key in groups]


def of_size(rows: Iterable[Row], batch_size: int) -> list[Row]:
    """Return the rows of one batch size."""
    return [row for row in rows if row.batch_size == batch_size]


def sizes_of(rows: Iterable[Row]) -> list[int]:
    """Return the batch sizes of the rows, ascending."""
    return sorted({row.batch_size for row in rows})


def rung_at(rows: Iterable[Row], rung: str, batch_size: int) -> Row | None:
    """Return the row of a rung at a batch size; None if there is none."""
    found = (row for row in rows if row.rung == rung and row.batch_size == batch_size)
    return next(found, None)


def top_rung(rows: Iterable[Row], batch_size: int) -> Row | None:
    """Return the fastest rung of a batch size that trains as the article does; None for none.

    The yardstick without a feed, and rungs with another loss, are no candidates.
    """
    candidates = [
        row
        for row in of_size(rows, batch_size)
        if row.images_per_s and row.rung != SYNTHETIC and row.same_loss is not False
    ]
    return max(candidates, key=lambda row: row.images_per_s or 0, default=None)


def best_workers(rows: Iterable[Row], batch_size: int) -> Row | None:
    """Return the fastest number of loader workers at a batch size; None if none was measured."""
    found = [row for row in of_size(rows, batch_size) if row.rung.startswith("workers-")]
    return max((r for r in found if r.images_per_s), key=lambda r: r.images_per_s or 0,
               default=None)  # fmt: skip


def _row(
    key: tuple[int, str], groups: Mapping[tuple[int, str], Sequence[Trial]],
    ceilings: Mapping[str, Any],
) -> Row:  # fmt: skip
    size, rung = key
    group, article = groups[key], groups.get((size, "article"), ())
    base = (group[0].details or {}).get("base")
    below = groups.get((size, str(base)), ())
    rate, loss = _rate(group), median(trial.final_loss for trial in group)
    failed = next((trial for trial in group if trial.outcome != "ok"), None)
    return Row(
        rung=rung, batch_size=size, base=base, images_per_s=rate,
        spread=spread(trial.images_per_s for trial in group),
        over_base=_ratio(rate, _rate(below)), over_article=_ratio(rate, _rate(article)),
        loss=loss, same_loss=_same(loss, median(trial.final_loss for trial in article)),
        slower=_slower(group, below), ceiling=_ceiling(group[0], rate, ceilings),
        prepare_s=(group[0].details or {}).get("prepare_s"),
        failure=None if failed is None else _why(failed),
    )  # fmt: skip


def _rate(group: Sequence[Trial]) -> float | None:
    return median(trial.images_per_s for trial in group)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def _same(loss: float | None, article: float | None) -> bool | None:
    if loss is None or not article:
        return None
    return abs(loss - article) <= LOSS_TOLERANCE * article


def _slower(group: Sequence[Trial], below: Sequence[Trial]) -> bool | None:
    mine = [trial.images_per_s for trial in group if trial.images_per_s]
    base = [trial.images_per_s for trial in below if trial.images_per_s]
    if min(len(mine), len(base)) < 2:
        return None
    return max(mine) < min(base) and (_rate(group) or 0) < (1 - MARGIN) * (_rate(below) or 0)


def _ceiling(trial: Trial, rate: float | None, ceilings: Mapping[str, Any]) -> CeilingShare | None:
    if rate is None or not ceilings:
        return None
    setup = (trial.details or {}).get("setup", {})
    return share_of_ceiling(
        rate, work_from(ceilings), trial.batch_size, fused=bool(setup.get("compiled")),
        flops_per_s=ceilings["flops_per_s"].get(trial.precision),
        bytes_per_s=ceilings["bytes_per_s"],
    )  # fmt: skip


def _why(trial: Trial) -> str:
    lines = (trial.error_text or trial.error_class or "no reason given").splitlines()
    return f"{trial.outcome}: {lines[0]}"
