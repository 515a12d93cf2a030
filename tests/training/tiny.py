"""A recipe that trains in a second, on a corpus that is passed through several times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from siamesenorm.data import arrays, corpus
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.recipe_files import load

TREE = {
    "name": "tiny",
    "model": {
        "host": "llama",
        "scheme": "siamese",
        "options": {"x": "hybrid"},
        "config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32,
            # So that a resumed run has generators to get right.
            "attention_dropout": 0.2,
        },
    },
    "data": {"sequence_length": 16, "validation_sequences": 4},
    "optim": {"lr": 1e-2},
    "schedule": {"warmup_steps": 2},
    "train": {"steps": 7, "batch_size": 4, "validate_every": 3, "checkpoint_every": 2, "log_every": 2, "device": "cpu"},
    "sample": {"prompt": "ab", "tokens": 8},
}


def write_recipe(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TREE))
    return path


def small_corpus(folder: Path) -> Path:
    """260 tokens to train on, which are an epoch of 4 steps for the tiny recipe, and 82 held out."""
    root = folder / "corpus"
    root.mkdir()
    for index in range(12):
        name = f"file{index}.py"
        length = 40 if corpus.Document(name, b"").held_out else 25
        (root / name).write_bytes(bytes((index * 7 + step * step) % 256 for step in range(length)))
    return root


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """Makes the tiny recipe with overrides; runs in this test read the small corpus."""
    path, root, prepare = write_recipe(tmp_path), small_corpus(tmp_path), arrays.prepare
    monkeypatch.setattr(
        arrays, "prepare", lambda source="python-stdlib": prepare(source, cache=tmp_path / "cache", root=root)
    )
    return lambda *overrides: load(str(path), overrides)


class Watcher:
    """A display that remembers, and that can do something at a step."""

    def __init__(self, at: int | None = None, act: Callable[[], None] | None = None) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.steps: list[int] = []
        self.begun: list[int] = []
        self.at, self.act = at, act

    def note(self, message: str) -> None:
        self.notes.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def begin(self, done: int, total: int) -> None:
        self.begun.append(done)

    def step(self, step) -> None:
        self.steps.append(step.step)
        if step.step == self.at and self.act is not None:
            self.act()

    def end(self) -> None:
        pass
