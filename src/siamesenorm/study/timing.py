"""How long steps take: for runs of equal time, and for the time that a study will take."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from siamesenorm.residual import ConfigError
from siamesenorm.study.grid import Run
from siamesenorm.training.build import build_model
from siamesenorm.training.cost import flops_per_token
from siamesenorm.training.parallel import micro_batch_size
from siamesenorm.training.recipe import Recipe, to_mapping
from siamesenorm.training.settings import autocast_of, autocasting, device_of
from siamesenorm.training.tasks import task_of

__all__ = ["kind", "of_equal_time", "trial"]

# A trial of more is left out: no laptop should be kept busy with what was only meant to be listed.
_MOST_OPERATIONS = 2e12


def kind(recipe: Recipe) -> str:
    """What decides how long a step takes, as a digest: model, data and batch, and neither seed nor rates nor length."""
    tree = to_mapping(recipe)
    for key in ("steps", "validate_every", "checkpoint_every", "keep_checkpoints", "log_every"):
        del tree["train"][key]
    parts = {key: tree[key] for key in ("task", "model", "data", "train")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def of_equal_time(runs: Sequence[Run], seconds: float, paces: Mapping[str, float]) -> tuple[Run, ...]:
    """Runs with as many steps as take so many seconds, the warm-up keeping its share.

    Args:
        runs: as the grid gives them.
        seconds: of training.
        paces: seconds a step, by the `kind` of recipe; a run of another kind stays as it is.

    Raises:
        ConfigError: where two runs become the same one, as two warm-ups can in few steps.
    """
    found: dict[str, Run] = {}
    for run in runs:
        pace = paces.get(kind(run.recipe))
        made = run if pace is None else replace(run, recipe=_of_steps(run.recipe, seconds / pace))
        if made.key in found:
            raise ConfigError(
                f"in {seconds:g} seconds, which are {made.recipe.train.steps} steps, '{made.title}' and "
                f"'{found[made.key].title}' are the same run: give more seconds, or leave one out"
            )
        found[made.key] = made
    return tuple(found.values())


def _of_steps(recipe: Recipe, wanted: float) -> Recipe:
    steps = max(round(wanted), 1)
    schedule = recipe.schedule.scaled(steps, of=recipe.train.steps)
    return replace(recipe, train=replace(recipe.train, steps=steps), schedule=schedule)


def trial(recipe: Recipe, model: object) -> float | None:
    """About how many seconds a step of a recipe takes here: those of a forward and backward pass without data, twice.

    Args:
        recipe: what would be trained.
        model: the recipe's on the meta device, from which it is told whether trying takes too long; ``None`` then.
    """
    task, device = task_of(recipe), device_of(recipe)
    rows = micro_batch_size(recipe, 1)
    inputs, tokens = task.example(model, rows, device.type)
    length = getattr(recipe.data, "sequence_length", None)
    if flops_per_token(model, length).training * tokens * rows > _MOST_OPERATIONS:
        return None
    made = build_model(recipe, needs_data=False).to(device).train()
    for _ in range(2):
        started = time.perf_counter()
        with autocasting(device.type, autocast_of(recipe)):
            loss = task.example_loss(made, inputs)
        loss.backward()
        loss.item()
        seconds = time.perf_counter() - started
    return seconds * (recipe.train.batch_size // rows)
