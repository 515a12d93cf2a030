"""Trains for two steps in a process of its own, and prints by how many bytes that process grew at most.

``python -m tests.training.measured FOLDER RECIPE [KEY=VALUE]...``, or under torchrun; only Linux tells.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from siamesenorm.cli import leave
from siamesenorm.training.build import build_model
from siamesenorm.training.processes import speaks
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.recipe_files import load
from siamesenorm.training.run import train
from tests.training.tiny import Watcher

SELF = Path("/proc/self")
WARM = ["model.config.hidden_size=64", "model.config.intermediate_size=64"]


def resident(what: str) -> int:
    """Bytes in memory: ``VmRSS`` are those now, ``VmHWM`` the most since `forget`."""
    line = next(line for line in (SELF / "status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def forget() -> None:
    (SELF / "clear_refs").write_text("5")


def warm_up(recipe: Recipe) -> None:
    """A step of a small model, so that libraries have taken what they take when they are first used."""
    import siamesenorm.training.engine  # noqa: F401

    model = build_model(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros((2, 64), dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.precision == "bfloat16"):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()


def main(folder: str, recipe: str, *overrides: str) -> None:
    torch.set_num_threads(1)
    warm_up(load(recipe, [*overrides, *WARM]))
    forget()
    before = resident("VmRSS")
    most: list[int] = []
    # Of the second step, since the optimiser's state is made in the first; a checkpoint comes after it.
    watcher = Watcher(at=2, act=lambda: most.append(resident("VmHWM")))
    train(load(recipe, overrides), Path(folder, "run"), watcher)
    if speaks():
        print("grew by", most[0] - before)
    leave(SystemExit(0))


if __name__ == "__main__":
    main(*sys.argv[1:])
