"""Accumulated updates are those of the whole batch, and a failed window leaves no trace."""

import copy
import math
import sys
from collections import UserDict, namedtuple
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labhelpers.accumulation import accumulate, micro_batches
from labhelpers.accumulation_proof import EQUAL, compare_layers
from labhelpers.gradients import catch_gradients, relative_change
from labhelpers.inputs import InputError, shown
from labhelpers.oom import attempt
from labhelpers.state import restore_state, save_state
from labhelpers.workloads import fashion_cnn


class Scalar(nn.Module):
    """The model w·x, so that every figure can be worked out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs):
        return self.weight * inputs


def mean_square(outputs, _targets):
    return outputs.square().mean()


def run(model, batches, loss=mean_square, **options):
    """Accumulate without moving the weights; return what was done and the first gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with catch_gradients(optimizer) as caught:
        done = accumulate(model, batches, loss, optimizer, **options)
    return done, caught.gradients


def pairs(*micro):
    return [
        (torch.tensor(values, dtype=torch.float64), torch.zeros(len(values))) for values in micro
    ]


def test_means_are_weighted_by_samples():
    # Means 2.0 over three samples and 4.0 over one.
    done, _ = run(Scalar(), pairs([2, 2, 2], [4]), lambda out, _: out.mean())
    assert (done.loss, done.samples) == (2.5, 4)


def test_gradient_with_a_short_last_micro_batch_is_that_of_all_samples():
    batches = pairs([1, 2, 3], [4, 5, 6], [7])
    _, [gradient] = run(Scalar(), batches)
    assert float(gradient) == pytest.approx(40.0, abs=1e-12)

    def divided_by_their_number(outputs, targets):
        return mean_square(outputs, targets) / 3

    _, [usual] = run(Scalar(), batches, divided_by_their_number, mean_loss=False)
    assert float(usual) == pytest.approx(52.889, abs=5e-4)


@pytest.mark.parametrize(
    ("count", "window", "windows"),
    [(15, 4, (4, 4, 4, 3)), (3, 4, (3,)), (8, 4, (4, 4)), (5, 1, (1, 1, 1, 1, 1))],
)
def test_every_window_is_an_update_the_short_last_one_too(count, window, windows):
    model = Scalar()
    steps = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: steps.append(float(model.weight.grad)))
    done = accumulate(model, pairs(*[[1, 2]] * count), mean_square, optimizer, window=window)
    assert done.windows == windows
    assert done.updates == len(steps) == len(windows)
    assert done.samples == 2 * count
    assert model.weight.grad is None


@pytest.mark.parametrize(
    "window",
    [0, -1, 1.5, math.nan, None, "four", True, sys.maxsize + 1, 2.0**70, 10**5000, torch.ones(2)],
    ids=lambda value: shown(value, 12),
)
def test_a_window_that_makes_no_sense_is_refused(window):
    with pytest.raises(ValueError, match="window: got .*; must be a whole number of at least 1"):
        run(Scalar(), pairs([1]), window=window)


@pytest.mark.parametrize("norm", [0, -1.0, math.nan, math.inf, "one"])
def test_a_norm_that_makes_no_sense_is_refused(norm):
    with pytest.raises(InputError, match="clip_norm"):
        run(Scalar(), pairs([1]), clip_norm=norm)


def test_no_batches_are_an_error():
    with pytest.raises(InputError, match="batches: got none"):
        run(Scalar(), iter(()))


def test_the_largest_window_is_one():
    assert run(Scalar(), pairs([1], [2]), window=sys.maxsize)[0].windows == (2,)


def test_batches_that_are_all_empty_are_an_error_that_says_so():
    with pytest.raises(InputError, match="batches: all are empty"):
        run(Scalar(), pairs([], [], []), window=2)


BOTH = {"x": torch.ones(2, 3), "y": torch.ones(2, 1)}


@pytest.mark.parametrize(
    "batches",
    [[BOTH], BOTH, [("x", "y")], [(["x"], torch.ones(1))], "xy", tuple(BOTH.values()),
     torch.ones(2, 2, 3), [torch.ones(2, 3)], [None], None, 5, [(torch.ones(2), 1, 1)]],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_batches_that_are_no_pairs_of_tensors_are_refused_in_one_line(batches):
    with pytest.raises(InputError, match="pair|where a tensor is needed") as caught:
        run(Scalar(), batches)
    assert "\n" not in str(caught.value)


class ByName(Scalar):
    def forward(self, a, b):
        return super().forward(a + b)


Named = namedtuple("Named", "a b")


@pytest.mark.parametrize("form", [dict, UserDict, lambda both: Named(**both)])
def test_inputs_may_be_mappings_and_named_tuples(form):
    half = torch.tensor([1.0, 2.0], dtype=torch.float64)
    inputs = form({"a": half, "b": half})
    done, [gradient] = run(ByName(), [(inputs, None)])
    assert (done.samples, float(gradient)) == (2, 20.0)
    parts = [part for part, _ in micro_batches(inputs, half, 1)]
    assert all(isinstance(part, dict if isinstance(inputs, UserDict) else type(inputs))
               for part in parts)  # fmt: skip
    assert run(ByName(), [(part, None) for part in parts])[0].samples == 2


@pytest.mark.parametrize(
    "found", [0.5, 2.7, -1, math.nan, math.inf, None, "two", torch.ones(2), torch.tensor(0.5)]
)
def test_a_count_that_is_no_whole_number_is_refused(found):
    with pytest.raises(InputError, match="count: gave .* whole number from 0"):
        run(Scalar(), pairs([1.0]), count=lambda *_: found)


@pytest.mark.parametrize("found", [2, 2.0, torch.tensor(2), torch.tensor([2.0])])
def test_a_count_may_be_any_whole_number(found):
    assert run(Scalar(), pairs([1.0]), count=lambda *_: found)[0].samples == 2


def test_a_count_that_cannot_be_called_is_refused():
    with pytest.raises(InputError, match="count: got 3; must be a function"):
        run(Scalar(), pairs([1.0]), count=3)


def test_an_optimizer_of_another_model_is_refused():
    model = Scalar()
    for optimizer in (torch.optim.SGD(Scalar().parameters(), lr=0.1), None):
        with pytest.raises(InputError, match="holds none of the model's parameters"):
            accumulate(model, pairs([1.0]), mean_square, optimizer)


@pytest.mark.parametrize("kind", [torch.int8, torch.float32, "bfloat16", True])
def test_autocast_takes_two_kinds_only(kind):
    said = r"autocast: got .*; must be one of torch.bfloat16, torch.float16, or None"
    with pytest.raises(InputError, match=said):
        run(Scalar(), pairs([1.0]), autocast=kind)


class TwoWeights(nn.Module):
    """Two weights and the sum w·x, so that inputs are gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, inputs):
        return (inputs * self.weight).sum()


def test_gradients_are_clipped_once_at_the_update():
    batches = [
        (torch.tensor([[2.0, 0.0]], dtype=torch.float64), None),
        (torch.tensor([[0.0, 2.0]], dtype=torch.float64), None),
    ]
    # Clipped one by one they would add up to [1, 1].
    _, [gradient] = run(TwoWeights(), batches, lambda out, _: out, clip_norm=1.0, mean_loss=False)
    assert gradient.tolist() == pytest.approx([0.7071, 0.7071], abs=5e-5)


def test_a_mean_over_tokens_is_weighted_by_tokens():
    batches = pairs([1.0, 1.0, 9.0], [3.0, 9.0, 9.0])  # 9 stands for padding

    def mean_over_tokens(outputs, _):
        return outputs[outputs < 9].mean()

    done, _ = run(
        Scalar(), batches, mean_over_tokens, count=lambda inputs, _: int((inputs < 9).sum())
    )
    assert (done.loss, done.samples) == (pytest.approx(5 / 3), 3)


def test_micro_batches_that_count_nothing_are_passed_over():
    batches = pairs([2.0], [], [4.0])
    done, [gradient] = run(Scalar(), batches, window=3)
    assert (done.windows, done.samples, float(gradient)) == ((2,), 2, 20.0)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 24), st.integers(1, 9))
def test_any_split_gives_the_gradient_of_the_whole_batch(samples, size):
    torch.manual_seed(samples)
    model = fashion_cnn().double()
    images = torch.rand(samples, 1, 28, 28, dtype=torch.float64)
    labels = torch.randint(10, (samples,))
    loss = nn.functional.cross_entropy
    _, whole = run(model, [(images, labels)], loss)
    parts = micro_batches(images, labels, size)
    done, found = run(model, parts, loss, window=len(parts))
    assert relative_change(found, whole) < EQUAL
    assert done.loss == pytest.approx(float(loss(model(images), labels).detach()), rel=1e-12)


def test_layers_that_mix_samples_or_draw_masks_differ_and_others_agree():
    found = {(c.what, c.recipe): c for c in compare_layers()}
    equal = {what for (what, recipe), c in found.items() if c.equal}
    assert equal == {"no such layer (FashionCNN)", "LayerNorm"}
    assert found["BatchNorm", "weight by samples"].gradient_change > 1e-3
    assert found["dropout", "weight by samples"].gradient_change > 1e-2
    usual = found["no such layer (FashionCNN)", "divide by their number"]
    assert usual.micro_sizes == (16, 16, 8)
    assert usual.gradient_change > 1e-3


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (torch.arange(5), [[0, 1], [2, 3], [4]]),
        ((torch.arange(3), torch.arange(3) + 10), [[[0, 1], [10, 11]], [[2], [12]]]),
        ({"a": torch.arange(3)}, [{"a": [0, 1]}, {"a": [2]}]),
    ],
)
def test_batches_of_any_form_are_split(inputs, expected):
    length = 5 if isinstance(inputs, torch.Tensor) else 3

    def plain(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value]

    found = micro_batches(inputs, torch.zeros(length), 2)
    assert [plain(part) for part, _ in found] == expected
    assert [len(targets) for _, targets in found] == [2] * (length // 2) + [1]


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", None, True, 2**70, torch.ones(2)])
def test_a_micro_batch_size_that_makes_no_sense_is_refused(size):
    with pytest.raises(InputError, match="size: got .*; must be a whole number of at least 1"):
        micro_batches(torch.ones(4), torch.ones(4), size)


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [(torch.ones(4), torch.ones(3)), ((torch.ones(4), torch.ones(3)), torch.ones(4)),
     ({"a": torch.ones(2)}, [torch.ones(4)])],
)  # fmt: skip
def test_inputs_and_targets_of_different_lengths_are_refused(inputs, targets):
    with pytest.raises(InputError, match="first dimensions are .* must be equal"):
        micro_batches(inputs, targets, 2)


@pytest.mark.parametrize("value", [["a", "b"], "ab", None, [], {}, torch.tensor(1.0), {"a": "b"}])
def test_only_tensors_are_split(value):
    for given_pair in ((value, torch.ones(2)), (torch.ones(2), value)):
        with pytest.raises(InputError, match=r"(inputs|targets): got .* where a tensor is needed"):
            micro_batches(*given_pair, 2)


class Failing(nn.Module):
    """A model with statistics and masks that runs out of memory on one call of `forward`."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)
        )
        self.calls, self.fails_at = 0, fails_at

    def forward(self, inputs):
        self.calls += 1
        hidden = self.layers(inputs)
        if self.calls == self.fails_at:
            self.layers[1].eval()
            torch.empty(2**50, dtype=torch.uint8)
        return hidden


def facts(model, optimizer):
    """Everything that a step may change, as plain values."""
    state = save_state(model, optimizer)
    return copy.deepcopy((state.tensors, state.gradients, state.modes, state.optimizer)), (
        state.random["torch"].tolist()
    )


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_running_out_of_memory_in_a_window_leaves_no_trace(fails_at):
    torch.manual_seed(1)
    batches = [(torch.rand(6, 4), torch.randint(2, (6,))) for _ in range(3)]
    model = Failing(fails_at + 3)
    optimizer = torch.optim.Adam(model.parameters())
    loss = nn.functional.cross_entropy
    accumulate(model, batches, loss, optimizer, window=3)
    before = facts(model, optimizer)
    found = attempt(accumulate, model, batches, loss, optimizer, window=3)
    assert found.outcome == "oom"
    assert same(facts(model, optimizer), before)
    assert all(p.grad is None for p in model.parameters())


OVERLAPPING = {
    "expanded": lambda memory: memory[:1].expand(5),
    "expanded rows": lambda memory: memory[:3, None].expand(3, 4),
    "windows": lambda memory: memory.unfold(0, 3, 1),
    "every second": lambda memory: memory[::2],
    "transposed": lambda memory: memory.view(2, 3).T,
    "empty": lambda memory: memory[:0].expand(4, 0),
}


class Overlapping(nn.Module):
    """Writes to the memory of its buffers, and fails."""

    def __init__(self, form) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.memory = torch.arange(6.0)
        self.register_buffer("mask", form(self.memory))
        self.register_buffer("later", torch.zeros(2))

    def forward(self, _inputs):
        self.memory.add_(1)
        self.later.add_(1)
        raise RuntimeError("planted")


@pytest.mark.parametrize("form", OVERLAPPING.values(), ids=OVERLAPPING)
def test_buffers_whose_elements_share_memory_are_put_back(form):
    model = Overlapping(form)
    mask, before = model.mask, model.mask.clone()
    with pytest.raises(RuntimeError, match="planted"):
        run(model, [(torch.ones(1), None)])
    assert model.mask is mask
    assert torch.equal(mask, before)
    assert model.later.tolist() == [0, 0]


def test_earlier_windows_stand_when_a_later_one_fails():
    batches = [(torch.rand(6, 4), torch.randint(2, (6,))) for _ in range(3)]
    model, twin = Failing(3), Failing(0)
    loss = nn.functional.cross_entropy
    for one, given_batches in ((model, batches), (twin, batches[:2])):
        torch.manual_seed(5)
        optimizer = torch.optim.Adam(one.parameters())
        attempt(accumulate, one, given_batches, loss, optimizer, window=2)
    assert same(dict(model.state_dict()), dict(twin.state_dict()))


class FailsInUpdate(torch.optim.Adam):
    """Adam that runs out of memory when its update is half done."""

    def step(self, closure=None):
        super().step(closure)
        torch.empty(2**50, dtype=torch.uint8)


def test_a_failed_update_is_undone_with_a_kept_state():
    model = Failing(0)
    optimizer = FailsInUpdate(model.parameters())
    before, kept = facts(model, optimizer), save_state(model, optimizer)
    batches = [(torch.rand(6, 4), torch.randint(2, (6,)))]
    found = attempt(accumulate, model, batches, nn.functional.cross_entropy, optimizer)
    assert found.outcome == "oom"
    assert all(p.grad is None for p in model.parameters())
    restore_state(kept, model, optimizer)
    assert same(facts(model, optimizer), before)


def test_a_users_own_error_travels_unchanged():
    def broken(_outputs, _targets):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(Scalar(), pairs([1.0]), broken)


class Quiet(Scalar):
    """Counts like DistributedDataParallel which micro-batches would not send gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.quiet, self.sent = False, []

    @contextmanager
    def no_sync(self):
        self.quiet = True
        yield
        self.quiet = False

    def forward(self, inputs):
        self.sent.append(not self.quiet)
        return super().forward(inputs)


def test_gradients_are_sent_with_the_last_micro_batch_of_a_window():
    model = Quiet()
    run(model, pairs(*[[1.0]] * 5), window=3)
    assert model.sent == [False, False, True, False, True]


def test_bfloat16_and_a_scaler_give_nearly_the_same_update():
    torch.manual_seed(0)
    batches = [(torch.rand(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    model, loss = nn.Linear(8, 3), nn.functional.cross_entropy
    _, exact = run(model, batches, loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    _, scaled = run(model, batches, loss, scaler=scaler)
    assert relative_change(scaled, exact) < 1e-6
    _, rounded = run(model, batches, loss, autocast=torch.bfloat16)
    assert 0 < relative_change(rounded, exact) < 0.05


def test_a_scaler_works_on_after_a_failed_window():
    model, loss = nn.Linear(8, 3), nn.functional.cross_entropy
    batch = (torch.rand(4, 8), torch.randint(3, (4,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    handle = optimizer.register_step_pre_hook(lambda *_: torch.empty(2**50, dtype=torch.uint8))
    given = {"clip_norm": 1.0, "scaler": scaler}
    assert attempt(accumulate, model, [batch], loss, optimizer, **given).outcome == "oom"
    handle.remove()
    assert accumulate(model, [batch], loss, optimizer, **given).updates == 1
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize(
    ("found", "reference", "expected"),
    [
        ([1.0, 0.0], [1.0, 0.0], 0.0),
        ([1.0, 1.0], [1.0, 0.0], 1.0),
        ([0.0, 0.0], [3.0, 4.0], 1.0),
        ([math.nan, 0.0], [1.0, 0.0], None),
        ([1.0, 0.0], [0.0, 0.0], None),
        ([1.0], [1.0, 0.0], None),
    ],
)
def test_relative_change_is_a_share_of_the_references_length(found, reference, expected):
    assert relative_change([torch.tensor(found)], [torch.tensor(reference)]) == expected
