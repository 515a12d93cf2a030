"""``siamesenorm train``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siamesenorm.cli.options import Json, print_json, split_arguments

if TYPE_CHECKING:
    from siamesenorm.training.run import Result


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY.SUB=VALUE]...",
            help="A recipe by name or path (default: lm-tiny), and values to change in it, such as model.scheme=pre.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder. Default: runs/<recipe>-<scheme>-<digest of all values>."),
    ] = None,
    json: Json = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files for TensorBoard into the run's folder too.")
    ] = False,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Log to this project of Weights & Biases too.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the training engine's own messages.")] = False,
) -> None:
    """Train a model by a recipe; the same command again resumes an unfinished run.

    Several processes: torchrun --nproc-per-node 8 -m siamesenorm train ...
    """
    recipe_name, overrides = split_arguments(arguments or [])
    from siamesenorm.training.display import for_terminal
    from siamesenorm.training.events import SaveError
    from siamesenorm.training.processes import speaks
    from siamesenorm.training.recipe_files import load
    from siamesenorm.training.run import train as run
    from siamesenorm.training.trackers import Tracking

    recipe = load(recipe_name, overrides)
    tracking = Tracking(tensorboard=tensorboard, wandb=wandb)
    try:
        result = run(recipe, out, for_terminal(recipe.train.log_every), tracking=tracking, verbose=verbose)
    except SaveError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if speaks():
        if result.message:
            print(result.message, file=sys.stderr)
        if json and result.summary:
            print_json(result.summary)
        elif result.summary:
            _report(result)
    code = {"interrupted": 130, "diverged": 1}.get(result.status, 0)
    if code:
        raise typer.Exit(code)


def _report(result: Result) -> None:
    from siamesenorm.training.tasks import task_of

    summary, folder = result.summary, result.folder
    task = task_of(folder.recipe())
    if result.status == "already finished":
        print(f"this run has already finished; --out names a folder for another one ({folder.path} holds it)\n")
    elif result.status == "diverged":
        print(f"diverged at step {summary['diverged_at_step']}")
    for label, text in task.report(summary):
        print(f"{label:16} {text}")
    options = "".join(f" {key}={value}" for key, value in summary["scheme_options"].items())
    print(f"model            {summary['host']} with {summary['scheme']}{options}, {summary['params']:,} parameters")
    unit = "images" if "images" in summary else "tokens"
    speed = summary[f"{unit}_per_second"]
    if speed:
        print(f"training         {summary[unit]:,} {unit} in {summary['seconds']:.0f} s, {speed:,.0f} {unit}/s")
    if summary.get("sample"):
        print(f"\nsample\n------\n{summary['sample']}\n------")
    print(f"\nin {folder.path}/")
    entries = {
        folder.model: "the model, for from_pretrained",
        folder.summary: "these figures",
        **{folder.path / name: what for name, what in task.files().items()},
        folder.metrics: "every step's figures",
        folder.loss_plot: "the loss over steps",
        folder.probes: "what passed through each sublayer, every so many steps",
        folder.config: "the recipe as it was run",
        folder.checkpoints: "what a resumed run starts from",
    }
    for path, what in entries.items():
        if path.exists():
            print(f"  {path.name + ('/' if path.is_dir() else ''):15} {what}")
    if folder.model.is_dir():
        print(f"\nnext: {task.next_command(folder.path)}")
