"""Drive a notebook in JupyterLab as its reader does; times in seconds."""

import time
from collections.abc import Callable
from typing import Any

LIMIT_MS = 90_000


class Notebook:
    """An open notebook: run cells, find their output, wait for it."""

    def __init__(self, page: Any, lab: Any, name: str) -> None:
        self.page, self.lab, self.name = page, lab, name
        self.open()

    def open(self) -> None:
        """Open the notebook, or load its page anew, and wait for its kernel."""
        self.page.goto(self.lab.page_of(self.name), timeout=LIMIT_MS)
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=LIMIT_MS)
        # The toolbar says idle before there is a kernel; only the server knows.
        until(self._kernel_is_there, "a kernel")
        self.page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
            "?.connectionStatus === 'connected'",
            timeout=LIMIT_MS,
        )

    def _kernel_is_there(self) -> bool:
        sessions = self.lab.ask("/api/sessions")
        return any(s["path"].endswith(self.name) and s["kernel"] for s in sessions)

    def sources(self) -> list[str]:
        """Return the source of every cell."""
        return list(
            self.page.evaluate(
                "() => Array.from(jupyterapp.shell.currentWidget.content.model.cells)"
                ".map(cell => cell.sharedModel.getSource())"
            )
        )

    def find(self, text: str) -> int:
        """Return the index of the one cell whose source holds a text."""
        found = [i for i, source in enumerate(self.sources()) if text in source]
        assert len(found) == 1, f"{text!r} is in {len(found)} cells"
        return found[0]

    def run_through(self, index: int) -> None:
        """Run the cells from the first to one, one after another, and wait for them."""
        for number in range(index + 1):
            self.run_cell(number)

    def run_cell(self, index: int, *, wait: bool = True) -> None:
        """Run one cell; without `wait` only begin it."""
        begun = self.page.evaluate(
            """async ([index, wait]) => {
                const notebook = jupyterapp.shell.currentWidget.content;
                notebook.deselectAll();
                notebook.activeCellIndex = index;
                await notebook.scrollToItem(index, 'start');
                const done = jupyterapp.commands.execute('notebook:run-cell');
                if (wait) await done;
                return true;
            }""",
            [index, wait],
        )
        assert begun

    def add_and_run(self, source: str) -> float:
        """Add a cell at the end, run it, and return the seconds until its output was there."""
        mark = f"mark{time.monotonic_ns()}"
        self.page.evaluate(
            """async ([source]) => {
                const notebook = jupyterapp.shell.currentWidget.content;
                notebook.activeCellIndex = notebook.widgets.length - 1;
                await jupyterapp.commands.execute('notebook:insert-cell-below');
                notebook.activeCell.model.sharedModel.setSource(source);
            }""",
            [f"{source}\nprint('{mark}'.upper())"],
        )
        begun = time.monotonic()
        self.page.evaluate("() => { jupyterapp.commands.execute('notebook:run-cell'); }")
        until(lambda: mark.upper() in self.output_text(), "the output of a new cell")
        return time.monotonic() - begun

    def output_text(self) -> str:
        """Return the plain text of all outputs, from the notebook's model."""
        return str(
            self.page.evaluate(
                """() => Array.from(jupyterapp.shell.currentWidget.content.model.cells)
                    .filter(cell => cell.type === 'code')
                    .map(cell => JSON.stringify(cell.sharedModel.getOutputs())).join('\\n')"""
            )
        )

    def show(self, index: int) -> None:
        """Scroll to a cell."""
        self.page.evaluate(
            "async index => await jupyterapp.shell.currentWidget.content"
            ".scrollToItem(index, 'start')",
            index,
        )


def until(true: Callable[[], Any], what: str, limit_s: float = 90.0) -> float:
    """Wait until something is true; return the seconds that took."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < limit_s, f"waited {limit_s:g} s for {what}"
        time.sleep(0.1)
    return time.monotonic() - begun
