"""``siamesenorm import-official``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.cli.options import Json, print_json


def import_official(
    file: Annotated[Path, typer.Argument(help="A checkpoint of the official training code, or safetensors of it.")],
    out: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make, new or empty.")],
    kind: Annotated[str, typer.Option(help="lm, deit or dit.")],
    args: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON or YAML with the official constructor's arguments. Default: what is kept with the weights, a "
            "config.yaml beside them, or the fixture's.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which weights of several; default: a DiT's ema, of others the model."),
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(metavar="FIXTURE", help="NAME.json or .safetensors with inputs and the official outputs."),
    ] = None,
    json: Json = False,
) -> None:
    """Turn a checkpoint of the official code into a model for transformers or diffusers.

    The file is read as data: one that would run code on loading is refused. Weights that are missing or left over are
    listed, and nothing is written then.
    """
    from siamesenorm.convert.imported import import_official as run
    from siamesenorm.hosts import scheme_in
    from siamesenorm.training.build import parameter_counts

    made = run(file, out, kind, arguments=args, part=weights, fixture=verify)
    scheme, (total, _) = scheme_in(made.model), parameter_counts(made.model)
    checkpoint, verified = made.checkpoint, made.verified
    if json:
        print_json(
            {
                "source": str(file),
                "model": str(out),
                "class": type(made.model).__name__,
                "scheme": scheme.name,
                "scheme_options": scheme.options(),
                "params": total,
                "weights": checkpoint.part or None,
                "left_aside": list(checkpoint.left),
                "arguments": dict(made.arguments),
                "arguments_from": made.arguments_from,
                "largest_relative_difference": None if verified is None else verified.relative,
            }
        )
        return
    read = f"'{checkpoint.part}' of {file}" if checkpoint.part else str(file)
    print(f"read {len(checkpoint.weights)} weights of {read}; none is missing, none left over")
    if checkpoint.left:
        print(f"left aside: {', '.join(checkpoint.left)}")
    print(f"arguments from {made.arguments_from}")
    if verified is not None:
        print(f"verified: the output differs from that in {verify} by {verified}")
    print(f"{out}: {type(made.model).__name__} with {scheme.label}, {total:,} parameters")
