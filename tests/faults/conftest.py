"""Print what the fault tests did, so that a green run can be quoted in figures."""

from typing import Any

from tally import COUNTS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the counts below the tests' own summary."""
    if COUNTS:
        terminalreporter.section("faults made")
        for what, number in sorted(COUNTS.items()):
            terminalreporter.write_line(f"{number:>6,}  {what}")
