"""The site of these pages and of the API reference: ``sphinx-build -W docs build/docs``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

import siamesenorm

project = "siamesenorm"
author = "The siamesenorm developers"
version = release = siamesenorm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"siamesenorm {version}"
html_show_copyright = False

# Links to headings, as on the pages where the repository is shown.
myst_heading_anchors = 4
# A single backtick in a docstring is code, as it is in the pages.
default_role = "code"
# What is shown as it stands is mostly an equation.
highlight_language = "none"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# An attribute is listed where it is declared, too.
napoleon_use_ivar = True

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+\w+\.md)\)")


def keep_equations(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show what is indented in the docstring of a module as it stands there: equations, and tables of them."""
    if what != "module":
        return
    out: list[str] = []
    for line in lines:
        begins = line.startswith("    ") and out and not out[-1]
        inside = bool(out) and any(each.startswith("    ") for each in out[-2:])
        if begins and not inside:
            out += ["::", ""]
        out.append(line)
    lines[:] = out


def leave_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Take the link from what names a page of the repository that the site has not; after a look whether it exists."""

    def named(link: re.Match[str]) -> str:
        page = (Path(app.srcdir) / docname).parent / link[2]
        if not page.is_file():
            logging.getLogger(__name__).warning("there is no %s", link[2], location=docname)
        inside = page.resolve().is_relative_to(Path(app.srcdir).resolve())
        return link[0] if inside else link[1]

    source[0] = _OUTSIDE.sub(named, source[0])


def stand_alone(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let what has no heading, such as a table that a script wrote, be in no table of contents."""
    if not re.search(r"^# ", source[0], re.MULTILINE):
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", keep_equations)
    app.connect("source-read", leave_the_site)
    app.connect("source-read", stand_alone)
