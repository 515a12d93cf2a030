"""From a recipe to a model, and the checks that can be made before anything is trained or written."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from siamesenorm import hosts
from siamesenorm.residual import ConfigError, own_parameters
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.settings import scheme_of
from siamesenorm.training.tasks import task_of


def build_model(recipe: Recipe, *, needs_data: bool = True) -> Any:
    """The recipe's model on torch's current default device; as `Task.build`."""
    return task_of(recipe).build(needs_data=needs_data)


def empty_model(recipe: Recipe, *, needs_data: bool = True) -> Any:
    """The recipe's model on the meta device: the class and configuration of `build_model`'s, without weights."""
    with torch.device("meta"):
        return build_model(recipe, needs_data=needs_data)


def check(recipe: Recipe, *, needs_data: bool = True) -> Any:
    """Refuse a recipe that could not be trained; what comes back is its model on the meta device, without weights.

    Args:
        recipe: what to check.
        needs_data: as in `Task.build`.

    Raises:
        ConfigError: naming what does not fit together.
    """
    model = empty_model(recipe, needs_data=needs_data)
    if not hosts.blocks(model):
        raise ConfigError("the model has no blocks; give it at least one")
    _check_schedule(recipe, model)
    task_of(recipe).check(model, needs_data=needs_data)
    return model


def _check_schedule(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a schedule for parts that a scheme has none of."""
    scheme, schedule = scheme_of(recipe), recipe.schedule
    if schedule.own_steps and not own_parameters(model):
        raise ConfigError(
            f"schedule.own_steps trains at first what scheme '{scheme.name}' has added, and it adds nothing"
        )
    if schedule.open_steps and not any(scheme.opening(name) for name, _ in model.named_parameters()):
        raise ConfigError(
            f"schedule.open_steps opens what a scheme starts closed, and nothing of '{scheme.label}' is closed"
        )


def parameter_counts(model: Any) -> tuple[int, int]:
    """Parameters in total, and without the tables that turn tokens into vectors and back."""
    total = sum(parameter.numel() for parameter in model.parameters())
    ends = (getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings"))
    tables = {id(end.weight): end.weight.numel() for end in ends if isinstance(end, nn.Embedding | nn.Linear)}
    return total, total - sum(tables.values())


def checkpoint_activations(model: Any) -> None:
    """Keep each block's input alone for the backward pass, which runs the block once more."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.enable_gradient_checkpointing()


def tie_weights(model: Any) -> None:
    """Let parameters that are one be one again, after their memory has been replaced."""
    if hasattr(model, "tie_weights"):
        model.tie_weights()
