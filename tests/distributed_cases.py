"""What two ranks do together; test_distributed.py starts this under torchrun, once for all.

    torchrun --nproc-per-node=2 distributed_cases.py RESULTS DATA_DIR SYNTHETIC

Each case is a function of the team that returns what this rank saw; rank 0 writes the ranks'
values to RESULTS as JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from labhelpers.accumulation import accumulate
from labhelpers.caps import memory_cap
from labhelpers.capture import capture_for
from labhelpers.distributed import Team, leave, meet, team_of
from labhelpers.distributed_find_report import finder_trials, found_answer, probe_table
from labhelpers.distributed_finder import find_together
from labhelpers.distributed_records import DistributedSpec
from labhelpers.distributed_search import ranks_of, search_together
from labhelpers.distributed_shares import Shared, shared_feed
from labhelpers.distributed_training import Member, SharedStep, run_shared_epoch
from labhelpers.distributed_trials import Task, measure_task
from labhelpers.gradients import relative_change
from labhelpers.inputs import InputError
from labhelpers.records import FinderSpec, ask
from labhelpers.search import ProbeResult, WorkloadFailed
from labhelpers.workloads import Workload, fashion_workload, image_batches

CPU = torch.device("cpu")
RESULTS, DATA_DIR, SYNTHETIC = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True"
FEATURES = 6


def spec_of(**given: Any) -> DistributedSpec:
    return ask(
        DistributedSpec, {"device": "cpu", "data_dir": DATA_DIR, "synthetic": SYNTHETIC} | given
    )


# An update of all ranks is the update of one process


def double_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def samples(count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, FEATURES, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (count,), generator=draw))


def small_workload(count: int) -> Workload:
    """A job in float64 with a DataLoader of its own."""

    def make_loader(batch_size: int, seed: int) -> DataLoader[Any]:
        shuffled = torch.Generator().manual_seed(seed)
        return DataLoader(samples(count), batch_size, shuffle=True, generator=shuffled)

    def make_batch(batch_size: int, device: torch.device) -> Any:
        return torch.randn(batch_size, FEATURES, dtype=torch.float64), torch.zeros(
            batch_size, dtype=torch.int64
        )

    return Workload("small", double_model, make_batch, make_loader=make_loader)


def updates_of(
    workload: Workload, spec: DistributedSpec, batch_size: int, team: Team, shared: Shared
) -> list[list[Tensor]]:
    """Train an epoch by SGD and return the gradients that each update was given."""
    torch.manual_seed(spec.seed)
    member = Member(workload.make_model())
    optimizer = torch.optim.SGD(member.parameters(), lr=0.05)
    seen: list[list[Tensor]] = []

    def keep(*_: Any) -> None:
        seen.append([p.grad.detach().clone() for p in member.parameters() if p.grad is not None])

    optimizer.register_step_pre_hook(keep)
    step = SharedStep(member, optimizer, workload.loss, spec.precision, team)
    capture = capture_for(CPU)
    capture.prepare(len(shared.counts))
    run_shared_epoch(step, shared, capture, team, accumulation=spec.accumulation)
    return seen


def furthest(found: list[list[Tensor]], reference: list[list[Tensor]]) -> float:
    changes = [relative_change(a, b) for a, b in zip(found, reference, strict=True)]
    return max(1e9 if change is None else change for change in changes)


def gradients_of_an_epoch(team: Team) -> dict[str, Any]:
    """33 samples, 8 a rank: the last global batch of 1 leaves rank 1 without a sample."""
    results = {}
    for count, accumulation in [(33, 1), (33, 2), (37, 1), (37, 3), (16, 1)]:
        workload, spec = small_workload(count), spec_of(workload="s:w", accumulation=accumulation)
        own, whole = (
            shared_feed(spec, workload, 8, team),
            shared_feed(spec, workload, 16, team.alone()),
        )
        found = updates_of(workload, spec, 8, team, own)
        reference = updates_of(workload, spec, 16, team.alone(), whole)
        results[f"{count} samples, accumulation {accumulation}"] = {
            "updates": len(found), "change": furthest(found, reference),
            "counts": own.counts,
        }  # fmt: skip
    return results


def gradients_on_fashion(team: Team) -> dict[str, Any]:
    """The article's model in float32; only the first update, before rounding adds up."""
    results = {}
    for feed in ("resident", "article"):
        spec, workload = spec_of(feed=feed, images=20), fashion_workload()
        own = shared_feed(spec, workload, 16, team)
        whole = shared_feed(spec, workload, 32, team.alone())
        found = updates_of(workload, spec, 16, team, own)
        reference = updates_of(workload, spec, 32, team.alone(), whole)
        results[feed] = {"change": furthest(found, reference), "counts": own.counts}
    return results


def gradient_of_a_window(team: Team) -> float:
    """Three steps of accumulation are one update, that of all 37 samples as a single batch."""
    workload, spec = small_workload(37), spec_of(workload="s:w", accumulation=3)
    found = updates_of(workload, spec, 8, team, shared_feed(spec, workload, 8, team))
    model = double_model()
    inputs, targets = samples(37).tensors
    workload.loss(model(inputs), targets).backward()
    return furthest(found, [[p.grad for p in model.parameters() if p.grad is not None]])


# Every image once


def images_seen(team: Team) -> dict[str, Any]:
    """Whether both ranks' images of each step are those of one process, in its order."""
    results = {}
    for feed in ("article", "workers", "host", "resident"):
        spec = spec_of(feed=feed, images=85, workers=1)
        own = shared_feed(spec, fashion_workload(), 16, team)
        steps = [(images, labels) for images, labels in own.feed]
        ranks = team.gather(steps)
        whole = list(shared_feed(spec, fashion_workload(), 32, team.alone()).feed)
        equal = [
            torch.equal(torch.cat([step[n][part] for step in ranks if n < len(step)]), batch[part])
            for n, batch in enumerate(whole)
            for part in (0, 1)
        ]
        results[feed] = {"equal": equal, "counts": own.counts}
    return results


def loader_without_seed(team: Team) -> str:
    def make_loader(batch_size: int, seed: int) -> DataLoader[Any]:
        unequal = torch.Generator().manual_seed(seed + team.rank)
        return DataLoader(samples(20), batch_size, shuffle=True, generator=unequal)

    return said_by_trial(team, make_loader)


def loader_that_cannot_be_split(team: Team) -> str:
    return said_by_trial(team, lambda *_: iter(()))


def said_by_trial(team: Team, make_loader: Any) -> str:
    job = small_workload(20)
    workload = Workload("own", job.make_model, job.make_batch, make_loader=make_loader)
    return said_by(lambda: trial_of(workload, 4, team))


def trial_of(workload: Workload, batch_size: int, team: Team, **given: Any) -> Any:
    sys.modules["case_workload"] = type(sys)("case_workload")
    sys.modules["case_workload"].made = workload  # type: ignore[attr-defined]
    spec = spec_of(workload="case_workload:made", compared_steps=2, images=40, **given)
    return measure_task(spec, Task(batch_size, 0, 0, alone=False), team, "here")


def said_by(function: Callable[[], Any]) -> str:
    try:
        function()
    except InputError as error:
        return str(error)
    return ""


# Accumulation by the user's own loop


def accumulation_with_unequal_ranks(team: Team) -> dict[str, Any]:
    """The ranks' micro-batches differ in size; an update is that of all samples together."""
    sizes = [[[5, 3], [4]], [[2, 7], [1]]]  # by rank, window, micro-batch
    data = samples(22).tensors
    cut = iter(range(10_000))
    where = [[[[next(cut) for _ in range(n)] for n in window] for window in own] for own in sizes]
    mine = [tuple(t[chosen] for t in data) for window in where[team.rank] for chosen in window]
    whole = [
        tuple(t[[i for own in where for chosen in own[w] for i in chosen]] for t in data)
        for w in (0, 1)
    ]
    results = {}
    for name, loss, mean in [
        ("mean", nn.CrossEntropyLoss(), True), ("sum", nn.CrossEntropyLoss(reduction="sum"), False),
    ]:  # fmt: skip
        found, sent = accumulated(DistributedDataParallel(double_model()), mine, 2, loss, mean)
        reference, _ = accumulated(double_model(), whole, 1, loss, mean)
        results[name] = {"change": furthest(found, reference), "updates": len(found), "sent": sent}
    return results


def accumulated(
    model: nn.Module, batches: Any, window: int, loss: Any, mean_loss: bool
) -> tuple[list[list[Tensor]], int]:
    """Return the gradients of each update, and how often the ranks sent theirs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: list[list[Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    )
    sent: list[int] = []
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(sent, count_and_average)
    accumulate(model, batches, loss, optimizer, window=window, mean_loss=mean_loss)
    return seen, len(sent)


def count_and_average(
    sent: list[int], bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    sent.append(bucket.index())
    return allreduce_hook(torch.distributed.group.WORLD, bucket)


def accumulation_with_windows_missing(team: Team) -> str:
    batches = [samples(4).tensors] * (3 - team.rank)
    model = DistributedDataParallel(double_model())
    return said_by(lambda: accumulated(model, batches, 1, nn.CrossEntropyLoss(), True))


# The ranks agree


def settled(team: Team) -> dict[str, Any]:
    def lacking(rank: int) -> str:
        if team.rank == rank:
            raise MemoryError("[enforce fail] DefaultCPUAllocator: not enough memory")
        return "fine"

    def failing() -> None:
        if team.rank == 1:
            raise ValueError("no such thing")

    def refusing() -> None:
        if team.rank == 1:
            raise InputError("not mine")

    oom, error, fine = team.settle(lacking, 1), team.settle(failing), team.settle(lacking, 9)
    return {
        "oom": (oom.outcome, oom.error_text, oom.value),
        "error": (error.outcome, error.error_class, error.error_text),
        "fine": (fine.outcome, fine.value), "refused": said_by(lambda: team.together(refusing)),
    }  # fmt: skip


def trial_that_fits_on_one_rank_only(team: Team) -> dict[str, Any]:
    class Hungry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = double_model()

        def forward(self, inputs: Tensor) -> Tensor:
            if team.rank == 1 and len(inputs) > 8:
                raise MemoryError("rank 1 has no room for this")
            return self.layer(inputs)

    job = small_workload(40)
    workload = Workload("hungry", Hungry, job.make_batch, make_loader=job.make_loader)
    too_large, fits = (trial_of(workload, size, team) for size in (16, 8))
    return {
        "outcomes": [too_large.outcome, fits.outcome], "text": too_large.error_text,
        "images": fits.images, "rank": fits.rank, "details": fits.details,
    }  # fmt: skip


def search_with_unequal_limits(team: Team) -> dict[str, Any]:
    limit = (1_000, 400)[team.rank]
    tried: list[int] = []

    def probe(size: int) -> ProbeResult:
        tried.append(size)
        used = 30 + 7 * size
        if used > limit:
            raise MemoryError("no room") if size % 2 else RuntimeError("out of luck")
        return ProbeResult(size, "ok", used)

    def memory_only(size: int) -> ProbeResult:
        tried.append(size)
        used = 30 + 7 * size
        return ProbeResult(size, "ok" if used <= limit else "oom", used if used <= limit else None)

    found = search_together(memory_only, team, max_batch_size=500, limit_bytes=limit)
    steps = list(tried)
    unknown = search_together(memory_only, team, max_batch_size=(40, 500)[team.rank])
    other = search_together(probe, team, max_batch_size=500, limit_bytes=limit)
    return {
        "largest": found.largest, "tried": steps, "ended_by": found.ended_by,
        "oom_count": found.oom_count, "smaller_maximum": unknown.largest,
        "with_errors": other.largest,
    }  # fmt: skip


def search_of_a_broken_workload(team: Team) -> str:
    def probe(size: int) -> ProbeResult:
        if team.rank == 1:
            raise ValueError("wrong shape")
        return ProbeResult(size, "ok", 100 * size)

    try:
        search_together(probe, team, max_batch_size=64, limit_bytes=10_000)
    except WorkloadFailed as error:
        return f"{ranks_of(error.probes[-1])[1].text}"
    return ""


def find_with_a_cap_on_one_rank(team: Team) -> dict[str, Any]:
    """Real out-of-memory errors on rank 1, whose address space is capped; none on rank 0."""
    wide = 2**16

    def model() -> nn.Module:
        return nn.Linear(wide, 2)

    workload = Workload("wide", model, image_batches((wide,), 2))
    budget = (2**28, 2**26)[team.rank]
    spec = ask(FinderSpec, {"num_iterations": 2, "headroom": 0.1, "max_batch_size": 4096})
    with memory_cap(budget_bytes=budget) if team.rank == 1 else nullcontext():
        found = find_together(workload, team, spec, limit_bytes=budget)
    # The cap may end the search so early that the largest size leaves the headroom as it is.
    roomy = found.roomy.probes if found.roomy else ()
    kept = finder_trials(found, spec, team.device, "here")
    return {
        "trials": len(kept), "rate": kept[-1].images_per_s, "sentence": found_answer(found, "cpu"),
        "size": found.batch_size, "largest": found.largest, "update_s": found.update_s,
        "ran": [p.batch_size for p in found.search.successes],
        "limiting": found.limiting_ranks, "limits": found.limits_bytes,
        "outcomes": [[a.outcome for a in ranks_of(p)] for p in found.search.probes],
        "roomy": [[p.batch_size, *(a.outcome for a in ranks_of(p))] for p in roomy],
        "tried": [
            [p.batch_size, ranks_of(p)[1].peak_bytes]
            for p in (*found.search.probes, *roomy)
        ],
        "table": probe_table(found)["searched"].tolist(),
        "variants": [trial.variant for trial in kept if trial.rank == 1],
    }  # fmt: skip


CASES = (
    gradients_of_an_epoch, gradient_of_a_window, gradients_on_fashion, images_seen,
    loader_without_seed, loader_that_cannot_be_split, accumulation_with_unequal_ranks,
    accumulation_with_windows_missing, settled, trial_that_fits_on_one_rank_only,
    search_with_unequal_limits, search_of_a_broken_workload, find_with_a_cap_on_one_rank,
)  # fmt: skip


def main() -> None:
    """Run every case on every rank."""
    with team_of(meet(), "cpu", timeout_s=60) as team:
        results = {}
        for case in CASES:
            started = time.perf_counter()
            results[case.__name__] = team.gather(case(team))
            if team.leads:
                print(f"{case.__name__}: {time.perf_counter() - started:.2f} s", flush=True)
        if team.leads:
            RESULTS.write_text(json.dumps(results))
    leave(0)


if __name__ == "__main__":
    main()
