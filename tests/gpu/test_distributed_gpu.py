"""A torchrun job over NCCL: with one GPU its parts, with two its scaling."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from labhelpers.distributed_records import groups_of, is_alone
from labhelpers.distributed_tables import scaling_of
from labhelpers.store import RunDirectory, open_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPUS = min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 1
SIZES, IMAGES = (256, 2048), 10_000
PROJECT = Path(__file__).resolve().parents[2]


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    job = ["torch.distributed.run", "--standalone", f"--nproc-per-node={GPUS}", *arguments]
    return subprocess.run(
        [sys.executable, "-m", *job], cwd=PROJECT, capture_output=True, text=True, timeout=200
    )


@pytest.fixture(scope="module")
def swept(tmp_path_factory, data_report: Any) -> RunDirectory:
    path = tmp_path_factory.mktemp("job") / "run"
    options = ["--batch-sizes", ",".join(map(str, SIZES)), "--images", str(IMAGES)]
    options += ["--repeats", "2", "--accumulation", "2", "--output", str(path), "--require-gpu"]
    options += ["--data-dir", str(data_report.data_dir)]
    done = torchrun(
        "-m", "--", "labhelpers", "sweep", *options,
        *(["--synthetic"] if data_report.synthetic else []),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return open_run(path)


def test_each_rank_has_its_gpu_and_gradients_travel_by_nccl(swept):
    job = swept.environment()["job"]
    assert (job["backend"], job["world_size"]) == ("nccl", GPUS)
    together = [group for group in groups_of(swept.trials("ddp")) if not is_alone(group.first)]
    for group in together:
        assert [trial.device for trial in group.trials] == [f"cuda:{n}" for n in range(GPUS)]
        assert group.images == IMAGES
        assert all((trial.peak_reserved_bytes or 0) > 0 for trial in group.trials)
    assert len(together) == 2 * len(SIZES)


def test_speed_efficiency_and_the_all_reduce_are_measured(swept):
    table = scaling_of(swept)
    assert list(table["effective_batch"]) == [2 * GPUS * size for size in SIZES]
    assert table["efficiency"].between(0.2, 1.5).all()
    assert table["all_reduce_share"].between(0, 0.95).all()


def test_ranks_with_unequal_caps_agree_on_one_size():
    done = torchrun(
        "benchmarks/distributed_finder.py", "--caps", "0.05,0.03", "--image", "3,64,64",
        "--largest", "512", "--seconds", "60",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = re.findall(r"answers of the ranks: \[(.*)\]; headroom 0: (\d+)", done.stdout)
    assert len(answers) == 2
    for of_ranks, largest in answers:
        sizes = [int(size) for size in of_ranks.split(", ")]
        assert len(sizes) == GPUS
        assert len(set(sizes)) == 1
        # A tenth of the memory is kept free, and not what the allocator only keeps besides.
        assert 0.8 * int(largest) <= sizes[0] <= int(largest)


def test_a_whole_run_is_gone_on_with_and_nothing_is_measured_again(swept):
    before = swept.trials()
    done = torchrun("-m", "--", "labhelpers", "resume", str(swept.path))
    assert done.returncode == 0, done.stderr
    assert open_run(swept.path).trials() == before
    assert "batch per GPU" in done.stdout
