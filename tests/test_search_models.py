"""The search over many memories: made-up ones, misleading peaks, fitting that is not monotonic."""

import importlib
import math
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predicates import Probe, fits_up_to, tried

from labhelpers.search import NothingFits, ProbeResult, SearchResult, search_largest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
search_models = importlib.import_module("search_models")

PEAKS = st.one_of(st.none(), st.integers(1, 2**45))
TOPS = st.integers(1, 100_000)


def search_or_fail(probe: Probe, **asked) -> SearchResult | NothingFits:
    """Search; where nothing fits, give that error as the answer."""
    try:
        return search_largest(probe, **asked)
    except NothingFits as nothing:
        return nothing


def probe_bound(top: int) -> float:
    """The bound that the module promises whatever the peaks say."""
    return 10 * math.log2(top) + 12


def test_sizes_without_peaks_do_not_make_the_search_creep():
    def probe(size: int) -> ProbeResult:
        if size > 3000:
            return ProbeResult(size, "oom", needed_bytes=100 * 2**34)
        return ProbeResult(size, "ok", 10**9 if size == 2 else None)

    result = search_largest(probe, max_batch_size=60_000, limit_bytes=2**34)
    assert result.largest == 3000
    assert len(result.probes) <= 40


def test_failures_are_read_where_no_success_has_a_peak():
    def probe(size: int) -> ProbeResult:
        if size < 100:
            return ProbeResult(size, "ok")
        return ProbeResult(size, "oom", needed_bytes=2**35)

    assert search_largest(probe, max_batch_size=1000, limit_bytes=2**34).largest == 99


def test_140_made_up_memories(capsys):
    """Exact on every monotonic one, with at most two failures on 95 % of them."""
    monotonic = []
    for memory in search_models.memories():
        result, plain = search_models.search_both(memory)
        ran = {probe.batch_size for probe in result.successes}
        assert result.largest in ran
        assert all(memory.fits(size) for size in ran)
        if memory.kind in search_models.MONOTONIC_KINDS:
            assert result.largest == memory.largest()
            monotonic.append((memory.kind, result, plain))
        else:
            assert result.largest == search_models.TOP or not memory.fits(result.largest + 1)
    assert len(monotonic) == 120
    kinds, ours, theirs = zip(*monotonic, strict=True)
    probes = [statistics.mean(len(r.probes) for r in results) for results in (ours, theirs)]
    ooms = [statistics.mean(r.oom_count for r in results) for results in (ours, theirs)]
    # An allocator that keeps caches hides the limit between two bounds: printed apart.
    hard, few = (
        statistics.mean(
            result.oom_count <= 2
            for kind, result in zip(kinds, ours, strict=True)
            if (kind == "allocator") is apart
        )
        for apart in (True, False)
    )
    with capsys.disabled():
        print(f"\nsearch over 120 monotonic memories: {probes[0]:.1f} probes, {ooms[0]:.2f} OOMs")
        print(f"doubling and halving: {probes[1]:.1f} probes, {ooms[1]:.2f} OOMs")
        print(f"{few:.0%} with <= 2 OOMs ({hard:.0%} where an allocator keeps caches)")
    assert few >= 0.95
    assert probes[0] < 0.6 * probes[1]
    assert ooms[0] < 0.35 * ooms[1]


# Probes and out-of-memory failures allowed on what five models took of an H200. Peaks of
# FashionCNN fall twice, because other kernels run where memory is short.
RECORDED = {
    "resnet50": (6, 1), "mobilenet_v3_large": (8, 2), "vit_b_16": (8, 2),
    "small transformer": (10, 3), "FashionCNN": (12, 5),
}  # fmt: skip


@pytest.mark.parametrize("memory", search_models.recorded(), ids=lambda memory: memory.name)
def test_recorded_memories(memory):
    result = search_models.search_recorded(memory)
    probes, ooms = RECORDED[memory.name]
    assert (result.largest, result.closed) == (memory.largest, True)
    assert len(result.probes) <= probes, tried(result)
    assert result.oom_count <= ooms, tried(result)


@pytest.mark.parametrize("memory", search_models.recorded(), ids=lambda memory: memory.name)
def test_recorded_memories_with_other_readings(memory):
    """Another end by up to 1 %, peaks wrong by up to 0.2 %: still exact, with not many more."""
    probes, ooms = RECORDED[memory.name]
    found = [search_models.search_shaken(memory, seed) for seed in range(30)]
    assert all(result.closed for result in found)
    assert statistics.median(len(result.probes) for result in found) <= probes
    assert max(len(result.probes) for result in found) <= 2 * probes
    assert statistics.median(result.oom_count for result in found) <= ooms


@settings(max_examples=300, deadline=None)
@given(top=TOPS, share=st.floats(0, 1.2), limit=st.integers(1, 2**40), data=st.data())
def test_any_peaks_give_the_exact_size(top, share, limit, data):
    largest = max(1, int(share * top))

    def probe(size: int) -> ProbeResult:
        if size > largest:
            return ProbeResult(size, "oom", needed_bytes=data.draw(PEAKS))
        return ProbeResult(size, "ok", data.draw(PEAKS), data.draw(PEAKS))

    result = search_largest(probe, max_batch_size=top, limit_bytes=limit)
    assert result.largest == min(largest, top)
    assert result.closed
    assert max(tried(result)) <= top
    assert len(set(tried(result))) == len(result.probes) <= probe_bound(top)


@settings(max_examples=200, deadline=None)
@given(
    top=TOPS,
    share=st.floats(0, 1.2),
    distance=st.floats(0.3, 40),
    wiggle=st.sampled_from([0.0, 0.01, 0.3]),
    seed=st.integers(0, 99),
)
def test_peaks_that_always_mislead_stay_within_the_bound(top, share, distance, wiggle, seed):
    """The peaks claim at every size that memory ends a little further on."""
    largest, limit = max(1, int(share * top)), 2**40
    dice = random.Random(seed)

    def misleading(size: int) -> float:
        end = size + distance * dice.uniform(1 - wiggle, 1 + wiggle)
        return limit * size / end

    result = search_largest(fits_up_to(largest, misleading), max_batch_size=top, limit_bytes=limit)
    assert result.largest == min(largest, top)
    assert len(result.probes) <= probe_bound(top)


def bent_memory(dice: random.Random) -> tuple[Callable[[int], float], float]:
    """Return what a size needs as a share of the limit, and what failures say: seldom a line."""
    end, fixed = math.exp(dice.uniform(0, math.log(50_000))), dice.uniform(0, 0.97)
    power = dice.choice([1.0, 1.0, dice.uniform(1, 2)])
    knee, steeper = dice.uniform(0, end), dice.choice([0.0, 0.0, dice.uniform(0, 3)])
    floor = dice.choice([0.0, 0.0, dice.uniform(0, 0.9)])

    def bent(size: float) -> float:
        return (size + steeper * max(0.0, size - knee)) ** power

    def needed(size: int) -> float:
        return max(floor, fixed + (1 - fixed) * bent(size) / bent(end + 0.5))

    return needed, dice.choice([0.001, 0.05, math.inf])


def test_bent_memories_take_fewer_probes_than_halving_and_never_creep():
    """With knees, powers, floors, little growth, and failures just above the limit."""
    limit, ours, plain = 2**34, [], []
    for seed in range(400):
        needed, over = bent_memory(random.Random(seed))

        def probe(size: int, needed=needed, over=over) -> ProbeResult:
            share = needed(size)
            if share <= 1:
                return ProbeResult(size, "ok", max(1, int(share * limit)))
            return ProbeResult(size, "oom", needed_bytes=int(min(share, 1 + over) * limit) + 1)

        for found, strategy in ((ours, "exact"), (plain, "bisect")):
            found.append(search_or_fail(
                probe, max_batch_size=60_000, limit_bytes=limit, strategy=strategy
            ))  # fmt: skip
        if isinstance(plain[-1], NothingFits):
            assert isinstance(ours.pop(), type(plain.pop()))
            continue
        assert (ours[-1].largest, ours[-1].closed) == (plain[-1].largest, True)
        assert len(ours[-1].probes) <= 2 * len(plain[-1].probes) + 6, tried(ours[-1])
    probes, ooms = (
        [statistics.mean(count(result) for result in results) for results in (ours, plain)]
        for count in (lambda result: len(result.probes), lambda result: result.oom_count)
    )
    assert probes[0] < 0.7 * probes[1]
    assert ooms[0] < 0.6 * ooms[1]


@settings(max_examples=200, deadline=None)
@given(
    top=TOPS,
    seed=st.integers(0, 10**6),
    often=st.floats(0, 0.6),
    slope=st.integers(1, 2**30),
    strategy=st.sampled_from(["exact", "bisect"]),
)
def test_where_fitting_is_not_monotonic_the_next_size_failed(top, seed, often, slope, strategy):
    def fits(size: int) -> bool:
        return random.Random(f"{seed} {size}").random() >= often

    def probe(size: int) -> ProbeResult:
        if fits(size):
            return ProbeResult(size, "ok", slope * size)
        needed = random.Random(f"needed {seed} {size}").choice([None, 2**36 + 1, 2**37, slope])
        return ProbeResult(size, "oom", needed_bytes=needed)

    result = search_or_fail(probe, max_batch_size=top, limit_bytes=2**36, strategy=strategy)
    assert len(result.probes) <= probe_bound(top)
    if isinstance(result, NothingFits):
        assert not any(fits(size) for size in tried(result))
        assert 1 in tried(result)
        return
    assert fits(result.largest)
    assert result.largest == top or not fits(result.largest + 1)


@settings(max_examples=200, deadline=None)
@given(
    top=TOPS,
    largest=st.integers(1, 120_000),
    multiple=st.integers(1, 64),
    powers=st.booleans(),
    peak=PEAKS,
)
def test_only_sizes_asked_for_are_tried(top, largest, multiple, powers, peak):
    multiple = 1 if powers else min(multiple, top)
    allowed = (lambda n: n & (n - 1) == 0) if powers else (lambda n: n % multiple == 0)
    probe = fits_up_to(largest, None if peak is None else lambda size: peak + size)
    asked = {"max_batch_size": top, "multiple_of": multiple, "powers_of_two": powers}
    end = min(top, largest)
    expected = 1 << (end.bit_length() - 1) if powers else end - end % multiple
    result = search_or_fail(probe, limit_bytes=2**30, **asked)
    assert all(map(allowed, tried(result)))
    assert (0 if isinstance(result, NothingFits) else result.largest) == expected
