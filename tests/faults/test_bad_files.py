"""Results that were damaged at random, and results that were made to do harm."""

import ast
import copy
import csv
import json
import os
import pickle
import pickletools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tally import count

from labhelpers import cli
from labhelpers.comparison import Limits
from labhelpers.comparison_report import judge, write_comparison
from labhelpers.export import export_run
from labhelpers.inputs import InputError
from labhelpers.records import SweepSpec, Trial, ask
from labhelpers.references import curve_of
from labhelpers.store import RUN_FILE, TRIALS_FILE, RunDirectory, open_run
from labhelpers.summary import write_summary

PACKAGE = Path(cli.__file__).parent
H200 = PACKAGE.parent / "results" / "reference" / "h200"


def make(path: Path) -> RunDirectory:
    """A run as a sweep leaves it, small."""
    spec = ask(SweepSpec, {"batch_sizes": [8, 16], "repeats": 2, "device": "cpu"})
    run = RunDirectory.create(path, specs={"sweep": spec})
    with run.writing():
        run.note_environment("e", {
            "device": "cpu", "device_name": "a CPU", "cpu": "a CPU", "torch_threads": 2,
            "packages": {"torch": "2.14.1"},
        })  # fmt: skip
        run.note("a note")
        for number in range(4):
            run.append(Trial(
                kind="sweep", batch_size=8 * 2 ** (number % 2), repeat=number // 2, images=100,
                feed="article", steps=10, epoch_s=1.5, peak_allocated_bytes=2**20,
                environment_id="e", step_times_s=(0.1, 0.2), details={"cpu_of_others": 0.0},
            ))  # fmt: skip
    return run


def use(path: Path, folder: Path) -> None:
    """Read a run in every way there is: trials, curve, summary, export, comparison."""
    run = open_run(path)
    run.trials()
    curve_of(run)
    write_summary(run)
    export_run(run, folder)
    write_comparison(run, [judge(run, run, Limits())], Limits(), folder)


STRANGE = [
    None, True, -1, 0, 10**400, 1e308, -0.0, "", "x" * 300, "\0", "\ud800", [], {}, [[]],
    {"a": {"b": []}}, "../../etc", "None", "nan",
]  # fmt: skip
MUTATIONS = st.integers(0, 2**32)


def places(value: Any) -> list[tuple[Any, Any]]:
    """List every (container, key) within a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], (dict, list)):
            found += places(value[key])
    return found


def strange_json(value: Any, chance: random.Random) -> Any:
    """Put strange values at one to three places of a JSON value, or drop or double them."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        found = places(value)
        if not found:
            break
        container, key = chance.choice(found)
        what = chance.randrange(3)
        if what == 0:
            container[key] = copy.deepcopy(chance.choice(STRANGE))
        elif what == 1:
            del container[key]
        elif isinstance(container, dict):
            container[f"{key}2"] = container[key]
    return value


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Flip, drop, double or insert some bytes of a file."""
    raw = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(raw) + 1)
        part = raw[start : start + chance.randint(1, 40)]
        raw[start : start + len(part)] = chance.choice(
            [b"", part * 2, bytes(chance.randrange(256) for _ in part), b"\n", b"}", b'"', b"9"]
        )
    return bytes(raw)


def damage(path: Path, chance: random.Random) -> None:
    """Damage one of a run's two files, as text or as JSON."""
    file = path / chance.choice([RUN_FILE, TRIALS_FILE])
    if chance.random() < 0.4:
        file.write_bytes(damaged(file.read_bytes(), chance))
    elif file.name == RUN_FILE:
        file.write_text(json.dumps(strange_json(json.loads(file.read_text()), chance)))
    else:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        number = chance.randrange(len(lines))
        lines[number] = strange_json(lines[number], chance)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> dict[str, bytes]:
    run = make(tmp_path_factory.mktemp("pristine") / "run")
    return {name: (run.path / name).read_bytes() for name in (RUN_FILE, TRIALS_FILE)}


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(MUTATIONS)
def test_a_damaged_run_is_read_or_refused_in_one_line(tmp_path, pristine, seed):
    path = tmp_path / "run"
    path.mkdir(exist_ok=True)
    for name, data in pristine.items():
        (path / name).write_bytes(data)
    damage(path, random.Random(seed))
    said = "read"
    try:
        use(path, tmp_path / "out")
    except InputError as error:
        said = str(error)
    assert len(said.splitlines()) == 1
    count("damaged runs read or refused in one line")


def test_an_undamaged_run_is_read(tmp_path):
    use(make(tmp_path / "run").path, tmp_path / "out")
    assert (tmp_path / "out" / "summary.md").exists()


# Results made to do harm

HARMFUL = "cos\nsystem\n(S'touch {mark}'\ntR."


@pytest.mark.parametrize("name", [RUN_FILE, TRIALS_FILE])
def test_a_pickle_is_never_loaded(tmp_path, name):
    run, mark = make(tmp_path / "run"), tmp_path / "mark"
    (run.path / name).write_text(HARMFUL.format(mark=mark))
    with pytest.raises(InputError):
        use(run.path, tmp_path / "out")
    assert not mark.exists()
    pickle.loads((run.path / name).read_bytes())  # it would have worked
    assert mark.exists()


def test_no_file_that_a_run_leaves_is_a_pickle(tmp_path):
    run = make(tmp_path / "run")
    write_summary(run)
    export_run(run)
    files = [file for file in run.path.rglob("*") if file.is_file() and file.stat().st_size]
    assert len(files) == 5
    for file in files:
        assert not is_pickle(file.read_bytes())
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix == ".csv":
            list(csv.reader(file.open()))


def is_pickle(data: bytes) -> bool:
    """Tell whether bytes are whole pickle instructions; none of them is carried out."""
    try:
        list(pickletools.genops(data))
    except ValueError:
        return False
    return True


UNPICKLING = {"worker.py"}  # bytes of our own child process, never a file
DANGEROUS = {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize("module", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_no_module_unpickles_or_evaluates(module):
    for node in ast.walk(ast.parse(module.read_text())):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in DANGEROUS
        assert called not in ("pickle.load", "pickle.loads", "torch.load", "joblib.load")
        assert called != "cloudpickle.loads" or module.name in UNPICKLING


def test_a_run_that_names_code_runs_it_only_if_a_person_says_so(tmp_path, monkeypatch):
    mark, code = tmp_path / "mark", tmp_path / "harm.py"
    run = RunDirectory.create(tmp_path / "run", specs={"sweep": SweepSpec(device="cpu")})
    code.write_text(f"open({str(mark)!r}, 'w')\n")
    facts = json.loads((run.path / RUN_FILE).read_text())
    facts["specs"]["sweep"] |= {"workload": f"{code}:harm", "feed": "own"}
    (run.path / RUN_FILE).write_text(json.dumps(facts))
    command = [sys.executable, "-m", "labhelpers", "resume", str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"labhelpers: this run measures code of its own, {code}:harm; if you trust it: labhelpers "
        f"resume {run.path} --workload {code}:harm\n"
    )
    assert not mark.exists()
    trusted = subprocess.run(
        [*command, "--workload", f"{code}:harm"], capture_output=True, text=True, check=False
    )
    assert trusted.returncode in (1, 2), trusted.stderr
    assert mark.exists()


@pytest.mark.parametrize("name", [RUN_FILE, TRIALS_FILE, ".lock"])
def test_a_link_in_a_run_is_never_written_through(tmp_path, name):
    run, outside = make(tmp_path / "run"), tmp_path / "outside"
    (run.path / name).replace(outside)
    (run.path / name).symlink_to(outside)
    before = outside.read_bytes()
    with pytest.raises(InputError) as caught, open_run(run.path).writing():
        raise AssertionError("written through a link")
    assert str(caught.value) == (
        f"{run.path / name} is a link; a run is written within its directory only"
    )
    assert outside.read_bytes() == before


def test_names_in_a_run_never_lead_out_of_its_directory(tmp_path):
    run = make(tmp_path / "a" / "run")
    facts = json.loads((run.path / RUN_FILE).read_text())
    facts |= {"run_id": "../../escaped", "notes": ["../../escaped"]}
    facts["environments"] = {"../../escaped": facts["environments"]["e"]}
    (run.path / RUN_FILE).write_text(json.dumps(facts))
    before = set(tmp_path.rglob("*"))
    write_summary(open_run(run.path))
    export_run(open_run(run.path))
    with open_run(run.path).writing() as opened:
        opened.note("one more")
    made = set(tmp_path.rglob("*")) - before
    assert made
    assert all(path.is_relative_to(run.path) for path in made)


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_at_once(tmp_path, kind):
    run = make(tmp_path / "run")
    for name in (TRIALS_FILE, RUN_FILE):
        (run.path / name).unlink()
        os.mkfifo(run.path / name) if kind == "pipe" else (run.path / name).mkdir()
        with pytest.raises(InputError) as caught:
            open_run(run.path).trials()
        assert str(caught.value) == f"{run.path / name} is not a regular file: not a run"


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero here")
def test_a_link_to_a_device_without_end_is_refused(tmp_path):
    run = make(tmp_path / "run")
    (run.path / TRIALS_FILE).unlink()
    (run.path / TRIALS_FILE).symlink_to("/dev/zero")
    with pytest.raises(InputError, match="is not a regular file"):
        run.trials()


def test_the_committed_run_survives_every_cut_of_its_request(tmp_path):
    facts = json.loads((H200 / RUN_FILE).read_text())
    (tmp_path / TRIALS_FILE).write_bytes((H200 / TRIALS_FILE).read_bytes())
    for name in facts["specs"]["sweep"]:
        less = copy.deepcopy(facts)
        del less["specs"]["sweep"][name]  # as an older version that did not know it wrote it
        (tmp_path / RUN_FILE).write_text(json.dumps(less))
        assert curve_of(open_run(tmp_path)) is not None
