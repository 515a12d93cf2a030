"""A whole benchmark: what is measured and counted, as plain values and as a picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from siamesenorm.bench.measure import BASELINE, UNTOUCHED, Case, Result, bandwidth, measure
from siamesenorm.bench.traffic import Traffic, floor, traffic
from siamesenorm.residual import ConfigError, NormSpec, Sublayer, finished, open_streams, parse_scheme
from siamesenorm.training.build import empty_model
from siamesenorm.training.plot import figure_of
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.settings import autocast_of

__all__ = ["bars", "bench", "of_shape"]

_SHAPE = re.compile(r"(\d+)x(\d+)")
_HEAD = 64


def of_shape(text: str, tokens: int) -> list[str] | None:
    """Overrides of a text recipe for ``"LAYERSxWIDTH"``, a Llama of that size on one sequence; None for other words.

    Heads have 64 dimensions, and the MLP is 8/3 of the width, rounded down to a multiple of 32.

    Raises:
        ConfigError: a width that heads do not divide, or no layers.
    """
    found = _SHAPE.fullmatch(text)
    if found is None:
        return None
    layers, width = map(int, found.groups())
    if not layers or not width or width % _HEAD:
        raise ConfigError(f"shape '{text}' must have at least one layer, and a width that is a multiple of {_HEAD}")
    heads = width // _HEAD
    config = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": width * 8 // 3 // 32 * 32,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": tokens,
    }
    return [
        "model.host=llama",
        *(f"model.config.{key}={value}" for key, value in config.items()),
        f"data.sequence_length={tokens}",
        "train.batch_size=1",
        "train.micro_batch_size=1",
    ]


def bench(
    recipe: Recipe,
    cases: Sequence[Case],
    *,
    rounds: int,
    device: torch.device,
    tell: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """Measure and count.

    Args:
        recipe: as in :func:`siamesenorm.bench.measure.measure`.
        cases: as there.
        rounds: as there.
        device: as there.
        tell: as there.

    Returns:
        Plain values: what was measured on, the bandwidth, and one row a case.
    """
    model = empty_model(recipe, needs_data=False)
    speed = bandwidth(device)
    results = measure(recipe, cases, rounds=rounds, device=device, tell=tell)
    baseline = {result.case.mode: result for result in results if result.case.scheme == BASELINE}
    rows, width = _rows(recipe, results), _norm_of(model).size
    dtype = autocast_of(recipe) or torch.float32
    stream = rows * width * dtype.itemsize
    sublayers = sum(isinstance(module, Sublayer) for module in model.modules())
    made = []
    for result in results:
        row = _row(result)
        if result.case.scheme != UNTOUCHED:
            counted, least = _traffic(result.case, model, dtype)
            more = (least.total - floor(1).total) * sublayers * stream / speed
            row |= {
                "streams": None if counted is None else {**counted._asdict(), "total": counted.total},
                "streams_floor": {**least._asdict(), "total": least.total},
                "time_floor_to_baseline": 1 + more / baseline[result.case.mode].seconds.median,
            }
        made.append(row)
    return {
        "recipe": recipe.name,
        "host": recipe.model.host,
        "sublayers": sublayers,
        "width": width,
        "tokens": rows,
        "precision": recipe.train.precision,
        "activation_checkpointing": recipe.train.activation_checkpointing,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "rounds": rounds,
        "bandwidth": speed,
        "stream_bytes": stream,
        "cases": made,
    }


def _row(result: Result) -> dict[str, Any]:
    row = asdict(result)
    return {**row.pop("case"), **row}


def _rows(recipe: Recipe, results: Sequence[Result]) -> int:
    first = results[0]
    return round(first.tokens_per_second * first.seconds.median)


def _name(device: torch.device) -> str:
    threads = torch.get_num_threads()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads} threads"


def _norm_of(model: Any) -> NormSpec:
    """The kind of a rewired model's norms."""
    return next(norm.spec for norm in model.modules() if hasattr(norm, "readout"))


def _traffic(case: Case, model: Any, dtype: torch.dtype) -> tuple[Traffic | None, Traffic]:
    """What is counted, which in a compiled graph nobody can, and the least that so many streams can do with."""
    scheme = parse_scheme(case.scheme)
    streams = len(finished(open_streams(scheme, torch.zeros(1, 1, 8))))
    least = floor(streams)
    if case.mode == "compiled":
        return None, least
    return traffic(scheme, _norm_of(model), "plain" if case.mode == "plain" else "fused", dtype), least


def bars(facts: dict[str, Any], path: Path) -> None:
    """Draw step time and memory kept of every case as multiples of Pre-Norm's in the same mode.

    Args:
        facts: what :func:`bench` gives.
        path: of the picture; the ending says which format.
    """
    rows = [row for row in facts["cases"] if row["scheme"] != BASELINE]
    figure, axes = figure_of(9, 0.42 * len(rows) + 1.8, 1, 2)
    names = [f"{row['scheme']}, {row['mode']}" for row in rows]
    times = [row["time_to_baseline"] for row in rows]
    spread = [[each["median"] - each["low"] for each in times], [each["high"] - each["median"] for each in times]]
    kept = [row["kept_to_baseline"] for row in rows]
    for axis, values, errors, what in (
        (axes[0], [each["median"] for each in times], spread, "step time"),
        (axes[1], kept, None, "kept for backward"),
    ):
        shown = axis.barh(names, values, xerr=errors, color="tab:blue", alpha=0.85, capsize=3)
        axis.bar_label(shown, [f"{value:.3f}" for value in values], padding=6, fontsize=8)
        axis.axvline(1, color="black", linewidth=1)
        axis.set(xlabel=f"{what}, Pre-Norm = 1", xlim=(0, 1.18 * max([1.0, *values])))
        axis.invert_yaxis()
    axes[1].set_yticklabels([])
    figure.suptitle(f"{facts['host']}, {facts['tokens']:,} tokens × {facts['width']}, {facts['device']}")
    figure.savefig(path, dpi=120)
