"""The search for the largest batch size, held to the sequences it tries."""

import bisect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from predicates import GIB, MIB, fits_up_to, line, never, tried

from labhelpers.search import NothingFits, ProbeResult, search_largest

ROOT = Path(__file__).resolve().parents[1]
H200 = json.loads((ROOT / "data/reference/h200_baseline.json").read_text(encoding="utf-8"))


# Doubling: the article's own way.


def test_three_trials_that_all_fit_give_8_and_not_16():
    result = search_largest(
        fits_up_to(10**9), max_batch_size=1000, strategy="doubling", max_probes=3
    )
    assert tried(result) == [2, 4, 8]
    assert (result.largest, result.ended_by, result.closed) == (8, "probes", False)


def test_doubling_stops_at_the_first_failure():
    result = search_largest(fits_up_to(13), max_batch_size=1000, strategy="doubling")
    assert tried(result) == [2, 4, 8, 16]
    assert (result.largest, result.ended_by, result.oom_count) == (8, "memory", 1)
    assert not result.closed


@pytest.mark.parametrize(("top", "sizes"), [(8, [2, 4, 8]), (10, [2, 4, 8, 10]), (3, [2, 3])])
def test_doubling_tries_the_upper_limit_itself(top, sizes):
    result = search_largest(
        fits_up_to(10**9), max_batch_size=top, strategy="doubling", maximum="dataset"
    )
    assert tried(result) == sizes
    assert (result.largest, result.ended_by, result.closed) == (top, "dataset", True)


def test_doubling_in_powers_of_two_leaves_a_crooked_limit_alone():
    result = search_largest(
        fits_up_to(10**9), max_batch_size=10, strategy="doubling", powers_of_two=True
    )
    assert tried(result) == [2, 4, 8]
    assert result.ended_by == "maximum"


# Where the search starts and ends.


@pytest.mark.parametrize("strategy", ["exact", "doubling", "bisect"])
def test_a_data_set_of_one_is_tried_with_one(strategy):
    result = search_largest(
        fits_up_to(10**9), max_batch_size=1, strategy=strategy, maximum="dataset"
    )
    assert tried(result) == [1]
    assert (result.largest, result.ended_by) == (1, "dataset")


@pytest.mark.parametrize("strategy", ["exact", "doubling", "bisect"])
def test_when_2_does_not_fit_1_is_tried(strategy):
    result = search_largest(fits_up_to(1), max_batch_size=100, strategy=strategy, limit_bytes=GIB)
    assert tried(result) == [2, 1]
    assert (result.largest, result.ended_by, result.oom_count) == (1, "memory", 1)


@pytest.mark.parametrize("strategy", ["exact", "doubling", "bisect"])
def test_all_failing_ends_in_a_clear_error(strategy):
    with pytest.raises(NothingFits, match=r"tried batch size 2 \(oom\), 1 \(oom\)") as caught:
        search_largest(never, max_batch_size=1000, strategy=strategy, limit_bytes=GIB)
    assert tried(caught.value) == [2, 1]
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.probes) == (str(caught.value), caught.value.probes)


def test_a_start_that_is_too_large_is_halved():
    with pytest.raises(NothingFits) as caught:
        search_largest(never, max_batch_size=1000, start=64)
    assert tried(caught.value) == [64, 32, 16, 8, 4, 2, 1]
    result = search_largest(fits_up_to(11), max_batch_size=1000, start=64)
    assert tried(result) == [64, 32, 16, 8, 12, 10, 11]


def test_a_limit_that_all_sizes_respect_is_tried_itself():
    result = search_largest(
        fits_up_to(10**9, line(100, 1)), max_batch_size=1000, limit_bytes=100 * GIB
    )
    assert result.largest == max(tried(result)) == 1000
    assert (result.ended_by, result.oom_count) == ("maximum", 0)
    assert len(result.probes) <= 4


def test_an_exception_of_the_predicate_passes_through():
    def interrupted(size: int) -> ProbeResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_largest(interrupted, max_batch_size=10)


# Exact search: few probes, few failures.


def test_without_peaks_the_size_doubles_and_the_range_is_halved():
    for asked in ({"strategy": "bisect", "limit_bytes": GIB}, {"strategy": "exact"}):
        result = search_largest(fits_up_to(93), max_batch_size=1000, **asked)
        assert tried(result) == [2, 4, 8, 16, 32, 64, 128, 96, 80, 88, 92, 94, 93]
        assert (result.largest, result.fit) == (93, None)


def test_a_straight_line_takes_one_failure():
    result = search_largest(
        fits_up_to(91, line(650, 82.3)), max_batch_size=1000, limit_bytes=8188 * MIB
    )
    assert tried(result) == [2, 20, 80, 91, 92]
    assert (result.largest, result.ended_by, result.oom_count) == (91, "memory", 1)
    assert result.closed
    assert result.monotonic
    assert result.fit is not None
    assert result.fit.slope == pytest.approx(82.3 * MIB)
    assert result.fit.intercept == pytest.approx(650 * MIB)
    assert result.fit.residuals == pytest.approx([0.0] * 4, abs=1e-3 * MIB)


def test_a_model_of_which_hardly_two_fit_is_not_overrun():
    result = search_largest(
        fits_up_to(4, line(1000, 1500)), max_batch_size=1000, limit_bytes=8 * GIB
    )
    assert tried(result) == [2, 4, 5]


RESNET50 = {int(size): mib for size, mib in H200["resnet50_peak_allocated_mib"].items()}


def resnet50_live(size: int) -> float:
    """ResNet50's allocated peak in bytes: as measured, on a line between and above.

    The reading at 96 is left out: it has a workspace for which the cap of the test has no room.
    """
    sizes = sorted(RESNET50)[: sorted(RESNET50).index(64) + 1]
    after = min(max(1, bisect.bisect_left(sizes, size)), len(sizes) - 1)
    first, second = sizes[after - 1], sizes[after]
    slope = (RESNET50[second] - RESNET50[first]) / (second - first)
    return (RESNET50[first] + slope * (size - first)) * MIB


@pytest.mark.parametrize(
    ("answer", "cached"), [(91, 1.0), (91, 1.03), (91, 1.1), (93, 1.05), (90, 1.06), (88, 1.1)]
)
def test_resnet50_as_measured_under_a_cap_of_8_gib(answer, cached):
    """The line ends at 91; 93 was the truth there, 90 with other data in the process."""
    limit = int(0.0572 * H200["mem_get_info_total_bytes"])
    assert resnet50_live(91) <= limit < resnet50_live(92)
    probe = fits_up_to(
        answer,
        lambda size: min(limit, cached * resnet50_live(size)),
        lambda size: min(limit, resnet50_live(size)),
    )
    result = search_largest(probe, max_batch_size=1000, limit_bytes=limit)
    assert (result.largest, result.ended_by, result.closed) == (answer, "memory", True)
    assert result.oom_count <= 2, tried(result)
    # At 88 the allocator ends 3 % below where its live tensors end: no peak tells that.
    assert len(result.probes) <= (14 if answer == 88 else 10), tried(result)


def fashion_reserved(size: int) -> float:
    """FashionCNN's reserved peak in MiB on an H200, from its published readings."""
    return 51 + 0.219 * size if size > 5300 or size <= 700 else 68 + 0.372 * size


def fashion_live(size: int) -> float:
    """FashionCNN's allocated peak in MiB: 1,425 at 4,213, 1,149 at 4,297, 924 at 5,406."""
    if size <= 700 or size > 5300:
        return 67 + 0.159 * size
    return 72 + 0.3213 * size if size <= 4240 else 67 + 0.2518 * size


def test_falling_peaks_are_said_and_the_promise_is_kept():
    limit = 1433.6
    probe = fits_up_to(
        6311,
        lambda size: max(fashion_live(size), min(limit, fashion_reserved(size))) * MIB,
        lambda size: fashion_live(size) * MIB,
    )
    result = search_largest(probe, max_batch_size=60_000, limit_bytes=int(limit * MIB))
    assert not result.monotonic
    assert result.largest == 6311
    assert {6311, 6312} <= set(tried(result))
    assert result.oom_count <= 4
    plain = search_largest(probe, max_batch_size=60_000, strategy="bisect")
    assert len(result.probes) < len(plain.probes)


def test_the_search_needs_neither_torch_nor_pydantic():
    code = "import sys, labhelpers.search; print({'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr


def test_what_a_failure_needed_says_how_much_smaller_the_next_size_must_be():
    """MobileNetV3's figures under a cap on an H200: live peaks end at 97, the truth is 95."""
    limit = 4_509_715_660

    def probe(size: int) -> ProbeResult:
        live = 236_699_136 if size == 2 else int(1_583_326_208 + (size - 32) * 44.9e6)
        if size > 95:
            return ProbeResult(size, "oom", needed_bytes=int(limit + (size - 95.5) * 18e6))
        return ProbeResult(size, "ok", min(limit, int(249_561_088 + (size - 2) * 56.5e6)), live)

    result = search_largest(probe, max_batch_size=2000, limit_bytes=limit)
    assert tried(result) == [2, 32, 94, 96, 95]
