"""What a recipe says of scheme, precision and device, as torch and the residual package put it."""

from __future__ import annotations

import torch

from siamesenorm.residual import ConfigError, Scheme, make_scheme
from siamesenorm.training.processes import local_device
from siamesenorm.training.recipe import Recipe


def scheme_of(recipe: Recipe) -> Scheme:
    """The residual scheme that a recipe names, with its options checked."""
    return make_scheme(recipe.model.scheme, **recipe.model.options)


def autocast_of(recipe: Recipe) -> torch.dtype | None:
    """What branches compute in where it is not float32."""
    return torch.bfloat16 if recipe.train.precision == "bfloat16" else None


def best_device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def autocasting(kind: str, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to a dtype on a kind of device, or where it is ``None`` none, also inside of another."""
    return torch.autocast(kind, dtype=dtype, enabled=dtype is not None)


def device_of(recipe: Recipe) -> torch.device:
    """Where the recipe trains.

    Raises:
        ConfigError: where it names a device that is not there.
    """
    name = recipe.train.device
    if name == "auto":
        name = best_device().type
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device is cuda and this machine has no CUDA device; use train.device=cpu")
    return local_device(name)
