"""One self-contained page of words, figures and tables.

It asks the network for nothing and runs no script, and says so to the browser, which then would refuse to. It follows
the reader's light or dark setting, prints light, and can be read without eyes or mouse: one heading over each part,
a list of contents, words for each figure, its numbers in a table below it, and tables that scroll by keyboard.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from siamesenorm.data.files import write_whole

from .svg import DARK_INK, DARK_PAPER, LIGHT_INK, LIGHT_PAPER, colour_name, inline_svg, on_paper

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass
class _Section:
    heading: str
    name: str
    parts: list[str] = field(default_factory=list)


class Report:
    """A page that grows from top to bottom, and is then written.

    Words are plain text: an empty line starts a new paragraph, and what stands between two backticks is code. All text
    is escaped, so that it may come from data.

    Args:
        title: of the page.
        intro: words below the title: what was done, and how to read the page.
    """

    def __init__(self, title: str, intro: str) -> None:
        self.title = title
        self.intro = intro
        self._sections: list[_Section] = []
        self._figures = 0
        self._tables = 0
        self._colours: set[str] = set()

    def section(self, heading: str) -> None:
        """Begin a part of the page, to which all belongs that comes before the next."""
        self._sections.append(_Section(heading, f"section-{len(self._sections) + 1}"))

    def text(self, words: str) -> None:
        """Add paragraphs.

        Raises:
            ValueError: no section has begun.
        """
        self._add(_paragraphs(words))

    def figure(self, figure: Any, *, title: str, words: str, data: Mapping[str, Sequence[Any]] | None = None) -> None:
        """Add a figure with a caption.

        Args:
            figure: of matplotlib; drawn once, now.
            title: what it is of, in a few words.
            words: what it shows, for those who see it and those who do not.
            data: its numbers, as a column of equally many values by name; shown on demand.

        Raises:
            ValueError: no section has begun, or the columns are not equally long.
        """
        number = self._figures + 1
        name = f"figure-{number}"
        numbers = ""
        if data is not None:
            rows = list(zip(*data.values(), strict=True))
            table = _table(list(data), rows, f"The numbers of figure {number}", f"{name}-data")
            numbers = f"<details><summary>The numbers of figure {number}</summary>{table}</details>"
        drawn = inline_svg(figure, name, title, self._colours)
        caption = f"<strong>Figure {number}. {_inline(title)}</strong>{_paragraphs(words)}"
        self._add(f'<figure id="{name}">{drawn}<figcaption>{caption}</figcaption>{numbers}</figure>')
        self._figures = number

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str) -> None:
        """Add a table, whose first column names the rows.

        Args:
            columns: their names.
            rows: each of as many values; numbers are shown to four digits that count, ``None`` and NaN as a dash.
            caption: what it is of.

        Raises:
            ValueError: no section has begun, or a row has more or fewer values.
        """
        number = self._tables + 1
        self._add(_table(columns, rows, f"Table {number}. {caption}", f"table-{number}"))
        self._tables = number

    def write(self, path: Path) -> None:
        """Write the page, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        write_whole(path, self.render())

    def render(self) -> str:
        """The page as HTML."""
        contents = "".join(f'<li><a href="#{each.name}">{_inline(each.heading)}</a></li>' for each in self._sections)
        nav = f'<nav aria-labelledby="contents"><h2 id="contents">Contents</h2><ol>{contents}</ol></nav>'
        sections = "".join(
            f'<section aria-labelledby="{each.name}"><h2 id="{each.name}">{_inline(each.heading)}</h2>'
            f"{''.join(each.parts)}</section>"
            for each in self._sections
        )
        title = html.escape(self.title)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>\n{self._style()}</style>\n</head>\n'
            '<body>\n<a class="skip" href="#main">Skip to the report</a>\n'
            f"<header><h1>{_inline(self.title)}</h1>{_paragraphs(self.intro)}</header>\n"
            f'{nav if self._sections else ""}\n<main id="main" tabindex="-1">\n{sections}\n</main>\n</body>\n</html>\n'
        )

    def _add(self, part: str) -> None:
        if not self._sections:
            raise ValueError("a section has to begin before anything is put into it")
        self._sections[-1].parts.append(part)

    def _style(self) -> str:
        """The style sheet, with a light and a dark value of each colour."""

        def values(paper: str, ink: str, *, dark: bool) -> str:
            figures = "".join(f" {colour_name(each)}: {on_paper(each, dark=dark)};" for each in sorted(self._colours))
            return f"--paper: {paper}; --ink: {ink};{figures}"

        light, dark = values(LIGHT_PAPER, LIGHT_INK, dark=False), values(DARK_PAPER, DARK_INK, dark=True)
        return (
            f":root {{ {light} }}\n"
            f"@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark} }} }}\n"
            + (files(__package__) / "page.css").read_text(encoding="utf-8")
        )


def _paragraphs(words: str) -> str:
    return "".join(f"<p>{_inline(part.strip())}</p>" for part in re.split(r"\n\s*\n", words) if part.strip())


def _inline(words: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(words))


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str, name: str) -> str:
    columns = list(columns)
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"a row of {len(row)} values in a table of {len(columns)} columns: {row!r}")
    head = "".join(
        f'<th scope="col"{_kind([row[index] for row in rows])}>{html.escape(str(column))}</th>'
        for index, column in enumerate(columns)
    )
    body = "".join(f"<tr>{''.join(map(_cell, range(len(columns)), row))}</tr>" for row in rows)
    # What scrolls must be reachable by keyboard, and then has to say what it is.
    return (
        f'<div class="wide" role="region" aria-labelledby="{name}" tabindex="0"><table>'
        f'<caption id="{name}">{_inline(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(column: int, value: Any) -> str:
    tag = '<th scope="row"' if column == 0 else "<td"
    return f"{tag}{_kind([value])}>{_shown(value)}</{tag[1:3]}>"


def _kind(values: Sequence[Any]) -> str:
    """What makes numbers stand under each other, where all of a column's values are numbers or none."""
    numbers = [isinstance(value, Real) and not isinstance(value, bool) for value in values if value is not None]
    return ' class="number"' if numbers and all(numbers) else ""


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        return '<span aria-label="none">–</span>'
    if isinstance(value, Integral) and not isinstance(value, bool):
        return f"{value:,}".replace("-", "−")
    if isinstance(value, Real) and not isinstance(value, bool):
        return re.sub("^-", "−", f"{value:.4g}")
    return html.escape(str(value))
