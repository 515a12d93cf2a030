"""Which models can be rewired: one small table of roles per family.

A family says by what names a transformers decoder calls its parts. Everything a scheme needs to know of a model is in
its :class:`Host`; adding a family is adding a table, and :func:`register_host` does it from outside the package.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from ..residual import ConfigError, nearest

__all__ = ["Host", "SublayerRoles", "all_hosts", "find_host", "get_host", "host_of", "hosts", "register_host"]

_PREFIX = "siamesenorm_"


@dataclass(frozen=True)
class SublayerRoles:
    """The parts of one sublayer, as attribute names within its block.

    Attributes:
        kind: what the branch is.
        branch: the branch module. Attention is called with the block's own keyword arguments and may return a tuple
            whose first item is its output.
        norm: the norm that the host applies to the branch's input.
    """

    kind: Literal["attention", "mlp"]
    branch: str
    norm: str

    @property
    def residual(self) -> str:
        """The name that a rewired block gives to this sublayer's read and write."""
        return {"attention": "attn_residual", "mlp": "mlp_residual"}[self.kind]


@dataclass(frozen=True)
class Host:
    """A family of models whose blocks can be rewired.

    Attributes:
        name: the family's ``model_type``.
        modeling: the module that defines its classes, called ``<prefix>Model``, ``<prefix>DecoderLayer`` and so on;
            ``<prefix>Config`` is found there or in the module's ``configuration_`` sibling.
        prefix: what the class names start with.
        blocks: attribute of the base model that lists the blocks.
        final_norm: attribute of the base model that holds the final norm.
        sublayers: the sublayers of a block, in order.
        roles: for a scheme's own initialisation, the block's linear maps by role: ``"q"``, ``"k"``, ``"v"``, ``"o"``
            (attention's output) and ``"mlp"``.
    """

    name: str
    modeling: str
    prefix: str
    blocks: str
    final_norm: str
    sublayers: tuple[SublayerRoles, ...]
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def residual_type(self) -> str:
        """The ``model_type`` of the family's rewired models."""
        return _PREFIX + self.name

    def module(self) -> ModuleType:
        """The module with the family's model classes, imported on first use."""
        return importlib.import_module(self.modeling)

    def config_class(self) -> type[Any]:
        """The family's own config class; importing it does not import the models."""
        name = f"{self.prefix}Config"
        sibling = self.modeling.replace(".modeling_", ".configuration_")
        return getattr(importlib.import_module(sibling), name)


def _llama_like(name: str, prefix: str) -> Host:
    """A decoder with Llama's names: separate projections, a gated MLP, a norm before each branch."""
    return Host(
        name=name,
        modeling=f"transformers.models.{name}.modeling_{name}",
        prefix=prefix,
        blocks="layers",
        final_norm="norm",
        sublayers=(
            SublayerRoles("attention", branch="self_attn", norm="input_layernorm"),
            SublayerRoles("mlp", branch="mlp", norm="post_attention_layernorm"),
        ),
        roles={
            "q": ("self_attn.q_proj",),
            "k": ("self_attn.k_proj",),
            "v": ("self_attn.v_proj",),
            "o": ("self_attn.o_proj",),
            "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        },
    )


_HOSTS: dict[str, Host] = {
    host.name: host
    for host in (
        _llama_like("llama", "Llama"),
        _llama_like("mistral", "Mistral"),
        _llama_like("qwen2", "Qwen2"),
        _llama_like("qwen3", "Qwen3"),
    )
}


def hosts() -> tuple[str, ...]:
    """The names of all families that can be rewired, sorted."""
    return tuple(sorted(_HOSTS))


def all_hosts() -> tuple[Host, ...]:
    """All families that can be rewired."""
    return tuple(_HOSTS.values())


def register_host(host: Host) -> Host:
    """Make another family known to :func:`siamesenorm.rewire`, saving and loading; returns ``host``.

    Raises:
        ConfigError: a family of that name is registered already.
    """
    if host.name in _HOSTS:
        raise ConfigError(f"a host named '{host.name}' is registered already")
    _HOSTS[host.name] = host
    from ..hub.autoload import register_config_if_loaded

    register_config_if_loaded(host)
    return host


def get_host(name: str) -> Host:
    """The family called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in _HOSTS:
        raise ConfigError(f"unknown host '{name}': {nearest(str(name), hosts())}")
    return _HOSTS[name]


def host_of(config: Any) -> Host:
    """The family of a rewired model's config."""
    return get_host(config.model_type.removeprefix(_PREFIX))


def find_host(model: Any) -> Host:
    """The family that ``model`` belongs to.

    Raises:
        ConfigError: none; the message lists the families there are and how to register another.
    """
    from transformers import PreTrainedModel

    model_type = getattr(getattr(model, "config", None), "model_type", None)
    # Wrappers (compiled, adapted) pass on every attribute of the model in them, so attributes alone do not tell.
    if model_type in _HOSTS and isinstance(model, PreTrainedModel):
        return _HOSTS[model_type]
    raise ConfigError(
        f"cannot rewire a {type(model).__name__}"
        + (f" (model_type '{model_type}')" if model_type else "")
        + f": supported are {', '.join(hosts())}. Another decoder is added by describing its parts in a table: "
        "siamesenorm.register_host(siamesenorm.hosts.Host(...))"
    )
