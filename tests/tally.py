"""Counts that tests keep while they run; printed at the end of the run."""

from collections import Counter

COUNTS: Counter[str] = Counter()


def count(what: str, number: int = 1) -> None:
    """Add to a count."""
    COUNTS[what] += number
