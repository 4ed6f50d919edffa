"""Two ranks over gloo, for real: gradients, counts, agreement, a rank that is killed.

Starting torchrun takes seconds, so all cases run in one job (`distributed_cases.py`), and the
killed and the resumed job are one story.
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from labhelpers.distributed_records import PROVEN, ROOMY, SEARCHED, groups_of, is_alone, swept
from labhelpers.distributed_tables import scaling_of
from labhelpers.records import Trial
from labhelpers.store import TRIALS_FILE, open_run

TESTS = Path(__file__).parent
SIZES, REPEATS, IMAGES = (8, 16, 32), 2, 200


def torchrun(*arguments: str) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [*run, *arguments]


@pytest.fixture(scope="module")
def cases(tmp_path_factory, data_report) -> dict[str, list[Any]]:
    """What each case returned, rank by rank."""
    results = tmp_path_factory.mktemp("cases") / "results.json"
    job = torchrun(
        str(TESTS / "distributed_cases.py"), str(results), str(data_report.data_dir),
        str(data_report.synthetic),
    )  # fmt: skip
    done = subprocess.run(job, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = json.loads(results.read_text())
    return found


# Gradients


def test_every_update_is_that_of_one_process_with_the_whole_batch(cases):
    for results in cases["gradients_of_an_epoch"]:
        assert {name: case["updates"] for name, case in results.items()} == {
            "33 samples, accumulation 1": 3, "33 samples, accumulation 2": 2,
            "37 samples, accumulation 1": 3, "37 samples, accumulation 3": 1,
            "16 samples, accumulation 1": 1,
        }  # fmt: skip
        assert max(case["change"] for case in results.values()) < 1e-12


def test_the_short_last_batch_is_shared_unequally_and_a_rank_may_have_none_of_it(cases):
    first, second = cases["gradients_of_an_epoch"]
    assert first["37 samples, accumulation 1"]["counts"] == [[8, 16], [8, 16], [3, 5]]
    assert second["37 samples, accumulation 1"]["counts"] == [[8, 16], [8, 16], [2, 5]]
    assert second["33 samples, accumulation 1"]["counts"] == [[8, 16], [8, 16], [0, 1]]


def test_accumulated_steps_are_one_update_of_the_whole_window(cases):
    assert max(cases["gradient_of_a_window"]) < 1e-12


@pytest.mark.parametrize("feed", ["resident", "article"])
def test_gradients_on_the_articles_model_agree_in_float32(cases, feed):
    assert all(results[feed]["change"] < 1e-6 for results in cases["gradients_on_fashion"])


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_a_users_accumulation_is_right_for_unequal_ranks_and_sends_once_a_window(cases, loss):
    for results in cases["accumulation_with_unequal_ranks"]:
        assert results[loss]["change"] < 1e-12
        assert results[loss]["updates"] == results[loss]["sent"] == 2


def test_ranks_with_unequal_windows_are_refused_and_none_waits(cases):
    said = cases["accumulation_with_windows_missing"]
    assert said[0] == said[1]
    assert said[0].startswith("batches: 1 of 2 ranks have micro-batches left")


# Counts


@pytest.mark.parametrize("feed", ["article", "workers", "host", "resident"])
def test_both_ranks_together_see_each_image_once_in_the_order_of_one_process(cases, feed):
    first, second = (results[feed] for results in cases["images_seen"])
    assert all(first["equal"])
    assert len(first["equal"]) == 6
    assert first["counts"] == [[16, 32], [16, 32], [11, 21]]
    assert second["counts"] == [[16, 32], [16, 32], [10, 21]]


def test_loaders_that_cannot_be_shared_are_refused_on_all_ranks(cases):
    for said in cases["loader_without_seed"]:
        assert said == (
            "workload: its loader has another order on every rank; let make_loader shuffle with "
            "the seed that it is given"
        )
    assert all("under torchrun it must be a DataLoader" in s for s in
               cases["loader_that_cannot_be_split"])  # fmt: skip


# Agreement


def test_ranks_agree_on_how_a_call_ended_and_name_the_rank(cases):
    for seen in cases["settled"]:
        assert seen["oom"][0] == "oom"
        assert seen["oom"][1].startswith("rank 1: ")
        assert seen["oom"][2] is None
        assert seen["error"] == ["error", "ValueError", "rank 1: no such thing"]
        assert seen["fine"] == ["ok", "fine"]
        assert seen["refused"] == "rank 1: not mine"


def test_an_oom_on_one_rank_is_the_outcome_of_all_and_the_next_trial_runs(cases):
    for rank, seen in enumerate(cases["trial_that_fits_on_one_rank_only"]):
        assert seen["outcomes"] == ["oom", "ok"]
        assert seen["text"] == "rank 1: rank 1 has no room for this"
        assert (seen["images"], seen["rank"]) == (20, rank)
        sizes = {k: v for k, v in seen["details"].items() if k.endswith("batch_size")}
        assert sizes == {
            "per_gpu_batch_size": 8, "global_batch_size": 16, "effective_batch_size": 16,
        }  # fmt: skip
        assert len(seen["details"]["synced_step_times_s"]) == 4
        assert len(seen["details"]["unsynced_step_times_s"]) == 4


def test_a_search_with_unequal_limits_comes_to_the_smallest_limits_size_on_all_ranks(cases):
    first, second = cases["search_with_unequal_limits"]
    assert first == second
    assert first["largest"] == (400 - 30) // 7
    assert first["with_errors"] == (400 - 30) // 7
    assert first["smaller_maximum"] == 40
    assert (first["ended_by"], first["oom_count"]) == ("memory", 1)
    assert len(first["tried"]) <= 8


def test_an_error_of_one_ranks_workload_ends_the_search_on_all(cases):
    assert cases["search_of_a_broken_workload"] == ["ValueError: wrong shape"] * 2


def test_real_ooms_on_one_capped_rank_end_in_one_size_that_ran_on_both(cases):
    first, second = cases["find_with_a_cap_on_one_rank"]
    assert first == second
    assert first["largest"] in first["ran"]
    assert first["size"] <= first["largest"]
    assert first["update_s"] > 0
    assert first["limiting"] == [1]
    assert first["trials"] == 2 * (len(first["outcomes"]) + len(first["roomy"])) + 2
    assert first["rate"] == pytest.approx(first["size"] / first["update_s"])
    assert first["sentence"].startswith(f"All 2 processes agree: **{first['size']:,} per process**")
    assert "more does not fit on rank 1 (64.0 MiB)." in first["sentence"]
    assert all(outcomes[0] == "ok" for outcomes in first["outcomes"])
    # 2^16 float32 inputs a sample; the budget holds them, and a step needs little more.
    assert first["limits"][1] // 2**18 // 4 < first["size"] <= first["limits"][1] // 2**18


def test_the_search_for_the_headroom_is_shown_and_kept_apart(cases):
    first, _ = cases["find_with_a_cap_on_one_rank"]
    searched, roomy = len(first["outcomes"]), first["roomy"]
    assert [first["size"], "ok", "ok"] in roomy or (not roomy and first["size"] == first["largest"])
    allowed_bytes = int(0.9 * first["limits"][1])
    # One of the searches tried the next size, and it leaves too little or does not run at all.
    following = [peak for size, peak in first["tried"] if size == first["size"] + 1]
    assert following
    assert all(peak is None or peak > allowed_bytes for peak in following)
    own = [peak for size, peak in first["tried"] if size == first["size"] and peak is not None]
    assert min(own) <= allowed_bytes
    ran = {size for size, *outcomes in roomy if outcomes == ["ok", "ok"]}
    peaks = [peak for size, peak in first["tried"][searched:] if size in ran]
    assert all(peak <= allowed_bytes for peak in peaks)
    assert first["table"] == ["the largest size"] * searched + ["10 % kept free"] * len(roomy)
    assert first["variants"] == [SEARCHED] * searched + [ROOMY] * len(roomy) + [PROVEN]


MODEL = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(48, 4))
class Broken(Net):
    def forward(self, images):
        raise ValueError("not today")
"""


def find(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "mymodel.py").write_text(MODEL, encoding="utf-8")
    shapes = ["--input", "3,4,4", "--classes", "4", "--device", "cpu", "--max", "8"]
    job = torchrun("-m", "--", "labhelpers", "find", *options, *shapes)
    return subprocess.run(job, capture_output=True, text=True, timeout=120, cwd=folder)


def test_the_command_answers_in_json_with_the_split_and_keeps_one_search(tmp_path):
    asked = ["mymodel.py:Net", "--effective", "40", "--output", "run"]
    done = find(tmp_path, *asked, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["batch_size"], found["global_batch_size"], found["world_size"]) == (8, 16, 2)
    assert found["ended_by"] == "maximum"
    assert found["micro_batches"] == [10, 10, 10, 10]
    assert [len(probe["ranks"]) for probe in found["probes"]] == [2] * len(found["probes"])
    (answer, _) = [t for t in open_run(tmp_path / "run").trials("finder") if t.variant == PROVEN]
    assert answer.batch_size == 8
    again = find(tmp_path, *asked)
    assert again.returncode != 0
    assert (
        "--output: got 'run', which holds a search of mymodel.py:Net on all ranks" in again.stderr
    )


def test_the_command_says_what_the_workload_said(tmp_path):
    done = find(tmp_path, "mymodel.py:Broken")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "tried batch size 2 (error): ranks 0, 1: ValueError: not today" in done.stderr


# A rank that is killed, and the run that goes on


@dataclass(frozen=True)
class Story:
    """A job of which rank 1 was killed, and the same run gone on with."""

    path: Path
    killed: subprocess.CompletedProcess[str]
    ended_after_s: float
    before: list[Trial]
    resumed: subprocess.CompletedProcess[str]


def sweep(path: Path, data_report: Any) -> list[str]:
    options = ["--batch-sizes", ",".join(map(str, SIZES)), "--repeats", str(REPEATS)]
    options += ["--images", str(IMAGES), "--device", "cpu", "--output", str(path)]
    options += ["--data-dir", str(data_report.data_dir)]
    return torchrun(
        "-m", "labhelpers", "sweep", *options, *(["--synthetic"] if data_report.synthetic else [])
    )


def rank_of(job: subprocess.Popen[str], rank: int) -> psutil.Process:
    for child in psutil.Process(job.pid).children():
        if child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"rank {rank} is not there")


def kept(path: Path) -> list[Trial]:
    return open_run(path).trials() if (path / "run.json").exists() else []


@pytest.fixture(scope="module")
def story(tmp_path_factory, data_report) -> Story:
    path = tmp_path_factory.mktemp("job") / "run"
    job = subprocess.Popen(
        sweep(path, data_report), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while sum(trial.world_size == 2 for trial in kept(path)) < 2:
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    rank_of(job, 1).kill()
    began = time.monotonic()
    out, err = job.communicate(timeout=60)
    ended_after_s = time.monotonic() - began
    killed = subprocess.CompletedProcess(job.args, job.returncode, out, err)
    before = kept(path)
    go_on = torchrun("-m", "labhelpers", "resume", str(path))
    resumed = subprocess.run(go_on, capture_output=True, text=True, timeout=200)
    return Story(path, killed, ended_after_s, before, resumed)


def test_a_killed_rank_ends_the_job_soon_with_the_rank_named(story):
    assert story.killed.returncode != 0
    assert story.ended_after_s < 30
    assert re.search(r"Root Cause.*rank\s+: 1 .*Signal 9 \(SIGKILL\)", story.killed.stderr, re.S)


def test_finished_trials_stay_and_the_resumed_run_ends_with_the_same_set(story):
    assert story.resumed.returncode == 0, story.resumed.stderr
    trials = kept(story.path)
    assert 3 <= len(story.before) < len(trials)
    assert trials[: len(story.before)] == story.before
    lines = (story.path / TRIALS_FILE).read_text().splitlines()
    assert len({Trial(**json.loads(line)).key for line in lines}) == len(lines)
    groups = groups_of(trials)
    planned = {(size, repeat) for size in SIZES for repeat in range(REPEATS)}
    for alone in (True, False):
        found = [g.first for g in groups if is_alone(g.first) == alone]
        assert {(t.batch_size, t.repeat) for t in found} == planned
        assert len(found) == len(planned)


def test_a_resumed_run_counts_every_image_once_and_names_both_batches(story):
    table = scaling_of(open_run(story.path))
    assert list(table["per_gpu_batch"]) == list(SIZES)
    assert list(table["global_batch"]) == [2 * size for size in SIZES]
    assert all(group.images == IMAGES for group in groups_of(kept(story.path)))
    assert list(table["updates"]) == [13, 7, 4]
    assert list(table["last_global_batch"]) == [8, 8, 8]
    assert (table["efficiency"] > 0).all()
    assert table["all_reduce_share"].between(0, 1, inclusive="left").all()


def test_rank_0_prints_the_table_and_every_measurement_once(story):
    head, *_ = story.resumed.stdout.splitlines()
    assert "batch per process" in head
    assert "global batch" in head
    assert "efficiency" in head
    left = 2 * len(SIZES) * REPEATS - len(groups_of(story.before))
    numbers = re.findall(r"^\[(\d+)/(\d+)\] batch", story.resumed.stderr, re.M)
    assert numbers == [(str(n), str(left)) for n in range(1, left + 1)]


def test_the_ranks_peaks_and_the_job_are_in_the_record(story):
    run = open_run(story.path)
    both = [trial for trial in run.trials() if trial.world_size == 2]
    assert {trial.rank for trial in both} == {0, 1}
    if os.path.exists("/proc/self/clear_refs"):
        assert all(trial.peak_allocated_bytes is not None for trial in both)
    job = run.environment()["job"]
    assert (job["world_size"], job["hosts"], job["backend"]) == (2, 1, "gloo")


def test_a_run_of_several_ranks_can_be_compared_as_one_machine(story):
    trials = swept(open_run(story.path))
    assert sorted({trial.batch_size for trial in trials}) == [16, 32, 64]
    assert all(trial.images == IMAGES for trial in trials)


def test_one_process_refuses_to_go_on_with_it_and_says_how(story):
    done = subprocess.run(
        [sys.executable, "-m", "labhelpers", "resume", str(story.path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "torchrun --nproc-per-node=N -m -- labhelpers resume" in done.stderr
