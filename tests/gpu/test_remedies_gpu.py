"""Controlled OOM, what frees memory, accumulation and remedies on a real GPU."""

import platform

import pytest
import torch
from torch import nn

from labhelpers.accumulation import accumulate, micro_batches
from labhelpers.accumulation_proof import EQUAL
from labhelpers.controlled_oom import run_controlled_oom
from labhelpers.formats import MIB
from labhelpers.gradients import catch_gradients, relative_change
from labhelpers.oom_wordings import print_size
from labhelpers.platforms import platform_of
from labhelpers.records import RemedySpec, ask
from labhelpers.recovery_demos import demonstrate_all
from labhelpers.remedies import measure_remedies
from labhelpers.remedy_plan import PLAIN, RESNET50
from labhelpers.store import RunDirectory
from labhelpers.trials import new_step
from labhelpers.workloads import fashion_cnn, fashion_workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FRACTION = 0.03


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    run = RunDirectory.create(tmp_path_factory.mktemp("cap") / "run")
    spec = ask(RemedySpec, {"device": "cuda", "cap_fraction": FRACTION})
    # The libraries' workspaces come with the first step and stay.
    new_step(spec, fashion_workload(), torch.device("cuda"))(
        *fashion_workload().make_batch(8, torch.device("cuda"))
    )
    before = torch.cuda.memory_allocated()
    trials = run_controlled_oom(spec, run)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    return run, trials


def test_some_sizes_fit_and_the_next_fails_and_the_process_goes_on(series):
    run, trials = series
    *growing, again = trials
    assert [t.outcome for t in growing] == ["ok"] * (len(growing) - 1) + ["oom"]
    assert len(growing) >= 2
    assert (again.outcome, again.details["after_oom"]) == ("ok", True)
    assert [t.key for t in run.trials("cap")] == [t.key for t in trials]


def test_the_message_names_the_cap_to_the_printed_digit(series):
    _, trials = series
    failed = next(t for t in trials if t.outcome == "oom")
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    allowed_bytes = int(FRACTION * total_bytes)
    assert failed.cap_bytes == allowed_bytes
    assert f"{print_size(allowed_bytes)} allowed" in failed.error_text
    assert failed.error_class == "OutOfMemoryError"
    assert "cap" in failed.oom["causes"] or "undecided" in failed.oom["causes"]
    assert failed.details["disagreements"] == []
    assert failed.details["fraction"] == pytest.approx(FRACTION)
    assert failed.peak_reserved_bytes <= allowed_bytes


def test_peaks_stay_below_the_cap(series):
    _, trials = series
    for trial in trials:
        assert 0 < trial.peak_allocated_bytes <= trial.peak_reserved_bytes <= trial.cap_bytes


def test_demonstrations_hold_and_free_to_the_byte():
    block_bytes = 256 * MIB
    for shown in demonstrate_all("cuda", block_bytes):
        held = [moment.held_bytes for moment in shown.moments]
        assert set(held) == {0, block_bytes}, shown
        assert held[-1] == 0
        assert shown.holds == tuple(value > 0 for value in held)
    emptied = demonstrate_all("cuda", block_bytes)[0]
    # A dropped tensor goes to the allocator's cache first, and only then to the device.
    assert [moment.cached_bytes for moment in emptied.moments] == [0, 0, block_bytes, 0]


@pytest.mark.parametrize("size", [7, 16, 40])
def test_accumulation_is_exact_in_float64(size):
    torch.manual_seed(0)
    model = fashion_cnn().double().cuda()
    images = torch.rand(40, 1, 28, 28, dtype=torch.float64, device="cuda")
    labels = torch.randint(10, (40,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for parts in ([(images, labels)], micro_batches(images, labels, size)):
        with catch_gradients(optimizer) as caught:
            accumulate(model, parts, nn.functional.cross_entropy, optimizer, window=len(parts))
        found.append(caught.gradients)
    assert relative_change(found[1], found[0]) < EQUAL


def test_accumulation_in_float16_with_a_scaler_clips_what_it_unscaled():
    torch.manual_seed(0)
    model, loss = nn.Linear(64, 10).cuda(), nn.functional.cross_entropy
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.rand(8, 64), torch.randint(10, (8,))) for _ in range(4)]
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    with catch_gradients(optimizer) as caught:
        done = accumulate(
            model, batches, loss, optimizer, window=4, clip_norm=1e-3,
            autocast=torch.float16, scaler=scaler,
        )  # fmt: skip
    norm = sum(float(g.square().sum()) for g in caught.gradients) ** 0.5
    assert (done.updates, done.samples) == (1, 32)
    assert norm == pytest.approx(1e-3, rel=1e-2)


@pytest.fixture(scope="module")
def remedied(tmp_path_factory):
    run = RunDirectory.create(tmp_path_factory.mktemp("remedies") / "run")
    torch.cuda.empty_cache()
    return measure_remedies(
        RESNET50, 32, run=run, device="cuda", input_shape=(3, 160, 160), classes=100, steps=3
    )


def peak(remedied, name):
    return next(t.peak_allocated_bytes for t in remedied.trials if t.variant == name)


def change(remedied, name):
    return next(t.details["gradient_change"] for t in remedied.trials if t.variant == name)


def test_every_remedy_ends_well_on_linux(remedied):
    assert {t.outcome for t in remedied.trials} == {"ok"}
    if platform_of(platform.release(), platform.system()) == "linux":
        assert remedied.not_run == {}
        segments = remedied.trials[-1].details["expandable_segments"]
        assert (remedied.trials[-1].variant, segments > 0) == ("expandable segments", True)


def test_remedies_save_what_they_are_for(remedied):
    plain = peak(remedied, PLAIN)
    for name in ("accumulation", "bf16", "fp16", "checkpointing", "smaller input"):
        assert peak(remedied, name) < 0.9 * plain, name
    assert peak(remedied, "losses kept") < 1.1 * plain
    kept, detached, none = (
        peak(remedied, f"evaluation: {name}")
        for name in ("losses kept", "losses detached", "no_grad")
    )
    assert kept > 2 * detached > 2 * none


def test_half_precision_and_batch_norm_move_the_gradient_more_than_rounding(remedied):
    # A fresh ResNet-50 magnifies what atomic additions round differently each time.
    for name in (PLAIN, "checkpointing", "losses kept"):
        assert change(remedied, name) < 0.3, name
    assert change(remedied, "bf16") > change(remedied, PLAIN)
    assert change(remedied, "accumulation") > change(remedied, PLAIN)
