"""What limits each batch size, shown: a stacked figure, a table, and advice. No torch."""

from pathlib import Path

import pytest

from labhelpers.limit_views import limit_advice, limit_figure, limit_table, limits_in
from labhelpers.limits import Shares, limited_by
from labhelpers.records import SweepSpec, Trial, ask
from labhelpers.store import RunDirectory

GPU = {
    32: limited_by(Shares(0.2, 0.7, 0.1, 0.0)),
    64: limited_by(Shares(0.25, 0.6, 0.15, 0.0)),
    8192: limited_by(Shares(0.05, 0.05, 0.9, 0.0)),
}
UNKNOWN = {32: limited_by(Shares(0.3)), 64: limited_by(Shares(0.9))}
CPU = {32: limited_by(Shares(0.2, None, 0.8, on_cpu=True))}


def labels(figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


@pytest.mark.parametrize("verdicts", [GPU, UNKNOWN, CPU])
def test_every_bar_is_stacked_up_to_one_and_named(verdicts):
    figure = limit_figure(verdicts, "A test")
    (axes,) = figure.axes
    heights = [0.0] * len(verdicts)
    for container in axes.containers:
        for place, patch in enumerate(container.patches):
            assert patch.get_y() == pytest.approx(heights[place])
            heights[place] += patch.get_height()
    assert heights == pytest.approx([1.0] * len(verdicts))
    said = [text.get_text() for text in axes.texts]
    assert said == [found.verdict for found in verdicts.values()]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [f"{n:,}" for n in verdicts]


def test_parts_that_never_occur_have_no_legend():
    assert labels(limit_figure(GPU, "")) == ["waiting for images", "launching", "computing"]
    assert labels(limit_figure(UNKNOWN, "")) == [
        "waiting for images", "launching or computing: not told apart",
    ]  # fmt: skip
    assert labels(limit_figure(CPU, ""))[1].startswith("computing (on the CPU launching")


def test_the_table_shows_not_available_where_nothing_was_measured():
    table = limit_table(UNKNOWN).set_index("batch")
    assert table.loc["32"].to_list() == ["undecided", "30 %", "n/a", "n/a"]
    retrying = {8: limited_by(Shares(0.1, 0.1, 0.1, 0.7))}
    assert limit_table(retrying).iloc[0]["asking for memory again"] == "70 %"
    assert limit_table(GPU).iloc[2]["computing"] == "90 %"


def test_stretches_with_one_verdict_are_advised_together():
    lines = limit_advice(GPU).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("- **Batch 32 to 64** limited by **launch**: the device worked 10 %")
    assert "(at 32). Advice: give the device more to do per launch" in lines[0]
    assert lines[1].startswith("- **Batch 8,192** limited by **compute**")


def test_a_run_without_profiled_steps_says_so():
    assert "No profiled steps are in this run" in limit_advice(UNKNOWN)
    assert "No profiled steps" not in limit_advice(CPU)
    assert limit_advice({}).startswith("This run holds no measured sweep")


def test_a_run_is_judged_from_its_own_sweep_and_profiles(tmp_path: Path):
    run = RunDirectory.create(tmp_path / "run")
    sweep = {"kind": "sweep", "batch_size": 8, "device": "cuda:0", "images": 100, "epoch_s": 1.0}
    profile = {"kernel_s": 0.9, "allocation_s": 0.0, "wall_s": 2.0, "steps": 1, "images": 100}
    with run.writing():
        run.note_spec("sweep", ask(SweepSpec, {"batch_sizes": [8]}))
        run.append(Trial(feed="article", feed_wait_s=0.05, **sweep))
        run.append(Trial(feed="host", feed_wait_s=0.9, **sweep))
        limits = {"kind": "limits", "batch_size": 8, "feed": "article"}
        run.append(Trial(**limits, details={"limits": profile}))
    assert {size: found.verdict for size, found in limits_in(run).items()} == {8: "compute"}
    assert limits_in(RunDirectory.create(tmp_path / "empty")) == {}
