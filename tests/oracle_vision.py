"""Image classifiers in plain torch, from the equations alone: the official DeiT, and a rewired ViT or DeiT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests import oracle
from tests.drawn import Drawn
from tests.oracle import Attention, Function, Part, Stack, Sub, host_norm, norm_of, within


def linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def mlp(weights: Mapping[str, Tensor], prefix: str) -> Function:
    return lambda u: linear(weights, prefix + "fc2", gelu(linear(weights, prefix + "fc1", u)))


def attention(parts: Mapping[str, Tensor], heads: int, seq: int, norms: Mapping[str, Function]) -> Attention:
    """Every token sees every token, and there is no RoPE."""
    positions = torch.arange(seq)[None]
    return Attention(parts, heads, None, norms, torch.ones(1, 1, seq, seq, dtype=torch.bool), positions)


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def embed(
    images: Tensor, weight: Tensor, bias: Tensor, tokens: Sequence[Tensor], positions: Tensor, patch: tuple[int, int]
) -> Tensor:
    """(batch, channels, height, width) to (batch, tokens and patches row by row, width)."""
    rows = images.unfold(2, patch[0], patch[0]).unfold(3, patch[1], patch[1])
    patches = rows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    h = patches @ weight.flatten(1).T + bias
    return torch.cat((*(token.expand(len(images), -1, -1) for token in tokens), h), 1) + positions


def official_parameters(args: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random float64 parameters of an official DeiT; norms are drawn around 1 and 0, so that a misplaced one shows."""
    width, inner = args["embed_dim"], int(args["embed_dim"] * args["mlp_ratio"])
    (height, across), patch = pair(args["img_size"]), pair(args["patch_size"])
    extra = 2 if args["distilled"] else 1
    weights = Drawn(seed)
    weights.draw("cls_token", 1, 1, width, spread=1.0)
    if args["distilled"]:
        weights.draw("dist_token", 1, 1, width, spread=1.0)
    weights.draw("pos_embed", 1, (height // patch[0]) * (across // patch[1]) + extra, width, spread=1.0)
    weights.both("patch_embed.proj", width, args["in_chans"], *patch)
    for index in range(args["depth"]):
        block = f"blocks.{index}."
        for name in ("pre_norm1", "post_norm1", "input_norm1", "pre_norm2", "post_norm2", "input_norm2"):
            weights.both(block + name, width, around=1.0)
        weights.both(block + "attn.qkv", 3 * width, width, bias=args["qkv_bias"])
        weights.both(block + "attn.proj", width, width)
        weights.both(block + "mlp.fc1", inner, width)
        weights.both(block + "mlp.fc2", width, inner)
    for name in ("pre_norm", "post_norm", "final_norm"):
        weights.both(name, width, around=1.0)
    if args["num_classes"]:
        for name in ("head", "head_dist")[:extra]:
            weights.both(name, args["num_classes"], width)
    return weights


def official_deit(
    w: Mapping[str, Tensor], args: Mapping[str, Any], images: Tensor
) -> tuple[Tensor, list[tuple[Tensor, ...]], Tensor]:
    """An official DeiT in evaluation: logits (batch, classes), streams after every block, and the last hidden state."""

    def norm(name: str) -> Function:
        return norm_of(w, name, "layer", 1e-6)

    tokens = [w[name] for name in ("cls_token", "dist_token") if name in w]
    h = embed(
        images.to(w["pos_embed"].dtype),
        w["patch_embed.proj.weight"],
        w["patch_embed.proj.bias"],
        tokens,
        w["pos_embed"],
        pair(args["patch_size"]),
    )
    subs = []
    for index in range(args["depth"]):
        block = f"blocks.{index}."
        parts = {}
        for suffix in ("weight", "bias"):
            if (joined := w.get(f"{block}attn.qkv.{suffix}")) is not None:
                parts |= {f"{role}.{suffix}": third for role, third in zip("qkv", joined.chunk(3), strict=True)}
            parts[f"o.{suffix}"] = w[f"{block}attn.proj.{suffix}"]
        branches = (attention(parts, args["num_heads"], h.shape[1], {}), mlp(w, block + "mlp."))
        c = 1 / math.sqrt(2 * (index + 1))
        subs += [
            Sub(f, norm(f"{block}pre_norm{i}"), norm(f"{block}input_norm{i}"), norm(f"{block}post_norm{i}"), c=c)
            for i, f in enumerate(branches, start=1)
        ]
    out, states = oracle.siamese(h, subs, norm("pre_norm"), norm("post_norm"))
    out = norm("final_norm")(out)
    heads = ("head", "head_dist")[: len(tokens)]
    logits = [linear(w, name, out[:, i]) if args["num_classes"] else out[:, i] for i, name in enumerate(heads)]
    return sum(logits) / len(logits), states[1::2], out


def hf_vit(
    weights: Mapping[str, Tensor],
    config: Any,
    scheme: str,
    images: Tensor,
    *,
    positions: Tensor | None = None,
    factors: Sequence[Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, list[tuple[Tensor, ...]], Tensor]:
    """The same for a rewired classifier of transformers, given its parameters.

    ``positions`` stand in for its own where the image is of another size; ``factors`` multiply what the branches say,
    one for each sublayer.
    """
    family = oracle.family_of(config)
    body = family + "."
    w = within(weights, body)
    tokens = [w[name] for name in ("embeddings.cls_token", "embeddings.distillation_token") if name in w]
    h = embed(
        images,
        w["embeddings.patch_embeddings.projection.weight"],
        w["embeddings.patch_embeddings.projection.bias"],
        tokens,
        w["embeddings.position_embeddings"] if positions is None else positions,
        pair(config.patch_size),
    )

    def norm(name: str) -> Function:
        return host_norm(w, config, name)

    parts: list[Part] = []
    for index in range(config.num_hidden_layers):
        block = f"layers.{index}."
        own = within(w, block + "attention.")
        norms = {role: oracle.head_norm(own, config, role) for role in "qkv"}
        attend = attention(oracle.qkvo(own, config), config.num_attention_heads, h.shape[1], norms)
        for residual, f, nin in (
            ("attn_residual.", attend, "layernorm_before"),
            ("mlp_residual.", mlp(w, block + "mlp."), "layernorm_after"),
        ):
            if factors is not None:
                factor, bare = factors[len(parts)], f
                f = lambda u, factor=factor, bare=bare: factor * bare(u)  # noqa: E731
            parts.append(
                Part(
                    [(f, norm(block + nin))],
                    within(w, block + residual),
                    lambda name, prefix=block + residual: norm(prefix + name),
                    index,
                    residual == "attn_residual.",
                )
            )
    stack = Stack(parts, config.num_hidden_layers, lambda name: norm(f"layernorm.readout.{name}"))
    out, states = oracle.ORACLES[scheme](h, stack, **options)
    out = norm("layernorm")(out)
    if "cls_classifier.weight" in weights:
        heads = ("cls_classifier", "distillation_classifier")
        logits = sum(F.linear(out[:, i], *_both(weights, name)) for i, name in enumerate(heads)) / 2
    else:
        logits = F.linear(out[:, 0], *_both(weights, "classifier"))
    return logits, states[1::2], out


def _both(weights: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return weights[name + ".weight"], weights[name + ".bias"]
