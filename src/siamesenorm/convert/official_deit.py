"""Official DeiT: post-pre in timm's VisionTransformer, hosted by transformers' ViT, or by its DeiT if it is distilled.

The official code keeps q, k and v in one matrix; what is left differs in names alone. Which norm is which (in the
readout, ``pre`` and ``post`` stand the other way round than in the blocks):

    official                  here
    blocks.l.post_norm1       layers.l.attn_residual.norm_x   Nx of attention
    blocks.l.pre_norm1        layers.l.attn_residual.norm_y   Ny of attention
    blocks.l.input_norm1      layers.l.layernorm_before       Nin of attention
    blocks.l.post_norm2       layers.l.mlp_residual.norm_x    Nx of the MLP
    blocks.l.pre_norm2        layers.l.mlp_residual.norm_y    Ny of the MLP
    blocks.l.input_norm2      layers.l.layernorm_after        Nin of the MLP
    pre_norm                  layernorm.readout.norm_x
    post_norm                 layernorm.readout.norm_y
    final_norm                layernorm

In evaluation the two are the same function. In training they differ in two places:

- ``drop_rate`` is ``hidden_dropout_prob``: behind the embedding and behind both branches. The official MLP has that
  dropout between its two layers too, transformers' has none there.
- A distilled official model returns a pair, one output of each head. The one here always returns their mean as
  ``logits``, and beside it the pair as ``cls_logits`` and ``distillation_logits``.

``attn_drop_rate`` and ``drop_path_rate`` mean what ``attention_probs_dropout_prob`` and ``drop_path_rate`` mean.
Without classes (``num_classes=0``) there is no head, and ``logits`` are the last hidden state of its token.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..hosts import build
from ..residual import ConfigError
from . import weights
from .weights import Names, fill, made, parameter_names, refuse_unknown, require

__all__ = ["load", "official_names", "training_arguments"]

log = logging.getLogger(__name__)

# Width and heads of the models that the training script knows by name; all have 12 blocks.
_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
# The official constructor's defaults.
_DEFAULTS: dict[str, Any] = {
    "img_size": 224,
    "patch_size": 16,
    "in_chans": 3,
    "num_classes": 1000,
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "distilled": False,
    "drop_rate": 0.0,
    "attn_drop_rate": 0.0,
    "drop_path_rate": 0.0,
}
# Arguments that must be absent or what they are by default: any other changes the function.
_FIXED: dict[str, Any] = {
    "qk_scale": None,
    "representation_size": None,
    "embed_layer": None,
    "norm_layer": None,
    "act_layer": None,
}
# Arguments that say how the official code initialises.
_IRRELEVANT = {"weight_init"}


def load(state_dict: Mapping[str, Tensor], args: Mapping[str, Any]) -> nn.Module:
    """As :func:`siamesenorm.convert.load_official`."""
    refuse_unknown(args, _DEFAULTS.keys() | _FIXED.keys() | _IRRELEVANT, "DeiT")
    require({name: value for name, value in args.items() if not _is_default_layer(name, value)}, _FIXED)
    given = {**_DEFAULTS, **args}
    config = _config(given)
    if given["drop_rate"]:
        log.warning(
            "ViT has no dropout between the layers of its MLP, as drop_rate puts there: this model is the same in "
            "evaluation, but trains without it"
        )
    host, model_class = ("deit", "DeiTForImageClassificationWithTeacher") if given["distilled"] else ("vit", None)
    model: Any = made(
        lambda: build(host, config, "siamese", {"x": "post"}, model_class=model_class), config, state_dict
    )
    fill(model, _names(model), state_dict)
    model.config.dtype = model.dtype
    return model.eval()


def training_arguments(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """As :func:`siamesenorm.convert.official.training_arguments`: ``model``, such as ``deit_small_patch16_224``, names
    the sizes.
    """
    match = re.fullmatch(r"deit_(tiny|small|base)(_distilled)?_patch(\d+)_(\d+)", str(given.get("model")))
    classes = given.get("nb_classes")
    if match is None or type(classes) is not int:
        return None
    width, heads = _SIZES[match[1]]
    return {
        "img_size": given.get("input_size", int(match[4])),
        "patch_size": int(match[3]),
        "embed_dim": width,
        "num_heads": heads,
        "num_classes": classes,
        "distilled": match[2] is not None,
        "drop_rate": given.get("drop", 0.0),
        "drop_path_rate": given.get("drop_path", 0.0),
    }


def official_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As :func:`siamesenorm.convert.official_names`."""
    return weights.official_names(_names(model), tensors)


def _is_default_layer(name: str, value: Any) -> bool:
    """Whether a layer class that is given is the one taken where none is."""
    if name == "norm_layer" and isinstance(value, partial):
        return value.func is nn.LayerNorm and not value.args and value.keywords == {"eps": 1e-6}
    return name == "act_layer" and value is nn.GELU


def _config(given: Mapping[str, Any]) -> dict[str, Any]:
    """The ViT or DeiT config."""
    for name in ("in_chans", "embed_dim", "depth", "num_heads"):
        _check(name, given[name], type(given[name]) is int and given[name] >= 1, "a whole number of at least 1")
    classes, width, heads, ratio = (given[name] for name in ("num_classes", "embed_dim", "num_heads", "mlp_ratio"))
    _check("num_classes", classes, type(classes) is int and classes >= 0, "a whole number of at least 0")
    for name in ("qkv_bias", "distilled"):
        _check(name, given[name], isinstance(given[name], bool), "true or false")
    for name in ("drop_rate", "attn_drop_rate", "drop_path_rate"):
        _check(name, given[name], _is_number(given[name]) and 0 <= given[name] < 1, "at least 0 and below 1")
    if width % heads:
        raise ConfigError(f"embed_dim {width} is not a multiple of num_heads {heads}")
    _check("mlp_ratio", ratio, _is_number(ratio) and 1 <= width * ratio < math.inf, "a number that gives a width")
    return {
        "image_size": _size("img_size", given),
        "patch_size": _size("patch_size", given),
        "num_channels": given["in_chans"],
        "num_labels": classes,
        "hidden_size": width,
        "intermediate_size": int(width * ratio),
        "num_hidden_layers": given["depth"],
        "num_attention_heads": heads,
        "qkv_bias": given["qkv_bias"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "hidden_dropout_prob": given["drop_rate"],
        "attention_probs_dropout_prob": given["attn_drop_rate"],
        "drop_path_rate": given["drop_path_rate"],
    }


def _size(name: str, given: Mapping[str, Any]) -> int | list[int]:
    """One number for a square, which is all that position embeddings can be interpolated for, or height and width."""
    value = given[name]
    pair = list(value) if isinstance(value, list | tuple) else [value, value]
    fits = len(pair) == 2 and all(type(side) is int and side >= 1 for side in pair)
    _check(name, value, fits, "a whole number of at least 1, or two of them")
    return pair[0] if pair[0] == pair[1] else pair


def _check(name: str, value: Any, fits: bool, wanted: str) -> None:
    if not fits:
        raise ConfigError(f"official argument '{name}' must be {wanted}, not {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _names(model: Any) -> Names:
    """The official parameters, and those of ``model`` that they are."""
    body = model.base_model_prefix + "."
    embeddings = body + "embeddings."
    modules: dict[str, tuple[str, ...]] = {
        "patch_embed.proj": (embeddings + "patch_embeddings.projection",),
        "pre_norm": (body + "layernorm.readout.norm_x",),
        "post_norm": (body + "layernorm.readout.norm_y",),
        "final_norm": (body + "layernorm",),
    }
    for index in range(model.config.num_hidden_layers):
        theirs, ours = f"blocks.{index}.", f"{body}layers.{index}."
        modules |= {
            theirs + "attn.qkv": tuple(f"{ours}attention.{role}_proj" for role in "qkv"),
            theirs + "attn.proj": (ours + "attention.o_proj",),
            theirs + "mlp.fc1": (ours + "mlp.fc1",),
            theirs + "mlp.fc2": (ours + "mlp.fc2",),
            theirs + "post_norm1": (ours + "attn_residual.norm_x",),
            theirs + "pre_norm1": (ours + "attn_residual.norm_y",),
            theirs + "input_norm1": (ours + "layernorm_before",),
            theirs + "post_norm2": (ours + "mlp_residual.norm_x",),
            theirs + "pre_norm2": (ours + "mlp_residual.norm_y",),
            theirs + "input_norm2": (ours + "layernorm_after",),
        }
    names: Names = {"cls_token": (embeddings + "cls_token",), "pos_embed": (embeddings + "position_embeddings",)}
    if hasattr(model, "distillation_classifier"):
        names["dist_token"] = (embeddings + "distillation_token",)
        modules |= {"head": ("cls_classifier",), "head_dist": ("distillation_classifier",)}
    else:
        modules["head"] = ("classifier",)
    return names | parameter_names(model, modules)
