"""An executed notebook as one HTML file: no network, code folded, readable on a phone."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import nbformat

_STYLE = Path(__file__).with_name("page.css")


def write_page(notebook: Path, output: Path) -> Path:
    """Write an executed notebook as a self-contained HTML page; return its path."""
    content = nbformat.read(notebook, as_version=4)
    body = fold_code(_body(content))
    headings = headings_of(content)
    title = headings[0][1] if headings else notebook.stem
    output.write_text(_page(title, contents_list(headings), body), encoding="utf-8")
    return output


def headings_of(notebook: Any) -> list[tuple[int, str]]:
    """Return (level, text) of the Markdown headings of level 1 to 3, in order."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for marks, text in re.findall(r"^(#{1,3}) +(.+?)\s*$", cell.source, flags=re.M):
                found.append((len(marks), text))
    return found


def contents_list(headings: list[tuple[int, str]]) -> str:
    """Return the table of contents (levels 2 and 3) as HTML."""
    items = [
        f'<li class="level{level}"><a href="#{anchor(text)}">{html.escape(_plain(text))}</a></li>'
        for level, text in headings
        if level > 1
    ]
    return f'<nav aria-label="Contents"><ul>{"".join(items)}</ul></nav>' if items else ""


def anchor(heading: str) -> str:
    """Return the id that nbconvert gives a heading."""
    return html.escape(_plain(heading).replace(" ", "-"), quote=True)


def fold_code(body: str) -> str:
    """Put each code cell's input into a closed <details>, so that prose and figures lead."""
    opened = '<details class="code"><summary>code</summary><div class="highlight'
    body = body.replace('<div class="highlight', opened)
    return re.sub(r"(<details class=\"code\">.*?</pre></div>)", r"\1</details>", body, flags=re.S)


def _body(notebook: Any) -> str:
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True)
    exporter.exclude_output_prompt = True
    body, _ = exporter.from_notebook_node(notebook)
    return str(body)


def _plain(markdown: str) -> str:
    return re.sub(r"[`*]", "", markdown)


def _page(title: str, contents: str, body: str) -> str:
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{html.escape(_plain(title))}</title>"
        f"<style>{_STYLE.read_text(encoding='utf-8')}</style></head>"
        f"<body>{contents}<main>{body}</main></body></html>\n"
    )
