"""Putting a scheme into a model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from ..hub.autoload import register_models
from ..residual import ConfigError, Norm, NormSpec, RMSNorm, Scheme, make_scheme, nearest, stack_sites
from .attention import NORM_NAMES
from .block import FinalLayerNorm, FinalRMSNorm, Placed, ResidualBlock, Tap
from .classes import ResidualModel, residual_class, swap_class
from .configs import scheme_of, scheme_to_dict
from .families import Host, find_host, get_host, host_of

__all__ = ["blocks", "build", "install", "model_config", "rewire", "site_table"]

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


def rewire(model: Any, scheme: str | Scheme = "siamese", *, init: bool = False, **options: Any) -> Any:
    """Put a residual scheme into a transformers model, in place.

    Weights that exist keep their names and values; the scheme's own are added at their initial values. A host norm that
    the scheme has no place for is removed, and a trained one is named in a warning.

    Args:
        model: a model of a supported family (:func:`siamesenorm.hosts.hosts`), with or without a head.
        scheme: a scheme's name (:func:`siamesenorm.schemes`), or a :class:`~siamesenorm.residual.Scheme`.
        init: apply the scheme's own initialisation to the existing weights too, for a model that is not trained yet.
        **options: the scheme's options.

    Returns:
        ``model``.

    Raises:
        ConfigError: an unsupported model, one that is rewired already, or a scheme that cannot be had.
    """
    if isinstance(model, ResidualModel):
        name = scheme_of(model.config).name
        raise ConfigError(f"this {type(model).__name__} is rewired already (scheme '{name}')")
    host = find_host(model)
    made = make_scheme(scheme, **options)
    _check_sites(host, made, model.config)
    _check_parts(host, model)
    # A rewired model has a config of its own: the one it was made with may belong to other models too.
    old = model.config
    config = _rewired_config(old, made)
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config
    swap_class(model)
    dropped = install(model, init=init)
    if dropped:
        log.warning("scheme '%s' has no place for these trained norms; removed: %s", made.name, ", ".join(dropped))
    return model


def build(
    host: str, config: Mapping[str, Any], scheme: str | Scheme = "siamese", options: Mapping[str, Any] | None = None
) -> Any:
    """A new causal language model of a family, under a scheme, with the scheme's own initialisation.

    Random numbers are drawn from torch's global generator exactly as the plain host draws them, so equal seeds give
    equal shared weights under every scheme.

    Args:
        host: a family's name.
        config: keys of the family's own Hugging Face config.
        scheme: a scheme's name, or a :class:`~siamesenorm.residual.Scheme`.
        options: the scheme's options.

    Raises:
        ConfigError: an unknown host, config key, scheme or option.
    """
    made = model_config(host, config, scheme, options)
    cls = residual_class(getattr(get_host(host).module(), f"{get_host(host).prefix}ForCausalLM"))
    try:
        return cls(made)
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(f"cannot build this {host} model: {' '.join(str(error).split())}") from error


def model_config(
    host: str, config: Mapping[str, Any], scheme: str | Scheme = "siamese", options: Mapping[str, Any] | None = None
) -> Any:
    """The config of such a model; arguments and errors as in :func:`build`."""
    family = get_host(host)
    config_class = register_models(family)
    known = set(config_class().to_dict()) | set(config_class.attribute_map)
    for key in config:
        if key not in known:
            raise ConfigError(f"a {family.prefix} config has no key '{key}': {nearest(str(key), known)}")
    made = make_scheme(scheme, **dict(options or {}))
    try:
        result = config_class(**{**config, "residual_scheme": scheme_to_dict(made)})
        result.validate()
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"this is no valid {family.prefix} config: {' '.join(str(error).split())}") from error
    _check_sites(family, made, result)
    return result


def install(model: Any, *, init: bool = True) -> list[str]:
    """Rewire ``model`` by the scheme in its config; the names of trained norms that were removed.

    A model that holds a rewired base model needs nothing more.
    """
    base = getattr(model, model.base_model_prefix, model)
    host = host_of(model.config)
    stack = getattr(base, host.blocks)
    if len(stack) and isinstance(stack[0], ResidualBlock):
        return []
    if base is not model:
        swap_class(base)
    scheme = scheme_of(model.config)
    sites = iter(stack_sites(len(stack), [roles.kind for roles in host.sublayers]))
    override = dict(model.config.residual_norm or {})
    # Head norms are like the host's, but may learn a weight where those do not.
    new_heads = {"affine": True, "bias": override.get("bias", False)} if override.pop("affine_heads", False) else {}
    dropped = []
    for index, block in enumerate(stack):
        swap_class(block)
        block.scheme, block.tap = scheme, Tap()
        placed = []
        for roles, site in zip(host.sublayers, sites, strict=False):
            norm = _our_norm(getattr(block, roles.norm), override)
            place = scheme.input_norm(site)
            placed.append(Placed(roles, place))
            if place == "none":
                if _is_trained(norm):
                    dropped.append(f"{host.blocks}.{index}.{roles.norm}")
                delattr(block, roles.norm)
            else:
                setattr(block, roles.norm, norm)
            setattr(block, roles.residual, _like(scheme.sublayer(site, _spec(norm)), norm))
            if roles.kind == "attention":
                _norm_heads(getattr(block, roles.branch), scheme.branch_norms(site), norm, override, new_heads)
        block.sublayers = tuple(placed)
        if init:
            _apply_gains(host, scheme, block)
    final = _our_norm(getattr(base, host.final_norm), override)
    final.__class__ = FinalRMSNorm if isinstance(final, RMSNorm) else FinalLayerNorm
    final.readout = _like(scheme.readout(_spec(final)), final)
    setattr(base, host.final_norm, final)
    base.train(base.training)
    return dropped


def blocks(model: Any) -> list[ResidualBlock]:
    """The rewired blocks of ``model``, in order."""
    return [module for module in model.modules() if isinstance(module, ResidualBlock)]


def site_table(model: Any) -> list[dict[str, Any]]:
    """What each sublayer of a rewired model reads and writes, one row a sublayer and a last one for the readout.

    Keys: ``sublayer``, ``block``, ``kind``, ``reads``, ``writes``, ``scale`` and ``norms`` (where the host's norm
    stands, and which of q, k, v are normalised per head).
    """
    scheme = scheme_of(model.config)
    rows = []
    for block in blocks(model):
        for placed in block.sublayers:
            residual = getattr(block, placed.roles.residual)
            site = residual.site
            norms = {"before": "Nin before", "after": "Nin after", "none": "no Nin"}[placed.place]
            if heads := scheme.branch_norms(site):
                norms += f"; {', '.join(heads)} per head"
            position = {"sublayer": site.sublayer, "block": site.block, "kind": site.kind}
            rows.append({**position, **residual.describe(), "norms": norms})
    base = getattr(model, model.base_model_prefix, model)
    host = host_of(model.config)
    readout = getattr(base, host.final_norm).readout
    rows.append({"sublayer": "", "block": "", "kind": "readout", **readout.describe(), "norms": "final norm after"})
    return rows


def _rewired_config(config: Any, scheme: Scheme) -> Any:
    rewired = copy.deepcopy(config)
    rewired.__class__ = register_models(get_host(config.model_type))
    rewired.residual_scheme = scheme_to_dict(scheme)
    rewired.residual_norm = getattr(config, "residual_norm", None)
    return rewired


def _check_sites(host: Host, scheme: Scheme, config: Any) -> None:
    """Let a scheme refuse a host before anything is changed."""
    spec = NormSpec("rms", 1)
    with torch.device("meta"):
        for site in stack_sites(config.num_hidden_layers, [roles.kind for roles in host.sublayers]):
            scheme.sublayer(site, spec)


def _check_parts(host: Host, model: Any) -> None:
    """See that a model has the parts that its family's table names, before anything is changed."""
    base = getattr(model, model.base_model_prefix, model)
    try:
        for block in getattr(base, host.blocks):
            for roles in host.sublayers:
                getattr(block, roles.branch)
                _spec(getattr(block, roles.norm))
        _spec(getattr(base, host.final_norm))
    except AttributeError as error:
        raise ConfigError(
            f"this {type(model).__name__} does not fit the table of host '{host.name}': {error}"
        ) from None


def _our_norm(norm: Any, override: Mapping[str, Any]) -> Norm:
    """The package's norm over the parameters of a host's norm, of the host's kind unless ``override`` says another."""
    spec = replace(_spec(norm), **override)
    ours = _like(spec.build(), norm)
    for name in ("weight", "bias"):
        theirs = getattr(norm, name, None)
        if theirs is not None and getattr(ours, name) is not None:
            setattr(ours, name, theirs)
    return ours


def _spec(norm: Any) -> NormSpec:
    if isinstance(norm, Norm):
        return NormSpec(norm.kind, norm.size, norm.eps, norm.bias is not None, norm.weight is not None)
    if isinstance(norm, nn.LayerNorm):
        return NormSpec("layer", norm.normalized_shape[-1], norm.eps, norm.bias is not None, norm.weight is not None)
    if "RMSNorm" in type(norm).__name__ and hasattr(norm, "variance_epsilon"):
        return NormSpec("rms", norm.weight.shape[-1], norm.variance_epsilon)
    raise ConfigError(f"cannot tell what kind of norm a {type(norm).__name__} is")


def _like(module: M, reference: nn.Module) -> M:
    """``module`` on the device and in the dtype of ``reference``'s parameters."""
    parameter = next(reference.parameters(), None)
    return module if parameter is None else module.to(device=parameter.device, dtype=parameter.dtype)


def _is_trained(norm: Norm) -> bool:
    """Whether removing ``norm`` loses something: a weight that is not all 1, a bias that is not all 0."""
    if norm.weight is None or norm.weight.is_meta:
        return False
    return bool((norm.weight != 1).any()) or (norm.bias is not None and bool((norm.bias != 0).any()))


def _norm_heads(
    attention: Any, heads: tuple[str, ...], norm: Norm, override: Mapping[str, Any], new: Mapping[str, Any]
) -> None:
    """Give an attention its per-head norms, like ``norm`` but for ``new``; those that the host has already stay."""
    for name in NORM_NAMES.values():
        if isinstance(getattr(attention, name, None), nn.Module):
            setattr(attention, name, _our_norm(getattr(attention, name), override))
    missing = [NORM_NAMES[role] for role in heads if not hasattr(attention, NORM_NAMES[role])]
    for name in missing:
        setattr(attention, name, _like(replace(_spec(norm).resized(attention.head_dim), **new).build(), norm))
    if missing:
        swap_class(attention)


def _apply_gains(host: Host, scheme: Scheme, block: Any) -> None:
    for role, names in host.roles.items():
        gain = scheme.init_gain(role)
        if gain != 1.0:
            with torch.no_grad():
                for name in names:
                    block.get_submodule(name).weight.mul_(gain)
