"""Showing a study as it goes: a bar over the whole grid on a terminal, a line a run anywhere else. All to stderr."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from siamesenorm.study.grid import Run
from siamesenorm.study.timing import kind
from siamesenorm.study.worker import Ended, Moved
from siamesenorm.training.display import clock

__all__ = ["Bar", "Display", "Lines", "Standing", "for_terminal"]


class Standing:
    """How far a study is, and how long it will take.

    The time left is that of the steps left, each at the pace of the runs of its kind so far, over the workers.
    """

    def __init__(self, runs: Sequence[Run], ended: Sequence[str], workers: int) -> None:
        self.runs = {run.key: run for run in runs}
        self.counts: Counter[str] = Counter(ended)
        self.workers = workers
        self.under_way: dict[str, Moved | None] = {}
        self._left = {run.key: run.recipe.train.steps for run in runs}
        self._paces: dict[str, tuple[float, int]] = {}
        self._total = sum(self._left.values())
        self._started: dict[str, tuple[float, int]] = {}

    def skip(self, key: str) -> None:
        """A run that is not to be trained here."""
        self._total -= self._left.pop(key, 0)

    def begin(self, key: str) -> None:
        """A run is under way."""
        self.under_way[key] = None

    def move(self, key: str, moved: Moved) -> None:
        """A run has come to a step."""
        run = self.runs[key]
        now = time.monotonic()
        # From its first report on, as what comes before it is no step; validation and saving count as part of steps.
        since, first = self._started.setdefault(key, (now, moved.step))
        if moved.step > first:
            self._paces[kind(run.recipe)] = (now - since, moved.step - first)
        self.under_way[key] = moved
        self._left[key] = run.recipe.train.steps - moved.step

    def end(self, key: str, how: str) -> None:
        """A run is over."""
        self.counts[how] += 1
        self.under_way.pop(key, None)
        self._left[key] = 0

    @property
    def share(self) -> float:
        """The share of all steps that are done."""
        return 1 - sum(self._left.values()) / self._total if self._total else 1.0

    @property
    def seconds_left(self) -> float | None:
        """The seconds that are left; ``None`` before anything is known."""
        if not self._paces:
            return None
        mean = sum(seconds for seconds, _ in self._paces.values()) / sum(steps for _, steps in self._paces.values())
        paces = {name: seconds / steps for name, (seconds, steps) in self._paces.items()}
        work = [left * paces.get(kind(self.runs[key].recipe), mean) for key, left in self._left.items() if left]
        # The last run cannot be shared.
        return max(sum(work) / self.workers, max(work)) if work else 0.0


class Display(Protocol):
    """What a study tells the person who watches it."""

    def note(self, message: str) -> None:
        """Something worth one line."""

    def warn(self, message: str) -> None:
        """Something that should not be overlooked."""

    def show(self, standing: Standing) -> None:
        """Something has moved."""

    def ended(self, run: Run, ended: Ended, standing: Standing) -> None:
        """A run is over."""

    def end(self) -> None:
        """The study is over, for whatever reason."""


class Lines:
    """A line for each run that is over."""

    def note(self, message: str) -> None:
        """Print it."""
        print(message, file=sys.stderr, flush=True)

    def warn(self, message: str) -> None:
        """Print it, marked as a warning."""
        self.note(f"warning: {message}")

    def show(self, standing: Standing) -> None:
        """Nothing."""

    def ended(self, run: Run, ended: Ended, standing: Standing) -> None:
        """Print how it ended and how long the rest will take."""
        self.note(_line(run, ended, standing))

    def end(self) -> None:
        """Nothing is left open."""


class Bar:
    """A bar over all steps of the grid, with what is under way; the line of each run that is over stays above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(stderr=True)
        self._progress = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("study", total=1.0, text="starting")
        self._progress.start()

    def note(self, message: str) -> None:
        """Print it above the bar."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        """Print it above the bar, in yellow."""
        self._console.print(f"warning: {message}", markup=False, highlight=False, style="yellow", soft_wrap=True)

    def show(self, standing: Standing) -> None:
        """Move the bar."""
        going = [
            f"{standing.runs[key].title}"
            + (f" {moved.step}/{standing.runs[key].recipe.train.steps}, loss {moved.loss:.3f}" if moved else "")
            for key, moved in standing.under_way.items()
        ]
        left = standing.seconds_left
        parts = [f"{sum(standing.counts.values())}/{len(standing.runs)} runs", *going]
        parts += [] if left is None else [f"{clock(left)} left"]
        self._progress.update(self._task, completed=standing.share, text=" · ".join(parts))

    def ended(self, run: Run, ended: Ended, standing: Standing) -> None:
        """Print how it ended, and move the bar."""
        self.note(_line(run, ended, standing, left=False))
        self.show(standing)

    def end(self) -> None:
        """Take the bar down."""
        self._progress.stop()


def _line(run: Run, ended: Ended, standing: Standing, *, left: bool = True) -> str:
    parts = [f"{sum(standing.counts.values())}/{len(standing.runs)}", f"{run.title}: {ended.how}"]
    if ended.loss is not None:
        parts.append(f"validation loss {ended.loss:.4f}")
    if ended.why:
        parts.append(ended.why)
    if left and (seconds := standing.seconds_left):
        parts.append(f"{clock(seconds)} left")
    return "  ".join(parts)


def for_terminal() -> Display:
    """A bar where stderr is a terminal, else lines."""
    return Bar() if sys.stderr.isatty() else Lines()
