"""The command line: `labhelpers data | sweep | find | report | compare | doctor` and more."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from labhelpers import __version__
from labhelpers.cli_compare import compare
from labhelpers.cli_doctor import doctor
from labhelpers.cli_find import find
from labhelpers.cli_ladder import climb, climb_on
from labhelpers.distributed_cli import (
    refuse_accumulation,
    refuse_alone,
    resume_together,
    sweep_together,
    under_torchrun,
)
from labhelpers.inputs import InputError, StartError, duplicates

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_KEPT = "finished trials are kept: labhelpers resume RUN"

_SWEEP_OPTIONS = (
    ("--batch-sizes", "Batch sizes, such as '32,256,2048'; default: the article's on a GPU."),
    ("--repeats", "How often each size is measured; default 3; auto: until medians are settled."),
    ("--images", "How many training images an epoch has; default 60000 on a GPU, 4096 on a CPU."),
    ("--device", "auto (the best there is), cpu, cuda or cuda:N."),
    ("--precision", "fp32 (TF32 off), tf32, bf16 or fp16."),
    ("--feed", "article, workers, host or resident."),
    ("--workers", "DataLoader workers for --feed workers."),
    ("--workload", "fashion_cnn, or package.module:name or file.py:name of a Workload."),
    ("--order", "article (up, down, up), ascending, descending or shuffled."),
    ("--seed", "Seed of weights and shuffling; default 42."),
    ("--learning-rate", "Adam's learning rate; default 1e-3."),
    ("--share", "Share of the best speed that the sweet spot must reach; default 93%."),
    ("--data-dir", "Where FashionMNIST lies; default data."),
    ("--trial-timeout-s", "Seconds after which a trial is ended; default 600."),
)
_SWEEP_FLAGS = (
    ("--quick", "A first look: few sizes, one repeat."),
    ("--synthetic", "Use made-up images (marked in every result)."),
    ("--require-gpu", "Fail if there is no GPU, instead of measuring the CPU."),
)


def sweep_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a sweep; values stay text, so that one place checks them all."""
    for name, text in reversed(_SWEEP_OPTIONS):
        command = click.option(name, help=text)(command)
    for name, text in reversed(_SWEEP_FLAGS):
        command = click.option(name, is_flag=True, default=None, help=text)(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def group() -> None:
    """Measure what a batch size costs and gives, on this machine."""


@group.command()
@click.option("--data-dir", default="data", show_default=True, help="Where to put it.")
@click.option("--synthetic", is_flag=True, help="Make a look-alike instead (needs no network).")
def data(data_dir: str, synthetic: bool) -> None:
    """Fetch FashionMNIST, verify it and put it where torchvision expects it."""
    from labhelpers.data import fetch_fashion_mnist

    report = fetch_fashion_mnist(data_dir, synthetic=synthetic, say=click.echo)
    click.echo(str(report))


@group.command()
@sweep_options
@click.option("--accumulation", help="Micro-batches per update (under torchrun only); default 1.")
@click.option("--ladder", is_flag=True, help="Climb the ladder: one change after the other.")
@click.option("--rungs", help="Only these rungs of the ladder, such as 'host,compile'.")
@click.option("--time-budget-s", help="Seconds of epochs that --repeats auto may take; 600.")
@click.option("--output", help="Run directory; default results/<time>.")
def sweep(output: str | None, ladder: bool, rungs: str | None, **options: Any) -> None:
    """Measure images/s, step time and memory over batch sizes; under torchrun on all its ranks."""
    if ladder or rungs:
        sys.exit(_ladder(options | {"rungs": rungs}, output))
    if under_torchrun():
        sweep_together(options, output)
    from labhelpers.records import SweepSpec, ask
    from labhelpers.store import RunDirectory, new_run_path
    from labhelpers.sweep_checks import check_before

    refuse_accumulation(options.pop("accumulation"))
    given = {name: value for name, value in options.items() if value is not None}
    spec = ask(SweepSpec, given)
    for size in duplicates(given.get("batch_sizes")):
        click.echo(f"note: batch {size:,} was given twice; it is measured once", err=True)
    check_before(spec)
    path = Path(output) if output else new_run_path("results")
    run = RunDirectory.create(path, specs={"sweep": spec})
    click.echo(f"results go to {path}", err=True)
    _measure(spec, run)


@group.command()
@click.argument("run_dir")
@click.option("--data-dir", help="Where FashionMNIST lies now; default where the run says.")
@click.option("--workload", help="The run's own workload, if it has one: it is code that will run.")
def resume(run_dir: str, data_dir: str | None, workload: str | None) -> None:
    """Continue the sweep of a run that was interrupted; finished trials are kept."""
    if under_torchrun():
        resume_together(run_dir, data_dir, workload)
    from labhelpers.records import SweepSpec, ask
    from labhelpers.store import open_run
    from labhelpers.sweep_checks import check_trusted

    run = open_run(run_dir)
    check_trusted(run, workload)
    refuse_alone(run_dir, run.info.specs)
    if "sweep" not in run.info.specs and "ladder" in run.info.specs:
        sys.exit(climb_on(run, {"data_dir": data_dir} if data_dir else {}))
    if "sweep" not in run.info.specs:
        raise InputError(f"{run_dir} has no sweep to continue; start one with: labhelpers sweep")
    moved = {"data_dir": data_dir} if data_dir else {}
    _measure(ask(SweepSpec, run.info.specs["sweep"] | moved), run)


@group.command()
@sweep_options
@click.option("--output", help="Run directory; default results/<time>.")
@click.option("--figure", help="Also write the sweep's figure to this PNG file.")
@click.option("--notebooks", default="", help="Only these, such as '01,00'; default all.")
@click.option("--parameter", "-p", multiple=True, metavar="NAME=VALUE", help="Any other parameter.")
@click.option("--cell-timeout-s", default="3600", help="Seconds a notebook cell may take.")
@click.option("--log", is_flag=True, help="Show the notebooks' output while they run.")
def report(**options: Any) -> None:
    """Run the notebooks headlessly and write an HTML report, JSON, CSV and figures."""
    from labhelpers.headless import make_report

    sys.exit(make_report(options, say=lambda line: click.echo(line, err=True)))


@group.command()
@click.argument("run_dir")
@click.option("--output", help="Folder for run.json and trials.csv; default the run itself.")
def export(run_dir: str, output: str | None) -> None:
    """Write everything a run measured as one JSON file and one CSV table."""
    from labhelpers.export import export_run
    from labhelpers.store import open_run

    for path in export_run(open_run(run_dir), Path(output) if output else None):
        click.echo(path)


group.add_command(compare)
group.add_command(doctor)
group.add_command(find)


def _ladder(options: dict[str, Any], output: str | None) -> int:
    """Climb the ladder of a `sweep --ladder`; the sweep's other options go along."""
    refuse_accumulation(options.pop("accumulation"))
    return climb({name: value for name, value in options.items() if value is not None}, output)


def _measure(spec: Any, run: Any) -> None:
    """Run a sweep with a bar, print its table, and exit 1 if a trial failed."""
    from labhelpers.narrative import overhead, sweep_text
    from labhelpers.progress import TerminalProgress, describe_failure
    from labhelpers.references import curve_of
    from labhelpers.sweep import failures, run_sweep

    with TerminalProgress() as progress:
        trials = run_sweep(spec, run, on_progress=progress)
    curve = curve_of(run)
    click.echo(sweep_text(curve, spec.share) if curve else "no batch size could be measured")
    click.echo(overhead(run))
    failed = failures(trials)
    for trial in failed:
        click.echo(f"failed: {describe_failure(trial)}", err=True)
    if failed:
        sys.exit(EXIT_FAILED)


class Terminated(SystemExit):
    """SIGTERM came."""


def _terminated(number: int, _frame: Any) -> None:
    """End cleanly on SIGTERM: the worker is closed on the way out."""
    raise Terminated(128 + number)


def main() -> None:
    """Run the command line; every bad input is one line and exit code 2."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        code = group.main(
            prog_name="labhelpers", standalone_mode=False, auto_envvar_prefix="LABHELPERS"
        )
    except InputError as error:
        _fail(str(error), EXIT_BAD_INPUT)
    except click.UsageError as error:
        if error.format_message().startswith("Usage:"):  # no command given: click shows its help
            click.echo(error.format_message(), err=True)
            sys.exit(EXIT_BAD_INPUT)
        _fail(error.format_message(), EXIT_BAD_INPUT)
    except StartError as error:
        _fail(str(error), EXIT_FAILED)
    except OSError as error:
        _fail(f"{error.filename or 'system'}: {error.strerror or error}", EXIT_FAILED)
    except (KeyboardInterrupt, click.Abort):
        _fail(f"interrupted; {_KEPT}", EXIT_INTERRUPTED)
    except Terminated:
        _fail(f"ended; {_KEPT}", EXIT_TERMINATED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(line: str, code: int) -> None:
    click.echo(f"labhelpers: {' '.join(line.split())}", err=True)
    sys.exit(code)
