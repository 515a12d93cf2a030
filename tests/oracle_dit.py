"""DiT in plain torch, from the equations alone: the official model, and one of this package under any scheme.

Only the sinusoid of the time step is float32 first, as the official code and diffusers compute it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.drawn import Drawn
from tests.oracle import ORACLES, Attention, Function, Part, Stack, layer_norm, norm_of, siamese_of, within
from tests.oracle_streams import STREAMS, extras

Weights = Mapping[str, Tensor]


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    """By tanh."""
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def sinusoid(t: Tensor, shift: int = 0, float64: bool = False) -> Tensor:
    """(batch,) to (batch, 256), cosines first."""
    dtype = torch.float64 if float64 else torch.float32
    frequency = torch.exp(-math.log(10000) * torch.arange(128, dtype=dtype) / (128 - shift))
    angle = t[:, None].to(dtype) * frequency
    return torch.cat((angle.cos(), angle.sin()), 1).double()


def in_patches(images: Tensor, side: int) -> Tensor:
    """(batch, channels, height, width) to (batch, patches row by row, channels · side · side)."""
    rows = images.unfold(2, side, side).unfold(3, side, side)
    return rows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def as_image(patches: Tensor, side: int, channels: int) -> Tensor:
    """(batch, patches, side · side · channels), the pixels of a patch row by row, to (batch, channels, h, w)."""
    grid = math.isqrt(patches.shape[1])
    image = patches.new_empty(len(patches), channels, grid * side, grid * side)
    for index in range(patches.shape[1]):
        row, column = divmod(index, grid)
        pixels = patches[:, index].view(-1, side, side, channels).permute(0, 3, 1, 2)
        image[:, :, row * side : (row + 1) * side, column * side : (column + 1) * side] = pixels
    return image


@dataclass
class Modulated(Part):
    """A sublayer of a DiT: one branch, its norm, and shift, scale and gate (batch, 1, d)."""

    modulation: tuple[Tensor, Tensor, Tensor] = ()

    def gated(self, u: Tensor, after: Function = lambda o: o) -> Tensor:
        ((f, _),) = self.branches
        shift, scale, gate = self.modulation
        return gate * after(f(shift + (1 + scale) * u))

    def bare(self, u: Tensor) -> Tensor:
        return self.gated(u)

    def normed(self, u: Tensor, factor: float = 1.0) -> Tensor:
        return self.gated(factor * self.branches[0][1](u))

    def normed_after(self, u: Tensor) -> Tensor:
        return self.gated(u, self.branches[0][1])


@dataclass
class BlockNames:
    """By what names a block calls its parts."""

    first: str
    second: str
    modulation: str
    sublayers: tuple[str, str]


OURS = BlockNames("ff.net.0.proj", "ff.net.2", "norm1.linear", ("attn_residual.", "mlp_residual."))
OFFICIAL = BlockNames("mlp.fc1", "mlp.fc2", "adaLN_modulation.1", ("1", "2"))


def parts_of(
    own: Weights,
    names: BlockNames,
    qkvo: Weights,
    heads: int,
    index: int,
    seq: int,
    conditioning: Tensor,
    norms: Mapping[str, Function] | None = None,
    nins: tuple[Function, Function] = (layer_norm, layer_norm),
) -> list[Part]:
    """Both sublayers of a block, from its weights; ``norms`` are of q, k and v."""
    keep = torch.ones(1, 1, seq, seq, dtype=torch.bool)
    attend = Attention(qkvo, heads, None, norms or {}, keep, torch.arange(seq)[None])
    pieces = linear(own, names.modulation, silu(conditioning))[:, None].chunk(6, -1)

    def mlp(u: Tensor) -> Tensor:
        return linear(own, names.second, gelu(linear(own, names.first, u)))

    made: list[Part] = []
    for i, f in enumerate((attend, mlp)):
        prefix = names.sublayers[i]
        make_norm = (
            (lambda name, prefix=prefix: norm_of(own, prefix + name, "layer"))
            if names is OURS
            # postnorm1 is Nx of attention, prenorm2 Ny of the MLP.
            else (
                lambda name, end=prefix: norm_of(own, {"norm_x": "postnorm", "norm_y": "prenorm"}[name] + end, "layer")
            )
        )
        part = Modulated(
            [(f, nins[i])], within(own, prefix), make_norm, index, i == 0, tuple(pieces[3 * i : 3 * i + 3])
        )
        made.append(part)
    return made


def dit(
    weights: Weights, config: Any, scheme: str, x: Tensor, t: Tensor, y: Tensor, /, **options: Any
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """The sample of a model of this package, given its state dict, and its streams after every block."""
    w = weights
    embedder = "emb." if "emb.timestep_embedder.linear_1.weight" in w else "transformer_blocks.0.norm1.emb."
    time = within(w, embedder + "timestep_embedder.")
    shift = getattr(config, "timestep_shift", 1)
    conditioning = linear(time, "linear_2", silu(linear(time, "linear_1", sinusoid(t, shift))))
    conditioning = conditioning + w[embedder + "class_embedder.embedding_table.weight"][y]
    h = in_patches(x, config.patch_size) @ w["pos_embed.proj.weight"].flatten(1).T + w["pos_embed.proj.bias"]
    h = h + w["pos_embed.pos_embed"]

    parts: list[Part] = []
    for index in range(config.num_layers):
        own = within(w, f"transformer_blocks.{index}.")
        qkvo = {
            f"{role}.{suffix}": own[f"attn1.{name}.{suffix}"]
            for role, name in zip("qkvo", ("to_q", "to_k", "to_v", "to_out.0"), strict=True)
            for suffix in ("weight", "bias")
            if f"attn1.{name}.{suffix}" in own
        }
        heads = {
            role: norm_of(own, f"attn1.norm_{role}", "layer") for role in "qkv" if f"attn1.norm_{role}.weight" in own
        }
        nins = (norm_of(own, "norm1.norm", "layer"), norm_of(own, "norm3", "layer", config.norm_eps))
        parts += parts_of(own, OURS, qkvo, config.num_attention_heads, index, h.shape[1], conditioning, heads, nins)
    stack = Stack(parts, config.num_layers, lambda name: norm_of(w, f"norm_out.readout.{name}", "layer"))
    given = {**options, **(extras(scheme, 1e-6, w, "norm_out.readout.") if scheme in STREAMS else {})}
    out, states = ORACLES[scheme](h, stack, **given)
    shift, scale = linear(w, "proj_out_1", silu(conditioning))[:, None].chunk(2, -1)
    patches = linear(w, "proj_out_2", shift + (1 + scale) * layer_norm(out))
    return as_image(patches, config.patch_size, config.out_channels or config.in_channels), states[1::2]


def official_parameters(
    args: Mapping[str, Any], variant: str = "siamese", seed: int = 0, bias: bool = True
) -> dict[str, Tensor]:
    """Random float64 parameters of an official DiT (``"siamese"`` or ``"pre"``), with a random table of positions."""
    width, inner = args["hidden_size"], int(args["hidden_size"] * args["mlp_ratio"])
    patch, outputs = args["patch_size"], args["in_channels"] * (2 if args["learn_sigma"] else 1)
    weights = Drawn(seed)
    weights.draw("pos_embed", 1, (args["input_size"] // patch) ** 2, width, spread=1.0)
    weights.both("x_embedder.proj", width, args["in_channels"], patch, patch)
    weights.both("t_embedder.mlp.0", width, 256)
    weights.both("t_embedder.mlp.2", width, width)
    rows = args["num_classes"] + (args["class_dropout_prob"] > 0)
    weights.draw("y_embedder.embedding_table.weight", rows, width)
    for index in range(args["depth"]):
        block = f"blocks.{index}."
        weights.both(block + "attn.qkv", 3 * width, width, bias=bias)
        weights.both(block + "attn.proj", width, width)
        weights.both(block + "mlp.fc1", inner, width)
        weights.both(block + "mlp.fc2", width, inner)
        weights.both(block + "adaLN_modulation.1", 6 * width, width)
        if variant == "siamese":
            for name in ("prenorm1", "prenorm2", "postnorm1", "postnorm2"):
                weights.both(block + name, width, around=1.0)
    weights.both("final_layer.linear", patch**2 * outputs, width)
    weights.both("final_layer.adaLN_modulation.1", 2 * width, width)
    if variant == "siamese":
        weights.both("prenorm", width, around=1.0)
        weights.both("postnorm", width, around=1.0)
    return weights


def official_dit(
    parameters: Weights, args: Mapping[str, Any], x: Tensor, t: Tensor, y: Tensor, *, float64: bool = False
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """The output of an official model, and its streams after every block; ``float64`` is of the sinusoid."""
    w, width = parameters, args["hidden_size"]
    conditioning = linear(w, "t_embedder.mlp.2", silu(linear(w, "t_embedder.mlp.0", sinusoid(t, 0, float64))))
    conditioning = conditioning + w["y_embedder.embedding_table.weight"][y]
    patches = in_patches(x, args["patch_size"])
    h = patches @ w["x_embedder.proj.weight"].flatten(1).T + w["x_embedder.proj.bias"] + w["pos_embed"]
    parts: list[Part] = []
    for index in range(args["depth"]):
        own = within(w, f"blocks.{index}.")
        qkvo = {f"o.{suffix}": own[f"attn.proj.{suffix}"] for suffix in ("weight", "bias")}
        for suffix in ("weight", "bias"):
            if (joined := own.get(f"attn.qkv.{suffix}")) is not None:
                qkvo |= {f"{role}.{suffix}": m for role, m in zip("qkv", joined.split(width), strict=True)}
        parts += parts_of(own, OFFICIAL, qkvo, args["num_heads"], index, h.shape[1], conditioning)
    final = {"norm_x": norm_of(w, "postnorm", "layer"), "norm_y": norm_of(w, "prenorm", "layer")}
    stack = Stack(parts, args["depth"], lambda name: final[name])
    out, states = (siamese_of if "prenorm.weight" in w else ORACLES["pre"])(h, stack)
    shift, scale = linear(w, "final_layer.adaLN_modulation.1", silu(conditioning))[:, None].chunk(2, -1)
    patches = linear(w, "final_layer.linear", shift + (1 + scale) * layer_norm(out))
    return as_image(patches, args["patch_size"], args["in_channels"] * (2 if args["learn_sigma"] else 1)), states[1::2]
