"""What was asked and what was seen: exact lines for bad input, and records that travel."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from labhelpers.inputs import InputError
from labhelpers.records import (
    SCHEMA_VERSION,
    FinderSpec,
    ProbeSpec,
    RunInfo,
    Spec,
    SweepSpec,
    Trial,
    ask,
    refuse_unknown_names,
)

ALLOWED = ", ".join(sorted(SweepSpec.model_fields))


def refusal(spec: type[Spec] = SweepSpec, /, **given: object) -> str:
    """What `ask` says of a bad request; always one line."""
    with pytest.raises(InputError) as caught:
        ask(spec, given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [  # what papermill really hands over: text, truthy 'false', floats (cases 35)
        ("batch_sizes", "[256, 512]", (256, 512)),
        ("batch_sizes", [64.0, "128"], (64, 128)),
        ("batch_sizes", None, None),
        ("batch_sizes", "None", None),
        ("batch_sizes", "auto", None),
        ("repeats", 3.0, 3),
        ("repeats", "None", None),
        ("images", "4096", 4096),
        ("quick", "false", False),
        ("synthetic", "True", True),
        ("require_gpu", "no", False),
        ("learning_rate", "1e-3", 1e-3),
        ("share", "0.95", 0.95),
        ("seed", "9223372036854775807", 2**63 - 1),
        ("workers", 0, 0),
        ("trial_timeout_s", "90", 90.0),
        ("data_dir", " data ", "data"),
    ],
)
def test_what_papermill_hands_over_is_converted(name, value, kept):
    asked = getattr(ask(SweepSpec, {name: value}), name)
    assert asked == kept
    assert type(asked) is type(kept)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("batch_sizes", [], "got []; the batch list is empty; give at least one size, for "
         "example [32, 256]"),
        ("batch_sizes", "[0]", "got '[0]'; 0 is not a batch size; each must be a whole number "
         "from 1 to 2,147,483,647"),
        ("batch_sizes", [-1], "got [-1]; -1 is not a batch size; each must be a whole number "
         "from 1 to 2,147,483,647"),
        ("batch_sizes", [2.5], "got [2.5]; 2.5 is not a batch size; each must be a whole number "
         "from 1 to 2,147,483,647"),
        ("batch_sizes", "abc", "got 'abc'; 'abc' is not a batch size; each must be a whole "
         "number from 1 to 2,147,483,647"),
        ("repeats", 0, "got 0; must be greater than or equal to 1"),
        ("repeats", 10**6, "got 1000000; must be less than or equal to 1000"),
        ("repeats", 64.5, "got 64.5; must be a whole number"),
        ("images", 0, "got 0; must be greater than or equal to 1"),
        ("images", "many", "got 'many'; must be a number"),
        ("precision", "fp8", "got 'fp8'; must be 'fp32', 'tf32', 'bf16' or 'fp16'"),
        ("feed", "tape", "got 'tape'; must be 'article', 'workers', 'host', 'resident' or 'own'"),
        ("order", "up", "got 'up'; must be 'article', 'ascending', 'descending' or 'shuffled'"),
        ("seed", -1, "got -1; must be greater than or equal to 0"),
        ("seed", 2**63, f"got {2**63}; must be less than or equal to {2**63 - 1}"),
        ("workers", -1, "got -1; must be greater than or equal to 0"),
        ("workers", 10_000, "got 10000; must be less than or equal to 256"),
        ("share", 0, "got 0; must be greater than 0"),
        ("share", 93, "got 93; must be less than or equal to 1"),
        ("share", "nan", "got 'nan'; must be a finite number"),
        ("learning_rate", 0, "got 0; must be greater than 0"),
        ("learning_rate", True, "got True; must be a number"),
        ("trial_timeout_s", 0, "got 0; must be greater than 0"),
        ("quick", "perhaps", "got 'perhaps'; must be true or false"),
        ("quick", None, "got None; must be true or false"),
        ("device", "", "got ''; must be text that is not empty"),
        ("device", 7, "got 7; must be text that is not empty"),
        ("data_dir", None, "got None; must be text that is not empty"),
    ],
)  # fmt: skip
def test_a_bad_value_is_one_line_with_field_value_and_what_is_allowed(name, value, said):
    assert refusal(**{name: value}) == f"{name}: {said}"


def test_every_bad_field_is_named():
    assert refusal(repeats=0, share=2) == (
        "repeats: got 0; must be greater than or equal to 1; "
        "share: got 2; must be less than or equal to 1"
    )


def test_a_long_value_is_cut_in_the_line():
    said = refusal(device=["x" * 5000])
    assert said.startswith("device: got ['xxx")
    assert "...; must be text" in said
    assert len(said) < 200


def test_a_number_that_python_cannot_print_is_refused_too():
    assert refusal(repeats=10**5000) == "repeats: got <int>; must be a number"


@pytest.mark.parametrize(
    ("name", "near"),
    [("batch_size", "batch_sizes"), ("repeat", "repeats"), ("lr", None), ("learning_rat",
     "learning_rate"), ("devise", "device"), ("BATCH_SIZES", None), ("shared", "share")],
)  # fmt: skip
def test_a_misspelt_name_is_refused_with_the_nearest_right_one(name, near):
    hint = f"did you mean {near!r}? " if near else ""
    assert refusal(**{name: 1}) == f"unknown parameter {name!r}: {hint}(allowed: {ALLOWED})"


def test_a_name_that_is_no_text_is_refused_too():
    with pytest.raises(InputError, match=r"unknown parameter 5: \(allowed: a\)"):
        refuse_unknown_names([5], ["a"])
    assert refuse_unknown_names(["a"], ["a", "b"]) is None


@pytest.mark.parametrize("kind", [SweepSpec, ProbeSpec, FinderSpec])
def test_specs_are_frozen_and_have_defaults(kind):
    spec = ask(kind, {})
    assert (spec.device, spec.precision, spec.seed, spec.learning_rate) == (
        "auto",
        "fp32",
        42,
        1e-3,
    )
    with pytest.raises(ValidationError):
        spec.seed = 1
    assert kind(**json.loads(spec.model_dump_json())) == spec


def test_the_finders_own_fields_are_checked_too():
    assert refusal(FinderSpec, headroom=1) == "headroom: got 1; must be less than 1"
    assert refusal(FinderSpec, strategy="guess").startswith("strategy: got 'guess'; must be")


# What was seen


def test_rates_are_derived_from_what_was_measured():
    trial = Trial(kind="sweep", batch_size=4096, images=60_000, steps=15, epoch_s=10.0)
    assert trial.images_per_s == 6000  # not 6,144: the last batch is short (case 27)
    assert trial.mean_step_s == pytest.approx(10 / 15)


@pytest.mark.parametrize(
    "facts",
    [{}, {"images": 10}, {"epoch_s": 1.0}, {"images": 0, "epoch_s": 1.0, "steps": 0},
     {"images": 10, "steps": 1, "epoch_s": 0.0},
     {"images": 10, "steps": 1, "epoch_s": 1.0, "outcome": "timeout"}],
)  # fmt: skip
def test_what_was_not_measured_has_no_rate(facts):
    trial = Trial(kind="sweep", batch_size=8, **facts)
    assert trial.images_per_s is None
    assert not trial.mean_step_s


def test_a_trial_says_nothing_of_what_was_not_measured():
    assert json.loads(Trial(kind="sweep", batch_size=8).model_dump_json(exclude_none=True)) == {
        "kind": "sweep", "workload": "fashion_cnn", "batch_size": 8, "repeat": 0, "position": 0,
        "precision": "fp32", "device": "cpu", "rank": 0, "world_size": 1, "synthetic": False,
        "outcome": "ok",
    }  # fmt: skip


@pytest.mark.parametrize(
    "facts",
    [{"batch_size": 0}, {"kind": "dream"}, {"outcome": "fine"}, {"colour": "red"},
     {"epoch_s": math.nan}, {"epoch_s": math.inf}, {"step_times_s": [math.nan]}],
)  # fmt: skip
def test_an_impossible_trial_is_refused(facts):
    with pytest.raises(ValidationError):
        Trial(**{"kind": "sweep", "batch_size": 8} | facts)


NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.integers(1, 2**31 - 1), st.integers(0, 99), NUMBERS,
    st.none() | st.text(st.characters(codec="utf-8")), st.none() | st.lists(st.floats(0, 1e9)),
)  # fmt: skip
def test_a_trial_survives_the_way_to_disk_and_back(size, repeat, epoch_s, text, times):
    trial = Trial(
        kind="sweep", batch_size=size, repeat=repeat, epoch_s=epoch_s, error_text=text,
        step_times_s=times, details={"text": text},
    )  # fmt: skip
    again = Trial(**json.loads(trial.model_dump_json(exclude_none=True)))
    assert again.model_dump(exclude={"details"}) == trial.model_dump(exclude={"details"})
    assert again.key == trial.key


def test_a_key_names_one_trial_of_a_run():
    same = {"kind": "sweep", "batch_size": 8, "repeat": 1, "epoch_s": 1.0}
    assert Trial(**same).key == Trial(**same | {"epoch_s": 2.0, "position": 5}).key
    others = (
        {"repeat": 2}, {"batch_size": 16}, {"precision": "bf16"}, {"feed": "host"}, {"rank": 1},
        {"variant": "x"}, {"kind": "probe"}, {"workload": "mine:net"}, {"world_size": 2},
    )  # fmt: skip
    for other in others:
        assert Trial(**same).key != Trial(**same | other).key


# Versions

FACTS = {"labhelpers_version": "0.0.1", "run_id": "a", "created_at": "2020-01-01T00:00:00+00:00"}


def test_an_older_version_still_loads():
    assert RunInfo(schema_version=SCHEMA_VERSION - 1, **FACTS).schema_version == 0
    assert RunInfo(**FACTS).schema_version == SCHEMA_VERSION


def test_a_newer_version_is_refused_first_whatever_else_is_new_in_it():
    with pytest.raises(ValidationError, match="is newer than this program knows"):
        RunInfo(schema_version=SCHEMA_VERSION + 1, **FACTS, field_of_the_future=[1])
