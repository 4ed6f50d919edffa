"""A ladder's trials as rows, tables, sentences and a figure: made-up trials, no torch."""

import pytest

from labhelpers import ladder_views as views
from labhelpers.ladder_table import (
    best_workers,
    ladder_rows,
    rung_at,
    sizes_of,
    top_rung,
)
from labhelpers.plots import png_bytes
from labhelpers.records import OtherProcess, Trial

WORK = {
    "forward_flops": 40, "backward_flops": 60, "eager_bytes": 50.0, "eager_bytes_step": 0.0,
    "fused_bytes": 10.0, "fused_bytes_step": 0.0,
}  # fmt: skip
CEILINGS = {"flops_per_s": {"fp32": 1e6, "tf32": 4e6}, "bytes_per_s": 1e6, "work": WORK}


def trial(rung: str, base: str | None, rate: float | None, size: int = 32, **facts) -> Trial:
    known = {
        "kind": "ladder", "variant": rung, "batch_size": size, "images": 1000, "final_loss": 0.5,
        "epoch_s": 1000 / rate if rate else None, "outcome": "ok" if rate else "error",
        "details": {"base": base, "setup": {"compiled": False}, "prepare_s": 0.1},
    }  # fmt: skip
    return Trial(**(known | facts))


def rung(name: str, base: str | None, *rates: float, size: int = 32, **facts) -> list[Trial]:
    return [trial(name, base, r, size, repeat=i, **facts) for i, r in enumerate(rates)]


TRIALS = [
    *rung("article", None, 100, 102), *rung("workers-2", "article", 150, 151),
    *rung("workers-4", "article", 140, 141), *rung("host", "article", 400, 404),
    *rung("synthetic", "host", 500, 500, final_loss=None),
    *rung("fused_adam", "host", 600, 606), *rung("bf16", "fused_adam", 300, 303),
    *rung("channels_last", "fused_adam", 595, 607),
    *rung("fp16", "fused_adam", 900, 900, final_loss=0.7),
    trial("compile", "fused_adam", None, error_text="no gcc\nmore"),
    *rung("article", None, 200, 200, size=256), *rung("host", "article", 900, 900, size=256),
]  # fmt: skip
ROWS = ladder_rows(TRIALS, CEILINGS)


def test_a_rung_stands_beside_its_base_and_the_article():
    row = rung_at(ROWS, "fused_adam", 32)
    assert row is not None
    assert row.images_per_s == pytest.approx(603, rel=1e-3)
    assert row.over_base == pytest.approx(603 / 402, rel=1e-2)
    assert row.over_article == pytest.approx(603 / 101, rel=1e-2)
    assert row.same_loss
    assert row.slower is False
    assert sizes_of(ROWS) == [32, 256]


def test_slower_needs_every_repeat_below_and_a_margin():
    slow = {row.rung for row in ROWS if row.slower}
    assert slow == {"bf16"}
    once = ladder_rows([trial("article", None, 100), trial("host", "article", 50)], {})
    assert [row.slower for row in once] == [None, None]
    assert views.made_slower(once).startswith("Each rung was measured once")


def test_the_top_rung_trains_the_same_and_has_a_feed():
    top = top_rung(ROWS, 32)
    assert top is not None
    assert top.rung == "fused_adam"  # fp16 is faster with another loss, synthetic has no feed
    assert top_rung(ROWS, 99) is None
    best = best_workers(ROWS, 32)
    assert best is not None
    assert best.rung == "workers-2"
    assert best_workers(ROWS, 256) is None


def test_the_nearest_ceiling_of_each_rung():
    host = rung_at(ROWS, "host", 32)
    assert host is not None
    assert host.ceiling is not None
    assert host.ceiling.compute == pytest.approx(402 * 100 / 1e6, rel=1e-2)
    assert host.ceiling.nearest == "arithmetic"
    assert all(row.ceiling is None for row in ladder_rows(TRIALS, {}))
    failed = rung_at(ROWS, "compile", 32)
    assert failed is not None
    assert failed.ceiling is None
    assert failed.failure == "error: no gcc"


def test_tables_have_a_line_per_rung_and_a_column_per_batch_size():
    speed = views.speed_table(ROWS).set_index("rung")
    assert list(speed.columns) == ["batch 32", "batch 256"]
    assert speed.loc["article"].to_list() == ["101", "200"]
    assert speed.loc["host"].to_list() == ["402 (3.98×)", "900 (4.50×)"]
    assert speed.loc["bf16", "batch 256"] == "n/a"
    loss = views.loss_table(ROWS).set_index("rung")["batch 32"]
    assert (loss["host"], loss["fp16"], loss["synthetic"]) == ("0.5000", "0.7000 (differs)", "n/a")
    shares = views.ceiling_table(ROWS).set_index("rung")["batch 32"]
    assert shares["host"] == "4.0 % of arithmetic"
    assert shares["compile"] == "n/a"


def test_sentences_take_their_numbers_from_the_rows():
    assert views.summit(ROWS).splitlines() == [
        "- Batch 32: **fused_adam** trains 603 images/s, 6.0× the article's loop (101), "
        "1.5× `host`.",
        "- Batch 256: **host** trains 900 images/s, 4.5× the article's loop (200), 1.0× `host`.",
    ]
    slower = views.made_slower(ROWS)
    assert slower.startswith("- **bf16** is slower than `fused_adam` (0.50× at batch 32): casting")
    assert views.loss_verdict(ROWS).startswith(
        "**Another loss** than the article's, by more than 5 %: fp16 at batch 32."
    )
    assert views.loss_verdict(ROWS[:3]) == (
        "After the same images every rung's loss is the article's within 5 %."
    )
    missing = views.not_here(ROWS, {"tf32": "needs an NVIDIA GPU"})
    assert missing.splitlines() == [
        "- `tf32`: needs an NVIDIA GPU", "- `compile (batch 32)`: error: no gcc",
    ]  # fmt: skip
    assert views.not_here([], {}) == "Every rung exists here."


def test_what_was_counted_and_measured_is_said_with_units():
    said = views.ceiling_facts(CEILINGS | {"flops_per_s": {"fp32": 5e13, "bf16": 7e9}})
    assert "50.0 TFLOP/s (fp32), 7.0 GFLOP/s (bf16)" in said
    assert "0.00 million operations" in said
    assert views.ceiling_facts({}) == "The ceilings of this machine were not measured."


def test_disturbed_trials_are_named():
    assert views.disturbed(TRIALS) == "Nothing disturbed the trials, as far as this system tells."
    noisy = rung("host", "article", 100, 100, other_processes=(OtherProcess(pid=5),))
    assert views.disturbed(noisy).splitlines()[-1] == "- other process on the device: host at 32"


def test_nothing_faster_than_the_article_is_said_plainly():
    rows = ladder_rows(rung("article", None, 100, 101), {})
    assert "nothing is faster than the article's loop here" in views.summit(rows)
    assert views.preparation(rows).endswith("batch 32: 0.10 s.")


def test_the_figure_has_a_panel_per_batch_size_and_marks_what_is_slower():
    figure = views.ladder_figure(ROWS, "A test")
    assert [axes.get_title() for axes in figure.axes] == ["batch 32", "batch 256"]
    colours = {patch.get_facecolor() for axes in figure.axes for patch in axes.patches}
    assert len(colours) >= 3
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names[0] == "article"
    assert names[5] == "fused adam"
    assert png_bytes(figure).startswith(b"\x89PNG")


def test_the_list_of_rungs_needs_no_run():
    table = views.rungs_table()
    assert table["rung"].to_list()[0] == "article"
    assert table["changes"].str.len().min() > 10
