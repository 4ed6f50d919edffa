"""The memory verdict, held to published rows, measured rows and reported cases."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labhelpers.inputs import InputError
from labhelpers.memory_rows import read_rows
from labhelpers.oversubscription import (
    CAUSES,
    MemoryJudgement,
    best_safe_batch,
    clean_driver_value,
    fallback_policy,
    judge_memory,
    platform_of,
)
from labhelpers.platforms import PLATFORMS
from labhelpers.records import Clocks, DriverMemory, OtherProcess, Trial

MIB = 1024**2
GIB = 1024**3
CARD = 16 * GIB
REFERENCE = Path(__file__).parents[1] / "data" / "reference"


def reference(name):
    return json.loads((REFERENCE / name).read_text(encoding="utf-8"))


def probe_rows(rows):
    """Turn reference rows (MiB, as published) into rows in bytes."""
    return [
        {
            "batch_size": row["batch_size"],
            "images_per_s": row.get("images_per_s"),
            "peak_allocated_bytes": mib_to_bytes(row.get("peak_allocated_mib")),
            "peak_reserved_bytes": mib_to_bytes(row.get("peak_reserved_mib")),
            "outcome": "oom" if row.get("oom") else "ok",
        }
        for row in rows
    ]


def mib_to_bytes(value):
    return None if value is None else int(value * MIB)


def article_judgements():
    article = reference("rtx5070ti_article.json")
    total = int(article["environment"]["mem_get_info_total_mib"] * MIB)
    return judge_memory(probe_rows(article["natural_probe"]["rows"]), total, "wsl2")


def h200_judgements():
    baseline = reference("h200_baseline.json")
    rows = probe_rows(baseline["natural_probe"])
    return judge_memory(rows, baseline["mem_get_info_total_bytes"], "linux")


def pair(before=None, after=None, platform="wsl2"):
    """Judge batch 1,024 that halves its speed against batch 512; more facts by argument."""
    rows = [
        {"batch_size": 512, "images_per_s": 20_000, **(before or {})},
        {"batch_size": 1024, "images_per_s": 10_000, **(after or {})},
    ]
    return judge_memory(rows, CARD, platform)[1]


def peaks(allocated_gib, reserved_gib):
    return {
        "peak_allocated_bytes": int(allocated_gib * GIB),
        "peak_reserved_bytes": int(reserved_gib * GIB),
    }


# Published and measured rows


def test_article_rows_are_certain_from_49152_on():
    verdicts = {j.batch_size: j.verdict for j in article_judgements()}
    assert verdicts == {32768: "no", 49152: "certain", 98304: "certain", 131072: "certain"}


def test_article_cliff_is_oversubscription_alone_where_memory_per_image_is_unchanged():
    by_size = {j.batch_size: j for j in article_judgements()}
    assert by_size[32768].causes == ()
    assert by_size[49152].causes == ("oversubscription",)
    words = " ".join(by_size[49152].evidence)
    assert "18,244 MiB (111.9 %)" in words
    assert "time per image 3.51×, memory per image 1.00×" in words


def test_article_rows_beyond_name_the_changed_kernels_beside_oversubscription():
    for judgement in article_judgements()[2:]:
        assert judgement.causes == ("oversubscription", "kernel_change")
        assert "Allocated is more than the card holds" in " ".join(judgement.evidence)


def test_article_best_safe_batch_is_the_one_before_the_cliff():
    assert best_safe_batch(article_judgements()) == 32768


def test_h200_rows_are_all_no_and_the_fall_is_a_kernel_change():
    judgements = h200_judgements()
    assert {j.verdict for j in judgements} == {"no"}
    causes = {j.batch_size: j.causes for j in judgements}
    assert [size for size, found in causes.items() if found] == [65536, 98304, 131072, 524288]
    assert causes[65536] == ("kernel_change",)
    at_fall = next(j for j in judgements if j.batch_size == 65536)
    assert "time per image 1.95×, memory per image 0.50×" in " ".join(at_fall.evidence)


def test_h200_out_of_memory_is_no_spill_and_not_a_safe_batch():
    judgements = h200_judgements()
    assert judgements[-1].batch_size == 1048576
    assert "out-of-memory error" in " ".join(judgements[-1].evidence)
    assert best_safe_batch(judgements) == 49152


def test_rows_come_back_in_the_order_given():
    article = reference("rtx5070ti_article.json")
    rows = probe_rows(article["natural_probe"]["rows"])[::-1]
    judgements = judge_memory(iter(rows), 16302 * MIB, "wsl2")
    assert [j.batch_size for j in judgements] == [131072, 98304, 49152, 32768]
    assert [j.verdict for j in judgements] == ["certain", "certain", "certain", "no"]


# Reported cases

SPEEDS = (9_000, 14_000, 18_500, 20_400, 21_000, 21_200, 4_100)


@pytest.mark.parametrize("free_of_others", [None, 0, 3 * GIB])
def test_a_fall_with_free_memory_0_on_wsl2_is_suspected(free_of_others):
    rows = [
        {"batch_size": 32 * 2**i, "images_per_s": speed, "free_bytes": free_of_others}
        for i, speed in enumerate(SPEEDS)
    ]
    rows[-1]["free_bytes"] = 0
    judgements = judge_memory(rows, CARD, "wsl2")
    assert [j.verdict for j in judgements] == ["no"] * 6 + ["suspected"]
    assert judgements[-1].causes == ("oversubscription",)
    assert best_safe_batch(judgements) == 1024


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_fall_in_speed_alone_proves_nothing(platform):
    rows = [{"batch_size": 32 * 2**i, "images_per_s": s} for i, s in enumerate(SPEEDS)]
    judgements = judge_memory(rows, CARD, platform)
    assert {j.verdict for j in judgements} == {"no"}
    assert judgements[-1].causes == ("undecided",)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_30_gib_allocated_on_a_15_99_gib_card_is_certain(platform):
    row = {"batch_size": 1, "peak_allocated_bytes": 30 * GIB}
    (judgement,) = judge_memory([row], 15.99 * GIB, platform)
    assert judgement.verdict == "certain"
    assert ("native Linux" in " ".join(judgement.evidence)) == (platform == "linux")


def test_48_gb_peak_on_a_15_92_gb_card_is_certain():
    rows = [
        {"batch_size": 8, "images_per_s": 6.59 * 8, "peak_allocated_bytes": 12 * GIB},
        {"batch_size": 32, "images_per_s": 0.12 * 32, "peak_allocated_bytes": 48 * GIB},
    ]
    judgement = judge_memory(rows, 15.92 * GIB, "wsl2")[1]
    assert (judgement.verdict, judgement.causes) == ("certain", ("oversubscription",))


def test_reserved_just_past_the_card_without_a_slowdown_is_only_suspected():
    rows = [
        {"batch_size": 8, "images_per_s": 100, "peak_reserved_bytes": 3_000_000_000},
        {"batch_size": 12, "images_per_s": 101, "peak_reserved_bytes": 4_316_000_000},
    ]
    judgement = judge_memory(rows, 4_294_000_000, "wsl2")[1]
    assert (judgement.verdict, judgement.causes) == ("suspected", ())


def test_spill_below_the_nominal_size_is_suspected():
    before = {"peak_allocated_bytes": 11_600 * MIB}
    after = {"peak_allocated_bytes": 23_200 * MIB, "peak_reserved_bytes": 23_371 * MIB}
    rows = [
        {"batch_size": 512, "images_per_s": 20_000, **before},
        {"batch_size": 1024, "images_per_s": 19_000, **after},
    ]
    assert judge_memory(rows, 24_576 * MIB, "wsl2")[1].verdict == "suspected"
    assert judge_memory(rows, 24_576 * MIB, "linux")[1].verdict == "no"


def test_near_the_card_counts_earlier_when_time_doubled():
    slow = pair(peaks(7, 7.5), peaks(14, 14.5))
    assert (slow.verdict, slow.causes) == ("suspected", ("oversubscription",))
    rows = [
        {"batch_size": 512, "images_per_s": 20_000, **peaks(7, 7.5)},
        {"batch_size": 1024, "images_per_s": 20_000, **peaks(14, 14.5)},
    ]
    assert judge_memory(rows, CARD, "wsl2")[1].verdict == "no"


def test_smallest_batch_first_and_last_shows_drift():
    rows = [
        {"batch_size": 32, "images_per_s": 9_000, "free_bytes": 0},
        {"batch_size": 64, "images_per_s": 14_000, "free_bytes": 0},
        {"batch_size": 128, "images_per_s": 8_000, "free_bytes": 0},
        {"batch_size": 32, "images_per_s": 4_500, "free_bytes": 0},
    ]
    judgements = judge_memory(rows, CARD, "wsl2")
    assert [j.verdict for j in judgements] == ["no"] * 4
    assert [j.causes for j in judgements] == [(), (), ("drift",), ("drift",)]
    assert "took 2.00× its first time" in " ".join(judgements[3].evidence)


def test_position_tells_which_run_of_the_smallest_batch_came_last():
    runs = [
        {"batch_size": 32, "images_per_s": 4_500, "position": 9},
        {"batch_size": 32, "images_per_s": 9_000, "position": 0},
    ]
    assert [j.causes for j in judge_memory(runs, CARD, "linux")] == [("drift",), ()]
    cold_start = [dict(run, position=-run["position"] + 9) for run in runs]
    assert [j.causes for j in judge_memory(cold_start, CARD, "linux")] == [(), ()]


def test_steady_repeats_are_no_drift():
    rows = [{"batch_size": 32, "images_per_s": speed} for speed in (9_000, 9_100, 8_900)]
    assert [j.causes for j in judge_memory(rows, CARD, "linux")] == [(), (), ()]


# The rule for reserved memory, one condition at a time


@pytest.mark.parametrize("platform", PLATFORMS)
def test_reserved_past_the_card_with_double_time_and_same_memory_per_image_is_certain(platform):
    judgement = pair(peaks(7.5, 8.5), peaks(15, 17), platform)
    assert (judgement.verdict, judgement.causes) == ("certain", ("oversubscription",))


@pytest.mark.parametrize(
    ("before", "after", "missing"),
    [
        (peaks(7.5, 8.5), {**peaks(15, 17), "images_per_s": 10_100}, "not double"),
        (peaks(12, 13), peaks(12, 17), "memory per image changed"),
        ({}, peaks(15, 17), "not known on both sides"),
        ({"images_per_s": None}, peaks(15, 17), "no smaller size inside the card"),
        (peaks(17, 17), peaks(15, 17), "no smaller size inside the card"),
    ],
)
def test_one_sign_alone_is_only_suspected(before, after, missing):
    judgement = pair(before, after)
    assert judgement.verdict == "suspected"
    assert missing in " ".join(judgement.evidence)


def test_fixed_memory_is_not_taken_for_a_change_of_kernels():
    # 10 GiB of weights and optimizer state, 0.5 GiB per sample.
    rows = [
        {"batch_size": n, "images_per_s": speed, **peaks(10 + 0.5 * n, 10.5 + 0.5 * n)}
        for n, speed in ((2, 40), (4, 42), (12, 9))
    ]
    judgement = judge_memory(rows, CARD, "wsl2")[2]
    assert (judgement.verdict, judgement.causes) == ("certain", ("oversubscription",))


def test_a_kernel_change_among_smaller_sizes_does_not_blur_the_line():
    rows = [
        {"batch_size": n, "images_per_s": speed, **peaks(gib, gib + 1)}
        for n, speed, gib in ((4000, 100, 4.5), (8000, 100, 5.0), (16000, 40, 10.0))
    ]
    judgement = judge_memory(rows, 10.5 * GIB, "wsl2")[2]
    assert (judgement.verdict, judgement.causes) == ("certain", ("oversubscription",))


# Named causes


@pytest.mark.parametrize(
    ("before", "after", "cause"),
    [
        ({"alloc_retries": 0}, {"alloc_retries": 3}, "allocator_retries"),
        ({"other_processes": 0}, {"other_processes": 1}, "other_process"),
        ({"other_processes": []}, {"other_processes": [{"pid": 7}]}, "other_process"),
        ({"clock_mhz": 1980}, {"clock_mhz": 960}, "drift"),
        ({"throttled": False}, {"throttled": True}, "drift"),
        ({"throttled": []}, {"throttled": ["hw_thermal_slowdown"]}, "drift"),
        ({"kernels": ["winograd"]}, {"kernels": {"implicit_gemm"}}, "kernel_change"),
        (peaks(4, 5), peaks(4, 5), "kernel_change"),
        ({"alloc_retries": 3}, {"alloc_retries": 3}, "undecided"),
        ({"other_processes": 2}, {"other_processes": 2}, "undecided"),
        ({"clock_mhz": 1980}, {"clock_mhz": 1900}, "undecided"),
        ({"clock_mhz": 1980}, {"clock_mhz": 345, "throttled": ["gpu_idle"]}, "undecided"),
        ({"throttled": True}, {"throttled": True}, "undecided"),
        ({"kernels": ["winograd"]}, {"kernels": ["winograd"]}, "undecided"),
        (peaks(4, 5), peaks(8, 10), "undecided"),
    ],
)
def test_each_fall_has_a_named_cause(before, after, cause):
    judgement = pair(before, after, "linux")
    assert (judgement.verdict, judgement.causes) == ("no", (cause,))


def test_equal_kernels_outweigh_changed_memory():
    kernels = {"kernels": ["winograd"]}
    judgement = pair({**peaks(4, 5), **kernels}, {**peaks(4, 5), **kernels}, "linux")
    assert judgement.causes == ("undecided",)


def test_a_size_that_failed_is_no_reference():
    judgement = pair({"outcome": "error"}, {}, "linux")
    assert (judgement.verdict, judgement.causes) == ("no", ())


def test_several_causes_come_in_one_order():
    judgement = pair({}, {"other_processes": 1, "alloc_retries": 2, **peaks(17, 17)})
    assert judgement.causes == ("oversubscription", "allocator_retries", "other_process")


def test_a_lower_clock_takes_its_share_before_a_doubling_counts():
    clocks = ({"clock_mhz": 2000}, {"clock_mhz": 1000})
    judgement = pair({**peaks(7.5, 8.5), **clocks[0]}, {**peaks(15, 17), **clocks[1]})
    assert (judgement.verdict, judgement.causes) == ("suspected", ("drift",))


def test_native_linux_full_to_the_brim_is_no():
    judgement = pair({}, {**peaks(15.9, 15.99), "free_bytes": 0}, "linux")
    assert (judgement.verdict, judgement.causes) == ("no", ("undecided",))


def test_free_memory_not_available_is_unknown():
    assert pair({}, {"free_bytes": 2**64 - 1}).verdict == "no"
    assert pair({}, {"free_bytes": "[N/A]"}).verdict == "no"


def test_trials_are_read_as_they_are_stored():
    facts = {"kind": "probe", "images": 1000, "device": "cuda:0"}
    fast = Trial(batch_size=8, epoch_s=1.0, clocks_after=Clocks(sm_mhz=1900), **facts)
    full = Trial(
        batch_size=16,
        epoch_s=4.0,
        memory_after=DriverMemory(free_bytes=0),
        clocks_after=Clocks(sm_mhz=1890, throttle_reasons=("sw_power_cap",)),
        other_processes=(OtherProcess(pid=1),),
        details={"kernels": ["winograd"]},
        **facts,
    )
    failed = Trial(kind="probe", batch_size=32, outcome="oom")
    judgements = judge_memory([fast, full, failed], CARD, "wsl2")
    assert [j.verdict for j in judgements] == ["no", "suspected", "no"]
    assert judgements[1].causes == ("oversubscription", "other_process")
    assert best_safe_batch(judgements) == 8
    assert read_rows([full])[0].kernels == frozenset({"winograd"})


# The best safe batch


def judged(batch_size, verdict="no", images_per_s=None, outcome=None):
    return MemoryJudgement(batch_size, verdict, images_per_s=images_per_s, outcome=outcome)


def test_best_safe_batch_is_the_fastest_that_ran_below_the_first_doubt():
    rows = [judged(64, "no", 10), judged(32, "no", 20), judged(128, "suspected"), judged(256)]
    assert best_safe_batch(rows) == 32
    assert best_safe_batch([judged(32), judged(64), judged(128, outcome="oom")]) == 64
    assert best_safe_batch([judged(32, "certain"), judged(64)]) is None
    assert best_safe_batch([]) is None


# Bad input

ROW = {"batch_size": 32}


@pytest.mark.parametrize(
    ("rows", "total", "platform", "named"),
    [
        ([ROW], CARD, "macos", "'macos'; allowed: linux, wsl2, windows"),
        ([ROW], CARD, None, "platform is None"),
        ([ROW], 0, "linux", "total_bytes is 0"),
        ([ROW], -1, "linux", "total_bytes is -1"),
        ([ROW], float("nan"), "linux", "total_bytes is nan"),
        ([ROW], float("inf"), "linux", "total_bytes is inf"),
        ([ROW], None, "linux", "total_bytes is None"),
        ([ROW], "16 GiB", "linux", "total_bytes is '16 GiB'"),
        ([{}], CARD, "linux", "rows[0].batch_size is None"),
        ([ROW, {"batch_size": 0}], CARD, "linux", "rows[1].batch_size is 0"),
        ([{"batch_size": True}], CARD, "linux", "rows[0].batch_size is True"),
        ([{"batch_size": 10**400}], CARD, "linux", "rows[0].batch_size is 1000"),
        ([{**ROW, "images_per_s": float("nan")}], CARD, "linux", "rows[0].images_per_s is nan"),
        ([{**ROW, "images_per_s": 0}], CARD, "linux", "rows[0].images_per_s is 0"),
        ([{**ROW, "peak_allocated_bytes": -1}], CARD, "linux", "peak_allocated_bytes is -1"),
        ([{**ROW, "peak_reserved_bytes": float("nan")}], CARD, "linux", "reserved_bytes is nan"),
        ([{**ROW, "alloc_retries": "many"}], CARD, "linux", "alloc_retries is 'many'"),
        ([{**ROW, "kernels": "winograd"}], CARD, "linux", "kernels is 'winograd'"),
        ("rows", CARD, "linux", "rows is str"),
        (None, CARD, "linux", "rows is NoneType"),
    ],
)
def test_bad_input_is_one_clear_line(rows, total, platform, named):
    with pytest.raises(InputError) as caught:
        judge_memory(rows, total, platform)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


# Platform facts


@pytest.mark.parametrize(
    ("release", "system", "platform"),
    [
        ("5.15.167.4-microsoft-standard-WSL2", "Linux", "wsl2"),
        ("4.4.0-19041-Microsoft", "Linux", "wsl2"),
        ("6.6.0-MICROSOFT-custom", "linux", "wsl2"),
        ("6.1.0-18-amd64", "Linux", "linux"),
        (None, "Linux", "linux"),
        ("10", "Windows", "windows"),
        ("11-microsoft", "win32", "windows"),
    ],
)
def test_platform_of(release, system, platform):
    assert platform_of(release, system) == platform


def test_platform_of_refuses_a_system_without_cuda():
    with pytest.raises(InputError, match="'Darwin' has no CUDA platform"):
        platform_of("24.0", "Darwin")


@pytest.mark.parametrize(
    "value",
    [None, "[N/A]", "N/A", "[Not Supported]", " ", 2**64 - 1, 2.0**64, str(2**64 - 1), 10**400],
)
def test_not_available_from_the_driver_is_none(value):
    assert clean_driver_value(value) is None


@pytest.mark.parametrize("value", [0, 1, 577 * MIB, 0.5, "577 MiB", True, (1,)])
def test_driver_values_pass_unchanged(value):
    assert clean_driver_value(value) == value


def test_fallback_policy_says_what_can_be_switched_where():
    assert "Prefer No Sysmem Fallback" in fallback_policy("windows")
    assert "not honoured" in fallback_policy("wsl2")
    assert "#11050" in fallback_policy("wsl2")
    assert "nothing to switch" in fallback_policy("linux")
    with pytest.raises(InputError, match="'macos'"):
        fallback_policy("macos")


# Properties


def maybe(strategy):
    return st.none() | strategy


BYTES = st.integers(0, 3 * CARD)
SPEED = st.floats(1e-6, 1e9)
ROWS = st.fixed_dictionaries(
    {"batch_size": st.integers(1, 2**31 - 1)},
    optional={
        "images_per_s": maybe(SPEED),
        "peak_allocated_bytes": maybe(BYTES),
        "peak_reserved_bytes": maybe(BYTES),
        "alloc_retries": maybe(st.integers(0, 9)),
        "free_bytes": maybe(BYTES | st.just(2**64 - 1)),
        "clock_mhz": maybe(st.integers(0, 3000)),
        "throttled": maybe(st.booleans() | st.just(["gpu_idle"])),
        "other_processes": maybe(st.integers(0, 3)),
        "kernels": maybe(st.lists(st.sampled_from("abc"))),
        "outcome": maybe(st.sampled_from(["ok", "oom", "error"])),
    },
)
MANY = st.lists(ROWS, max_size=8)
DISTINCT = st.lists(ROWS, max_size=8, unique_by=lambda row: row["batch_size"])
ON = st.sampled_from(PLATFORMS)


@given(MANY, ON)
def test_any_mix_of_unknowns_is_judged(rows, platform):
    judgements = judge_memory(rows, CARD, platform)
    assert [j.batch_size for j in judgements] == [row["batch_size"] for row in rows]
    for judgement in judgements:
        assert judgement.verdict in ("no", "suspected", "certain")
        assert list(judgement.causes) == [c for c in CAUSES if c in judgement.causes]
        assert judgement.evidence
        assert not any("None" in words or "nan" in words for words in judgement.evidence)


@given(DISTINCT, ON, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows, platform, chance: random.Random):
    shuffled = chance.sample(rows, len(rows))
    before = {j.batch_size: j for j in judge_memory(rows, CARD, platform)}
    assert {j.batch_size: j for j in judge_memory(shuffled, CARD, platform)} == before


@given(MANY, ON)
def test_allocated_past_the_card_is_always_certain_and_causes_need_a_fall(rows, platform):
    for row, judgement in zip(rows, judge_memory(rows, CARD, platform), strict=True):
        if (row.get("peak_allocated_bytes") or 0) > CARD:
            assert judgement.verdict == "certain"
        if row.get("images_per_s") is None:
            assert judgement.causes == ()


@given(MANY)
def test_native_linux_is_never_doubted_inside_the_card(rows):
    for row, judgement in zip(rows, judge_memory(rows, CARD, "linux"), strict=True):
        inside = all((row.get(f"peak_{k}_bytes") or 0) <= CARD for k in ("allocated", "reserved"))
        assert (judgement.verdict == "no") == inside


@given(MANY, ON)
def test_verdicts_do_not_depend_on_the_size_of_the_card(rows, platform):
    doubled = [
        {k: v * 2 if k.endswith("bytes") and v is not None else v for k, v in row.items()}
        for row in rows
    ]
    small = judge_memory(rows, CARD, platform)
    large = judge_memory(doubled, 2 * CARD, platform)
    assert [(j.verdict, j.causes) for j in small] == [(j.verdict, j.causes) for j in large]


@settings(max_examples=50)
@given(MANY, ON)
def test_the_best_safe_batch_ran_and_was_not_doubted(rows, platform):
    judgements = judge_memory(rows, CARD, platform)
    best = best_safe_batch(judgements)
    mine = [j for j in judgements if j.batch_size == best]
    assert best is None or {j.verdict for j in mine} == {"no"}
    assert best is None or any(j.outcome in (None, "ok") for j in mine)


def test_a_machine_that_became_faster_at_the_end_makes_no_earlier_size_a_fall():
    """The smallest size was repeated last and ran faster: nothing before it fell."""
    speeds = [(128, 4169.0), (256, 4508.0), (512, 5269.0), (1024, 3910.0), (128, 6669.0)]
    rows = [
        {"batch_size": size, "images_per_s": speed, "position": place, "outcome": "ok"}
        for place, (size, speed) in enumerate(speeds)
    ]
    judgements = judge_memory(rows, 16 * 2**30, "linux")
    assert [judged.causes for judged in judgements] == [(), (), (), ("undecided",), ()]
    assert best_safe_batch(judgements) == 512
