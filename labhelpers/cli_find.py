"""The command `labhelpers find`: the batch size that fits, for any model."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from labhelpers.distributed_cli import find_together, under_torchrun
from labhelpers.inputs import InputError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_OPTIONS = (
    ("--input", "input_shape", "Shape of one input, such as 3,224,224."),
    ("--classes", "classes", "Number of classes, such as 1000."),
    ("--device", "device", "auto (the best there is), cpu, cuda or cuda:N."),
    ("--precision", "precision", "fp32 (TF32 off), tf32, bf16 or fp16."),
    ("--optimizer", "optimizer", "One of torch's, such as adamw or sgd; default Adam."),
    ("--max", "max_batch_size", "Largest size to try."),
    ("--dataset-size", "dataset_size", "Samples in the data set: no batch is larger."),
    ("--headroom", "headroom", "Share of the memory to keep free; default 10%."),
    ("--multiple-of", "multiple_of", "Only multiples of this, such as 8."),
    (
        "--limit",
        "limit_bytes",
        "Memory to use, such as 8GiB; default all (CPU: half, 2GiB at most).",
    ),
    ("--iterations", "num_iterations", "Training steps of each probe; default 5, at least 3."),
    ("--strategy", "strategy", "exact, doubling or bisect."),
    ("--learning-rate", "learning_rate", "Learning rate; default 1e-3."),
    ("--trial-timeout-s", "trial_timeout_s", "Seconds after which a probe is ended; default 120."),
    ("--time-budget-s", "time_budget_s", "Seconds for the whole search; default 600."),
)
_FLAGS = (
    ("--powers-of-two", "powers_of_two", "Only powers of two."),
    ("--require-gpu", "require_gpu", "Fail if there is no GPU, instead of using the CPU."),
)
_UNITS = {"": 1, "b": 1, "mib": 2**20, "gib": 2**30, "mb": 10**6, "gb": 10**9}


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; values stay text, so that one place checks them all."""
    for name, field, text in reversed(_OPTIONS):
        command = click.option(name, field, help=text)(command)
    for name, field, text in reversed(_FLAGS):
        command = click.option(name, field, is_flag=True, default=None, help=text)(command)
    return command


@click.command()
@click.argument("model")
@_options
@click.option("--effective", help="Effective batch to split into micro-batches, such as 1024.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
@click.option("--output", help="Also keep every probe in this run directory.")
@click.option("--in-process", is_flag=True, help="Try in this process, without a worker.")
def find(
    model: str, effective: str | None, as_json: bool, output: str | None, in_process: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Find the largest batch size that trains, and one that leaves some memory free.

    MODEL is package.module:name (of torchvision, timm or any package), or file.py:name, where
    the name is a model class, a function that returns a model, or one that returns a Workload.
    """
    from labhelpers.finder_report import split_effective
    from labhelpers.records import FinderSpec, ask

    given = {name: value for name, value in options.items() if value is not None}
    if "limit_bytes" in given:
        given["limit_bytes"] = bytes_of(given["limit_bytes"])
    wanted = None if effective is None else _count("--effective", effective)
    if under_torchrun():
        if in_process:
            raise InputError("--in-process: under torchrun each rank tries in its own process")
        find_together({**given, "workload": model}, output, effective=wanted, as_json=as_json)
    spec = ask(FinderSpec, {**given, "workload": model})
    report = _search(spec, output, None if not in_process else False)
    size = report.with_headroom or report.largest
    if as_json:
        split = None if wanted is None else list(split_effective(wanted, size))
        click.echo(json.dumps({**report.to_dict(), "micro_batches": split}, indent=1))
    else:
        click.echo(in_words(report, wanted))


def in_words(report: Any, effective: int | None) -> str:
    """Return the table and the recommendation of a report as plain text for a terminal."""
    from labhelpers import finder_narrative as narrative

    said = [narrative.answer(report), narrative.speed(report), narrative.how(report)]
    size = report.with_headroom or report.largest
    said.insert(1, narrative.utilisation(report, report.at(size)[-1]))
    if effective is not None:
        said.insert(1, narrative.split_in_words(report, effective))
    said += [f"Note: {note}." for note in report.notes]
    table = narrative.probe_table(report).to_string(index=False)
    return "\n".join([table, "", *said]).replace("**", "")


def bytes_of(text: str) -> int:
    """Read an amount of memory such as `8GiB`, `512 MiB` or a number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = found.group(2).lower() if found else ""
    if found is None or unit not in _UNITS:
        raise InputError(f"--limit: got {text!r}; must be such as 8GiB, 512MiB or bytes")
    return int(float(found.group(1)) * _UNITS[unit])


def _count(name: str, text: str) -> int:
    from labhelpers.inputs import to_integer

    try:
        value = to_integer(text)
    except ValueError:
        value = 0
    if value < 1:
        raise InputError(f"{name}: got {text!r}; must be a whole number of at least 1")
    return value


def _search(spec: Any, output: str | None, isolate: bool | None) -> Any:
    """Run the search with a line for each probe; end the program in one line if nothing fits."""
    from labhelpers.finder import run_finder
    from labhelpers.search import SearchError
    from labhelpers.store import RunDirectory

    run = RunDirectory.create(Path(output), specs={"finder": spec}) if output else None
    _show("starting …")
    try:
        return run_finder(spec, run, isolate=isolate, on_progress=_say)
    except InputError:
        if run is not None and not run.trials():
            shutil.rmtree(run.path)  # made a moment ago: bad input leaves nothing behind
        raise
    except SearchError as error:
        code, line = EXIT_FAILED, str(error)
    except KeyboardInterrupt:
        code, line = EXIT_INTERRUPTED, "interrupted; no answer was found"
    finally:
        _show("")
    click.echo(f"labhelpers: {' '.join(line.split())}", err=True)
    sys.exit(code)


def _say(progress: Any) -> None:
    """Print a line when a probe has ended; on a terminal show which one runs."""
    if progress.trial is None:
        _show(f"batch {progress.batch_size:,} …")
    else:
        _show("")
        click.echo(line_of(progress), err=True)


def _show(text: str) -> None:
    """Show a text on a terminal's current line, in the place of the last one."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def line_of(progress: Any) -> str:
    """Say how a probe ended in one line."""
    from labhelpers.finder_narrative import OUTCOMES
    from labhelpers.finder_trials import outcome_of, taken_bytes
    from labhelpers.formats import show_bytes, show_rate

    trial = progress.trial
    proof = ", with the headroom kept free" if progress.purpose == "headroom" else ""
    parts = [f"batch {trial.batch_size:,}: {OUTCOMES[outcome_of(trial)]}{proof}"]
    if trial.outcome == "ok":
        parts += [show_bytes(taken_bytes(trial)), show_rate(trial.images_per_s)]
    elif trial.outcome == "error":
        parts += [f"{trial.error_class}: {trial.error_text}"]
    return ", ".join(parts)
