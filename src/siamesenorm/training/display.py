"""Showing a run as it goes: a progress bar on a terminal, plain lines anywhere else. All of it goes to stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from siamesenorm.training.events import Step


class Display(Protocol):
    """What a run tells the person who watches it."""

    def note(self, message: str) -> None:
        """Something worth one line."""

    def warn(self, message: str) -> None:
        """Something that should not be overlooked."""

    def begin(self, done: int, total: int) -> None:
        """Steps start now; `done` of `total` were made by earlier sessions."""

    def step(self, step: Step) -> None:
        """A step is done."""

    def end(self) -> None:
        """No more steps come, for whatever reason."""


class Silent:
    """Shows nothing: what the processes beside the first one have."""

    def note(self, message: str) -> None:
        """Nothing."""

    def warn(self, message: str) -> None:
        """Nothing."""

    def begin(self, done: int, total: int) -> None:
        """Nothing."""

    def step(self, step: Step) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class _Pace:
    """Tokens or images per second and seconds left, over this session's steps."""

    def __init__(self) -> None:
        self.first: Step | None = None

    def rate(self, step: Step, total: int) -> tuple[float | None, float | None]:
        if self.first is None:
            self.first = step
        elapsed = step.seconds - self.first.seconds
        if elapsed <= 0:
            return None, None
        left = (total - step.step) * elapsed / (step.step - self.first.step)
        return (step.seen[0] - self.first.seen[0]) / elapsed, left


class Lines:
    """Plain lines: every ``every`` steps, the last step, and each validation."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.total = 0
        self._pace = _Pace()

    def note(self, message: str) -> None:
        """Print it."""
        print(message, file=sys.stderr, flush=True)

    def warn(self, message: str) -> None:
        """Print it, marked as a warning."""
        self.note(f"warning: {message}")

    def begin(self, done: int, total: int) -> None:
        """Start counting."""
        self.total = total
        self._pace = _Pace()

    def step(self, step: Step) -> None:
        """Show the step."""
        rate, left = self._pace.rate(step, self.total)
        if step.validation is None and step.step % self.every and step.step not in (1, self.total):
            return
        parts = [f"step {step.step}/{self.total}", f"loss {step.loss:.4f}", f"lr {step.lr:.2e}"]
        if rate is not None and left is not None:
            parts += [f"{rate:,.0f} {step.seen[1]}/s", f"{clock(left)} left"]
        if step.validation is not None:
            parts.append(_validation(step))
        self.note("  ".join(parts))

    def end(self) -> None:
        """Nothing is left open."""


class Bar:
    """A progress bar with the loss, tokens per second and the time left; validations and messages stay above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[left]} left"),
            console=self._console,
        )
        self._task = self._progress.add_task("training", total=None, loss="-", rate="-", left="-", start=False)
        self._total = 0
        self._pace = _Pace()

    def note(self, message: str) -> None:
        """Print it."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        """Print it, marked as a warning."""
        self._console.print(f"warning: {message}", markup=False, highlight=False, style="yellow", soft_wrap=True)

    def begin(self, done: int, total: int) -> None:
        """Start counting."""
        self._total = total
        self._pace = _Pace()
        self._progress.update(self._task, total=total, completed=done)
        self._progress.start_task(self._task)
        self._progress.start()

    def step(self, step: Step) -> None:
        """Show the step."""
        rate, left = self._pace.rate(step, self._total)
        self._progress.update(
            self._task,
            completed=step.step,
            loss=f"{step.loss:.4f}",
            rate="-" if rate is None else f"{rate:,.0f} {step.seen[1]}/s",
            left="-" if left is None else clock(left),
        )
        if step.validation is not None:
            self.note(f"step {step.step}: {_validation(step)}")

    def end(self) -> None:
        """Take the bar down."""
        self._progress.stop()


def _validation(step: Step) -> str:
    assert step.validation is not None
    text = f"validation loss {step.validation.loss:.4f}"
    accuracy = step.validation.figures().get("val_accuracy")
    return text if accuracy is None else f"{text}, accuracy {accuracy:.2%}"


def for_terminal(every: int) -> Display:
    """A bar where stderr is a terminal, else lines every `every` steps."""
    return Bar() if sys.stderr.isatty() else Lines(every)


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
