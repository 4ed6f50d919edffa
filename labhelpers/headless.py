"""`labhelpers report`: data, notebooks, HTML page, export, figure and summary in one go."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from labhelpers.data import fetch_fashion_mnist
from labhelpers.export import export_run
from labhelpers.inputs import InputError, duplicates, to_number
from labhelpers.page import page_name, write_page
from labhelpers.records import SweepSpec, ask
from labhelpers.report import (
    EXIT_DONE,
    EXIT_FAILED,
    NOTEBOOKS,
    NotebookResult,
    exit_code_of,
    find_notebooks,
    parameters_of,
    run_notebook,
    shared_parameters,
)
from labhelpers.store import RunDirectory, new_run_path, open_run
from labhelpers.summary import answer_of, write_summary
from labhelpers.sweep import failures

Say = Callable[[str], None]


FIRST_LOOK = ["00", "01", "02", "03", "04"]
"""What a quick report runs: the ladder of 05 takes longest, and 00 shows a reference for it."""


def make_report(options: Mapping[str, Any], *, say: Say) -> int:
    """Make a report from the command line's options and return the exit code.

    All input is checked before anything runs. A notebook that fails does not keep the next
    from running; the code is that of the first that failed.

    Raises:
        InputError: bad input.
    """
    given = parameters_from(options)
    named = [part for part in options["notebooks"].split(",") if part]
    notebooks = find_notebooks(named or (FIRST_LOOK if given.get("quick") is True else []))
    check_names(given, notebooks)
    spec = _checked(given)
    cell_timeout_s = _seconds(options["cell_timeout_s"])
    figure = _writable_figure(options.get("figure"))
    for size in duplicates(given.get("batch_sizes")):
        say(f"note: batch {size:,} was given twice; it is measured once")
    fetch_fashion_mnist(spec.data_dir, synthetic=spec.synthetic, say=say)
    path = Path(options.get("output") or new_run_path("results"))
    run = RunDirectory.create(path, synthetic=spec.synthetic)
    say(f"results go to {path}")
    results = []
    for notebook in notebooks:
        say(f"running {notebook.stem}")
        results.append(_one(notebook, path, given, cell_timeout_s, options["log"]))
        say(_outcome(results[-1]))
    return finish(run.path, results, figure, say)


def parameters_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notebook parameters among the options, `-p NAME=VALUE` included."""
    given = {k: v for k, v in options.items() if v is not None and k in SweepSpec.model_fields}
    for pair in options.get("parameter", ()):
        name, sign, value = pair.partition("=")
        if not sign or not name.strip():
            raise InputError(f"--parameter: got {pair!r}; must be NAME=VALUE")
        given[name.strip()] = value
    return given


def check_names(given: Mapping[str, Any], notebooks: list[Path]) -> None:
    """Refuse a parameter that none of the notebooks has, with the nearest that one has."""
    from labhelpers.records import refuse_unknown_names

    known = set().union(*(parameters_of(path) for path in notebooks)) - {"run_dir"}
    refuse_unknown_names(given, known)


def _checked(given: Mapping[str, Any]) -> SweepSpec:
    """Check the values that the sweep knows; the others are checked by their notebook."""
    from labhelpers.sweep_checks import check_device, check_request

    spec = ask(SweepSpec, {k: v for k, v in given.items() if k in SweepSpec.model_fields})
    check_request(spec)
    check_device(spec)
    return spec


def _one(
    notebook: Path, path: Path, given: Mapping[str, Any], cell_timeout_s: float, log: bool
) -> NotebookResult:
    # Notebooks run in their own folder, so relative paths are seen from there.
    paths = {"run_dir": path, "data_dir": given.get("data_dir", "data")}
    seen = {name: os.path.relpath(value, NOTEBOOKS) for name, value in paths.items()}
    parameters = shared_parameters(notebook, {**given, **seen})
    output = path / "notebooks" / notebook.name
    return run_notebook(notebook, output, parameters, cell_timeout_s=cell_timeout_s, log=log)


def _outcome(result: NotebookResult) -> str:
    if result.exit_code == EXIT_DONE:
        return f"  done: {result.path}"
    return f"  exit {result.exit_code}: {result.why} (what ran is in {result.path})"


def finish(path: Path, results: list[NotebookResult], figure: Path | None, say: Say) -> int:
    """Write page, export, figure and summary of a run, and return the exit code."""
    for result in results:
        if result.exit_code == EXIT_DONE:
            say(f"wrote {write_page(result.path, path / page_name(result.name))}")
    run = open_run(path)
    for written in (*export_run(run), write_summary(run, results)):
        say(f"wrote {written}")
    drawn = path / "figures" / "batch_sweep.png"
    if figure is not None and drawn.exists():
        shutil.copyfile(drawn, figure)
        say(f"wrote {figure}")
    failed = failures(run.trials())
    if failed:
        say(f"{len(failed)} trials failed; see {path / 'summary.md'}")
    answer = answer_of(run)
    if answer:
        say(answer)
    if (path / page_name("00")).exists():
        say(f"read it: {path / page_name('00')}")
    return exit_code_of(results) or (EXIT_FAILED if failed else EXIT_DONE)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        seconds = to_number(text)
        if seconds > 0:
            return seconds
    raise InputError(f"--cell-timeout-s: got {text!r}; must be a number of seconds above 0")


def _writable_figure(name: str | None) -> Path | None:
    if name is None:
        return None
    path = Path(name)
    if path.suffix.lower() != ".png":
        raise InputError(f"--figure: got {name!r}; must be the name of a .png file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"--figure: the folder of {name!r} cannot be written; choose another")
    return path
