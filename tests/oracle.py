"""Residual schemes and a whole language model in plain torch, from the equations alone: what the package is held to.

Nothing here imports the package. A norm and a branch are functions; streams are tensors; all of it works in whatever
dtype it is given, which is float64 in the tests. Only the RoPE tables are float32 first, as transformers and the
official code compute them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    h: Tensor, subs: Sequence[Sub], nx_out: Function, ny_out: Function, topology: str = "siamese"
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """The readout, and (X, Y) after every sublayer; Y is not read by the branches, or is not there, in an ablation."""
    x = y = h
    states: list[tuple[Tensor, ...]] = []
    for sub in subs:
        read = sub.c1 * x if sub.nx is None else sub.nx(x)
        if sub.nx is not None and not sub.keep_x:
            x = read
        o = sub.f(sub.nin(read + sub.ny(y) if topology == "siamese" else read))
        x, y = x + sub.c * o, y + o
        states.append((x,) if topology == "single" else (x, y))
    return nx_out(x) if topology == "single" else nx_out(x) + ny_out(y), states


def scale(depth_scale: str, sublayer: int) -> float:
    """c at 0-based sublayer i of a stack of two-sublayer blocks."""
    return {
        "code": 1 / math.sqrt(2 * (sublayer // 2 + 1)),
        "paper": 1 / math.sqrt(sublayer + 1),
        "none": 1.0,
    }[depth_scale]


@dataclass
class Part:
    """One sublayer: what a scheme is given of it, whatever model it stands in.

    ``branches`` are functions without norms, each with the host's norm of its own; there are two where attention and
    MLP run in parallel, and their sum is what the sublayer adds. ``weights`` are the parameters that the scheme itself
    has here, and ``norm`` makes one of its norms by name.
    """

    branches: Sequence[tuple[Function, Function]]
    weights: Mapping[str, Tensor]
    norm: Callable[[str], Function]
    block: int
    attention: bool

    def bare(self, u: Tensor) -> Tensor:
        """F(u)."""
        return _sum(f(u) for f, _ in self.branches)

    def normed(self, u: Tensor, factor: float = 1.0) -> Tensor:
        """F(factor · N(u))."""
        return _sum(f(factor * n(u)) for f, n in self.branches)

    def normed_after(self, u: Tensor) -> Tensor:
        """N(F(u))."""
        return _sum(n(f(u)) for f, n in self.branches)


def _sum(terms: Iterable[Tensor]) -> Tensor:
    first, *rest = terms
    return sum(rest, first)


@dataclass
class Stack:
    """Sublayers, the depth in blocks, and the readout's own norms by name."""

    parts: Sequence[Part]
    blocks: int
    readout: Callable[[str], Function]


Result = tuple[Tensor, list[tuple[Tensor, ...]]]


def one_stream(step: Callable[[Tensor, Part], Tensor]) -> Callable[[Tensor, Stack], Result]:
    """A scheme of one stream, from its sublayer's equation: the stream at the end, and after every sublayer."""

    def run(h: Tensor, stack: Stack) -> Result:
        x, states = h, []
        for part in stack.parts:
            x = step(x, part)
            states.append((x,))
        return x, states

    return run


def peri(h: Tensor, stack: Stack, normalized_embedding: bool = True) -> Result:
    if normalized_embedding:
        h = stack.parts[0].norm("norm_embedding")(h)
    return one_stream(lambda y, part: y + part.norm("norm_out")(part.normed(y)))(h, stack)


def hybridnorm(h: Tensor, stack: Stack, first_block_pre: bool = False) -> Result:
    def step(x: Tensor, part: Part) -> Tensor:
        if first_block_pre and part.block == 0:
            return x + part.normed(x)
        if part.attention:
            return x + part.bare(x)
        x = part.norm("norm")(x)
        return x + part.bare(x)

    return one_stream(step)(h, stack)


def mixln(h: Tensor, stack: Stack, share: float = 0.25) -> Result:
    def step(x: Tensor, part: Part) -> Tensor:
        post = part.block < share * stack.blocks
        return part.norm("norm")(x + part.bare(x)) if post else x + part.normed(x)

    return one_stream(step)(h, stack)


def deepnorm(h: Tensor, stack: Stack) -> Result:
    a = (2 * stack.blocks) ** (1 / 4)
    return one_stream(lambda x, part: part.norm("norm")(a * x + part.bare(x)))(h, stack)


def keel(h: Tensor, stack: Stack) -> Result:
    def step(x: Tensor, part: Part) -> Tensor:
        if part.block == 0 and part.attention:
            return x + part.normed(x)
        a = 1 if part.block == 0 else len(stack.parts)
        return part.norm("norm")(a * x + part.normed(x))

    return one_stream(step)(h, stack)


def spannorm(h: Tensor, stack: Stack) -> Result:
    states: list[tuple[Tensor, ...]] = []
    for attention, mlp in zip(stack.parts[::2], stack.parts[1::2], strict=True):
        o = attention.normed(h) if attention.block == 0 else attention.bare(h)
        u = attention.norm("norm")(h + o)
        states.append((u, h))
        h = mlp.norm("norm")(h + mlp.bare(u))
        states.append((h,))
    return h, states


def resi_dual(h: Tensor, stack: Stack) -> Result:
    x = y = h
    states: list[tuple[Tensor, ...]] = []
    for part in stack.parts:
        o = part.bare(x)
        x, y = part.norm("norm")(x + o), y + o
        states.append((x, y))
    return x + stack.readout("norm_y")(y), states


def siamese_of(
    h: Tensor,
    stack: Stack,
    x: str = "post",
    first_block_pre: bool = False,
    normalized_input: bool = True,
    depth_scale: str = "code",
    topology: str = "siamese",
) -> Result:
    subs = []
    for i, part in enumerate(stack.parts):
        hybrid = x == "hybrid" and part.attention
        starred = first_block_pre and part.block == 0
        # A block of one sublayer counts as two in the scale.
        place = i * 2 * stack.blocks // len(stack.parts)
        subs.append(
            Sub(
                part.bare if hybrid or not normalized_input else part.normed,
                part.norm("norm_y"),
                nx=None if hybrid and not starred else part.norm("norm_x"),
                c1=part.weights.get("c1"),
                c=scale(depth_scale, place),
                keep_x=starred,
            )
        )
    return siamese(h, subs, stack.readout("norm_x"), stack.readout("norm_y"), topology)


ORACLES: dict[str, Callable[..., Result]] = {
    "pre": one_stream(lambda y, part: y + part.normed(y)),
    "post": one_stream(lambda x, part: part.norm("norm")(x + part.bare(x))),
    "peri": peri,
    "reordered": one_stream(lambda y, part: y + part.normed_after(y)),
    "hybridnorm": hybridnorm,
    "mixln": mixln,
    "deepnorm": deepnorm,
    "lns": one_stream(lambda y, part: y + part.normed(y, 1 / math.sqrt(part.block + 1))),
    "spannorm": spannorm,
    "keel": keel,
    "resi_dual": resi_dual,
    "siamese": siamese_of,
}
"""By a scheme's name: from the embedding, the stack and the scheme's options to the readout and all streams."""


def rotate(x: Tensor, theta: float, positions: Tensor, part: float = 1.0) -> Tensor:
    """RoPE on the first ``part`` of a head, both halves of it rotated against each other.

    x: (batch, heads, seq, head_dim), positions: (batch, seq).
    """
    d = int(x.shape[-1] * part)
    x, rest = x[..., :d], x[..., d:]
    frequency = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
    angle = positions[:, None, :, None].to(torch.float32) * torch.cat((frequency, frequency))
    a, b = x[..., : d // 2], x[..., d // 2 :]
    turned = x * angle.cos().to(x.dtype) + torch.cat((-b, a), -1) * angle.sin().to(x.dtype)
    return torch.cat((turned, rest), -1)


@dataclass
class Attention:
    """Causal grouped-query attention over weights named ``q``, ``k``, ``v``, ``o``.

    ``norms`` are functions of q, k and v (batch, seq, heads, head_dim) before RoPE; without ``theta`` there is no RoPE.
    """

    weights: Mapping[str, Tensor]
    heads: int
    theta: float | None
    norms: Mapping[str, Function]
    keep: Tensor
    positions: Tensor
    rotated: float = 1.0

    def project(self, role: str, u: Tensor) -> Tensor:
        return F.linear(u, self.weights[f"{role}.weight"], self.weights.get(f"{role}.bias"))

    def __call__(self, u: Tensor) -> Tensor:
        batch, seq, _ = u.shape
        d = self.weights["q.weight"].shape[0] // self.heads
        q, k, v = (self.project(r, u).view(batch, seq, -1, d) for r in "qkv")
        q, k, v = (self.norms.get(r, identity)(t).transpose(1, 2) for r, t in zip("qkv", (q, k, v), strict=True))
        if self.theta is not None:
            q, k = (rotate(t, self.theta, self.positions, self.rotated) for t in (q, k))
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


STARRED = ("starred", "hybridnorm-starred")


def official_parameters(args: Mapping[str, Any], variant: str, seed: int = 0) -> dict[str, Tensor]:
    """Random parameters of an official language model, ``variant`` being hybrid, hybridnorm (both also starred) or pre.

    They are float64; norm weights are drawn around 1 and biases around 0, so that a norm in the wrong place shows.
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
        if variant == "pre" or (variant in STARRED and index == 0):
            norm(block + "attn_norm", width)
        if variant == "pre":
            continue
        if variant in ("hybrid", "starred"):
            norm(block + "ff_y_norm", width)
            norm(block + "ff_input_norm", width)
            norm(block + "attn_y_norm", width)
            if variant == "hybrid" or index > 0:
                weights[block + "c1"] = draw(width, around=1.0)
        for role in "qkv":
            norm(f"{block}{role}_norm", head, args.get("attention_layer_norm_with_affine", True))
    norm("ln_f", width)
    if variant in ("hybrid", "starred"):
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
    if variant not in ("hybrid", "starred"):
        parts = [
            Part(
                [(f, norm(f"blocks.{index}.{name}"))],
                {},
                lambda _, name=f"blocks.{index}.{name}": norm(name),
                index,
                first,
            )
            for index in range(args["n_layers"])
            for f, name, first in ((attentions[index], "attn_norm", True), (mlps[index], "ff_norm", False))
        ]
        scheme, options = ("pre", {}) if variant == "pre" else ("hybridnorm", {"first_block_pre": variant in STARRED})
        out, states = ORACLES[scheme](h, Stack(parts, args["n_layers"], norm), **options)
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


@dataclass(frozen=True)
class Names:
    """By what names a family of transformers calls its parts; the defaults are Llama's."""

    body: str = "model."
    blocks: str = "layers."
    embedding: str = "embed_tokens"
    attention: str = "self_attn."
    mlp: str = "mlp."
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    final: str = "norm"
    head: str = "lm_head"


NAMES = {
    "gpt2": Names("transformer.", "h.", "wte", "attn.", norms=("ln_1", "ln_2"), final="ln_f"),
    "gpt_neox": Names("gpt_neox.", embedding="embed_in", attention="attention.", final="final_layer_norm"),
    "phi": Names(norms=("input_layernorm", "input_layernorm"), final="final_layernorm"),
}


def family_of(config: Any) -> str:
    return config.model_type.removeprefix("siamesenorm_")


def in_parallel(config: Any) -> bool:
    """Whether attention and MLP of a block share one read and one write."""
    return family_of(config) == "phi" or getattr(config, "use_parallel_residual", False)


def host_norm(weights: Mapping[str, Tensor], config: Any, name: str) -> Function:
    """The norm called ``name``, of the kind that a family's norms are of."""
    kind = "rms" if hasattr(config, "rms_norm_eps") else "layer"
    keys = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
    # OLMo's norms have theirs in the code.
    eps = next((getattr(config, key) for key in keys if hasattr(config, key)), 1e-5)
    if family_of(config) == "gemma" and f"{name}.weight" in weights:
        weights = {f"{name}.weight": 1 + weights[f"{name}.weight"]}
    return norm_of(weights, name, kind, eps)


def qkvo(own: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The parameters of an attention, as those of four linear maps q, k, v and o."""
    family, parts = family_of(config), {}
    for suffix in ("weight", "bias"):
        if family == "gpt2":
            joined, out = own[f"c_attn.{suffix}"], own[f"c_proj.{suffix}"]
            maps = [*joined.chunk(3, -1), out]
            maps = [m.T for m in maps] if suffix == "weight" else maps
            parts |= {f"{role}.{suffix}": m for role, m in zip("qkvo", maps, strict=True)}
        elif family == "gpt_neox":
            joined = own[f"query_key_value.{suffix}"]
            by_head = joined.view(config.num_attention_heads, 3, -1, *joined.shape[1:])
            parts |= {f"{role}.{suffix}": m.flatten(0, 1) for role, m in zip("qkv", by_head.unbind(1), strict=True)}
            parts[f"o.{suffix}"] = own[f"dense.{suffix}"]
        else:
            for role, name in zip("qkvo", ("q_proj", "k_proj", "v_proj", "o_proj"), strict=True):
                name = "dense" if family == "phi" and role == "o" else name
                if f"{name}.{suffix}" in own:
                    parts[f"{role}.{suffix}"] = own[f"{name}.{suffix}"]
    return parts


def head_norm(own: Mapping[str, Tensor], config: Any, role: str) -> Function:
    """What an attention does to q, k or v (batch, seq, heads, head_dim) before RoPE."""
    if f"{role}_layernorm.norms.0.weight" in own:
        each = [own[f"{role}_layernorm.norms.{i}.weight"] for i in range(len(within(own, f"{role}_layernorm.")))]
        return lambda t: layer_norm(t, torch.stack(each), eps=config.layer_norm_eps)
    name = next((n for n in (f"{role}_layernorm", f"{role}_norm") if f"{n}.weight" in own), None)
    norm = identity if name is None else host_norm(own, config, name)
    limit = getattr(config, "clip_qkv", None)
    clip = identity if limit is None else lambda t: t.clamp(-limit, limit)
    if family_of(config) == "olmoe" and role != "v":
        return lambda t: clip(norm(t.flatten(-2))).view(t.shape)
    return lambda t: norm(clip(t))


def hf_lm(
    weights: Mapping[str, Tensor],
    config: Any,
    scheme: str,
    tokens: Tensor,
    *,
    window: int | None = None,
    padding: Tensor | None = None,
    mlps: Sequence[Callable[[Mapping[str, Tensor], Tensor], Tensor]] | None = None,
    **options: Any,
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """The same for a rewired model of transformers, given its state dict.

    Head norms are those that ``weights`` holds; a Qwen3 has its own q and k norms whatever the scheme. ``mlps`` compute
    the MLP of each block from its weights and its input, where it is not Llama's.
    """
    w, names, parallel = weights, NAMES.get(family_of(config), Names()), in_parallel(config)
    seq = tokens.shape[1]
    positions = torch.arange(seq).expand(tokens.shape)
    if padding is not None:
        positions = (padding.cumsum(-1) - 1).clamp_min(0)
    keep = causal(seq, window, padding)
    if padding is not None:
        # A padded query sees itself, so that its softmax is a number; nobody looks at it.
        keep = keep | torch.eye(seq, dtype=torch.bool)
    rope = getattr(config, "rope_parameters", None) or {}

    def norm(name: str) -> Function:
        return host_norm(w, config, name)

    table = w[f"{names.body}{names.embedding}.weight"]
    h = table[tokens]
    if family_of(config) == "gemma":
        h = h * torch.tensor(config.hidden_size**0.5, dtype=torch.float32)
    if family_of(config) == "gpt2":
        h = h + w["transformer.wpe.weight"][positions]
    parts: list[Part] = []
    for index in range(config.num_hidden_layers):
        block = f"{names.body}{names.blocks}{index}."
        own = within(w, block + names.attention)
        attend = Attention(
            qkvo(own, config),
            config.num_attention_heads,
            rope.get("rope_theta"),
            {r: head_norm(own, config, r) for r in "qkv"},
            keep,
            positions,
            rope.get("partial_rotary_factor", 1.0),
        )
        inner = within(w, block + names.mlp)
        mlp = swiglu(inner, "gate_proj", "up_proj", "down_proj") if mlps is None else partial(mlps[index], inner)
        nins = [norm(block + name) for name in names.norms]
        if parallel:
            # Phi and StableLM have one norm for both.
            nins = nins if family_of(config) == "gpt_neox" else nins[:1] * 2
            groups = [("residual.", [(attend, nins[0]), (mlp, nins[1])])]
        else:
            groups = [("attn_residual.", [(attend, nins[0])]), ("mlp_residual.", [(mlp, nins[1])])]
        for residual, branches in groups:
            parts.append(
                Part(
                    branches,
                    within(w, block + residual),
                    lambda name, prefix=block + residual: norm(prefix + name),
                    index,
                    residual == "attn_residual.",
                )
            )
    final = names.body + names.final
    stack = Stack(parts, config.num_hidden_layers, lambda name: norm(f"{final}.readout.{name}"))
    out, states = ORACLES[scheme](h, stack, **options)
    out = F.linear(norm(final)(out), w.get(f"{names.head}.weight", table), w.get(f"{names.head}.bias"))
    return out, states if parallel else states[1::2]
