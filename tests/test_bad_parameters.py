"""Every parameter of every notebook and command, with bad values and the exact answer.

The rows are made from the specs themselves: a field that is added gets its rows by its type. A
type without bad values here fails the test that asks for them.
"""

import re
import types
import typing
from typing import Any, Literal, NamedTuple

import annotated_types
import nbformat
import pytest
from pydantic import BeforeValidator
from tally import count

from labhelpers import cli, inputs, records, specs
from labhelpers.inputs import InputError
from labhelpers.records import ask
from labhelpers.references import PROJECT
from labhelpers.specs import Spec
from labhelpers.store import RunDirectory

SPECS = [kind for kind in vars(specs).values() if isinstance(kind, type) and issubclass(kind, Spec)]
NOTEBOOKS = sorted((PROJECT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
NOT_A_SIZE = "is not a batch size; each must be a whole number from 1 to 2,147,483,647"
EMPTY = "the batch list is empty; give at least one size, for example [32, 256]"
NO_SHAPE = "must be whole numbers from 1, for example 3,224,224"
NO_NAMES = "must be names with commas between them"
NO_TEXT = "must be text that is not empty"
NO_TRUTH = "must be true or false"

BAD: dict[Any, list[tuple[Any, str]]] = {
    inputs.to_boolean: [("perhaps", NO_TRUTH), (2, NO_TRUTH), ([], NO_TRUTH), ("", NO_TRUTH)],
    inputs.to_text: [("", NO_TEXT), ("a\0b", NO_TEXT), (7, NO_TEXT), (["a"], NO_TEXT)],
    inputs.to_sizes: [
        ([], EMPTY), ("[0]", f"0 {NOT_A_SIZE}"), ([-1], f"-1 {NOT_A_SIZE}"),
        ("abc", f"'abc' {NOT_A_SIZE}"), ([2.5], f"2.5 {NOT_A_SIZE}"), (True, f"True {NOT_A_SIZE}"),
    ],
    inputs.to_shape: [("0,1", NO_SHAPE), ("wide", NO_SHAPE), ([], NO_SHAPE), ([1.5], NO_SHAPE)],
    inputs.to_names: [(7, NO_NAMES), ([], NO_NAMES), ({"a": 1}, NO_NAMES)],
    inputs.to_integer: [
        ("many", "must be a number"), (1.5, "must be a whole number"), (True, "must be a number"),
        ("nan", "must be a finite number"), ([3], "must be a number"),
    ],
    inputs.to_number: [
        ("much", "must be a number"), (True, "must be a number"),
        ("inf", "must be a finite number"), ([0.5], "must be a number"),
    ],
    inputs.to_share: [
        ("much", "must be a number"), (True, "must be a number"), ("much%", "must be a number"),
        ("inf", "must be a finite number"), ([0.5], "must be a number"), ("%", "must be a number"),
    ],
    inputs.to_repeats: [
        ("many", "must be a number"), (1.5, "must be a whole number"),
        (0, "must be greater than or equal to 1"), (1001, "must be less than or equal to 1000"),
    ],
}  # fmt: skip


class Row(NamedTuple):
    """A bad value for a field of a spec, and what is said of it."""

    spec: type[Spec]
    field: str
    value: Any
    said: str


def parts(annotation: Any, metadata: list[Any]) -> list[Any]:
    """Return what an annotation and its metadata are made of, None and unions taken apart."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *more = typing.get_args(annotation)
        return parts(inner, [*more, *metadata])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        given = [arg for arg in typing.get_args(annotation) if arg is not types.NoneType]
        if len(given) == 1:
            return parts(given[0], metadata)
    return [annotation, *metadata]


def bounds(found: list[Any]) -> list[tuple[Any, str]]:
    """Return values just past the bounds among the parts, and what is said of them."""
    bad: list[tuple[Any, str]] = []
    for part in [inner for each in found for inner in getattr(each, "metadata", [each])]:
        if isinstance(part, annotated_types.Ge):
            bad.append((part.ge - 1, f"must be greater than or equal to {part.ge}"))
        elif isinstance(part, annotated_types.Gt):
            bad.append((part.gt, f"must be greater than {part.gt}"))
        elif isinstance(part, annotated_types.Le):
            bad.append((part.le + 1, f"must be less than or equal to {part.le}"))
        elif isinstance(part, annotated_types.Lt):
            bad.append((part.lt, f"must be less than {part.lt}"))
    return bad


def bad_values(spec: type[Spec], field: str) -> list[tuple[Any, str]]:
    """Return bad values of a field with what is said of each."""
    info = spec.model_fields[field]
    found = parts(info.annotation, info.metadata)
    if typing.get_origin(found[0]) is Literal:
        *names, last = [repr(name) for name in typing.get_args(found[0])]
        said = f"must be {', '.join(names)} or {last}"
        return [("nonsense", said), (7, said), ("", said), (None, said)]
    for part in found:
        if isinstance(part, BeforeValidator) and part.func in BAD:
            return BAD[part.func] + bounds(found)
    return []


ROWS = [
    Row(spec, field, value, said)
    for spec in SPECS
    for field in spec.model_fields
    for value, said in bad_values(spec, field)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.spec.__name__}-{r.field}-{r.value!r}"[:60])
def test_a_bad_value_is_answered_exactly(row):
    with pytest.raises(InputError) as caught:
        ask(row.spec, {row.field: row.value})
    assert str(caught.value) == f"{row.field}: got {row.value!r}; {row.said}"
    count("bad values of parameters answered exactly")


def test_there_are_rows_for_every_field():
    assert len(ROWS) >= 120
    missing = {
        f"{spec.__name__}.{field}"
        for spec in SPECS
        for field in spec.model_fields
        if not bad_values(spec, field)
    }
    assert missing == set(), "add bad values for the new type to BAD"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.__name__)
def test_a_required_value_that_is_nothing_and_a_wrong_name(spec):
    with pytest.raises(InputError) as caught:
        ask(spec, {"device": None})
    assert str(caught.value) == f"device: got None; {NO_TEXT}"
    with pytest.raises(InputError) as caught:
        ask(spec, {"devise": "cpu"})
    assert str(caught.value).startswith("unknown parameter 'devise': did you mean 'device'? (allo")
    count("bad values of parameters answered exactly", 2)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_parameter_of_a_notebook_is_a_field_with_rows(notebook):
    cells = [c for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code"]
    (tagged,) = [c.source for c in cells if "parameters" in c.metadata.get("tags", [])]
    names = set(re.findall(r"^(\w+)\s*:", tagged, re.M)) - {"run_dir", "results_dir"}
    asked = re.findall(r"(?:read_parameters|ask)\((\w+)", "\n".join(c.source for c in cells))
    kinds = [getattr(records, name) for name in asked] or [records.SweepSpec]
    known = {row.field for row in ROWS if row.spec in kinds}
    assert names <= known
    assert names


# Commands: what is not a field of a spec


DEVICE = "device: got 'tpu'; must be 'auto', 'cpu', 'cuda' or 'cuda:N'"
NO_RUN = "nowhere holds no run (no run.json)"
COMMANDS = [
    ("data --nowhere x", "No such option '--nowhere'."),
    ("data --synthetic=yes", "Option '--synthetic' does not take a value."),
    ("data more", "Got unexpected extra argument (more)"),
    ("sweep --device tpu", DEVICE),
    ("sweep --repeats", "Option '--repeats' requires an argument."),
    ("sweep --feed own", "feed: got 'own'; FashionMNIST needs 'article', 'workers', 'host' or "
     "'resident'"),
    ("sweep --images 60001", "images: got 60,001; FashionMNIST has 60,000 training images"),
    ("sweep --accumulation 4", "accumulation: got '4'; a sweep on one device has one update per "
     "batch, only one under torchrun accumulates"),
    ("report --device tpu", DEVICE),
    ("report --cell-timeout-s 0", "--cell-timeout-s: got '0'; must be a number of seconds above 0"),
    ("report --cell-timeout-s long",
     "--cell-timeout-s: got 'long'; must be a number of seconds above 0"),
    ("report --figure a.pdf", "--figure: got 'a.pdf'; must be the name of a .png file"),
    ("report --figure no/a.png",
     "--figure: the folder of 'no/a.png' cannot be written; choose another"),
    ("report -p repeats", "--parameter: got 'repeats'; must be NAME=VALUE"),
    ("report -p =3", "--parameter: got '=3'; must be NAME=VALUE"),
    ("resume", "Missing argument 'RUN_DIR'."),
    ("resume nowhere", NO_RUN),
    ("resume empty", "empty has no sweep to continue; start one with: labhelpers sweep"),
    ("export", "Missing argument 'RUN_DIR'."),
    ("export nowhere", NO_RUN),
    ("export empty --output file", "cannot write to file: File exists"),
    ("compare", "Missing argument 'BASELINE'."),
    ("compare empty", "Missing argument 'RUN...'."),
    ("compare nowhere empty", NO_RUN),
    ("compare empty empty", "empty holds no measured sweep; run labhelpers sweep first"),
    ("compare empty empty --max-slowdown 5",
     "--max-slowdown: got '5'; must be a share from 0 on, such as 5% or 0.05"),
    ("compare empty empty --max-memory -1%",
     "--max-memory: got '-1%'; must be a share from 0 on, such as 5% or 0.05"),
    ("doctor --device tpu", DEVICE),
    ("doctor --devise cpu", "No such option '--devise'. Did you mean '--device'?"),
    ("find", "Missing argument 'MODEL'."),
    ("find x:y --limit much", "--limit: got 'much'; must be such as 8GiB, 512MiB or bytes"),
    ("find x:y --effective none", "--effective: got 'none'; must be a whole number of at least 1"),
    ("find x:y --input 0,1", f"input_shape: got '0,1'; {NO_SHAPE}"),
    ("find x:y --headroom 1", "headroom: got '1'; must be less than 1"),
    ("find x:y --headroom 100%", "headroom: got '100%'; must be less than 1"),
    ("find x:y --headroom 10", "headroom: got '10'; must be less than 1"),
    ("sweep --share 110%", "share: got '110%'; must be less than or equal to 1"),
    ("swep", "No such command 'swep'. Did you mean 'sweep'?"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "said"), COMMANDS, ids=[row[0] for row in COMMANDS])
def test_a_bad_command_is_answered_in_one_line(call, tmp_path, command, said):
    RunDirectory.create(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    assert call(*command.split()) == (2, "", f"labhelpers: {said}\n")
    count("bad commands answered exactly")


def test_every_command_has_a_row():
    assert {command.split()[0] for command, _ in COMMANDS} - {"swep"} == set(cli.group.commands)
