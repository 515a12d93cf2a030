"""The figures of a study, each with what it shows in words and its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from siamesenorm.report import figure_of, line_style
from siamesenorm.study.axes import Axis
from siamesenorm.study.compare import Comparison, Condition
from siamesenorm.study.folder import DIVERGED
from siamesenorm.study.statistics import CONFIDENCE, Estimate

__all__ = ["Drawn", "draw"]

# More lines than that are not told apart, more panels are not looked at, and more points are not seen.
_MOST_LINES = 8
_MOST_PANELS = 6
_MOST_POINTS = 400
_MOST_TICKS = 12
_MOST_NUMBERS = 40

Lines = Sequence[Mapping[str, Any]]
"""What a run wrote of its steps."""


@dataclass(frozen=True)
class Drawn:
    """A figure.

    Attributes:
        stem: of its files.
        figure: matplotlib's.
        title: what it is of.
        words: what it shows.
        data: its numbers, as columns by name.
    """

    stem: str
    figure: Any
    title: str
    words: str
    data: Mapping[str, Sequence[Any]]


def draw(outcome: Comparison, metrics: Mapping[str, Lines]) -> list[Drawn]:
    """All figures that a study's outcome has something for.

    Args:
        outcome: of the study.
        metrics: the steps of each run, by the run's key.
    """
    measured = [condition for condition in outcome.conditions if condition.loss or condition.count(DIVERGED)]
    if not measured:
        return []
    scales = [
        axis
        for axis in outcome.study.grid
        if len({condition.values.get(axis.column) for condition in measured}) > 1
        and all(condition.places.get(axis.column) is not None for condition in measured)
    ]
    drawn = [_over(axis, measured) for axis in scales] or [_side_by_side(measured)]
    panels = _panels(outcome)
    if any(metrics.get(row["run"]) for condition in outcome.best for row in condition.rows):
        drawn += [_curves(panels, metrics), _norms(panels, metrics)]
    return drawn


def means_over(axes: Any, points: Sequence[tuple[float | None, Estimate | None]], label: str, index: int) -> None:
    """Draw the line of that number: a mean over seeds at each place, with its interval, where there is one."""
    known = [(place, found.mean, found.half or 0.0) for place, found in points if found is not None]
    places, means, halves = zip(*known, strict=True) if known else ((), (), ())
    axes.errorbar(places, means, halves, label=label, capsize=2, **line_style(index))


def _over(axis: Axis, conditions: Sequence[Condition]) -> Drawn:
    """The loss over an axis with a scale, a line for each place on the others."""
    lines: dict[str, list[Condition]] = {}
    for condition in conditions:
        others = [f"{value}" for column, value in condition.values.items() if column != axis.column]
        lines.setdefault(", ".join(others) or "the recipe", []).append(condition)
    figure, axes = figure_of(7, 4.6)
    diverged = []
    for index, (name, line) in enumerate(lines.items()):
        line = sorted(line, key=lambda condition: condition.places[axis.column] or 0.0)
        means_over(axes, [(each.places[axis.column], each.loss) for each in line], name, index)
        for condition in (each for each in line if each.count(DIVERGED)):
            many = f"{condition.count(DIVERGED)} of {len(condition.rows)}"
            diverged.append(f"{condition.title}: {many}")
            # Above the upper edge, whatever the scale, and beside each other where several lines diverge.
            axes.annotate(
                f"× {many}",
                (condition.places[axis.column], 1),
                xytext=(9 * (index - (len(lines) - 1) / 2), 3),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                color=line_style(index)["color"],
                fontsize=7,
                ha="center",
                rotation=90,
            )
    if axis.logarithmic:
        axes.set_xscale("log")
    ticks = sorted({each.places[axis.column] or 0.0 for each in conditions})
    if len(ticks) <= _MOST_TICKS:
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axes.minorticks_off()
    _fit(axes, [(each.loss.mean, each.loss.half or 0.0) for each in conditions if each.loss])
    limit = conditions[0].rows[0]["blind_loss"]
    if limit is not None and axes.get_ylim()[0] < limit < axes.get_ylim()[1]:
        axes.axhline(limit, color="#8c8c8c", linewidth=0.8, label="ignores its input")
    axes.set(xlabel=axis.label, ylabel="validation loss")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    best = min((each for each in conditions if each.loss), key=_mean, default=None)
    words = (
        f"The mean of the validation loss over the seeds; bars are its {CONFIDENCE:.0%} interval. A cross above the "
        "upper edge marks where runs diverged, with how many; the point below it is of the others."
    )
    if best is not None:
        words += f" The lowest is {best.title}, {best.loss}."
    words += f" Diverged: {'; '.join(diverged)}." if diverged else " No run diverged."
    if blind := [each.title for each in conditions if each.is_blind]:
        words += f" At the level of a prediction that ignores its input, or above: {'; '.join(blind)}."
    return Drawn(f"loss-over-{axis.column}", figure, f"Validation loss over {axis.label}", words, _numbers(conditions))


def _fit(axes: Any, points: Sequence[tuple[float, float]]) -> None:
    """Let the means fill the figure; an interval of few seeds may be far longer than that, and then is cut."""
    if points:
        means = [mean for mean, _ in points]
        room = max(0.4 * (max(means) - min(means)), 0.02 * abs(max(means)))
        low = max(min(mean - half for mean, half in points), min(means) - room)
        high = min(max(mean + half for mean, half in points), max(means) + room)
        axes.set_ylim(low - 0.1 * room, high + 0.1 * room)


def _mean(condition: Condition) -> float:
    return float("inf") if condition.loss is None else condition.loss.mean


def _side_by_side(conditions: Sequence[Condition]) -> Drawn:
    """The loss of each condition, where no axis has a scale."""
    figure, axes = figure_of(7, 0.8 + 0.32 * len(conditions))
    for index, condition in enumerate(conditions):
        if condition.loss is not None:
            axes.errorbar(
                [condition.loss.mean], [index], xerr=[condition.loss.half or 0.0], capsize=3,
                **{**line_style(0), "linestyle": ""},
            )  # fmt: skip
            axes.plot(list(condition.by_seed.values()), [index] * len(condition.by_seed), "|", color="#8c8c8c")
        if condition.count(DIVERGED):
            axes.annotate(
                f"× {condition.count(DIVERGED)}/{len(condition.rows)} diverged", (1, index),
                xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=8,
            )  # fmt: skip
    axes.set_yticks(
        range(len(conditions)), [", ".join(map(str, each.values.values())) for each in conditions], fontsize=8
    )
    axes.invert_yaxis()
    axes.set(xlabel="validation loss")
    axes.grid(alpha=0.3, axis="x")
    ranked = sorted((each for each in conditions if each.loss), key=_mean)
    words = f"Dots are means over the seeds with their {CONFIDENCE:.0%} intervals, strokes the single runs. " + (
        f"From the lowest: {'; '.join(f'{each.title} {each.loss}' for each in ranked)}." if ranked else ""
    )
    return Drawn("loss", figure, "Validation loss", words, _numbers(conditions))


def _numbers(conditions: Sequence[Condition]) -> dict[str, list[Any]]:
    data: dict[str, list[Any]] = {
        column: [each.values[column] for each in conditions] for column in conditions[0].values
    }
    data["loss"] = [each.loss.mean if each.loss else None for each in conditions]
    data["± (95%)"] = [each.loss.half if each.loss else None for each in conditions]
    data["diverged"] = [each.count(DIVERGED) for each in conditions]
    return data


def _panels(outcome: Comparison) -> dict[str, list[Condition]]:
    """What curves are drawn of, by the title of their panel: the best conditions, setting by setting."""
    panels: dict[str, list[Condition]] = {}
    for condition in outcome.best:
        setting = ", ".join(map(str, outcome.setting(condition)))
        panels.setdefault(setting, []).append(condition)
    chosen = dict(list(panels.items())[:_MOST_PANELS])
    for title, conditions in chosen.items():
        if len(conditions) > _MOST_LINES:
            ranked = sorted(conditions, key=_mean)
            reference = [each for each in conditions if outcome.baseline_of(each) is None]
            kept = (reference + [each for each in ranked if each not in reference])[:_MOST_LINES]
            chosen[title] = [each for each in conditions if each in kept]
    if outcome.study.best_over is not None:
        # Where runs break is at the far end of the axis.
        column = next(axis.column for axis in outcome.study.grid if axis.word == outcome.study.best_over)
        last = [each for each in outcome.conditions if each.values[column] == outcome.conditions[-1].values[column]]
        renamed = {
            f"each at its best {column}" + (f", {title}" if title else ""): each for title, each in chosen.items()
        }
        return {**renamed, f"all at {column} {outcome.conditions[-1].values[column]}": last[:_MOST_LINES]}
    return chosen


def _curves(panels: Mapping[str, Sequence[Condition]], metrics: Mapping[str, Lines]) -> Drawn:
    def trace(condition: Condition) -> tuple[np.ndarray, np.ndarray]:
        """Its seeds' mean, smoothed over a fiftieth of the run."""
        steps, values = _stacked(condition, metrics, "loss", np.nanmean)
        if not len(values):
            return steps, values
        width = max(1, len(values) // 50)
        kernel = np.ones(width) / width
        return steps[width - 1 :], np.convolve(values, kernel, mode="valid")

    words = (
        "The training loss, the mean over the seeds and over a fiftieth of the run. A run that stopped because its "
        "numbers were no longer finite is in the mean up to there."
    )
    return _traces(panels, trace, "loss-curves", "Training loss over steps", "training loss", words, logarithmic=False)


def _norms(panels: Mapping[str, Sequence[Condition]], metrics: Mapping[str, Lines]) -> Drawn:
    def trace(condition: Condition) -> tuple[np.ndarray, np.ndarray]:
        """The largest of its seeds at each step."""
        return _stacked(condition, metrics, "grad_norm", np.nanmax)

    said = [
        f"{condition.title} {max(norms):.3g}"
        for conditions in panels.values()
        for condition in conditions
        if (norms := [row["grad_norm_max"] for row in condition.rows if row["grad_norm_max"] is not None])
    ]
    words = (
        "The norm of the gradient before clipping, the largest of the seeds at each step. "
        f"The largest of all steps: {'; '.join(said)}."
    )
    title = "Gradient norm over steps"
    return _traces(panels, trace, "gradient-norms", title, "gradient norm", words, logarithmic=True)


def _traces(
    panels: Mapping[str, Sequence[Condition]],
    trace: Callable[[Condition], tuple[np.ndarray, np.ndarray]],
    stem: str,
    title: str,
    label: str,
    words: str,
    *,
    logarithmic: bool,
) -> Drawn:
    """A panel for each setting and a line for each scheme in it."""
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure, grid = figure_of(4.6 * columns + 0.6, 3.4 * rows + 0.3, rows, columns, sharey=True, squeeze=False)
    styles: dict[str, int] = {}
    data: dict[str, list[Any]] = {}
    tops = []
    for axes, (name, conditions) in zip(grid.flat, panels.items(), strict=False):
        for condition in conditions:
            who = str(condition.values.get("scheme", condition.title))
            style = line_style(styles.setdefault(who, len(styles)))
            steps, values = trace(condition)
            if not len(steps):
                continue
            shown = np.unique(np.linspace(0, len(steps) - 1, _MOST_POINTS).astype(int))
            # A single step makes no line.
            marker = style["marker"] if len(shown) == 1 else ""
            axes.plot(steps[shown], values[shown], label=who, **{**style, "marker": marker, "linewidth": 1})
            told = np.unique(np.linspace(0, len(steps) - 1, _MOST_NUMBERS // len(panels) or 1).astype(int))
            data.setdefault("panel", []).extend([name or label] * len(told))
            data.setdefault("run", []).extend([condition.title] * len(told))
            data.setdefault("step", []).extend(int(step) for step in steps[told])
            data.setdefault(label, []).extend(float(value) for value in values[told])
            tops.append(np.nanquantile(values, 0.9))
        axes.set(title=name, xlabel="step", ylabel=label)
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
        if logarithmic:
            axes.set_yscale("log")
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    if not logarithmic and tops:
        # The first steps are far above all that follows, and would squeeze it into the bottom.
        low = grid.flat[0].get_ylim()[0]
        grid.flat[0].set_ylim(low, max(tops) + 0.15 * (max(tops) - low))
    return Drawn(stem, figure, title, words, data)


def _stacked(
    condition: Condition, metrics: Mapping[str, Lines], column: str, over: Callable[..., np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The steps that any of a condition's runs made, and a figure of each step over the runs that made it."""
    runs = [metrics.get(row["run"], ()) for row in condition.rows]
    length = max((len(lines) for lines in runs), default=0)
    table = np.full((len(runs), length), np.nan)
    for index, lines in enumerate(runs):
        table[index, : len(lines)] = [np.nan if line[column] is None else line[column] for line in lines]
    known = ~np.isnan(table).all(0) if length else np.zeros(0, dtype=bool)
    return np.arange(1, length + 1)[known], over(table[:, known], axis=0)
