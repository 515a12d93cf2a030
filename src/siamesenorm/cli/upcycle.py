"""``siamesenorm upcycle``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siamesenorm.cli.options import Json, model_and_recipe, print_json

if TYPE_CHECKING:
    from siamesenorm.convert.saved import Upcycled


def upcycle(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A saved model's folder or a finished run's, or a name on the hub.")
    ],
    out: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make, new or empty.")],
    scheme: Annotated[
        str, typer.Option(help="The scheme to go on with, and its options: siamese:stream_dtype=float32.")
    ] = "siamese",
    batch: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Compare the outputs on this batch: a safetensors file with arguments of the forward pass by name, "
            "such as input_ids. Default: random ones.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Sequences or images in the random batch.")] = 2,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in each of its sequences; default: 64, or as many as fit.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random batch.")] = 0,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="The largest difference that is written, relative to the largest output.")
    ] = 1e-4,
    json: Json = False,
) -> None:
    """Turn a trained Pre-Norm model into SiameseNorm that computes the same, to be trained on.

    Both models are compared in float32, and nothing is written where their outputs differ by more than the tolerance.
    """
    from siamesenorm.convert.saved import upcycle_saved
    from siamesenorm.hub import fetch
    from siamesenorm.residual import parse_scheme
    from siamesenorm.training.settings import best_device

    folder, recipe = model_and_recipe(source if source.exists() else fetch(str(source)))
    made = upcycle_saved(
        folder,
        out,
        parse_scheme(scheme),
        batch=batch,
        rows=rows,
        length=length,
        seed=seed,
        tolerance=tolerance,
        device=best_device(),
    )
    if json:
        print_json(made.facts())
        return
    print(f"largest difference of the outputs: {made.difference}, over {made.inputs}")
    print(f"{made.out}: {made.host} with {made.scheme.label}")
    name = str(source / "config.yaml") if recipe is not None else "RECIPE"
    print(f"\nnext: {_train(name, made)}")
    print("      with schedule.own_steps=N only what is new is trained at first; with schedule.open_steps=N it is")
    print("      opened by equal parts over N steps, and otherwise by what it learns")


def _train(recipe: str, made: Upcycled) -> str:
    """The command that trains on."""
    options = ", ".join(word.replace("=", ": ", 1) for word in made.scheme.label.split(":")[1:])
    return shlex.join(
        [
            "siamesenorm", "train", recipe, f"model.pretrained={made.out}", f"model.scheme={made.scheme.name}",
            f"model.options={{{options}}}", "model.config={}",
        ]
    )  # fmt: skip
