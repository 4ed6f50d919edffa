"""The same sweep under one feed after another: real on the CPU, and its story on made-up speeds."""

from pathlib import Path

import pytest

from labhelpers.knee import knee_figure, knee_rates, knee_spots, knee_story, knee_table, run_knee
from labhelpers.plots import png_bytes
from labhelpers.records import LadderSpec, SweepSpec, ask
from labhelpers.store import RunDirectory, open_run
from labhelpers.sweep import run_sweep, trials_of

RATES = {
    "article": {32: 80.0, 256: 100.0, 2048: 101.0},
    "host": {32: 100.0, 256: 900.0, 2048: 2000.0},
}


def test_the_knee_is_measured_beside_the_runs_own_sweep(tmp_path, worker, data_report):
    run = RunDirectory.create(tmp_path / "run")
    terms = {
        "device": "cpu", "data_dir": str(data_report.data_dir), "synthetic": data_report.synthetic,
    }  # fmt: skip
    own = run_sweep(
        ask(SweepSpec, terms | {"batch_sizes": [32, 64], "images": 100, "repeats": 2}),
        run, worker=worker,
    )  # fmt: skip
    found = run_knee(ask(LadderSpec, terms), run, workers=1, worker=worker)
    assert list(found) == ["article", "workers", "host"]
    assert [t.key for t in found["article"]] == [t.key for t in own]  # measured already
    assert [(t.batch_size, t.images) for t in found["host"]] == [(32, 100), (64, 100)]
    assert found["workers"][0].details["workers"] == 1
    again = open_run(run.path)
    assert trials_of(again) == own  # the run's own sweep is what it was
    assert again.info.specs["sweep"]["repeats"] == 2
    before = len(again.trials())
    run_knee(ask(LadderSpec, terms), again, workers=1, worker=worker)
    assert len(again.trials()) == before
    rates = knee_rates(again)
    assert {feed: list(of_feed) for feed, of_feed in rates.items()} == {
        "article": [32, 64], "workers": [32, 64], "host": [32, 64],
    }  # fmt: skip


def test_a_run_without_a_sweep_gets_the_articles_as_its_own(tmp_path: Path, worker, data_report):
    run = RunDirectory.create(tmp_path / "run")
    asked = {
        "device": "cpu", "data_dir": str(data_report.data_dir), "synthetic": data_report.synthetic,
        "quick": True,
    }  # fmt: skip
    run.info.specs.clear()
    assert knee_rates(run) == {}
    spec = ask(LadderSpec, asked)
    small = spec.model_copy(update={"seed": 7})
    found = run_knee(small, run, workers=1, worker=worker)
    assert set(run.info.specs) == {"sweep", "sweep:workers", "sweep:host"}
    assert run.info.specs["sweep:host"]["seed"] == 7
    assert trials_of(run) == found["article"]


def test_the_story_names_the_spots_and_how_far_the_knee_moves():
    assert {feed: spot.batch_size for feed, spot in knee_spots(RATES, 0.93).items()} == {
        "article": 256, "host": 2048,
    }  # fmt: skip
    story = knee_story(RATES, 0.93)
    assert "256 (`article`), 2,048 (`host`)" in story
    assert "With `host` the same model reaches 2,000 images/s, 19.8× the article's best" in story
    assert "moves to 8.00× the batch" in story
    assert "is its loader's" in story


def test_the_story_does_not_claim_what_was_not_seen():
    assert knee_story({"host": RATES["host"]}, 0.93).startswith("Only one feed was swept")
    equal = {"article": RATES["article"], "host": RATES["article"]}
    assert "No other feed is much faster" in knee_story(equal, 0.93)
    part = {"article": RATES["article"], "host": {32: 150.0}}
    assert "is in part its loader's" in knee_story(part, 0.93)


def test_the_table_and_the_figure_have_every_feed():
    table = knee_table(RATES, 0.93)
    assert table["feed"].to_list() == ["article", "host"]
    assert table["sweet spot"].to_list() == ["256", "2,048"]
    figure = knee_figure(RATES, 0.93, "A test")
    speed, relative = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["article", "host"]
    assert max(relative.get_lines()[0].get_ydata()) == pytest.approx(1.0)
    stars = [line for line in speed.get_lines() if line.get_marker() == "*"]
    assert [line.get_xdata()[0] for line in stars] == [256, 2048]
    assert png_bytes(figure).startswith(b"\x89PNG")
