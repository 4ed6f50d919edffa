"""Counting and timing: steps, short last batches, rates, and where the clock stands."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from labhelpers.capture import CpuCapture
from labhelpers.feeds import count_steps, last_batch_size
from labhelpers.records import Trial
from labhelpers.training import LOSS_IMAGES, make_step, mean_loss, run_epoch
from labhelpers.workloads import adam

CPU = torch.device("cpu")
IMAGES = st.integers(1, 10**7)
SIZES = st.integers(1, 2**20)


@pytest.mark.parametrize(
    ("batch_size", "steps", "last"),
    [  # 60,000 images, the short last batch kept (case 27)
        (32, 1875, 32), (64, 938, 32), (256, 235, 96), (4096, 15, 2656), (8192, 8, 2656),
        (60_000, 1, 60_000), (65_536, 1, 60_000), (59_999, 2, 1),
    ],
)  # fmt: skip
def test_steps_of_an_epoch(batch_size, steps, last):
    assert count_steps(60_000, batch_size) == steps
    assert last_batch_size(60_000, batch_size) == last


@given(IMAGES, SIZES)
def test_steps_and_last_batch_make_up_the_epoch(images, batch_size):
    steps, last = count_steps(images, batch_size), last_batch_size(images, batch_size)
    assert (steps - 1) * batch_size + last == images
    assert 1 <= last <= batch_size
    assert steps == math.ceil(images / batch_size)


@given(st.integers(1, 300), st.integers(1, 320))
def test_steps_are_those_of_a_loader(images, batch_size):
    batches = [len(batch) for batch in DataLoader(range(images), batch_size=batch_size)]
    assert count_steps(images, batch_size) == len(batches)
    assert last_batch_size(images, batch_size) == batches[-1]


@given(IMAGES, st.floats(1e-6, 1e6), SIZES)
def test_a_rate_counts_the_images_really_seen(images, epoch_s, batch_size):
    steps = count_steps(images, batch_size)
    trial = Trial(kind="sweep", batch_size=batch_size, images=images, steps=steps, epoch_s=epoch_s)
    assert trial.images_per_s == images / epoch_s
    assert trial.mean_step_s == epoch_s / steps
    # Never the nominal steps x batch size, which a short last batch does not fill.
    assert trial.images_per_s <= steps * batch_size / epoch_s


def test_a_rate_of_the_cases():
    assert Trial(kind="sweep", batch_size=4096, images=60_000, epoch_s=10).images_per_s == 6000
    timed = Trial(kind="sweep", batch_size=4096, images=4096, epoch_s=1360 / 1e3)
    assert round(timed.images_per_s, 1) == 3011.8


# An epoch


class Recorder(CpuCapture):
    """A capture that writes down what it is asked, in order."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def mark(self) -> None:
        self.calls.append("mark")
        super().mark()


def epoch_of(images: int, batch_size: int, capture: CpuCapture, **options: object):
    data = TensorDataset(
        torch.arange(images, dtype=torch.float32).unsqueeze(1), torch.zeros(images)
    )
    feed = DataLoader(data, batch_size=batch_size, **options)
    capture.prepare(len(feed))
    return run_epoch(lambda inputs, _: inputs.mean(), feed, capture, batch_size=batch_size)


def test_the_device_is_waited_for_directly_before_start_and_stop_and_never_inside():
    capture = Recorder()
    epoch = epoch_of(10, 4, capture)
    assert capture.calls == ["synchronize", "mark", "mark", "mark", "mark", "synchronize"]
    assert (epoch.images, epoch.steps, epoch.last_batch) == (10, 3, 2)
    assert len(epoch.step_times_s) == epoch.steps
    assert 0 <= epoch.feed_wait_s <= epoch.epoch_s
    assert math.fsum(epoch.step_times_s) <= epoch.epoch_s


def test_a_dropped_last_batch_is_not_counted():
    epoch = epoch_of(60_000, 4096, CpuCapture(CPU), drop_last=True)
    assert (epoch.images, epoch.steps, epoch.last_batch) == (57_344, 14, 4096)
    nothing = epoch_of(60_000, 65_536, CpuCapture(CPU), drop_last=True)
    assert (nothing.images, nothing.steps, nothing.final_loss) == (0, 0, None)
    assert nothing.step_times_s == ()


def test_a_feed_without_a_length_is_counted_too():
    capture = CpuCapture(CPU)
    capture.prepare(0)
    feed = ((torch.ones(n, 1), torch.ones(n)) for n in (3, 3, 1))
    epoch = run_epoch(lambda inputs, _: inputs.sum(), feed, capture, batch_size=3)
    assert (epoch.images, epoch.steps, epoch.last_batch, len(epoch.step_times_s)) == (7, 3, 1, 3)


def test_an_error_in_the_middle_of_an_epoch_passes():
    def fail(inputs: Tensor, _: Tensor) -> Tensor:
        raise ValueError("in the second half")

    capture = CpuCapture(CPU)
    with pytest.raises(ValueError, match="in the second half"):
        run_epoch(fail, [(torch.ones(1), torch.ones(1))], capture, batch_size=1)


@given(st.integers(1, 40), st.integers(1, 4096))
def test_the_final_loss_is_the_mean_over_the_last_images(steps, batch_size):
    feed = [(torch.full((1,), float(step)), torch.zeros(1)) for step in range(steps)]
    capture = CpuCapture(CPU)
    capture.prepare(steps)
    epoch = run_epoch(lambda inputs, _: inputs.mean(), feed, capture, batch_size=batch_size)
    last = list(range(steps))[-math.ceil(LOSS_IMAGES / batch_size) :]
    assert epoch.final_loss == pytest.approx(sum(last) / len(last))


def test_a_loss_that_is_not_finite_was_not_measured():
    assert mean_loss([torch.tensor(1.0), torch.tensor(float("nan"))]) is None
    assert mean_loss([torch.tensor(float("inf"))]) is None
    assert mean_loss([]) is None
    assert mean_loss([torch.tensor(1.0), torch.tensor(2.0)]) == 1.5


# A step


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_step_is_forward_backward_and_one_update(precision):
    torch.manual_seed(0)
    model, expected = nn.Linear(4, 3), nn.Linear(4, 3)
    expected.load_state_dict(model.state_dict())
    inputs, targets = torch.rand(8, 4), torch.randint(3, (8,))
    optimizer = adam(expected.parameters(), 1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = nn.functional.cross_entropy(expected(inputs), targets)
    loss.backward()
    optimizer.step()
    step = make_step(
        model, adam(model.parameters(), 1e-2), nn.functional.cross_entropy, precision, CPU
    )
    assert torch.equal(step(inputs, targets), loss)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.grad, other.grad)
    second = step(inputs, targets)
    assert second < loss  # the gradient of the first step was cleared, not added
