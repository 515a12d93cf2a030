"""From a trained model to one of another scheme that computes the same function, and can be trained on.

A Pre-Norm model becomes SiameseNorm (arXiv 2602.08064, post-pre) with Nx at 0 and Ny at weight 1 and eps 1: X adds
nothing yet, and with v the mean square of Y (RMSNorm) or its variance (LayerNorm) and e the eps of the model's own norm

    Nin(Ny(Y)) = Y / sqrt(v(1 + e) + e) · w        Nin(Y) = Y / sqrt(v + e) · w

differ by less than e/2, relatively, whatever the scale of Y and whatever the weights w are. From there training opens
Nx, whose weights have gradients at once as X itself is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch

from .. import hosts
from ..residual import ConfigError, Scheme, Site, make_scheme

__all__ = ["upcycle"]


def upcycle(model: Any, scheme: str | Scheme = "siamese", **options: Any) -> Any:
    """Put a scheme into a trained model, in place, such that it goes on computing the same function.

    Weights keep their names and values. (But where the schemes scale the output of the model's own norms differently,
    as ``lns`` does, those norms' weights make up for it.) What the scheme adds is trained from its first step on.

    Args:
        model: what :func:`siamesenorm.rewire` takes; or a model that is rewired already, by a scheme from which there
            is a way to the new one.
        scheme: a scheme's name, or a :class:`~siamesenorm.residual.Scheme`.
        **options: the scheme's options, but for those that decide its start (for SiameseNorm ``x_init``, ``y_init`` and
            ``y_eps``).

    Returns:
        ``model``. Its scheme, with the options that the start took, is in its config and saved with it.

    Raises:
        ConfigError: the model cannot be rewired, or no values of the scheme's parameters make it compute the same.
    """
    asked = make_scheme(scheme, **options)
    source = hosts.scheme_in(model)
    target = asked.upcycled(source, final_norm=hosts.ends_in_norm(model))
    _check_options(asked, target, options)
    if target.warmup_steps is not None:
        raise ConfigError(
            "option 'warmup_steps' closes the branches of a model for the start of its training, and those of a "
            "trained one are needed: leave it out"
        )
    if any(_rescaling(source, target, site) != 1 and not spec.affine for site, spec in hosts.input_norms(model)):
        raise ConfigError(
            f"scheme '{target.label}' scales the norms of a model otherwise than '{source.label}', and those of this "
            f"{type(model).__name__} have no weight that could make up for it"
        )
    if hosts.blocks(model):
        hosts.exchange(model, target)
    else:
        hosts.rewire(model, target)
    for block in hosts.blocks(model):
        _rescale(block, source, target)
    return model


def _check_options(asked: Scheme, target: Scheme, given: Iterable[str]) -> None:
    """Refuse options that the start decides otherwise."""
    for option in fields(asked):
        value, needed = getattr(asked, option.name), getattr(target, option.name)
        if value != needed and (option.name in given or value != option.default):
            raise ConfigError(
                f"option '{option.name}' of scheme '{asked.name}' is {needed!r} in a model that goes on computing the "
                f"same function, not {value!r}: leave it out"
            )


def _rescaling(source: Scheme, target: Scheme, site: Site) -> float:
    """What the host's own norm at a site has to be multiplied by."""
    return source.input_scale(site) / target.input_scale(site)


@torch.no_grad()
def _rescale(block: Any, source: Scheme, target: Scheme) -> None:
    for placed in block.sublayers:
        factor = _rescaling(source, target, getattr(block, placed.residual).site)
        for norm in (block.get_submodule(name) for name in placed.norms_before if factor != 1):
            norm.weight.add_(norm.offset).mul_(factor).sub_(norm.offset)
            if norm.bias is not None:
                norm.bias.mul_(factor)
