"""What SiameseNorm is predicted to cost beside Pre-Norm on a GPU, from counts alone.

    python benchmarks/predicted_overhead.py [--bandwidth 4.8e12] [--flops 9.89e14] [--mfu 0.4]

For lm-1.3b and moe-15b-a2b, in bfloat16: the streams that a sublayer moves (``siamesenorm.bench.traffic``) over the
memory's bandwidth, beside the operations of a training step (those of ``siamesenorm inspect``) at the share of the peak
that Pre-Norm is taken to reach. Neither latency nor communication is in it, nor what overlaps. The defaults are an
H200's: 4.8 TB/s, 989 TFLOP/s dense.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from siamesenorm.bench import floor, traffic
from siamesenorm.residual import NormSpec, Sublayer, parse_scheme
from siamesenorm.training.build import empty_model
from siamesenorm.training.cost import flops_per_token
from siamesenorm.training.recipe_files import load

RECIPES = ("lm-1.3b", "moe-15b-a2b")
SCHEMES = ("siamese", "siamese:x=hybrid")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes per second")
    arguments.add_argument("--flops", type=float, default=9.89e14, help="operations per second at the peak")
    arguments.add_argument("--mfu", type=float, default=0.4, help="the share of the peak that Pre-Norm reaches")
    asked = arguments.parse_args()
    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "scheme", "mode", "streams", "more than pre", "step time"):
        table.add_column(column, justify="left" if column in ("recipe", "scheme", "mode") else "right")
    for name in RECIPES:
        base = with_scheme(name, "pre")
        model = empty_model(base, needs_data=False)
        seconds = flops_per_token(model, base.data.sequence_length).training / (asked.flops * asked.mfu)
        width = model.config.hidden_size
        sublayers = sum(isinstance(module, Sublayer) for module in model.modules())
        for scheme in SCHEMES:
            for mode in ("plain", "fused", "floor"):
                ours, theirs = streams(scheme, mode), streams("pre", mode)
                added = (ours - theirs) * sublayers * width * torch.bfloat16.itemsize / asked.bandwidth
                row = (f"{ours:.1f}", f"{ours - theirs:.1f}", f"{1 + added / seconds:.3f}")
                table.add_row(name, scheme, mode, *row)
    Console(width=140).print(table, highlight=False)


def streams(scheme: str, mode: str) -> float:
    made = parse_scheme(scheme)
    if mode == "floor":
        return floor(1 if scheme == "pre" else 2).total
    return traffic(made, NormSpec("rms", 8), mode, torch.bfloat16).total


def with_scheme(name: str, scheme: str):
    recipe, chosen = load(name, []), parse_scheme(scheme)
    return replace(recipe, model=replace(recipe.model, scheme=chosen.name, options=chosen.options()))


if __name__ == "__main__":
    main()
