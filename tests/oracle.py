"""Residual schemes and a whole language model in plain torch, from the equations alone: what the package is held to.

Nothing here imports the package. A norm and a branch are functions; streams are tensors; all of it works in whatever
dtype it is given, which is float64 in the tests. Only the RoPE tables are float32 first, as transformers and the
official code compute them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


def rms_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return rms_norm(x, weight, bias, eps)


def norm_of(weights: Mapping[str, Tensor], name: str, kind: str = "rms", eps: float = 1e-6) -> Function:
    """The norm whose parameters are ``name.weight`` and ``name.bias``, as far as there are any."""
    plain = {"rms": rms_norm, "layer": layer_norm}[kind]
    return lambda x: plain(x, weights.get(f"{name}.weight"), weights.get(f"{name}.bias"), eps)


@dataclass
class Sub:
    """One SiameseNorm sublayer: ``f`` without norms, the norms, and either c1 or Nx."""

    f: Function
    ny: Function
    nin: Function = identity
    nx: Function | None = None
    c1: Tensor | None = None
    c: float = 1.0
    keep_x: bool = False


def siamese(
    h: Tensor, subs: Sequence[Sub], nx_out: Function, ny_out: Function
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """The readout, and (X, Y) after every sublayer."""
    x = y = h
    states: list[tuple[Tensor, ...]] = []
    for sub in subs:
        read = sub.c1 * x if sub.nx is None else sub.nx(x)
        if sub.nx is not None and not sub.keep_x:
            x = read
        o = sub.f(sub.nin(read + sub.ny(y)))
        x, y = x + sub.c * o, y + o
        states.append((x, y))
    return nx_out(x) + ny_out(y), states


def pre(h: Tensor, subs: Sequence[tuple[Function, Function]]) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Pre-Norm over (branch, norm) pairs."""
    y, states = h, []
    for f, norm in subs:
        y = y + f(norm(y))
        states.append((y,))
    return y, states


def post(h: Tensor, subs: Sequence[tuple[Function, Function]]) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Post-Norm over (branch, norm) pairs."""
    x, states = h, []
    for f, norm in subs:
        x = norm(x + f(x))
        states.append((x,))
    return x, states


def scale(depth_scale: str, sublayer: int) -> float:
    """c at 0-based sublayer i of a stack of two-sublayer blocks."""
    return {
        "code": 1 / math.sqrt(2 * (sublayer // 2 + 1)),
        "paper": 1 / math.sqrt(sublayer + 1),
        "none": 1.0,
    }[depth_scale]


def rotate(x: Tensor, theta: float, positions: Tensor) -> Tensor:
    """RoPE, both halves rotated against each other. x: (batch, heads, seq, head_dim), positions: (batch, seq)."""
    d = x.shape[-1]
    frequency = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
    angle = positions[:, None, :, None].to(torch.float32) * torch.cat((frequency, frequency))
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return x * angle.cos().to(x.dtype) + torch.cat((-b, a), -1) * angle.sin().to(x.dtype)


@dataclass
class Attention:
    """Causal grouped-query attention over weights named ``q``, ``k``, ``v``, ``o`` with per-head norms where given."""

    weights: Mapping[str, Tensor]
    heads: int
    theta: float
    norms: Mapping[str, Function]
    keep: Tensor
    positions: Tensor

    def project(self, role: str, u: Tensor) -> Tensor:
        return F.linear(u, self.weights[f"{role}.weight"], self.weights.get(f"{role}.bias"))

    def __call__(self, u: Tensor) -> Tensor:
        batch, seq, _ = u.shape
        d = self.weights["q.weight"].shape[0] // self.heads
        q, k, v = (self.project(r, u).view(batch, seq, -1, d) for r in "qkv")
        q, k, v = (self.norms.get(r, identity)(t).transpose(1, 2) for r, t in zip("qkv", (q, k, v), strict=True))
        q, k = (rotate(t, self.theta, self.positions) for t in (q, k))
        k, v = (t.repeat_interleave(self.heads // t.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(d)
        scores = scores.masked_fill(~self.keep, -torch.inf)
        o = scores.softmax(-1) @ v
        return self.project("o", o.transpose(1, 2).reshape(batch, seq, -1))


def causal(seq: int, window: int | None = None, padding: Tensor | None = None) -> Tensor:
    """Who sees whom, (batch or 1, 1, seq, seq): the last ``window`` positions, and no padding (0 in ``padding``)."""
    i, j = torch.arange(seq)[:, None], torch.arange(seq)[None, :]
    keep = (j <= i) if window is None else (j <= i) & (j > i - window)
    keep = keep[None, None]
    return keep if padding is None else keep & padding[:, None, None, :].bool()


def swiglu(weights: Mapping[str, Tensor], gate: str, up: str, down: str) -> Function:
    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    return lambda u: linear(down, F.silu(linear(gate, u)) * linear(up, u))


def within(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def official_parameters(args: Mapping[str, Any], variant: str, seed: int = 0) -> dict[str, Tensor]:
    """Random parameters of an official language model, ``variant`` being hybrid, starred or pre; float64.

    Norm weights are drawn around 1 and biases around 0, so that a norm in the wrong place shows.
    """
    generator = torch.Generator().manual_seed(seed)
    width, heads = args["d_model"], args["n_heads"]
    head = width // heads
    kv = args.get("n_kv_heads") or heads
    inner = args.get("mlp_hidden_size") or args["mlp_ratio"] * width
    rows = args.get("embedding_size") or args["vocab_size"]
    bias = args["include_bias"]
    norm_bias = bias if args.get("bias_for_layer_norm") is None else args["bias_for_layer_norm"]
    weights: dict[str, Tensor] = {}

    def draw(*shape: int, around: float = 0.0, spread: float = 0.2) -> Tensor:
        return (around + spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()

    def linear(name: str, out: int, into: int) -> None:
        weights[name + ".weight"] = draw(out, into)
        if bias:
            weights[name + ".bias"] = draw(out)

    def norm(name: str, size: int, affine: bool = args.get("layer_norm_with_affine", True)) -> None:
        if affine:
            weights[name + ".weight"] = draw(size, around=1.0)
            if norm_bias:
                weights[name + ".bias"] = draw(size)

    weights["wte.weight"] = draw(rows, width, spread=1.0)
    for index in range(args["n_layers"]):
        block = f"blocks.{index}."
        linear(block + "att_proj", width + 2 * kv * head, width)
        linear(block + "attn_out", width, width)
        linear(block + "ff_proj", inner, width)
        linear(block + "ff_out", width, inner // 2)
        norm(block + "ff_norm", width)
        if variant == "pre":
            norm(block + "attn_norm", width)
            continue
        norm(block + "ff_y_norm", width)
        norm(block + "ff_input_norm", width)
        norm(block + "attn_y_norm", width)
        if variant == "starred" and index == 0:
            norm(block + "attn_norm", width)
        else:
            weights[block + "c1"] = draw(width, around=1.0)
        for role in "qkv":
            norm(f"{block}{role}_norm", head, args.get("attention_layer_norm_with_affine", True))
    norm("ln_f", width)
    if variant != "pre":
        norm("ln_y_f", width)
        norm("ln_final_f", width)
    if not args["weight_tying"]:
        weights["ff_out.weight"] = draw(rows, width)
    return {"transformer." + name: tensor for name, tensor in weights.items()}


def official_lm(
    parameters: Mapping[str, Tensor], args: Mapping[str, Any], variant: str, tokens: Tensor
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Logits (batch, seq, vocab) of an official language model, and its streams after every block."""
    w = within(parameters, "transformer.")
    width, heads = args["d_model"], args["n_heads"]
    kv = (args.get("n_kv_heads") or heads) * width // heads
    kind = {"default": "layer", "rms": "rms"}[args["layer_norm_type"]]
    seq = tokens.shape[1]

    def norm(name: str) -> Function:
        return norm_of(w, name, kind, args.get("layer_norm_eps", 1e-5))

    attentions, mlps = [], []
    for index in range(args["n_layers"]):
        block = f"blocks.{index}."
        parts = {}
        for suffix in ("weight", "bias"):
            if (joined := w.get(f"{block}att_proj.{suffix}")) is not None:
                parts |= {f"{r}.{suffix}": t for r, t in zip("qkv", joined.split((width, kv, kv)), strict=True)}
                parts[f"o.{suffix}"] = w[f"{block}attn_out.{suffix}"]
            if (joined := w.get(f"{block}ff_proj.{suffix}")) is not None:
                up, gate = joined.chunk(2)
                parts |= {f"up.{suffix}": up, f"gate.{suffix}": gate, f"down.{suffix}": w[f"{block}ff_out.{suffix}"]}
        norms = {} if variant == "pre" else {r: norm(f"{block}{r}_norm") for r in "qkv"}
        positions = torch.arange(seq)[None]
        attentions.append(Attention(parts, heads, args.get("rope_theta", 10000), norms, causal(seq), positions))
        mlps.append(swiglu(parts, "gate", "up", "down"))

    h = w["wte.weight"][tokens]
    if variant == "pre":
        pairs = []
        for index in range(args["n_layers"]):
            pairs += [
                (attentions[index], norm(f"blocks.{index}.attn_norm")),
                (mlps[index], norm(f"blocks.{index}.ff_norm")),
            ]
        out, states = pre(h, pairs)
        out = norm("ln_f")(out)
    else:
        subs = []
        for index in range(args["n_layers"]):
            block = f"blocks.{index}."
            c = 1 / math.sqrt(2 * (index + 1))
            starred = variant == "starred" and index == 0
            nx = norm(block + "attn_norm") if starred else None
            subs += [
                Sub(attentions[index], norm(block + "attn_y_norm"), nx=nx, c1=w.get(block + "c1"), c=c, keep_x=starred),
                Sub(
                    mlps[index],
                    norm(block + "ff_y_norm"),
                    norm(block + "ff_input_norm"),
                    norm(block + "ff_norm"),
                    c=c,
                    keep_x=starred,
                ),
            ]
        out, states = siamese(h, subs, norm("ln_f"), norm("ln_y_f"))
        out = norm("ln_final_f")(out)
    head = w["wte.weight"] if args["weight_tying"] else w["ff_out.weight"]
    return out @ head.T, states[1::2]


def hf_lm(
    weights: Mapping[str, Tensor],
    config: Any,
    scheme: str,
    tokens: Tensor,
    *,
    x: str = "post",
    window: int | None = None,
    padding: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """The same for a rewired model of transformers with Llama's names, given its state dict.

    Head norms are those that ``weights`` holds; a Qwen3 has its own q and k norms whatever the scheme.
    """
    w = weights
    eps = config.rms_norm_eps
    seq = tokens.shape[1]
    positions = torch.arange(seq).expand(tokens.shape)
    if padding is not None:
        positions = (padding.cumsum(-1) - 1).clamp_min(0)
    keep = causal(seq, window, padding)
    if padding is not None:
        # A padded query sees itself, so that its softmax is a number; nobody looks at it.
        keep = keep | torch.eye(seq, dtype=torch.bool)

    h = w["model.embed_tokens.weight"][tokens]
    pairs, subs = [], []
    starred_stack = options.get("first_block_pre", False)
    for index in range(config.num_hidden_layers):
        block = f"model.layers.{index}."
        own = within(w, block + "self_attn.")
        parts = {name.replace("_proj", ""): tensor for name, tensor in own.items() if "_proj" in name}
        norms = {r: norm_of(own, f"{r}_norm", eps=eps) for r in "qkv" if f"{r}_norm.weight" in own}
        theta = config.rope_parameters["rope_theta"]
        attend = Attention(parts, config.num_attention_heads, theta, norms, keep, positions)
        mlp = swiglu(within(w, block + "mlp."), "gate_proj", "up_proj", "down_proj")
        for branch, place, nin in ((attend, "attn", "input_layernorm"), (mlp, "mlp", "post_attention_layernorm")):
            residual = f"{block}{place}_residual."
            if scheme == "pre":
                pairs.append((branch, norm_of(w, block + nin, eps=eps)))
            elif scheme == "post":
                pairs.append((branch, norm_of(w, residual + "norm", eps=eps)))
            else:
                hybrid = x == "hybrid" and place == "attn"
                starred = starred_stack and index == 0
                bare = hybrid or not options.get("normalized_input", True)
                subs.append(
                    Sub(
                        branch,
                        norm_of(w, residual + "norm_y", eps=eps),
                        identity if bare else norm_of(w, block + nin, eps=eps),
                        None if hybrid and not starred else norm_of(w, residual + "norm_x", eps=eps),
                        w.get(residual + "c1"),
                        scale(options.get("depth_scale", "code"), len(subs)),
                        starred,
                    )
                )
    if scheme == "siamese":
        readout = "model.norm.readout."
        out, states = siamese(h, subs, norm_of(w, readout + "norm_x", eps=eps), norm_of(w, readout + "norm_y", eps=eps))
    else:
        out, states = {"pre": pre, "post": post}[scheme](h, pairs)
    out = norm_of(w, "model.norm", eps=eps)(out)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return out @ head.T, states[1::2]
