"""Studies of the tiny recipe, whose workers are forked so that they see what a test has put in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from siamesenorm.data import arrays
from siamesenorm.study import run_study, summary
from siamesenorm.study.grid import Study, load_study
from siamesenorm.training import engine, memory, run
from tests.training.conftest import _one_thread, tiny
from tests.training.tiny import small_corpus, write_recipe

# Imported here, so that forked workers need not.
__all__ = ["_one_thread", "engine", "tiny"]

# Of a run that takes under a second: no checkpoint but the last, and no text.
QUICK = {
    "train.validate_every": 100,
    "train.checkpoint_every": 100,
    "sample.tokens": 0,
    "model.config.attention_dropout": 0.0,
}
AXES = {"schemes": ["pre", "siamese:x=hybrid"], "seeds": [0, 1]}


def study_in(folder: Path, *words: str, **fields: Any) -> Study:
    """A study over the tiny recipe in a folder, with other axes, and with words as a command has them."""
    tree = {"recipe": "tiny.yaml", "axes": AXES, "set": QUICK, **fields}
    (folder / "small.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return load_study(str(folder / "small.yaml"), words)


PAPER = [
    {"caption": "Perplexity", "columns": ["model", "figure"], "rows": [["large", 10.5]]},
    {
        "caption": "Another table",
        "columns": ["scheme", "figure"],
        "rows": [["pre", 11.0], ["siamese:x=hybrid", 10.0], ["post", "diverges"]],
        "match": "schemes",
    },
]


@pytest.fixture(scope="session")
def done(tmp_path_factory) -> Any:
    """The outcome of a study, with its report: two schemes at two learning rates, at one of which all runs diverge."""
    folder = tmp_path_factory.mktemp("study")
    write_recipe(folder)
    root, prepare = small_corpus(folder), arrays.prepare
    study = study_in(
        folder,
        axes={"schemes": ["pre", "siamese:x=hybrid"], "lrs": [1e-2, 1e30], "seeds": [0, 1]},
        best_over="lrs",
        title="Which?",
        about="Two rates.",
        paper=PAPER,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(arrays, "prepare", lambda source: prepare(source, cache=folder / "cache", root=root))
        return run_study(study, folder / "out", jobs=2, start="fork")


@pytest.fixture
def make(tiny, tmp_path) -> Callable[..., Study]:
    """Makes a study whose runs read the small corpus."""
    del tiny  # for that, and for the recipe file
    return partial(study_in, tmp_path)


class Watcher:
    """A display that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.over: list[tuple[str, str, str]] = []
        self.shares: list[float] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def show(self, standing) -> None:
        self.shares.append(standing.share)

    def ended(self, run, ended, standing) -> None:
        self.over.append((run.title, ended.how, ended.why))

    def end(self) -> None:
        pass


@pytest.fixture
def go(tmp_path, monkeypatch) -> Callable[..., Any]:
    """Runs a study; what happened is in the outcome's ``watcher``. Without what takes longer than such runs do."""
    monkeypatch.setattr(summary, "write", lambda *arguments: None)
    monkeypatch.setattr(run, "loss_curve", lambda *arguments: None)
    monkeypatch.setattr(memory, "training_memory", lambda model, recipe: SimpleNamespace(total=1))

    def go(study: Study, *, out: str = "out", **arguments: Any) -> Any:
        watcher = Watcher()
        outcome = run_study(study, tmp_path / out, display=watcher, start="fork", **arguments)
        object.__setattr__(outcome, "watcher", watcher)
        return outcome

    return go
