"""A run from its recipe to a saved model: the order of things, and what is written when."""

from __future__ import annotations

import json
import logging
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from siamesenorm.data import folders
from siamesenorm.residual import ConfigError
from siamesenorm.training import card, form, parallel
from siamesenorm.training.build import check, empty_model, parameter_counts
from siamesenorm.training.display import Display, Silent
from siamesenorm.training.events import Listener, NonFiniteError, Step
from siamesenorm.training.plot import loss_curve
from siamesenorm.training.probes_file import ProbesFile
from siamesenorm.training.processes import Processes, together
from siamesenorm.training.recipe import Recipe, digest
from siamesenorm.training.run_folder import MetricsFile, RunFolder, read_metrics
from siamesenorm.training.saved import no_progress_bars
from siamesenorm.training.settings import device_of, scheme_of
from siamesenorm.training.tasks import Evaluation, Task, task_of
from siamesenorm.training.trackers import Trackers, Tracking

if TYPE_CHECKING:
    from siamesenorm.training.engine import Outcome

_FLUSH_EVERY_SECONDS = 1.0
# The figures of a validation that say something over the steps.
_VALIDATED = ("val_loss", "val_accuracy")


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
    with no_progress_bars():
        check(recipe)
    device = device_of(recipe)
    with quiet_engine(verbose), together(device) as processes, ExitStack() as stack:
        display = display if processes.is_first else Silent()
        parallel.check(recipe, processes)
        processes.first(tracking.check)
        data = task_of(recipe).load(processes)
        task = task_of(task_of(recipe).pinned(data))
        recipe = task.recipe
        folder = RunFolder(out or default_folder(recipe))
        is_new = processes.first(lambda: folder.claim(recipe))
        processes.first(lambda: stack.enter_context(folder.locked()))
        finished = processes.first(folder.finished_summary)
        if finished is not None:
            return Result("already finished", folder, finished)
        display.note(task.describe(data))
        try:
            return _Session(task, data, folder, device, display, tracking, processes).run()
        except ConfigError:
            # Found late, such as weights that cannot be loaded; the corrected command may want this folder.
            if is_new:
                processes.first(folder.release)
            raise


@dataclass(frozen=True)
class _Session:
    """One process's share of one session of a run, from a claimed folder on."""

    task: Task[Any, Any]
    data: Any
    folder: RunFolder
    device: torch.device
    display: Display
    tracking: Tracking
    processes: Processes

    @property
    def recipe(self) -> Recipe:
        """The recipe, its data pinned."""
        recipe: Recipe = self.task.recipe
        return recipe

    def run(self) -> Result:
        """Train, and save the model of a run that reaches its end."""
        recipe, folder = self.recipe, self.folder
        with no_progress_bars():
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
        self.processes.first(self._save_form)
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

    def _save_form(self) -> None:
        """Keep what is saved with a model, so that its checkpoints can be exported without the data."""
        self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
        self.folder.write_origin(self.recipe)
        if self.folder.form.is_dir():
            return
        with no_progress_bars():
            empty = empty_model(self.recipe)
            with folders.made_whole(self.folder.form, replace=True) as unfinished:
                self.task.save_form(empty, self.data, unfinished)

    def _fit(self, model: Any, listener: Listener) -> Outcome:
        from siamesenorm.training import engine

        return engine.fit(
            model,
            scheme_of(self.recipe),
            self.task,
            self.data,
            folder=self.folder.checkpoints,
            device=self.device,
            listener=listener,
            validate=lambda: self._validate(model),
            probe=self._prober(model) if self.recipe.train.probe_every is not None else None,
            processes=self.processes,
        )

    def _prober(self, model: Any) -> Callable[[], Sequence[Mapping[str, Any]]]:
        """Looks into the model, on the first process, always by the same batch of what was held out."""
        from siamesenorm import probes

        if not self.processes.is_first:
            return lambda: ()
        batches = self.task.probe_batches(
            model,
            self.data,
            device=self.device,
            batch_size=parallel.micro_batch_size(self.recipe, self.processes.count),
            count=1,
        )
        return lambda: probes.site_table(model, batches)

    def _validate(self, model: Any) -> Evaluation:
        return self.task.validate(
            model,
            self.data,
            device=self.device,
            batch_size=parallel.micro_batch_size(self.recipe, self.processes.count),
            processes=self.processes,
        )

    def _interrupted(self, step: int) -> str:
        steps = self.recipe.train.steps
        return f"stopped after step {step} of {steps} and saved; the same command goes on from there"

    def _finish(self, model: Any, validation: Evaluation) -> dict[str, Any]:
        task, folder = self.task, self.folder
        model.eval()
        with no_progress_bars(), folders.made_whole(folder.model, replace=True) as unfinished:
            form.fill(folder.form, model, unfinished)
        self._plot()
        summary = self._summary(model, validation)
        with no_progress_bars():
            summary |= task.show(model, self.data, folder.path, self.display.note)
        averaged = self.recipe.train.ema_decay is not None
        card.write(
            folder.model,
            self.recipe,
            summary,
            step=summary["steps"],
            averaged=averaged,
            params=summary["params"],
            from_folder=folder.starts_from_a_folder(),
        )
        # Last of all: with a summary, the run counts as finished.
        folder.write_summary(summary)
        written: dict[str, Any] = json.loads(folder.summary.read_text())
        return written

    def _diverged(self, model: Any, error: NonFiniteError) -> dict[str, Any]:
        summary = self._summary(model, None) | {
            "diverged": True,
            "diverged_at_step": error.step,
            "diverged_where": error.where,
        }
        self.folder.write_summary(summary)
        self._plot()
        return summary

    def _plot(self) -> None:
        recipe = self.recipe
        title = f"{recipe.name}, {recipe.model.scheme}, seed {recipe.seed}"
        loss_curve(read_metrics(self.folder.metrics), title, self.task.loss_label, self.folder.loss_plot)

    def _summary(self, model: Any, validation: Evaluation | None) -> dict[str, Any]:
        """What ``summary.json`` holds, in the task's own units, tokens and seconds."""
        recipe = self.recipe
        lines = read_metrics(self.folder.metrics)
        last: dict[str, Any] = lines[-1] if lines else {"step": 0, "loss": None, "tokens": 0, "seconds": 0.0}
        total, non_embedding = parameter_counts(model)
        figures: dict[str, Any] = dict.fromkeys(("val_loss", "val_ppl", "val_accuracy", "val_tokens"))
        figures |= {} if validation is None else validation.figures()
        seconds = last["seconds"]
        images = {} if "images" not in last else {
            "images": last["images"],
            "images_per_second": last["images"] / seconds if seconds else None,
        }  # fmt: skip
        return {
            **figures,
            "train_loss": last["loss"],
            "params": total,
            "params_non_embedding": non_embedding,
            "steps": last["step"],
            "skipped_steps": sum(bool(line.get("skipped")) for line in lines),
            "tokens": last["tokens"],
            **images,
            "seconds": seconds,
            "tokens_per_second": last["tokens"] / seconds if seconds else None,
            "diverged": False,
            "recipe": recipe.name,
            "task": recipe.task,
            "host": recipe.model.host,
            "scheme": recipe.model.scheme,
            "scheme_options": dict(recipe.model.options),
            "seed": recipe.seed,
            "pretrained": recipe.model.pretrained,
            "processes": self.processes.count,
            "parallel": parallel.strategy(recipe, self.processes.count),
            **self.task.facts(self.data, figures),
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
    """Hears each step from the engine; writes it down and passes it on to the display and the trackers.

    That is ``metrics.jsonl``, and ``probes.parquet`` where the recipe asks for it.
    """

    def __init__(self, folder: RunFolder, recipe: Recipe, display: Display, trackers: Trackers | None = None) -> None:
        self._metrics = MetricsFile(folder.metrics)
        self._probes = ProbesFile(folder.probes) if recipe.train.probe_every is not None else None
        self._steps = recipe.train.steps
        self._display = display
        self._trackers = trackers or Trackers({}, display.warn)
        self._flushed = time.monotonic()

    def resumed(self, step: int) -> None:
        """Cut what a resumed run will write again, and start the display."""
        self._metrics.open_after(step)
        if self._probes is not None:
            self._probes.open_after(step)
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
        if step.images is not None:
            line["images"] = step.images
        if step.validation is not None:
            figures = step.validation.figures()
            line |= {name: figures[name] for name in _VALIDATED if name in figures}
        line |= step.parts
        if step.skipped:
            line["skipped"] = True
            self._display.warn(
                f"step {step.step} is skipped: its loss is {step.loss} and its gradient norm {step.grad_norm}"
            )
        self._metrics.append(line)
        if self._probes is not None and step.sites:
            self._probes.append(step.step, step.sites)
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
