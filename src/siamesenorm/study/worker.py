"""A process that trains runs, one after the other.

Starting one takes as long as importing torch and transformers, so it stays for many runs. What one run raises is told
and does not reach the next; what ends the process itself, such as a lack of memory, ends that run alone, as the process
that hands out the runs starts another worker.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siamesenorm.residual import ConfigError, one_line

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from siamesenorm.study.folder import StudyFolder
    from siamesenorm.study.grid import Run
    from siamesenorm.training.recipe import Recipe

__all__ = ["Ended", "Job", "Moved", "Pace", "Said", "work"]

_SECONDS_BETWEEN_REPORTS = 0.2
# The first steps of a run make room for what the others find there.
_STEPS_TO_SETTLE = 3
_RATE_TO_TIME = 1e-8


@dataclass(frozen=True)
class Job:
    """A run to train in a study's folder.

    Attributes:
        run: itself.
        study: the folder.
        began: when the session did, in seconds since 1970; what has failed since is not tried again in it.
        keep_model: whether its model stays there.
    """

    run: Run
    study: Path
    began: float
    keep_model: bool = True


@dataclass(frozen=True)
class Pace:
    """A run whose step is to be timed, over so many steps."""

    run: Run
    steps: int


@dataclass(frozen=True)
class Moved:
    """A run has come to a step, after so many seconds of training."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Said:
    """A run has something to say."""

    message: str
    warning: bool = False


@dataclass(frozen=True)
class Ended:
    """A job is over.

    Attributes:
        how: ``finished``, ``diverged``, ``interrupted``, ``failed``, ``taken`` (by another process) or ``timed``.
        why: of a failure, in words.
        loss: on what was held out, of a run that finished.
        seconds_per_step: of a pace.
    """

    how: str
    why: str = ""
    loss: float | None = None
    seconds_per_step: float | None = None


def work(connection: Connection, threads: int, number: int) -> None:
    """Train what comes in over a connection.

    Args:
        connection: gives jobs, and ``None`` as the last, and takes what becomes of them.
        threads: for the operations of this process.
        number: of this worker, by which the GPUs of a machine are shared out.
    """
    _end_with_the_parent()
    # Who hands out the runs decides what an interruption means to a worker; a run that is being trained saves itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    import torch

    torch.set_num_threads(threads)
    if count := torch.cuda.device_count():
        os.environ["LOCAL_RANK"] = str(number % count)
    trainer = _Trainer(connection.send)
    while (job := connection.recv()) is not None:
        connection.send(trainer.train(job) if isinstance(job, Job) else _time(job))


def _end_with_the_parent() -> None:
    """End this process at once when the one that started it is gone, so that nobody waits for what it holds."""
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


class _Trainer:
    """Trains runs, and keeps from one to the next what is the same for both."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._data: dict[str, Any] = {}
        self._memory: dict[str, int] = {}

    def train(self, job: Job) -> Ended:
        """Train a run, unless another process does or did."""
        from siamesenorm.study.folder import StudyFolder

        folder, run = StudyFolder(job.study), job.run
        try:
            claim = folder.claimed(run)
            if not claim.take():
                return Ended("taken")
        except (OSError, ConfigError) as error:
            return Ended("failed", _in_words(error))
        try:
            with _output_to(folder.log(run)):
                state = folder.state(run)
                if state.status == "failed" and state.failed_at > job.began:
                    return Ended("failed", state.why or "")
                if state.vanished:
                    # What is left of it would be taken for a run that has ended, or be gone on from.
                    shutil.rmtree(folder.run(run).path, ignore_errors=True)
                if not state.ended:
                    # One that has a summary already was killed between its end and the note of it.
                    if folder.run(run).read_summary() is None and (stopped := self._run(folder, run)) is not None:
                        return stopped
                    state = folder.end(run, self._memory_of(run.recipe), keep_model=job.keep_model)
            return Ended(state.status, state.why or "", loss=state.summary.get("val_loss"))
        except Exception as error:
            why = _in_words(error)
            # Where this cannot be written either, the next session finds a run that has not ended, which is as good.
            with suppress(OSError):
                folder.fail(run, why)
            return Ended("failed", why)
        finally:
            claim.release()

    def _run(self, folder: StudyFolder, run: Run) -> Ended | None:
        """Train a run until it has a summary; how it ended where it did not come to that."""
        from siamesenorm.training.run import train

        recipe = folder.pinned(run)
        self._look_once(recipe)
        result = train(recipe, folder.run(run).path, _Reporter(self._tell))
        return Ended(result.status, result.message) if result.status == "interrupted" else None

    def _look_once(self, recipe: Recipe) -> None:
        """Let a run have the data as the run before it found it, where that is the same."""
        from siamesenorm.training.processes import ALONE
        from siamesenorm.training.recipe import to_mapping
        from siamesenorm.training.tasks import task_of

        section, task = json.dumps(to_mapping(recipe)["data"], sort_keys=True), task_of(recipe)
        if section in self._data:
            task.keep(self._data[section])
        else:
            self._data = {section: task.load(ALONE)}

    def _memory_of(self, recipe: Recipe) -> int:
        from siamesenorm.study.timing import kind
        from siamesenorm.training.build import check
        from siamesenorm.training.memory import training_memory

        if (name := kind(recipe)) not in self._memory:
            self._memory[name] = training_memory(check(recipe), recipe).total
        return self._memory[name]


def _time(pace: Pace) -> Ended:
    """The seconds that a step of a recipe takes, as the middle one of those after the first few."""
    from siamesenorm.training.display import Silent
    from siamesenorm.training.run import train
    from siamesenorm.training.run_folder import read_metrics

    recipe = pace.run.recipe
    steps = pace.steps + _STEPS_TO_SETTLE
    train_recipe = replace(recipe.train, steps=steps, checkpoint_every=steps, validate_every=steps)
    schedule = recipe.schedule.scaled(steps, of=recipe.train.steps)
    # Steps take as long at any rate, and at this one none diverges.
    optim = replace(recipe.optim, lr=_RATE_TO_TIME)
    folder = Path(tempfile.mkdtemp(prefix="siamesenorm-pace-"))
    try:
        with _output_to(folder / "log"):
            train(replace(recipe, train=train_recipe, schedule=schedule, optim=optim), folder / "run", Silent())
        seconds = [line["seconds"] for line in read_metrics(folder / "run" / "metrics.jsonl")]
        settled = [later - earlier for earlier, later in itertools.pairwise(seconds[_STEPS_TO_SETTLE - 1 :])]
        return Ended("timed", seconds_per_step=statistics.median(settled))
    except Exception as error:
        return Ended("failed", _in_words(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Let all that this process prints, libraries included, go to a file, with the trace of what ends it."""
    sys.stdout.flush(), sys.stderr.flush()
    before = [os.dup(number) for number in (1, 2)]
    try:
        with path.open("ab", buffering=0) as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            try:
                yield
            except Exception:
                traceback.print_exc()
                raise
            finally:
                sys.stdout.flush(), sys.stderr.flush()
    finally:
        for number, old in enumerate(before, start=1):
            os.dup2(old, number)
            os.close(old)


def _in_words(error: Exception) -> str:
    """What went wrong, on one line."""
    from siamesenorm.training.events import SaveError

    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    known = isinstance(error, ConfigError | SaveError)
    return one_line(error) if known else f"{type(error).__name__}: {one_line(error)}"


class _Reporter:
    """A run's display that tells the process which handed it out."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._told = 0.0
        self._total = 0

    def note(self, message: str) -> None:
        """Left out: what a single run says of itself is in its folder."""

    def warn(self, message: str) -> None:
        """Passed on."""
        self._tell(Said(message, warning=True))

    def begin(self, done: int, total: int) -> None:
        """Passed on."""
        self._total = total

    def step(self, step: Any) -> None:
        """Passed on, but for most of those that follow each other quickly."""
        now = time.monotonic()
        if now - self._told > _SECONDS_BETWEEN_REPORTS or step.step == self._total:
            self._told = now
            self._tell(Moved(step.step, step.seconds, step.loss))

    def end(self) -> None:
        """Nothing."""
