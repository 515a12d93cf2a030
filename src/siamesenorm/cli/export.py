"""``siamesenorm export``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.cli.options import Json, print_json


def export(
    run: Annotated[
        Path, typer.Argument(help="A run's folder, finished or not. Its checkpoints are pickles: your own.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The model's folder, new or empty.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Of the checkpoint; default: the newest that is whole.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Of a run that averages its weights, the weights themselves.")
    ] = False,
    json: Json = False,
) -> None:
    """Make a checkpoint, of any number of processes, a saved model for from_pretrained, with its model card."""
    from siamesenorm.training.export import export as make
    from siamesenorm.training.run_folder import RunFolder
    from siamesenorm.training.tasks import task_of

    made = make(run, destination, step=step, raw=raw)
    for each in made.passed_over:
        print(f"warning: {each}", file=sys.stderr)
    if json:
        print_json(
            {
                "run": str(made.run),
                "model": str(made.path),
                "step": made.step,
                "averaged": made.averaged,
                "params": made.params,
                "bytes": made.bytes,
                "files": made.files,
                "passed_over": list(made.passed_over),
            }
        )
        return
    which = "the average of the weights up to step" if made.averaged else "the weights after step"
    files = "one file" if made.files == 1 else f"{made.files} files"
    print(f"{which} {made.step} of {made.run}: {made.params:,} parameters, {made.bytes:,} bytes in {files}")
    print(f"\nin {made.path}/, with its model card, {made.path / 'README.md'}")
    print(f"\nnext: {task_of(RunFolder(run).recipe()).next_command(made.path)}")
