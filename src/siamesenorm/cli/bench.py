"""``siamesenorm bench``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from siamesenorm.cli.options import DEFAULT_RECIPE, Json, bar, print_json, split_arguments

_TIME = ("ms", "tokens/s", "to pre", "to plain", "to host")
_MEMORY = ("kept MiB", "to pre", "peak MiB", "streams", "floor", "time at floor")


def bench(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE_OR_SHAPE] [KEY.SUB=VALUE]...",
            help="A recipe with values to change in it, or LAYERSxWIDTH, which is a Llama of that size.",
        ),
    ] = None,
    schemes: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Schemes beside Pre-Norm, such as siamese:x=hybrid; host is the model as its library has it.",
        ),
    ] = "host,siamese",
    modes: Annotated[
        str, typer.Option(metavar="MODE,...", help="Of plain, fused, compiled and, on a GPU, triton.")
    ] = "plain,fused",
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Steps of each case, in an order drawn anew.")] = 20,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Length of the sequence, for a shape.")] = 1024,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write bench.json and the bar chart bench.png and .svg here.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure what schemes cost beside Pre-Norm: time, memory and streams moved, all in one process and in turn.

    A step is a forward and a backward pass on random numbers, with the recipe's micro-batch, precision and activation
    checkpointing. Data is not needed.
    """
    from siamesenorm import bench as benchmark
    from siamesenorm.residual import ConfigError
    from siamesenorm.training.recipe_files import load
    from siamesenorm.training.settings import device_of

    name, overrides = split_arguments(arguments or [])
    shape = benchmark.of_shape(name, tokens)
    recipe = load(name, overrides) if shape is None else load(DEFAULT_RECIPE, [*shape, f"name={name}", *overrides])
    cases = benchmark.cases(_words(schemes), _words(modes))
    if not cases:
        raise ConfigError("there is no mode to measure: give --modes at least one")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with bar("steps", len(cases) * (rounds + 4)) as tell:
        facts = benchmark.bench(recipe, cases, rounds=rounds, device=device_of(recipe), tell=tell)
    if out is not None:
        _write(facts, out)
    if json:
        print_json(facts)
    else:
        _show(facts, out)


def _words(text: str) -> list[str]:
    return [word for word in (each.strip() for each in text.split(",")) if word]


def _write(facts: dict[str, Any], out: Path) -> None:
    import json

    from siamesenorm import bench as benchmark
    from siamesenorm.training.run_folder import finite

    (out / "bench.json").write_text(json.dumps(finite(facts), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    for ending in ("png", "svg"):
        benchmark.bars(facts, out / f"bench.{ending}")


def _show(facts: dict[str, Any], out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    checkpointing = ", activation checkpointing" if facts["activation_checkpointing"] else ""
    console.print(
        f"{facts['recipe']}: {facts['host']}, {facts['sublayers']} sublayers × {facts['width']}, {facts['tokens']:,} "
        f"tokens, {facts['precision']}{checkpointing}; {facts['device']}, torch {facts['torch']}, {facts['rounds']} "
        "rounds",
        highlight=False,
    )
    # Two tables, with the modes between the rows: one with all columns is wider than most terminals.
    for columns, cells in ((_TIME, _time_cells), (_MEMORY, _memory_cells)):
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("")
        for column in columns:
            table.add_column(column, justify="right")
        for mode, rows in itertools.groupby(facts["cases"], key=lambda row: row["mode"]):
            table.add_row(mode)
            for row in rows:
                table.add_row(f"  {row['scheme']}", *cells(row))
        console.print()
        console.print(table, highlight=False)
    console.print(
        "\nRatios are medians over rounds, with half the distance between quartiles: to Pre-Norm in the same mode, to "
        "the scheme's plain form, to the model as its library has it. Kept: what the forward pass leaves for the "
        "backward pass. Streams: those that a sublayer reads and writes in both passes, counted; floor: the least for "
        "so many streams, and the ratio of times if only that cost anything, at the "
        f"{facts['bandwidth'] / 1e9:.1f} GB/s of a large copy.",
        highlight=False,
    )
    if out is not None:
        console.print(f"in {out}/: bench.json, bench.png, bench.svg", highlight=False)


def _time_cells(row: dict[str, Any]) -> Iterator[str]:
    yield f"{1e3 * row['seconds']['median']:.1f}"
    yield f"{row['tokens_per_second']:,.0f}"
    yield _ratio(row["time_to_baseline"])
    for other in ("time_to_plain", "time_to_host"):
        yield "" if row[other] is None else _ratio(row[other])


def _memory_cells(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['kept'] / 2**20:.1f}"
    yield f"{row['kept_to_baseline']:.3f}"
    yield f"{row['peak'] / 2**20:.1f}"
    counted, least = row.get("streams"), row.get("streams_floor")
    yield "" if counted is None else f"{counted['total']:.1f}"
    yield "" if least is None else f"{least['total']:.0f}"
    yield "" if least is None else f"{row['time_floor_to_baseline']:.3f}"


def _ratio(spread: dict[str, float]) -> str:
    if spread["low"] == spread["high"]:
        # To itself.
        return f"{spread['median']:.3f}"
    return f"{spread['median']:.3f} ±{(spread['high'] - spread['low']) / 2:.3f}"
