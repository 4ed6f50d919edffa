"""Regressions are found, noise is not, and unlike runs are never compared."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labhelpers.comparability import conditions, differences
from labhelpers.comparison import Limits, above_best, changes, compare_sizes, is_worse, judged
from labhelpers.inputs import InputError
from labhelpers.records import SweepSpec, Trial, ask
from labhelpers.references import curve_of
from labhelpers.store import RunDirectory, open_run

NINE = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
POSITIVE = st.floats(1e-6, 1e6)

FACTS = {
    "device": "cuda:0", "device_name": "NVIDIA H200", "driver": "580.159.04", "cuda": "13.0",
    "wsl2": False, "cpu": "Intel Xeon", "torch_threads": 16, "packages": {"torch": "2.11.0"},
}  # fmt: skip


# The judgement, pure


def test_equal_runs_are_never_worse():
    times = {32: [1.0, 1.2, 1.1], 64: [2.0, 2.0, 2.1]}
    assert not is_worse(compare_sizes((times, times), (times, times), Limits()))


def test_exact_figures_stand_at_their_margin():
    same = {8: [100.0, 100.0, 100.0]}
    assert not changes(same, {8: [102.0] * 3}, 0.02)[8].worse
    found = changes(same, {8: [102.5] * 3}, 0.02)[8]
    assert found.worse
    assert (found.best_ratio, found.median_ratio, found.allowed) == (1.025, 1.025, 1.02)


def test_noise_is_how_far_repeats_lie_above_the_best():
    assert above_best([[1.0, 1.0], [5.0]]) == 0
    assert above_best([[2.0], [3.0]]) is None
    doubled = above_best([[1.0, 2.0, 2.0]])
    assert doubled == pytest.approx(0.6931, abs=1e-4)


def test_a_busy_host_in_one_repeat_is_no_regression_and_a_slowdown_of_all_is():
    calm = {8: [1.0, 1.01, 1.02]}
    assert not changes(calm, {8: [1.0, 1.01, 3.0]}, 0.05)[8].worse
    assert not changes(calm, {8: [1.0, 3.0, 3.0]}, 0.05)[8].worse  # the best one is as it was
    assert changes(calm, {8: [1.2, 1.21, 1.22]}, 0.05)[8].worse


def test_a_lucky_size_is_forgiven_as_much_as_a_typical_one():
    noisy = {size: [1.0, 1.1, 1.1] for size in (1, 2, 3)}
    baseline, new = noisy | {4: [1.0, 1.0, 1.0]}, noisy | {4: [1.1, 1.1, 1.1]}
    assert not changes(baseline, new, 0.05)[4].worse
    assert changes({4: baseline[4]}, {4: new[4]}, 0.05)[4].worse


def test_an_outlier_does_not_excuse_the_other_repeats():
    calm = {size: [1.0, 1.01, 1.02] for size in NINE}
    for times in ([2.0, 2.0, 6.0], [1.3, 1.31, 9.0]):
        assert changes(calm, calm | {8192: times}, 0.05)[8192].worse
    restless = {size: [1.0, 1.2, 1.3] for size in NINE}
    assert not changes(restless, restless | {8192: [1.3, 1.31, 1.9]}, 0.05)[8192].worse


def test_a_size_measured_once_is_as_noisy_as_its_noisiest_neighbour():
    baseline = {8: [1.0], 16: [1.0, 1.0, 1.0], 32: [1.0, 1.1, 1.2]}
    new = {8: [1.2], 16: [1.0, 1.0, 1.0], 32: [1.0, 1.1, 1.2]}
    assert not changes(baseline, new, 0.05)[8].worse


def test_what_is_no_measurement_is_left_out():
    odd = {8: [0.0, 1.0, 1.0, float("inf"), float("nan"), -1.0], 16: [float("nan")]}
    assert changes({8: [1.0, 1.0], 16: [1.0, 1.0]}, odd, 0.05).keys() == {8}
    rows = compare_sizes(({}, {8: [1.0, 1.0]}), ({}, {8: [9.0, 9.0]}), Limits())
    assert [row.worse for row in rows] == [("needs more memory",)]


def test_noisy_small_batches_do_not_hide_what_changes_at_large_ones():
    noisy = {size: [1.0, 1.1, 1.2] for size in NINE[:7]}
    calm = {size: [1.0, 1.002, 1.003] for size in NINE[7:]}
    slow = {size: [time * 1.08 for time in times] for size, times in (noisy | calm).items()}
    found = changes(noisy | calm, slow, 0.05)
    assert {size for size, change in found.items() if change.worse} == {4096, 8192}


def test_fewer_repeats_are_forgiven_more():
    allowed = [judged([1.0] * n, [1.0] * n, 0.05, 0.1).allowed for n in (1, 2, 3, 6, 12)]
    assert allowed == sorted(allowed, reverse=True)
    assert allowed[2] == pytest.approx(1.05 * 2.718281828**0.28)


def test_a_single_repeat_everywhere_cannot_be_judged():
    with pytest.raises(InputError) as caught:
        changes({8: [1.0], 16: [1.0]}, {8: [2.0], 16: [2.0]}, 0.05)
    assert str(caught.value) == (
        "every batch size was measured once only, so a change cannot be told from noise; "
        "measure with --repeats 3"
    )
    assert changes({8: [1.0]}, {8: [2.0, 2.0]}, 0.05)[8].worse
    assert changes({8: [1.0]}, {}, 0.05) == {}


def test_what_got_worse_is_named_for_each_size():
    calm = {8: [1.0] * 3, 16: [1.0] * 3, 32: [1.0] * 3}
    slow, big = calm | {8: [2.0] * 3}, calm | {8: [3.0] * 3, 16: [3.0] * 3}
    rows = compare_sizes((calm, calm), (slow, big), Limits(), {32: "out of memory"})
    assert {row.batch_size: row.worse for row in rows} == {
        8: ("slower", "needs more memory"), 16: ("needs more memory",), 32: ("out of memory",),
    }  # fmt: skip


@given(st.lists(POSITIVE, min_size=2, max_size=6), st.lists(POSITIVE, min_size=2, max_size=6))
def test_faster_is_never_worse_and_slower_never_gets_better(baseline, new):
    found = changes({8: baseline}, {8: new}, 0.05)[8]
    much_slower = changes({8: baseline}, {8: [value * 10 for value in new]}, 0.05)[8]
    assert not found.worse or much_slower.worse
    assert not (found.worse and min(new) <= min(baseline))


NOISES: dict[str, Callable[[random.Random, int], list[float]]] = {
    "even": lambda chance, _: [chance.lognormvariate(0, 0.08) for _ in range(3)],
    "one-sided": lambda chance, _: [1 + chance.expovariate(1 / 0.08) for _ in range(3)],
    "first pass slow": lambda chance, _: [1 + chance.expovariate(5), *(
        chance.lognormvariate(0, 0.03) for _ in range(2))],
    "worse at small sizes": lambda chance, number: [
        chance.lognormvariate(0, 0.08 / (1 + number)) for _ in range(3)],
}  # fmt: skip


@pytest.mark.parametrize("kind", NOISES)
def test_noise_alone_gives_at_most_one_false_alarm_in_a_hundred(kind):
    chance, times = random.Random(1), 600

    def run() -> dict[int, list[float]]:
        return {size: NOISES[kind](chance, number) for number, size in enumerate(NINE)}

    alarms = sum(any(c.worse for c in changes(run(), run(), 0.05).values()) for _ in range(times))
    assert alarms <= 0.01 * times


DATA = Path(__file__).parent / "data"
RECORDED = {
    machine: json.loads((DATA / f"recorded_passes_{machine}.json").read_text())["passes"]
    for machine in ("h200", "cpu")
}


def recorded_pairs(
    machine: str, times: int
) -> Iterator[tuple[dict[int, list[float]], dict[int, list[float]]]]:
    """Draw two of the runs that one machine gave in a row, three passes of each."""
    chance, passes = random.Random(2), RECORDED[machine]
    for _ in range(times):
        drawn = []
        for run in chance.sample(range(len(passes["32"])), 2):
            chosen = chance.sample(range(4), 3)
            found = {int(size): [runs[run][n] for n in chosen] for size, runs in passes.items()}
            # A pass that other programs disturbed is left out, as `samples` does.
            drawn.append({size: [t for t in each if t is not None] for size, each in found.items()})
        yield drawn[0], drawn[1]


@pytest.mark.parametrize("machine", RECORDED)
def test_recorded_runs_give_at_most_one_false_alarm_in_a_hundred(machine):
    pairs = recorded_pairs(machine, 2000)
    alarms = sum(any(c.worse for c in changes(*pair, 0.05).values()) for pair in pairs)
    assert alarms <= 20


def test_recorded_runs_are_caught_when_the_gpu_takes_longer():
    """At 8,192 the GPU is the limit and the noise is small; at 32 the host hides much."""
    caught = dict.fromkeys(NINE, 0)
    for before, now in recorded_pairs("h200", 500):
        slow = {size: [1.1 * time for time in times] for size, times in now.items()}
        for size, change in changes(before, slow, 0.05).items():
            caught[size] += change.worse
    assert min(caught[4096], caught[8192]) >= 0.95 * 500
    assert caught[32] < 0.05 * 500


# The command


def make(name: str, *, slower: float = 1.0, facts: dict | None = None, **changed: object) -> Path:
    """Make a run of three sizes and three repeats, with a spread of 1 %."""
    spec = ask(SweepSpec, {"batch_sizes": [32, 64, 128], "repeats": 3, "device": "cuda:0"})
    run = RunDirectory.create(name, specs={"sweep": spec})
    trial = {
        "kind": "sweep", "feed": "article", "device": "cuda:0", "images": 6000, "steps": 10,
        "environment_id": "e",
    } | changed  # fmt: skip
    with run.writing():
        run.note_environment("e", FACTS | (facts or {}))
        run.note_spec("sweep", spec.model_copy(update={"feed": trial["feed"]}))
        for size in (32, 64, 128):
            for repeat in range(3):
                seconds = (1 + 0.01 * repeat) * (slower if size == 64 else 1)
                measured = {"epoch_s": seconds, "peak_allocated_bytes": size * 2**20}
                run.append(Trial(batch_size=size, repeat=repeat, **measured | trial))
    return run.path


def test_a_run_that_is_no_slower_passes_and_writes_its_summary(call):
    make("base"), make("run", slower=1.04)
    code, output, errors = call("compare", "base", "run")
    assert code == 0
    assert output.startswith("run (20")
    assert output.endswith("): No batch size got worse.\n")
    assert errors.splitlines() == [
        "wrote run/comparison/summary.md", "wrote run/comparison/comparison.png",
    ]  # fmt: skip
    text = Path("run/comparison/summary.md").read_text()
    assert "**No batch size got worse.**" in text
    assert "| 64 | 5,941 images/s | 5,712 images/s | +4.0% | +4.0% | +9.5% |" in text
    assert Path("run/comparison/comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_slower_size_is_named_and_fails(call):
    make("base"), make("run", slower=1.2)
    code, output, _ = call("compare", "base", "run", "--output", "there")
    assert code == 1
    assert output.endswith("): Worse. batch 64: slower.\n")
    assert "**Worse.** batch 64: slower." in Path("there/summary.md").read_text()
    assert call("compare", "base", "run", "--max-slowdown", "30%", "--output", "there")[0] == 0
    assert call("compare", "base", "run", "--max-slowdown", "0.3", "--output", "there")[0] == 0


def test_a_size_that_fails_now_or_was_left_out_is_named(call):
    make("base")
    path = make("run")
    file = path / "trials.jsonl"
    kept = [line for line in file.read_text().splitlines() if '"batch_size":32,' not in line]
    gone = [line for line in kept if '"batch_size":128,' not in line]
    oom = Trial(kind="sweep", batch_size=128, feed="article", outcome="oom")
    file.write_text("\n".join([*gone, oom.model_dump_json(exclude_none=True)]) + "\n")
    code, output, _ = call("compare", "base", "run")
    assert code == 1
    assert output.endswith("Worse. batch 128: out of memory. Not measured in this run: batch 32.\n")
    # What failed in the baseline already did not get worse.
    assert call("compare", "run", "run")[0] == 0


UNLIKE = [
    ({"facts": {"device_name": "NVIDIA L4"}}, "device: NVIDIA H200 in the baseline, NVIDIA L4 in"),
    ({"facts": {"driver": "570.1"}}, "driver: 580.159.04 in the baseline, 570.1 in the run"),
    ({"facts": {"packages": {"torch": "2.14.1"}}}, "torch: 2.11.0 in the baseline, 2.14.1 in the"),
    ({"facts": {"cpu": "EPYC"}}, "CPU: Intel Xeon in the baseline, EPYC in the run"),
    ({"facts": {"torch_threads": 4}}, "torch threads: 16 in the baseline, 4 in the run"),
    ({"images": 60_000}, "images per epoch: 6000 in the baseline, 60000 in the run"),
    ({"feed": "host"}, "feed: article in the baseline, host in the run"),
]


@pytest.mark.parametrize(("change", "said"), UNLIKE)
def test_unlike_runs_are_shown_side_by_side_and_exit_4(call, change, said):
    make("base"), make("run", slower=9.0, **change)
    code, output, _ = call("compare", "base", "run")
    assert code == 4
    assert "): Not comparable. " in output
    assert said in output
    text = Path("run/comparison/summary.md").read_text()
    assert "## Side by side" in text
    assert "Worse" not in text
    assert "| 64 | 5,941 | 64.0 | " in text


def test_trials_that_others_disturbed_are_left_out(call):
    make("base"), make("run", slower=3.0)
    rewrite("run", lambda trial: busy(trial) if trial["batch_size"] == 64 else trial)
    code, output, _ = call("compare", "base", "run")
    assert code == 0
    assert output.endswith(
        "No batch size got worse. Not compared, as no undisturbed trial is left: batch 64. Left "
        "out as disturbed by other programs on the CPU: 3 of 9 trials of run (6 left).\n"
    )
    assert "| n/a | n/a | n/a | disturbed |" in Path("run/comparison/summary.md").read_text()


def rewrite(name: str, change: Callable[[dict], dict | None]) -> None:
    """Change every trial of a run's file, each a JSON object; None takes it out."""
    file = Path(name) / "trials.jsonl"
    changed = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(each) + "\n" for each in changed if each is not None))


def busy(trial: dict) -> dict:
    """The trial as it is where other programs took much of the CPU."""
    return trial | {"details": {"cpu_of_others": 0.6}}


def failed(outcome: str) -> Callable[[dict], dict]:
    """Return what makes a failed trial of one, with no more in it than the sweep keeps."""
    kept = ("kind", "workload", "batch_size", "repeat", "feed", "precision", "device")
    return lambda trial: {k: v for k, v in trial.items() if k in kept} | {"outcome": outcome}


def test_a_run_that_was_wholly_disturbed_is_to_be_measured_again(call):
    make("base"), make("run")
    rewrite("run", busy)
    code, output, _ = call("compare", "base", "run")
    assert code == 4
    first, *table, last = output.splitlines()
    assert first.endswith(
        "Not comparable. batch sizes: no size was measured while other programs left the CPU "
        "alone. Left out as disturbed by other programs on the CPU: 9 of 9 trials of run (0 left)."
        " Measure run again on a quiet machine."
    )
    assert table[0].split()[0] == "batch"
    assert [row.split() for row in table[1:]] == [
        ["32", "5,941", "32.0", "5,941", "32.0"], ["64", "5,941", "64.0", "5,941", "64.0"],
        ["128", "5,941", "128.0", "5,941", "128.0"],
    ]  # fmt: skip
    assert last == "Side by side, the disturbed trials count too: that judges nothing."
    assert last in Path("run/comparison/summary.md").read_text()


def test_a_run_of_which_most_was_disturbed_is_to_be_measured_again(call):
    make("base"), make("run")
    rewrite("base", lambda trial: trial if trial["batch_size"] == 32 else busy(trial))
    code, output, _ = call("compare", "base", "run")
    assert code == 0
    assert "no undisturbed trial is left: batch 64, 128. " in output
    assert "6 of 9 trials of base (3 left). Measure base again on a quiet machine.\n" in output
    assert "Side by side, the disturbed trials count too" in output
    rewrite("base", lambda trial: trial | {"details": {}})
    for name in ("base", "run"):
        rewrite(name, lambda trial: busy(trial) if trial["repeat"] else trial)
    code, output, _ = call("compare", "base", "run")
    assert code == 4
    assert "no batch size has more than one undisturbed trial" in output
    assert "--repeats" not in output
    assert (
        "6 of 9 trials of base (3 left); 6 of 9 trials of run (3 left). Measure base and run "
        "again on a quiet machine." in output
    )


def test_the_trials_of_one_run_are_counted_once(call):
    make("base")
    rewrite("base", busy)
    said = call("compare", "base", "base")[1]
    assert said.count(" trials of ") == 1
    assert "CPU: 9 of 9 trials of base (0 left). Measure base again" in said


@pytest.mark.parametrize(
    ("outcome", "said"),
    [("oom", "out of memory"), ("killed", "killed"), ("timeout", "over its time limit"),
     ("error", "failed")],
)  # fmt: skip
def test_a_run_of_which_every_size_failed_got_worse(call, outcome, said):
    make("base"), make("run")
    rewrite("run", failed(outcome))
    code, output, errors = call("compare", "base", "run")
    assert code == 1
    every = "; ".join(f"batch {size}: {said}" for size in (32, 64, 128))
    assert output.endswith(f"): Worse. {every}.\n")
    assert "Traceback" not in errors
    text = Path("run/comparison/summary.md").read_text()
    assert f"**Worse.** {every}." in text
    assert "The speed of no batch size could be compared." in text


def test_a_run_that_failed_wholly_is_compared_with_like_only(call):
    make("base"), make("run", facts={"device_name": "NVIDIA L4"})
    rewrite("run", failed("oom"))
    code, output, _ = call("compare", "base", "run")
    assert code == 4
    assert "Not comparable. device: NVIDIA H200 in the baseline, NVIDIA L4 in the run." in output
    other = open_run(make("other"))
    rewrite("other", failed("oom"))
    with other.writing():
        other.note_spec("sweep", ask(SweepSpec, {"images": 7, "feed": "article"}))
    code, output, _ = call("compare", "base", "other")
    assert code == 4
    assert "images asked for: n/a in the baseline, 7 in the run." in output
    assert call("compare", "run", "base")[0] == 2  # nothing to compare with


def test_a_failure_counts_without_repeats_and_beside_disturbed_trials(call):
    for name in ("base", "run"):
        make(name)
        rewrite(name, lambda trial: None if trial["repeat"] else trial)
    oom = failed("oom")
    rewrite("run", lambda trial: oom(trial) if trial["batch_size"] == 128 else trial)
    code, output, _ = call("compare", "base", "run")
    assert code == 1
    assert "Worse. batch 128: out of memory. Only failures were compared: every batch" in output
    rewrite("base", lambda trial: busy(trial) if trial["batch_size"] == 128 else trial)
    assert "Worse. batch 128: out of memory." in call("compare", "base", "run")[1]


def test_a_size_that_failed_once_before_and_always_now_got_worse(call):
    make("base"), make("run")
    oom = failed("oom")
    at_128 = lambda trial: trial["batch_size"] == 128  # noqa: E731
    rewrite("base", lambda t: oom(t) if at_128(t) and t["repeat"] == 2 else t)
    rewrite("run", lambda t: oom(t) if at_128(t) and t["repeat"] == 1 else t)
    assert call("compare", "base", "run")[0] == 0
    rewrite("run", lambda t: oom(t) if at_128(t) else t)
    code, output, _ = call("compare", "base", "run")
    assert code == 1
    assert "Worse. batch 128: out of memory." in output


def peak(size: int, value: int | None) -> Callable[[dict], dict]:
    """Return what sets the peak of the trials of a size; None takes it out."""

    def change(trial: dict) -> dict:
        return trial | {"peak_allocated_bytes": value} if trial["batch_size"] == size else trial

    return change


@pytest.mark.parametrize(
    ("base", "run", "said"),
    [
        (None, 5, "no peak in the baseline"),
        (5, None, "no peak in the run"),
        (0, 5, "a peak of 0 in the baseline"),
        (5, 0, "a peak of 0 in the run"),
        (None, None, "no peak in both runs"),
        (0, 0, "a peak of 0 in both runs"),
        (0, None, "a peak of 0 in the baseline and no peak in the run"),
    ],
)
def test_memory_that_cannot_be_judged_is_named(call, base, run, said):
    make("base"), make("run")
    rewrite("base", peak(64, base)), rewrite("run", peak(64, run))
    code, output, _ = call("compare", "base", "run")
    assert code == 0
    assert output.endswith(
        f"No batch size got worse. Memory was not compared: batch 64 ({said}).\n"
    )
    text = Path("run/comparison/summary.md").read_text()
    assert f"Memory was not compared: batch 64 ({said})." in text
    assert text.count("| ok, memory not compared |") == 1


def test_small_peaks_of_a_cpu_are_too_rough_to_compare(call):
    """Twelve runs in a row of a machine with two CPUs: peaks of 30 MiB moved by a third."""
    make("base", device="cpu"), make("run", device="cpu")
    rewrite("base", peak(128, 600 * 2**20))
    rewrite("run", peak(32, 48 * 2**20)), rewrite("run", peak(128, 900 * 2**20))
    code, output, _ = call("compare", "base", "run")
    assert code == 1
    assert "Worse. batch 128: needs more memory." in output
    assert (
        "Memory was not compared: batch 32, 64 (a peak below 256.0 MiB on a CPU in both runs)"
        in output
    )


def test_without_any_memory_nothing_is_said_to_be_no_worse(call):
    make("base", peak_allocated_bytes=None), make("run"), make("slow", slower=2.0)
    code, output, _ = call("compare", "base", "run")
    assert code == 0
    every = "Memory was not compared: batch 32, 64, 128 (no peak in the baseline).\n"
    assert output.endswith(f"): No batch size got slower. {every}")
    code, output, _ = call("compare", "base", "slow")
    assert (code, output.endswith(f"): Worse. batch 64: slower. {every}")) == (1, True)
    first = lambda t: t if t["repeat"] == 0 else t | {"peak_allocated_bytes": None}  # noqa: E731
    for name in ("one", "other"):
        make(name)
        rewrite(name, first)
    code, output, _ = call("compare", "one", "other")
    assert code == 0
    assert "batch 32, 64, 128 (only one peak in each run).\n" in output


BROKEN = [
    ({"images": 0}, "images is 0, epoch_s is 1.0"),
    ({"images": None}, "images is missing, epoch_s is 1.0"),
    ({"images": -1, "epoch_s": -1.0}, "images is -1, epoch_s is -1.0"),
    ({"epoch_s": None}, "images is 6000, epoch_s is missing"),
    ({"epoch_s": 0}, "images is 6000, epoch_s is 0.0"),
    ({"epoch_s": -2.0}, "images is 6000, epoch_s is -2.0"),
    ({"epoch_s": 5e-324}, "images is 6000, epoch_s is 5e-324"),
]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("change", "said"), BROKEN)
def test_a_trial_without_a_speed_is_refused_in_one_line(call, whole, change, said):
    make("base"), make("run")
    rewrite("run", lambda t: t | change if whole or t["repeat"] == 2 else t)
    seconds = said if whole else said.replace("is 1.0", "is 1.02")
    line = (
        f"labhelpers: run: batch 32, repeat {0 if whole else 2}: {seconds}; a measured trial has "
        "both, above 0; measure the run again\n"
    )
    for order in (("base", "run"), ("run", "base")):
        assert call("compare", *order) == (2, "", line)


@pytest.mark.parametrize("change", [change for change, _ in BROKEN[:2]])
def test_a_run_without_any_speed_has_no_curve(change):
    make("run")
    rewrite("run", lambda trial: trial | change)
    assert curve_of(open_run("run")) is None


IEEE = {"matmul": "ieee", "convolution": "ieee", "both": "ieee"}
TF32 = {"matmul": "tf32", "convolution": "tf32", "both": "tf32"}
MIXED = {"matmul": "tf32", "convolution": "ieee", "both": "mixed"}
TURNED = {"matmul": "ieee", "convolution": "tf32", "both": "mixed"}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (IEEE, TF32, "ieee in the baseline, tf32 in the run"),
        (IEEE, MIXED, "ieee in the baseline, mixed (convolution ieee, matmul tf32) in the run"),
        (TURNED, MIXED, "mixed (convolution tf32, matmul ieee) in the baseline, mixed "),
        (IEEE, None, "ieee in the baseline, n/a in the run"),
    ],
)
def test_precisions_that_were_read_back_must_be_alike(call, before, now, said):
    make("base", precision_after=before), make("run", precision_after=now)
    code, output, _ = call("compare", "base", "run")
    assert code == 4
    assert f"Not comparable. precision read back: {said}" in output
    for name in ("base", "run"):
        assert call("compare", name, name)[0] == 0


def test_one_trial_in_another_precision_makes_a_run_unlike(call):
    make("base", precision_after=IEEE), make("run", precision_after=IEEE)
    last = lambda t: t["batch_size"] == 128 and t["repeat"] == 2  # noqa: E731
    rewrite("run", lambda t: t | {"precision_after": TF32} if last(t) else t)
    code, output, _ = call("compare", "base", "run")
    assert code == 4
    assert "precision read back: ieee in the baseline, ieee and tf32 in the run." in output


def test_the_host_does_not_count_where_the_images_lie_on_the_device(call):
    make("base", feed="resident"), make("run", feed="resident", facts={"cpu": "EPYC"})
    assert call("compare", "base", "run")[0] == 0


def test_a_run_resumed_on_another_machine_is_like_neither():
    base, run = open_run(make("a")), open_run(make("b"))
    with run.writing():
        run.note_environment("f", FACTS | {"device_name": "NVIDIA L4"})
        run.append(Trial(
            kind="sweep", batch_size=256, feed="article", device="cuda:0", images=6000,
            epoch_s=1.0, environment_id="f",
        ))  # fmt: skip
    assert conditions(run)["device"] == "NVIDIA H200 and NVIDIA L4"
    assert differences(base, run) == [
        "device: NVIDIA H200 in the baseline, NVIDIA H200 and NVIDIA L4 in the run"
    ]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_one_bad_run_of_several_is_enough(call):
    make("base"), make("good"), make("bad", slower=2.0), make("other", images=1)
    code, output, _ = call("compare", "base", "good", "bad", "other", "--output", "there")
    assert code == 1
    assert [line.split(": ")[1] for line in output.splitlines()] == [
        "No batch size got worse.", "Worse. batch 64", "Not comparable. images per epoch",
    ]  # fmt: skip
    assert call("compare", "base", "good", "other", "--output", "there")[0] == 4


def test_repeats_are_needed(call):
    for name in ("base", "run"):
        file = make(name) / "trials.jsonl"
        lines = file.read_text().splitlines()
        file.write_text("\n".join(line for line in lines if '"repeat":0' in line) + "\n")
    code, output, _ = call("compare", "base", "run")
    assert code == 4
    assert "every batch size was measured once only" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["base"], "Missing argument 'RUN...'."),
        (["base", "nowhere"], "nowhere holds no run (no run.json)"),
        (["base", "empty"], "empty holds no measured sweep; run labhelpers sweep first"),
        (["base", "base", "--output", "base/run.json/x"], "cannot write results to "
         "base/run.json/x: Not a directory; choose a directory that can be written"),
        *(
            (["base", "base", f"--{name}", value],
             f"--{name}: got {value!r}; must be a share from 0 on, such as 5% or 0.05")
            for name in ("max-slowdown", "max-memory")
            for value in ("5", "-1%", "nan", "inf%", "much", "", "%", "1e999%")
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(call, arguments, said):
    make("base")
    RunDirectory.create("empty")
    assert call("compare", *arguments) == (2, "", f"labhelpers: {said}\n")
