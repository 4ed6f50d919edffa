"""A notebook's variables become a request; the run it writes to and reads from."""

import pytest

from labhelpers.inputs import InputError
from labhelpers.notebooks import (
    RUN_VARIABLE,
    read_parameters,
    run_for_measuring,
    run_for_report,
)
from labhelpers.records import SweepSpec, Trial
from labhelpers.store import RunDirectory, find_runs

# What a notebook's globals() holds besides the parameters.
SHELL = {
    "__name__": "__main__", "_": "", "_i1": "x", "In": [""], "Out": {}, "exit": object(),
    "quit": object(), "open": open, "pytest": pytest, "SweepSpec": SweepSpec,
}  # fmt: skip


def read(*sources: str, **names: object) -> SweepSpec:
    return read_parameters(SweepSpec, SHELL | {"In": ["", *sources]} | names)


def refusal(*sources: str, **names: object) -> str:
    with pytest.raises(InputError) as caught:
        read(*sources, **names)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_notebooks_variables_are_the_request():
    spec = read(batch_sizes="[32, 64]", repeats=2.0, device="cpu", run_dir="x", quick="false")
    assert (spec.batch_sizes, spec.repeats, spec.device, spec.quick) == ((32, 64), 2, "cpu", False)
    assert read() == SweepSpec()


def test_a_bad_value_is_one_line():
    assert refusal(repeats=0) == "repeats: got 0; must be greater than or equal to 1"


@pytest.mark.parametrize(
    ("name", "near"),
    [("batch_size", "batch_sizes"), ("repeat", "repeats"), ("learningrate", "learning_rate"),
     ("run_dirs", "run_dir"), ("devices", "device")],
)  # fmt: skip
def test_a_misspelt_name_stops_whoever_set_it(name, near):
    for source in ("", f"# Parameters\n{name} = 3\n"):
        said = refusal(source, **{name: 3})
        assert said.startswith(f"unknown parameter {name!r}; did you mean {near!r}? (allowed: ")


def test_an_injected_name_that_is_like_no_other_stops_too():
    assert refusal("# Parameters\nxyzzy = 3\n", xyzzy=3).startswith(
        "unknown parameter 'xyzzy' (allowed: batch_sizes, "
    )


def test_a_variable_of_ones_own_that_is_like_no_parameter_is_no_parameter():
    assert read("total = 3", total=3, words=["a"], helper=None) == SweepSpec()


def test_injected_parameters_that_are_known_pass():
    source = "# Parameters\nbatch_sizes = '[8]'\nrun_dir = 'out'\n"
    assert read(source, batch_sizes="[8]", run_dir="out").batch_sizes == (8,)


# Runs


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    return tmp_path / "results"


def measured(path) -> RunDirectory:
    run = RunDirectory.create(path)
    with run.writing():
        run.append(Trial(kind="sweep", batch_size=8, images=8, steps=1, epoch_s=1.0))
    return run


def test_a_measuring_notebook_makes_a_run_or_goes_on_in_the_newest(results):
    first = run_for_measuring("", results_dir=str(results), fresh=False, synthetic=True)
    assert first.info.synthetic
    assert find_runs(results) == [first.path]
    again = run_for_measuring("", results_dir=str(results), fresh=False)
    assert again.path == first.path
    fresh = run_for_measuring("", results_dir=str(results), fresh=True)
    assert fresh.path != first.path


def test_a_named_run_is_opened_or_made(results, monkeypatch):
    named = run_for_measuring(str(results / "mine"), fresh=True)
    assert run_for_measuring(str(results / "mine"), fresh=True).path == named.path
    monkeypatch.setenv(RUN_VARIABLE, str(results / "other"))
    assert run_for_measuring("", results_dir=str(results), fresh=False).path.name == "other"
    assert run_for_measuring(str(results / "mine"), fresh=False).path.name == "mine"


def test_the_report_is_about_the_newest_run_that_holds_a_sweep(results):
    measured(results / "a")
    RunDirectory.create(results / "empty")
    run, own, curves = run_for_report("", results_dir=str(results))
    assert run.path.name == "a"
    assert list(own.table["batch_size"]) == [8]
    assert [curve.reference for curve in curves][:2] == [False, True]


def test_a_named_run_without_a_sweep_or_without_anything_is_bad_input(results):
    RunDirectory.create(results / "empty")
    with pytest.raises(InputError, match="holds no measured sweep; run notebook 01 first"):
        run_for_report(str(results / "empty"))
    with pytest.raises(InputError, match=r"holds no run \(no run.json\)"):
        run_for_report(str(results / "nowhere"))
