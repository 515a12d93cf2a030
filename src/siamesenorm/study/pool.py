"""The workers of one machine, and what they say."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from siamesenorm.study.worker import Ended, Job, Pace, work

__all__ = ["Start", "Workers"]

Start = Literal["spawn", "fork"]
_SECONDS_TO_SAVE = 120


@dataclass
class _Worker:
    process: Any
    connection: Connection
    job: Job | Pace | None = None


class Workers:
    """So many processes that train runs, each of them started when it is first needed.

    Args:
        count: of processes.
        threads: for each.
        start: how they are started; ``fork`` is for a caller whose process has started no threads and no GPU.
    """

    def __init__(self, count: int, threads: int, start: Start = "spawn") -> None:
        self.count = count
        self.threads = threads
        self._context: Any = multiprocessing.get_context(start)
        self._workers: list[_Worker | None] = [None] * count

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    @property
    def busy(self) -> int:
        """How many are at work."""
        return sum(worker is not None and worker.job is not None for worker in self._workers)

    def give(self, job: Job | Pace) -> None:
        """Let one that is free do a job; there must be one."""
        number = next(number for number, worker in enumerate(self._workers) if worker is None or worker.job is None)
        worker = self._workers[number] or self._started(number)
        self._workers[number] = worker
        worker.job = job
        # One that has died meanwhile is heard of where all others are.
        with suppress(BrokenPipeError):
            worker.connection.send(job)

    def hear(self, seconds: float) -> Iterator[tuple[Any, Any]]:
        """What has been said, waiting for so many seconds at most; `Ended` is the last of each job."""
        busy = {worker.connection: worker for worker in self._workers if worker is not None and worker.job is not None}
        for ready in wait(list(busy), timeout=seconds):
            assert isinstance(ready, Connection)
            worker = busy[ready]
            job = worker.job
            try:
                said = ready.recv()
            except (EOFError, OSError):
                said = Ended("failed", self._lost(worker))
            if isinstance(said, Ended):
                worker.job = None
            yield job, said

    def interrupt(self) -> None:
        """Ask all that are at work to save and stop."""
        for worker in self._workers:
            if worker is not None and worker.job is not None and worker.process.is_alive():
                worker.process.terminate()

    def _started(self, number: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(theirs, self.threads, number), name=f"worker {number}")
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _lost(self, worker: _Worker) -> str:
        """Forget a worker that has died; how it did, in words."""
        self._workers[self._workers.index(worker)] = None
        worker.connection.close()
        worker.process.join()
        code = worker.process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = ", which is what a system does that runs out of memory" if name == "SIGKILL" else ""
            return f"its process was ended by {name}{hint}"
        return f"its process ended with exit code {code}"

    def _stop(self) -> None:
        """End all workers: the idle ones at once, the others once they have saved."""
        there = [worker for worker in self._workers if worker is not None]
        self.interrupt()
        for worker in there:
            with suppress(BrokenPipeError):
                worker.connection.send(None)
        deadline = time.monotonic() + _SECONDS_TO_SAVE
        for worker in there:
            worker.process.join(max(deadline - time.monotonic(), 0))
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
