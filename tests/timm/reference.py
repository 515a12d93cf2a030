"""timm's vision transformer under any scheme in plain torch, from the equations alone and a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.oracle import ORACLES, Attention, Function, Part, Stack, identity, norm_of, within
from tests.oracle_streams import extras


def vit(
    weights: Mapping[str, Tensor],
    images: Tensor,
    scheme: str,
    *,
    heads: int,
    eps: float,
    average: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, list[tuple[Tensor, ...]]]:
    """Logits (batch, classes), features behind the blocks (batch, tokens, d), and the streams after every block."""
    w = weights

    def norm(name: str) -> Function:
        return norm_of(w, name, "layer", eps) if f"{name}.weight" in w else identity

    prefix = [w[name].expand(len(images), -1, -1) for name in ("cls_token", "reg_token") if name in w]
    blocks = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    parts = []
    for index in range(blocks):
        block = f"blocks.{index}."
        for kind, number, f in (("attn", 1, attention(w, block, heads, eps)), ("mlp", 2, mlp(w, block))):
            gamma = w.get(f"{block}ls{number}.gamma")
            residual = f"{block}{kind}_residual."
            parts.append(
                Part(
                    [(f if gamma is None else lambda u, f=f, gamma=gamma: gamma * f(u), norm(f"{block}norm{number}"))],
                    within(w, residual),
                    lambda name, residual=residual: norm(residual + name),
                    index,
                    kind == "attn",
                )
            )
    stack = Stack(parts, blocks, lambda name: norm(f"norm.readout.{name}"))
    more = extras(scheme, eps, w, "norm.readout.") if scheme in ("hyper", "mhc", "attnres", "mgr") else {}
    out, states = ORACLES[scheme](norm("norm_pre")(embedded(w, images, prefix)), stack, **options, **more)
    features = norm("norm")(out)
    pooled = features[:, sum(part.shape[1] for part in prefix) :].mean(1) if average else features[:, 0]
    return F.linear(norm("fc_norm")(pooled), w["head.weight"], w["head.bias"]), features, states[1::2]


def embedded(w: Mapping[str, Tensor], images: Tensor, prefix: list[Tensor]) -> Tensor:
    """Patches, tokens before them, and positions, of the patches alone where there are no more of them."""
    kernel = w["patch_embed.proj.weight"]
    x = F.unfold(images, kernel.shape[-1], stride=kernel.shape[-1]).mT @ kernel.flatten(1).T
    x = x + w["patch_embed.proj.bias"] if "patch_embed.proj.bias" in w else x
    positions = w["pos_embed"]
    if positions.shape[1] == x.shape[1]:
        return torch.cat([*prefix, x + positions], 1)
    return torch.cat([*prefix, x], 1) + positions


def attention(w: Mapping[str, Tensor], block: str, heads: int, eps: float) -> Function:
    own = within(w, f"{block}attn.")
    maps = {
        f"{role}.{part}": tensor
        for part in ("weight", "bias")
        for role, tensor in zip("qkvo", (*own[f"qkv.{part}"].chunk(3), own[f"proj.{part}"]), strict=True)
    }
    norms = {r: norm_of(own, f"{r}_norm", "layer", eps) for r in "qkv" if f"{r}_norm.weight" in own}
    everyone = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    attend = Attention(maps, heads, None, norms, everyone, torch.zeros(1, 1))
    if "norm.weight" not in own:
        return attend
    # Before the output projection, which is taken out for it.
    out, bias = own["proj.weight"], own["proj.bias"]
    bare = {**maps, "o.weight": torch.eye(out.shape[1], dtype=out.dtype), "o.bias": torch.zeros_like(bias)}
    inner = Attention(bare, heads, None, norms, everyone, torch.zeros(1, 1))
    after = norm_of(own, "norm", "layer", eps)
    return lambda u: F.linear(after(inner(u)), out, bias)


def mlp(w: Mapping[str, Tensor], block: str) -> Function:
    own = within(w, f"{block}mlp.")
    return lambda u: F.linear(
        F.gelu(F.linear(u, own["fc1.weight"], own["fc1.bias"])), own["fc2.weight"], own["fc2.bias"]
    )
