"""A run from its recipe to a saved model: the order of things, and what is written when."""

from __future__ import annotations

import json
import logging
import platform
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from siamesenorm.data import arrays as token_arrays
from siamesenorm.data.shards import TokenArrays
from siamesenorm.residual import ConfigError
from siamesenorm.training import parallel, text
from siamesenorm.training.build import (
    autocast_of,
    check,
    device_of,
    document_mask,
    parameter_counts,
    positions_of,
    scheme_of,
    with_corpus,
)
from siamesenorm.training.display import Display, Silent
from siamesenorm.training.evaluate import Evaluation, evaluate, held_out_sequences
from siamesenorm.training.events import Listener, NonFiniteError, Step
from siamesenorm.training.plot import loss_curve
from siamesenorm.training.processes import Processes, together
from siamesenorm.training.recipe import Recipe, digest
from siamesenorm.training.run_folder import MetricsFile, RunFolder, read_metrics
from siamesenorm.training.trackers import Trackers, Tracking

if TYPE_CHECKING:
    from siamesenorm.training.engine import Outcome

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
    return Path("runs") / f"{recipe.name}-{recipe.model.scheme}-{digest(recipe)[:8]}"


def train(
    recipe: Recipe, out: Path | None, display: Display, *, tracking: Tracking | None = None, verbose: bool = False
) -> Result:
    """Train by a recipe, going on where an earlier session of the same run stopped.

    Under ``torchrun`` every process calls this with the same arguments; the first one writes and speaks.

    Args:
        recipe: as loaded.
        out: the run's folder, by default `default_folder`.
        display: shown what happens.
        tracking: where else the figures go, by default nowhere.
        verbose: let the engine's own messages through.

    Raises:
        ConfigError: for all that is wrong with the request, before anything is written.
        SaveError: where a checkpoint cannot be written.
    """
    tracking = tracking or Tracking()
    check(recipe)
    device = device_of(recipe)
    with quiet_engine(verbose), together(device) as processes, ExitStack() as stack:
        display = display if processes.is_first else Silent()
        parallel.check(recipe, processes)
        processes.first(tracking.check)
        arrays = processes.first(lambda: token_arrays.prepare(recipe.data.source))
        recipe = with_corpus(recipe, arrays)
        sequences = held_out_sequences(arrays.held_out(), recipe.data.sequence_length, recipe.data.validation_sequences)
        folder = RunFolder(out or default_folder(recipe))
        is_new = processes.first(lambda: folder.claim(recipe))
        processes.first(lambda: stack.enter_context(folder.locked()))
        finished = processes.first(folder.finished_summary)
        if finished is not None:
            return Result("already finished", folder, finished)
        display.note(
            f"corpus {arrays.source}, sha256 {arrays.sha256}: {arrays.train.documents:,} documents "
            f"({arrays.train.tokens:,} tokens) to train on, {arrays.validation.documents:,} held out"
        )
        try:
            return _Session(recipe, arrays, sequences, folder, device, display, tracking, processes).run()
        except ConfigError:
            # Found late, such as weights that cannot be loaded; the corrected command may want this folder.
            if is_new:
                processes.first(folder.release)
            raise


@dataclass(frozen=True)
class _Session:
    """One process's share of one session of a run, from a claimed folder on."""

    recipe: Recipe
    arrays: TokenArrays
    sequences: np.ndarray
    folder: RunFolder
    device: torch.device
    display: Display
    tracking: Tracking
    processes: Processes

    def run(self) -> Result:
        """Train, and save the model of a run that reaches its end."""
        recipe, folder = self.recipe, self.folder
        with _no_progress_bars():
            model = parallel.place(recipe, self.device, self.processes)
        total, _ = parameter_counts(model)
        how = parallel.strategy(recipe, self.processes.count)
        origin = "" if recipe.model.pretrained is None else f" from {recipe.model.pretrained}"
        shared = "" if how == "none" else f" on {self.processes.count} processes ({how})"
        display = self.display
        display.note(
            f"{recipe.model.host} with {recipe.model.scheme}, {total:,} parameters{origin}{shared}, in {folder.path}"
        )
        trackers = self.processes.first_only(lambda: self.tracking.open(folder.path, recipe, display.warn))
        for place in trackers.places if trackers else ():
            display.note(f"figures also go to {place}")
        log = RunLog(folder, recipe, display, trackers) if self.processes.is_first else Unheard()
        summary: dict[str, Any] | None = None
        try:
            try:
                outcome = self._fit(model, log)
            finally:
                log.close()
            if outcome.interrupted:
                return Result("interrupted", folder, {}, self._interrupted(outcome.step))
            validation = outcome.validation or self._validate(model)
            whole = parallel.whole_model(model, recipe)
            summary = self.processes.first(lambda: self._finish(whole, validation))
            return Result("finished", folder, summary)
        except NonFiniteError as error:
            diverged = error
            summary = self.processes.first(lambda: self._diverged(model, diverged))
            message = f"{error}. The run stopped before the optimiser used them, and its checkpoints are from before"
            return Result("diverged", folder, summary, message)
        finally:
            if trackers:
                trackers.close(summary)

    def _fit(self, model: PreTrainedModel, listener: Listener) -> Outcome:
        from siamesenorm.training import engine

        return engine.fit(
            model,
            scheme_of(self.recipe),
            self.recipe,
            self.arrays,
            folder=self.folder.checkpoints,
            device=self.device,
            listener=listener,
            validate=lambda: self._validate(model),
            processes=self.processes,
        )

    def _validate(self, model: PreTrainedModel) -> Evaluation:
        return evaluate(
            model,
            self.sequences,
            batch_size=parallel.micro_batch_size(self.recipe, self.processes.count),
            device=self.device,
            autocast=autocast_of(self.recipe),
            mask=document_mask(self.recipe),
            processes=self.processes,
        )

    def _interrupted(self, step: int) -> str:
        steps = self.recipe.train.steps
        return f"stopped after step {step} of {steps} and saved; the same command goes on from there"

    def _finish(self, model: PreTrainedModel | None, validation: Evaluation) -> dict[str, Any]:
        assert model is not None
        recipe, folder = self.recipe, self.folder
        tokenizer = self.arrays.tokenizer(positions_of(model))
        _save_model(model, tokenizer, folder.model)
        _plot(folder, recipe)
        summary = self._summary(model, validation)
        summary["sample"] = _sample(recipe, model, tokenizer)
        # Last of all: with a summary, the run counts as finished.
        folder.write_summary(summary)
        written: dict[str, Any] = json.loads(folder.summary.read_text())
        return written

    def _diverged(self, model: PreTrainedModel, error: NonFiniteError) -> dict[str, Any]:
        summary = self._summary(model, None) | {
            "diverged": True,
            "diverged_at_step": error.step,
            "diverged_where": error.where,
        }
        self.folder.write_summary(summary)
        _plot(self.folder, self.recipe)
        return summary

    def _summary(self, model: PreTrainedModel, validation: Evaluation | None) -> dict[str, Any]:
        """What ``summary.json`` holds, in nats per token, tokens and seconds."""
        recipe, arrays = self.recipe, self.arrays
        lines = read_metrics(self.folder.metrics)
        last: dict[str, Any] = lines[-1] if lines else {"step": 0, "loss": None, "tokens": 0, "seconds": 0.0}
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
            "skipped_steps": sum(bool(line.get("skipped")) for line in lines),
            "tokens": last["tokens"],
            "seconds": last["seconds"],
            "tokens_per_second": last["tokens"] / last["seconds"] if last["seconds"] else None,
            "diverged": False,
            "recipe": recipe.name,
            "host": recipe.model.host,
            "scheme": recipe.model.scheme,
            "scheme_options": dict(recipe.model.options),
            "seed": recipe.seed,
            "pretrained": recipe.model.pretrained,
            "processes": self.processes.count,
            "parallel": parallel.strategy(recipe, self.processes.count),
            "corpus": arrays.source,
            "corpus_sha256": arrays.sha256,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }


class Unheard:
    """The listener of a process that does not speak."""

    def resumed(self, step: int) -> None:
        """Nothing."""

    def step(self, step: Step) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

    def warn(self, message: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class RunLog:
    """Hears each step from the engine; writes ``metrics.jsonl`` and passes it on to the display and the trackers."""

    def __init__(self, folder: RunFolder, recipe: Recipe, display: Display, trackers: Trackers | None = None) -> None:
        self._metrics = MetricsFile(folder.metrics)
        self._steps = recipe.train.steps
        self._display = display
        self._trackers = trackers or Trackers({}, display.warn)
        self._flushed = time.monotonic()

    def resumed(self, step: int) -> None:
        """Cut what a resumed run will write again, and start the display."""
        self._metrics.open_after(step)
        if step:
            self._display.note(f"going on after step {step}")
        self._trackers.resumed(step)
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
        if step.router_loss is not None:
            line["router_loss"] = step.router_loss
        if step.skipped:
            line["skipped"] = True
            self._display.warn(
                f"step {step.step} is skipped: its loss is {step.loss} and its gradient norm {step.grad_norm}"
            )
        self._metrics.append(line)
        now = time.monotonic()
        if now - self._flushed > _FLUSH_EVERY_SECONDS:
            self._metrics.flush()
            self._flushed = now
        self._trackers.step(step)
        self._display.step(step)

    def flush(self) -> None:
        """Hand the written lines to the operating system, and the trackers' figures to wherever they go."""
        self._metrics.flush()
        self._trackers.flush()

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
