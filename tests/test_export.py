"""Export: one JSON that its published schema accepts, one CSV, and the summary."""

import csv
import json
from typing import get_args

import jsonschema
import pytest

from labhelpers.export import (
    SCHEMA_FILE,
    export_run,
    export_schema,
    exported,
    trials_frame,
    write_schema,
)
from labhelpers.inputs import InputError
from labhelpers.records import SCHEMA_VERSION, DriverMemory, Kind, SweepSpec, Trial, ask
from labhelpers.references import reference_runs
from labhelpers.report import NotebookResult
from labhelpers.store import RunDirectory
from labhelpers.summary import markdown_table, write_summary
from labhelpers.tables import readable, sweep_table

TRIALS = [
    Trial(kind="sweep", batch_size=32, images=100, steps=4, last_batch=4, updates=4, epoch_s=0.5,
          step_times_s=(0.1,) * 4, feed="article", memory_before=DriverMemory(free_bytes=1),
          precision_after={"both": "ieee"}, details={"cpu_of_others": None}),
    Trial(kind="sweep", batch_size=64, feed="article", outcome="timeout",
          error_class="TimeoutError", error_text="took too long"),
    Trial(kind="sweep", batch_size=32, feed="host", images=100, epoch_s=0.1),
    Trial(kind="probe", batch_size=1024, epoch_s=1.0, images=1024),
    Trial(kind="cap", batch_size=16_384, outcome="oom", error_text="CUDA out of memory, × 字",
          oom={"requested_bytes": 5}),
]  # fmt: skip
TRIALS += [
    Trial(kind=kind, batch_size=8)
    for kind in get_args(Kind)
    if kind not in {t.kind for t in TRIALS}
]


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    made = RunDirectory.create(tmp_path / "run")
    with made.writing():
        made.note_spec("sweep", ask(SweepSpec, {"batch_sizes": [32, 64]}))
        made.note_environment("a", {"device_name": "A Test", "device": "cpu", "packages": {}})
        made.note("synthetic images: speed is real")
        for trial in TRIALS:
            made.append(trial)
    return made


def test_the_published_schema_is_the_records_own(tmp_path, monkeypatch):
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == export_schema(), (
        "the records changed: run `make schema`"
    )
    monkeypatch.setattr("labhelpers.export.SCHEMA_FILE", tmp_path / "schema.json")
    write_schema()
    assert (tmp_path / "schema.json").read_bytes() == SCHEMA_FILE.read_bytes()


def test_an_exported_run_is_accepted_by_the_schema_and_holds_everything(run):
    path, _ = export_run(run)
    content = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(export_schema())
    jsonschema.validate(content, export_schema())
    assert content["schema_version"] == content["run"]["schema_version"] == SCHEMA_VERSION
    sections = {name: part for name, part in content.items() if isinstance(part, list)}
    assert set(sections) >= {"sweep", "natural_probe", "controlled_oom"}  # the article's names
    assert all(sections.values())  # every kind of measurement has its section
    assert sum(len(part) for part in sections.values()) == len(TRIALS)
    again = [Trial(**trial) for trial in content["sweep"] + content["controlled_oom"]]
    asked = [t for t in TRIALS if t.kind in ("sweep", "cap") and t.feed != "host"]
    assert [trial.key for trial in again] == [trial.key for trial in asked]
    assert [trial["feed"] for trial in content["other_sweeps"]] == ["host"]
    assert content["controlled_oom"][0]["error_text"] == "CUDA out of memory, × 字"
    assert "epoch_s" not in content["sweep"][1]  # not measured is absent, never 0


@pytest.mark.parametrize("change", [{"extra": 1}, {"sweep": [{"kind": "sweep"}]}, {"run": {}}])
def test_the_schema_refuses_what_is_not_an_export(run, change):
    content = json.loads(exported(run).model_dump_json(exclude_none=True))
    jsonschema.validate(content, export_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content | change, export_schema())


def test_the_table_has_one_row_a_trial_and_rates_beside_what_was_measured(run, tmp_path):
    _, path = export_run(run, tmp_path / "elsewhere")
    assert path == tmp_path / "elsewhere" / "trials.csv"
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    assert list(rows[0]) == list(trials_frame([]).columns)
    assert [row["kind"] for row in rows] == [trial.kind for trial in TRIALS]
    assert (rows[0]["images_per_s"], rows[0]["mean_step_s"]) == ("200.0", "0.125")
    assert (rows[1]["images_per_s"], rows[1]["epoch_s"], rows[1]["outcome"]) == ("", "", "timeout")
    for name in ("epoch_s", "peak_allocated_bytes", "steps", "last_batch", "updates", "final_loss"):
        assert name in rows[0]


def test_a_place_that_cannot_be_written_is_one_line(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as caught:
        export_run(run, tmp_path / "file")
    assert str(caught.value) == f"cannot write to {tmp_path / 'file'}: File exists"


@pytest.mark.parametrize("name", sorted(reference_runs()))
def test_committed_runs_export(name, tmp_path):
    run = reference_runs()[name]
    path, _ = export_run(run, tmp_path)
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), export_schema())


def test_the_summary_has_the_answer_the_table_and_what_failed(run, tmp_path):
    failed = NotebookResult("01_batch_sweep", 124, tmp_path, "a cell took too long")
    text = write_summary(run, [failed]).read_text(encoding="utf-8")
    assert "On **A Test**, batch **32** is the smallest" in text
    assert "GeForce RTX 5070 Ti" in text
    assert "> synthetic images: speed is real" in text
    assert "- batch 64, repeat 1: timeout: took too long" in text
    assert "16,384" not in text  # an out-of-memory error that was asked for is a result
    assert "- 01_batch_sweep: exit 124: a cell took too long" in text
    assert "- device: A Test (cpu)" in text


def test_the_summary_of_an_empty_run_is_honest(tmp_path):
    text = write_summary(RunDirectory.create(tmp_path / "run")).read_text(encoding="utf-8")
    assert text.startswith("# Batch size report")
    assert "smallest" not in text
    assert "Not measured" not in text


def test_a_table_as_markdown():
    lines = markdown_table(readable(sweep_table(TRIALS[:1]))[["batch", "images/s"]]).splitlines()
    assert lines == ["| batch | images/s |", "|---:|---:|", "| 32 | 200 |"]
