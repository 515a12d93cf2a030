"""The classes of rewired models, made from the host's own.

``ResidualLlamaForCausalLM`` is transformers' ``LlamaForCausalLM`` with a config that carries a scheme, and so on for
every class of every family: each is made on first use, and found again by name, so that models can be pickled.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, OutputRecorder, install_all_output_capturing_hooks

from ..hub.loading import key_names
from ..residual import ConfigError, Norm, Readout, Sublayer
from .attention import HeadNormedAttention
from .block import ReadoutNorm, ResidualBlock, Tap
from .configs import residual_config
from .families import all_hosts, host_of

__all__ = ["ResidualModel", "forget_recording", "residual_class", "swap_class"]


class ResidualModel(PreTrainedModel):
    """Mixin over a transformers model whose blocks are rewired.

    Its config says by which scheme, under ``residual_scheme``, so making one from a config rewires it.
    """

    config: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        from .surgery import install

        install(self)

    def _init_weights(self, module: nn.Module) -> None:
        # transformers sets to 1 whatever has RMSNorm or LayerNorm in its class name; a scheme may start elsewhere.
        if isinstance(module, Norm | Sublayer | Readout):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, but a missing or unexpected weight of the base model is an error, not a warning.

        Raises:
            ConfigError: such weights, all of them listed.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        prefix = "" if model.base_model is model else model.base_model_prefix + "."
        base = tuple(f"{prefix}{name}." for name, _ in model.base_model.named_children())
        head = tuple(f"{prefix}{name}" for name in host_of(model.config).head_parts)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            # What belongs to a head may come and go: a language model's body becomes a classifier's.
            ours = [n for n in key_names(info, kind) if n.startswith(base) and not n.startswith(head)]
            if ours:
                raise ConfigError(f"{kind.replace('_', ' ')} in the checkpoint of {cls.__name__}: {', '.join(ours)}")
        return (model, info) if output_loading_info else model


@functools.cache
def residual_class(host_class: Any) -> type[Any]:
    """The rewired counterpart of a host's model, block or attention class."""
    attributes: dict[str, Any] = {"__module__": __name__, "__doc__": f"{host_class.__name__}, rewired."}
    bases: tuple[type, ...]
    if issubclass(host_class, PreTrainedModel):
        bases = (ResidualModel, host_class)
        # transformers finds these out in the source of a class's module, which is not the host's here, and keeps them
        # in the class, from which the one below inherits them.
        host_class._can_set_experts_implementation()
        host_class._can_set_attn_implementation()
        attributes |= {
            "config_class": residual_config(host_class.config_class.model_type),
            "_no_split_modules": _with_ours(host_class._no_split_modules),
            "_can_record_outputs": {
                **(host_class._can_record_outputs or {}),
                "hidden_states": [
                    OutputRecorder(Tap, capture_initial_hidden_state=False),
                    OutputRecorder(ReadoutNorm, capture_initial_hidden_state=False),
                ],
            },
        }
    elif issubclass(host_class, GradientCheckpointingLayer):
        bases = (ResidualBlock, host_class)
        # Some base models pass a block's arguments by position.
        attributes["positional"] = tuple(inspect.signature(host_class.forward).parameters)[2:]
    else:
        bases = (HeadNormedAttention, host_class)
        attributes |= HeadNormedAttention.functions_of(sys.modules[host_class.__module__])
    return type(f"Residual{host_class.__name__}", bases, attributes)


def swap_class(module: nn.Module) -> None:
    """Give ``module`` the rewired counterpart of its class, in place."""
    cls: Any = type(module)
    module.__class__ = residual_class(cls)
    if isinstance(module, PreTrainedModel):
        _CAN_RECORD_REGISTRY[module] = type(module)._can_record_outputs
        forget_recording(module)
        module._no_split_modules = _with_ours(module._no_split_modules)


def forget_recording(model: Any) -> None:
    """Remove the hooks that a model has once it recorded hidden states; it gets new ones when it is asked again."""
    model._output_capturing_hooks_installed = False
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__module__", None) == install_all_output_capturing_hooks.__module__:
                del module._forward_hooks[key]


def _with_ours(names: Iterable[str] | None) -> set[str]:
    """Class names of modules that must stay on one device, with those of their rewired counterparts."""
    return {prefix + name.removeprefix("Residual") for name in names or () for prefix in ("", "Residual")}


def __getattr__(name: str) -> Any:
    if name.startswith("Residual"):
        host_name = name.removeprefix("Residual")
        for host in all_hosts():
            if host_name.startswith(host.prefix) and (found := getattr(host.module(), host_name, None)) is not None:
                return residual_class(found)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
