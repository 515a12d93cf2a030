"""A study's report in a real browser; how that is found, and what is asked of a figure, is told in tests/report."""

import pytest

from tests.report.test_browser import _DRAWN, browser

__all__ = ["browser"]

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_every_figure_is_drawn_and_no_request_leaves_the_page(browser, done):
    said, asked = [], []
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(done.folder.report.as_uri())
    figures = page.evaluate(_DRAWN)
    assert len(figures) == 3
    for figure in figures:
        assert figure["width"] > 300
        assert figure["height"] > 150
        assert figure["shapes"] > 15
        assert figure["texts"] > 5
        assert figure["outside"] == 0
    for name in ("Validation loss over learning rate", "Training loss over steps", "Gradient norm over steps"):
        assert page.get_by_role("img", name=name).count() == 1
    assert page.get_by_role("table", name="Table 1.").get_by_role("rowheader").all_text_contents() == [
        "pre", "siamese:x=hybrid",
    ]  # fmt: skip
    assert page.get_by_text(done.comparison.advice).count() == 1
    page.close()
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [done.folder.report.as_uri()]
