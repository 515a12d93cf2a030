"""The report in a real browser: nothing goes wrong, all figures are drawn, no request leaves the page.

Chromium is found by SIAMESENORM_CHROMIUM or on the PATH (Debian: ``apt-get install chromium``); playwright, of the
extra ``dev``, drives it and needs no browser of its own. Where either is missing, these tests are skipped with a word
about it, but in CI they fail.
"""

from __future__ import annotations

import os
import shutil

import pytest

from siamesenorm.probes.showing import write
from tests.probes.results import result

pytestmark = [pytest.mark.browser, pytest.mark.slow]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# Of every text in a figure, the contrast with the figure's own paper.
_CONTRASTS = """() => {
  const light = c => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b }
  const paper = light(getComputedStyle(document.body).backgroundColor)
  return [...document.querySelectorAll('figure svg text')].map(text => {
    const ink = light(getComputedStyle(text).fill)
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05) })
}"""
# Of every figure: its size, how many shapes and texts have any, and how many of those are outside of it.
_DRAWN = """() => [...document.querySelectorAll('figure')].map(figure => {
  const svg = figure.querySelector('svg').getBoundingClientRect()
  const boxes = what => [...figure.querySelectorAll('svg ' + what)].map(each => each.getBoundingClientRect())
  const texts = boxes('text')
  return {
    width: svg.width, height: svg.height,
    shapes: boxes('g path, g use, g image').filter(box => box.width + box.height > 0).length,
    texts: texts.filter(box => box.width > 0 && box.height > 0).length,
    outside: texts.filter(b => b.left < svg.left - 2 || b.right > svg.right + 2 || b.bottom > svg.bottom + 2).length,
  }
})"""


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("SIAMESENORM_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    missing = None
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing = "playwright is missing: pip install -e '.[dev]'"
    if path is None:
        missing = "no Chromium on the PATH or in SIAMESENORM_CHROMIUM: apt-get install chromium"
    if missing is not None:
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as started:
        # Without its sandbox, since it may be run by root, who looks at no page but ours here.
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write([result("pre", "pre"), result("siamese", "siamese"), result("attnres", "attnres", blocks=3)], folder)
    return folder / "report.html"


@pytest.fixture
def opened(browser, report):
    """Opens the report; nothing may be said on the console or be asked for but the page itself."""
    said, asked, pages = [], [], []

    def open_page(**options):
        page = browser.new_page(**options)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(report.as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()] * len(pages)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn_and_can_be_read(opened, scheme):
    page = opened(color_scheme=scheme)
    figures = page.evaluate(_DRAWN)
    assert len(figures) == 14
    for figure in figures:
        assert figure["width"] > 300
        assert figure["height"] > 150
        assert figure["shapes"] > 20
        assert figure["texts"] > 8
        assert figure["outside"] == 0
    contrasts = page.evaluate(_CONTRASTS)
    assert min(contrasts) > 4.5
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")
    # More than paper and ink: lines in their colours.
    shot = page.locator("figure svg").first.screenshot()
    assert len(shot) > 5000


def test_print_is_light_and_keeps_figures_whole(opened):
    page = opened(color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert min(page.evaluate(_CONTRASTS)) > 4.5
    assert page.evaluate("getComputedStyle(document.querySelector('figure')).breakInside") == "avoid"
    assert not page.locator("summary").first.is_visible()
    pdf = page.pdf(format="A4", print_background=True)
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000


def test_a_screen_reader_finds_everything(opened):
    page = opened()
    for landmark in ("banner", "navigation", "main"):
        assert page.get_by_role(landmark).count() == 1
    assert page.get_by_role("img").count() == page.get_by_role("figure").count() == 14
    image = page.get_by_role("img", name="Size of the streams")
    assert image.count() == 1
    described = image.get_attribute("aria-describedby")
    assert "RMS of the stream" in page.locator(f"#{described}").text_content()
    assert page.get_by_role("table", name="Table 1.").get_by_role("rowheader").all_text_contents() == [
        "pre", "siamese", "attnres",
    ]  # fmt: skip
    assert page.get_by_role("heading", level=1).count() == 1


def test_a_keyboard_gets_everywhere(opened):
    page = opened()

    def focused():
        return page.evaluate("document.activeElement.className || document.activeElement.tagName")

    page.keyboard.press("Tab")
    assert focused() == "skip"
    assert page.locator(".skip").is_visible()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    seen = set()
    for _ in range(4):
        page.keyboard.press("Tab")
        seen.add(focused())
        if focused() == "SUMMARY":
            break
    assert "wide" in seen
    assert focused() == "SUMMARY"
    numbers = page.locator("details table").first
    assert not numbers.is_visible()
    page.keyboard.press("Enter")
    assert numbers.is_visible()


def test_a_narrow_window_needs_no_scrolling_sideways(opened):
    page = opened(viewport={"width": 380, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
