"""Putting a scheme into a model."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..hub.autoload import register_models
from ..residual import (
    Block,
    ConfigError,
    NormSpec,
    Readout,
    RMSNorm,
    Scheme,
    Site,
    Sublayer,
    make_scheme,
    nearest,
    one_line,
    stack_sites,
)
from .attention import HeadNormedAttention
from .block import FinalLayerNorm, FinalRMSNorm, Placed, ResidualBlock, Tap
from .classes import ResidualModel, forget_recording, residual_class, swap_class
from .configs import scheme_of, scheme_to_dict
from .families import Branch, Host, find_host, get_host, home_named, home_of, host_of
from .norms import HostNorms

__all__ = [
    "apply_gains",
    "blocks",
    "build",
    "check_sites",
    "ends_in_norm",
    "exchange",
    "grow_drop_path",
    "input_norms",
    "install",
    "install_block",
    "install_readout",
    "model_config",
    "rewire",
    "scheme_in",
    "site_table",
    "warn_of_removed",
]

log = logging.getLogger(__name__)

_RESIDUALS = {"attention": "attn_residual", "mlp": "mlp_residual", "parallel": "residual"}
# The weights of a sublayer that a scheme may initialise in its own way.
_ROLES = {"attention": ("q", "k", "v", "o"), "mlp": ("mlp",), "parallel": ("q", "k", "v", "o", "mlp")}


def rewire(model: Any, scheme: str | Scheme = "siamese", *, init: bool = False, **options: Any) -> Any:
    """Put a residual scheme into a model of transformers, or of another library that is known, in place.

    Weights that exist keep their names and values; the scheme's own are added at their initial values. A host norm that
    the scheme has no place for is removed, and a trained one is named in a warning.

    Args:
        model: a model of a supported family (:func:`siamesenorm.hosts.hosts`), with or without a head, or a
            ``VisionTransformer`` of timm (see :mod:`siamesenorm.hosts.timm_vit`).
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
    if (home := home_of(model)) is not None:
        return home.rewire(model, make_scheme(scheme, **options), init=init)
    host = find_host(model)
    made = make_scheme(scheme, **options)
    _check_scheme(made, model.config, host)
    _check_parts(host, model)
    _give_config(model, _rewired_config(model.config, made))
    # How a loaded checkpoint's weights were regrouped belongs to the host's format; this model has one of its own.
    vars(model).pop("_weight_conversions", None)
    swap_class(model)
    warn_of_removed(made, install(model, init=init))
    return model


def exchange(model: Any, scheme: Scheme) -> None:
    """Put another scheme into a rewired model, in place.

    Parameters that both schemes have by the same name and in the same shape are kept, the host's among them; the others
    of the old scheme go, and those of the new one have its initial values.

    Args:
        model: rewired by a scheme that removed no norm of the host's which the new one has a place for.
        scheme: the new one.

    Raises:
        ConfigError: the scheme cannot be had in such a model.
    """
    before = dict(model.named_parameters(remove_duplicate=False))
    if (home := home_of(model)) is not None:
        home.exchange(model, scheme)
    else:
        host = host_of(model.config)
        _check_scheme(scheme, model.config, host)
        config = copy.deepcopy(model.config)
        config.residual_scheme = scheme_to_dict(scheme)
        _give_config(model, config)
        _join(model, host)
        forget_recording(model)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        kept = before.get(name)
        if kept is not None and kept is not parameter and kept.shape == parameter.shape:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, kept)


def scheme_in(model: Any) -> Scheme:
    """The scheme of a model; ``pre`` for one of a host as it is.

    Raises:
        ConfigError: no model that can be rewired.
    """
    holder = getattr(model, "config", model)
    if getattr(holder, "residual_scheme", None) is not None:
        return scheme_of(holder)
    if home_of(model) is None:
        find_host(model)
    return make_scheme("pre")


def input_norms(model: Any) -> list[tuple[Site, NormSpec]]:
    """The norms that a host has before its branches, or what a model's scheme has left of them, and where."""
    if (home := home_of(model)) is not None:
        host, base = home.HOST, model
    else:
        host = host_of(model.config) if isinstance(model, ResidualModel) else find_host(model)
        base = getattr(model, model.base_model_prefix, model)
    # Those of other libraries have no branches in parallel, and so do not ask their config.
    config = getattr(model, "config", None)
    sublayers, kinds = host.sublayers(config), host.kinds(config)
    norms, stack = HostNorms(host), getattr(base, host.blocks)
    sites = iter(stack_sites(len(stack), kinds))
    return [
        (site, norms.spec(norm))
        for block in stack
        for branches, site in zip(sublayers, sites, strict=False)
        for path in dict.fromkeys(branch.norm for branch in branches)
        if (norm := _attribute(block, path)) is not None
    ]


def ends_in_norm(model: Any) -> bool:
    """Whether a norm follows a model's readout; some models of timm have theirs behind the pooling."""
    return not isinstance(getattr(model, "norm", None), nn.Identity)


def build(
    host: str,
    config: Mapping[str, Any],
    scheme: str | Scheme = "siamese",
    options: Mapping[str, Any] | None = None,
    *,
    model_class: str | None = None,
) -> Any:
    """A new model of a family with its usual head, under a scheme, with the scheme's own initialisation.

    Random numbers are drawn from torch's global generator exactly as the plain host draws them, so equal seeds give
    equal shared weights under every scheme.

    Args:
        host: a family's name.
        config: keys of the family's own config.
        scheme: a scheme's name, or a :class:`~siamesenorm.residual.Scheme`.
        options: the scheme's options.
        model_class: name of the family's own class, where its head has several; by default the usual one.

    Raises:
        ConfigError: an unknown host, class, config key, scheme or option.
    """
    if (home := home_named(host)) is not None:
        if model_class is not None:
            raise ConfigError(f"host '{host}' has no choice of classes, so it takes no model_class")
        return home.build(config, make_scheme(scheme, **dict(options or {})))
    made = model_config(host, config, scheme, options)
    family = get_host(host)
    known = {found.__name__: found for found in family.classes_with(family.head)}
    if model_class is not None and model_class not in known:
        raise ConfigError(f"a {family.prefix} has no class '{model_class}': {nearest(model_class, known)}")
    host_class: Any = known[model_class or next(iter(known))]
    try:
        return residual_class(host_class)(made)
    except (ValueError, ArithmeticError, KeyError, RuntimeError) as error:
        raise ConfigError(f"cannot build this {host} model: {one_line(error)}") from error


def model_config(
    host: str, config: Mapping[str, Any], scheme: str | Scheme = "siamese", options: Mapping[str, Any] | None = None
) -> Any:
    """The config of such a model; arguments and errors as in :func:`build`."""
    if (home := home_named(host)) is not None:
        return home.model_config(config, make_scheme(scheme, **dict(options or {})))
    family = get_host(host)
    config_class = register_models(family)
    known = {*config_class().to_dict(), *config_class.attribute_map, *family.more_keys}
    for key in config:
        if key not in known:
            raise ConfigError(f"a {family.prefix} config has no key '{key}': {nearest(str(key), known)}")
    made = make_scheme(scheme, **dict(options or {}))
    try:
        result = config_class(**{**config, "residual_scheme": scheme_to_dict(made)})
        result.validate()
        _check_values(result, config)
    except (TypeError, ValueError, ArithmeticError, StrictDataclassError) as error:
        raise ConfigError(f"this is no valid {family.prefix} config: {one_line(error)}") from error
    _check_scheme(made, result, family)
    return result


def _check_values(config: Any, given: Mapping[str, Any]) -> None:
    """Refuse sizes and shares that a host's config takes and its model does not; ``given`` are the keys as written."""
    # The config counts the labels' names, of which a negative number gives none; a model without any has no head.
    if (given.get("num_labels") or 0) < 0:
        raise ValueError(f"num_labels must not be negative, but is {given['num_labels']}")
    for key, value in config.to_dict().items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if (key.endswith(("dropout", "pdrop", "drop_path_rate")) or "dropout_" in key) and not 0 <= value < 1:
            raise ValueError(f"{key} must be at least 0 and below 1, not {value}")
        if (key.endswith(("_size", "_heads", "_layers", "_dim")) or key.startswith("n_")) and value < 0:
            raise ValueError(f"{key} must not be negative, but is {value}")
        if key.endswith(("_eps", "_epsilon")) and not 0 <= value < math.inf:
            raise ValueError(f"{key} must be a number of at least 0, not {value}")
    for key in ("hidden_size", "num_attention_heads", "vocab_size", "num_channels"):
        if (value := getattr(config, key, None)) is not None and value < 1:
            raise ValueError(f"{key} must be at least 1, not {value}")
    heads = config.num_attention_heads
    if heads % (getattr(config, "num_key_value_heads", None) or heads):
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads")
    if hasattr(config, "patch_size"):
        for image, patch in zip(_pair(config.image_size), _pair(config.patch_size), strict=True):
            if patch < 1 or image < patch or image % patch:
                raise ValueError(f"patch_size {config.patch_size} does not divide image_size {config.image_size}")
        if config.hidden_size % heads:
            raise ValueError(f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads {heads}")
    chosen = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if chosen is not None and experts is not None and not 1 <= chosen <= experts:
        raise ValueError(f"num_experts_per_tok ({chosen}) must be between 1 and the number of experts ({experts})")


def _pair(size: Any) -> tuple[int, int]:
    """Height and width, of which a config may give one number for both."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2:
        raise ValueError(f"a size is one number or height and width, not {size}")
    return pair


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
    return _join(model, host, init=init)


def _join(model: Any, host: Host, *, init: bool = False) -> list[str]:
    """Join the blocks of a model, rewired before or not, by the scheme in its config; as :func:`install`."""
    base = getattr(model, model.base_model_prefix, model)
    stack = getattr(base, host.blocks)
    scheme = scheme_of(model.config)
    norms = HostNorms(host, model.config.residual_norm)
    sublayers = host.sublayers(model.config)
    sites = stack_sites(len(stack), host.kinds(model.config))
    dropped = []
    for index, block in enumerate(stack):
        here = sites[index * len(sublayers) : (index + 1) * len(sublayers)]
        removed = install_block(block, scheme, norms, tuple(zip(sublayers, here, strict=True)), _swap_once)
        block.tap = Tap().train(block.training)
        dropped += [f"{host.blocks}.{index}.{name}" for name in removed]
        if init:
            apply_gains(host, scheme, block, here)
    grow_drop_path(stack, _drop_path_rate(model.config))
    setattr(base, host.final_norm, install_readout(getattr(base, host.final_norm), scheme, norms, base))
    return dropped


def _swap_once(module: nn.Module) -> None:
    if not isinstance(module, ResidualBlock | HeadNormedAttention):
        swap_class(module)


def grow_drop_path(stack: Sequence[Any], rate: float) -> None:
    """Give rewired blocks stochastic depth, from none in the first to all of the rate in the last."""
    for index, block in enumerate(stack):
        for placed in block.sublayers:
            getattr(block, placed.residual).drop_path = rate * index / max(len(stack) - 1, 1)


def install_readout(final: Any, scheme: Scheme, norms: HostNorms, base: Any) -> Any:
    """A host's final norm, become the package's and closing the stack; placed like ``base`` if it learns nothing."""
    final = norms.ours(final)
    final.__class__ = FinalRMSNorm if isinstance(final, RMSNorm) else FinalLayerNorm
    final.readout = norms.like(scheme.readout(norms.for_scheme(final)), final, base)
    return final


def install_block(
    block: Any,
    scheme: Scheme,
    norms: HostNorms,
    sublayers: tuple[tuple[tuple[Branch, ...], Site], ...],
    swap: Callable[[Any], None],
) -> list[str]:
    """Rewire one block; the names of trained norms that were removed.

    ``swap`` gives a block, and an attention that needs one, the rewired counterpart of its class, in place.
    """
    swap(block)
    block.scheme = scheme
    before, placed, removed = getattr(block, "sublayers", ()), [], []
    for index, (branches, site) in enumerate(sublayers):
        place = scheme.input_norm(site)
        for path in dict.fromkeys(branch.norm for branch in branches):
            parent, _, name = path.rpartition(".")
            owner = block.get_submodule(parent)
            if before and place == "none" and not hasattr(owner, name):
                # The scheme before this one had no place for it either.
                norm = norms.like(before[index].norm.build(), block)
                continue
            norm = norms.ours(getattr(owner, name))
            if place != "none":
                norm.scale = scheme.input_scale(site)
                setattr(owner, name, norm)
                continue
            removed += [path] if norms.is_trained(norm) else []
            delattr(owner, name)
        residual = _RESIDUALS[site.kind]
        setattr(block, residual, norms.like(scheme.sublayer(site, norms.for_scheme(norm)), norm, block))
        placed.append(Placed(residual, branches, place, norm.spec))
        for branch in branches:
            if branch.kind == "attention":
                attention = getattr(block, branch.module)
                if norms.norm_heads(attention, scheme.branch_norms(site), norm):
                    swap(attention)
                    attention.roles = norms.host.attention
    block.sublayers = tuple(placed)
    return removed


def blocks(model: Any) -> list[Block]:
    """The rewired blocks of ``model``, in order."""
    return [module for module in model.modules() if isinstance(module, Block)]


def site_table(model: Any) -> list[dict[str, Any]]:
    """What each sublayer of a rewired model reads and writes, one row a sublayer and a last one for the readout.

    Keys: ``sublayer``, ``block``, ``kind``, ``reads``, ``writes``, ``scale`` and ``norms`` (where the host's norm
    stands, and which of q, k, v are normalised per head).
    """
    scheme = scheme_of(getattr(model, "config", model))
    places = {"before": "Nin before", "after": "Nin after", "none": "no Nin"}
    rows = []
    for sublayer in (module for module in model.modules() if isinstance(module, Sublayer)):
        site = sublayer.site
        norms = places[scheme.input_norm(site)]
        if heads := scheme.branch_norms(site):
            norms += f"; {', '.join(heads)} per head"
        position = {"sublayer": site.sublayer, "block": site.block, "kind": site.kind}
        rows.append({**position, **sublayer.describe(), "norms": norms})
    readout = next(module for module in model.modules() if isinstance(module, Readout))
    rows.append({"sublayer": "", "block": "", "kind": "readout", **readout.describe(), "norms": "final norm after"})
    return rows


def _rewired_config(config: Any, scheme: Scheme) -> Any:
    rewired = copy.deepcopy(config)
    rewired.__class__ = register_models(get_host(config.model_type))
    rewired.residual_scheme = scheme_to_dict(scheme)
    rewired.residual_norm = getattr(config, "residual_norm", None)
    rewired.drop_path_rate = _drop_path_rate(config)
    return rewired


def _drop_path_rate(config: Any) -> float:
    """The rate of stochastic depth in the last block, where a config has one."""
    rate = getattr(config, "drop_path_rate", 0.0)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ConfigError(f"drop_path_rate must be a number of at least 0 and below 1, not {rate!r}")
    return rate


def _give_config(model: Any, config: Any) -> None:
    """Replace a model's config, which may belong to other models too, wherever it has it."""
    old = model.config
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config


def _check_scheme(scheme: Scheme, config: Any, host: Host) -> None:
    """Let a scheme refuse models of a config; as :func:`check_sites`."""
    override = getattr(config, "residual_norm", None)
    affine = override.get("affine", True) if isinstance(override, Mapping) else True
    check_sites(scheme, stack_sites(config.num_hidden_layers, host.kinds(config)), affine=bool(affine))


def check_sites(scheme: Scheme, sites: Iterable[Site], *, affine: bool = True) -> None:
    """Let a scheme refuse a host before anything is changed; ``affine`` says whether its own norms learn a weight."""
    spec = NormSpec("rms", 1, affine=affine)
    with torch.device("meta"):
        for site in sites:
            scheme.sublayer(site, spec)


def warn_of_removed(scheme: Scheme, norms: Sequence[str]) -> None:
    """Say which trained norms of a host were removed, if any were."""
    if norms:
        log.warning("scheme '%s' has no place for these trained norms; removed: %s", scheme.name, ", ".join(norms))


def _check_parts(host: Host, model: Any) -> None:
    """See that a model has the parts that its family's table names, before anything is changed."""
    if getattr(model.config, "add_cross_attention", False):
        raise ConfigError("cannot rewire a decoder with cross-attention: only self-attention and MLP have a sublayer")
    base = getattr(model, model.base_model_prefix, model)
    norms = HostNorms(host)
    try:
        for block in getattr(base, host.blocks):
            for branch in (branch for branches in host.sublayers(model.config) for branch in branches):
                getattr(block, branch.module)
                norms.spec(getattr(block, branch.norm))
        norms.spec(getattr(base, host.final_norm))
    except AttributeError as error:
        raise ConfigError(
            f"this {type(model).__name__} does not fit the table of host '{host.name}': {error}"
        ) from None


@torch.no_grad()
def apply_gains(host: Host, scheme: Scheme, block: Any, sites: Iterable[Site]) -> None:
    """Multiply a new block's weights by the scheme's own gains."""
    attention = next(branch for branch in host.parallel or host.branches if branch.kind == "attention")
    for site in sites:
        for role in _ROLES[site.kind]:
            gain = scheme.init_gain(role, site)
            if gain != 1.0:
                for weight in _weights(host, block, getattr(block, attention.module), role):
                    weight.mul_(gain)


def _weights(host: Host, block: Any, attention: Any, role: str) -> list[torch.Tensor]:
    """The weights of a block that play a role, as views."""
    roles = host.attention
    if role == "mlp":
        found = [_attribute(block, name) for name in host.mlp_weights]
        return [getattr(part, "weight", part) for part in found if part is not None]
    if role == "o":
        return [_attribute(attention, roles.out).weight]
    if len(roles.projections) == 3:
        return [getattr(attention, roles.projections["qkv".index(role)]).weight]
    matrix = getattr(attention, roles.projections[0])
    # GPT-2 keeps its matrices the other way round.
    weight = matrix.weight.T if isinstance(matrix, Conv1D) else matrix.weight
    if roles.by_head:
        head_dim = getattr(attention, roles.head_dim)
        return [weight.view(-1, 3, head_dim, weight.shape[-1])[:, "qkv".index(role)]]
    return [weight.chunk(3)["qkv".index(role)]]


def _attribute(module: Any, name: str) -> Any:
    """The attribute at a dotted name, or None where there is none."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module
