"""A run from its recipe to a saved model: the order of things, and what is written when."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from siamesenorm.data import arrays as token_arrays
from siamesenorm.data.shards import TokenArrays
from siamesenorm.training import text
from siamesenorm.training.build import (
    build_model,
    check,
    device_of,
    document_mask,
    parameter_counts,
    positions_of,
    scheme_of,
    with_corpus,
)
from siamesenorm.training.display import Display
from siamesenorm.training.evaluate import Evaluation, evaluate, held_out_sequences
from siamesenorm.training.events import NonFiniteError, Step
from siamesenorm.training.plot import loss_curve
from siamesenorm.training.recipe import Recipe, flatten
from siamesenorm.training.run_folder import MetricsFile, RunFolder, read_metrics

_FLUSH_EVERY_SECONDS = 1.0


@dataclass(frozen=True)
class Result:
    """How `train` ended.

    ``status`` is ``finished``, ``already finished``, ``interrupted`` or ``diverged``; ``summary`` is what
    ``summary.json`` holds, empty for an interrupted run.
    """

    status: str
    folder: RunFolder
    summary: dict[str, Any]
    message: str = ""


def default_folder(recipe: Recipe) -> Path:
    """``runs/<recipe>-<scheme>-<digest of every value>``: the same recipe finds its run, another one never meets it."""
    digest = hashlib.sha256(json.dumps(flatten(recipe), sort_keys=True).encode()).hexdigest()
    return Path("runs") / f"{recipe.name}-{recipe.model.scheme}-{digest[:8]}"


def train(recipe: Recipe, out: Path | None, display: Display, *, verbose: bool = False) -> Result:
    """Train by a recipe, going on where an earlier session of the same run stopped.

    Args:
        recipe: as loaded.
        out: the run's folder, by default `default_folder`.
        display: shown what happens.
        verbose: let the engine's own messages through.

    Raises:
        ConfigError: for all that is wrong with the request, before anything is written.
    """
    check(recipe)
    device = device_of(recipe)
    arrays = token_arrays.prepare(recipe.data.source)
    recipe = with_corpus(recipe, arrays)
    sequences = held_out_sequences(arrays.held_out(), recipe.data.sequence_length, recipe.data.validation_sequences)
    folder = RunFolder(out or default_folder(recipe))
    folder.claim(recipe)
    with folder.locked():
        finished = folder.finished_summary()
        if finished is not None:
            return Result("already finished", folder, finished)
        display.note(
            f"corpus {arrays.source}, sha256 {arrays.sha256}: {arrays.train.documents:,} documents "
            f"({arrays.train.tokens:,} tokens) to train on, {arrays.validation.documents:,} held out"
        )
        model = build_model(recipe).to(device)
        total, _ = parameter_counts(model)
        display.note(f"{recipe.model.host} with {recipe.model.scheme}, {total:,} parameters, in {folder.path}")

        def validate() -> Evaluation:
            return evaluate(
                model,
                sequences,
                batch_size=recipe.train.micro_batch_size or recipe.train.batch_size,
                device=device,
                autocast=torch.bfloat16 if recipe.train.precision == "bfloat16" else None,
                mask=document_mask(recipe),
            )

        return _fit_and_save(recipe, arrays, folder, model, device, display, validate, verbose)


def _fit_and_save(
    recipe: Recipe,
    arrays: TokenArrays,
    folder: RunFolder,
    model: PreTrainedModel,
    device: torch.device,
    display: Display,
    validate: Callable[[], Evaluation],
    verbose: bool,
) -> Result:
    with quiet_engine(verbose):
        from siamesenorm.training import engine

        log = RunLog(folder, recipe, display)
        try:
            outcome = engine.fit(
                model,
                scheme_of(recipe),
                recipe,
                arrays,
                folder=folder.checkpoints,
                device=device,
                listener=log,
                validate=validate,
            )
        except NonFiniteError as error:
            log.close()
            summary = _summary(recipe, arrays, model, _last_line(folder), None) | {
                "diverged": True,
                "diverged_at_step": error.step,
            }
            folder.write_summary(summary)
            _plot(folder, recipe)
            return Result(
                "diverged",
                folder,
                summary,
                f"{error}; the run stopped before the optimiser used them, and its checkpoints are from before",
            )
        finally:
            log.close()
    if outcome.interrupted:
        return Result(
            "interrupted",
            folder,
            {},
            f"stopped after step {outcome.step} of {recipe.train.steps} and saved; the same command goes on from there",
        )
    validation = outcome.validation or validate()
    tokenizer = arrays.tokenizer(positions_of(model))
    _save_model(model, tokenizer, folder.model)
    _plot(folder, recipe)
    summary = _summary(recipe, arrays, model, _last_line(folder), validation)
    summary["sample"] = _sample(recipe, model, tokenizer)
    # Last of all: with a summary, the run counts as finished.
    folder.write_summary(summary)
    return Result("finished", folder, json.loads(folder.summary.read_text()))


class RunLog:
    """Hears each step from the engine; writes ``metrics.jsonl`` and passes it on to the display."""

    def __init__(self, folder: RunFolder, recipe: Recipe, display: Display) -> None:
        self._metrics = MetricsFile(folder.metrics)
        self._steps = recipe.train.steps
        self._display = display
        self._flushed = time.monotonic()

    def resumed(self, step: int) -> None:
        """Cut what a resumed run will write again, and start the display."""
        self._metrics.open_after(step)
        if step:
            self._display.note(f"going on after step {step}")
        self._display.begin(step, self._steps)

    def step(self, step: Step) -> None:
        """Write the step down and show it."""
        line: dict[str, Any] = {
            "step": step.step,
            "loss": step.loss,
            "lr": step.lr,
            "grad_norm": step.grad_norm,
            "tokens": step.tokens,
            "seconds": round(step.seconds, 3),
        }
        if step.validation is not None:
            line["val_loss"] = step.validation.loss
        self._metrics.append(line)
        now = time.monotonic()
        if now - self._flushed > _FLUSH_EVERY_SECONDS:
            self.flush()
            self._flushed = now
        self._display.step(step)

    def flush(self) -> None:
        """Hand the written lines to the operating system."""
        self._metrics.flush()

    def warn(self, message: str) -> None:
        """Show a warning."""
        self._display.warn(message)

    def close(self) -> None:
        """Close the file and the display."""
        self._metrics.close()
        self._display.end()


@contextmanager
def quiet_engine(verbose: bool) -> Iterator[None]:
    """Keep the engine's log to itself unless it is asked for; what matters of it is raised or shown by us."""
    logger = logging.getLogger("olmo_core")
    level = logger.level
    with warnings.catch_warnings():
        if verbose:
            logging.basicConfig(level=logging.INFO)
        else:
            logger.setLevel(logging.CRITICAL + 1)
            # Said at each checkpoint of a single process, which is nothing unusual here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        finally:
            logger.setLevel(level)


def _summary(
    recipe: Recipe,
    arrays: TokenArrays,
    model: PreTrainedModel,
    last: dict[str, Any],
    validation: Evaluation | None,
) -> dict[str, Any]:
    """What ``summary.json`` holds, in nats per token, tokens and seconds; `last` is a line of ``metrics.jsonl``."""
    total, non_embedding = parameter_counts(model)
    return {
        "val_loss": None if validation is None else validation.loss,
        "val_ppl": None if validation is None else validation.perplexity,
        "val_tokens": None if validation is None else validation.tokens,
        "bits_per_byte": None if validation is None else validation.bits_per_byte(arrays.held_out_bytes_per_token),
        "train_loss": last["loss"],
        "params": total,
        "params_non_embedding": non_embedding,
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_second": last["tokens"] / last["seconds"] if last["seconds"] else None,
        "diverged": False,
        "recipe": recipe.name,
        "host": recipe.model.host,
        "scheme": recipe.model.scheme,
        "scheme_options": dict(recipe.model.options),
        "seed": recipe.seed,
        "corpus": arrays.source,
        "corpus_sha256": arrays.sha256,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _last_line(folder: RunFolder) -> dict[str, Any]:
    """The last step's line, or one that says that there was none."""
    lines = read_metrics(folder.metrics)
    return lines[-1] if lines else {"step": 0, "loss": None, "tokens": 0, "seconds": 0.0}


def _save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Save model and tokeniser in Hugging Face form, under another name until both are whole."""
    unfinished = path.with_name(f".{path.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with _no_progress_bars():
        model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Without transformers' own bars, which would break up the output of a run."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _plot(folder: RunFolder, recipe: Recipe) -> None:
    loss_curve(
        read_metrics(folder.metrics), f"{recipe.name}, {recipe.model.scheme}, seed {recipe.seed}", folder.loss_plot
    )


def _sample(recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str | None:
    wanted = recipe.sample
    fitting = text.room(model, tokenizer, wanted.prompt, wanted.tokens)
    if not wanted.prompt or not fitting:
        return None
    return text.generate(
        model, tokenizer, wanted.prompt, tokens=fitting, temperature=wanted.temperature, seed=recipe.seed
    )
