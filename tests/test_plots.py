"""Figures: what is drawn is what the tables hold; units on the axes; references dashed."""

from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib.figure import Figure

from labhelpers.plots import (
    mark_sweet_spot,
    memory,
    png_bytes,
    save_figure,
    sheet,
    step_time,
    throughput,
    throughput_against_memory,
)
from labhelpers.records import OtherProcess, Trial
from labhelpers.references import Curve, article_curve
from labhelpers.tables import sweep_table

PLOTS = (throughput, memory, step_time, throughput_against_memory)
ARTICLE = article_curve()


SPEEDS = {32: 20_000, 64: 30_000, 128: 33_000}


def own_curve(speeds: dict[int, int] = SPEEDS, **facts: object) -> Curve:
    trials = [
        Trial(kind="sweep", batch_size=size, images=1000, steps=-(-1000 // size),
              epoch_s=1000 / speed, **{"peak_allocated_bytes": size * 2**20} | facts)
        for size, speed in speeds.items()
    ]  # fmt: skip
    return Curve("a test (this machine)", sweep_table(trials), False, 1000, "a test")


def axes_of(plot, *curves: Curve):
    figure = Figure()
    axes = figure.subplots()
    for curve in curves:
        assert plot(curve, axes) is axes
    return axes


@pytest.mark.parametrize(
    ("plot", "x", "y", "label"),
    [
        (throughput, "batch_size", "images_per_s", "images/s (median)"),
        (memory, "batch_size", "allocated_mib", "peak allocated (MiB)"),
        (step_time, "batch_size", "step_ms", "step time (ms): epoch / steps"),
        (throughput_against_memory, "allocated_mib", "images_per_s", "images/s (median)"),
    ],
)
def test_a_plot_draws_the_numbers_of_the_table_and_names_the_unit(plot, x, y, label):
    curve = own_curve()
    axes = axes_of(plot, curve)
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == list(curve.table[x])
    assert list(line.get_ydata()) == list(curve.table[y])
    assert axes.get_ylabel() == label
    assert line.get_label() == curve.label


@pytest.mark.parametrize("plot", PLOTS)
def test_references_are_dashed_and_ones_own_run_is_solid(plot):
    axes = axes_of(plot, own_curve(), ARTICLE, replace(ARTICLE, label="another"))
    assert [line.get_linestyle() for line in axes.get_lines()] == ["-", "--", "--"]
    assert len({line.get_color() for line in axes.get_lines()}) == 3


@pytest.mark.parametrize("plot", PLOTS)
def test_a_point_that_was_not_measured_is_left_out_not_drawn_as_zero(plot):
    curve = own_curve()
    table = curve.table.copy()
    table.loc[1, ["images_per_s", "allocated_mib", "step_ms"]] = None
    (line,) = axes_of(plot, replace(curve, table=table)).get_lines()
    assert len(line.get_xdata()) == 2
    assert min(line.get_ydata()) > 0


def test_disturbed_points_are_ringed():
    clean = axes_of(throughput, own_curve())
    disturbed = axes_of(throughput, own_curve(other_processes=(OtherProcess(pid=1),)))
    assert len(clean.collections) == 0
    assert len(disturbed.collections[0].get_offsets()) == 3
    assert "disturbed" in disturbed.collections[0].get_label()


def test_a_sheet_has_batch_axes_in_powers_of_two_with_a_tick_at_each_size():
    figure = sheet("Batch sweep", PLOTS, [own_curve(), ARTICLE])
    assert len(figure.axes) == 4
    for axes in figure.axes[:3]:
        assert axes.get_xlabel() == "batch size (images)"
        assert axes.get_xscale() == "log"
        assert list(axes.get_xticks()) == sorted(set(ARTICLE.table["batch_size"]))
    assert figure.axes[3].get_xlabel() == "peak allocated (MiB)"
    assert figure.get_suptitle() == "Batch sweep"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["a test (this machine)", "RTX 5070 Ti (article)"]


def test_memory_that_is_not_known_is_said_not_drawn():
    figure = sheet("CPU", PLOTS, [own_curve(peak_allocated_bytes=None)])
    said = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert said[1] == said[3] == ["not available here"]
    assert "not available here" not in said[0] + said[2]


def test_a_sheet_of_an_odd_number_of_plots_has_no_empty_axes():
    assert len(sheet("one", PLOTS[:1], [ARTICLE]).axes) == 1
    assert len(sheet("three", PLOTS[:3], [ARTICLE]).axes) == 3


@pytest.mark.parametrize("size", [32, 256, 4096, 8192])
def test_the_sweet_spot_is_marked_with_its_share_inside_the_axes(size):
    axes = mark_sweet_spot(axes_of(throughput, ARTICLE), size, 0.93)
    label = axes.texts[-1]
    assert label.get_text() == f"sweet spot {size:,}\n(≥ 93% of the best)"
    assert list(axes.get_lines()[-1].get_xdata()) == [size, size]
    axes.figure.draw_without_rendering()
    extent, inside = label.get_window_extent(), axes.bbox
    assert inside.x0 <= extent.x0 < extent.x1 <= inside.x1


@pytest.mark.parametrize(
    "speeds",
    [
        {},
        {8192: 40_000},
        {1_048_576: 40_000},
        {160: 32_000, 2048: 34_000},
        {160: 33_000},
        {1: 330, 32: 9_600, 1024: 40_000},
    ],
    ids=str,
)
def test_the_names_of_points_stay_inside_the_axes_and_apart(speeds):
    own = own_curve(SPEEDS | speeds)
    figure = sheet("Batch sweep", PLOTS, [own, ARTICLE])
    axes = figure.axes[PLOTS.index(throughput_against_memory)]
    figure.draw_without_rendering()
    extents = [name.get_window_extent() for name in axes.texts]
    assert len(extents) == len(own.table)
    assert all(axes.bbox.x0 <= e.x0 < e.x1 <= axes.bbox.x1 for e in extents)
    assert all(axes.bbox.y0 <= e.y0 < e.y1 <= axes.bbox.y1 for e in extents)
    assert not any(one.overlaps(other) for one, other in combinations(extents, 2))


@pytest.mark.parametrize("mine_first", [True, False])
def test_the_room_for_names_cuts_no_other_curve_off(mine_first):
    curves = [own_curve(), ARTICLE][:: 1 if mine_first else -1]
    axes = axes_of(throughput_against_memory, *curves)
    left, right = axes.get_xlim()
    drawn = [value for line in axes.get_lines() for value in line.get_xdata()]
    assert left < min(drawn)
    assert max(drawn) < right < 4 * max(drawn)


def test_of_many_points_some_are_named_and_the_last_always():
    sizes = [2**power for power in range(20)]
    own = own_curve({size: 20_000 * size / (size + 60) for size in sizes})
    names = [text.get_text() for text in axes_of(throughput_against_memory, own).texts]
    assert names == [f"{size:,}" for size in sizes[1::2]]


def test_a_point_without_memory_gets_no_name_and_makes_no_noise(recwarn):
    own = own_curve()
    own.table.loc[0, "allocated_mib"] = 0.0
    axes = axes_of(throughput_against_memory, own)
    axes.figure.draw_without_rendering()
    assert [text.get_text() for text in axes.texts] == ["64", "128"]
    assert not recwarn.list


def test_a_figure_is_a_png_that_can_be_saved_anywhere(tmp_path):
    figure = sheet("Batch sweep", PLOTS, [ARTICLE])
    path = save_figure(figure, tmp_path / "a" / "b" / "figure.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(png_bytes(figure)) > 10_000
