"""The explorer without a browser: its words, its figure, and what stands there without clicks."""

from typing import Any

import pytest

from labhelpers import explorer
from labhelpers.explorer import BUDGETS_BYTES, Explorer, as_html, explorer_figure, show_explorer
from labhelpers.recommendation import in_words, recommend
from labhelpers.references import article_curve


class Handle:
    """Stand in for the page: keep what is displayed."""

    def __init__(self) -> None:
        self.updates: list[dict[str, str]] = []

    def update(self, bundle: dict[str, str], **_: Any) -> None:
        self.updates.append(bundle)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def display(bundle: Any, **options: Any) -> Handle:
        found.append(Handle() if options.get("display_id") else bundle)
        return found[-1]

    monkeypatch.setattr(explorer, "display", display)
    monkeypatch.setattr(explorer, "display_widget", found.append)
    return found


def test_without_clicks_the_answer_is_text(shown: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(explorer, "in_frontend", lambda: False)
    show_explorer([article_curve()], 0.95)
    (bundle,) = shown
    expected = in_words(recommend(article_curve(), 0.95), article_curve())
    assert expected.replace("**", "") in bundle["text/plain"]
    assert "run this cell to get the sliders" in bundle["text/plain"]
    assert as_html(expected) in bundle["text/html"]


def test_the_words_follow_the_sliders(shown: list[Any]):
    made = Explorer([article_curve()], 0.93)
    made.show()
    assert "train with batches of 256" in made._words.value
    made._share.value = 0.95
    assert "train with batches of 1,024" in made._words.value
    made._budget.value = BUDGETS_BYTES[2]
    assert "memory budget of 128.0 MiB limits it" in made._words.value
    made._effective.value = 512
    assert "2 × 256 = 512 images" in made._words.value
    figure = next(each for each in shown if isinstance(each, Handle))
    assert len(figure.updates) == 4
    assert all("image/png" in bundle for bundle in figure.updates)
    made._chosen[0].value = False
    assert made._words.value == "Choose a run."
    assert figure.updates[-1] == {"text/plain": "no run is chosen"}


def test_the_figure_stars_what_is_recommended():
    curve = article_curve()
    figure = explorer_figure([curve], {curve.label: recommend(curve, 0.93)})
    stars = [axes.collections[-1].get_offsets()[0] for axes in figure.axes]
    assert stars[0].tolist() == [256, 34738]
    assert stars[1].tolist() == pytest.approx([106.2, 34738])


def test_nothing_recommended_draws_no_star():
    curve = article_curve()
    figure = explorer_figure([curve], {curve.label: recommend(curve, 0.93, memory_budget_bytes=1)})
    assert all(len(axes.collections[-1].get_offsets()) == 0 for axes in figure.axes)


def test_html_is_escaped_and_bold():
    assert as_html("**a < b** & c") == "<b>a &lt; b</b> &amp; c"
