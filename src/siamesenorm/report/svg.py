"""A figure as SVG that lives inside a page: its names are its own, its colours follow the page, and it says what it is.

Black is the page's ink, white its paper, and greys are in between. Other colours stay, on a dark page as much lighter
as it takes to be told from it. What must not follow the page, such as text upon an image, is given the gid
:data:`AS_DRAWN`.
"""

from __future__ import annotations

import io
import re
from typing import Any
from xml.etree import ElementTree

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_COLOUR = re.compile(r"(fill|stroke|stop-color): (#[0-9a-f]{6})")
_BLACK = "#000000"
AS_DRAWN = "as-drawn"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")

LIGHT_PAPER, LIGHT_INK = "#ffffff", "#1b1f24"
DARK_PAPER, DARK_INK = "#14171b", "#e6e8ea"
# What WCAG asks of text; a line of a figure may have less.
_CONTRAST = 4.5


def inline_svg(figure: Any, name: str, title: str, colours: set[str]) -> str:
    """A matplotlib figure as an ``<svg>`` element.

    Args:
        figure: drawn once, here.
        name: starts every id, so that no two figures of a page share one.
        title: read out for the figure, before :func:`described`.
        colours: the colours that the figure uses, as ``#rrggbb``, are added to it; each is used as a variable of CSS
            (:func:`colour_name`).
    """
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(stream.getvalue())
    for element in list(root):
        # A style of every element would be one of the whole page.
        if element.tag == f"{{{_SVG}}}metadata" or element.find(f"{{{_SVG}}}style") is not None:
            root.remove(element)
    _follow_the_page(root, colours)
    _own_names(root, name)
    for size in ("width", "height"):
        del root.attrib[size]
    width = float(root.attrib["viewBox"].split()[2])
    # What has no colour is black to SVG.
    colours.add(_BLACK)
    ink = f"var({colour_name(_BLACK)})"
    root.set("style", f"max-width: {width:g}pt; fill: {ink}; stroke-linejoin: round; stroke-linecap: butt")
    root.set("preserveAspectRatio", "xMinYMid")
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title")
    root.set("aria-describedby", f"{name}-desc")
    for place, (tag, text) in enumerate((("title", title), ("desc", described(figure)))):
        element = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = text
        root.insert(place, element)
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def described(figure: Any) -> str:
    """What there is to see in a figure: the axes with what they show and from where to where, and the legend's names.

    It names what a picture has at a glance, for those who do not see it; what follows from it is for words.
    """
    return " ".join(_described(axes) for axes in figure.axes if axes.get_visible() and axes.axison) or "A picture."


def colour_name(colour: str) -> str:
    """The variable of CSS that stands for a colour ``#rrggbb``."""
    return f"--c{colour[1:]}"


def on_paper(colour: str, *, dark: bool) -> str:
    """What a colour of a figure is on a light page or a dark one, as ``#rrggbb``."""
    paper, ink = (DARK_PAPER, DARK_INK) if dark else (LIGHT_PAPER, LIGHT_INK)
    red, green, blue = channels = _channels(colour)
    if red == green == blue:
        return _mixed(_channels(ink), _channels(paper), red)
    if not dark:
        return colour
    for share in range(20):
        found = _mixed(channels, (1.0, 1.0, 1.0), share / 20)
        if contrast(found, paper) >= _CONTRAST:
            return found
    return ink


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' brightness, from 1 to 21, as WCAG 2 defines it."""
    low, high = sorted(_luminance(_channels(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def _described(axes: Any) -> str:
    parts = []
    for name, axis, limits in (("x", axes.xaxis, axes.get_xlim()), ("y", axes.yaxis, axes.get_ylim())):
        scale = "" if axis.get_scale() == "linear" else f", {axis.get_scale()} scale"
        label = axis.label.get_text() or f"no name on {name}"
        ticks = [tick.get_text() for tick in axis.get_ticklabels() if tick.get_text()]
        low, high = (f"{limit:.3g}" for limit in limits)
        of = f"{ticks[0]} to {ticks[-1]}" if ticks and not _are_numbers(ticks) else f"{low} to {high}"
        parts.append(f"{name}: {label}, {of}{scale}")
    title = axes.get_title()
    text = (f"{title}. " if title else "") + "; ".join(parts) + "."
    legend = axes.get_legend()
    names = [each.get_text() for each in legend.get_texts()] if legend is not None else []
    return text + (f" Shown: {', '.join(names)}." if names else "")


def _are_numbers(ticks: list[str]) -> bool:
    return all(tick.startswith("$") or re.fullmatch(r"[-−0-9.e+]+", tick) for tick in ticks)


def _follow_the_page(element: ElementTree.Element, colours: set[str]) -> None:
    """Make variables of the colours of an element and of all within it."""
    if element.get("id") == AS_DRAWN:
        element.set("style", f"fill: {_BLACK}")
        return
    if "style" in element.attrib:
        element.set("style", _COLOUR.sub(lambda found: _variable(found, colours), element.attrib["style"]))
    for inner in element:
        _follow_the_page(inner, colours)


def _own_names(root: ElementTree.Element, name: str) -> None:
    """Keep the ids that something refers to, and put the figure's name before them."""
    used = set()
    for element in root.iter():
        for key, value in element.attrib.items():
            used |= set(_REFERENCE.findall(value))
            if key.endswith("href") and value.startswith("#"):
                used.add(value[1:])
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "id" and value in used:
                element.set(key, f"{name}-{value}")
            elif key == "id":
                del element.attrib[key]
            elif key.endswith("href") and value.startswith("#"):
                element.set(key, f"#{name}-{value[1:]}")
            elif "url(#" in value:
                element.set(key, _REFERENCE.sub(rf"url(#{name}-\1)", value))


def _variable(found: re.Match[str], colours: set[str]) -> str:
    colours.add(found[2])
    return f"{found[1]}: var({colour_name(found[2])})"


def _channels(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return red, green, blue


def _mixed(one: tuple[float, float, float], other: tuple[float, float, float], share: float) -> str:
    """``share`` of the other colour in the one."""
    numbers = (round(255 * (a + (b - a) * share)) for a, b in zip(one, other, strict=True))
    return "#" + "".join(f"{number:02x}" for number in numbers)


def _luminance(channels: tuple[float, float, float]) -> float:
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
