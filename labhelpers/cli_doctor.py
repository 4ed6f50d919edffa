"""The command `labhelpers doctor`: can this machine measure?"""

from __future__ import annotations

import sys

import click


@click.command()
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--data-dir", default="data", show_default=True, help="Where FashionMNIST lies.")
def doctor(device: str, data_dir: str) -> None:
    """Check device, driver, torch, memory, data and tools; exit 1 if there is a problem.

    Paste the page into a bug report: it holds no user name, host name or home directory.
    """
    from labhelpers.doctor import examine, page
    from labhelpers.environment import check_device_name

    lines, code = page(examine(check_device_name(device), data_dir))
    click.echo("\n".join(lines))
    sys.exit(code)
