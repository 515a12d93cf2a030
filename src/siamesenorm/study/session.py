"""One session of a study: from its grid to its runs, its table and its report."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siamesenorm.residual import ConfigError, one_line
from siamesenorm.study import results, summary
from siamesenorm.study.compare import Comparison, compare
from siamesenorm.study.display import Display, Lines, Standing
from siamesenorm.study.folder import DIVERGED, FAILED, FINISHED, PENDING, StudyFolder
from siamesenorm.study.grid import Run, Study
from siamesenorm.study.pool import Start, Workers
from siamesenorm.study.results import Row
from siamesenorm.study.timing import kind, of_equal_time
from siamesenorm.study.worker import Ended, Job, Moved, Pace, Said
from siamesenorm.training.processes import launched
from siamesenorm.training.run_folder import read_metrics

__all__ = ["Outcome", "Share", "report", "run_study"]

_SECONDS_BETWEEN_LOOKS = 0.5
_STEPS_TO_TIME = 12


@dataclass(frozen=True)
class Share:
    """The place of one of several processes that do a study together, each starting where it meets the others last.

    Attributes:
        number: from 0.
        count: of processes.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count:
            raise ConfigError(
                f"task {self.number} of {self.count}: tasks count from 0, so the last of them is {self.count - 1}"
            )

    @classmethod
    def read(cls, text: str) -> Share:
        """The share that ``I/N`` stands for."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and int(count)):
            raise ConfigError(f"a task is I/N, such as 0/4 for the first of four, not '{text}'")
        return cls(int(number), int(count))

    @classmethod
    def of_slurm(cls) -> Share | None:
        """This task of a SLURM job array; ``None`` outside of one."""
        names = ("ID", "MIN", "COUNT", "STEP")
        numbers = [os.environ.get(f"SLURM_ARRAY_TASK_{name}", "") for name in names]
        if not numbers[0].isdecimal():
            return None
        number, least, count, step = (
            int(text) if text.isdecimal() else default for text, default in zip(numbers, (0, 0, 1, 1), strict=True)
        )
        return cls((number - least) // max(step, 1) % count, count)

    def order(self, runs: Sequence[Run]) -> list[Run]:
        """This process's own runs first, then those of the others, in case they do not come to them."""
        own = range(self.number, len(runs), self.count)
        return [runs[index] for index in own] + [run for index, run in enumerate(runs) if index not in own]


@dataclass(frozen=True)
class Outcome:
    """How a session ended: ``status`` is ``done``, ``incomplete`` (others have the rest) or ``interrupted``."""

    status: str
    folder: StudyFolder
    comparison: Comparison
    rows: Sequence[Row]

    @property
    def failed(self) -> int:
        """How many runs failed."""
        return sum(row["status"] == FAILED for row in self.rows)


def run_study(
    study: Study,
    out: Path,
    *,
    jobs: int = 1,
    share: Share | None = None,
    display: Display | None = None,
    start: Start = "spawn",
) -> Outcome:
    """Train what is left of a study, and write its table and report.

    Args:
        study: as loaded.
        out: the study's folder, which several processes may share.
        jobs: how many runs are trained at the same time, each with its share of this process's threads.
        share: this process's place among others that do the same study; it leaves to them what they are training.
            Without it, it waits for them.
        display: shown what happens.
        start: how worker processes are started (`Workers`).

    Raises:
        ConfigError: for all that is wrong with the request, before anything is trained; or where the table or the
            report cannot be written, after it.
    """
    import torch

    display = display or Lines()
    if launched() > 1:
        raise ConfigError(
            "a study starts its own processes: give --jobs, or --task on each machine, in place of torchrun"
        )
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, not {jobs}")
    runs = study.runs
    folder = StudyFolder(out)
    with folder.claim(study):
        results.check_version(folder)
        folder.pin(runs)
    threads = max(torch.get_num_threads() // jobs, 1)
    try:
        with _terminated_as_interrupted(), Workers(jobs, threads, start) as workers, _said(display):
            if study.seconds is not None:
                runs = _timed(runs, study.seconds, folder, workers, display)
            complete = _Session(study, runs, folder, workers, share, display).train()
        status = "done" if complete else "incomplete"
    except KeyboardInterrupt:
        status = "interrupted"
    finally:
        display.end()
    return _written(study, runs, folder, status)


def report(study: Study, out: Path) -> Outcome:
    """Write a study's table and report from the runs that are there.

    Raises:
        ConfigError: for a folder that holds no such study, or where they cannot be written.
    """
    folder = StudyFolder(out)
    folder.recorded()
    results.check_version(folder)
    runs = study.runs
    if study.seconds is not None:
        runs = of_equal_time(runs, study.seconds, folder.paces())
    return _written(study, runs, folder, "done")


class _Session:
    """The training of one session."""

    def __init__(
        self,
        study: Study,
        runs: Sequence[Run],
        folder: StudyFolder,
        workers: Workers,
        share: Share | None,
        display: Display,
    ) -> None:
        self.keep_models = study.keep_models
        self.began = time.time()
        self.folder = folder
        self.workers = workers
        self.share = share
        self.display = display
        timed = study.seconds is not None
        paces = folder.paces() if timed else {}
        states = {run.key: folder.state(run) for run in runs}
        self.standing = Standing(runs, [state.status for state in states.values() if state.ended], workers.count)
        todo = []
        for run in runs if share is None else share.order(runs):
            state = states[run.key]
            if state.ended or (timed and kind(run.recipe) not in paces):
                self.standing.skip(run.key)
                continue
            if state.vanished:
                path = folder.run(run).path
                display.warn(
                    f"{run.title}: it had ended, and what it left in {path} is gone or not whole; it is trained again"
                )
            if state.status == FAILED:
                display.note(f"{run.title}: it failed ({state.why}), and is tried again")
            todo.append(run)
        self.todo = deque(todo)
        self.elsewhere: list[Run] = []

    def train(self) -> bool:
        """Train all that can be; whether nothing is left to others."""
        told = False
        while self.todo or self.workers.busy or self.elsewhere:
            while self.todo and self.workers.busy < self.workers.count:
                run = self.todo.popleft()
                self.standing.begin(run.key)
                self.workers.give(Job(run, self.folder.path, self.began, self.keep_models))
            for job, said in self.workers.hear(_SECONDS_BETWEEN_LOOKS):
                self._hear(job.run, said)
            self.display.show(self.standing)
            if self.todo or self.workers.busy:
                continue
            if self.share is not None:
                break
            if self.elsewhere and not told:
                self.display.note(f"waiting for {len(self.elsewhere)} runs that another process is training")
                told = True
            self._look_elsewhere()
        return not self.elsewhere

    def _hear(self, run: Run, said: Any) -> None:
        if isinstance(said, Moved):
            self.standing.move(run.key, said)
        elif isinstance(said, Said):
            (self.display.warn if said.warning else self.display.note)(f"{run.title}: {said.message}")
        elif isinstance(said, Ended) and said.how == "taken":
            self.standing.under_way.pop(run.key, None)
            self.elsewhere.append(run)
        elif isinstance(said, Ended):
            if said.how == FAILED and self.folder.state(run).status == PENDING:
                # A worker that is gone could not write that down itself.
                self._note_failure(run, said.why)
            self.standing.end(run.key, said.how)
            self.display.ended(run, said, self.standing)

    def _note_failure(self, run: Run, why: str) -> None:
        try:
            self.folder.fail(run, why)
        except OSError as error:
            self.display.warn(f"that {run.title} failed cannot be written down: {one_line(error)}")

    def _look_elsewhere(self) -> None:
        """Take back what another process has let go of; what it has brought to an end is found so by the worker."""
        waiting = []
        for run in self.elsewhere:
            claim = self.folder.claimed(run)
            if claim.take():
                claim.release()
                self.todo.append(run)
            else:
                waiting.append(run)
        self.elsewhere = waiting
        if waiting and not self.todo:
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _timed(
    runs: Sequence[Run], seconds: float, folder: StudyFolder, workers: Workers, display: Display
) -> tuple[Run, ...]:
    """The runs with as many steps as take so long, steps being timed where that has not been done.

    A run of a kind that cannot be timed is noted as failed, and keeps the length that the grid gives it.
    """
    with folder.alone():
        paces = folder.paces()
        waiting = deque({kind(run.recipe): run for run in reversed(runs) if kind(run.recipe) not in paces}.values())
        if waiting:
            display.note(f"timing {len(waiting)} kinds of run")
        while waiting or workers.busy:
            while waiting and workers.busy < workers.count:
                workers.give(Pace(waiting.popleft(), _STEPS_TO_TIME))
            for pace, said in workers.hear(_SECONDS_BETWEEN_LOOKS):
                if said.seconds_per_step is None:
                    display.warn(f"{pace.run.title} cannot be timed: {said.why}")
                    for run in (each for each in runs if kind(each.recipe) == kind(pace.run.recipe)):
                        folder.fail(run, f"cannot be timed: {said.why}")
                    continue
                paces[kind(pace.run.recipe)] = said.seconds_per_step
                display.note(f"{pace.run.title}: {said.seconds_per_step:.3g} seconds a step")
        folder.keep_paces(paces)
    return of_equal_time(runs, seconds, paces)


def _written(study: Study, runs: Sequence[Run], folder: StudyFolder, status: str) -> Outcome:
    """Make the table and the report, alone, from what is on disk now.

    Raises:
        ConfigError: where they cannot be written.
    """
    with folder.alone():
        rows = results.collect(study, runs, folder)
        comparison = compare(study, runs, rows)
        metrics = {
            run.key: read_metrics(folder.run(run).metrics)
            for run, row in zip(runs, rows, strict=True)
            if row["status"] in (FINISHED, DIVERGED)
        }
        try:
            results.write(rows, folder)
            summary.write(comparison, rows, metrics, folder)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise ConfigError(
                f"the table and report of {folder.path} cannot be written: {error.strerror or error}{where}. The runs "
                "stay as they are; the same command goes on from them"
            ) from error
    return Outcome(status, folder, comparison, rows)


@contextmanager
def _said(display: Display) -> Iterator[None]:
    """Say what an interruption waits for."""
    try:
        yield
    except KeyboardInterrupt:
        display.note("interrupted; the runs under way are being saved")
        raise


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM, which schedulers send when time is up, be what Ctrl-C is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
