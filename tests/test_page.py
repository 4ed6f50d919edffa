"""The HTML page of a notebook: one file, no network, code folded, headings that link."""

import html
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pages import Page, check_page

from labhelpers.page import Heading, _body, contents_list, headings_of, write_page

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5E"
    "rkJggg=="
)


def notebook_of(*cells):
    return new_notebook(cells=list(cells))


def written(tmp_path, *cells):
    notebook = tmp_path / "a.ipynb"
    nbformat.write(notebook_of(*cells), notebook)
    return write_page(notebook, tmp_path / "a.html")


def figure_cell(alt: str):
    output = new_output(
        "display_data", {"image/png": PNG, "text/plain": "<image>"},
        metadata={"image/png": {"alt": alt}},
    )  # fmt: skip
    return new_code_cell("show()", outputs=[output])


HEADINGS = [
    "Measure", "What `fp32` means", "The *sweet* spot", "Speed & memory", "1 < 2 > 0?",
    "Is it 3.5× slower?", "Why \"93 %\"", "日本語 見出し", "A.b_c: d/e",
]  # fmt: skip


@pytest.mark.parametrize("heading", HEADINGS)
def test_every_kind_of_heading_can_be_linked_to(tmp_path, heading):
    page = written(tmp_path, new_markdown_cell("# Title"), new_markdown_cell(f"## {heading}\n\nx"))
    check_page(page)
    # In the contents, beside the title (which is not listed), and beside the heading itself.
    listed, _, own = [tag["href"] for tag in Page(page).all("a")]
    assert listed == own


def test_a_page_has_title_contents_figures_and_folded_code(tmp_path):
    page = written(
        tmp_path,
        new_markdown_cell("# Batch `size`\n\nWords & **more**."),
        new_markdown_cell("## First\n\nText\n\n### Inner\n\n## Second"),
        new_code_cell("print('hello')\n# <b>no html</b>", outputs=[
            new_output("stream", text="hello <script>alert(1)</script>\n")]),
        figure_cell("A curve that rises & falls"),
        new_code_cell("x = 1"),
    )  # fmt: skip
    check_page(page)
    found, text = Page(page), page.read_text(encoding="utf-8")
    assert "<title>Batch size</title>" in text
    assert [image["alt"] for image in found.all("img")] == ["A curve that rises & falls"]
    assert len(found.all("details")) == len(found.all("summary")) == 3
    assert [tag["href"] for tag in found.all("a")][:3] == ["#First", "#Inner", "#Second"]


def test_a_percentage_is_not_torn_apart_at_the_end_of_a_line(tmp_path):
    page = written(tmp_path, new_markdown_cell("At 93 % of it."), new_code_cell("print(5 % 3)"))
    text = page.read_text(encoding="utf-8")
    assert "93&nbsp;% of" in text
    assert "\xa0" not in "".join(re.findall(r"<pre>(.*?)</pre>", html.unescape(text), re.S))


def test_a_widget_leaves_neither_script_nor_words_on_the_page(tmp_path):
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/plain": "VBox()"}
    notebook = notebook_of(
        new_code_cell("panel", outputs=[new_output("display_data", view)]),
        new_code_cell("1", outputs=[new_output("stream", text="kept")]),
    )
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    nbformat.write(notebook, tmp_path / "a.ipynb")
    page = write_page(tmp_path / "a.ipynb", tmp_path / "a.html")
    check_page(page)
    text = page.read_text(encoding="utf-8")
    assert "VBox" not in text
    assert "kept" in text


def test_code_in_prose_is_not_folded_and_breaks_nothing(tmp_path):
    page = written(
        tmp_path,
        new_markdown_cell("# Title\n\n```python\nprint(1)\n```\n\n```\n## not a heading\n```"),
        new_code_cell("print(2)"),
        new_markdown_cell("after `<div class=\"highlight\">`"),
    )  # fmt: skip
    check_page(page)
    assert len(Page(page).all("details")) == 1


def test_a_heading_inside_a_code_block_is_none():
    body = _body(
        notebook_of(new_markdown_cell("# One\n\n```bash\n# no\n## none\n```\n\n## Two `x`"))
    )
    assert headings_of(body) == [(1, "One", "One"), (2, "Two-x", "Two x")]


def test_no_headings_make_no_contents_and_the_file_name_is_the_title(tmp_path):
    assert contents_list([]) == contents_list([Heading(1, "Title", "Title")]) == ""
    page = written(tmp_path, new_code_cell("1 + 1"))
    assert "<title>a</title>" in page.read_text(encoding="utf-8")
    assert Page(page).all("nav") == []
    check_page(page)


def test_links_to_notebooks_lead_to_their_pages_or_are_text(tmp_path):
    words = "# Title\n\n[sweep](01_sweep.ipynb), [report](00_report.ipynb), [probe](02_probe.ipynb)"
    for name in ("00_report", "01_sweep"):
        (tmp_path / f"{name}.ipynb").touch()
    page = written(tmp_path, new_markdown_cell(words))
    links = [tag["href"] for tag in Page(page).all("a") if not str(tag["href"]).startswith("#")]
    assert links == ["01_sweep.html", "report.html"]
    assert "probe" in page.read_text(encoding="utf-8")
