"""A run's folder on disk: what is in it, whether it may be used, and writing to it without losing anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from siamesenorm.data.files import finite, write_whole
from siamesenorm.data.folders import lock
from siamesenorm.residual import ConfigError
from siamesenorm.training.recipe import Recipe, flatten, from_mapping
from siamesenorm.training.recipe_files import dump, read

_LOCK = ".lock"
_MISSING = object()


class RunFolder:
    """The folder of one run: ``config.yaml``, ``metrics.jsonl``, ``summary.json``, ``checkpoints/`` and ``model/``.

    With ``train.probe_every``, ``probes.parquet`` too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.form = self.checkpoints / "form"
        self.origin = self.checkpoints / "origin.json"
        self.model = path / "model"
        self.loss_plot = path / "loss.png"
        self.probes = path / "probes.parquet"

    def recipe(self) -> Recipe:
        """The recipe of the run that is here.

        Raises:
            ConfigError: where there is none or it cannot be read.
        """
        if not self.config.is_file():
            raise ConfigError(f"{self.path} holds no run: there is no {self.config.name} in it")
        return from_mapping(read(self.config))

    def write_origin(self, recipe: Recipe) -> None:
        """Write down whether the model that a run starts from is a folder here, while it is known."""
        origin = recipe.model.pretrained
        if origin is not None and not self.origin.exists():
            local = Path(origin).expanduser().exists()
            write_whole(self.origin, json.dumps({"pretrained_is_a_folder": local}) + "\n")

    def starts_from_a_folder(self) -> bool:
        """What `write_origin` wrote; a run that did not is taken to start from one."""
        try:
            return json.loads(self.origin.read_text())["pretrained_is_a_folder"] is not False
        except (OSError, ValueError, LookupError, TypeError):
            return True

    def claim(self, recipe: Recipe) -> bool:
        """Make the folder a run of `recipe`, or make sure that it is one; whether it was made one now.

        Nothing on disk changes unless the folder is new or empty.

        Raises:
            ConfigError: where the folder holds another run or anything else.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; --out needs a folder")
        if self.config.exists():
            self._require_equal(recipe)
            return False
        if self.path.is_dir() and any(entry.name != _LOCK for entry in self.path.iterdir()):
            raise ConfigError(f"{self.path} is not empty and holds no run; choose another --out")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.config, dump(recipe))
        except OSError as error:
            raise ConfigError(f"cannot make the run folder {self.path}: {error.strerror or error}") from error
        return True

    def release(self) -> None:
        """Take back a claim; a folder with anything else in it is left as it is, for it may be taken up again."""
        if any(entry.name not in (self.config.name, _LOCK) for entry in self.path.iterdir()):
            return
        for name in (self.config, self.path / _LOCK):
            name.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in this folder meanwhile.

        Raises:
            ConfigError: where another one does.
        """
        with (self.path / _LOCK).open("w") as file:
            if not lock(file, wait=False):
                raise ConfigError(f"another process is training in {self.path}")
            yield

    def read_summary(self) -> dict[str, Any] | None:
        """The summary of a run that has ended, well or not; None where there is none."""
        try:
            summary = json.loads(self.summary.read_text())
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) else None

    def finished_summary(self) -> dict[str, Any] | None:
        """The summary of a run that has ended well; None where it has not, or diverged and may be taken up again."""
        summary = self.read_summary()
        return None if summary is None or summary.get("diverged") else summary

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json`` in one piece, numbers that are not finite as null."""
        write_whole(self.summary, json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")

    def _require_equal(self, recipe: Recipe) -> None:
        here, wanted = flatten(self.recipe()), flatten(recipe)
        differing = [
            f"  {key}: {_show(here.get(key, _MISSING))} there, {_show(wanted.get(key, _MISSING))} asked for"
            for key in dict.fromkeys([*here, *wanted])
            if here.get(key, _MISSING) != wanted.get(key, _MISSING)
        ]
        if differing:
            raise ConfigError(
                "\n".join([f"{self.path} holds another run; choose another --out. What differs:", *differing])
            )


def model_folder(path: Path) -> Path:
    """The saved model in a folder: the folder itself, or what a finished run has in it.

    Raises:
        ConfigError: for a run that has not finished.
    """
    run = RunFolder(path)
    if not run.config.is_file():
        return path
    if not run.model.is_dir():
        raise ConfigError(
            f"the run in {path} has not finished: it has no {run.model.name}/ yet; 'siamesenorm export' makes a model "
            "of its last checkpoint"
        )
    return run.model


class MetricsFile:
    """``metrics.jsonl``: one line of JSON per step, appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def open_after(self, step: int) -> None:
        """Open for what follows `step`; lines of later steps, and a last one cut short by a crash, are taken out."""
        self.close()
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a line; it may wait in memory until `flush`."""
        assert self._file is not None, "open_after comes first"
        self._file.write(json.dumps(finite(line), allow_nan=False) + "\n")

    def flush(self) -> None:
        """Hand what was added to the operating system."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; none where there is no file."""
    lines = []
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            parsed = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict) and isinstance(parsed.get("step"), int):
            lines.append(parsed)
    return lines


def _show(value: Any) -> str:
    return "nothing" if value is _MISSING else repr(value)
