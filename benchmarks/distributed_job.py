"""The whole job for a machine with several GPUs: sweeps, scaling efficiency, the finder.

    python benchmarks/distributed_job.py --run results/reference/NAME [--seconds 240]

FashionCNN goes into the named run, ResNet50 into one beside it (`NAME-resnet50`), logs into
OUTPUT. NVLink multicast (NCCL_NVLS_ENABLE) stays as the environment has it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent

ROUGH = {
    "fashion_cnn": {32: 0.80, 256: 0.83, 2048: 0.96, 8192: 1.00},
    "resnet50": {16: 0.73, 128: 0.97},
}
"""Efficiency of a rough script on two H200s, one run, synthetic batches: leads, not limits."""


@dataclass(frozen=True)
class Step:
    """One torchrun call: its name in the summary, its arguments, and the most it may take."""

    name: str
    arguments: tuple[str, ...]
    timeout_s: float


def steps(run: Path, data_dir: str, synthetic: bool, images: str) -> list[Step]:
    """List the calls in their order."""
    sweep = ("-m", "labhelpers", "sweep", "--data-dir", data_dir, "--trial-timeout-s", "60")
    fashion = ("--batch-sizes", "32,256,2048,8192", "--images", images, "--repeats", "3")
    resnet = ("--batch-sizes", "16,128", "--images", "2048", "--repeats", "2")
    made_up = ("--synthetic",) if synthetic else ()
    beside = run.with_name(f"{run.name}-resnet50")
    return [
        Step("sweep_fashion_cnn", (*sweep, *fashion, *made_up, "--output", str(run)), 70),
        Step("sweep_resnet50", (*sweep, *resnet, "--workload", "benchmarks/resnet50.py:workload",
                                "--output", str(beside)), 70),
        Step("finder", ("benchmarks/distributed_finder.py", "--output", str(run)), 150),
    ]  # fmt: skip


def call(step: Step, gpus: int, log: Path, seconds: float) -> int:
    """Run a step under torchrun within its time, its output into a log; return its exit code."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}")
    paths = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    with open(log, "w", encoding="utf-8") as stream:
        try:
            done = subprocess.run(
                [sys.executable, *torchrun, *step.arguments], cwd=PROJECT, stdout=stream,
                stderr=subprocess.STDOUT, timeout=min(seconds, step.timeout_s), check=False,
                env=os.environ | {"PYTHONPATH": paths},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124
    return done.returncode


def efficiencies(run: Path, rough: dict[int, float]) -> list[str]:
    """Return a line for each size of a run: efficiency, and what a rough script had."""
    from labhelpers.distributed_tables import scaling_of
    from labhelpers.formats import show_share
    from labhelpers.store import open_run

    table = scaling_of(open_run(run)).dropna(subset=["efficiency"])
    return [
        f"batch {row['per_gpu_batch']:>5,} × {row['world_size']} = {row['global_batch']:>6,}: "
        f"{row['images_per_s']:>11,.0f} images/s, alone {row['alone_images_per_s']:>11,.0f}, "
        f"efficiency {row['efficiency']:.3f} (rough {rough.get(row['per_gpu_batch'], 'n/a')}), "
        f"in all-reduce {show_share(row['all_reduce_share'])}, spread {show_share(row['spread'])}"
        for row in table.to_dict("records")
    ]


def main() -> int:
    """Run the steps one after the other; one that fails does not keep the next from running."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=PROJECT / "build" / "distributed_job")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--images", default="60000")
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--only", default="", help="Names of steps, with commas between them.")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    run, until, rows = asked.run.resolve(), time.monotonic() + asked.seconds, []
    print(f"NCCL_NVLS_ENABLE={os.environ.get('NCCL_NVLS_ENABLE', 'not set')}", flush=True)
    for step in steps(run, asked.data_dir, asked.synthetic, asked.images):
        if not asked.only or step.name in asked.only.split(","):
            started = time.monotonic()
            log = asked.output / f"{step.name}.log"
            code = call(step, asked.gpus, log, max(1.0, until - started))
            rows.append((step.name, code, time.monotonic() - started))
            print(f"--- {step.name}", *log.read_text("utf-8").splitlines()[-25:], sep="\n")
    print("--- scaling efficiency")
    for path, name in ((run, "fashion_cnn"), (run.with_name(f"{run.name}-resnet50"), "resnet50")):
        if (path / "run.json").exists():
            print(name, *efficiencies(path, ROUGH[name]), sep="\n")
    print("--- summary")
    for name, code, seconds in rows:
        print(f"{name:<24} exit {code:>3}  {seconds:>7.1f} s")
    return int(any(code for _, code, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
