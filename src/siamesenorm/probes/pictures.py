"""The figures of probed models side by side, and what they show in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..report import figure_of, line_style

__all__ = ["Picture", "pictures"]

Result = Mapping[str, Any]
Line = tuple[str, list[float], list[float]]

# More lines of one model than this say nothing apart.
_MOST_STREAMS = 4


@dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
        section: of a report.
        stem: of its files.
        title: what it is of.
        figure: of matplotlib.
        words: how to read it, and what it shows.
        data: its numbers by column.
    """

    section: str
    stem: str
    title: str
    figure: Any
    words: str
    data: dict[str, list[Any]]


def pictures(results: Sequence[Result]) -> Iterator[Picture]:
    """Every figure that there is something for, in the order of a report.

    Args:
        results: as in ``probe.json``, one for each model; a run's ``trace`` of ``step``, ``loss`` and ``grad_norm``.
    """
    if any(result["sites"] for result in results):
        yield from _of_sites([result for result in results if result["sites"]])
    makers: tuple[tuple[str, Callable[[Sequence[Result]], Picture]], ...] = (
        ("removed", _removed),
        ("blocks", _blocks),
        ("skips", _skips),
        ("angles", _angles),
        ("lens", _lens),
        ("rank", _rank),
        ("trace", _trace),
    )
    for table, make in makers:
        given = [result for result in results if _has(result, table)]
        if given:
            yield make(given)


def _has(result: Result, table: str) -> bool:
    if table in ("removed", "lens"):
        return bool(result["depth"]) and "loss" in result["depth"][0]
    if table == "rank":
        return bool(result["depth"]) and "effective_rank" in result["depth"][0]
    return bool(result[table])


_STREAMS = "Streams and branches"
_DEPTH = "Depth"
_STABILITY = "Stability"


def _of_sites(results: Sequence[Result]) -> Iterator[Picture]:
    def per_stream(column: str, pick: Callable[[Sequence[float]], float] = np.mean) -> list[Line]:
        return [line for result in results for line in _stream_lines(result, column, pick)]

    yield _by_site(
        "stream_rms",
        "Size of the streams",
        "Root mean square of each stream as a sublayer reads it. A stream that grows with depth leaves later branches "
        "less weight in it.",
        per_stream("rms"),
        "RMS of the stream",
        log=True,
    )
    yield _by_site(
        "branch_rms",
        "Size of what the branches give",
        "Root mean square of each branch's output.",
        [line for result in results for line in _site_lines(result, "branch_rms")],
        "RMS of the branch output",
        log=True,
    )
    yield _by_site(
        "ratio",
        "What the branches give, beside each stream",
        "The branch output's root mean square over that of the stream that it is added to, before any factor of the "
        "update. Far below 1, a branch hardly changes the stream.",
        per_stream("ratio"),
        "RMS of output / RMS of stream",
        log=True,
    )
    yield _by_site(
        "cosine",
        "Direction of what the branches give",
        "Mean cosine between a token's branch output and its stream: above 0 the branch adds to what is there, below 0 "
        "it takes away, at 0 it writes something new.",
        per_stream("cosine"),
        "cosine of output and stream",
    )
    if any(len(_streams(result)) > 1 for result in results):
        yield _by_site(
            "share",
            "Where the branches' input comes from",
            "The share of what a branch reads that comes from each stream, by the size of its term: of two streams "
            "read alike, each has half.",
            per_stream("share", max),
            "share of the branch input",
            limits=(0, 1),
        )
    if "stream_grad" in results[0]["sites"][0]:
        yield _by_site(
            "stream_grad",
            "Gradients of the streams",
            "Norm of the loss's gradient by each stream, from the sublayer that reads it on. A line that falls towards "
            "the left vanishes on its way back; one that rises there explodes.",
            per_stream("stream_grad"),
            "gradient norm of the stream",
            log=True,
        )
        yield _by_site(
            "parameter_grad",
            "Gradients of the sublayers' parameters",
            "Norm of the loss's gradient by all parameters of a sublayer: branch, norms, and what the scheme adds.",
            [line for result in results for line in _site_lines(result, "parameter_grad")],
            "gradient norm of the parameters",
            log=True,
        )


def _by_site(
    stem: str,
    title: str,
    meaning: str,
    lines: Sequence[Line],
    label: str,
    *,
    log: bool = False,
    limits: tuple[float, float] | None = None,
) -> Picture:
    figure, axes = figure_of(7.5, 3.9)
    _draw(axes, lines, "sublayer", label, log=log)
    if limits is not None:
        axes.set_ylim(*limits)
    words = f"{meaning}\n\n{_ends(lines, 'sublayer')}"
    return Picture(_STREAMS, stem, title, figure, words, _columns(lines, "sublayer"))


def _removed(results: Sequence[Result]) -> Picture:
    """Loss against the number of the deepest blocks that are gone."""
    lines = []
    for result in results:
        rows = sorted(result["depth"], key=lambda row: row["removed"])
        lines.append((result["label"], [row["removed"] for row in rows], [row["loss_increase"] for row in rows]))
    figure, axes = figure_of(7.5, 3.9)
    _draw(axes, lines, "deepest blocks removed", f"increase of {results[0]['loss_label']}")
    words = (
        "How much the loss on held-out data rises when the deepest blocks are taken out and the rest is left as it is. "
        "A model whose deep blocks do little hardly loses by it.\n\n"
    )
    fewest = min(result["blocks_of_model"] for result in results)
    for count in dict.fromkeys((1, max(fewest // 4, 1), max(fewest // 2, 1))):
        words += _compared(
            f"Without the deepest {'block' if count == 1 else f'{count} blocks'}, the loss changes by",
            [(label, dict(zip(x, y, strict=True)).get(count)) for label, x, y in lines],
        )
    return Picture(
        _DEPTH, "deepest_removed", "The deepest blocks removed", figure, words, _columns(lines, "blocks removed")
    )


def _blocks(results: Sequence[Result]) -> Picture:
    """Loss without each block."""
    lines = []
    for result in results:
        rows = result["blocks"]
        lines.append((result["label"], [row["block"] for row in rows], [row["loss_increase"] for row in rows]))
    figure, axes = figure_of(7.5, 3.9)
    _draw(axes, lines, "block removed", f"increase of {results[0]['loss_label']}")
    words = "How much the loss on held-out data rises when one block is taken out.\n\n"
    for label, x, y in lines:
        if not all(map(math.isfinite, y)):
            words += f"The loss of `{label}` is not finite without some of its blocks. "
            continue
        most, least = int(np.argmax(y)), int(np.argmin(y))
        words += (
            f"`{label}` loses most without block {x[most]:g} ({_signed(y[most])}) and least without block {x[least]:g} "
            f"({_signed(y[least])}). "
        )
    return Picture(_DEPTH, "block_removed", "One block removed", figure, words, _columns(lines, "block"))


def _skips(results: Sequence[Result]) -> Picture:
    """How later blocks change without an earlier one."""
    maps = []
    words = (
        "Each square is how much what a later block (to the right) gives changes when an earlier one (downwards) is "
        "taken out: 0 is not at all, 1 as much as it is itself. A row that stays dark is a block that later ones do "
        "not build upon.\n\n"
    )
    data: dict[str, list[Any]] = {"model": [], "skipped": [], "block": [], "effect": []}
    for result in results:
        size = result["blocks_of_model"]
        values = np.full((size, size), np.nan)
        for row in result["skips"]:
            values[row["skipped"], row["block"]] = row["effect"]
            for key in ("skipped", "block", "effect"):
                data[key].append(row[key])
            data["model"].append(result["label"])
        maps.append((result["label"], values))
        if not np.isfinite(values).any():
            words += f"In `{result['label']}` no effect is finite. "
            continue
        most = max(result["skips"], key=lambda row: _or_least(row["effect"]))
        words += (
            f"In `{result['label']}` the mean effect is {np.nanmean(values):.3g}, and the largest "
            f"{most['effect']:.3g}, of block {most['skipped']} on block {most['block']}. "
        )
    figure = _heat_maps(maps, "block", "block removed", "relative change of its branches' output")
    return Picture(_DEPTH, "skips", "Effect of a block on later ones", figure, words, data)


def _angles(results: Sequence[Result]) -> Picture:
    """Angular distances of the readout."""
    maps = []
    words = (
        "Each square is the mean angle between the readouts at two depths, from the depth downwards on to the one so "
        "many blocks further, in half turns: 0 is the same direction, 0.5 a right angle. Dark squares are stretches "
        "of blocks that hardly turn the readout.\n\n"
    )
    data: dict[str, list[Any]] = {"model": [], "of": [], "depth": [], "distance": [], "angle": []}
    for result in results:
        size = result["blocks_of_model"]
        values = np.full((size, size), np.nan)
        for row in result["angles"]:
            if row["of"] == "readout":
                values[row["depth"], row["distance"] - 1] = row["angle"]
            data["model"].append(result["label"])
            for key in ("of", "depth", "distance", "angle"):
                data[key].append(row[key])
        maps.append((result["label"], values))
        single = values[:, 0]
        if not np.isfinite(single).any():
            words += f"In `{result['label']}` no angle is finite. "
            continue
        words += (
            f"In `{result['label']}` one block turns the readout by {np.nanmean(single):.3g} on average, most at block "
            f"{int(np.nanargmax(single))} ({np.nanmax(single):.3g}) and least at block {int(np.nanargmin(single))} "
            f"({np.nanmin(single):.3g}). "
        )
    figure = _heat_maps(maps, "blocks further", "from depth", "angle in half turns", first_column=1)
    return Picture(_DEPTH, "angles", "Angles between depths", figure, words, data)


def _lens(results: Sequence[Result]) -> Picture:
    """What the model would say at each depth."""
    figure, (left, right) = figure_of(9.5, 3.9, 1, 2)
    losses, divergences = ([_depth_line(result, column) for result in results] for column in ("loss", "divergence"))
    _draw(left, losses, "depth in blocks", results[0]["loss_label"])
    _draw(right, divergences, "depth in blocks", results[0]["divergence_label"])
    words = (
        "What a model predicts if its own readout, final norm and head are put behind an earlier block: on the left "
        "its loss, on the right how far the prediction is from that of the whole model.\n\n"
    )
    for label, x, y in losses:
        if not all(map(math.isfinite, y)):
            words += f"The loss of `{label}` is not finite at every depth. "
            continue
        close = next(depth for depth, loss in zip(x, y, strict=True) if abs(loss - y[-1]) <= 0.1 * abs(y[0] - y[-1]))
        words += (
            f"`{label}` goes from {y[0]:.4g} at depth 0 to {y[-1]:.4g} at depth {x[-1]:g}, and has nine tenths of that "
            f"way behind it at depth {close:g}. "
        )
    data = _columns(losses, "depth", "loss") | {"divergence": _columns(divergences, "depth")["value"]}
    return Picture(_DEPTH, "lens", "The logit lens", figure, words, data)


def _rank(results: Sequence[Result]) -> Picture:
    """How many directions readouts take."""
    figure, (left, right) = figure_of(9.5, 3.9, 1, 2)
    ranks, shares = ([_depth_line(result, name) for result in results] for name in ("effective_rank", "participation"))
    _draw(left, ranks, "depth in blocks", "effective rank")
    _draw(right, shares, "depth in blocks", "participation ratio")
    words = (
        "How many directions the readouts of different tokens spread over: on the left by the entropy of their "
        "singular values, on the right by the participation ratio, to which large directions count more. Few "
        f"directions at some depth mean that tokens are alike there.\n\n{_ends(ranks, 'depth')}"
    )
    data = _columns(ranks, "depth", "effective rank") | {"participation ratio": _columns(shares, "depth")["value"]}
    return Picture(_DEPTH, "rank", "Directions at each depth", figure, words, data)


def _trace(results: Sequence[Result]) -> Picture:
    """Loss and gradient norm over steps, with spikes."""
    figure, both = figure_of(9.5, 3.9, 1, 2)
    words = (
        "The training loss and the gradient norm before clipping, step by step. A cross marks a spike: a value seven "
        "or more standard deviations off the mean of up to a thousand steps before it, of which there must be "
        "fifty.\n\n"
    )
    data: dict[str, list[Any]] = {"model": [], "steps": [], "spikes in loss": [], "spikes in gradient norm": []}
    for index, result in enumerate(results):
        trace, stability = result["trace"], result["stability"]
        data["model"].append(result["label"])
        data["steps"].append(len(trace["step"]))
        for axes, series, name in zip(both, ("loss", "grad_norm"), ("loss", "gradient norm"), strict=True):
            values = [math.nan if value is None else value for value in trace[series]]
            style = {**line_style(index), "marker": None, "linewidth": 1.0}
            axes.plot(trace["step"], values, label=result["label"], **style)
            found = [trace["step"].index(step) for step in stability[series]["spikes"]]
            axes.plot(
                [trace["step"][place] for place in found], [values[place] for place in found], "x", color=style["color"]
            )
            data[f"spikes in {name}"].append(len(found))
            score, judged = stability[series]["score"], stability[series]["judged"]
            said = (
                f"too few steps for a spike score of the {name}"
                if score is None
                else f"spike score of the {name} {score:.3%}, {len(found)} of {judged:,} steps"
            )
            words += f"`{result['label']}`: {said}. "
    for axes, label in zip(both, ("training loss", "gradient norm"), strict=True):
        axes.set(xlabel="step", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    if all(value is None or value > 0 for result in results for value in result["trace"]["grad_norm"]):
        both[1].set_yscale("log")
    return Picture(_STABILITY, "stability", "Loss and gradient norm over the run", figure, words, data)


def _streams(result: Result) -> list[str]:
    return list(dict.fromkeys(row["stream"] for row in result["sites"]))


def _stream_lines(result: Result, column: str, pick: Callable[[Sequence[float]], float]) -> list[Line]:
    """A line for each stream, or where there are many one of them all."""
    names = _streams(result)
    by_site: dict[int, dict[str, float]] = {}
    for row in result["sites"]:
        by_site.setdefault(row["sublayer"], {})[row["stream"]] = _or_nan(row[column])
    if len(names) > _MOST_STREAMS:
        kind = "largest" if pick is max else "mean"
        values = [float(pick(list(each.values()))) for each in by_site.values()]
        return [(f"{result['label']}, {kind} of {len(names)} streams", [float(site) for site in by_site], values)]
    lines = []
    for name in names:
        sites = [site for site, each in by_site.items() if name in each]
        label = f"{result['label']}, {name}"
        lines.append((label, [float(site) for site in sites], [by_site[site][name] for site in sites]))
    return lines


def _site_lines(result: Result, column: str) -> list[Line]:
    values = {row["sublayer"]: _or_nan(row[column]) for row in result["sites"]}
    return [(result["label"], [float(site) for site in values], list(values.values()))]


def _depth_line(result: Result, column: str) -> Line:
    rows = result["depth"]
    return result["label"], [float(row["depth"]) for row in rows], [_or_nan(row[column]) for row in rows]


def _draw(axes: Any, lines: Sequence[Line], xlabel: str, ylabel: str, *, log: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    for index, (label, x, y) in enumerate(lines):
        axes.plot(x, y, label=label, **line_style(index))
    if log and all(value > 0 for _, _, y in lines for value in y if math.isfinite(value)):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain_numbers())
        axes.yaxis.set_minor_formatter(_plain_numbers())
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _plain_numbers() -> Any:
    """Labels of a logarithmic axis: 0.02 and not 2·10⁻², and between the powers of ten where there are few of them."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    return Plain(minor_thresholds=(1.5, 0.5))


def _heat_maps(
    maps: Sequence[tuple[str, np.ndarray]], xlabel: str, ylabel: str, label: str, *, first_column: int = 0
) -> Any:
    """Squares side by side under one scale of colours."""
    from matplotlib.ticker import MaxNLocator

    columns = min(len(maps), 3)
    rows = -(-len(maps) // columns)
    figure, grid = figure_of(3.1 * columns + 1.3, 2.9 * rows + 0.3, rows, columns)
    every = list(np.atleast_1d(grid).flat)
    top = max((float(np.nanmax(values)) for _, values in maps if np.isfinite(values).any()), default=1.0) or 1.0
    for axes in every[len(maps) :]:
        axes.set_visible(False)
    for axes, (title, values) in zip(every, maps, strict=False):
        height, width = values.shape
        extent = (first_column - 0.5, first_column + width - 0.5, height - 0.5, -0.5)
        shown = axes.imshow(values, cmap="viridis", vmin=0, vmax=top, extent=extent, aspect="auto")
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    figure.colorbar(shown, ax=every, label=label)
    return figure


def _columns(lines: Sequence[Line], x: str, y: str = "value") -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"line": [], x: [], y: []}
    for label, places, values in lines:
        columns["line"] += [label] * len(places)
        columns[x] += [int(place) for place in places]
        columns[y] += values
    return columns


def _ends(lines: Iterable[Line], place: str) -> str:
    """Where each line begins and ends, and where it is highest."""
    words = []
    for label, x, y in lines:
        finite = [(value, at) for value, at in zip(y, x, strict=True) if math.isfinite(value)]
        if not finite:
            words.append(f"`{label}` is not finite anywhere.")
            continue
        highest, at = max(finite)
        words.append(
            f"`{label}` goes from {finite[0][0]:.3g} at {place} {finite[0][1]:g} to {finite[-1][0]:.3g} at {place} "
            f"{finite[-1][1]:g}; its highest is {highest:.3g} at {place} {at:g}."
        )
        if len(finite) < len(y):
            words.append(f"{_number(len(y) - len(finite), 'value')} of it are not finite.")
    return " ".join(words)


def _compared(start: str, values: Sequence[tuple[str, float | None]]) -> str:
    known = [(label, value) for label, value in values if value is not None]
    text = ", ".join(f"{_signed(value)} in `{label}`" for label, value in known)
    words = f"{start} {text}."
    if len(known) > 1:
        most = max(known, key=lambda each: each[1])
        words += f" `{most[0]}` loses most."
    return words + " "


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _signed(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−")


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _or_least(value: float | None) -> float:
    return -math.inf if value is None or math.isnan(value) else value
