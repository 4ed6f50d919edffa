"""Remedies are measured against the plain step: what they save, and what they change."""

import json
import os

import pytest
import torch
from torch import nn

from labhelpers import remedy_narrative
from labhelpers.accumulation_proof import Comparison
from labhelpers.checkpointing import checkpoint_blocks
from labhelpers.formats import GIB, MIB
from labhelpers.inputs import InputError
from labhelpers.oom_plots import remedies_figure
from labhelpers.plots import png_bytes
from labhelpers.records import RemedySpec, Trial, ask
from labhelpers.remedies import ALLOCATOR, Remedied, allocator_setting, measure_remedies
from labhelpers.remedy_plan import (
    PLAIN,
    QUICK_NAMES,
    REMEDIES,
    RESNET50,
    chosen_remedies,
    remedy_named,
    resolved,
    why_not,
)
from labhelpers.remedy_trials import measure_remedy
from labhelpers.store import RunDirectory
from labhelpers.workloads import Workload, image_batches

CPU = {"device": "cpu", "gpu": None}


def asked(**given) -> RemedySpec:
    return ask(RemedySpec, {"workload": "fashion_cnn", "batch_size": 8, "steps": 1, **given})


def gpu(total_bytes: int) -> dict:
    return {"device": "cuda:0", "gpu": {"total_bytes": total_bytes}}


@pytest.mark.parametrize(
    ("total_bytes", "quick", "batch"),
    [(8 * GIB, False, 32), (16 * GIB, False, 64), (140 * GIB, False, 256), (140 * GIB, True, 64),
     (2 * GIB, False, 8)],
)  # fmt: skip
def test_the_batch_leaves_a_good_part_of_the_card_free(total_bytes, quick, batch):
    spec = resolved(ask(RemedySpec, {"quick": quick}), gpu(total_bytes))
    assert (spec.batch_size, spec.input_shape, spec.classes) == (batch, (3, 224, 224), 1000)
    assert batch * 90 * MIB < total_bytes / 2


def test_what_was_asked_for_is_kept_and_the_cpu_is_asked_for_little():
    assert resolved(ask(RemedySpec, {}), CPU).input_shape == (3, 64, 64)
    spec = resolved(asked(batch_size=5, steps=7, input_shape="1, 28, 28"), CPU)
    assert (spec.batch_size, spec.steps, spec.input_shape) == (5, 7, (1, 28, 28))
    other = resolved(ask(RemedySpec, {"workload": "my.py:model"}), gpu(8 * GIB))
    assert (other.batch_size, other.input_shape, other.classes) == (32, None, None)


def test_remedies_are_chosen_by_name_and_the_plain_step_is_always_measured():
    assert chosen_remedies(asked()) == list(REMEDIES)
    names = [remedy.name for remedy in chosen_remedies(asked(remedies="bf16, accumulation"))]
    assert names == [PLAIN, "accumulation", "bf16"]
    with pytest.raises(InputError, match="remedies: got 'fp8'; must be among: plain fp32, "):
        chosen_remedies(asked(remedies=["fp8"]))


@pytest.mark.parametrize(
    ("name", "device", "platform", "reason"),
    [
        ("expandable segments", "cuda:0", "linux", None),
        ("expandable segments", "cuda:0", "wsl2", "people report failures there"),
        ("expandable segments", "cuda:0", None, "people report failures there"),
        ("expandable segments", "cpu", "linux", "CUDA's allocator"),
        ("fp16", "cpu", "linux", "slow on the CPU"),
        ("fp16", "cuda:0", "wsl2", None),
        ("bf16", "cpu", "linux", None),
    ],
)
def test_what_is_not_safe_or_not_sensible_is_not_run(name, device, platform, reason):
    found = why_not(remedy_named(name), asked(device=device), platform)
    assert (reason in found) if reason else found is None


def test_a_remedy_asked_for_by_name_is_run_although_it_is_slow():
    assert why_not(remedy_named("fp16"), asked(device="cpu", remedies=["fp16"]), "linux") is None


# --- one remedy, measured in this process -------------------------------------------------------


def measured(name: str, **given) -> dict:
    spec = resolved(asked(device="cpu", **given), CPU)
    return measure_remedy(json.loads(spec.model_dump_json()), name, 0, None)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        (PLAIN, 0, 0),
        ("accumulation", 0, 1e-5),
        ("checkpointing", 0, 0),
        ("channels_last", 0, 1e-5),
        ("losses kept", 0, 0),
        ("bf16", 1e-4, 0.2),
        ("fp16", 1e-5, 0.2),
    ],
)
def test_a_remedy_moves_the_update_no_further_than_it_must(name, least, most):
    trial = Trial(**measured(name))
    assert least <= trial.details["gradient_change"] <= most
    assert trial.details["loss_change"] <= max(most, 1e-6)
    assert trial.details.get("statistics_change") is None  # FashionCNN has none
    assert (trial.batch_size, trial.images, trial.updates) == (8, 8, 1)
    assert trial.peak_allocated_bytes is not None
    assert trial.images_per_s > 0


@pytest.mark.parametrize("name", ["losses kept", "losses detached", "no_grad"])
def test_an_evaluation_updates_nothing_and_compares_nothing(name):
    trial = Trial(**measured(f"evaluation: {name}", micro_batches=2))
    assert (trial.batch_size, trial.updates, trial.details["whole_batch"]) == (4, 0, 8)
    assert trial.details.get("gradient_change") is None
    assert trial.details["losses_kept"] == 3


def test_a_model_that_takes_no_smaller_images_says_so():
    reason = measured("smaller input")["not_run"]
    assert reason.startswith("the model takes no images of half the side (mat1 and mat2")


def test_a_smaller_input_is_measured_where_the_model_takes_it():
    given = {"workload": "torchvision.models:squeezenet1_1", "input_shape": (3, 64, 64)}
    trial = Trial(**measured("smaller input", batch_size=2, classes=4, micro_batches=2, **given))
    assert trial.outcome == "ok"
    assert trial.details.get("gradient_change") is None


# --- checkpointing -----------------------------------------------------------------------------


def residual(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.Linear(width, width))


class Listed(nn.Module):
    """A model that calls the blocks of a list itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(residual(8) for _ in range(3))

    def forward(self, inputs):
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return inputs


@pytest.mark.parametrize(
    ("make", "blocks"),
    [
        (Listed, 3),
        (lambda: nn.Sequential(residual(8), residual(8)), 2),
        (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))), 2),
        (lambda: nn.Linear(8, 8), 0),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 0),
    ],
)
def test_checkpointed_blocks_give_the_same_gradient(make, blocks):
    torch.manual_seed(0)
    plain, other = make(), make()
    other.load_state_dict(plain.state_dict())
    assert checkpoint_blocks(other) == blocks
    inputs = torch.rand(4, 8)
    for model in (plain, other):
        torch.manual_seed(1)
        model(inputs).square().sum().backward()
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


# --- a session in the worker -------------------------------------------------------------------


def own_workload() -> Workload:
    """A model of the user's own, whose plain step runs out of memory above 4 images."""

    def make_model():
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def loss(outputs, targets):
        if len(outputs) > 4:
            torch.empty(2**50, dtype=torch.uint8)
        return nn.functional.cross_entropy(outputs, targets)

    return Workload("mine", make_model, image_batches((3, 4, 4), 3), loss)


NAMES = ["accumulation", "smaller input", "expandable segments"]


@pytest.fixture(scope="module")
def session(worker, tmp_path_factory):
    run = RunDirectory.create(tmp_path_factory.mktemp("remedies") / "run")
    request = {"device": "cpu", "steps": 1, "micro_batches": 2, "remedies": NAMES}
    seen = []
    found = measure_remedies(
        own_workload(), 8, run=run, worker=worker, on_progress=seen.append, **request
    )
    return run, found, request, seen


def test_a_model_of_ones_own_is_measured_and_oom_is_an_outcome(session):
    _, found, _, seen = session
    plain, accumulation = found.trials
    assert (plain.variant, plain.outcome, plain.oom["kind"]) == (PLAIN, "oom", "host")
    assert plain.peak_allocated_bytes is None
    assert (accumulation.outcome, accumulation.details["micro_batch_size"]) == ("ok", 4)
    # The plain step did not fit, so there is nothing to compare with.
    assert accumulation.details.get("gradient_change") is None
    assert [progress.done for progress in seen] == [0, 1, 2, 3, 4]


def test_what_does_not_apply_is_said_and_noted(session):
    run, found, _, _ = session
    assert set(found.not_run) == {"smaller input", "expandable segments"}
    assert "half the side" in found.not_run["smaller input"]
    assert any("'smaller input' of mine" in note for note in run.info.notes)


def test_trials_are_in_the_run_and_not_measured_again(session, worker):
    run, found, request, _ = session
    assert [t.key for t in run.trials("remedy")] == [t.key for t in found.trials]
    again = measure_remedies(own_workload(), 8, run=run, worker=worker, **request)
    stored = [t.model_dump(mode="json") for t in again.trials]
    assert stored == [t.model_dump(mode="json") for t in found.trials]
    assert len(run.trials("remedy")) == 2


def test_another_request_for_the_same_model_is_refused(session, worker):
    run, _, request, _ = session
    with pytest.raises(InputError, match="steps: got 2, but .* was measured with 1"):
        measure_remedies(own_workload(), 8, run=run, worker=worker, **{**request, "steps": 2})


def test_a_model_needs_its_shape(worker, tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    with pytest.raises(InputError, match="its input shape and number of classes are needed"):
        measure_remedies("torchvision.models:resnet18", 2, run=run, worker=worker, device="cpu")


def test_the_allocators_setting_is_put_back(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.delenv(ALLOCATOR, raising=False)
    with allocator_setting("expandable_segments:True"):
        assert os.environ[ALLOCATOR] == "expandable_segments:True"
        assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    assert ALLOCATOR not in os.environ


# --- the story ---------------------------------------------------------------------------------


def told(variant: str, peak_mib: float | None, rate: float, change: float | None = None, **more):
    """A trial as a run would hold it."""
    ok = peak_mib is not None
    return Trial(
        kind="remedy", workload=RESNET50, variant=variant, batch_size=64, device="cuda:0",
        images=64 if ok else None, epoch_s=64 / rate if ok else None, steps=1 if ok else None,
        peak_allocated_bytes=round(peak_mib * MIB) if ok else None,
        outcome="ok" if ok else "oom",
        details={"gradient_change": change, "loss_change": change, "losses_kept": 3, **more},
    )  # fmt: skip


@pytest.fixture
def story():
    trials = (
        told(PLAIN, 1000, 100, 0.0),
        told("accumulation", 400, 90, 0.2, micro_batch_size=16),
        told("bf16", 600, 200, 0.01),
        told("channels_last", 990, 120, 0.002),
        told("losses kept", None, 1),
        told("smaller input", 300, 300),
        told("evaluation: losses kept", 800, 10),
        told("evaluation: no_grad", 100, 20),
    )
    spec = resolved(ask(RemedySpec, {}), gpu(16 * GIB))
    return Remedied(trials, {"fp16": "a reason"}, spec)


def test_the_table_has_a_row_for_each_training_remedy(story):
    table = remedy_narrative.remedy_table(story).set_index("remedy")
    assert list(table.index) == [
        PLAIN, "accumulation", "bf16", "fp16", "smaller input", "channels_last", "losses kept",
    ]  # fmt: skip
    assert list(table.loc["bf16", ["peak", "of plain", "speed", "gradient moves"]]) == [
        "600.0 MiB", "60 %", "2.00×", "1 %",
    ]  # fmt: skip
    assert set(table.loc["fp16"]) == {"n/a"}
    assert set(table.loc["losses kept"]) == {"n/a"}
    assert table.loc["smaller input", "gradient moves"] == "n/a"
    assert "reserved" not in table  # nobody measured it


def test_the_sentences_take_their_numbers_from_the_trials(story):
    answer = remedy_narrative.remedy_answer(story)
    assert "**accumulation** takes 40 % of the memory at 0.90× the speed" in answer
    assert "smaller input" not in answer
    assert "channels_last" not in answer  # 1 % less is no saving
    assert "the 0.2 % it moves the gradient is rounding" in remedy_narrative.rounding_answer(story)
    notes = remedy_narrative.notes(story)
    assert "Not run: a reason." in notes
    assert "Out of memory." in notes
    proof = [
        Comparison("LayerNorm", "weight by samples", (2, 2), 1e-16, 0.0),
        Comparison("BatchNorm", "weight by samples", (2, 2), 0.05, 0.0),
    ]
    text = remedy_narrative.accumulation_answer(story, proof)
    assert "it is 5 % away" in text
    assert "resnet50 in micro-batches of 16, is 20 % away" in text
    assert list(remedy_narrative.proof_table(proof)[""]) == ["equal to rounding", "not the same"]


def test_without_the_plain_step_nothing_is_compared(story):
    left = Remedied(story.trials[1:3], {}, story.spec)
    assert "nothing to compare" in remedy_narrative.remedy_answer(left)
    assert remedy_narrative.rounding_answer(left) == ""
    assert len(remedy_narrative.remedy_table(left)) == 2


def test_evaluations_stand_apart(story):
    table = remedy_narrative.evaluation_table(story)
    assert list(table["forward passes"]) == ["losses kept", "no_grad"]
    assert list(table["peak allocated"]) == ["800.0 MiB", "100.0 MiB"]


def test_busy_processors_are_named(story):
    spec = story.spec.model_copy(update={"device": "cpu"})
    busy = Remedied((told(PLAIN, 10, 1, 0.0, cpu_of_others=0.5),), {}, spec)
    assert "used up to 50 % of the CPU" in remedy_narrative.notes(busy)
    assert "CPU" not in remedy_narrative.notes(Remedied(story.trials, {}, spec))


def test_the_figure_has_two_panels_with_units(story):
    figure = remedies_figure(story, "a title")
    left, right = figure.axes
    assert (left.get_xlabel(), right.get_xlabel()) == ("peak allocated (MiB)", "images/s")
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names[:2] == [PLAIN, "accumulation"]
    assert [round(bar.get_width()) for bar in left.patches][:2] == [1000, 400]
    assert len(png_bytes(figure)) > 10_000


def test_a_quick_look_tries_fewer_remedies_and_every_name_is_one():
    quick = [remedy.name for remedy in chosen_remedies(ask(RemedySpec, {"quick": True}))]
    assert quick == [PLAIN, *QUICK_NAMES]
    named = ask(RemedySpec, {"quick": True, "remedies": ["channels_last"]})
    assert [remedy.name for remedy in chosen_remedies(named)] == [PLAIN, "channels_last"]
