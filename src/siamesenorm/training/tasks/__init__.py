"""What a run can learn: `base.py` says what a task is, and each other file is one."""

from __future__ import annotations

import importlib
from typing import Any

from siamesenorm.training.recipe import CAUSAL_LM, CLASSIFICATION, DIFFUSION, Recipe
from siamesenorm.training.tasks.base import Batch, Batches, Evaluation, Objective, Task

__all__ = ["Batch", "Batches", "Evaluation", "Objective", "Task", "task_of"]

# Imported on use: each brings libraries that the others do without.
_HOME = {
    CAUSAL_LM: ("text", "CausalLM"),
    CLASSIFICATION: ("classification", "Classification"),
    DIFFUSION: ("diffusion", "Diffusion"),
}
# No field of a recipe: it is neither compared nor copied nor written down.
_TASK = "_task"


def task_of(recipe: Recipe) -> Task[Any, Any]:
    """The task of a recipe: the same one each time it is asked of the same object.

    So what a task has looked at for one question is there for the next.
    """
    kept = vars(recipe)
    if _TASK not in kept:
        module, name = _HOME[recipe.task]
        kept[_TASK] = getattr(importlib.import_module(f"{__name__}.{module}"), name)(recipe)
    made: Task[Any, Any] = kept[_TASK]
    return made
