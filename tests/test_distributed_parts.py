"""The parts of a job that need no second process: shares, answers, deadlines, requests."""

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labhelpers.distributed import Team, is_peer_failure
from labhelpers.distributed_cli import under_torchrun
from labhelpers.distributed_records import DistributedSpec
from labhelpers.distributed_search import RankAnswer, combine, ranks_of
from labhelpers.distributed_shares import share_of
from labhelpers.distributed_sweep import describe_task, filled, missing, tasks
from labhelpers.distributed_training import Member, windows
from labhelpers.distributed_trials import Task
from labhelpers.distributed_watch import EXIT_TIME_LIMIT, Deadline, RollCall, name_ranks
from labhelpers.inputs import InputError
from labhelpers.records import ARTICLE_BATCH_SIZES, Trial, ask
from labhelpers.workloads import fashion_cnn

# Shares


@given(count=st.integers(0, 300), ranks=st.integers(1, 9))
def test_shares_together_are_the_batch_and_differ_by_one_at_most(count, ranks):
    items = list(range(count))
    shares = [share_of(items, rank, ranks) for rank in range(ranks)]
    assert [item for share in shares for item in share] == items
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_a_full_batch_is_shared_equally_and_tensors_are_shared_too():
    batch = torch.arange(12)
    assert [share_of(batch, rank, 3).tolist() for rank in range(3)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11],
    ]  # fmt: skip


@given(steps=st.integers(1, 40), accumulation=st.integers(1, 12))
def test_windows_hold_every_step_once_and_only_the_last_is_shorter(steps, accumulation):
    counts = [(n, 2 * n) for n in range(steps)]
    found = list(windows(counts, accumulation))
    assert [count for window in found for count in window] == counts
    assert all(len(window) == accumulation for window in found[:-1])
    assert 1 <= len(found[-1]) <= accumulation


def test_a_member_called_with_nothing_gives_zero_gradients_to_every_parameter():
    member = Member(fashion_cnn())
    member(None).backward()
    assert all(p.grad is not None and not p.grad.any() for p in member.parameters())
    assert all(p.grad.stride() == p.stride() for p in member.parameters())


# A team of one


def test_alone_there_is_nobody_to_wait_for():
    team = Team(rank=1, world_size=2, device="cuda:1").alone()
    assert (team.rank, team.world_size, team.device, team.group) == (0, 1, "cuda:1", None)
    team.wait()
    assert team.gather("mine") == ["mine"]
    assert team.from_lead("mine") == "mine"
    assert team.settle(lambda: 3).value == 3
    with pytest.raises(InputError, match="^no such thing$"):
        team.together(refusing)


def refusing() -> None:
    raise InputError("no such thing")


def test_alone_an_error_is_not_blamed_on_a_rank():
    def failing() -> None:
        raise MemoryError("too much")

    assert Team().settle(failing).error_text == "too much"


@pytest.mark.parametrize(
    ("error", "is_peers"),
    [(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"), True),
     (RuntimeError("NCCL communicator was aborted"), True),
     (torch.distributed.DistBackendError("lost"), True),
     (RuntimeError("shape mismatch"), False), (ValueError("gloo"), False)],
)  # fmt: skip
def test_a_lost_rank_is_told_from_an_error_of_ones_own(error, is_peers):
    assert is_peer_failure(error) is is_peers


# Deadlines


class DictStore:
    """A store in which some ranks have answered; None is one that is gone."""

    def __init__(self, ranks: tuple[int, ...] | None) -> None:
        self.keys = {f"here/{rank}": "yes" for rank in ranks or ()}
        self.gone = ranks is None

    def set(self, key: str, value: str, /) -> None:
        if self.gone:
            raise torch.distributed.DistNetworkError("connection refused")
        self.keys[key] = value

    def check(self, keys: list[str], /) -> bool:
        return set(keys) <= set(self.keys)


@pytest.mark.parametrize(
    ("others", "missing", "words"),
    [((0, 2), [], "all 3 ranks still answer"),
     ((0,), [2], "rank 2 does not answer: ended, stopped or unreachable"),
     ((), [0, 2], "ranks 0 and 2 do not answer: ended, stopped or unreachable"),
     (None, None, "the host of rank 0 does not answer")],
)  # fmt: skip
def test_a_roll_call_names_the_ranks_that_do_not_answer(others, missing, words):
    waited: list[float] = []
    roll = RollCall(DictStore(others), 1, 3, grace_s=7, sleep=waited.append)
    assert roll.missing() == missing
    assert roll.verdict() == words
    assert set(waited) <= {7}


def test_ranks_are_named_as_a_subject():
    assert name_ranks([4]) == "rank 4 does"
    assert name_ranks([1, 3]) == "ranks 1 and 3 do"
    assert name_ranks([0, 1, 3]) == "ranks 0, 1 and 3 do"


def test_a_deadline_ends_the_process_with_the_rank_named(capsys):
    ended: list[int] = []
    over = threading.Event()

    def end(code: int) -> None:
        ended.append(code)
        over.set()

    roll = RollCall(DictStore((0,)), 0, 2, grace_s=0)
    with Deadline(roll, end).within(0.01, "batch 8, repeat 1"):
        assert over.wait(10)
    assert ended == [EXIT_TIME_LIMIT]
    assert capsys.readouterr().err == (
        "labhelpers: rank 0: batch 8, repeat 1: no end within 0.01 s; rank 1 does not answer: "
        "ended, stopped or unreachable; finished trials are kept\n"
    )


def test_a_block_that_ends_in_time_is_left_alone():
    ended: list[int] = []
    roll = RollCall(DictStore((0,)), 0, 2, grace_s=0)
    with Deadline(roll, ended.append).within(30, "batch 8"):
        timers = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    for timer in timers:
        timer.join(10)
    assert ended == []


# Answers of several ranks


def answer(outcome: Any = "ok", peak: int | None = 50, limit: int | None = 100) -> RankAnswer:
    return RankAnswer(outcome, peak, peak, limit)


@pytest.mark.parametrize(
    ("outcomes", "worst"),
    [(("ok", "ok"), "ok"), (("ok", "oom"), "oom"), (("error", "ok"), "error"),
     (("error", "oom"), "oom"), (("oversubscribed", "error"), "oversubscribed")],
)  # fmt: skip
def test_a_size_fits_only_if_it_fits_on_all_and_memory_comes_before_errors(outcomes, worst):
    answers = [answer(outcome) for outcome in outcomes]
    found = combine(4, answers, 100)
    assert (found.batch_size, found.outcome) == (4, worst)
    assert list(ranks_of(found)) == answers


def test_the_peak_is_that_of_the_rank_nearest_to_its_limit_on_the_common_scale():
    found = combine(4, [answer(peak=90, limit=1000), answer(peak=40, limit=100)], 100)
    assert (found.peak_bytes, found.live_bytes) == (40, 40)
    found = combine(4, [answer(peak=900, limit=1000), answer(peak=40, limit=100)], 100)
    assert found.peak_bytes == 90


def test_without_a_common_limit_the_highest_peak_counts_and_an_unknown_one_hides_it():
    known = [answer(peak=90, limit=None), answer(peak=40, limit=100)]
    assert combine(4, known, None).peak_bytes == 90
    assert combine(4, [*known, answer(peak=None)], 100).peak_bytes is None


def test_what_a_failed_rank_needed_counts_on_the_common_scale():
    needing = [RankAnswer("oom", None, None, 1000, 1200), answer("ok")]
    found = combine(4, needing, 100)
    assert (found.outcome, found.peak_bytes, found.needed_bytes) == ("oom", None, 120)
    assert combine(4, [answer(), answer()], 100).needed_bytes is None


# Requests


def test_every_size_runs_alone_and_then_on_all_ranks():
    spec = ask(DistributedSpec, {"batch_sizes": [16, 8], "repeats": 2})
    found = [(task.batch_size, task.repeat, task.alone) for task in tasks(spec)]
    assert found == [
        (8, 0, True), (8, 0, False), (16, 0, True), (16, 0, False),
        (16, 1, True), (16, 1, False), (8, 1, True), (8, 1, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "name", "sizes", "steps"),
    [("cuda:1", "cuda", ARTICLE_BATCH_SIZES, 20), ("cpu", "cpu", (32, 64, 128, 256, 512, 1024), 3)],
)
def test_what_is_left_open_suits_the_device_and_no_rank_is_bound_to_anothers(
    device, name, sizes, steps
):
    spec = filled(ask(DistributedSpec, {}), device)
    assert (spec.device, spec.batch_sizes, spec.compared_steps) == (name, sizes, steps)
    assert ask(DistributedSpec, spec.model_dump(mode="json")) == spec
    assert filled(ask(DistributedSpec, {"compared_steps": 7}), device).compared_steps == 7


def test_what_a_run_holds_is_not_measured_again_but_half_a_measurement_is():
    spec = ask(DistributedSpec, {"batch_sizes": [8], "repeats": 1})
    facts = {"kind": "ddp", "batch_size": 8, "feed": "resident"}
    single = Trial(**facts, variant="alone")
    both = [Trial(**facts, rank=rank, world_size=2) for rank in (0, 1)]
    assert [task.alone for task in missing(spec, [], 2)] == [True, False]
    assert [task.alone for task in missing(spec, [single], 2)] == [False]
    assert [task.alone for task in missing(spec, [single, both[1]], 2)] == [False]
    assert missing(spec, [single, *both], 2) == []
    assert [task.alone for task in missing(spec, [single, *both], 4)] == [False]


@pytest.mark.parametrize(
    ("device", "alone", "words"),
    [("cuda:0", False, "batch 32 per GPU × 2 = 64, repeat 3"),
     ("cuda:0", True, "batch 32 on one GPU, repeat 3"),
     ("cpu", False, "batch 32 per process × 2 = 64, repeat 3")],
)  # fmt: skip
def test_a_measurement_is_named_with_both_batches(device, alone, words):
    task = Task(32, 2, 0, alone)
    assert describe_task(task, Team(world_size=2, device=device)) == words


def test_by_default_images_lie_on_the_device_and_each_batch_is_an_update():
    spec = ask(DistributedSpec, {})
    assert (spec.feed, spec.accumulation) == ("resident", 1)
    with pytest.raises(InputError, match="accumulation: got '0'"):
        ask(DistributedSpec, {"accumulation": "0"})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, False), ({"RANK": "0"}, False),
     ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}, True)],
)  # fmt: skip
def test_torchrun_is_known_by_its_variables(monkeypatch, environment, expected):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert under_torchrun() is expected


def test_one_process_refuses_to_accumulate():
    done = subprocess.run(
        [sys.executable, "-m", "labhelpers", "sweep", "--accumulation", "4"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "labhelpers: accumulation: got '4'; a sweep on one device has one update per batch, only "
        "one under torchrun accumulates\n"
    )
