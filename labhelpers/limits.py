"""What limits a batch size: waiting for images, launching, computing, or memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from labhelpers.formats import show_count, show_share
from labhelpers.oversubscription import judge_memory
from labhelpers.records import Trial
from labhelpers.verdicts import median

Verdict = Literal["feed", "launch", "compute", "memory", "oversubscribed", "undecided"]

CLEAR_LEAD = 0.1
"""The largest share must lead the next by so much; below that the verdict is `undecided`."""
MOSTLY = 0.6
"""Where nothing is known of the device, waiting must take so much of the epoch to be the limit."""

ADVICE: dict[str, str] = {
    "feed": "make the feed faster: more loader workers, or images kept as bytes and indexed by the "
    "batch, on the host or on the device",
    "launch": "give the device more to do per launch: a larger batch, a CUDA graph or "
    "torch.compile",
    "compute": "there is nothing to gain from the feed or from a larger batch; lower precision, "
    "fused kernels or a smaller model are what is left",
    "memory": "take a smaller batch: the allocator gives memory back and asks for it again, while "
    "the device waits",
    "oversubscribed": "take a smaller batch: what does not fit on the card crosses the bus in "
    "every step",
}


@dataclass(frozen=True)
class Shares:
    """Shares of an epoch's wall time, 0 to 1; None is not measured.

    Where all are known they add up to 1. `compute` is the time during which the device worked;
    the rest, when it was idle, is divided as the host spent its time: waiting for the `feed`,
    asking the driver for `memory` again, or on everything else, which is `launch`. On the CPU
    launching is part of computing, and `launch` is None.
    """

    feed: float | None
    launch: float | None = None
    compute: float | None = None
    memory: float | None = None
    on_cpu: bool = False
    retries: int = 0
    oversubscribed: bool = False

    def known(self) -> dict[str, float]:
        """Return the shares that were measured, by name."""
        named = {name: getattr(self, name) for name in ("feed", "launch", "compute", "memory")}
        return {name: share for name, share in named.items() if share is not None}


@dataclass(frozen=True)
class LimitVerdict:
    """What limits a batch size, the shares it was read from, why, and what to do about it."""

    verdict: Verdict
    shares: Shares
    evidence: tuple[str, ...]
    advice: str


def limited_by(shares: Shares) -> LimitVerdict:
    """Judge what limits a batch size from the shares of its epoch.

    `undecided`: the two largest shares are too close to call, or the profiler returned no
    kernels, so that launching and computing cannot be told apart.
    """
    verdict = _verdict(shares)
    return LimitVerdict(verdict, shares, _evidence(shares), _advice(verdict, shares))


def limits_of(trials: Iterable[Trial], profiled: Iterable[Trial] = ()) -> dict[int, LimitVerdict]:
    """Judge every batch size of a sweep, from its trials and its profiled steps if there are any.

    Sizes of which nothing is known, not even how long they waited for images, are left out.
    """
    measured = [trial for trial in trials if trial.outcome == "ok" and trial.epoch_s]
    profiles = {trial.batch_size: (trial.details or {}).get("limits") for trial in profiled}
    sizes = sorted({trial.batch_size for trial in measured})
    past_card = _past_card(measured)
    found = {}
    for size in sizes:
        group = [trial for trial in measured if trial.batch_size == size]
        shares = shares_of(group, profiles.get(size), oversubscribed=size in past_card)
        if shares.known() or shares.oversubscribed:
            found[size] = limited_by(shares)
    return found


def shares_of(
    group: Sequence[Trial], profile: Mapping[str, Any] | None, *, oversubscribed: bool = False
) -> Shares:
    """Return the shares of one batch size, from its measured trials and its profiled steps."""
    waits = (t.feed_wait_s / t.epoch_s for t in group if t.feed_wait_s is not None and t.epoch_s)
    feed = median(waits)
    retries = sum(trial.alloc_retries or 0 for trial in group)
    if feed is not None and group[0].device == "cpu":
        return Shares(min(feed, 1.0), None, max(0.0, 1 - feed), on_cpu=True)
    epoch_s, images = median(t.epoch_s for t in group), median(t.images for t in group)
    if feed is None or not profile or not profile.get("kernel_s") or not epoch_s or not images:
        return Shares(feed, retries=retries, oversubscribed=oversubscribed)
    per_image_s = profile["kernel_s"] / profile["images"]
    compute = min(1.0, per_image_s * images / epoch_s)
    asking = (profile.get("allocation_s") or 0.0) / profile["wall_s"] if retries else 0.0
    memory = min(asking, 1 - compute)
    idle = 1 - compute - memory
    return Shares(
        feed=idle * min(feed, 1.0), launch=idle * max(0.0, 1 - feed), compute=compute,
        memory=memory, retries=retries, oversubscribed=oversubscribed,
    )  # fmt: skip


def total_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans (start, end), in their unit."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def _past_card(measured: Sequence[Trial]) -> set[int]:
    """Return the sizes that certainly ran past what the card holds."""
    totals = [t.memory_before.total_bytes for t in measured if t.memory_before]
    if not totals or not totals[0] or measured[0].device == "cpu":
        return set()
    judged = judge_memory(measured, totals[0], "linux")
    return {judgement.batch_size for judgement in judged if judgement.verdict == "certain"}


def _verdict(shares: Shares) -> Verdict:
    if shares.oversubscribed:
        return "oversubscribed"
    if shares.compute is None:
        return "feed" if shares.feed is not None and shares.feed >= MOSTLY else "undecided"
    ranked = sorted(shares.known().items(), key=lambda item: -item[1])
    (first, largest), (_, second) = ranked[0], ranked[1]
    verdicts: dict[str, Verdict] = {
        "feed": "feed", "launch": "launch", "compute": "compute", "memory": "memory",
    }  # fmt: skip
    return verdicts[first] if largest - second >= CLEAR_LEAD else "undecided"


_SAID = {
    "compute": "the device worked {} of the time",
    "feed": "it was idle for {} while the host waited for images",
    "launch": "it was idle for {} while the host launched work",
    "memory": "it was idle for {} while the allocator asked for memory again",
}


def _evidence(shares: Shares) -> tuple[str, ...]:
    lines = []
    if shares.oversubscribed:
        lines.append("more memory is in use than the card holds")
    if shares.on_cpu:
        lines.append(f"{show_share(shares.feed, 0)} of the epoch went into waiting for images")
        lines.append("the rest computed; on the CPU launching is a part of it")
    elif shares.compute is None:
        lines.append(f"the host waited for images {show_share(shares.feed, 0)} of the time")
        lines.append("the device's own time is not known, so launching and computing are one")
    else:
        known = shares.known()
        lines += [said.format(show_share(known[name], 0)) for name, said in _SAID.items()
                  if known.get(name)]  # fmt: skip
    if shares.retries:
        lines.append(f"the allocator gave memory back {show_count(shares.retries, 'times')}")
    return tuple(lines)


def _advice(verdict: Verdict, shares: Shares) -> str:
    if verdict == "compute" and shares.on_cpu:
        return "the processor is the limit: a larger batch only helps while the curve still rises"
    if verdict == "feed":
        return f"{ADVICE['feed']}; a faster device would not help"
    if verdict != "undecided":
        return ADVICE[verdict]
    if shares.compute is None:
        return "measure where the profiler returns kernels, to tell launching from computing"
    close = sorted(shares.known().items(), key=lambda item: -item[1])[:2]
    return "; or ".join(ADVICE[name] for name, _ in close)
