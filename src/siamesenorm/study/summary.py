"""``summary.md`` and ``report.html`` of a study: the same words, tables and figures, for reading and for a browser."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siamesenorm.data.files import write_whole
from siamesenorm.report import Report, save_figure
from siamesenorm.study.compare import Comparison, Condition
from siamesenorm.study.figures import Drawn, Lines, draw
from siamesenorm.study.folder import FAILED, FINISHED, PENDING, StudyFolder
from siamesenorm.study.grid import PaperTable, Study
from siamesenorm.study.results import Row
from siamesenorm.study.shape import EQUAL
from siamesenorm.study.statistics import CONFIDENCE

__all__ = ["write"]


@dataclass(frozen=True)
class _Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    caption: str


@dataclass(frozen=True)
class _Section:
    heading: str
    parts: tuple[str | _Table | Drawn, ...]


def write(outcome: Comparison, rows: Sequence[Row], metrics: Mapping[str, Lines], folder: StudyFolder) -> None:
    """Write both, and the figures as PNG and SVG.

    Args:
        outcome: of the study.
        rows: one for each run.
        metrics: the steps of each run, by the run's key.
        folder: the study's.

    Raises:
        OSError: where they cannot be written.
    """
    study = outcome.study
    figures = draw(outcome, metrics)
    folder.figures.mkdir(exist_ok=True)
    for each in figures:
        save_figure(each.figure, folder.figures, each.stem)
    title = study.title or f"Study {study.name}"
    sections = list(_sections(outcome, rows, figures))
    intro = "\n\n".join(filter(None, [study.about.strip(), outcome.advice]))
    write_whole(folder.summary, _markdown(title, intro, sections))
    report = Report(title, intro)
    for section in sections:
        report.section(section.heading)
        for part in section.parts:
            if isinstance(part, str):
                report.text(part)
            elif isinstance(part, _Table):
                # An estimate is kept on one line.
                report.table(part.columns, [[_unbroken(value) for value in row] for row in part.rows], part.caption)
            else:
                report.figure(part.figure, title=part.title, words=part.words, data=part.data)
    report.write(folder.report)


def _sections(outcome: Comparison, rows: Sequence[Row], figures: Sequence[Drawn]) -> Iterator[_Section]:
    study = outcome.study
    yield _Section(
        "Schemes compared" if study.reference is not None else "Conditions compared",
        (_how_to_read(outcome), _compared(outcome), *_settings(outcome), *_blind(outcome)),
    )
    if figures:
        yield _Section("Figures", tuple(figures))
    if study.paper:
        yield _Section(
            "What the paper reports", tuple(itertools.chain(*(_published(outcome, table) for table in study.paper)))
        )
    if study.best_over is not None:
        yield _Section(
            "Every condition", (_table([_described(each) for each in outcome.conditions], "What each came to"),)
        )
    missing = [row for row in rows if row["status"] != FINISHED]
    if missing:
        yield _Section("Runs that did not finish", (_missing(missing, study),))
    yield _Section("What was equal, and what was not", tuple(_fairness(outcome, rows)))


def _how_to_read(outcome: Comparison) -> str:
    study = outcome.study
    words = [f"Losses are means over the seeds, of what was held out, with {CONFIDENCE:.0%} intervals (Student's t)."]
    if study.best_over is not None:
        column = dict(zip(study.axes, study.columns, strict=True))[study.best_over]
        words.append(
            f"Each scheme stands at the {column} that suits it best, of those at which all its seeds finished. It is "
            "chosen by these same losses, which flatters each scheme a little."
        )
    if study.reference is not None:
        words.append(
            f"Differences are to {study.reference} with the same seed: below zero is better, and a star marks those "
            "whose interval leaves zero out."
        )
        others = len({condition.values["scheme"] for condition in outcome.best}) - 1
        if others > 2:
            chance = round(1 / (1 - CONFIDENCE))
            words.append(f"With {others} comparisons, mind that one in {chance} has a star by chance alone.")
    return " ".join(words)


def _compared(outcome: Comparison) -> _Table:
    """The conditions that are compared, with all that is known of each."""
    study = outcome.study
    matched = [table for table in study.paper if table.match is not None]
    rows = []
    for condition in outcome.best:
        row = _described(condition)
        if study.reference is not None:
            difference = outcome.difference(condition)
            row[f"difference to {study.reference}"] = None if difference is None else difference.starred
        row |= _costs(condition, outcome.baseline_of(condition))
        for table in matched:
            row |= _paper_columns(table, study, condition)
        rows.append(row)
    caption = "The conditions that are compared"
    return _table(rows, f"{caption}; columns that begin with “paper” are the paper's figures" if matched else caption)


def _table(rows: Sequence[Mapping[str, Any]], caption: str) -> _Table:
    """A table of rows that have the same columns, without those that say nothing."""
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    return _Table(tuple(columns), tuple(tuple(row[name] for name in columns) for row in rows), caption)


def _described(condition: Condition) -> dict[str, Any]:
    """A condition's place, and its losses."""
    row: dict[str, Any] = dict(condition.values)
    row["loss"] = None if condition.loss is None else str(condition.loss)
    for column, name in (("val_ppl", "perplexity"), ("val_accuracy", "accuracy")):
        found = condition.mean_of(column)
        row[name] = None if found is None else f"{found.mean:.4g}"
    row["seeds"] = len(condition.by_seed)
    row["not finished"] = condition.fate or None
    return row


def _costs(condition: Condition, base: Condition | None) -> dict[str, Any]:
    """Parameters, time and memory, and each over the baseline's."""
    out: dict[str, Any] = {}
    for column, name, unit, digits in (
        ("params", "parameters", 1, ",.0f"),
        ("seconds_per_step", "seconds a step", 1, ".3g"),
        ("memory_bytes", "memory, MiB", 2**20, ",.4g"),
    ):
        mine, other = condition.mean_of(column), None if base is None else base.mean_of(column)
        out[name] = None if mine is None else f"{mine.mean / unit:{digits}}"
        if mine is not None and other is not None and other.mean:
            ratio = mine.mean / other.mean
            out[name] += f" ({ratio - 1:+.2%})" if column == "params" else f" ({ratio:.2f}×)"
    return out


def _settings(outcome: Comparison) -> Iterator[str]:
    """In how many settings each scheme is below the baseline, where there are several."""
    if len({outcome.setting(condition) for condition in outcome.best}) > 1:
        for scheme, (below, sure, count) in outcome.settings_won.items():
            where = f"in {below} of {count} settings, in {sure} of them beyond the noise"
            yield f"{scheme} is below {outcome.study.reference} {where}."


def _blind(outcome: Comparison) -> Iterator[str]:
    """Which conditions learnt next to nothing."""
    blind = [condition for condition in outcome.conditions if condition.is_blind]
    if blind:
        limit, names = blind[0].rows[0]["blind_loss"], "; ".join(f"{each.title} ({each.loss})" for each in blind)
        yield (
            f"A prediction that ignores its input would come to {limit:.4f}. These are hardly below that, or above, so "
            f"they learnt next to nothing: {names}."
        )


def _paper_columns(table: PaperTable, study: Study, condition: Condition) -> dict[str, Any]:
    """What a published table says of a condition."""
    row = _paper_row(table, study, condition) or (None,) * len(table.columns)
    return {f"paper: {name}": value for name, value in zip(table.columns[1:], row[1:], strict=True)}


def _paper_row(table: PaperTable, study: Study, condition: Condition) -> tuple[Any, ...] | None:
    column = next(axis.column for axis in study.grid if axis.word == table.match)
    return next((row for row in table.rows if str(row[0]) == str(condition.values[column])), None)


def _published(outcome: Comparison, table: PaperTable) -> Iterator[str | _Table]:
    """A published table, and how far its order is the study's."""
    yield _Table(table.columns, table.rows, f"{table.caption}. The paper's figures, and none of this study's")
    if table.match is None:
        return
    pairs = [
        (condition.loss.mean, row)
        for condition in outcome.best
        if condition.is_sound and condition.loss and (row := _paper_row(table, outcome.study, condition))
    ]
    for index, name in enumerate(table.columns):
        known = [(loss, row[index]) for loss, row in pairs if isinstance(row[index], int | float)]
        ranked = [(a, b) for a, b in itertools.combinations(known, 2) if a[1] != b[1]]
        if index and ranked:
            same = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in ranked)
            yield (
                f"Pairs of conditions that are in the same order here, by loss, and in the paper, by {name}: {same} of "
                f"{len(ranked)}."
            )


def _missing(rows: Sequence[Row], study: Study) -> _Table:
    columns = ("run", *study.columns, "status", "why")
    return _Table(columns, tuple(tuple(row[column] for column in columns) for row in rows), "How they ended")


def _fairness(outcome: Comparison, rows: Sequence[Row]) -> Iterator[str]:
    """What the runs had in common."""
    study, base = outcome.study, outcome.study.base
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    counts = ", ".join(f"{count} {status}" for status, count in Counter(row["status"] for row in rows).items())
    yield (
        f"{len(rows)} runs of the recipe `{base.name}` ({base.model.host}), seeds {seeds}: {counts}. Runs of one seed "
        "start from the same weights wherever their models have parameters of the same name and shape, but for what a "
        "scheme's own initialisation multiplies, and see the same data in the same order."
    )
    finished = [row for row in rows if row["status"] == FINISHED]
    if finished:
        unit = "images" if finished[0].get("images") is not None else "tokens"
        seen = sorted({row[unit] for row in finished})
        budget = f"{seen[0]:,} {unit}" if len(seen) == 1 else f"{seen[0]:,} to {seen[-1]:,} {unit}"
        yield (
            f"Each run that finished saw {budget}."
            if study.seconds is None
            else f"Each run had as many steps as take {study.seconds:g} s at its own pace, which came to {budget}."
        )
        yield _parameters(outcome)
        yield (
            "Seconds are as the machine was, with whatever else it did meanwhile. To compare what schemes cost, take "
            "`siamesenorm bench`, which runs them in turns."
        )
    ended = [row for row in rows if row["status"] not in (FAILED, PENDING)]
    if ended:
        prints = sorted({row["config.data.sha256"] for row in ended if row["config.data.sha256"]})
        versions = sorted({f"Python {row['python']}, torch {row['torch']}" for row in ended})
        yield f"The data's SHA-256: {', '.join(prints)}. Made with {'; '.join(versions)}."


def _parameters(outcome: Comparison) -> str:
    """How parameter counts differ from the baseline's, where they do."""
    counts = [(each, found.mean) for each in outcome.best if (found := each.mean_of("params")) is not None]
    if not counts:
        return ""
    reference, count = next((pair for pair in counts if outcome.baseline_of(pair[0]) is None), counts[0])
    unequal = [f"{each.title} {own / count - 1:+.2%}" for each, own in counts if abs(own / count - 1) > EQUAL]
    others = (
        f"those that differ by more than {EQUAL:.1%}: {'; '.join(unequal)}"
        if unequal
        else f"no other differs by more than {EQUAL:.1%}"
    )
    return f"The model of {reference.title} has {count:,.0f} parameters; {others}."


def _unbroken(value: Any) -> Any:
    return value.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}") if isinstance(value, str) else value


def _markdown(title: str, intro: str, sections: Sequence[_Section]) -> str:
    parts = [f"# {title}", intro]
    for section in sections:
        parts.append(f"## {section.heading}")
        for part in section.parts:
            if isinstance(part, str):
                parts.append(part)
            elif isinstance(part, _Table):
                parts += [f"{part.caption}:", _markdown_table(part)]
            else:
                parts += [f"![{part.title}](figures/{part.stem}.png)", f"**{part.title}.** {part.words}"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_table(table: _Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|")
