"""The table of a study's runs: one row a run, with how it ended, what it cost and its whole configuration.

Columns, beside the axes and ``config.`` and every key of the recipe:

    format_version              of this table
    study, run, status, why     ``status`` is finished, diverged, failed or pending
    scheme, seed                also where they are no axes
    val_…, bits_per_byte        on what was held out, as in a run's ``summary.json``
    train_loss                  of the last step
    blind_loss                  held-out loss of the best prediction that ignores its input, in hindsight
    loss_…, grad_norm_…         over the steps, see `siamesenorm.study.verdict.over_steps`
    params, steps, tokens …     what was trained
    seconds, …_per_second, memory_bytes     time and memory: all else is equal in a repeated study
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from siamesenorm.data.files import write_whole
from siamesenorm.residual import ConfigError, one_line
from siamesenorm.study.folder import State, StudyFolder
from siamesenorm.study.grid import Run, Study
from siamesenorm.study.verdict import over_steps
from siamesenorm.training.recipe import Recipe, flatten
from siamesenorm.training.settings import scheme_of

__all__ = ["FORMAT_VERSION", "TIME_AND_MEMORY", "Row", "check_version", "collect", "write"]

FORMAT_VERSION = 1

Row = dict[str, Any]

TIME_AND_MEMORY = ("seconds", "seconds_per_step", "tokens_per_second", "images_per_second", "memory_bytes")
"""The columns that two equal studies differ in."""

_OF_SUMMARY = (
    "bits_per_byte", "train_loss", "params", "params_non_embedding", "steps", "skipped_steps", "tokens", "images",
    "diverged_at_step", "diverged_where", "seconds", "tokens_per_second", "images_per_second", "python", "torch",
)  # fmt: skip
_OVER_STEPS = tuple(over_steps([]))


def collect(study: Study, runs: Sequence[Run], folder: StudyFolder) -> list[Row]:
    """The rows of all runs, in the order of the grid, by what is on disk."""
    rows = [_row(study, run, folder) for run in runs]
    # Every row has every column.
    columns = dict.fromkeys(itertools.chain.from_iterable(rows))
    return [{column: row.get(column) for column in _ordered(columns)} for row in rows]


def write(rows: Sequence[Row], folder: StudyFolder) -> None:
    """Write ``results.parquet`` and ``results.csv``, each whole or not at all.

    Raises:
        OSError: where they cannot be written.
    """
    write_whole(folder.csv, _csv(rows))
    write_whole(folder.parquet, _parquet(rows))


def check_version(folder: StudyFolder) -> None:
    """Refuse to replace a table that another version of this package made.

    Raises:
        ConfigError: naming the file, its version and what can be done.
    """
    for path, version_of in ((folder.parquet, _version_of_parquet), (folder.csv, _version_of_csv)):
        if not path.exists():
            continue
        if not path.is_file():
            raise ConfigError(f"{path} is no file; move it away, and the table is made from the runs")
        try:
            version = version_of(path)
        except Exception as error:  # whatever a damaged file makes the readers raise
            raise ConfigError(
                f"{path} cannot be read ({one_line(error)}); move it away, and it is made again from the runs"
            ) from error
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{path} has format {version}, and this version of the package writes format {FORMAT_VERSION}. Move it "
                "away, and it is made again from the runs, which stay as they are; or choose another --out"
            )


def _row(study: Study, run: Run, folder: StudyFolder) -> Row:
    state, recipe = folder.state(run), run.recipe
    summary = state.summary
    row: Row = {
        "format_version": FORMAT_VERSION,
        "study": study.name,
        "run": run.key,
        "status": state.status,
        "why": state.why,
        "scheme": scheme_of(recipe).label,
        "seed": recipe.seed,
        **run.values,
        **{key: value for key, value in summary.items() if key.startswith("val_")},
        **{key: summary.get(key) for key in _OF_SUMMARY},
        "blind_loss": folder.blind_loss(run),
        **{key: state.over_steps.get(key) for key in _OVER_STEPS},
        "memory_bytes": state.memory,
    }
    if summary.get("seconds") and summary.get("steps"):
        row["seconds_per_step"] = summary["seconds"] / summary["steps"]
    return row | {f"config.{key}": value for key, value in flatten(_trained(run, state, folder)).items()}


def _trained(run: Run, state: State, folder: StudyFolder) -> Recipe:
    """A run's recipe as it was trained, with the fingerprint of its data."""
    there = folder.run(run)
    return there.recipe() if state.ended and there.config.is_file() else run.recipe


def _ordered(columns: Mapping[str, Any]) -> list[str]:
    """Configuration last, time and memory before it."""
    return sorted(columns, key=lambda column: (column.startswith("config."), column in TIME_AND_MEMORY))


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({column: _plain(value) for column, value in row.items()})
    return text.getvalue()


def _plain(value: Any) -> Any:
    """A value as text: numbers as Python writes them, nothing for none, and JSON for what is more than one."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)


def _parquet(rows: Sequence[Row]) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {column: _typed([row[column] for row in rows]) for column in rows[0]}
    table = pa.table(columns).replace_schema_metadata({"format_version": str(FORMAT_VERSION)})
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink)
    return bytes(sink.getvalue())


def _typed(values: Sequence[Any]) -> Any:
    """A column: of one type where all its values are, else of text."""
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        kinds = {float}
    types = {bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
    if len(kinds) == 1 and (kind := next(iter(kinds))) in types:
        return pa.array(values, types[kind])
    return pa.array([_plain(value) for value in values], pa.string())


def _version_of_parquet(path: Path) -> Any:
    from pyarrow import parquet

    metadata = parquet.read_schema(path).metadata or {}
    return int(metadata.get(b"format_version", 0))


def _version_of_csv(path: Path) -> Any:
    with path.open(encoding="utf-8", newline="") as file:
        first = next(csv.DictReader(file), None)
    if first is None:
        raise ValueError("it has no rows")
    return int(first.get("format_version") or 0)
