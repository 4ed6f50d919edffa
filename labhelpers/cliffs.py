"""Where a curve of speed breaks, what memory did there, and which of two causes it was."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd

from labhelpers.formats import show_rate, show_share, show_times
from labhelpers.probe_curves import ProbeCurve, rows_of
from labhelpers.slowdowns import Cause

CAUSE_WORDS: dict[Cause, str] = {
    "oversubscription": "past the card: part of the memory lies outside it",
    "kernel_change": "kernel change: the library ran other kernels",
    "allocator_retries": "allocator retries: the cache was emptied and filled anew",
    "drift": "drift: the machine itself became slower (heat or clocks)",
    "other_process": "another process took part of the device",
    "undecided": "undecided: nothing measured explains it",
}


def cliff(curve: ProbeCurve) -> str:
    """Say where a curve first falls, what memory did there, and what that makes of it."""
    found = _first_fall(curve)
    if found is None:
        return f"**{curve.label}**: no size was slower than a smaller one that held its speed."
    before, after = found
    judged = next(j for j in curve.judgements if j.batch_size == after["batch_size"])
    causes = "; ".join(CAUSE_WORDS[cause] for cause in judged.causes)
    words = (
        f"**{curve.label}**: from batch {before['batch_size']:,} to {after['batch_size']:,} the "
        f"speed goes from {show_rate(before['images_per_s'])} to "
        f"{show_rate(after['images_per_s'])}, so each image takes "
        f"{show_times(before['images_per_s'] / after['images_per_s'], 2)} the time."
    )
    return f"{words} {_memory_there(curve, before, after)} Cause: **{causes}**."


def two_cliffs(past: ProbeCurve, kernels: ProbeCurve) -> str:
    """Set a cliff past the card beside one of other kernels: what tells them apart."""
    falls = [_first_fall(past), _first_fall(kernels)]
    (past_before, past_after), (kernel_before, kernel_after) = [fall for fall in falls if fall]
    moved = [
        show_times(after["kib_per_image"] / before["kib_per_image"], 2)
        for before, after in ((past_before, past_after), (kernel_before, kernel_after))
    ]
    return (
        f"Two curves of one CNN break at neighbouring batch sizes, {past_after['batch_size']:,} "
        f"and {kernel_after['batch_size']:,}, and a chart of speed alone cannot tell them apart. "
        f"Memory can. The first card was asked for {show_share(past_after['card_share'], 0)} of "
        f"what it holds while each image took {moved[0]} the memory it took before: the same work, "
        f"on memory that no longer fits. The second was "
        f"{show_share(kernel_after['card_share'], 0)} full while memory per image went to "
        f"{moved[1]}: other work, chosen by the convolution library, with room to spare."
    )


def own_beside(own: ProbeCurve, past: ProbeCurve, kernels: ProbeCurve) -> str:
    """Say which of the two recorded cliffs one's own curve is like, if any."""
    if own.on_cpu:
        return (
            "This was the CPU, at sizes that suit it. It has no card to run past, so neither cliff "
            "can show here; the dashed curves are what to look for on a GPU."
        )
    causes = {cause for judged in own.judgements for cause in judged.causes}
    if any(judged.verdict == "certain" for judged in own.judgements):
        return f"Your curve breaks like that of **{past.label}**: past the card."
    if "kernel_change" in causes:
        return (
            f"Your curve breaks like that of **{kernels.label}**: other kernels ran, and the "
            "memory still fits."
        )
    return "Your curve shows neither of the two cliffs up to where the probe ended."


def kernels_changed(curve: ProbeCurve) -> str:
    """Name the kernel that took most time on both sides of the first fall, where it is known."""
    found = _first_fall(curve)
    if curve.on_cpu:
        return "On the CPU the profiler's kernels are not listed: they are a matter of the GPU."
    if found is None:
        return "No size fell in speed, so there is no change of kernels to look for."
    sizes = [int(row["batch_size"]) for row in found]
    longest = [_longest_kernel(curve, size) for size in sizes]
    if None in longest:
        return "The profiler gave no kernels on both sides of the fall: n/a, which is not 'none'."
    told = [
        f"at batch {size:,} `{name}` takes {show_share(share, 0)} of the time in the "
        "longest kernels"
        for size, (name, share) in zip(sizes, [pair for pair in longest if pair], strict=True)
    ]
    return f"The kernel that takes most time: {'; '.join(told)}."


def _first_fall(curve: ProbeCurve) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the rows before and after the first fall of a first run, by growing size."""
    rows = rows_of(curve.table.dropna(subset=["images_per_s"]))
    pairs = itertools.pairwise(rows)
    return next(((before, after) for before, after in pairs if after["causes"]), None)


def _memory_there(curve: ProbeCurve, before: dict[str, Any], after: dict[str, Any]) -> str:
    """Say how full the card is there and how memory per image moved, as far as it is known."""
    if curve.on_cpu:
        return "On the CPU memory does not explain a fall."
    if pd.isna(after["kib_per_image"]) or pd.isna(before["kib_per_image"]):
        return "What memory did there is not known."
    change = after["kib_per_image"] / before["kib_per_image"]
    reserved = (
        f"Reserved is {show_share(after['card_share'])} of the card"
        if pd.notna(after["card_share"])
        else "What is reserved is not known"
    )
    return f"{reserved}, and memory per image is {show_times(change, 2)} what it was."


def _longest_kernel(curve: ProbeCurve, size: int) -> tuple[str, float] | None:
    """Return the kernel that took most time at a size, and its share among the longest."""
    for row, judged in curve.judged_rows():
        details = getattr(row, "details", None) or {}
        kernels: dict[str, float] = details.get("longest_kernels_s") or {}
        if judged.batch_size == size and kernels:
            name = max(kernels, key=lambda kernel: kernels[kernel])
            return name, kernels[name] / sum(kernels.values())
    return None
