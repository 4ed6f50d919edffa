"""Counted work and ceilings: by hand and by torch, and which ceiling is nearer."""

import pytest
import torch
from torch import nn

from labhelpers.capture import capture_for
from labhelpers.ceiling_trials import (
    ADAM_PASSES,
    ByteCounter,
    copy_bytes_per_s,
    count_flops,
    count_work,
    matrix_flops_per_s,
    measure_ceilings,
)
from labhelpers.ceilings import Work, describe_share, hand_count, share_of_ceiling, work_from
from labhelpers.records import LadderSpec
from labhelpers.training import read_precision
from labhelpers.workloads import FASHION_PARAMETERS

CPU = torch.device("cpu")
WORK = Work(
    forward_flops=40, backward_flops=60, eager_bytes=50.0, eager_bytes_step=100.0,
    fused_bytes=10.0, fused_bytes_step=100.0,
)  # fmt: skip


@pytest.mark.parametrize("batch_size", [1, 7, 32])
def test_torch_counts_what_the_hand_counts(batch_size):
    assert count_flops(batch_size) == hand_count() == (2_234_112, 4_242_432)


def test_bytes_are_those_of_each_operators_inputs_and_outputs():
    left, right = torch.rand(4, 8), torch.rand(8, 2)
    with ByteCounter() as counter:
        product = left @ right
        product.t()  # a view moves nothing
        torch.relu(product)
    matrix = 4 * (4 * 8 + 8 * 2 + 4 * 2)
    assert counter.library_bytes == matrix
    assert counter.all_bytes == matrix + 4 * (4 * 2) * 2


def test_a_tensor_that_is_read_twice_by_one_operator_counts_once():
    values = torch.rand(16)
    with ByteCounter() as counter:
        torch.add(values, values)
    assert counter.all_bytes == 2 * 16 * 4


def test_the_work_of_a_step_has_a_part_per_image_and_a_part_per_step():
    work = count_work()
    assert work.flops == sum(hand_count())
    # Weights and gradients of the layers are read and written once, Adam's seven passes apart.
    assert work.eager_bytes_step >= ADAM_PASSES * 4 * FASHION_PARAMETERS
    assert work.eager_bytes > work.fused_bytes > 4 * 28 * 28  # at least the image itself
    assert work.bytes_per_image(32, fused=False) > work.bytes_per_image(8192, fused=False)


def test_the_nearest_ceiling_is_the_larger_share():
    terms = {"fused": False, "flops_per_s": 1e5, "bytes_per_s": 1e4}
    found = share_of_ceiling(100.0, WORK, 10, **terms)
    assert found.compute == pytest.approx(0.1)
    assert found.memory == pytest.approx(0.6)
    assert (found.nearest, found.share) == ("memory bandwidth", found.memory)
    assert describe_share(found) == "60.0 % of memory bandwidth"
    fused = share_of_ceiling(100.0, WORK, 100, **(terms | {"fused": True}))
    assert fused.memory == pytest.approx(0.11)
    faster_copy = share_of_ceiling(100.0, WORK, 10, **(terms | {"bytes_per_s": 1e9}))
    assert describe_share(faster_copy) == "10.0 % of arithmetic"


def test_an_unknown_ceiling_is_not_zero():
    found = share_of_ceiling(1.0, WORK, 1, fused=False, flops_per_s=None, bytes_per_s=None)
    assert (found.compute, found.memory, found.nearest, found.share) == (None,) * 4
    assert describe_share(found) == "n/a"


def test_the_machine_is_measured_with_data_that_is_not_zero():
    capture = capture_for(CPU)
    assert matrix_flops_per_s("fp32", capture) > 1e6
    assert copy_bytes_per_s(capture) > 1e6


def test_the_trial_of_the_ceilings_holds_all_of_it_and_leaves_fp32():
    trial = measure_ceilings(LadderSpec(device="cpu").model_dump(mode="json"))
    details = trial["details"]
    assert set(details["flops_per_s"]) == {"fp32", "bf16"}
    assert work_from(details) == count_work()
    assert (trial["kind"], trial["variant"]) == ("ladder", "ceilings")
    assert read_precision()["both"] == "ieee"


def test_a_model_that_is_not_counted_would_be_noticed():
    # The hand count is FashionCNN's: one more layer changes torch's count.
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        nn.Linear(64, 10)(torch.rand(1, 64))
    assert counter.get_total_flops() == 2 * 64 * 10
