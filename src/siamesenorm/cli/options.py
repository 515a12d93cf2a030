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
    from siamesenorm.residual import ConfigError
    from siamesenorm.training.example import sees_images
    from siamesenorm.training.run_folder import is_pipeline

    if is_pipeline(path):
        raise ConfigError(f"'{path}' holds a diffusion model; siamesenorm sample draws from it")
    model = load_model(path)
    if sees_images(model):
        raise ConfigError(f"'{path}' holds an image classifier, which writes no text")
    return model, load_tokenizer(path)


def load_model(path: Path) -> PreTrainedModel:
    """A saved model of transformers, without transformers' own progress bar.

    Raises:
        ConfigError: where it cannot be loaded.
    """
    from transformers.utils import logging

    from siamesenorm import hub

    logging.disable_progress_bar()
    model: PreTrainedModel = hub.load(path)
    return model


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokeniser saved with a model.

    Raises:
        ConfigError: where it cannot be loaded.
    """
    from transformers import AutoTokenizer

    from siamesenorm.residual import ConfigError, one_line

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the readers raise whatever a broken file leads them to
        raise ConfigError(f"no tokeniser can be loaded from {path}: {one_line(error)}") from error
    return tokenizer


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

    from siamesenorm.training.run_folder import finite

    print(json.dumps(finite(value), indent=2, allow_nan=False))
