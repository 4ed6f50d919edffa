"""Out of memory on a real GPU: 400 caught errors to the byte, caps, the text's own figures."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from labhelpers.caps import memory_cap
from labhelpers.freeing import read_memory, release_memory
from labhelpers.oom import attempt
from labhelpers.oom_check import check_oom_message
from labhelpers.oom_report import oom_report
from labhelpers.oom_wordings import print_size

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FRACTION = 0.02  # small, so that filling it takes no time
REPEATS = 200
FEATURES = 256
ROW_BYTES = FEATURES * 4


class TooMuchInBackward(torch.autograd.Function):
    """Pass the input on; ask for a given number of bytes when the gradient comes back."""

    @staticmethod
    def forward(ctx, inputs, size_bytes):
        ctx.size_bytes = size_bytes
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.empty(ctx.size_bytes, dtype=torch.uint8, device=gradient.device)
        return gradient, None


class Training:
    """A small network whose step can be made to run out of memory on either way."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, FEATURES).cuda(), nn.Linear(FEATURES, 8).cuda()
        parameters = [*self.first.parameters(), *self.last.parameters()]
        self.optimizer = torch.optim.Adam(parameters)

    def step(self, rows: int, backward_bytes: int = 0) -> float:
        """Run one step; it leaves no gradient, however it ends."""
        try:
            inputs = torch.ones(rows, FEATURES, device="cuda")
            hidden = TooMuchInBackward.apply(self.first(inputs).relu(), backward_bytes)
            loss = self.last(hidden).square().mean()
            loss.backward()
            self.optimizer.step()
            return float(loss.detach())
        finally:
            self.optimizer.zero_grad(set_to_none=True)


@pytest.fixture
def cap():
    release_memory()
    with memory_cap(fraction=FRACTION) as cap:
        yield cap
    release_memory()


@pytest.fixture
def training(cap):
    training = Training()
    training.step(64)  # libraries take their workspaces in the first step
    release_memory()
    return training


def total_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_two_hundred_caught_errors_leave_the_baseline_to_the_byte(cap, training, way):
    baseline_bytes = torch.cuda.memory_allocated()
    # 60 % of the cap goes in, and the first layer's output needs as much again.
    arguments = {
        "forward": (int(0.6 * cap.allowed_bytes) // ROW_BYTES,),
        "backward": (1_000, cap.allowed_bytes),
    }[way]
    after_bytes = []
    for _ in range(REPEATS):
        done = attempt(training.step, *arguments)
        assert done.outcome == "oom"
        assert done.cleanup_error is None
        after_bytes.append(torch.cuda.memory_allocated())
    assert after_bytes == [baseline_bytes] * REPEATS
    assert attempt(training.step, 64).ok


def test_half_a_step_leaves_parameters_and_optimizer_as_they_were(cap, training):
    parameters = [*training.first.parameters(), *training.last.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    moments = [training.optimizer.state[parameter]["exp_avg"].clone() for parameter in parameters]
    assert attempt(training.step, 1_000, cap.allowed_bytes).outcome == "oom"
    assert all(map(torch.equal, before, parameters))
    assert all(parameter.grad is None for parameter in parameters)
    for parameter, moment in zip(parameters, moments, strict=True):
        assert torch.equal(training.optimizer.state[parameter]["exp_avg"], moment)


def test_the_text_names_the_cap_to_the_printed_digit(cap):
    assert cap.allowed_bytes == int(FRACTION * total_bytes())
    done = attempt(torch.empty, cap.allowed_bytes + 64 * 2**20, dtype=torch.uint8, device="cuda")
    assert done.outcome == "oom"
    assert done.error_class == "OutOfMemoryError"
    assert f"{print_size(cap.allowed_bytes)} allowed" in done.text
    assert done.message.causes == ("cap",)
    assert done.message.device_index == torch.cuda.current_device()


def test_the_text_agrees_with_what_was_read_at_the_failure(cap, training):
    done = attempt(training.step, int(0.6 * cap.allowed_bytes) // ROW_BYTES)
    assert check_oom_message(done.message, done.failure.memory) == []
    wrong = {"fraction": 0.5, "total_bytes": total_bytes()}
    (disagreement,) = check_oom_message(done.message, wrong)
    assert f"the cap is {print_size(int(0.5 * total_bytes()))}" in disagreement
    report = json.loads(json.dumps(oom_report(done, {"batch_size": 4_096})))
    assert report["disagreements"] == []
    assert report["total_bytes"] == torch.cuda.mem_get_info()[1]
    assert report["peak_allocated_bytes"] > 0
    assert report["cuda"] == torch.version.cuda
    assert report["torch"] == str(torch.__version__)
    assert report["driver"]


def test_release_reports_allocated_and_reserved(cap):
    block = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    while_held = release_memory()
    assert while_held.after.allocated_bytes >= 64 * 2**20  # live memory stays
    del block
    released = release_memory()
    assert released.freed_bytes >= 64 * 2**20
    assert released.after.reserved_bytes < released.before.reserved_bytes


def test_the_cap_counts_what_is_reserved_and_not_the_context(cap):
    block = torch.empty(cap.allowed_bytes // 2, dtype=torch.uint8, device="cuda")
    memory = read_memory()
    assert block.numel() <= memory.reserved_bytes <= cap.allowed_bytes
    free_bytes, all_bytes = torch.cuda.mem_get_info()
    assert all_bytes - free_bytes > memory.reserved_bytes


def test_the_cap_is_restored_after_an_exception_and_when_nested():
    before = torch.cuda.get_per_process_memory_fraction()
    with memory_cap(fraction=0.3) as outer:
        outer_read = torch.cuda.get_per_process_memory_fraction()
        with memory_cap(fraction=0.5) as inner:
            read = torch.cuda.get_per_process_memory_fraction()
            assert abs(read * total_bytes() - inner.allowed_bytes) < 2
        assert torch.cuda.get_per_process_memory_fraction() == outer_read
        assert abs(outer_read * total_bytes() - outer.allowed_bytes) < 2
        with pytest.raises(KeyError), memory_cap(fraction=0.1):
            raise KeyError
        assert torch.cuda.get_per_process_memory_fraction() == outer_read
    assert torch.cuda.get_per_process_memory_fraction() == before


def test_a_whole_card_is_still_a_cap():
    with memory_cap(fraction=1) as cap:
        assert total_bytes() - cap.allowed_bytes <= 1
        done = attempt(torch.empty, total_bytes() * 2, dtype=torch.uint8, device="cuda")
        assert done.outcome == "oom"
        assert f"{print_size(cap.allowed_bytes)} allowed" in done.text


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_the_cap_is_set_on_the_device_asked_for():
    before = [torch.cuda.get_per_process_memory_fraction(index) for index in (0, 1)]
    with torch.cuda.device(0), memory_cap(fraction=0.3, device="cuda:1") as cap:
        assert cap.device == "cuda:1"
        assert torch.cuda.get_per_process_memory_fraction(0) == before[0]
        assert torch.cuda.get_per_process_memory_fraction(1) < 0.31
    after = [torch.cuda.get_per_process_memory_fraction(index) for index in (0, 1)]
    assert after == before


def test_a_lost_context_is_told_from_an_oom():
    code = """
import torch
from labhelpers.oom import attempt

def lose_the_device_on_the_way_out():
    table, index = torch.zeros(4, device="cuda"), torch.tensor([99], device="cuda")
    torch.cuda.synchronize()
    try:
        torch.empty(2**40, dtype=torch.uint8, device="cuda")
    finally:
        table[index]  # the assertion in the kernel arrives later

done = attempt(lose_the_device_on_the_way_out)
print(done.outcome, done.error_class, done.context_lost, "restart" in (done.advice or ""))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["oom", "OutOfMemoryError", "True", "True"], done.stderr[-2_000:]
