"""The real command line, with a worker and a measuring function that load no torch."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import faulty  # noqa: E402
import measures  # noqa: E402

from labhelpers import cli, sweep  # noqa: E402
from labhelpers.worker import Worker  # noqa: E402


def main() -> None:
    """Run `labhelpers` with what the command line was given."""
    sweep.training = lambda: faulty.FAULTY
    Worker.__init__.__defaults__ = (measures.no_warm_up,)
    cli.main()


if __name__ == "__main__":
    main()
