"""Groups of ranks, tables, sentences and figures out of known trials; nothing is measured."""

from typing import Any

import pytest

from labhelpers.distributed_narrative import (
    all_reduce,
    effective_batch,
    effective_batch_table,
    found_together,
    narrations,
    run_to_show,
    scaling_answer,
    scaling_text,
    whose_job,
)
from labhelpers.distributed_plots import scaling_figure
from labhelpers.distributed_records import (
    PROVEN,
    SEARCHED,
    DistributedSpec,
    Group,
    global_trial,
    groups_of,
    is_alone,
    matching,
    swept,
    variant_of,
)
from labhelpers.distributed_tables import (
    JOB_COST,
    JOB_SPEED,
    counted,
    rank_table,
    readable_scaling,
    scaling_table,
)
from labhelpers.inputs import InputError
from labhelpers.pieces import FigurePiece, TablePiece
from labhelpers.records import Trial, ask
from labhelpers.references import curve_of
from labhelpers.sections import several_gpus
from labhelpers.store import RunDirectory

IMAGES = 1200


def ranks(
    size: int, seconds: tuple[float, ...] = (1.0, 1.25), *, repeat: int = 0, **given: Any
) -> list[Trial]:
    """The trials of all ranks of one measurement; rank r needs seconds[r]."""
    accumulation = given.pop("accumulation", 1)
    details = {
        "accumulation": accumulation, "synced_step_times_s": (0.5, 0.4, 0.6),
        "unsynced_step_times_s": (0.3, 0.3, 0.4),
    } | given.pop("details", {})  # fmt: skip
    count = len(seconds)
    return [
        Trial(**{
            "kind": "ddp", "batch_size": size, "repeat": repeat, "rank": rank,
            "world_size": count, "feed": "resident", "device": f"cuda:{rank}",
            "variant": variant_of(accumulation, alone=False), "images": IMAGES // count,
            "steps": 10, "updates": 10, "last_batch": 3 - rank, "epoch_s": seconds[rank],
            "final_loss": 1.0 + rank, "peak_allocated_bytes": (100 + 50 * rank) * 2**20,
            "details": details,
        } | given)
        for rank in range(count)
    ]  # fmt: skip


def alone(size: int, seconds: float = 2.0, *, repeat: int = 0, accumulation: int = 1) -> Trial:
    variant = variant_of(accumulation, alone=True)
    (trial,) = ranks(size, (seconds,), repeat=repeat, accumulation=accumulation, variant=variant)
    return trial


# One measurement


def test_a_group_counts_all_images_in_the_time_of_the_slowest_rank():
    (group,) = groups_of(ranks(8))
    assert (group.images, group.epoch_s, group.slowest_rank) == (IMAGES, 1.25, 1)
    assert group.images_per_s == IMAGES / 1.25


def test_the_all_reduce_is_what_the_slowest_rank_would_be_spared():
    first, second = ranks(8)
    slower = {"synced_step_times_s": (0.5,), "unsynced_step_times_s": (0.4,), "accumulation": 1}
    group = Group((first, second.model_copy(update={"details": slower})))
    assert group.all_reduce_share == pytest.approx(1 - 0.4 / 0.5)
    noisy = ranks(8, details={"unsynced_step_times_s": (0.7,)})
    assert Group(tuple(noisy)).all_reduce_share == 0
    unknown = ranks(8, details={"unsynced_step_times_s": ()})
    assert Group(tuple(unknown)).all_reduce_share is None


def test_ranks_are_put_in_order_and_a_measurement_without_one_of_them_is_none():
    whole, cut = ranks(8), ranks(16)[1:]
    (group,) = groups_of([*reversed(whole), *cut])
    assert [trial.rank for trial in group.trials] == [0, 1]
    assert group.first.batch_size == 8


def test_an_oom_is_the_outcome_of_the_group_and_gives_no_rate():
    first, second = ranks(8)
    group = Group((first, second.model_copy(update={"outcome": "oom"})))
    assert group.outcome == "oom"
    assert group.images_per_s is None


def test_as_one_trial_it_has_the_global_batch_and_the_images_weigh_the_loss():
    first, second = ranks(8)
    group = Group((first.model_copy(update={"images": 900}),
                   second.model_copy(update={"images": 300})))  # fmt: skip
    trial = global_trial(group)
    assert (trial.batch_size, trial.world_size, trial.images) == (16, 2, 1200)
    assert trial.epoch_s == 1.25
    assert trial.last_batch == 3 + 2
    assert trial.peak_allocated_bytes == 150 * 2**20
    assert trial.final_loss == pytest.approx((900 * 1.0 + 300 * 2.0) / 1200)


@pytest.mark.parametrize(
    ("accumulation", "is_single", "name"),
    [(1, False, None), (1, True, "alone"), (4, False, "accumulation 4"),
     (4, True, "alone, accumulation 4")],
)  # fmt: skip
def test_variants_tell_the_baseline_and_accumulation_apart(accumulation, is_single, name):
    assert variant_of(accumulation, alone=is_single) == name
    assert is_alone(Trial(kind="ddp", batch_size=1, variant=name)) == is_single


# Tables


def table_of_two() -> Any:
    trials = [alone(8), alone(32, 1.0), *ranks(8), *ranks(32, (0.5, 0.4))]
    return scaling_table(trials)


def test_efficiency_is_against_as_many_times_one_device_alone():
    table = table_of_two()
    assert list(table["per_gpu_batch"]) == [8, 32]
    assert list(table["global_batch"]) == [16, 64]
    assert list(table["images_per_s"]) == [IMAGES / 1.25, IMAGES / 0.5]
    assert list(table["alone_images_per_s"]) == [IMAGES / 2, IMAGES]
    assert list(table["efficiency"]) == pytest.approx([2 / (2 * 1.25), 1 / (2 * 0.5)])
    assert list(table["allocated_mib"]) == [150, 150]
    assert list(table["fullest_rank"]) == [1, 1]
    assert list(table["slowest_rank"]) == [1, 0]
    assert list(table["update_ms"]) == [125, 50]
    assert list(table["last_global_batch"]) == [5, 5]


def test_repeats_are_reduced_to_the_median_with_their_spread():
    trials = [t for n, s in enumerate((1.0, 1.2, 2.0)) for t in ranks(8, (s, s), repeat=n)]
    (row,) = scaling_table(trials).to_dict("records")
    assert row["images_per_s"] == pytest.approx(IMAGES / 1.2)
    assert row["spread"] == pytest.approx((IMAGES / 1 - IMAGES / 2) / (IMAGES / 1.2))
    assert row["repeats"] == 3
    assert row["efficiency"] is None


def test_accumulation_and_other_numbers_of_ranks_are_rows_of_their_own():
    trials = [
        alone(8), alone(8, accumulation=4), *ranks(8), *ranks(8, accumulation=4),
        *ranks(8, (1.0, 1.0, 1.0, 1.0)),
    ]  # fmt: skip
    table = scaling_table(trials)
    keys = table[["world_size", "accumulation", "global_batch", "effective_batch"]].to_numpy()
    assert keys.tolist() == [[2, 1, 16, 16], [2, 4, 16, 64], [4, 1, 32, 32]]
    assert table["efficiency"].notna().all()


def test_a_failed_size_is_a_row_that_says_so():
    table = scaling_table([alone(8), *ranks(8, outcome="oom", images=None, epoch_s=None)])
    (row,) = table.to_dict("records")
    assert row["images_per_s"] is None
    assert row["flags"] == "oom"


@pytest.mark.parametrize(
    ("device", "head"), [("cuda:0", "batch per GPU"), ("cpu", "batch per process")]
)
def test_people_read_what_a_rank_has_for_itself(device, head):
    text = readable_scaling(scaling_table(ranks(8, device=device)))
    assert head in text
    assert text["global batch"].tolist() == ["16"]
    assert text["efficiency"].tolist() == ["n/a"]
    assert "accumulation" not in text
    accumulated = readable_scaling(scaling_table(ranks(8, accumulation=2)))
    assert accumulated["effective batch"].tolist() == ["32"]


def test_the_table_comes_in_two_that_fit_a_page():
    table = scaling_table([alone(8, accumulation=2), *ranks(8, accumulation=2)])
    speed, cost = readable_scaling(table, JOB_SPEED), readable_scaling(table, JOB_COST)
    assert list(speed)[:4] == ["GPUs", "batch per GPU", "global batch", "accumulation"]
    assert list(cost)[3] == "effective batch"
    assert cost["highest peak MiB"].tolist() == ["150.0"]


def test_every_rank_has_a_row_with_its_peak():
    table = rank_table([alone(8), *ranks(8)])
    assert table["rank"].tolist() == [0, 1]
    assert table["batch"].tolist() == ["8 × 2 = 16"] * 2
    assert table["peak allocated"].tolist() == ["100.0 MiB", "150.0 MiB"]


@pytest.mark.parametrize(
    ("count", "device", "text"),
    [(1, "cuda:0", "1 GPU"), (2, "cuda:0", "2 GPUs"), (1, "cpu", "1 process"),
     (2, "cpu", "2 processes")],
)  # fmt: skip
def test_ranks_are_counted_by_what_they_have(count, device, text):
    assert counted(count, device) == text


# Sentences


def test_the_answer_names_both_batches_and_where_scaling_is_nearly_perfect():
    assert scaling_answer(table_of_two()) == (
        "At batch 8 per GPU (2 GPUs, global batch 16): 960 images/s against 600 images/s on one, "
        "**80.0 %** of perfect scaling. At batch 32 per GPU (2 GPUs, global batch 64): "
        "2,400 images/s against 1,200 images/s on one, **100.0 %** of perfect scaling. "
        "From batch **32 per GPU** on, 95 % of perfect scaling is reached."
    )


def test_where_no_size_scales_the_best_is_named():
    text = scaling_answer(scaling_table([alone(8), *ranks(8)]))
    assert text.endswith(
        "No size reaches 95 % of perfect scaling; the best is batch 8 per GPU with 80.0 %."
    )


def test_the_all_reduce_is_told_at_both_ends_and_the_rest_is_named():
    assert all_reduce(table_of_two()) == (
        "Waiting for the gradients takes 40.0 % of a step at batch 8 per GPU and 40.0 % at batch "
        "32 per GPU."
    )
    quick = {"synced_step_times_s": (0.5,), "unsynced_step_times_s": (0.49,)}
    text = all_reduce(scaling_table([alone(8), *ranks(8, details=quick)]))
    assert "The rest of the 20.0 % lost at the small end" in text


def test_the_effective_batch_is_spelled_out():
    text = effective_batch(scaling_table([*ranks(8), *ranks(32, accumulation=4)]))
    assert "8 × 1 × 2 = 16 images; 32 × 4 × 2 = 256 images" in text
    assert "micro-batch × accumulation × GPUs" in text


def test_an_effective_batch_is_made_up_of_each_size_that_is_not_larger():
    table = effective_batch_table(table_of_two(), 40)
    assert table.to_dict("records") == [
        {"micro-batch": "8", "accumulation": "3", "ranks": "2", "effective batch": "40",
         "last step": "8 on all ranks together", "images/s as measured": "960"},
    ]  # fmt: skip
    assert effective_batch_table(table_of_two(), 64)["last step"].tolist() == ["full", "full"]
    with pytest.raises(InputError, match="effective_batch: got 0; must be at least 1"):
        effective_batch_table(table_of_two(), 0)


def test_nothing_measured_is_said():
    failed = scaling_table(ranks(8, outcome="oom", images=None, epoch_s=None))
    assert scaling_text(failed) == "no batch size could be measured on all ranks"
    only_together = scaling_table(ranks(8))
    assert scaling_answer(only_together).startswith("Scaling was not measured")


# Runs


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    spec = ask(DistributedSpec, {"batch_sizes": [8, 32], "repeats": 1})
    made = RunDirectory.create(tmp_path / "run", specs={"ddp": spec})
    job = {"world_size": 2, "hosts": 1, "backend": "nccl", "device_names": ["NVIDIA H200"] * 2}
    with made.writing():
        made.note_environment(
            "here", {"device": "cuda:0", "device_name": "NVIDIA H200", "job": job}
        )
        made.append(alone(8), *ranks(8), *ranks(32, (0.5, 0.4)), *ranks(8, (1.0,) * 4))
    return made


def test_a_job_is_swept_by_its_global_batches_of_the_newest_number_of_ranks(run):
    assert [(t.batch_size, t.world_size) for t in swept(run)] == [(16, 2), (64, 2)]
    curve = curve_of(run, trials=swept(run))
    assert curve is not None
    assert curve.device == "2 × NVIDIA H200"
    assert curve_of(run) is None


def test_a_request_is_matched_by_workload_feed_precision_and_accumulation(run):
    spec = ask(DistributedSpec, {"accumulation": 4})
    trials = [*ranks(8), *ranks(8, accumulation=4), alone(8, accumulation=4)]
    found = matching(spec, trials, 2)
    assert [group.first.variant for group in found] == ["accumulation 4", "alone, accumulation 4"]
    assert matching(ask(DistributedSpec, {"feed": "host"}), trials, 2) == []


def test_processes_on_one_cpu_are_not_called_several_of_it(run):
    curve = curve_of(run, trials=[t.model_copy(update={"device": "cpu"}) for t in swept(run)])
    assert curve is not None
    assert curve.device == "NVIDIA H200, 2 processes"


def test_the_reports_section_shows_figure_tables_and_ways_to_an_effective_batch(run):
    pieces = several_gpus(run)
    captions = [piece.caption for piece in pieces if isinstance(piece, TablePiece)]
    assert captions[-1] == "Ways to 64 images per update"
    assert sum(isinstance(piece, FigurePiece) for piece in pieces) == 1
    assert any("**50.0 %** of perfect" in piece for piece in pieces if isinstance(piece, str))


def test_a_search_on_all_ranks_is_told_from_its_trials(run):
    sizes = {4: "ok", 9: "ok", 10: "oom"}
    facts = {"kind": "finder", "workload": "resnet50", "world_size": 2, "device": "cuda"}
    assert found_together(run) is None
    with run.writing():
        for size, outcome in sizes.items():
            seen = [Trial(**facts, variant=SEARCHED, batch_size=size, rank=r) for r in (0, 1)]
            run.append(seen[0], seen[1].model_copy(update={"outcome": outcome}))
        run.append(
            Trial(**facts, variant=PROVEN, batch_size=8, images=24, steps=3, epoch_s=0.5,
                  details={"headroom": 0.1})
        )  # fmt: skip
    assert found_together(run) == (
        "The search on all 2 GPUs agreed: **resnet50** trains with up to 9 samples per GPU on "
        "every one. With 10 % of the memory kept free it is **8 per GPU**, a global batch of 16, "
        "trained together at 96 images/s."
    )
    assert len(narrations(run)) == 5


def test_the_section_of_a_report_says_whose_figures_it_shows(run):
    assert run_to_show(run) is run
    assert whose_job(run) == (
        "These are figures of **2 × NVIDIA H200** on one host, gradients sent by NCCL."
    )
    assert len(narrations(run)) == 4


def test_the_figure_draws_one_device_the_job_and_perfect_scaling():
    figure = scaling_figure(table_of_two(), "Two GPUs")
    speed, efficiency, share, peak = figure.axes
    labels = speed.get_legend_handles_labels()[1]
    assert labels == ["one GPU alone", "perfect scaling: 2 GPUs", "2 GPUs together"]
    assert [list(line.get_xdata()) for line in speed.get_lines()] == [[8, 32], [16, 64], [16, 64]]
    assert list(efficiency.get_lines()[0].get_ydata()) == pytest.approx([0.8, 1.0])
    assert list(share.get_lines()[0].get_ydata()) == pytest.approx([0.4, 0.4])
    assert peak.get_ylabel() == "highest peak of a rank (MiB)"
    assert all(axes.get_xlabel() for axes in figure.axes)
