"""Choose which sizes to prove with the headroom kept free: a pure function of trials."""

from __future__ import annotations

from collections.abc import Sequence

from labhelpers.finder_trials import Terms, live_bytes, outcome_of, taken_bytes
from labhelpers.forecast import fit_line, latest_regime
from labhelpers.records import Trial
from labhelpers.search_steps import Sizes

CAUTION = 0.99
"""Part of the predicted size that is tried first: a failure costs more than a sample."""
STEPS_BACK = (1.0, 0.96, 0.9, 0.75, 0.5, 0.25, 0.0)
"""Parts of the first size that are tried one after the other until one runs."""
SHARE_AT_THE_END = 0.97
"""Part of the limit that tensors are expected to fill, where no search has found the end."""


def leaves_headroom(trial: Trial, terms: Terms) -> bool:
    """Tell whether a trial ran and took no more than what leaves the headroom free."""
    if outcome_of(trial) != "ok":
        return False
    taken = taken_bytes(trial)
    if taken is None:
        return terms.headroom == 0 or (trial.cap_bytes or terms.limit_bytes) <= terms.allowed_bytes
    # Without a headroom there is nothing to leave: what ran, ran.
    return terms.headroom == 0 or taken <= terms.allowed_bytes


def with_headroom(trials: Sequence[Trial], terms: Terms) -> int | None:
    """Return the largest size that ran and left the headroom free; None if none did."""
    sizes = [trial.batch_size for trial in trials if leaves_headroom(trial, terms)]
    return max(sizes, default=None)


def candidates(trials: Sequence[Trial], terms: Terms, *, found_end: bool) -> list[int]:
    """List the sizes to prove with less memory, the most hopeful first; `[]` if none is needed.

    They lie above what is known to leave the headroom, up to the largest that ran, where the
    line through the live peaks reaches the same part of the smaller limit as at the largest
    size of the full one. `found_end` tells that memory ended the search.
    """
    ran = {t.batch_size: live_bytes(t) for t in trials if outcome_of(t) == "ok"}
    best, largest = with_headroom(trials, terms) or 0, max(ran)
    if best >= largest:
        return []
    target = CAUTION * _target(ran, terms, found_end)
    if target < best + 1 and best:
        return []
    powers = terms.powers_of_two or terms.strategy == "doubling"
    sizes = Sizes(largest, terms.multiple_of, powers)
    picked = (sizes.pick(best, None, target * part) for part in STEPS_BACK)
    return list(dict.fromkeys(size for size in picked if size is not None))


def _target(ran: dict[int, int | None], terms: Terms, found_end: bool) -> float:
    largest = max(ran)
    readings = [(size, live) for size, live in sorted(ran.items()) if live]
    line = fit_line(latest_regime(readings))
    if line is None or line.slope <= 0:
        return largest * (1 - terms.headroom)
    at_the_end = line.intercept + line.slope * largest
    share = min(1.0, at_the_end / terms.limit_bytes) if found_end else SHARE_AT_THE_END
    return (share * terms.allowed_bytes - line.intercept) / line.slope
