"""The second article's experiment: settle, search on emulated cards, train with what was found."""

import pytest

from labhelpers import finder_narrative as narrative
from labhelpers.finder import run_finder
from labhelpers.finder_report import read_reports
from labhelpers.finder_study import ARTICLE_CARDS, find_on_cards, settled, train_with
from labhelpers.finder_trials import of_purpose
from labhelpers.records import FinderSpec, ask
from labhelpers.store import RunDirectory, open_run

SMALL = {
    "workload": "finder_workloads:SmallNet", "input_shape": "3,64,64", "classes": 5,
    "dataset_size": 33, "device": "cpu", "num_iterations": 3, "card_mib": "16, 22",
}  # fmt: skip


def nothing(progress) -> None:
    """Show no progress."""


def test_what_is_left_open_suits_the_device(worker):
    spec = settled(ask(FinderSpec, {"workload": "auto", "device": "cpu"}), worker)
    assert spec.workload == "torchvision.models:mobilenet_v3_small"
    assert (spec.input_shape, spec.classes, spec.dataset_size) == ((3, 64, 64), 10, 128)
    small, large = spec.card_mib
    assert large / small == pytest.approx(11 / 8)
    assert "torchvision.models:mobilenet_v3_small" in narrative.plan(spec)
    quick = settled(ask(FinderSpec, {"workload": "auto", "device": "cpu", "quick": True}), worker)
    assert quick.card_mib == (small,)
    asked = settled(ask(FinderSpec, SMALL), worker)
    assert (asked.workload, asked.card_mib) == ("finder_workloads:SmallNet", (16, 22))


def test_search_on_two_cards_and_train(worker, tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    spec = settled(ask(FinderSpec, SMALL), worker)
    own = run_finder(spec, run, worker=worker)
    assert (own.largest, own.ended) == (33, "the size of the data set")
    trained = train_with(spec, own, run, worker)
    assert (trained.outcome, trained.images, trained.batch_size) == ("ok", 33, 33)
    assert trained.epoch_s > 0
    assert "33 made-up images" in narrative.training(own, trained)
    reports = find_on_cards(spec, run, worker, nothing)
    assert [(r.terms.limit_bytes // 2**20, r.terms.strategy) for r in reports] == [
        (16, "doubling"), (16, "exact"), (22, "doubling"), (22, "exact"),
    ]  # fmt: skip
    for report in reports:
        assert report.with_headroom in {t.batch_size for t in report.trials if t.outcome == "ok"}
        again = train_with(spec, report, run, worker)
        assert again.outcome == "ok"
        assert again == train_with(spec, report, run, worker)
    table = narrative.cards_table(reports, ARTICLE_CARDS)
    assert list(table["of the card"])[-2:] == ["66.8 %", "90.3 %"]
    assert [report.variant for report in read_reports(open_run(run.path))] == [
        own.variant, *(report.variant for report in reports)
    ]  # fmt: skip
    kept = open_run(run.path).trials("finder")
    assert len(of_purpose(kept, "training")) == 5
    assert narrative.found_in(open_run(run.path)) == narrative.answer(own)


def test_a_last_batch_of_one_is_left_out_of_the_training(worker, tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    asked = SMALL | {"max_batch_size": 8, "dataset_size": 33}
    spec = settled(ask(FinderSpec, asked), worker)
    own = run_finder(spec, run, worker=worker)
    assert any("leave a last batch of 1" in note for note in own.notes)
    assert train_with(spec, own, run, worker).images == 32


def test_a_run_without_a_search_says_so(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    assert narrative.found_in(run) == (
        "No batch size was searched in this run: notebook 04 does it."
    )
