"""Find ResNet50's batch size on all GPUs: with unequal caps, then with all their memory.

    python -m torch.distributed.run --standalone --nproc-per-node=2 \
        benchmarks/distributed_finder.py [--output RUN] [--caps 0.1,0.0572] [--seconds 60]

Rank r may use the r-th share of its GPU in the first search; the others as much as the last.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from labhelpers.caps import memory_cap
from labhelpers.distributed import Team, describe_job, leave, meet, team_of
from labhelpers.distributed_find_report import found_answer, keep, probe_table
from labhelpers.distributed_finder import SharedSize, find_together
from labhelpers.distributed_sweep import open_or_create
from labhelpers.records import FinderSpec, ask
from labhelpers.workloads import workload_from


def search(team: Team, spec: FinderSpec, share: float | None) -> SharedSize:
    """Search under a cap on this rank's GPU; None for none."""
    workload = workload_from(spec.workload, input_shape=spec.input_shape, classes=spec.classes)
    capped = share is not None and team.device != "cpu"
    with memory_cap(fraction=share, device=team.device) if capped else nullcontext():
        return find_together(workload, team, spec)


def show(team: Team, title: str, found: SharedSize) -> None:
    """Print on rank 0 what was found, and on how many ranks the same."""
    sizes = team.gather(found.batch_size)
    if team.leads:
        print(f"--- {title}", probe_table(found).to_string(index=False), sep="\n")
        print(found_answer(found, team.device).replace("**", ""))
        print(f"answers of the ranks: {sizes}; headroom 0: {found.largest}", flush=True)


def main() -> None:
    """Search twice and keep the second search in the run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output")
    parser.add_argument("--caps", default="0.1,0.0572")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--largest", default="4096")
    parser.add_argument("--image", default="3,224,224")
    asked = parser.parse_args()
    shares = [float(share) for share in asked.caps.split(",")]
    given = {
        "workload": "torchvision.models:resnet50", "input_shape": asked.image, "classes": 1000,
        "num_iterations": 3, "max_batch_size": asked.largest, "time_budget_s": asked.seconds,
    }  # fmt: skip
    spec = ask(FinderSpec, given)
    with team_of(meet(), "auto", timeout_s=asked.seconds + spec.trial_timeout_s) as team:
        facts = describe_job(team)
        share = shares[min(team.rank, len(shares) - 1)]
        show(team, f"unequal caps: {shares}", search(team, spec, share))
        found = search(team, spec, None)
        show(team, "all memory", found)
        if team.leads and asked.output:
            run = open_or_create(asked.output, "finder", spec)
            keep(run, found, spec, team.device, facts)
    leave(0)


if __name__ == "__main__":
    main()
