"""The report's sections: own results first, committed ones instead, and a plain word for none."""

from pathlib import Path

import pytest

from labhelpers import pieces as pieces_module
from labhelpers import references
from labhelpers.finder import run_finder
from labhelpers.pieces import FigurePiece, Piece, TablePiece, origin, show_section, source_of
from labhelpers.records import FinderSpec, ProbeSpec, RemedySpec, SweepSpec, Trial
from labhelpers.sections import (
    finding_the_size,
    out_of_memory,
    past_the_card,
    remedies_and_accumulation,
    several_gpus,
    the_plateau,
)
from labhelpers.store import RunDirectory

NOTEBOOK = "02_wsl2_oversubscription"
FACTS = {"device": "cuda:0", "device_name": "A Card", "gpu": {"total_bytes": 2**34},
         "system": "Linux", "kernel": "6.1"}  # fmt: skip


@pytest.fixture(autouse=True)
def no_committed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hold the committed runs still: what a section shows must not depend on them here."""
    folder = tmp_path / "reference"
    folder.mkdir()
    monkeypatch.setattr(references, "REFERENCE_RUNS", folder)
    return folder


def run_in(folder: Path, *trials: Trial) -> RunDirectory:
    run = RunDirectory.create(folder)
    with run.writing():
        run.note_environment("here", FACTS)
        run.note_spec("probe", ProbeSpec())
        for trial in trials:
            run.append(trial)
    return run


def probe_trial(size: int, images_per_s: float = 1000.0) -> Trial:
    return Trial(
        kind="probe", batch_size=size, device="cuda:0", images=size, steps=1,
        epoch_s=size / images_per_s, peak_allocated_bytes=size * 2**20,
        peak_reserved_bytes=size * 2**20, environment_id="here", feed="synthetic",
        position=size,
    )  # fmt: skip


def words_of(pieces: list[Piece]) -> str:
    return "\n".join(piece for piece in pieces if isinstance(piece, str))


def test_own_results_come_first(tmp_path: Path, no_committed_runs: Path):
    run_in(no_committed_runs / "h200", probe_trial(8))
    own = run_in(tmp_path / "own", probe_trial(64), probe_trial(128))
    assert source_of(own, "probe") is own
    assert "Measured in this run, on A Card" in origin(own, own, NOTEBOOK)
    words = words_of(past_the_card(own))
    assert "The fastest safe batch is 64" in words
    assert f"[Notebook 02]({NOTEBOOK}.ipynb)" in words


def test_what_was_not_run_here_is_shown_from_a_committed_run_and_said(
    tmp_path: Path, no_committed_runs: Path
):
    committed = run_in(no_committed_runs / "h200", probe_trial(8))
    own = run_in(tmp_path / "own")
    source = source_of(own, "probe")
    assert source is not None
    assert source.path == committed.path
    said = origin(own, source, NOTEBOOK)
    assert said.startswith("*Not run here: these are the committed results of the A Card.")
    assert "The fastest safe batch is 8" in words_of(past_the_card(own))


def test_the_committed_run_itself_is_named_as_such(no_committed_runs: Path):
    committed = run_in(no_committed_runs / "h200", probe_trial(8))
    assert origin(committed, committed, NOTEBOOK).startswith("*As above, these are the committed")


def test_what_nobody_measured_is_said_and_the_notebook_named(tmp_path: Path):
    own = run_in(tmp_path / "own")
    assert source_of(own, "probe") is None
    pieces = past_the_card(own)
    assert "Not run here, nor in a committed run" in words_of(pieces)
    assert f"]({NOTEBOOK}.ipynb) measures it" in words_of(pieces)
    # The recorded cliffs are shown all the same.
    assert any(isinstance(piece, FigurePiece) and piece.alt for piece in pieces)


def test_trials_that_all_failed_are_no_results(tmp_path: Path):
    failed = probe_trial(8).model_copy(update={"outcome": "killed", "epoch_s": None})
    assert source_of(run_in(tmp_path / "own", failed), "probe") is None


def test_a_section_is_shown_piece_by_piece(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    import pandas as pd

    shown: list[str] = []
    for name in ("say", "show_table", "show_figure"):
        monkeypatch.setattr(pieces_module, name, lambda *_, name=name: shown.append(name))
    figure = past_the_card(run_in(tmp_path / "own"))[1]
    show_section(["words", TablePiece(pd.DataFrame({"a": [1]}), "a table"), figure])
    assert shown == ["say", "show_table", "show_figure"]


# Out of memory


def cap_trial(size: int, **facts: object) -> Trial:
    return Trial(
        kind="cap", batch_size=size, device="cpu", images=size, steps=1, epoch_s=1.0,
        cap_bytes=2**27, peak_allocated_bytes=size * 2**10, environment_id="here",
    ).model_copy(update=facts)  # fmt: skip


def test_the_controlled_error_is_told_with_its_message_and_recovery(tmp_path: Path):
    text = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 38535168 bytes. Error code 12 (Cannot allocate memory)"
    )
    failed = cap_trial(768, outcome="oom", error_text=text, epoch_s=None,
                       oom={"requested_bytes": 38535168})  # fmt: skip
    own = run_in(tmp_path / "own", cap_trial(512), failed)
    pieces = out_of_memory(own)
    words = words_of(pieces)
    assert "batch **512** trained and batch **768** ran out of memory" in words
    assert "36.8 MiB" in words
    tables = [piece for piece in pieces if isinstance(piece, TablePiece)]
    assert len(tables[0].frame) == 2


def test_without_a_controlled_error_the_articles_series_stands_there(tmp_path: Path):
    pieces = out_of_memory(run_in(tmp_path / "own"))
    assert "](03_oom_recovery.ipynb) measures it" in words_of(pieces)
    (table,) = [piece for piece in pieces if isinstance(piece, TablePiece)]
    assert "(article)" in table.caption
    assert list(table.frame["batch"]) == ["8,192", "16,384", "24,576"]


# The plateau


def sweep_trial(size: int, waited_s: float) -> Trial:
    return Trial(
        kind="sweep", batch_size=size, feed="article", device="cpu", images=100, steps=10,
        epoch_s=10.0, feed_wait_s=waited_s, environment_id="here",
    )  # fmt: skip


def rung_trial(name: str, epoch_s: float, position: int) -> Trial:
    return Trial(
        kind="ladder", variant=name, batch_size=32, feed="article", device="cpu", images=100,
        steps=10, epoch_s=epoch_s, final_loss=0.5, position=position, environment_id="here",
    )  # fmt: skip


def test_the_plateau_is_told_by_what_limits_each_size(tmp_path: Path):
    own = run_in(tmp_path / "own", sweep_trial(32, 9.0), sweep_trial(64, 1.0))
    with own.writing():
        own.note_spec("sweep", SweepSpec())
    words = words_of(the_plateau(own, 0.93))
    assert "**Batch 32** limited by **feed**" in words
    assert "**Batch 64** limited by **compute**" in words
    assert "](05_why_the_plateau.ipynb) measures it" in words


def test_a_ladder_adds_its_figure_and_its_summit(tmp_path: Path):
    rungs = (rung_trial("article", 10.0, 0), rung_trial("resident", 2.0, 1))
    own = run_in(tmp_path / "own", sweep_trial(32, 9.0), *rungs)
    pieces = the_plateau(own, 0.93)
    assert "**resident** trains 50 images/s, 5.0× the article's loop" in words_of(pieces)
    assert sum(isinstance(piece, FigurePiece) for piece in pieces) == 2


def test_the_knee_is_told_where_several_feeds_were_swept(tmp_path: Path):
    article = [sweep_trial(32, 9.0), sweep_trial(64, 9.0)]
    host = [
        trial.model_copy(update={"feed": "host", "epoch_s": 200.0 / trial.batch_size})
        for trial in article
    ]
    own = run_in(tmp_path / "own", *article, *host, rung_trial("article", 10.0, 0))
    with own.writing():
        own.note_spec("sweep", SweepSpec(device="cpu"))
        own.note_spec("sweep:host", SweepSpec(device="cpu", feed="host"))
    assert "The sweet spot at 93 % of the best is 32 (`article`), 64 (`host`)" in words_of(
        the_plateau(own, 0.93)
    )


def test_a_run_without_a_sweep_has_no_plateau_to_judge(tmp_path: Path):
    assert "holds no measured sweep" in words_of(the_plateau(run_in(tmp_path / "own"), 0.93))


# Remedies, several GPUs


def test_remedies_are_told_against_the_plain_step(tmp_path: Path):
    def remedy(name: str, peak: int, epoch_s: float) -> Trial:
        return Trial(
            kind="remedy", workload="m:net", variant=name, batch_size=8, device="cpu", images=8,
            steps=1, epoch_s=epoch_s, peak_allocated_bytes=peak, feed="synthetic",
            environment_id="here",
        )  # fmt: skip

    own = run_in(
        tmp_path / "own", remedy("plain fp32", 1000, 1.0), remedy("accumulation", 500, 2.0)
    )
    with own.writing():
        own.note_spec("remedy m:net", RemedySpec(workload="m:net", batch_size=8))
    pieces = remedies_and_accumulation(own)
    assert "**accumulation** takes 50 % of the memory at 0.50× the speed" in words_of(pieces)
    (table,) = [piece for piece in pieces if isinstance(piece, TablePiece)]
    assert table.caption == "Remedies for net, batch 8, against plain FP32"


def test_remedies_that_nobody_measured(tmp_path: Path):
    assert "](03_oom_recovery.ipynb) measures it" in words_of(
        remedies_and_accumulation(run_in(tmp_path / "own"))
    )


def test_several_gpus_that_nobody_measured_name_the_command(tmp_path: Path):
    assert "torchrun --nproc-per-node" in words_of(several_gpus(run_in(tmp_path / "own")))


# Finding the size


def test_a_search_is_told_with_every_size_tried(tmp_path: Path):
    own = RunDirectory.create(tmp_path / "own")
    asked = FinderSpec(device="cpu", max_batch_size=4, num_iterations=1, headroom=0.0)
    report = run_finder(asked, own, isolate=False)
    pieces = finding_the_size(own)
    assert "Train **fashion_cnn** with **4** samples a step" in words_of(pieces)
    (table,) = [piece for piece in pieces if isinstance(piece, TablePiece)]
    assert len(table.frame) == len(report.trials)


def test_a_search_that_nobody_ran(tmp_path: Path):
    assert "](04_find_batch_size.ipynb) measures it" in words_of(
        finding_the_size(run_in(tmp_path / "own"))
    )
