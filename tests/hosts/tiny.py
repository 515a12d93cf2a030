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
SCHEMES = {
    "post-pre": ("siamese", {"x": "post"}),
    "hybrid-pre": ("siamese", {"x": "hybrid"}),
    "pre": ("pre", {}),
    "post": ("post", {}),
}
SIAMESE = ("post-pre", "hybrid-pre")


def config(family: str, **changes):
    shape = dict(SHAPE)
    if family == "qwen2":
        del shape["head_dim"]
    if family == "mistral":
        shape["sliding_window"] = None
    return getattr(transformers, PREFIX[family] + "Config")(**{**shape, **changes})


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
    return scatter(getattr(transformers, PREFIX[family] + "ForCausalLM")(made), seed).eval()


def rewired(family: str = "llama", scheme: str = "post-pre", seed: int = 0, *, options=None, **changes):
    """The same, rewired, with the scheme's own parameters away from their start too."""
    name, given = SCHEMES[scheme]
    model = siamesenorm.rewire(host(family, seed, **changes), name, **{**given, **(options or {})})
    return scatter(model, seed + 1).eval()


@functools.cache
def shared(family: str = "llama", scheme: str = "post-pre"):
    """A model that no test may change."""
    return rewired(family, scheme)


def tokens(batch: int = 2, seq: int = 13, seed: int = 5):
    return torch.randint(2, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))
