"""The residency map: planted slow blocks are found, and the map runs for real on the CPU."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labhelpers.capture import CpuCapture
from labhelpers.formats import GB, GIB, MIB
from labhelpers.inputs import InputError
from labhelpers.probe_plan import default_limits
from labhelpers.records import ProbeSpec, Trial, ask
from labhelpers.residency import ResidencyMap, judge_blocks, residency_map
from labhelpers.residency_run import count_blocks, newest_residency, run_residency
from labhelpers.residency_trials import allocate, measure_bus, measure_card, time_passes
from labhelpers.store import RunDirectory
from labhelpers.worker import Worker

BLOCK = 256 * MIB
CARD, BUS = 1531 * GB, 25 * GB


class FakeClock(CpuCapture):
    """A capture whose time passes only when the work says so."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.now_s = 0.0
        self.marks_s = []

    def prepare(self, steps):  # noqa: ARG002 - the capture's signature
        self.marks_s = []

    def mark(self):
        self.marks_s.append(self.now_s)

    def step_times_s(self):
        return tuple(b - a for a, b in zip(self.marks_s, self.marks_s[1:], strict=False))

    def work(self, bandwidth):
        """Return a pass over one block at a bandwidth."""

        def run():
            self.now_s += BLOCK / bandwidth

        return run


def map_of(fill_s, read_s=None, **facts):
    known = {
        "device": "cuda:0", "block_bytes": BLOCK, "asked_blocks": 8, "card_fill": CARD,
        "card_read": CARD, "card_copy": CARD, "bus_to_device": BUS, "bus_from_device": BUS,
        "ended": None,
    }  # fmt: skip
    return ResidencyMap(fill_s=fill_s, read_s=read_s or fill_s, **{**known, **facts})


def places(bandwidths, card=CARD, bus=BUS):
    times = [BLOCK / bandwidth for bandwidth in bandwidths]
    return [judged.place for judged in judge_blocks(times, BLOCK, card, bus)]


def test_planted_slow_blocks_are_found_by_the_clock_alone():
    clock = FakeClock()
    speeds = [CARD] * 8
    speeds[3], speeds[6] = BUS, 0.9 * BUS
    works = [clock.work(speed) for speed in speeds]
    passes = time_passes(clock, works, clock.work(CARD))
    found = map_of(tuple(tuple(times) for times in passes))
    assert found.slow_blocks == [3, 6]
    assert [j.place for j in found.fill_judgements].count("card") == 6
    assert found.fill_judgements[3].bandwidth == pytest.approx(BUS)


def test_a_lead_in_that_is_slow_is_not_counted():
    clock = FakeClock()
    passes = time_passes(clock, [clock.work(CARD)] * 3, clock.work(BUS / 10))
    assert len(passes) == 2
    for times in passes:
        assert times == pytest.approx([BLOCK / CARD] * 3)


def test_the_better_of_two_passes_counts_and_both_are_kept():
    slow, quick = BLOCK / BUS, BLOCK / CARD
    found = map_of(((slow, quick, slow), (quick, quick, slow)))
    assert found.slow_blocks == [2]


def test_a_block_that_is_slow_in_one_direction_only_is_not_called_slow():
    slow, quick = BLOCK / BUS, BLOCK / CARD
    found = map_of(((slow, quick),) * 2, ((quick, quick),) * 2)
    assert found.fill_judgements[0].slow
    assert found.slow_blocks == []


def test_the_figures_people_reported_are_told_apart():
    """1,531 GB/s resident against 237 GB/s after: too slow for the card, too fast for the bus."""
    assert places([1531 * GB, 237 * GB, 40 * GB, 24 * GB]) == [
        "card",
        "between",
        "system",
        "system",
    ]


@pytest.mark.parametrize(("outside", "place"), [(0.0, "card"), (0.2, "between"), (1.0, "system")])
def test_a_block_partly_outside_answers_in_proportion(outside, place):
    seconds = BLOCK * ((1 - outside) / CARD + outside / BUS)
    assert judge_blocks([seconds, seconds], BLOCK, CARD, BUS)[0].place == place


def test_where_card_and_bus_are_alike_nothing_can_be_told():
    assert places([60 * GB, 60 * GB], card=100 * GB, bus=60 * GB) == ["undecided", "undecided"]


def test_without_a_bus_figure_slow_is_still_slow():
    assert places([CARD, BUS], bus=None) == ["card", "between"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"fill_s": [1.0]}, {"fill_s": []}, {"fill_s": [1.0, 0.0]}, {"fill_s": [1.0, float("nan")]},
        {"card_bandwidth": 0}, {"bus_bandwidth": -1.0}, {"block_bytes": 0},
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_refused(wrong):
    given = {"fill_s": [1.0, 1.0], "block_bytes": BLOCK, "card_bandwidth": CARD,
             "bus_bandwidth": BUS}  # fmt: skip
    with pytest.raises(InputError):
        judge_blocks(**{**given, **wrong})


@given(
    slow=st.sets(st.integers(0, 39), max_size=39),
    card=st.floats(1e11, 1e13),
    ratio=st.floats(5, 500),
    noise=st.floats(0.8, 1.2),
)
def test_any_planted_set_is_found(slow, card, ratio, noise):
    bus = card / ratio
    speeds = [(bus if index in slow else card) * noise for index in range(40)]
    found = judge_blocks([BLOCK / speed for speed in speeds], BLOCK, card, bus)
    assert {judged.index for judged in found if judged.slow} == slow
    assert len(found) == 40


def limits_of(platform, device="cuda:0", card=16 * GIB, free=12 * GIB):
    return default_limits(
        ProbeSpec(), device, platform, total_bytes=card, free_bytes=free, host_total_bytes=32 * GIB
    )


@pytest.mark.parametrize(
    ("platform", "device", "blocks"),
    [
        ("linux", "cuda:0", 12),
        ("wsl2", "cuda:0", 72),
        ("windows", "cuda:0", 72),
        ("wsl2", "cpu", 8),
    ],
)
def test_the_map_goes_past_the_card_only_where_the_driver_spills(platform, device, blocks):
    assert count_blocks(ProbeSpec(), limits_of(platform, device)) == blocks


def test_the_map_is_never_one_block():
    tiny = limits_of("linux", free=300 * MIB)
    assert count_blocks(ProbeSpec(), tiny) == 2
    asked = ask(ProbeSpec, {"residency_bytes": GIB, "block_bytes": GIB})
    with pytest.raises(InputError, match="one block alone proves nothing"):
        count_blocks(asked, tiny)
    assert count_blocks(ask(ProbeSpec, {"residency_bytes": "2e9"}), tiny) == 7


def test_allocation_ends_at_a_refusal_and_keeps_what_was_granted():
    left = iter([1, 1, 1])

    def make():
        if next(left, None) is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB.")
        return torch.empty(1)

    blocks, ended = allocate(make, 5, enough_left=lambda: True)
    assert len(blocks) == 3
    assert ended == "block 4 was refused with an out-of-memory error"


def test_allocation_ends_when_the_host_runs_low():
    answers = iter([True, True, False])
    blocks, ended = allocate(lambda: torch.empty(1), 5, enough_left=lambda: next(answers))
    assert len(blocks) == 2
    assert ended == "the host's memory ran low after 2 blocks"
    assert allocate(lambda: torch.empty(1), 2, enough_left=lambda: True)[1] is None


def test_an_error_that_is_not_about_memory_is_passed_on():
    def make():
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side"):
        allocate(make, 2, enough_left=lambda: True)


def test_the_card_and_the_bus_are_measured_on_fresh_blocks():
    capture = CpuCapture(torch.device("cpu"))
    scratch = [torch.empty(1024), torch.zeros(1024)]
    card = measure_card(capture, scratch)
    assert {name: len(times) for name, times in card.items()} == {
        "fill_s": 16, "read_s": 16, "copy_s": 16,
    }  # fmt: skip
    assert torch.equal(scratch[1], torch.ones(1024)), "the copy really ran"
    assert measure_bus(capture, scratch[0]) == {"why_not": "on the CPU there is no bus to cross"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    run = RunDirectory.create(tmp_path_factory.mktemp("residency") / "run")
    spec = ask(ProbeSpec, {"device": "cpu", "block_bytes": 2 * MIB, "residency_bytes": 13 * MIB})
    with Worker() as worker:
        trials = [run_residency(spec, run, worker=worker) for _ in range(2)]
    return run, trials


def test_the_map_runs_on_the_cpu_and_calls_nothing_slow(measured):
    run, (trial, _) = measured
    assert (trial.kind, trial.outcome, trial.device, trial.batch_size) == (
        "residency", "ok", "cpu", 6,
    )  # fmt: skip
    found = residency_map(trial)
    assert found.block_bytes == 2 * MIB
    assert [len(times) for times in (*found.fill_s, *found.read_s)] == [6] * 4
    assert found.card_fill > 0
    assert found.bus_to_device is None
    assert {judged.place for judged in found.fill_judgements} == {"host"}
    assert found.slow_blocks == []
    assert newest_residency(run) == trial


def test_a_map_that_the_run_holds_is_not_measured_again(measured):
    run, (first, second) = measured
    assert first == second
    assert len(run.trials("residency")) == 1


def test_a_map_that_was_not_measured_reads_as_none():
    failed = Trial(kind="residency", batch_size=8, outcome="timeout")
    assert residency_map(failed) is None
    one = {"blocks": 1, "block_bytes": BLOCK, "asked_blocks": 8}
    assert residency_map(Trial(kind="residency", batch_size=1, details=one)) is None


def test_on_the_cpu_a_slow_block_has_no_other_place_to_lie_in():
    slow = map_of(((BLOCK / CARD, BLOCK / BUS),) * 2)
    assert slow.slow_blocks == [1]
    assert dataclasses.replace(slow, device="cpu").slow_blocks == []
