"""Showing a preparation as it goes, on stderr: a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time

_LINE_EVERY_SECONDS = 10.0


class Lines:
    """A plain line every ten seconds, and one at a pass's end."""

    def __init__(self) -> None:
        self._what = ""
        self._total: int | None = None
        self._started = self._shown = 0.0
        self._last = ""

    def note(self, message: str) -> None:
        """Print it."""
        print(message, file=sys.stderr, flush=True)

    def begin(self, what: str, total: int | None) -> None:
        """Start counting."""
        self._what, self._total = what, total
        self._started = self._shown = time.monotonic()

    def show(self, done_bytes: int, documents: int, text_bytes: int, tokens: int) -> None:
        """Print a line if it is time for one."""
        self._show(done_bytes, _rates(documents, text_bytes, tokens, time.monotonic() - self._started))

    def show_images(self, done: int, images: int) -> None:
        """Print a line if it is time for one."""
        self._show(done, _image_rate(images, time.monotonic() - self._started))

    def _show(self, done: int, rates: str) -> None:
        now = time.monotonic()
        share = f" {100 * done / self._total:.0f}%" if self._total and done else ""
        self._last = f"{self._what}{share}  {rates}"
        if now - self._shown >= _LINE_EVERY_SECONDS:
            self._shown = now
            self.note(self._last)

    def end(self) -> None:
        """Print where the pass ended."""
        if self._last:
            self.note(self._last)
        self._last = ""


class Bar:
    """A progress bar with what is done per second."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("", rates="", visible=False)
        self._started = 0.0

    def note(self, message: str) -> None:
        """Print it."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def begin(self, what: str, total: int | None) -> None:
        """Put the bar up."""
        self._started = time.monotonic()
        self._progress.reset(self._task, description=what, total=total, visible=True, rates="")
        self._progress.start()

    def show(self, done_bytes: int, documents: int, text_bytes: int, tokens: int) -> None:
        """Move the bar."""
        rates = _rates(documents, text_bytes, tokens, time.monotonic() - self._started)
        self._progress.update(self._task, completed=done_bytes, rates=rates)

    def show_images(self, done: int, images: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done, rates=_image_rate(images, time.monotonic() - self._started))

    def end(self) -> None:
        """Take the bar down."""
        self._progress.stop()


def _rates(documents: int, text_bytes: int, tokens: int, seconds: float) -> str:
    """Counts of this session and how many a second."""
    seconds = max(seconds, 1e-9)
    parts = [f"{documents:,} documents ({documents / seconds:,.0f}/s)", f"{text_bytes / seconds / 1e6:,.1f} MB/s"]
    if tokens:
        parts.append(f"{tokens:,} tokens ({tokens / seconds:,.0f}/s)")
    return "  ".join(parts)


def _image_rate(images: int, seconds: float) -> str:
    return f"{images:,} images ({images / max(seconds, 1e-9):,.0f}/s)"


def for_terminal() -> Bar | Lines:
    """A bar where stderr is a terminal, else lines."""
    return Bar() if sys.stderr.isatty() else Lines()
