"""Models of the official code (arXiv 2602.08064), as models of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..residual import ConfigError, nearest
from . import official_deit, official_dit, official_lm

__all__ = ["check_kind", "load_official", "official_names", "training_arguments"]

_KINDS = {"lm": official_lm, "deit": official_deit, "dit": official_dit}


def load_official(state_dict: Mapping[str, Tensor], kind: str, args: Mapping[str, Any]) -> nn.Module:
    """The official model with these weights, computing the same function.

    Args:
        state_dict: the official model's own ``state_dict()``; no file is read here.
        kind: ``"lm"``, a language model;
            ``"deit"``, an image classifier, distilled or not; ``"dit"``, a diffusion model of images.
        args: the official constructor's arguments.

    Returns:
        A model of transformers or, for ``"dit"``, of diffusers, in evaluation mode and in the state dict's dtype; it
        saves and loads as any other.

    Raises:
        ConfigError: unknown kind or argument, an argument whose effect is not supported, or weights that are missing,
            left over or of another shape, all of them listed.
    """
    return _module(kind).load(state_dict, args)


def official_names(model: nn.Module, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that belong to the parameters of a model from :func:`load_official`, under their official names.

    What the official code keeps in one matrix is joined again, so gradients can be compared with the official ones.

    Args:
        model: the model.
        kind: as it was given to :func:`load_official`.
        tensors: by parameter name of ``model``: its ``state_dict()``, or gradients.
    """
    return _module(kind).official_names(model, tensors)


def training_arguments(kind: str, given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The official constructor's arguments, from those of the training script; ``None`` where they do not tell.

    Args:
        kind: as it is given to :func:`load_official`.
        given: what the script was started with, as it keeps it in its checkpoints.
    """
    module = _module(kind)
    return module.training_arguments(given) if hasattr(module, "training_arguments") else None


def check_kind(kind: str) -> None:
    """Refuse a kind of official model that there is none of.

    Raises:
        ConfigError: naming the nearest.
    """
    if kind not in _KINDS:
        raise ConfigError(f"unknown kind of official model '{kind}': {nearest(str(kind), _KINDS)}")


def _module(kind: str) -> Any:
    check_kind(kind)
    return _KINDS[kind]
