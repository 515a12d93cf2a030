"""Tiny models of every family, away from their initial values, so that what is misplaced shows."""

from __future__ import annotations

import functools

import torch
import transformers

import siamesenorm

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PREFIX = {
    "gemma": "Gemma",
    "gpt2": "GPT2",
    "gpt_neox": "GPTNeoX",
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmo": "Olmo",
    "olmoe": "Olmoe",
    "phi": "Phi",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "stablelm": "StableLm",
}
MOE = ("mixtral", "olmoe", "qwen3_moe")
_HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# The families that are not Llama by another name, and the forms that they come in.
FORMS: dict[str, tuple[str, dict[str, object]]] = {
    "olmo": ("olmo", {"clip_qkv": 0.6}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-qk": ("stablelm", {"qk_layernorm": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "gpt_neox": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox-parallel": ("gpt_neox", {"rope_parameters": _HALF_ROTATED}),
    "gpt2": ("gpt2", {}),
    "phi": ("phi", {}),
    "phi-qk": ("phi", {"qk_layernorm": True}),
    "gemma": ("gemma", {}),
    "olmoe": ("olmoe", {"clip_qkv": 1.5}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe-mixed": ("qwen3_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 1}),
    "mixtral": ("mixtral", {}),
}
PARALLEL = ("stablelm-parallel", "gpt_neox-parallel", "phi", "phi-qk")
SERIAL = tuple(form for form in FORMS if form not in PARALLEL)
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
_NO_HEAD_DIM = ("gpt2", "gpt_neox", "olmo", "olmoe", "phi", "qwen2", "stablelm")
_CHANGES: dict[str, dict[str, object]] = {
    "gemma": {"head_dim": 16, "tie_word_embeddings": False},
    "gpt2": {"n_inner": 48, "tie_word_embeddings": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mistral": {"sliding_window": None},
    "mixtral": _ROUTED,
    "olmoe": _ROUTED,
    "qwen3_moe": {**_ROUTED, "head_dim": 16, "moe_intermediate_size": 24},
}
SCHEMES = {
    "post-pre": ("siamese", {"x": "post"}),
    "hybrid-pre": ("siamese", {"x": "hybrid"}),
    "pre": ("pre", {}),
    "post": ("post", {}),
}
SIAMESE = ("post-pre", "hybrid-pre")
# What the paper compares with, and its ablations: a suite of its own runs each (test_schemes.py).
BASELINES: dict[str, tuple[str, dict[str, object]]] = {
    "peri": ("peri", {}),
    "sandwich": ("peri", {"normalized_embedding": False}),
    "reordered": ("reordered", {}),
    "hybridnorm": ("hybridnorm", {}),
    "hybridnorm*": ("hybridnorm", {"first_block_pre": True}),
    "mixln": ("mixln", {}),
    "deepnorm": ("deepnorm", {}),
    "lns": ("lns", {}),
    "spannorm": ("spannorm", {}),
    "keel": ("keel", {}),
    "resi_dual": ("resi_dual", {}),
    "topology-resi_dual": ("siamese", {"topology": "resi_dual", "depth_scale": "none"}),
    "topology-single": ("siamese", {"topology": "single", "x": "hybrid"}),
}


def shape(family: str) -> dict[str, object]:
    """The keys of a family's config that make it tiny."""
    made = {**SHAPE, **_CHANGES.get(family, {})}
    if family in _NO_HEAD_DIM:
        del made["head_dim"]
    if family in ("gpt2", "gpt_neox"):
        del made["num_key_value_heads"]
    if family == "gpt2":
        del made["intermediate_size"]
    return made


def config(family: str, **changes):
    return getattr(transformers, PREFIX[family] + "Config")(**{**shape(family), **changes})


def model_class(family: str):
    return getattr(transformers, PREFIX[family] + ("LMHeadModel" if family == "gpt2" else "ForCausalLM"))


def scatter(model, seed: int = 0):
    """Every parameter away from its start, norms around 1 and maps large enough that a branch matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.add_((0.2 * noise).to(parameter.dtype))
    return model


def host(family: str = "llama", seed: int = 0, **changes):
    """A plain model of transformers."""
    made = config(family, **changes)
    torch.manual_seed(seed)
    return scatter(model_class(family)(made), seed).eval()


def rewired(family: str = "llama", scheme: str = "post-pre", seed: int = 0, *, options=None, **changes):
    """The same, rewired, with the scheme's own parameters away from their start too."""
    name, given = {**SCHEMES, **BASELINES}[scheme]
    model = siamesenorm.rewire(host(family, seed, **changes), name, **{**given, **(options or {})})
    return scatter(model, seed + 1).eval()


@functools.cache
def shared(family: str = "llama", scheme: str = "post-pre"):
    """A model that no test may change."""
    return rewired(family, scheme)


@functools.cache
def plain(form: str):
    """A model of transformers in one of its :data:`FORMS`, that no test may change."""
    family, changes = FORMS[form]
    return host(family, **changes)


@functools.cache
def formed(form: str, scheme: str):
    """The same, rewired and with every parameter away from its start, that no test may change."""
    family, changes = FORMS[form]
    return rewired(family, scheme, **changes)


def tokens(batch: int = 2, seq: int = 13, seed: int = 5):
    return torch.randint(2, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))
