"""Figures that need no display, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b0528c", "#8a6d00", "#2e86b5", "#5b5bd6", "#b03030")
"""Of lines and points, in this order: apart for the colour-blind, and each at 3:1 or more on white."""

_MARKERS = "osD^vPX*"
_DASHES = ("-", "--", "-.", ":")
_DPI = 150


def figure_of(width: float, height: float, rows: int = 1, columns: int = 1, **subplots: Any) -> tuple[Any, Any]:
    """A figure of so many inches that needs no display, and its axes: one, or an array of them.

    Args:
        width: in inches.
        height: in inches.
        rows: of axes.
        columns: of axes.
        **subplots: as for matplotlib's ``Figure.subplots``, such as ``sharex``.
    """
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, **subplots)
    for each in figure.axes:
        each.set_prop_cycle(cycler(color=COLOURS))
    return figure, axes


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the line of that number, so that no two lines are told apart by colour alone."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "markersize": 4,
        "linewidth": 1.4,
    }


def save_figure(figure: Any, folder: Path, stem: str) -> tuple[Path, Path]:
    """Write a figure as ``stem.png`` and ``stem.svg`` to a folder that is there; their paths.

    Equal figures give equal files. The SVG keeps text as text.
    """
    from matplotlib import rc_context

    png, svg = folder / f"{stem}.png", folder / f"{stem}.svg"
    figure.savefig(png, dpi=_DPI, metadata={"Software": None})
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": stem}):
        figure.savefig(svg, metadata={"Date": None})
    return png, svg
