"""What a probe leaves in a folder: numbers as JSON and Parquet, figures, and the page that says what they show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.files import finite, write_parquet, write_whole
from ..report import Report, save_figure
from ..residual import ConfigError
from .pictures import Picture, pictures

__all__ = ["SUMMARY", "TABLES", "check_folder", "write"]

SUMMARY = "probe.json"
VERSION = 1
TABLES = ("sites", "depth", "blocks", "skips", "angles", "trace")
"""The tables of a result; each becomes a Parquet file of that name, with the model's label in its first column."""

_REPORT = "report.html"


def check_folder(folder: Path) -> None:
    """Refuse a folder that results cannot go to: a file, or one that holds something else than results of a probe.

    Raises:
        ConfigError: saying which.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; --out needs a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SUMMARY).is_file():
        raise ConfigError(f"{folder} is not empty and holds no results of a probe; choose another --out")


def write(results: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Write everything into a folder, in the place of what an earlier probe left there; what ``probe.json`` holds.

    Args:
        results: of each model, in the order in which they are shown.
        folder: made where it is not there, see :func:`check_folder`.

    Raises:
        ConfigError: as :func:`check_folder`.
        OSError: something cannot be written; what there is in ``probe.json`` is written last.
    """
    import pyarrow

    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    # From here on the folder is a probe's, should anything go wrong before the end.
    write_whole(folder / SUMMARY, json.dumps({"version": VERSION, "files": [], "models": []}) + "\n")
    files = []
    for table in TABLES:
        rows = [{"model": result["label"], **row} for result in results for row in _rows(result[table])]
        if rows:
            write_parquet(folder / f"{table}.parquet", pyarrow.Table.from_pylist(rows))
            files.append(f"{table}.parquet")
    report = _begun(results)
    section = ""
    for picture in pictures(results):
        if picture.section != section:
            section = picture.section
            report.section(section)
        files += [path.name for path in save_figure(picture.figure, folder, picture.stem)]
        _show(report, picture)
    _end(report, results)
    report.write(folder / _REPORT)
    kept = [{key: value for key, value in result.items() if key != "trace"} for result in results]
    summary = {"version": VERSION, "files": [*files, _REPORT], "models": kept}
    write_whole(folder / SUMMARY, json.dumps(finite(summary), indent=1, allow_nan=False) + "\n")
    return summary


def _clear(folder: Path) -> None:
    """Take out what an earlier probe wrote, and nothing else."""
    try:
        files = json.loads((folder / SUMMARY).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    for name in files if isinstance(files, list) else ():
        if isinstance(name, str) and Path(name).name == name:
            (folder / name).unlink(missing_ok=True)


def _rows(table: Any) -> list[Mapping[str, Any]]:
    """A table as rows; a trace is one of columns."""
    if isinstance(table, Mapping):
        return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    return list(table)


def _begun(results: Sequence[Mapping[str, Any]]) -> Report:
    names = [result["label"] for result in results]
    if len(results) == 1:
        title, what = f"A look inside {names[0]}", "One model was measured"
    else:
        title, what = f"A look inside {len(results)} models", f"{len(results)} models were measured"
    measured = [result for result in results if result["counted"]]
    intro = f"{what} by `siamesenorm probe`."
    if measured:
        intro += (
            " All but what training wrote down itself is measured on data that was held out from training, in "
            "evaluation mode, with the model's own forward and backward pass."
        )
    if len({(result["source"], result["sha256"], result["counted"]) for result in measured}) > 1:
        intro += (
            "\n\nThe models were not measured on the same data, or not on as much of it: losses of one are not to be "
            "compared with those of another."
        )
    report = Report(title, intro)
    report.section("The models" if len(results) > 1 else "The model")
    report.table(
        ("model", "scheme", "blocks", "parameters", "loss", "measured on", "data"),
        [
            (
                result["label"],
                result["scheme"],
                result["blocks_of_model"],
                result["parameters"],
                result["loss"],
                f"{result['counted']:,} {result['counts']}" if result["counted"] else None,
                result["source"],
            )
            for result in results
        ],
        f"What was measured; the loss is the {measured[0]['loss_label']} on that data"
        if measured
        else "What was measured",
    )
    return report


def _show(report: Report, picture: Picture) -> None:
    report.figure(picture.figure, title=picture.title, words=picture.words, data=picture.data)


def _end(report: Report, results: Sequence[Mapping[str, Any]]) -> None:
    lines = list(_overflows(results))
    if lines:
        report.section("Overflow")
        report.text("\n\n".join(lines))
    report.section("Definitions")
    report.text(
        "The exact definition of each number is in the documentation of `siamesenorm.probes`, and in the package's "
        "`docs/probes.md`. Beside this page are its figures as PNG and SVG, every number as Parquet, and `probe.json`."
    )


def _overflows(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for result in results:
        if result["overflow"] is not None:
            first = result["overflow"]["first"]
            yield (
                f"`{result['label']}`: on the held-out data the streams are finite in every sublayer."
                if first is None
                else f"`{result['label']}`: on the held-out data the streams first stop being finite in {first}."
            )
        if where := (result["stability"] or {}).get("diverged"):
            yield f"`{result['label']}`: its run diverged at step {where['step']}: {where['where']}."
