"""The project itself: light imports, equal lists of packages, small modules, tidy notebooks."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml

import labhelpers

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "labhelpers").glob("*.py"))
NOTEBOOKS = sorted(p for p in (ROOT / "notebooks").glob("*.ipynb") if ".partial" not in p.name)
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("torch", "matplotlib", "ipywidgets", "pydantic", "pandas", "numpy", "papermill", "IPython")


def name_of(requirement: str) -> str:
    """The package of a requirement, as registries compare names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def tree_of(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"))


# Importing


def loaded_by(code: str) -> set[str]:
    show = f"{code}; import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", show], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_nothing_heavy():
    # How long it takes is printed by benchmarks/import_time.py: a timed test would only be noise.
    assert not loaded_by("import labhelpers").intersection(HEAVY)


@pytest.mark.parametrize("module", ["cli", "records", "store", "worker", "sweep", "verdicts"])
def test_what_the_parent_imports_loads_no_torch(module):
    loaded = loaded_by(f"import labhelpers.{module}")
    assert not loaded.intersection({"torch", "ipywidgets", "IPython"})


def test_every_public_name_is_there_and_others_are_not():
    for name in labhelpers.__all__:
        assert getattr(labhelpers, name) is not None
    assert set(dir(labhelpers)) == set(labhelpers.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = labhelpers.nothing
    assert PYPROJECT["project"]["version"] == labhelpers.__version__


# Packages


def requirements() -> list[str]:
    project = PYPROJECT["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["test"]]


def test_the_conda_file_asks_for_the_same_packages():
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert content["channels"][0] == "conda-forge"
    *conda, pip = content["dependencies"]
    assert conda == [f"python{PYPROJECT['project']['requires-python']}", "pip"]
    options = [line for line in pip["pip"] if line.startswith("-")]
    assert options == ["--constraint constraints.txt", "--editable ."]
    assert [line for line in pip["pip"] if not line.startswith("-")] == requirements()


def test_the_constraints_pin_exactly_one_version_of_everything_that_is_asked_for():
    lines = (ROOT / "constraints.txt").read_text().split("\n")
    pins = [line for line in lines if line.strip() and not line.startswith("#")]
    for pin in pins:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", pin), pin
    names = [name_of(pin) for pin in pins]
    assert len(names) == len(set(names))
    assert {name_of(each) for each in requirements()} <= set(names)


# Modules


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_modules_and_functions_stay_small_and_say_what_they_are(module):
    tree = tree_of(module)
    assert len(module.read_text(encoding="utf-8").splitlines()) <= 300
    assert ast.get_docstring(tree), "a module says in its first line what it is for"
    for function in functions_of(tree):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= 45, f"{function.name} has {length} lines"


def imports_of(module: Path) -> set[str]:
    """The labhelpers modules that a module imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and node.module == "labhelpers":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labhelpers."):
            names.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("labhelpers.")}
    return names & {path.stem for path in MODULES}


def test_imports_point_one_way():
    waiting = {module.stem: imports_of(module) for module in MODULES if module.stem != "__init__"}
    while waiting:
        free = {name for name, needs in waiting.items() if not needs & set(waiting)}
        assert free, f"these import each other: {waiting}"
        waiting = {name: needs for name, needs in waiting.items() if name not in free}


# Notebooks


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_as_the_house_wants_it(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert notebook.cells[0].source.startswith("# ")
    for cell in code_cells(notebook):
        tree = ast.parse(cell.source)
        kinds = {type(node) for node in ast.walk(tree)}
        assert not kinds & {ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef}, cell.source
        assert cell is tagged[0] or len(cell.source.splitlines()) <= 20, cell.source
        last = tree.body[-1]
        # A bare name at the end keeps its tensor alive in the shell's history of outputs.
        assert not (isinstance(last, ast.Expr) and isinstance(last.value, ast.Name)), cell.source
        assert "raises-exception" not in cell.metadata.get("tags", [])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_parameter_has_a_type_and_a_help(path):
    notebook = nbformat.read(path, as_version=4)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    for line in cell.source.splitlines():
        assert re.fullmatch(r"\w+: [\w\[\], |.]+ = .+  # \S.+", line), line


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_no_folder_of_the_machine_it_was_made_on(path):
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"/(?:home|root|tmp|work|mnt|Users)/[\w.-]+", text)
    assert str(Path.home()) not in text or Path.home() == Path("/")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_in_order_or_not_at_all(path):
    counts = [cell.execution_count for cell in code_cells(nbformat.read(path, as_version=4))]
    assert counts in ([None] * len(counts), list(range(1, len(counts) + 1)))
