"""Notebook 00's explorer against values computed here, and the HTML report as one file."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab_page import Notebook, until

from labhelpers.references import REFERENCE_RUNS

EXPLORER = "show_explorer(curves, share)"
MIB = 2**20


def trials_of_h200() -> list[dict[str, Any]]:
    """The committed sweep of the article's loop, read without the package."""
    lines = (REFERENCE_RUNS / "h200" / "trials.jsonl").read_text(encoding="utf-8").splitlines()
    trials = [t for t in map(json.loads, lines) if t["kind"] == "sweep"]
    return [t for t in trials if t["feed"] == "article"]


def recommended(share: float, budget_bytes: float, effective: int) -> int:
    """The rule in ten lines: the smallest that reaches the share and is allowed, else the best."""
    rates: dict[int, list[float]] = {}
    peaks: dict[int, list[float]] = {}
    for trial in trials_of_h200():
        rates.setdefault(trial["batch_size"], []).append(trial["images"] / trial["epoch_s"])
        peaks.setdefault(trial["batch_size"], []).append(trial["peak_allocated_bytes"])
    speed = {size: statistics.median(values) for size, values in rates.items()}
    allowed = {s for s in speed if s <= effective and statistics.median(peaks[s]) <= budget_bytes}
    reaching = {size for size in allowed if speed[size] >= share * max(speed.values())}
    return min(reaching) if reaching else max(allowed, key=lambda size: speed[size])


class ExplorerPage:
    """The explorer's widgets on the page."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook, self.page = notebook, notebook.page
        self.cell = notebook.find(EXPLORER)
        notebook.run_through(self.cell)
        self.box = self.page.locator(".labhelpers-explorer").last
        self.box.wait_for(timeout=60_000)
        notebook.show(self.cell)

    def words(self) -> str:
        return str(self.box.inner_text())

    def move(self, slider: int, key: str, times: int) -> None:
        handle = self.box.locator(".noUi-handle").nth(slider)
        handle.focus()
        for _ in range(times):
            handle.press(key)

    def expect(self, size: int, what: str) -> None:
        words = f"NVIDIA H200 (committed run): train with batches of {size:,}."
        until(lambda: words in self.words(), f"batch {size} {what}; got {self.words()!r}", 30)


def test_the_explorer_follows_the_sliders(page: Any, lab: Any, pictures: Path):
    explorer = ExplorerPage(Notebook(page, lab, "00_report.ipynb"))
    explorer.expect(recommended(0.93, 2**40, 2**30), "at first")
    page.screenshot(path=pictures / "explorer-1.png")

    explorer.move(0, "ArrowLeft", 23)
    assert "70%" in explorer.words()
    low = recommended(0.70, 2**40, 2**30)
    assert low != recommended(0.93, 2**40, 2**30)
    explorer.expect(low, "at 70 %")

    explorer.move(0, "ArrowRight", 29)
    assert "99%" in explorer.words()
    explorer.expect(recommended(0.99, 2**40, 2**30), "at 99 %")

    explorer.move(1, "ArrowRight", 2)
    assert "128 MiB" in explorer.words()
    tight = recommended(0.99, 128 * MIB, 2**30)
    assert tight != recommended(0.99, 2**40, 2**30)
    explorer.expect(tight, "within 128 MiB")
    until(lambda: "memory budget of 128.0 MiB limits it" in explorer.words(), "the limit")

    explorer.move(2, "ArrowRight", 6)
    assert "1,024" in explorer.words()
    explorer.expect(recommended(0.99, 128 * MIB, 1024), "with accumulation")
    split = f"{1024 // tight} × {tight:,} = 1,024 images"
    until(lambda: split in explorer.words(), "the split")
    page.screenshot(path=pictures / "explorer-2.png")

    explorer.box.get_by_label("NVIDIA H200 (committed run)").uncheck()
    until(lambda: "NVIDIA H200 (committed run): train" not in explorer.words(), "one run less")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """A small report, made as `make report` makes it."""
    folder = tmp_path_factory.mktemp("report") / "run"
    subprocess.run(
        [sys.executable, "-m", "labhelpers", "report", "--notebooks", "01,00", "--device", "cpu",
         "--batch-sizes", "32,64,128", "--images", "1024", "--repeats", "1",
         "--data-dir", str(data_dir), "--output", str(folder)],
        check=True, timeout=300,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("name", ["report.html", "01_batch_sweep.html"])
def test_the_report_is_one_file_without_errors(
    report: Path, page: Any, seen: Any, pictures: Path, name: str
):
    address = (report / name).as_uri()
    page.goto(address)
    page.wait_for_load_state("networkidle")
    loaded = [url for url in seen.requests if not url.startswith("data:")]
    assert loaded == [address]
    assert (seen.failed, seen.errors) == ([], [])
    images = page.evaluate(
        "() => Array.from(document.images).map(i => [i.alt, i.naturalWidth, i.width])"
    )
    assert images
    assert all(alt and natural >= 1.5 * width for alt, natural, width in images)
    page.screenshot(path=pictures / f"{Path(name).stem}-desktop.png", full_page=True)


@pytest.mark.parametrize("name", ["report.html", "01_batch_sweep.html"])
def test_the_report_fits_a_phone(report: Path, browser: Any, pictures: Path, name: str):
    context = browser.new_context(viewport={"width": 390, "height": 844}, device_scale_factor=2)
    page = context.new_page()
    page.goto((report / name).as_uri())
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    page.screenshot(path=pictures / f"{Path(name).stem}-phone.png", full_page=True)
    context.close()


def test_code_opens_and_contents_lead_to_their_sections(report: Path, page: Any):
    page.goto((report / "report.html").as_uri())
    code = page.locator("details.code").first
    assert not code.locator("pre").is_visible()
    code.locator("summary").click()
    assert code.locator("pre").is_visible()
    page.get_by_role("navigation").get_by_text("Limits", exact=True).click()
    assert page.get_by_role("heading", name="Limits").is_visible()
