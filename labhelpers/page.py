"""An executed notebook as one HTML file: no network, code folded, readable on a phone."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any, NamedTuple

import nbformat

_STYLE = Path(__file__).with_name("page.css")
_WIDGET = "application/vnd.jupyter.widget-view+json"
_HEADING = re.compile(r'<h([1-3]) id="([^"]*)">(.*?)</h\1>', re.S)
_NOTEBOOK_LINK = re.compile(r'<a href="([^"/]+)\.ipynb">(.*?)</a>', re.S)
# nbconvert marks a cell's input with hl-LANGUAGE; a code block in prose has no such class.
_PERCENT = re.compile(r"(?<=\d) %")
_INPUT = re.compile(r'(<div class="highlight hl-[^"]+">.*?</pre></div>)', re.S)


class Heading(NamedTuple):
    """A heading of a page: level, the id to link to (as it stands in the HTML), plain text."""

    level: int
    id: str
    text: str


def write_page(notebook: Path, output: Path) -> Path:
    """Write an executed notebook as a self-contained HTML page; return its path."""
    read = without_widgets(nbformat.read(notebook, as_version=4))
    body = _PERCENT.sub("&nbsp;%", link_pages(_body(read), notebook.parent))
    headings = headings_of(body)
    title = headings[0].text if headings else notebook.stem
    page = _page(title, contents_list(headings), fold_code(body))
    output.write_text(page, encoding="utf-8")
    return output


def without_widgets(notebook: Any) -> Any:
    """Take widgets out of a notebook: without a kernel they are dead, and load scripts."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if _WIDGET not in each.get("data", {})]
    return notebook


def headings_of(body: str) -> list[Heading]:
    """Return the headings of level 1 to 3 of a rendered notebook, in order."""
    return [
        Heading(int(level), identifier, html.unescape(re.sub(r"<[^>]+>", "", inner)).rstrip("¶"))
        for level, identifier, inner in _HEADING.findall(body)
    ]


def contents_list(headings: list[Heading]) -> str:
    """Return the table of contents (levels 2 and 3) as HTML."""
    items = [
        f'<li class="level{each.level}"><a href="#{each.id}">{html.escape(each.text)}</a></li>'
        for each in headings
        if each.level > 1
    ]
    return f'<nav aria-label="Contents"><ul>{"".join(items)}</ul></nav>' if items else ""


def fold_code(body: str) -> str:
    """Put each code cell's input into a closed <details>, so that prose and figures lead."""
    return _INPUT.sub(r'<details class="code"><summary>code</summary>\1</details>', body)


def page_name(notebook: str) -> str:
    """Return the file name of a notebook's page; 00 is the report itself."""
    return "report.html" if notebook.startswith("00") else f"{notebook}.html"


def link_pages(body: str, folder: Path) -> str:
    """Let links to other notebooks lead to their pages, where they were run too.

    A link to a notebook that is not in `folder` becomes plain text: it would lead nowhere.
    """

    def to_page(found: re.Match[str]) -> str:
        name, text = found.groups()
        ran = (folder / f"{name}.ipynb").exists()
        return f'<a href="{page_name(name)}">{text}</a>' if ran else text

    return _NOTEBOOK_LINK.sub(to_page, body)


def _body(notebook: Any) -> str:
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True)
    exporter.exclude_output_prompt = True
    body, _ = exporter.from_notebook_node(notebook)
    return str(body)


def _page(title: str, contents: str, body: str) -> str:
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title>"
        f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head>"
        f"<body>{contents}<main>{body}</main></body></html>\n"
    )
