"""Curves to compare with: the article's, the committed runs, the reader's own."""

import json

import pandas as pd
import pytest

from labhelpers.records import ARTICLE_BATCH_SIZES, SweepSpec, Trial, ask
from labhelpers.references import (
    ARTICLE_FILE,
    article,
    article_curve,
    curve_of,
    newest_run,
    reference_curves,
    reference_runs,
    total_memory_mib,
)
from labhelpers.store import RunDirectory


def trial(size: int, **facts: object) -> Trial:
    measured = {"images": 100, "steps": 2, "epoch_s": 1.0, "feed": "article"}
    return Trial(kind="sweep", batch_size=size, **measured | facts)


def run_with(path, *trials: Trial, **asked: object) -> RunDirectory:
    run = RunDirectory.create(path)
    with run.writing():
        run.note_environment("a", {"device_name": "A Test"})
        run.note_spec("sweep", ask(SweepSpec, asked))
        for each in trials:
            run.append(each)
    return run


def test_the_articles_curve_is_what_its_file_says():
    curve, published = article_curve(), article()
    assert published == json.loads(ARTICLE_FILE.read_text(encoding="utf-8"))
    assert tuple(curve.table["batch_size"]) == ARTICLE_BATCH_SIZES
    assert list(curve.table["images_per_s"]) == [row["images_per_s"] for row in published["sweep"]]
    assert (curve.images, curve.reference, curve.label) == (60_000, True, "RTX 5070 Ti (article)")
    assert curve.table["reserved_mib"].isna().all()  # not printed there: not known, not 0
    assert list(curve.table["last_batch"])[-1] == 2656


def test_committed_runs_load_and_are_compared_with():
    runs = reference_runs()
    labels = [curve.label for curve in reference_curves()]
    assert labels[0] == "RTX 5070 Ti (article)"
    assert len(labels) == 1 + sum(
        curve_of(run, reference=True) is not None for run in runs.values()
    )
    for run in runs.values():
        curve = curve_of(run)  # None for a run of another kind, such as one on several GPUs
        assert curve is None or curve.label.endswith("(committed run)")
        assert all(trial.environment_id in run.info.environments for trial in run.trials("sweep"))
        own = reference_curves(leave_out=run.path)
        assert len(own) == len(labels) - (curve_of(run) is not None)


def test_a_runs_curve_says_whose_it_is(tmp_path):
    curve = curve_of(run_with(tmp_path / "cpu", trial(32)))
    assert (curve.label, curve.images, curve.reference) == (
        "A Test (this machine), CPU",
        100,
        False,
    )
    gpu = run_with(tmp_path / "gpu", trial(32, device="cuda:0"))
    assert curve_of(gpu).label == "A Test (this machine)"
    assert curve_of(gpu, reference=True).reference
    made_up = run_with(tmp_path / "made up", trial(32, synthetic=True))
    assert curve_of(made_up).label == "A Test (this machine), CPU, synthetic images"


def test_a_run_without_a_measured_sweep_has_no_curve(tmp_path):
    assert curve_of(RunDirectory.create(tmp_path / "empty")) is None
    failed = trial(32, outcome="oom", epoch_s=None)
    assert curve_of(run_with(tmp_path / "failed", failed)) is None
    assert curve_of(run_with(tmp_path / "probe", trial(32).model_copy(
        update={"kind": "probe"}))) is None  # fmt: skip


def test_a_curve_shows_the_sweep_that_was_asked_for_last(tmp_path):
    fp32, bf16 = trial(32), trial(32, precision="bf16", epoch_s=0.5)
    run = run_with(tmp_path / "run", fp32, bf16, precision="bf16")
    assert list(curve_of(run).table["images_per_s"]) == [200]


def test_the_newest_run_is_the_readers_own(tmp_path):
    assert newest_run(tmp_path) is None
    run_with(tmp_path / "reference" / "h200", trial(32))
    assert newest_run(tmp_path) is None
    run_with(tmp_path / "own", trial(32))
    assert newest_run(tmp_path).path == tmp_path / "own"


def test_the_devices_memory_is_read_from_the_trials_or_not_known():
    known = trial(32, memory_before={"total_bytes": 2**30})
    assert total_memory_mib([trial(32), known]) == 1024
    assert total_memory_mib([trial(32)]) is None
    assert total_memory_mib([]) is None


@pytest.mark.parametrize("column", ["batch_size", "images_per_s", "steps", "updates"])
def test_the_articles_table_has_no_gaps_where_it_was_printed(column):
    assert pd.api.types.is_numeric_dtype(article_curve().table[column])
    assert article_curve().table[column].notna().all()
