"""Choose which batch size a search tries next, from what ran, what failed and the peaks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from labhelpers.forecast import (
    Forecast,
    Reading,
    believe,
    below_failures,
    has_fallen,
    is_settled,
    is_squeezed,
    latest_regime,
    proportional,
)
from labhelpers.search_result import BOUNDS, EndedBy, ProbeResult

Strategy = Literal["exact", "doubling", "bisect"]

RISK = 0.1
"""Accepted probability that a probe meant to run fails: failures are few, not none."""
RISK_OF_THE_FIRST = 0.4
"""The same while nothing has failed: one failure is needed anyway, to prove the end."""
RISK_AFTER_A_FALL = 0.5
"""The same where peaks fell with growing size: probes are what is scarce there."""
FIRST_GROWTH = 16
TRUSTED_GROWTH = 4
"""Multiple of the largest size up to which a line is followed to the limit.

Beyond it, first so far or a quarter of the way is gone, by at most `LARGEST_GROWTH`.
"""
LARGEST_GROWTH = 64
SURPRISE_GROWTH = 4
"""Factor of the step where the next size should have failed, and ran."""
LEAST_GROWTH_AFTER_A_FALL = 1.05
FREE_SHORT_STEPS = 8
"""Successes that may double nothing before the least step begins to double."""
MOST_STALLS = 2
"""Probes in a row that may fail to halve the range before what is left below `top` is halved."""
MOST_STALLS_AFTER_A_FALL = 1
STALLS_TO_THE_END = 5
"""The same, before the range itself is halved: `top` is a guess too."""
NARROW = 4
"""Range that is halved at once after a fall: a guess could only creep through it."""


@dataclass(frozen=True)
class Sizes:
    """The batch sizes allowed: multiples of a number, or powers of two, up to a top."""

    top: int
    multiple_of: int = 1
    powers_of_two: bool = False

    def pick(self, low: int, high: int | None, target: float) -> int | None:
        """Return the allowed size nearest below the target, between low and high (excluded).

        The smallest such size where the target lies below it; None where there is none.
        """
        first = self._above(low)
        last = self.top if high is None else min(self.top, high - 1)
        if first > last:
            return None
        return max(first, self._down(math.floor(min(target, last))))

    def _above(self, size: int) -> int:
        if self.powers_of_two:
            return 1 << size.bit_length()
        return size - size % self.multiple_of + self.multiple_of

    def _down(self, size: int) -> int:
        if self.powers_of_two:
            return 1 << (size.bit_length() - 1) if size > 0 else 0
        return size - size % self.multiple_of


@dataclass
class State:
    """What is known so far: `low` ran (0: none yet), `high` failed (None: none yet).

    `bound` names what `high` failed of; `expected` is where memory was last guessed to end on
    the way up, and `surprises` counts the sizes that ran from there on, since peaks last fell.
    """

    probes: list[ProbeResult] = field(default_factory=list)
    low: int = 0
    high: int | None = None
    bound: EndedBy | None = None
    expected: float = math.inf
    surprises: int = 0
    short_steps: int = 0
    stalls: int = 0
    failures_in_a_row: int = 0

    def add(self, result: ProbeResult) -> None:
        """Take in a result, and count the steps that brought little, upwards and between."""
        low, high = self.low, self.high
        self.probes.append(result)
        if result.outcome == "ok":
            self.failures_in_a_row = 0
            self.low = result.batch_size
            fell = len(latest_regime(self.main_readings)) == 1
            self.surprises = 0 if fell else self.surprises + (self.low >= self.expected)
        else:
            self.failures_in_a_row += 1
            self.high = result.batch_size
            self.bound = BOUNDS[result.outcome]
        if high is None or self.high is None:
            self.short_steps += self.high is None and self.low < 2 * low
        else:
            self.stalls = 0 if 2 * (self.high - self.low) <= high - low else self.stalls + 1

    def readings(self, name: str) -> list[Reading]:
        """Return size and peak of the sizes that ran, by size, where the peak was measured."""
        ran = (probe for probe in self.probes if probe.outcome == "ok")
        pairs = ((probe.batch_size, getattr(probe, name)) for probe in ran)
        return sorted(pair for pair in pairs if pair[1] is not None)

    @property
    def main_readings(self) -> list[Reading]:
        """Return the live peaks, or the reserved ones where no live peak was measured."""
        return self.readings("live_bytes") or self.readings("peak_bytes")

    @property
    def taken_readings(self) -> list[Reading]:
        """Return the reserved peaks, or the live ones where no reserved peak was measured."""
        return self.readings("peak_bytes") or self.readings("live_bytes")

    @property
    def has_fallen(self) -> bool:
        """Whether a peak fell with growing size."""
        return has_fallen(self.main_readings)

    @property
    def failures(self) -> list[Reading]:
        """Return the sizes that failed and what each needed, by size; `[]` if `high` says none."""
        known = sorted(
            (probe.batch_size, probe.needed_bytes)
            for probe in self.probes
            if probe.outcome != "ok" and probe.needed_bytes is not None
        )
        return known if known and known[0][0] == self.high else []


def next_target(
    state: State, strategy: Strategy, limit_bytes: int | None, start: int, grain: int = 1
) -> float | None:
    """Return the size to try next, before it is fitted to the sizes allowed; None to stop.

    `grain` is what allowed sizes are multiples of: the least step.
    """
    if not state.probes:
        return start
    if state.high is None:
        guess = _guess(state, strategy, limit_bytes)
        return 2 * state.low if guess is None else _upwards(state, guess, limit_bytes or 0, grain)
    if state.low == 0:
        return state.high / 2
    if strategy == "doubling":
        return None
    guess = None if _is_misled(state) else _guess(state, strategy, limit_bytes)
    # A failure that is not about memory may come anywhere, unless memory ends below it.
    if guess is None or (state.bound != "memory" and guess.center >= state.high):
        return (state.low + state.high) / 2
    if _must_halve(state):
        return (state.low + min(state.high, guess.top)) / 2
    return guess.quantile(state.low, state.high, _risk(state))


def _guess(state: State, strategy: Strategy, limit_bytes: int | None) -> Forecast | None:
    if strategy != "exact" or limit_bytes is None:
        return None
    peaks, live = state.readings("peak_bytes"), state.readings("live_bytes")
    guess = believe(peaks, live, limit_bytes, state.high)
    failures = state.failures
    if not failures:
        return guess
    if state.has_fallen and (len(failures) > 1 or is_squeezed(peaks, live, limit_bytes)):
        guess = None  # no peak says where the end is; the failures do
    return below_failures(guess, state.low, state.main_readings, failures, limit_bytes)


def _is_misled(state: State) -> bool:
    """Tell whether no guess is to be believed any more."""
    failed_again = state.failures_in_a_row > 1 and not state.has_fallen
    return failed_again or state.stalls >= STALLS_TO_THE_END


def _must_halve(state: State) -> bool:
    """Tell whether guessing has brought too little, or could not bring more than halving."""
    if not state.has_fallen:
        return state.stalls >= MOST_STALLS
    narrow = state.high is not None and state.high - state.low <= NARROW
    return narrow or state.stalls >= MOST_STALLS_AFTER_A_FALL


def _risk(state: State) -> float:
    if state.has_fallen:
        return RISK_AFTER_A_FALL
    return RISK_OF_THE_FIRST if state.high is None else RISK


def _after_a_fall(state: State, cautious: float, limit_bytes: int) -> float:
    """Return the next size up where peaks fell: as far as what is reserved and live allow.

    Where the allocator has given back its caches already, the end lies anywhere between.
    """
    peaks, live = state.taken_readings, state.main_readings
    reserved = proportional(peaks, limit_bytes)
    if len(latest_regime(live)) > 1 and not is_squeezed(peaks, live, limit_bytes):
        return cautious
    least = LEAST_GROWTH_AFTER_A_FALL * state.low
    if reserved >= least:
        return reserved
    return max(least, (state.low + proportional(live, limit_bytes)) / 2)


def _upwards(state: State, guess: Forecast, limit_bytes: int, grain: int) -> float:
    """Return the next size while nothing has failed, and note what was expected."""
    state.expected = guess.center
    target = _reach(state, guess, limit_bytes)
    if guess.center < state.low + grain:
        # The next size should fail. If it runs, and the next, the steps grow.
        target = max(target, state.low + grain * SURPRISE_GROWTH**state.surprises)
    # Peaks that always promise the end at the next size must not make the search creep.
    return max(target, state.low + (grain << max(0, state.short_steps - FREE_SHORT_STEPS)))


def _reach(state: State, guess: Forecast, limit_bytes: int) -> float:
    """Return how far upwards the peaks may be followed in one step."""
    low = state.low
    cautious = guess.quantile(low, math.inf, _risk(state))
    if state.has_fallen:
        return _after_a_fall(state, cautious, limit_bytes)
    if len(state.main_readings) == 1:
        return min(cautious, FIRST_GROWTH * low)
    part = guess.center / TRUSTED_GROWTH
    if not is_settled(state.taken_readings):
        return min(cautious, max(proportional(state.taken_readings, limit_bytes), part))
    if part > low:
        return min(max(part, TRUSTED_GROWTH * low), LARGEST_GROWTH * low)
    return cautious
