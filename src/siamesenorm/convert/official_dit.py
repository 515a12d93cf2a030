"""Official DiT: post-pre with adaLN, or Pre-Norm, in this package's subclass of diffusers' model.

The official code keeps q, k and v in one matrix; what is left differs in names alone:

    official                            here
    pos_embed                           pos_embed.pos_embed                        the table of positions, not trained
    x_embedder.proj                     pos_embed.proj
    t_embedder.mlp.0, .2                emb.timestep_embedder.linear_1, linear_2
    y_embedder.embedding_table          emb.class_embedder.embedding_table         the null class is its last row
    blocks.l.attn.qkv                   transformer_blocks.l.attn1.to_q, to_k, to_v
    blocks.l.attn.proj                  transformer_blocks.l.attn1.to_out.0
    blocks.l.mlp.fc1, fc2               transformer_blocks.l.ff.net.0.proj, ff.net.2
    blocks.l.adaLN_modulation.1         transformer_blocks.l.norm1.linear
    blocks.l.postnorm1, prenorm1        transformer_blocks.l.attn_residual.norm_x, norm_y
    blocks.l.postnorm2, prenorm2        transformer_blocks.l.mlp_residual.norm_x, norm_y
    postnorm, prenorm                   norm_out.readout.norm_x, norm_y
    final_layer.adaLN_modulation.1      proj_out_1
    final_layer.linear                  proj_out_2

Nin, ``norm1`` and ``norm2`` of an official block, has no parameters; neither has the norm of its final layer. A model
without postnorm and prenorm is the Pre-Norm DiT of arXiv 2212.09748, whose names are otherwise the same.

In training the official model drops labels itself, as often as ``class_dropout_prob`` says. This one never does: a
training loop puts the null class, ``model.null_class``, in the place of a label.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..hosts import build
from ..residual import ConfigError
from . import weights
from .weights import Names, fill, made, parameter_names, refuse_unknown

__all__ = ["load", "official_names", "training_arguments"]

# Depth, width and heads of the models that the training script knows by name, and the side of its autoencoder's patch.
_SIZES = {"XL": (28, 1152, 16), "L": (24, 1024, 16), "B": (12, 768, 12), "S": (12, 384, 6)}
_PIXELS_PER_LATENT = 8
# The official constructor's defaults.
_DEFAULTS: dict[str, Any] = {
    "input_size": 32,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 1152,
    "depth": 28,
    "num_heads": 16,
    "mlp_ratio": 4.0,
    "class_dropout_prob": 0.1,
    "num_classes": 1000,
    "learn_sigma": True,
}


def load(state_dict: Mapping[str, Tensor], args: Mapping[str, Any]) -> nn.Module:
    """As :func:`siamesenorm.convert.load_official`."""
    refuse_unknown(args, {*_DEFAULTS, "qkv_bias"}, "DiT")
    has_bias = any(name.endswith(".attn.qkv.bias") for name in state_dict)
    config = _config({**_DEFAULTS, "qkv_bias": has_bias, **args})
    siamese = any("postnorm" in name or "prenorm" in name for name in state_dict)
    scheme: tuple[Any, ...] = ("siamese", {"x": "post"}) if siamese else ("pre",)
    model = made(lambda: build("dit", config, *scheme), config, state_dict)
    fill(model, _names(model), state_dict)
    return model.eval()


def training_arguments(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """As :func:`siamesenorm.convert.official.training_arguments`: ``model``, such as ``DiT-B/2``, names the sizes."""
    match = re.fullmatch(r"DiT-(\w+)/(\d+)", str(given.get("model")))
    pixels, classes = given.get("image_size"), given.get("num_classes")
    if match is None or match[1] not in _SIZES or type(pixels) is not int or type(classes) is not int:
        return None
    depth, width, heads = _SIZES[match[1]]
    return {
        "input_size": pixels // _PIXELS_PER_LATENT,
        "patch_size": int(match[2]),
        "hidden_size": width,
        "depth": depth,
        "num_heads": heads,
        "num_classes": classes,
    }


def official_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As :func:`siamesenorm.convert.official_names`."""
    return weights.official_names(_names(model), tensors)


def _config(given: Mapping[str, Any]) -> dict[str, Any]:
    """The config of our model, which checks all values but those that it does not hold as they are."""
    width, heads = given["hidden_size"], given["num_heads"]
    for name in ("hidden_size", "num_heads", "in_channels"):
        if type(given[name]) is not int or given[name] < 1:
            raise ConfigError(f"official argument '{name}' must be a whole number of at least 1, not {given[name]!r}")
    if width % heads:
        raise ConfigError(f"hidden_size {width} is not a multiple of num_heads {heads}")
    if not isinstance(given["learn_sigma"], bool):
        raise ConfigError(f"official argument 'learn_sigma' must be true or false, not {given['learn_sigma']!r}")
    return {
        "sample_size": given["input_size"],
        "patch_size": given["patch_size"],
        "in_channels": given["in_channels"],
        "out_channels": given["in_channels"] * (2 if given["learn_sigma"] else 1),
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "num_layers": given["depth"],
        "mlp_ratio": given["mlp_ratio"],
        "class_dropout_prob": given["class_dropout_prob"],
        "num_embeds_ada_norm": given["num_classes"],
        "attention_bias": given["qkv_bias"],
    }


def _names(model: Any) -> Names:
    """The official weights, and those of ``model`` that they are."""
    modules: dict[str, tuple[str, ...]] = {
        "x_embedder.proj": ("pos_embed.proj",),
        "t_embedder.mlp.0": ("emb.timestep_embedder.linear_1",),
        "t_embedder.mlp.2": ("emb.timestep_embedder.linear_2",),
        "y_embedder.embedding_table": ("emb.class_embedder.embedding_table",),
        "postnorm": ("norm_out.readout.norm_x",),
        "prenorm": ("norm_out.readout.norm_y",),
        "final_layer.adaLN_modulation.1": ("proj_out_1",),
        "final_layer.linear": ("proj_out_2",),
    }
    for index in range(model.config.num_layers):
        theirs, ours = f"blocks.{index}.", f"transformer_blocks.{index}."
        modules |= {
            theirs + "attn.qkv": tuple(f"{ours}attn1.to_{role}" for role in "qkv"),
            theirs + "attn.proj": (ours + "attn1.to_out.0",),
            theirs + "mlp.fc1": (ours + "ff.net.0.proj",),
            theirs + "mlp.fc2": (ours + "ff.net.2",),
            theirs + "adaLN_modulation.1": (ours + "norm1.linear",),
            theirs + "postnorm1": (ours + "attn_residual.norm_x",),
            theirs + "prenorm1": (ours + "attn_residual.norm_y",),
            theirs + "postnorm2": (ours + "mlp_residual.norm_x",),
            theirs + "prenorm2": (ours + "mlp_residual.norm_y",),
        }
    return {"pos_embed": ("pos_embed.pos_embed",)} | parameter_names(model, modules)
