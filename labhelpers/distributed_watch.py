"""See that no rank waits for ever: a deadline that asks who is still there and ends the job."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

EXIT_TIME_LIMIT = 124
GRACE_S = 5.0
"""Ranks come to a deadline at slightly different moments; so long one waits for the others."""


class Store(Protocol):
    """The part of torch's key-value store that a roll call needs."""

    def set(self, key: str, value: str, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...


class RollCall:
    """Find out which ranks of a job answer; each rank that asks has thereby answered itself."""

    def __init__(
        self, store: Store, rank: int, world_size: int, *, grace_s: float = GRACE_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self.rank, self.world_size = rank, world_size
        self._store, self._grace_s, self._sleep = store, grace_s, sleep

    def missing(self) -> list[int] | None:
        """Return the ranks that do not answer; None if the store itself is gone."""
        try:
            self._store.set(f"here/{self.rank}", "yes")
            self._sleep(self._grace_s)
            ranks = range(self.world_size)
            return [rank for rank in ranks if not self._store.check([f"here/{rank}"])]
        except RuntimeError:  # torch's DistNetworkError and DistStoreError are of this class
            return None

    def verdict(self) -> str:
        """Say in one line who does not answer."""
        missing = self.missing()
        if missing is None:
            return "the host of rank 0 does not answer"
        if not missing:
            return f"all {self.world_size} ranks still answer"
        return f"{name_ranks(missing)} not answer: ended, stopped or unreachable"


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks as the subject of 'do' or 'does': 'rank 1 does', 'ranks 1 and 3 do'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} does"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} do"


class Deadline:
    """End this process, with the culprit named, when a block takes longer than it may.

    A thread does it, because a rank that waits inside a collective runs no Python of its own;
    and it ends the process at once, because nothing can call such a rank back. What is on disk
    by then is kept, and torchrun ends the other ranks.
    """

    def __init__(self, roll: RollCall, end: Callable[[int], object] = os._exit) -> None:
        self._roll, self._end = roll, end

    @contextmanager
    def within(
        self, seconds: float, what: str, *, advice: str = "finished trials are kept"
    ) -> Iterator[None]:
        """Allow the block so many seconds; `advice` ends what is said when they are over."""
        timer = threading.Timer(seconds, self._expired, (seconds, what, advice))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _expired(self, seconds: float, what: str, advice: str) -> None:
        print(
            f"labhelpers: rank {self._roll.rank}: {what}: no end within {seconds:g} s; "
            f"{self._roll.verdict()}; {advice}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        self._end(EXIT_TIME_LIMIT)
