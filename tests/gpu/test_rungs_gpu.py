"""The rungs that only a GPU has: graphs and compiled steps train what the plain loop trains."""

from collections.abc import Callable, Iterator

import pytest
import torch

from labhelpers.ladder import ceilings_of, run_ladder
from labhelpers.ladder_plan import Setup
from labhelpers.ladder_table import ladder_rows
from labhelpers.records import LadderSpec, ask
from labhelpers.rungs import PreparedRung, forget
from labhelpers.store import RunDirectory
from labhelpers.training import read_precision, set_precision
from labhelpers.worker import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

EAGER = Setup(feed="resident", fused_adam=True)
IMAGES = 6 * 512 + 100


@pytest.fixture(scope="module")
def spec(data_report) -> LadderSpec:
    return ask(LadderSpec, {
        "device": "cuda:0", "images": IMAGES, "max_steps": 500, "repeats": 2,
        "batch_sizes": [512], "data_dir": data_report.data_dir,
        "synthetic": data_report.synthetic,
    })  # fmt: skip


@pytest.fixture
def rung(spec) -> Iterator[Callable[[Setup], PreparedRung]]:
    yield lambda setup: PreparedRung(spec, setup, 512)
    forget()
    set_precision("fp32")
    torch.backends.cudnn.benchmark = False


@pytest.fixture(scope="module")
def plain_loss(spec) -> float:
    loss = PreparedRung(spec, EAGER, 512).epoch().final_loss
    assert loss is not None
    return loss


@pytest.mark.parametrize(
    ("change", "within"),
    [
        ({"feed": "article", "fused_adam": False}, 1e-3),
        ({"feed": "host", "fused_adam": False}, 1e-3),
        ({"graph": True}, 1e-3),
        ({"graph": True, "autotuned": True}, 1e-3),
        ({"graph": True, "channels_last": True}, 1e-3),
        ({"graph": True, "precision": "tf32"}, 1e-2),
        ({"graph": True, "precision": "bf16"}, 5e-2),
        ({"graph": True, "precision": "fp16"}, 5e-2),
    ],
    ids=str,
)
def test_a_rung_trains_what_the_plain_loop_trains_epoch_after_epoch(
    rung, plain_loss, change, within
):
    prepared = rung(Setup(**(EAGER.to_dict() | change)))
    epochs = [prepared.epoch() for _ in range(3)]
    for epoch in epochs:
        assert (epoch.images, epoch.steps, epoch.last_batch) == (IMAGES, 7, 100)
        assert epoch.final_loss == pytest.approx(plain_loss, rel=within)
    # The same weights, state and order each time; only atomic additions may differ.
    assert epochs[1].final_loss == pytest.approx(epochs[0].final_loss, rel=1e-3)
    assert epochs[2].final_loss == pytest.approx(epochs[0].final_loss, rel=1e-3)
    assert len(epochs[0].step_times_s) == 7


@pytest.mark.timeout(600)
@pytest.mark.parametrize("graph", [False, True])
def test_a_compiled_step_trains_what_the_plain_loop_trains(rung, plain_loss, graph):
    setup = EAGER.to_dict() | {"compiled": True, "graph": graph, "precision": "tf32"}
    prepared = rung(Setup(**setup))
    assert read_precision()["both"] == "tf32"  # compiling left the precision as it was set
    losses = [prepared.epoch().final_loss for _ in range(2)]
    assert losses == pytest.approx([plain_loss] * 2, rel=1e-2)


def test_the_ladder_is_climbed_and_measured_against_the_ceilings(tmp_path, spec):
    asked = spec.model_copy(update={"rungs": ("cuda_graph",)})
    run = RunDirectory.create(tmp_path / "run")
    with Worker() as worker:
        trials = run_ladder(asked, run, worker=worker)
    assert {trial.outcome for trial in trials} == {"ok"}
    ceilings = ceilings_of(run)
    assert set(ceilings["flops_per_s"]) == {"fp32", "tf32", "bf16", "fp16"}
    rows = ladder_rows(trials, ceilings)
    assert [row.rung for row in rows] == [
        "article", "host", "resident", "fused_adam", "tf32", "cuda_graph",
    ]  # fmt: skip
    for row in rows:
        assert row.same_loss
        assert 0 < row.ceiling.share < 1
    graph = next(trial for trial in trials if trial.variant == "cuda_graph")
    assert graph.precision_after["both"] == "tf32"
    assert graph.peak_allocated_bytes > 0
