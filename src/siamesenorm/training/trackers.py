"""Where else a run's figures go while it trains: TensorBoard's event files, Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from siamesenorm.data.files import write_whole
from siamesenorm.residual import ConfigError, one_line
from siamesenorm.training.events import Step
from siamesenorm.training.recipe import Recipe, flatten


class Tracker(Protocol):
    """A place for figures; `Trackers` sees to it that an error of one does not end the run."""

    place: str

    def resumed(self, step: int) -> None:
        """The run goes on after `step`; later ones that are there already are about to be told again."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """What one optimiser step gave."""

    def flush(self) -> None:
        """A checkpoint is about to be written: what was logged must outlast this process."""

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """The session is over; `summary` is what ``summary.json`` holds, None where the run is to go on."""


class TensorBoard:
    """Event files in a folder of the run, one a session; steps that a resumed run does again replace the earlier ones.

    Args:
        folder: made if it is not there.

    Raises:
        ConfigError: without the package.
    """

    def __init__(self, folder: Path) -> None:
        self.place = f"{folder} (tensorboard --logdir {folder})"
        self._folder = folder
        self._writer_class = _summary_writer()
        self._writer: Any = None

    def resumed(self, step: int) -> None:
        """Open a new file, which begins by taking back what older ones have after `step`."""
        self._writer = self._writer_class(str(self._folder), purge_step=step + 1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures; one that is not finite is shown as such."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Wait until the file has everything."""
        self._writer.flush()

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Close the file; there is no place in it for a summary."""
        del summary
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """One W&B run per run folder, over all its sessions; ``WANDB_MODE=offline`` keeps it in the folder.

    Args:
        project: its name there.
        folder: of the run; ``wandb/`` in it holds the run's id and W&B's own files.
        recipe: becomes the run's config, by dotted key.
        name: of the run.

    Raises:
        ConfigError: without the package, or where W&B cannot be reached or does not let the user in.
    """

    def __init__(self, project: str, folder: Path, recipe: Recipe, name: str) -> None:
        wandb = _wandb()
        try:
            self._run = wandb.init(
                project=project,
                id=_run_id(folder / "wandb" / "run-id.txt"),
                name=name,
                dir=str(folder),
                config=flatten(recipe),
                allow_val_change=True,
                resume="allow",
                # The terminal is the display's.
                settings=wandb.Settings(silent=True, console="off"),
            )
        except Exception as error:  # the package has many kinds of its own, and lets those of others through
            raise ConfigError(
                f"cannot start Weights & Biases: {one_line(error)}; 'wandb login' logs in, and WANDB_MODE=offline "
                "keeps the figures in the run's folder"
            ) from error
        if self._run.disabled:
            self.place = "nowhere (W&B is disabled)"
        else:
            self.place = f"{folder / 'wandb'} (wandb sync)" if self._run.offline else str(self._run.url)

    def resumed(self, step: int) -> None:
        """Nothing: the server knows which steps it has."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send the figures of a step, unless an earlier session has sent them: W&B takes no step twice."""
        if step >= self._run.starting_step:
            self._run.log(dict(figures), step=step)

    def flush(self) -> None:
        """Nothing: a process of W&B's own has the figures."""

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """Send the summary; a run without one, or that diverged, is marked as failed until it is taken up again."""
        if summary is not None:
            self._run.summary.update(dict(summary))
        self._run.finish(exit_code=1 if summary is None or summary.get("diverged") else 0)


class Trackers:
    """All trackers of a run as one; the first error of each is shown as a warning, and it hears no more."""

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        self._trackers = dict(trackers)
        self._warn = warn
        # Tokens and seconds up to the step before; None where no step of this session is before.
        self._before: tuple[int, float] | None = None

    @property
    def places(self) -> list[str]:
        """Where the figures are to be seen."""
        return [tracker.place for tracker in self._trackers.values()]

    def resumed(self, step: int) -> None:
        """The run goes on after `step`; 0 where it starts afresh."""
        self._before = None if step else (0, 0.0)
        self._each(lambda tracker: tracker.resumed(step))

    def step(self, step: Step) -> None:
        """Pass a step's figures on."""
        found = _figures(step, self._before)
        self._before = step.tokens, step.seconds
        self._each(lambda tracker: tracker.log(step.step, found))

    def flush(self) -> None:
        """A checkpoint is about to be written."""
        self._each(lambda tracker: tracker.flush())

    def close(self, summary: Mapping[str, Any] | None) -> None:
        """The session is over; without a summary (None, or an empty one), the run is to go on in another."""
        self._each(lambda tracker: tracker.close(summary or None))
        self._trackers.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # a full disk or a lost connection must not cost the run
                del self._trackers[name]
                self._warn(f"{name} failed and gets no more figures of this session: {one_line(error)}")


@dataclass(frozen=True)
class Tracking:
    """Which trackers the user asks for; no part of a recipe, since they change nothing about a run's numbers."""

    tensorboard: bool = False
    wandb: str | None = None

    def check(self) -> None:
        """Make sure that the packages are there, before anything is trained or written.

        Raises:
            ConfigError: with the command that installs a missing one.
        """
        if self.tensorboard:
            _summary_writer()
        if self.wandb is not None:
            if not self.wandb:
                raise ConfigError("--wandb needs the name of a project")
            _wandb()

    def open(self, folder: Path, recipe: Recipe, warn: Callable[[str], None]) -> Trackers:
        """Start the trackers of one session.

        Args:
            folder: the run's, which is there already.
            recipe: the run's.
            warn: told, once for each, of a tracker that fails later on.

        Raises:
            ConfigError: where one cannot be started.
        """
        trackers: dict[str, Tracker] = {}
        if self.tensorboard:
            trackers["TensorBoard"] = TensorBoard(folder / "tensorboard")
        if self.wandb is not None:
            trackers["Weights & Biases"] = WeightsAndBiases(self.wandb, folder, recipe, folder.resolve().name)
        return Trackers(trackers, warn)


def _figures(step: Step, before: tuple[int, float] | None) -> dict[str, float]:
    """A step's figures by their names in the trackers; the speed is that of this step alone."""
    figures = {
        "train/loss": step.loss,
        "train/lr": step.lr,
        "train/grad_norm": step.grad_norm,
        "train/tokens": float(step.tokens),
    }
    if before is not None and step.seconds > before[1]:
        figures["train/tokens_per_second"] = (step.tokens - before[0]) / (step.seconds - before[1])
    if step.images is not None:
        figures["train/images"] = float(step.images)
    figures |= {f"train/{name}": value for name, value in step.parts.items()}
    if step.skipped:
        figures["train/skipped"] = 1.0
    if step.validation is not None:
        figures["validation/loss"] = step.validation.loss
        if (accuracy := step.validation.figures().get("val_accuracy")) is not None:
            figures["validation/accuracy"] = accuracy
    return figures


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(f"--tensorboard needs a package: pip install tensorboard ({one_line(error)})") from error
    return SummaryWriter


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(f"--wandb needs a package: pip install wandb ({one_line(error)})") from error
    # Without the package, a folder wandb/ that an earlier run left in the working directory passes for it.
    if not hasattr(wandb, "init"):
        raise ConfigError("--wandb needs a package: pip install wandb")
    return wandb


def _run_id(path: Path) -> str:
    """The id that a run folder has had since its first session with W&B."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        made = uuid.uuid4().hex[:12]
        path.parent.mkdir(exist_ok=True)
        write_whole(path, made + "\n")
        return made
