"""Official language models: hybrid-pre, HybridNorm, both starred, and Pre-Norm, hosted by transformers' Llama.

The official code keeps q, k and v in one matrix and both halves of SwiGLU in another (the gate is the second half);
what is left differs in names alone. Which norm is which:

    official                 here
    blocks.l.attn_y_norm     layers.l.attn_residual.norm_y     Ny of attention
    blocks.l.attn_norm       layers.l.attn_residual.norm_x     Nx of attention (first block of hybrid-pre* alone)
    blocks.l.c1              layers.l.attn_residual.c1
    blocks.l.ff_norm         layers.l.mlp_residual.norm_x      Nx of the MLP
    blocks.l.ff_y_norm       layers.l.mlp_residual.norm_y      Ny of the MLP
    blocks.l.ff_input_norm   layers.l.post_attention_layernorm Nin of the MLP
    ln_f, ln_y_f, ln_final_f norm.readout.norm_x, norm.readout.norm_y, norm

A Pre-Norm model has attn_norm, ff_norm and ln_f alone, and they are the host's own. So they are in the first block of
HybridNorm*; every other block of HybridNorm has no attn_norm, and its ff_norm is layers.l.mlp_residual.norm.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..hosts import build, scheme_of
from ..residual import ConfigError
from . import weights
from .weights import Names, fill, made, parameter_names, refuse_unknown, require

__all__ = ["load", "official_names"]

log = logging.getLogger(__name__)

# Arguments whose value must be the one given, or absent: any other changes the function in a way Llama cannot follow.
_FIXED: dict[str, Any] = {
    "alibi": False,
    "rope": True,
    "clip_qkv": None,
    "activation_type": "swiglu",
    "block_type": "sequential",
    "attention_layer_norm": False,
    "embedding_layer_norm": False,
    "scale_logits": False,
    "norm_after": False,
    "use_context_norm": False,
    "ternary": False,
}
# What makes the hybrid-pre and HybridNorm models of the official code what they are.
_HYBRID: dict[str, Any] = {
    "use_query_norm": True,
    "use_key_norm": True,
    "use_value_norm": True,
    "attn_norm": False,
    "ffn_norm": True,
    "attn_residual_after_norm": False,
    "ffn_residual_after_norm": True,
    "attention_layer_norm_with_affine": True,
}
_NUMBERS = {"mlp_hidden_size": int | float | None, "mlp_ratio": int | float | None, "rope_theta": int | float}
_STARRED = {0: {"attn_norm": True, "ffn_residual": False}}
_USED = {
    "d_model", "n_heads", "n_kv_heads", "multi_query_attention", "n_layers", "mlp_ratio", "mlp_hidden_size",
    "rope_theta", "attention_dropout", "residual_dropout", "embedding_dropout", "layer_norm_type",
    "layer_norm_with_affine", "layer_norm_eps", "max_sequence_length", "include_bias", "bias_for_layer_norm",
    "vocab_size", "embedding_size", "weight_tying", "eos_token_id", "norm_pos_special_config",
}  # fmt: skip
# Arguments that say how the official code computes or initialises, and not what.
_IRRELEVANT = {
    "block_group_size", "alibi_bias_max", "rope_full_precision", "flash_attention", "pad_token_id", "init_device",
    "init_fn", "init_std", "init_cutoff_factor", "precision", "scale_emb_init", "emb_init_std",
}  # fmt: skip


def load(state_dict: Mapping[str, Tensor], args: Mapping[str, Any]) -> nn.Module:
    """As :func:`siamesenorm.convert.load_official`."""
    refuse_unknown(args, _USED | _IRRELEVANT | _FIXED.keys() | _HYBRID.keys(), "language model")
    scheme, options = _scheme(state_dict, args)
    require(args, _FIXED)
    for name in ("residual_dropout", "embedding_dropout"):
        if args.get(name):
            log.warning("Llama has no %s: this model is the same in evaluation, but trains without it", name)
    config = _config(args)
    model: Any = made(lambda: build("llama", config, scheme, options), config, state_dict)
    fill(model, _names(model), state_dict)
    model.tie_weights()
    model.config.dtype = model.dtype
    return model.eval()


def official_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As :func:`siamesenorm.convert.official_names`."""
    return weights.official_names(_names(model), tensors)


def _scheme(state_dict: Mapping[str, Tensor], args: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The scheme and its options; parameter names tell the variant."""
    special = _special(args.get("norm_pos_special_config"))
    # Without affine parts, c1 is all that is left to see of hybrid-pre.
    siamese = any(name.endswith(("attn_y_norm.weight", "ln_y_f.weight", ".c1")) for name in state_dict)
    if siamese or "transformer.blocks.0.q_norm.weight" in state_dict:
        require(args, _HYBRID)
        if special not in ({}, _STARRED):
            raise ConfigError(f"norm_pos_special_config {special} is not supported: the starred form is {_STARRED}")
        starred = {"first_block_pre": bool(special)}
        return ("siamese", {"x": "hybrid", **starred}) if siamese else ("hybridnorm", starred)
    if special:
        raise ConfigError("norm_pos_special_config has no meaning for a Pre-Norm model")
    require(args, dict.fromkeys(("use_query_norm", "use_key_norm", "use_value_norm"), False))
    return "pre", {}


def _special(value: Any) -> dict[Any, Any]:
    """The literal between underscores that ``norm_pos_special_config`` is; it is never evaluated as code."""
    if value in (None, ""):
        return {}
    try:
        parsed = ast.literal_eval(str(value).strip("_"))
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"norm_pos_special_config {value!r} is no literal between underscores") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"norm_pos_special_config {value!r} is no mapping of block to settings")
    return parsed


def _config(args: Mapping[str, Any]) -> dict[str, Any]:
    """The Llama config. Defaults are the official constructor's."""
    for name in ("d_model", "n_heads", "n_layers", "vocab_size"):
        if not isinstance(args.get(name), int):
            raise ConfigError(f"official argument '{name}' must be given, as a whole number")
    for name, kind in _NUMBERS.items():
        if name in args and not isinstance(args[name], kind):
            raise ConfigError(f"official argument '{name}' must be a number, not {args[name]!r}")
    width, heads = args["d_model"], args["n_heads"]
    if width % heads:
        raise ConfigError(f"d_model {width} is not a multiple of n_heads {heads}")
    kv_heads = args.get("n_kv_heads") or (1 if args.get("multi_query_attention") else heads)
    bias = args.get("include_bias", True)
    tied = args.get("weight_tying", True)
    if bias and not tied:
        raise ConfigError("include_bias without weight_tying puts a bias on the output projection, which Llama lacks")
    norm_type = args.get("layer_norm_type", "default")
    if norm_type not in ("default", "rms"):
        raise ConfigError(f"layer_norm_type {norm_type!r} is not supported, only 'default' (LayerNorm) and 'rms'")
    norm_bias = args.get("bias_for_layer_norm")
    return {
        "vocab_size": args.get("embedding_size") or args["vocab_size"],
        "hidden_size": width,
        "intermediate_size": (args.get("mlp_hidden_size") or args.get("mlp_ratio", 4) * width) // 2,
        "num_hidden_layers": args["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "max_position_embeddings": args.get("max_sequence_length", 1024),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(args.get("rope_theta", 10000))},
        "rms_norm_eps": args.get("layer_norm_eps", 1e-5),
        "attention_bias": bias,
        "mlp_bias": bias,
        "attention_dropout": args.get("attention_dropout", 0.1),
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": args.get("eos_token_id"),
        "residual_norm": {
            "kind": "layer" if norm_type == "default" else "rms",
            "bias": bool(bias if norm_bias is None else norm_bias),
            "affine": args.get("layer_norm_with_affine", True),
            "affine_heads": args.get("attention_layer_norm_with_affine", True),
        },
    }


def _names(model: Any) -> Names:
    """The official parameters, and those of ``model`` that they are."""
    scheme = scheme_of(model.config).name
    modules: dict[str, tuple[str, ...]] = {"wte": ("model.embed_tokens",)}
    for index in range(model.config.num_hidden_layers):
        theirs, ours = f"blocks.{index}.", f"model.layers.{index}."
        modules |= {
            theirs + "att_proj": tuple(f"{ours}self_attn.{role}_proj" for role in "qkv"),
            theirs + "attn_out": (ours + "self_attn.o_proj",),
            theirs + "ff_proj": (ours + "mlp.up_proj", ours + "mlp.gate_proj"),
            theirs + "ff_out": (ours + "mlp.down_proj",),
        }
        # Norms that this form of a model does not have are left out below, where their parameters are looked for.
        modules |= {f"{theirs}{role}_norm": (f"{ours}self_attn.{role}_norm",) for role in "qkv"}
        if scheme == "siamese":
            modules |= {
                theirs + "attn_y_norm": (ours + "attn_residual.norm_y",),
                theirs + "attn_norm": (ours + "attn_residual.norm_x",),
                theirs + "ff_norm": (ours + "mlp_residual.norm_x",),
                theirs + "ff_y_norm": (ours + "mlp_residual.norm_y",),
                theirs + "ff_input_norm": (ours + "post_attention_layernorm",),
            }
            continue
        is_pre = hasattr(model.model.layers[index], "post_attention_layernorm")
        modules |= {
            theirs + "attn_norm": (ours + "input_layernorm",),
            theirs + "ff_norm": (ours + ("post_attention_layernorm" if is_pre else "mlp_residual.norm"),),
        }
    if scheme == "siamese":
        modules |= {
            "ln_f": ("model.norm.readout.norm_x",),
            "ln_y_f": ("model.norm.readout.norm_y",),
            "ln_final_f": ("model.norm",),
        }
    else:
        modules["ln_f"] = ("model.norm",)
    if not model.config.tie_word_embeddings:
        modules["ff_out"] = ("lm_head",)

    names = parameter_names(model, {f"transformer.{official}": ours for official, ours in modules.items()})
    parameters = dict(model.named_parameters())
    for index in range(model.config.num_hidden_layers):
        if (c1 := f"model.layers.{index}.attn_residual.c1") in parameters:
            names[f"transformer.blocks.{index}.c1"] = (c1,)
    return names
