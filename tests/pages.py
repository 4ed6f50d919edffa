"""Read an HTML page as a browser would: what it loads, what its images say, where links go."""

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "img", "br", "hr", "input", "col", "area", "base", "source", "wbr"}


class Page(HTMLParser):
    """Collect the tags of a page, and check that they are closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.misnested: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self._open or self._open.pop() != tag:
            self.misnested.append(tag)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def check_page(path: Path) -> None:
    """A page needs no network, describes its images, and its own links lead somewhere."""
    page = Page(path)
    loaded = [tag.get("src") for name in ("script", "img", "iframe") for tag in page.all(name)]
    loaded += [tag.get("href") for tag in page.all("link")]
    assert [address for address in loaded if address and not address.startswith("data:")] == []
    assert page.all("script") == []
    text = path.read_text(encoding="utf-8")
    assert "@import" not in text
    assert "url(http" not in text
    assert all(image.get("alt") for image in page.all("img"))
    ids = {attributes["id"] for _, attributes in page.tags if attributes.get("id")}
    goals = [str(tag["href"]) for tag in page.all("a") if str(tag.get("href")).startswith("#")]
    assert [goal for goal in goals if goal[1:] not in ids] == []
    assert page.misnested == []
    assert page.all("html")[0]["lang"] == "en"
