"""What several commands share: their options, the recipe in their arguments, and the model in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from siamesenorm.training.recipe import Recipe

DEFAULT_RECIPE = "lm-tiny"

ModelOrRun = Annotated[Path, typer.Argument(help="A saved model's folder, or a finished run's.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object alone on stdout.")]


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe and the ``key.sub=value`` overrides in a command's arguments.

    Raises:
        ConfigError: for a second recipe.
    """
    from siamesenorm.residual import ConfigError

    names = [text for text in arguments if "=" not in text]
    if len(names) > 1:
        raise ConfigError(f"'{names[1]}' is neither a second recipe nor an override; write key.sub=value")
    return names[0] if names else DEFAULT_RECIPE, [text for text in arguments if "=" in text]


def model_and_recipe(path: Path) -> tuple[Path, Recipe | None]:
    """The saved model in a folder, and the recipe where the folder is a run's.

    Raises:
        ConfigError: for a run that has not finished.
    """
    from siamesenorm.training.run_folder import RunFolder, model_folder

    run = RunFolder(path)
    return model_folder(path), run.recipe() if run.config.is_file() else None


def load(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A saved language model and its tokeniser.

    Raises:
        ConfigError: where either cannot be loaded.
    """
    from siamesenorm.hub.loading import is_pipeline
    from siamesenorm.residual import ConfigError
    from siamesenorm.training.example import sees_images
    from siamesenorm.training.saved import load_model, load_tokenizer

    if is_pipeline(path):
        raise ConfigError(f"'{path}' holds a diffusion model; siamesenorm sample draws from it")
    model = load_model(path)
    if sees_images(model):
        raise ConfigError(f"'{path}' holds an image classifier, which writes no text")
    return model, load_tokenizer(path)


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr where that is a terminal; what it gives is told how many more are done."""
    from rich.console import Console
    from rich.progress import Progress

    if not sys.stderr.isatty():
        # A bar that is not shown would still end with an empty line.
        yield lambda done: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    import json

    from siamesenorm.data.files import finite

    print(json.dumps(finite(value), indent=2, allow_nan=False))
