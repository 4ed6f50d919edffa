"""Search the largest batch size that fits: a pure function of a predicate.

Small probes, a line through their peaks, a jump to just under the limit, a new line, and so on
until one size ran and the next one did not. Peaks only choose what to try next; what fits is
what ran. So wrong or missing peaks cost probes, never a wrong answer.

The number of probes is bounded whatever the peaks say: at most
2·log2(max) + 4 on the way up and 3·log2(max) + 3 between a size that ran and one that did not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from labhelpers.forecast import Forecast, Line, Reading, fallen, fit_line, forecast, latest_regime
from labhelpers.inputs import InputError

ProbeOutcome = Literal[
    "ok", "oom", "killed", "timeout", "error", "library_limit", "oversubscribed"
]
Strategy = Literal["exact", "doubling", "bisect"]
EndedBy = Literal[
    "memory", "killed", "timeout", "error", "library_limit",
    "maximum", "dataset", "time", "probes",
]
MEMORY_OUTCOMES = ("oom", "oversubscribed")

FIRST_GROWTH = 16
GROWTH = 16
CAREFUL_GROWTH = 2
RISK = 0.15
RISK2 = 0.15
NEAR_SHARE = 0.97
FREE_STEPS = 2
STALLS = 3
MIX = 0.6
GAPW = 0.15
CARE=True


@dataclass(frozen=True)
class ProbeResult:
    batch_size: int
    outcome: ProbeOutcome
    peak_bytes: int | None = None
    live_bytes: int | None = None
    payload: object = None

    @property
    def fits(self) -> bool:
        return self.outcome == "ok"


class SearchError(RuntimeError):
    def __init__(self, message, probes):
        super().__init__(message); self.probes = probes
class NothingFits(SearchError): pass
class WorkloadFailed(SearchError):
    @property
    def probe(self): return self.probes[-1]

@dataclass(frozen=True)
class SearchResult:
    probes: tuple[ProbeResult, ...]
    largest: int
    fit: Line | None
    ended_by: EndedBy
    monotonic: bool
    @property
    def ooms(self): return sum(p.outcome in MEMORY_OUTCOMES for p in self.probes)


@dataclass(frozen=True)
class Sizes:
    top: int
    multiple_of: int = 1
    powers_of_two: bool = False
    def down(self, n):
        n = min(self.top, math.floor(n)) if n != math.inf else self.top
        if n < 1: return 0
        if self.powers_of_two: return 1 << (n.bit_length()-1)
        return n - n % self.multiple_of
    def above(self, n):
        if self.powers_of_two: nxt = 1 if n < 1 else 1 << n.bit_length()
        else: nxt = n - n % self.multiple_of + self.multiple_of
        return nxt if nxt <= self.top else None
    def between(self, lo, hi, n):
        """grid size strictly between nearest at or below n; None when nothing is between"""
        first = self.above(lo)
        if first is None or first >= hi: return None
        size = self.down(min(n, hi-1))
        return size if size > lo else first


class State:
    def __init__(self): 
        self.probes=[]; self.low=0; self.high=None; self.short=0; self.stalled=0
    def add(self, r):
        old=(self.low,self.high)
        self.probes.append(r)
        if r.fits: self.low=r.batch_size
        else: self.high=r.batch_size
        if old[1] is None:
            if r.fits and r.batch_size < 2*old[0]: self.short+=1
        else:
            width=old[1]-old[0]
            self.stalled = 0 if self.high-self.low <= width/2 else self.stalled+1
    def readings(self, name):
        return sorted((p.batch_size, getattr(p,name)) for p in self.probes if p.fits and getattr(p,name))


ROOT=True
ROOM=.05
RISKF=.35
STEP=1.25
FAR=16
LEAP=64
def regimes(s):
    """peaks, live readings since the last fall of live (or peaks), fell?"""
    peaks,live=s.readings("peak_bytes"),s.readings("live_bytes")
    base=live or peaks
    reg=latest_regime(base)
    if len(reg)==len(base): return peaks,live,False
    first=reg[0][0]
    return [x for x in peaks if x[0]>=first],[x for x in live if x[0]>=first],True

def belief(s: State, limit):
    if limit is None: return None
    peaks,live,fell=regimes(s)
    if not peaks: return forecast(live,limit)
    fl=forecast(live,limit)
    if fl is None: return forecast(peaks,limit)
    if fell:
        fp=forecast(peaks,limit)
        if s.high is not None:
            return min((fp,fl),key=lambda f: max(s.low-f.center, f.center-s.high, 0))
        return fp if peaks[-1][1]<(1-ROOM)*limit else fl
    free=[x for x in peaks if x[1]<NEAR_SHARE*limit]
    peak=forecast(free,limit) if free else None
    if peak is None or max(peak.center,s.low)>=fl.center: return fl
    base=max(peak.center,s.low) if BASE else peak.center
    gap=fl.center-base
    return Forecast(base+MIX*gap, max(GAPW*gap, fl.spread))
BASE=True

def propose(s: State, limit, strategy, start, top):
    if not s.probes: return min(start, top)
    if s.low==0: return s.high/2
    b = belief(s,limit) if strategy=="exact" else None
    if s.high is None:
        if b is None: return 2*s.low
        return grow(s,b)
    if b is None or s.stalled>STALLS: return (s.low+s.high)/2
    if s.stalled==STALLS and ROOT:
        root=math.sqrt(s.high-s.low)
        return s.low+root if abs(b.center-s.low)<abs(b.center-s.high) else s.high-root
    if s.fail_outcome not in MEMORY_OUTCOMES and b.center>=s.high: return (s.low+s.high)/2
    return b.quantile(s.low,s.high,RISKF if regimes(s)[2] else RISK)

def grow(s,b):
    fell=regimes(s)[2]
    r=s.readings("live_bytes") or s.readings("peak_bytes")
    if fell:
        target=min(b.quantile(s.low, math.inf, RISKF), STEP*s.low)
    elif len(r)==1:
        target=min(b.quantile(s.low, math.inf, RISK), FIRST_GROWTH*s.low)
    elif b.center>FAR*s.low:
        target=min(b.center/4, LEAP*s.low)
    else: target=b.quantile(s.low, math.inf, RISK)
    return max(target, s.low+2**max(0,s.short-FREE_STEPS))

def search_largest(probe, *, limit_bytes=None, start=2, max_batch_size, strategy="exact", multiple_of=1, powers_of_two=False, time_left=None, max_probes=None, max_reason="maximum"):
    s=State(); g=Sizes(max_batch_size,multiple_of,powers_of_two)
    while True:
        if s.low and strategy=="doubling" and s.high is not None: break
        n=g.between(s.low, s.high if s.high is not None else math.inf, propose(s,limit_bytes,strategy,start,max_batch_size))
        if n is None: break
        r=probe(n); s.add(r)
        if not r.fits: s.fail_outcome=r.outcome
        if max_probes and len(s.probes)>=max_probes: break
    return SearchResult(tuple(s.probes), s.low, None, "memory", True)
