"""Notebook 01 in a real browser: the list, a bad entry, Run, Stop, Resume, coming back."""

import os
from pathlib import Path
from typing import Any

import pytest
from lab_page import Notebook, until

from labhelpers.store import RunDirectory, find_runs, open_run

PANEL = "show_panel(SWEEP, spec, run)"
GENEROUS_S = 60


class PanelPage:
    """The panel's widgets on the page."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook, self.page = notebook, notebook.page
        self.cell = notebook.find(PANEL)

    def run_cells(self) -> None:
        self.notebook.run_through(self.cell)
        self.button("Run").wait_for(timeout=60_000)

    def button(self, text: str) -> Any:
        return self.page.get_by_role("button", name=text, exact=True).last

    def entry(self, label: str) -> Any:
        return self.page.get_by_label(label, exact=True).last

    def text(self) -> str:
        return str(self.page.locator(".labhelpers-panel").last.inner_text())

    def figures(self) -> list[str]:
        images = self.page.locator(".jp-OutputArea-output img")
        return [images.nth(i).get_attribute("src") for i in range(images.count())]


@pytest.fixture
def panel(page: Any, lab: Any) -> PanelPage:
    found = PanelPage(Notebook(page, lab, "01_batch_sweep.ipynb"))
    found.run_cells()
    return found


def newest(folder: Path) -> RunDirectory:
    return open_run(find_runs(folder / "results")[-1])


def test_the_panel(panel: PanelPage, lab: Any, pictures: Path, capsys: pytest.CaptureFixture):
    page = panel.page
    page.screenshot(path=pictures / "panel-1-ready.png")
    # As "Run All" does: the cells below must leave the kernel to the panel.
    panel.notebook.run_cell(panel.notebook.find("panel.chosen()"))
    until(lambda: "press Run in the panel above" in panel.notebook.output_text(), "the hint")
    panel.notebook.show(panel.cell)

    sizes = panel.entry("Batch sizes")
    assert sizes.input_value().startswith("32, 64")

    sizes.fill("16, 32, many")
    until(lambda: "'many' is not a batch size" in panel.text(), "the reason")
    until(panel.button("Run").is_disabled, "a Run that cannot be pressed")
    page.screenshot(path=pictures / "panel-2-refused.png")

    page.get_by_role("button", name="small", exact=True).last.click()
    until(lambda: sizes.input_value() == "8, 16, 32, 64, 128", "the preset")
    sizes.fill("16, 64, 256, 1024")
    panel.entry("Repeats").fill("4")
    panel.entry("Images").fill("4096")
    until(lambda: "16 trials" in panel.text(), "the estimate")
    panel.button("Run").click()
    first_s = until(lambda: "1 of 16 trials done" in panel.text(), "the first trial", GENEROUS_S)
    other_cell_s = panel.notebook.add_and_run("x = 6 * 7")
    panel.notebook.show(panel.cell)
    until(lambda: "5 of 16" in panel.text(), "more trials")
    page.screenshot(path=pictures / "panel-3-running.png")

    panel.button("Stop").click()
    stop_s = until(lambda: "stopped;" in panel.text(), "the end", GENEROUS_S)
    kept = [trial.key for trial in newest(lab.folder).trials("sweep")]
    assert 5 <= len(kept) < 16
    page.screenshot(path=pictures / "panel-4-stopped.png")

    panel.button("Resume").click()
    until(lambda: "done: 16 of 16" in panel.text(), "all trials", 200)
    page.screenshot(path=pictures / "panel-5-done.png")
    trials = newest(lab.folder).trials("sweep")
    assert [trial.key for trial in trials][: len(kept)] == kept
    assert {t.batch_size for t in trials} == {16, 64, 256, 1024}
    assert len(trials) == 16
    with capsys.disabled():
        print(
            f"\nfirst trial visible {first_s:.1f} s after Run; another cell answered in "
            f"{other_cell_s:.2f} s; stopped {stop_s:.1f} s after Stop; "
            f"load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
        )


def test_coming_back_to_a_run(panel: PanelPage, lab: Any, pictures: Path):
    panel.entry("Batch sizes").fill("32, 64")
    panel.entry("Repeats").fill("30")
    panel.button("Run").click()
    until(lambda: "2 of 60 trials done" in panel.text(), "the first trials", GENEROUS_S)
    before = len(newest(lab.folder).trials("sweep"))

    panel.page.goto("about:blank")  # the page is closed; the kernel goes on
    until(lambda: len(newest(lab.folder).trials("sweep")) > before + 1, "trials without a page")
    panel.notebook.open()
    panel.notebook.run_cell(panel.cell)
    panel.notebook.show(panel.cell)
    until(lambda: " of 60 trials done" in panel.text(), "the panel to find its run")
    panel.page.screenshot(path=pictures / "panel-6-back.png")
    panel.button("Stop").click()
    until(lambda: "stopped;" in panel.text(), "the end", GENEROUS_S)
    assert len(newest(lab.folder).trials("sweep")) > before
