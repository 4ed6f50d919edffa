"""The summary of a run: answer first, what failed, where it was measured; Markdown that holds."""

from pathlib import Path
from typing import Any

import pytest

from labhelpers.records import SweepSpec, Trial
from labhelpers.report import NotebookResult
from labhelpers.store import RunDirectory
from labhelpers.summary import summary_lines, write_summary


def trial(size: int, **facts: Any) -> Trial:
    known = {
        "kind": "sweep", "batch_size": size, "feed": "article", "images": 1000, "steps": 10,
        "updates": 10, "epoch_s": 10.0 / size, "peak_allocated_bytes": size * 2**20,
    }  # fmt: skip
    return Trial(**(known | facts))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "run")
    with run.writing():
        run.note_spec("sweep", SweepSpec())
        run.note_environment("here", {"device": "cpu", "device_name": "A CPU", "system": "Linux"})
        for each in (trial(8), trial(16), trial(32)):
            run.append(each)
    return run


def add(run: RunDirectory, *trials: Trial) -> None:
    with run.writing():
        for each in trials:
            run.append(each)


def test_the_answer_comes_first_and_the_machine_last(run: RunDirectory):
    text = write_summary(run).read_text(encoding="utf-8")
    assert text.index("batch **32** is the smallest") < text.index("| batch |")
    assert text.index("| batch |") < text.index("## Measured on")
    assert "For comparison: On **GeForce RTX 5070 Ti" in text
    assert "Not measured" not in text


def test_the_table_is_markdown(run: RunDirectory):
    rows = [line for line in summary_lines(run, []) if line.startswith("|")]
    table = "\n".join(rows).splitlines()
    assert len(table) == 5
    assert {line.count("|") for line in table} == {table[0].count("|")}


def test_what_failed_is_told_and_an_oom_that_was_wanted_is_not(run: RunDirectory):
    killed = trial(64, outcome="killed", epoch_s=None, error_text="killed by signal 9")
    too_large = trial(128, outcome="oom", epoch_s=None, error_text="no memory")
    wanted = trial(256, kind="cap", outcome="oom", epoch_s=None, error_text="as intended")
    add(run, killed, too_large, wanted)
    failed = NotebookResult("02_probe", 138, Path("x"), "the kernel died")
    text = "\n".join(summary_lines(run, [failed]))
    assert "- batch 64, repeat 1: killed: killed by signal 9" in text
    assert "- batch 128, repeat 1: oom: no memory" in text
    assert "- 02_probe: exit 138: the kernel died" in text
    assert "as intended" not in text


def test_a_run_without_a_sweep_still_says_where_it_was(tmp_path: Path):
    lines = summary_lines(RunDirectory.create(tmp_path / "empty"), [])
    assert lines[0] == "# Batch size report"
    assert any(line.startswith("- device: unknown") for line in lines)
