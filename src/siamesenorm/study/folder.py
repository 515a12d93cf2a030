"""A study's folder on disk, which any number of processes may work in at once.

study.yaml                  what was asked for last
data.json                   the data as the first session found it, which all runs must have
pace.json                   seconds a step, by kind of run, where runs are to take equally long
runs/<run>/                 a run's own folder, as `siamesenorm train` makes it
state/<run>.json            how the run ended, and what it cost
state/<run>.log             what it printed
state/<run>.lock            held by the process that trains it
results.parquet results.csv summary.md report.html figures/
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import yaml

from siamesenorm.data import folders
from siamesenorm.data.files import write_whole
from siamesenorm.residual import ConfigError
from siamesenorm.study.grid import Run, Study, study_from, to_mapping
from siamesenorm.study.verdict import over_steps, verdict
from siamesenorm.training.processes import ALONE
from siamesenorm.training.recipe import Recipe, from_mapping
from siamesenorm.training.recipe import to_mapping as recipe_mapping
from siamesenorm.training.recipe_files import read
from siamesenorm.training.run_folder import RunFolder, read_metrics
from siamesenorm.training.tasks import task_of

__all__ = ["Claim", "State", "StudyFolder"]

_LOCK = ".study.lock"
FAILED, FINISHED, DIVERGED, PENDING = "failed", "finished", "diverged", "pending"


@dataclass(frozen=True)
class State:
    """How a run stands.

    Attributes:
        status: ``finished``, ``diverged``, ``failed`` or ``pending``.
        why: it diverged or failed, in words.
        summary: what its ``summary.json`` holds, where it ended.
        over_steps: as `siamesenorm.study.verdict.over_steps` gives it.
        memory: bytes that the tensors of a step take at most.
        vanished: it had ended, and its folder, or what every such run leaves in it, is gone.
        failed_at: when it failed, in seconds since 1970.
    """

    status: str
    why: str | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    over_steps: Mapping[str, Any] = field(default_factory=dict)
    memory: int | None = None
    vanished: bool = False
    failed_at: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to train."""
        return self.status in (FINISHED, DIVERGED)


class StudyFolder:
    """The folder of a study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study = path / "study.yaml"
        self.data = path / "data.json"
        self.pace = path / "pace.json"
        self.runs = path / "runs"
        self.states = path / "state"
        self.figures = path / "figures"
        self.parquet = path / "results.parquet"
        self.csv = path / "results.csv"
        self.summary = path / "summary.md"
        self.report = path / "report.html"

    @contextmanager
    def claim(self, study: Study) -> Iterator[None]:
        """Make the folder that of ``study``, unless what is done meanwhile raises; others wait.

        The same study with another grid is welcome: runs that both have are not trained again. What is not accepted
        leaves the folder as it was.

        Raises:
            ConfigError: where the folder holds another study or anything else, or cannot be written to.
        """
        # The lock is the first thing in a new folder, so what has one is a study's, however far it has come.
        folders.check(self.path, (self.study.name, _LOCK), "study")
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        accepted = False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.alone():
                is_new = not self.study.is_file()
                if not is_new and (other := self.recorded().name) != study.name:
                    raise ConfigError(
                        f"{self.path} holds the study '{other}', not '{study.name}'; choose another --out"
                    )
                yield
                for folder in (self.runs, self.states):
                    folder.mkdir(exist_ok=True)
                write_whole(self.study, yaml.safe_dump(to_mapping(study), sort_keys=False, allow_unicode=True))
                accepted = True
        except OSError as error:
            raise ConfigError(f"cannot make the study's folder {self.path}: {error.strerror or error}") from error
        finally:
            if not accepted and not self.study.is_file():
                for file in (self.data, self.path / _LOCK):
                    with suppress(OSError):
                        file.unlink()
                for folder in (self.runs, self.states, *made):
                    with suppress(OSError):
                        folder.rmdir()

    def recorded(self) -> Study:
        """The study that is here.

        Raises:
            ConfigError: where there is none or it cannot be read.
        """
        if not self.study.is_file():
            raise ConfigError(f"{self.path} holds no study: there is no {self.study.name} in it")
        return study_from(read(self.study, "study"))

    def run(self, run: Run) -> RunFolder:
        """The folder of a run."""
        return RunFolder(self.runs / run.key)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process is in here."""
        with (self.path / _LOCK).open("w") as file:
            folders.lock(file, wait=True)
            yield

    def pin(self, runs: Sequence[Run]) -> None:
        """Keep the place and fingerprint of the data of runs, unless an earlier session has; within a `claim`.

        Where that was lost, the fingerprint is that of a run that was trained.

        Raises:
            ConfigError: where the data cannot be had, or is no longer what it was.
        """
        known = _whole(self.data)
        for run in {run.data: run for run in runs}.values():
            if run.data in known:
                continue
            trained = (self.run(other) for other in runs if other.data == run.data)
            recipe = next((there.recipe() for there in trained if there.config.is_file()), run.recipe)
            task = task_of(recipe)
            data = task.load(ALONE)
            pinned = recipe_mapping(task.pinned(data))["data"]
            known[run.data] = {"data": pinned, "blind_loss": task.blind_loss(data)}
            write_whole(self.data, json.dumps(known, indent=2) + "\n")

    def pinned(self, run: Run) -> Recipe:
        """A run's recipe, asking for data with the fingerprint that was kept."""
        return from_mapping({**recipe_mapping(run.recipe), "data": _whole(self.data)[run.data]["data"]})

    def blind_loss(self, run: Run) -> float | None:
        """As `Task.blind_loss` of a run's data, once that is known."""
        found: float | None = _whole(self.data).get(run.data, {}).get("blind_loss")
        return found

    def paces(self) -> dict[str, float]:
        """Seconds a step, by kind of run, as they were measured."""
        return _read(self.pace)

    def keep_paces(self, paces: Mapping[str, float]) -> None:
        """Write down how long steps take, so that a later session gives each run the same number."""
        write_whole(self.pace, json.dumps(dict(paces), indent=2) + "\n")

    def state(self, run: Run) -> State:
        """How a run stands, by what is on disk."""
        record, summary = _read(self._record(run)), self.run(run).read_summary()
        if record.get("status") == FAILED:
            return State(FAILED, record.get("why"), failed_at=record.get("at", 0.0))
        ended = record.get("status") in (FINISHED, DIVERGED) and {"why", "over_steps", "memory"} <= record.keys()
        if summary is None or not ended or not self._has_all(run, record):
            return State(PENDING, vanished=ended)
        return State(record["status"], record["why"], summary, record["over_steps"], record["memory"])

    def _has_all(self, run: Run, record: Mapping[str, Any]) -> bool:
        """Whether the table, the figures and other commands find what they read of a run that has ended."""
        folder = self.run(run)
        return (
            folder.config.is_file()
            # One that diverged in its first step has no figures.
            and (record["status"] == DIVERGED or folder.metrics.is_file())
            and (folder.model.is_dir() or not record.get("model"))
        )

    def end(self, run: Run, memory: int, *, keep_model: bool = True) -> State:
        """Write down how a run that has a summary ended, and remove what it would have been resumed from."""
        folder = self.run(run)
        summary = folder.read_summary() or {}
        figures = over_steps(read_metrics(folder.metrics))
        why = verdict(summary, figures["loss_lost"])
        state = State(FINISHED if why is None else DIVERGED, why, summary, figures, memory)
        record = {"status": state.status, "why": why, "over_steps": figures, "memory": memory}
        record["model"] = keep_model and folder.model.is_dir()
        write_whole(self._record(run), json.dumps(record) + "\n")
        for path in (folder.checkpoints, *(() if keep_model else (folder.model,))):
            shutil.rmtree(path, ignore_errors=True)
        return state

    def log(self, run: Run) -> Path:
        """What a run printed beside its figures."""
        return self.states / f"{run.key}.log"

    def fail(self, run: Run, why: str) -> None:
        """Write down that a run failed; the next session tries it again."""
        write_whole(self._record(run), json.dumps({"status": FAILED, "why": why, "at": time.time()}) + "\n")

    def claimed(self, run: Run) -> Claim:
        """A claim on a run, for one process at a time."""
        return Claim(self.states / f"{run.key}.lock")

    def _record(self, run: Run) -> Path:
        return self.states / f"{run.key}.json"


class Claim:
    """A lock on a run, which the operating system takes back from a process that dies, however it dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def take(self) -> bool:
        """Take the lock if nobody has it; whether it was taken."""
        file = self.path.open("w")
        if folders.lock(file, wait=False):
            self._file = file
            return True
        file.close()
        return False

    def release(self) -> None:
        """Give the lock back."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file, an empty one where there is none, or none that can be read as one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _whole(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file, an empty one where there is none.

    Raises:
        ConfigError: for a file that holds anything else.
    """
    if found := _read(path):
        return found
    if path.is_file():
        raise ConfigError(f"{path} cannot be read; move it away, and what it held is made again")
    return {}
