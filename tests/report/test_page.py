"""The page that a report is: its structure, that data never becomes markup, and that it is whole on its own."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from siamesenorm.report import AS_DRAWN, COLOURS, Report, figure_of, line_style, save_figure
from siamesenorm.report.svg import DARK_INK, DARK_PAPER, contrast, on_paper

EVIL = "<script>alert(1)</script> & \"'"
_VOID = {"meta", "link", "br"}


class Tree(HTMLParser):
    """Every element with its attributes, the text in each, and that all of them are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def lines(**labels):
    figure, axes = figure_of(4, 3)
    for index, (label, values) in enumerate(labels.items()):
        axes.plot(values, **line_style(index), label=label)
    axes.set(xlabel="step", ylabel="loss", title="Over steps")
    axes.legend()
    return figure


@pytest.fixture
def report():
    made = Report("A study", "What was done.\n\nHow to read it.")
    made.section("Loss")
    made.text("Both fall; see `summary.json`.")
    made.figure(lines(pre=[3, 2], siamese=[3, 1]), title="Loss over steps", words="Both fall.", data={"a": [1, 2]})
    made.section("Numbers")
    made.table(("scheme", "loss", "steps"), [("pre", -2.5, 1200), ("siamese", float("nan"), None)], "The last losses")
    made.figure(lines(pre=[1, 2]), title="Again", words="It rises.")
    return made


def test_structure(report):
    tree = Tree(report.render())
    assert tree.all("html") == [{"lang": "en"}]
    for landmark in ("header", "nav", "main"):
        assert len(tree.all(landmark)) == 1
    headings = [name for name, _ in tree.elements if re.fullmatch(r"h\d", name)]
    assert headings == ["h1", "h2", "h2", "h2"]
    ids = [attributes["id"] for _, attributes in tree.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for attributes in tree.all("a")]
    assert links == ["#main", "#section-1", "#section-2"]
    # The first thing that a keyboard reaches is the way past the contents.
    assert next(attributes for name, attributes in tree.elements if name == "a")["class"] == "skip"
    for _, attributes in tree.elements:
        for key in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(key, ids[0]) in ids
        if (attributes.get("href") or "").startswith("#"):
            assert attributes["href"][1:] in ids
        for used in re.findall(r"url\(#([^)]*)\)", " ".join(filter(None, attributes.values()))):
            assert used in ids


def test_figures_say_what_they_are(report):
    tree = Tree(report.render())
    assert len(tree.all("figure")) == len(tree.all("figcaption")) == len(tree.all("svg")) == 2
    assert {each["role"] for each in tree.all("svg")} == {"img"}
    assert tree.text["title"] == ["A study", "Loss over steps", "Again"]
    assert tree.text["desc"][0].startswith("Over steps. x: step, ")
    assert tree.text["desc"][0].endswith("Shown: pre, siamese.")
    assert tree.text["strong"] == ["Figure 1. Loss over steps", "Figure 2. Again"]
    assert "Both fall." in tree.text["p"]
    assert tree.text["summary"] == ["The numbers of figure 1"]


def test_tables_can_be_read_out(report):
    tree = Tree(report.render())
    assert tree.text["caption"] == ["The numbers of figure 1", "Table 1. The last losses"]
    assert [each["scope"] for each in tree.all("th")] == ["col", "row", "row", "col", "col", "col", "row", "row"]
    assert tree.text["td"] == ["−2.5", "1,200"]
    assert tree.text["span"] == ["–", "–"]
    regions = [each for each in tree.all("div") if each.get("role") == "region"]
    assert [each["tabindex"] for each in regions] == ["0", "0"]


def test_nothing_comes_from_elsewhere(report):
    page = report.render()
    tree = Tree(page)
    assert tree.all("script") == tree.all("img") == []
    assert tree.all("link") == [{"rel": "icon", "href": "data:,"}]
    assert "default-src 'none'" in page
    assert "@import" not in page
    # The names of SVG's namespaces are no addresses that anything is fetched from.
    addresses = set(re.findall(r"https?://[^\"'\s)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_what_comes_from_data_is_text():
    made = Report(EVIL, EVIL)
    made.section(EVIL)
    made.text(EVIL)
    figure, axes = figure_of(3, 2)
    axes.plot([1, 2], label=EVIL)
    axes.set(title=EVIL, xlabel=EVIL)
    axes.legend()
    made.figure(figure, title=EVIL, words=EVIL, data={EVIL: [EVIL]})
    made.table([EVIL], [[EVIL]], EVIL)
    tree = Tree(made.render())
    assert tree.all("script") == []
    for tag in ("title", "h1", "h2", "p", "desc", "strong", "th", "caption"):
        assert any(EVIL in text for text in tree.text[tag]), tag


def test_it_is_written_whole_or_not_at_all(report, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    report.write(path)
    assert path.read_text(encoding="utf-8") == report.render()
    with pytest.raises(OSError, match="No such file"):
        report.write(tmp_path / "nowhere" / "report.html")
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_what_makes_no_page_is_refused():
    made = Report("T", "")
    with pytest.raises(ValueError, match="section"):
        made.text("words")
    made.section("S")
    with pytest.raises(ValueError, match="2 values in a table of 1 columns"):
        made.table(["a"], [[1, 2]], "c")
    with pytest.raises(ValueError, match="zip"):
        made.figure(lines(a=[1]), title="t", words="w", data={"a": [1], "b": []})
    assert Tree(made.render()).all("figure") == []


def test_colours_can_be_told_from_either_paper():
    for colour in COLOURS:
        assert contrast(colour, "#ffffff") >= 3
        assert contrast(on_paper(colour, dark=True), DARK_PAPER) >= 4.5
        assert on_paper(colour, dark=False) == colour
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert (on_paper("#000000", dark=True), on_paper("#ffffff", dark=True)) == (DARK_INK, DARK_PAPER)


def test_every_colour_follows_the_page_but_what_is_told_not_to():
    figure, axes = figure_of(3, 2)
    axes.imshow(np.zeros((2, 2)))
    axes.text(0, 0, "on it", color="white", gid=AS_DRAWN)
    axes.text(1, 0, "beside it", color="white")
    made = Report("T", "")
    made.section("S")
    made.figure(figure, title="t", words="w")
    page = made.render()
    kept, followed = (re.search(rf"<text[^>]*>{words}<", page)[0] for words in ("on it", "beside it"))
    assert "fill: #ffffff" in kept
    assert "fill: var(--cffffff)" in followed
    used = set(re.findall(r"var\((--c[0-9a-f]{6})\)", page))
    for scheme in re.findall(r":root \{[^}]*--paper: [^}]*\}", page):
        assert used <= set(re.findall(r"(--c[0-9a-f]{6}):", scheme))


def test_lines_differ_in_more_than_colour():
    styles = [line_style(index) for index in range(8)]
    assert len({style["marker"] for style in styles}) == len({style["color"] for style in styles}) == 8
    assert line_style(8)["color"] == styles[0]["color"]


def test_figures_as_files(tmp_path):
    paths = save_figure(lines(pre=[3, 2]), tmp_path, "loss")
    assert [path.name for path in paths] == ["loss.png", "loss.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert ">pre<" in paths[1].read_text()
    before = [path.read_bytes() for path in paths]
    save_figure(lines(pre=[3, 2]), tmp_path, "loss")
    assert [path.read_bytes() for path in paths] == before


def test_it_needs_no_torch():
    code = "import sys, siamesenorm.report; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
