"""Files that are damaged, foreign, newer or huge: read, or refused in one line."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from labhelpers import files
from labhelpers.inputs import InputError
from labhelpers.records import SCHEMA_VERSION, Trial
from labhelpers.store import (
    RUN_FILE,
    TRIALS_FILE,
    RunDirectory,
    find_runs,
    new_run_path,
    open_run,
    read_trials,
)

TRIALS = [Trial(kind="sweep", batch_size=8 * 2**n, epoch_s=1.5) for n in range(3)]


def refusal(path: Path) -> str:
    """What reading a run directory says; always one line."""
    with pytest.raises(InputError) as caught:
        open_run(path).trials()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Files that are not ours


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", " is not valid JSON: Expecting value"),
        ("null", " is not a results file of labhelpers (no schema_version)"),
        ("[1]", " is not a results file of labhelpers (no schema_version)"),
        ('{"results": 1}', " is not a results file of labhelpers (no schema_version)"),
        ('{"schema_version": 1}', ": labhelpers_version: got {'schema_version': 1}; Field req"),
        ('{"a": 1, "a": 2}', " is not valid JSON: the key 'a' stands twice"),
        ('{"a": NaN}', " is not valid JSON: NaN is not allowed"),
        ('{"a": [-Infinity]}', " is not valid JSON: -Infinity is not allowed"),
        ("[" * 100_000, " is not valid JSON: "),
        ('{"schema_version": ' + "9" * 5000 + "}", " is not valid JSON: "),
        ("\xff\x00", " is not valid JSON: "),
    ],
)  # fmt: skip
def test_a_results_file_that_is_not_ours_is_refused(tmp_path, text, said):
    file = tmp_path / RUN_FILE
    file.write_text(text, encoding="utf-8")
    assert refusal(tmp_path).startswith(f"{file}{said}")


def test_a_newer_results_file_is_refused_and_an_older_one_loads(run):
    file = run.path / RUN_FILE
    facts = json.loads(file.read_text())
    file.write_text(json.dumps(facts | {"schema_version": SCHEMA_VERSION + 1, "new": []}))
    assert refusal(run.path) == (
        f"{file}: schema version {SCHEMA_VERSION + 1} is newer than this program knows "
        f"({SCHEMA_VERSION}); update labhelpers"
    )
    file.write_text(json.dumps(facts | {"schema_version": SCHEMA_VERSION - 1}))
    assert open_run(run.path).trials() == TRIALS


def test_no_run_binary_files_and_huge_files_are_refused(tmp_path, run):
    assert refusal(tmp_path) == f"{tmp_path} holds no run (no {RUN_FILE})"
    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'} holds no run (no {RUN_FILE})"
    assert refusal(run.path / RUN_FILE) == f"{run.path / RUN_FILE} holds no run (no {RUN_FILE})"
    trials = run.path / TRIALS_FILE
    trials.write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    assert refusal(run.path) == f"{trials} is not text: it is binary or damaged"
    os.truncate(trials, 10**12)  # a sparse file: nobody has to store it, nobody may read it
    assert refusal(run.path) == f"{trials} is larger than 536,870,912 bytes: not a run"
    with pytest.raises(InputError, match="is larger than"), run.writing():
        raise AssertionError("a file of a terabyte was repaired")
    os.truncate(run.path / RUN_FILE, 10**12)
    assert "is larger than" in refusal(run.path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[]", "not a trial (a JSON object is expected)"),
        ('{"kind": "sweep"}', "batch_size: got {'kind': 'sweep'}; Field required"),
        ('{"kind": "sweep", "batch_size": 8, "epoch_s": 1e999}',
         "epoch_s: got inf; must be a finite number"),
        ('{"kind": "sweep", "batch_size": 8, "colour": 1}',
         "colour: got 1; Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_trial_is_refused_with_its_number(run, line, said):
    with open(run.path / TRIALS_FILE, "a") as stream:
        stream.write(line + "\n")
    assert refusal(run.path) == f"{run.path / TRIALS_FILE} line 4: {said}"


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
SOME_FIELDS = st.dictionaries(st.sampled_from(sorted(Trial.model_fields)), ANY_JSON)
LINES = st.lists(SOME_FIELDS | ANY_JSON, max_size=4).map(
    lambda values: "\n".join(json.dumps(value) for value in values).encode()
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary() | LINES)
@example(b"\xff\xfe{\x00}\x00")
@example(b'{"kind": "sweep", "batch_size": 8}')
@example(b'{"kind": "sweep", "batch_size": true, "details": {"a": 1}}\n')
def test_any_bytes_are_trials_or_one_line(tmp_path, data):
    file = tmp_path / TRIALS_FILE
    file.write_bytes(data)
    try:
        found, said = list(read_trials(file)), ""
    except InputError as error:
        found, said = [], str(error)
    assert all(isinstance(trial, Trial) for trial in found)
    assert len(said.splitlines()) <= 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary() | LINES)
@example(b'{"schema_version": true, "specs": 5}')
def test_any_bytes_are_a_run_or_one_line(tmp_path, data):
    (tmp_path / RUN_FILE).write_bytes(data)
    with pytest.raises(InputError) as caught:
        open_run(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


# Where runs lie


def test_own_runs_are_found_oldest_first_without_references_and_foreign_files(tmp_path):
    for name, created in (("b", "2026-01-02"), ("a", "2026-01-03"), ("c", "2026-01-01")):
        made = RunDirectory.create(tmp_path / name)
        info = made.info.model_copy(update={"created_at": created})
        files.write_atomically(made.path / RUN_FILE, info.model_dump_json())
    RunDirectory.create(tmp_path / "reference" / "h200")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / RUN_FILE).write_text("{}")
    assert [path.name for path in find_runs(tmp_path)] == ["c", "b", "a"]
    assert find_runs(tmp_path / "none") == []


def test_a_new_run_never_takes_the_name_of_another(tmp_path):
    made = [RunDirectory.create(new_run_path(tmp_path)).path for _ in range(3)]
    assert len(set(made)) == 3


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "a.json"
    files.write_atomically(file, "old")
    with pytest.raises(TypeError):
        files.write_atomically(file, b"bytes are no text")
    assert file.read_text() == "old\n"
    files.write_atomically(file, "new ×")
    assert file.read_text(encoding="utf-8") == "new ×\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert file.stat().st_mode & 0o777 == 0o644
