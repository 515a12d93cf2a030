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


def task_of(recipe: Recipe) -> Task[Any, Any]:
    """The task of a recipe."""
    module, name = _HOME[recipe.task]
    made: Task[Any, Any] = getattr(importlib.import_module(f"{__name__}.{module}"), name)(recipe)
    return made
