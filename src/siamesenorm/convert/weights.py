"""Arguments and weights of the official code, whatever kind of model they are for: checks, and other names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..hub import checks
from ..residual import ConfigError, nearest

__all__ = ["Names", "fill", "made", "official_names", "parameter_names", "refuse_unknown", "require"]

Names = dict[str, tuple[str, ...]]
"""Official names, each with those of a model of this package whose rows it joins, in order."""


def refuse_unknown(args: Mapping[str, Any], known: Iterable[str], what: str) -> None:
    """See that the official constructor of ``what`` has all these arguments."""
    known = set(known)
    for name in args:
        if name not in known:
            raise ConfigError(f"the official {what} has no argument '{name}': {nearest(str(name), known)}")


def require(args: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """See that each of these arguments has the value given here, or is absent."""
    for name, value in values.items():
        if name in args and args[name] != value:
            raise ConfigError(f"official argument {name}={args[name]!r} is not supported, only {value!r}")


def made(build: Callable[[], nn.Module], config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> nn.Module:
    """A new model to be filled, no larger than its weights account for; the caller's generator is left as it was.

    Args:
        build: makes it of ``config``.
        config: as for transformers or diffusers.
        state_dict: the official weights.

    Raises:
        ConfigError: the arguments ask for a model that is much larger.
    """
    held, where = checks.Weights({name: tuple(each.shape) for name, each in state_dict.items()}), "the official weights"
    checks.check_config(config, held, where)
    checks.check_size(build, held, where)
    with torch.random.fork_rng(devices=[]):
        return build()


def parameter_names(model: nn.Module, modules: Mapping[str, tuple[str, ...]]) -> Names:
    """Names of parameters, from names of modules; those that this ``model`` does not have are left out."""
    parameters = dict(model.named_parameters())
    names = {}
    for official, ours in modules.items():
        for suffix in ("weight", "bias"):
            joined = tuple(f"{name}.{suffix}" for name in ours)
            if all(name in parameters for name in joined):
                names[f"{official}.{suffix}"] = joined
    return names


def official_names(names: Names, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` of a model under their official names; what is not whole is left out."""
    named = {}
    for official, ours in names.items():
        parts = [tensors[name] for name in ours if name in tensors]
        if len(parts) == len(ours):
            named[official] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return named


def fill(model: nn.Module, names: Names, state_dict: Mapping[str, Tensor]) -> None:
    """Give all that ``model`` saves its official value, in the dtype of ``state_dict``, which shares no memory with it.

    Raises:
        ConfigError: weights that are missing, left over or of another shape, all of them listed.
    """
    saved = model.state_dict()
    missing = sorted(names.keys() - state_dict.keys())
    unused = sorted(state_dict.keys() - names.keys())
    weights: dict[str, Tensor] = {}
    shapes = []
    for official, ours in names.items():
        if official in missing:
            continue
        tensor = state_dict[official]
        if not tensor.is_floating_point():
            raise ConfigError(f"the official weight {official} has the dtype {tensor.dtype}, which is none of weights")
        rows = [saved[name].shape[0] for name in ours]
        expected = (sum(rows), *saved[ours[0]].shape[1:])
        if tuple(tensor.shape) != expected:
            shapes.append(f"{official} is {tuple(tensor.shape)}, expected {expected}")
            continue
        parts = tensor.detach().split(rows)
        weights |= {name: part.clone() for name, part in zip(ours, parts, strict=True)}
    trouble = [
        f"{what}: {', '.join(found)}"
        for what, found in (("missing", missing), ("not used", unused), ("of another shape", shapes))
        if found
    ]
    if trouble:
        raise ConfigError("the official weights do not fit these arguments; " + "; ".join(trouble))
    model.load_state_dict(weights, strict=False, assign=True)
