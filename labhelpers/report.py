"""Run the notebooks headlessly with papermill, and say honestly how each ended.

papermill saves a notebook after a dead kernel, a time limit or `sys.exit(0)` as if it were
complete. Here a notebook runs under another name, is checked for cells that did not run, and
gets its own name only if all did.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from labhelpers.inputs import InputError
from labhelpers.records import refuse_unknown_names
from labhelpers.references import PROJECT

NOTEBOOKS = PROJECT / "notebooks"
EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_UNRUN = 0, 1, 2, 3
EXIT_TIMEOUT, EXIT_INTERRUPTED, EXIT_KERNEL_DIED = 124, 130, 138
_BAD_INPUT = ("InputError", "DataError")  # an error comes out of a kernel as its class's name


@dataclass(frozen=True)
class NotebookResult:
    """How a notebook ended: exit code (0 is done), the saved file, and why if not done."""

    name: str
    exit_code: int
    path: Path
    why: str = ""


def parameters_of(notebook: Path) -> dict[str, str]:
    """Return the parameters of a notebook with their help texts; InputError if it has none."""
    import papermill

    cells = nbformat.read(notebook, as_version=4).cells
    tagged = sum("parameters" in cell.metadata.get("tags", []) for cell in cells)
    if tagged != 1:
        raise InputError(f"{notebook}: has {tagged} cells tagged 'parameters'; exactly 1 is needed")
    found = papermill.inspect_notebook(str(notebook))
    return {name: entry["help"] for name, entry in found.items()}


def run_notebook(
    notebook: Path, output: Path, parameters: Mapping[str, Any], *,
    cell_timeout_s: float | None = None, log: bool = False,
) -> NotebookResult:  # fmt: skip
    """Run one notebook into `output`; a run that does not finish stays `*.partial.ipynb`.

    Raises:
        InputError: an unknown parameter name, before anything runs.
        KeyboardInterrupt: passed on after the kernel is gone.
    """
    refuse_unknown_names(parameters, parameters_of(notebook))
    partial = output.with_suffix(".partial.ipynb")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)  # an earlier one must not pass for the result of this run
    code, why = _execute(notebook, partial, parameters, cell_timeout_s, log)
    if code == EXIT_DONE:
        unrun = count_unrun(partial)
        if unrun:
            code, why = EXIT_UNRUN, f"{unrun} cells were not run"
    drop_paths(partial)
    if code == EXIT_DONE:
        os.replace(partial, output)
    return NotebookResult(notebook.stem, code, output if code == EXIT_DONE else partial, why)


def _execute(
    notebook: Path, partial: Path, parameters: Mapping[str, Any], cell_timeout_s: float | None,
    log: bool,
) -> tuple[int, str]:  # fmt: skip
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    try:
        papermill.execute_notebook(
            str(notebook), str(partial), dict(parameters), cwd=str(notebook.parent),
            progress_bar=False, log_output=log, execution_timeout=cell_timeout_s,
            autosave_cell_every=2, config=_kernel_config(),
        )  # fmt: skip
    except CellTimeoutError as error:
        return EXIT_TIMEOUT, _first_line(error)
    except DeadKernelError as error:
        return EXIT_KERNEL_DIED, _first_line(error)
    except papermill.PapermillExecutionError as error:
        code = EXIT_BAD_INPUT if error.ename in _BAD_INPUT else EXIT_FAILED
        return code, f"{error.ename}: {error.evalue}"
    except RuntimeError as error:
        # Jupyter's client has no class of its own for a kernel that dies before it answers.
        if "Kernel died" not in str(error):
            raise
        return EXIT_KERNEL_DIED, _first_line(error)
    except (KeyboardInterrupt, SystemExit):
        # What was under way in the kernel ends too; asyncio would print that error at length.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        raise
    return EXIT_DONE, ""


def _kernel_config() -> Any:
    """Return Jupyter's configuration: what goes to and from a kernel is encrypted, if it can be.

    Without it, other users of the machine could read along, and every kernel warns of that.
    """
    import zmq
    from traitlets.config import Config

    policy = "auto" if zmq.has("curve") else "disabled"
    return Config({"KernelManager": {"transport_encryption": policy}})


def drop_paths(notebook: Path) -> None:
    """Leave only file names of the paths that papermill keeps: a shared file names no folder."""
    content = nbformat.read(notebook, as_version=4)
    kept = content.metadata.get("papermill", {})
    for name in ("input_path", "output_path"):
        if kept.get(name):
            kept[name] = Path(kept[name]).name
    nbformat.write(content, notebook)


def count_unrun(notebook: Path) -> int:
    """Count code cells with something in them that have no execution count."""
    cells = nbformat.read(notebook, as_version=4).cells
    return sum(
        cell.cell_type == "code" and bool(cell.source.strip()) and cell.execution_count is None
        for cell in cells
    )


def find_notebooks(only: Sequence[str] = ()) -> list[Path]:
    """Return the notebooks in the order they run: the measuring ones, then the report (00).

    `only` keeps those whose names begin with one of the given texts, such as `01`.
    """
    found = sorted(p for p in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb") if ".partial" not in p.name)
    for text in only:
        if not any(path.stem.startswith(text) for path in found):
            have = ", ".join(path.stem for path in found)
            raise InputError(f"notebooks: there is no {text!r}; there are {have}")
    chosen = [p for p in found if not only or any(p.stem.startswith(text) for text in only)]
    return [p for p in chosen if not p.stem.startswith("00")] + [
        p for p in chosen if p.stem.startswith("00")
    ]


def shared_parameters(notebook: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keep those of the given parameters that this notebook knows."""
    known = parameters_of(notebook)
    return {name: value for name, value in given.items() if name in known}


def exit_code_of(results: Sequence[NotebookResult]) -> int:
    """Return 0 if all notebooks are done, else the first one's code that is not."""
    return next((result.exit_code for result in results if result.exit_code), EXIT_DONE)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
