"""The finder on a real GPU: exact under a cap, everything handed back, no memory left behind."""

import pytest
import torch
from finder_workloads import trains
from handing_back import FEATURES, Trained, changed, job
from torch import nn

from labhelpers.caps import memory_cap
from labhelpers.finder import find_batch_size, search_batch_size
from labhelpers.finder_places import InProcess
from labhelpers.finder_room import start_libraries
from labhelpers.finder_trials import live_bytes, outcome_of
from labhelpers.freeing import release_memory
from labhelpers.records import FinderSpec
from labhelpers.search import NothingFits
from labhelpers.worker import Worker
from labhelpers.workloads import Workload, workload_from

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

GIB, MIB = 2**30, 2**20
QUICK = {"device": "cuda", "num_iterations": 3, "headroom": 0.0, "max_batch_size": 8}
ENDS = {"error": LookupError, "stop": KeyboardInterrupt, "oom": NothingFits}
RESNET = {"input_shape": (3, 64, 64), "classes": 10}
RESNET_NAME = "torchvision.models:resnet18"


# Handing back


@pytest.mark.parametrize(
    ("place", "own_optimizer"), [("cuda", True), ("cuda", False), ("cpu", False)]
)
@pytest.mark.parametrize("isolate", [True, False])
def test_everything_comes_back(worker, place, isolate, own_optimizer):
    """The model may lie on the GPU, or on the host and be moved for the search."""
    torch.cuda.init()
    trained = Trained(place)
    before = trained.facts()
    report = search_batch_size(
        job(trained, own_optimizer=own_optimizer), worker=worker, isolate=isolate, **QUICK
    )
    assert report.largest == 8
    assert changed(before, trained.facts()) == set()


@pytest.mark.parametrize("place", ["cuda", "cpu"])
@pytest.mark.parametrize("failing", ["error", "stop", "oom"])
def test_everything_comes_back_after_an_error_here(place, failing):
    torch.cuda.init()
    trained = Trained(place)
    before = trained.facts()
    with pytest.raises(ENDS[failing]):
        search_batch_size(job(trained, failing), isolate=False, **QUICK)
    assert changed(before, trained.facts()) == set()


@pytest.mark.parametrize("isolate", [None, False])
def test_the_articles_function_hands_the_model_back(isolate):
    torch.cuda.init()
    trained = Trained("cuda")
    before = trained.facts()
    found = find_batch_size(trained.model, (FEATURES,), (2,), 16, num_iterations=3, isolate=isolate)
    assert found == 16
    assert changed(before, trained.facts()) == set()


# What fits


def ran_in_a_fresh_process(batch_size: int, cap_bytes: int) -> bool:
    shape, classes = list(RESNET["input_shape"]), RESNET["classes"]
    with Worker() as fresh:
        answer = fresh.run(
            trains, RESNET_NAME, shape, classes, batch_size, cap_bytes, timeout_s=120
        )
    assert answer.outcome == "ok", answer.error_text
    return bool(answer.value)


def test_exact_under_a_cap():
    """The answer is what a plain training in a fresh process can do, to the sample."""
    report = search_batch_size(
        RESNET_NAME, **RESNET, device="cuda", limit_bytes=GIB, headroom=0.0, dataset_size=60_000
    )
    assert outcome_of(report.at(report.largest)[0]) == "ok"
    assert report.result.ended_by == "memory"
    assert report.result.closed
    assert report.oom_count <= (3 if report.monotonic else 6)
    assert ran_in_a_fresh_process(report.largest, GIB)
    assert not ran_in_a_fresh_process(report.largest + 1, GIB)


def test_the_headroom_stays_free_by_the_allocators_own_count(worker):
    report = search_batch_size(
        RESNET_NAME, **RESNET, worker=worker, device="cuda", limit_bytes=GIB, headroom=0.2
    )
    proof = report.at(report.with_headroom)[-1]
    assert proof.peak_reserved_bytes <= 0.8 * GIB
    assert report.with_headroom > 0.6 * report.largest


def test_peaks_speed_and_both_readings_are_there(worker):
    report = search_batch_size(
        RESNET_NAME, **RESNET, worker=worker, device="cuda", max_batch_size=32, headroom=0.0
    )
    trial = report.at(32)[0]
    assert trial.updates == 5
    assert len(trial.step_times_s) == trial.steps == 4
    assert trial.images_per_s > 100
    # Adam's two moments lie there from the second step on; in the first one, workspaces that the
    # libraries try on a new shape take much of that room.
    assert trial.peak_allocated_bytes > trial.first_step_peak_bytes
    assert trial.peak_reserved_bytes >= live_bytes(trial)
    assert report.terms.total_bytes == torch.cuda.mem_get_info()[1]


def test_adams_state_to_the_byte():
    """Linear(1000, 10): 80,088 bytes; on the GPU in blocks of 512, its two counters on the host."""
    model = nn.Linear(1000, 10, device="cuda")
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = torch.rand(2, 1000, device="cuda"), torch.rand(2, 10, device="cuda")

    def step() -> int:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(model(inputs), targets).backward()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    first = step()
    optimizer.step()
    second = step()
    tensors = [t for entry in optimizer.state.values() for t in entry.values()]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == 80_088
    assert second - first == 2 * (40_448 + 512)


# What counts as memory


def test_other_processes_memory_is_not_free(worker):
    release_memory()
    alone = search_batch_size(job(Trained()), worker=worker, **QUICK).terms.limit_bytes
    held = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    report = search_batch_size(job(Trained()), worker=worker, **{**QUICK, "max_batch_size": 4})
    assert alone - report.terms.limit_bytes > 3.9 * GIB
    assert any("this process holds 4.0" in note for note in report.notes)
    here = search_batch_size(job(Trained()), isolate=False, **QUICK)
    assert here.terms.limit_bytes - report.terms.limit_bytes > 3.5 * GIB  # its own cache counts
    del held
    release_memory()


@pytest.mark.parametrize("isolate", [True, False])
def test_the_callers_cap_is_the_limit(worker, isolate):
    torch.cuda.init()
    with memory_cap(fraction=0.02, device="cuda:0") as cap:
        report = search_batch_size(job(Trained()), worker=worker, isolate=isolate, **QUICK)
    assert abs(report.terms.limit_bytes - cap.allowed_bytes) <= 1


def test_an_out_of_memory_search_here_leaves_no_memory():
    left = []
    for _ in range(2):  # the first one may leave the libraries' own workspaces
        report = search_batch_size(
            RESNET_NAME, **RESNET, isolate=False, device="cuda", limit_bytes=GIB, headroom=0.0
        )
        assert report.oom_count >= 1
        release_memory()
        left.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert left[0] == left[1]
    assert left[0][1] <= 128 * MIB


def test_a_search_in_the_worker_leaves_no_memory_there(worker):
    search_batch_size(
        RESNET_NAME, **RESNET, worker=worker, device="cuda", limit_bytes=GIB, headroom=0.0
    )
    answer = worker.run(torch.cuda.memory_reserved, timeout_s=60)
    assert answer.outcome == "ok"
    assert answer.value <= 4 * MIB


def test_a_lost_context_is_named_and_the_process_replaced(worker):
    """A device-side assert: the workload's error, and the next search finds a working process."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            wrong = torch.full((1,), 10**6, device=inputs.device)
            return inputs[:, wrong].mean() * self.scale

    def make_batch(batch_size: int, device: torch.device):
        return torch.rand(batch_size, 4, device=device), torch.rand(1, device=device)

    broken = Workload("broken", Broken, make_batch, nn.functional.mse_loss)
    with pytest.raises(RuntimeError, match=r"assert|fails at batch size 2"):
        search_batch_size(broken, worker=worker, **QUICK)
    assert search_batch_size(job(Trained()), worker=worker, **QUICK).largest == 8


def test_an_open_session_takes_no_more_than_the_model():
    start_libraries(torch.device("cuda:0"))
    release_memory()
    before = torch.cuda.memory_allocated()
    spec = FinderSpec(device="cuda", workload=RESNET_NAME, **RESNET)
    model = workload_from(RESNET_NAME, **RESNET).make_model()
    model_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    place = InProcess(spec, None, None, None)
    place.open()
    assert torch.cuda.memory_allocated() - before <= 1.1 * model_bytes
    place.close()
    release_memory()
    assert torch.cuda.memory_allocated() == before


def test_hard_limits_are_not_needed_on_linux(worker):
    """Without a limit asked for, no cap is set: the card itself says no."""
    report = search_batch_size(job(Trained()), worker=worker, **QUICK)
    assert report.terms.cap_bytes is None
    assert {trial.cap_bytes for trial in report.trials} == {None}
