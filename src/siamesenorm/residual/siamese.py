"""SiameseNorm: a normalised stream X and an identity stream Y that share every branch (arXiv 2602.08064).

    open       X = Y = h
    sublayer   X̂ = Nx(X)                 o = F(Nin(X̂ + Ny(Y)))       post-pre, and the MLP of hybrid-pre
               X = X̂ + c·o               Y = Y + o
    readout    Nx_out(X) + Ny_out(Y)

Nin is the host's own norm; its place at the sum is the paper's "normalised input". hybrid-pre differs in attention:

               o = Attn_qkv(c1 ⊙ X + Ny(Y))                          q, k and v normalised per head, no Nin
               X = X + c·o               Y = Y + o

and hybrid-pre*, in block 0 alone, reads Nx(X) + Ny(Y) in both sublayers and leaves X itself un-normalised.

The scale c enters X only. The paper's text has 1/sqrt(l+1), l a layer index; its three official files agree on
1/sqrt(2(l+1)) for both sublayers of block l, which is the default here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .errors import ConfigError
from .norms import NormSpec, widen
from .scheme import Carry, NormPlace, Readout, Scheme, Site, Streams, Sublayer, choose, register

__all__ = ["SiameseNorm"]


class _NormedX(Sublayer):
    """Reads Nx(X) + Ny(Y); Nx(X) replaces X, but for the starred first block (``replace=False``)."""

    def __init__(self, site: Site, norm: NormSpec, scale: float, x_init: float, *, replace: bool) -> None:
        super().__init__(site)
        self.norm_x = norm.build(init=x_init)
        self.norm_y = norm.build()
        self.scale = scale
        self.replace = replace

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        x, y = streams
        x_hat = self.norm_x(x)
        u = (x_hat + self.norm_y.wide(y)).to(y.dtype)
        return u, (x_hat if self.replace else x, y)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        return _update(carry, o, self.scale)

    def describe(self) -> dict[str, str | float]:
        writes = "X = Nx(X) + c·o, Y = Y + o" if self.replace else "X = X + c·o, Y = Y + o"
        return {"reads": "Nx(X) + Ny(Y)", "writes": writes, "scale": self.scale}


class _ScaledX(Sublayer):
    """Reads c1 ⊙ X + Ny(Y): hybrid-pre's attention, c1 a learnable vector (d,)."""

    def __init__(self, site: Site, norm: NormSpec, scale: float, x_init: float) -> None:
        super().__init__(site)
        self.c1 = nn.Parameter(torch.empty(norm.size))
        self.norm_y = norm.build()
        self.scale = scale
        self.x_init = x_init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.c1, self.x_init)

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        x, y = streams
        u = (widen(self.c1) * widen(x) + self.norm_y.wide(y)).to(y.dtype)
        return u, (x, y)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        return _update(carry, o, self.scale)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "c1⊙X + Ny(Y)", "writes": "X = X + c·o, Y = Y + o", "scale": self.scale}


def _update(carry: Carry, o: Tensor, scale: float) -> Streams:
    """Both updates; each is one operation, so it rounds once."""
    x, y = carry
    return torch.add(x, o, alpha=scale), y + o


class _Readout(Readout):
    def __init__(self, norm: NormSpec, x_init: float) -> None:
        super().__init__()
        self.norm_x = norm.build(init=x_init)
        self.norm_y = norm.build()

    def close(self, streams: Streams) -> Tensor:
        x, y = streams
        return (self.norm_x.wide(x) + self.norm_y.wide(y)).to(y.dtype)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "Nx(X) + Ny(Y)", "writes": "", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class SiameseNorm(Scheme):
    """SiameseNorm with its options.

    Attributes:
        x: what the X stream follows: ``"post"`` (post-pre, the general form) or ``"hybrid"`` (hybrid-pre, the paper's
            best form for language models; it needs a host whose attention and MLP are sublayers of their own).
        first_block_pre: hybrid-pre*, whose block 0 leaves X un-normalised. Only with ``x="hybrid"``.
        normalized_input: keep the host's own norm at the sum of both streams (Nin).
        depth_scale: the scale c: ``"code"`` is 1/sqrt(2(l+1)) by block l, as in the official code; ``"paper"`` is
            1/sqrt(i+1) by sublayer i, as the paper's text can be read; ``"none"`` is 1.
        x_init: initial weight of all that X is read through: Nx, Nx_out and c1. At 0 the model starts as Pre-Norm
            whose branch norm is Nin∘Ny.
    """

    name = "siamese"
    x: Literal["post", "hybrid"] = "post"
    first_block_pre: bool = False
    normalized_input: bool = True
    depth_scale: Literal["code", "paper", "none"] = "code"
    x_init: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        choose(self, "x", "post", "hybrid")
        choose(self, "first_block_pre", False, True)
        choose(self, "normalized_input", True, False)
        choose(self, "depth_scale", "code", "paper", "none")
        if isinstance(self.x_init, bool) or not isinstance(self.x_init, int | float) or not math.isfinite(self.x_init):
            raise ConfigError(f"option 'x_init' of scheme 'siamese' must be a finite number, not {self.x_init!r}")
        if self.first_block_pre and self.x != "hybrid":
            raise ConfigError("option 'first_block_pre' of scheme 'siamese' is hybrid-pre*: it needs x='hybrid'")

    def open(self, h: Tensor) -> Streams:
        """X = Y = h."""
        return (h, h)

    def scale(self, site: Site) -> float:
        """The scale c of X's update at ``site``."""
        if self.depth_scale == "code":
            return 1.0 / math.sqrt(2 * (site.block + 1))
        if self.depth_scale == "paper":
            return 1.0 / math.sqrt(site.sublayer + 1)
        return 1.0

    def input_norm(self, site: Site) -> NormPlace:
        """Before the branch, but for hybrid-pre's attention, and nowhere without ``normalized_input``."""
        return "none" if self._hybrid_attention(site) or not self.normalized_input else "before"

    def branch_norms(self, site: Site) -> tuple[str, ...]:
        """q, k and v in hybrid-pre's attention."""
        return ("q", "k", "v") if self._hybrid_attention(site) else ()

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """The sublayer's read and write.

        Raises:
            ConfigError: hybrid-pre at a site whose attention and MLP run in parallel.
        """
        if self.x == "hybrid" and site.kind == "parallel":
            raise ConfigError(
                "siamese x='hybrid' needs attention and MLP one after the other; this host runs them in parallel"
            )
        starred = self.first_block_pre and site.first_block
        if self._hybrid_attention(site) and not starred:
            return _ScaledX(site, norm, self.scale(site), self.x_init)
        return _NormedX(site, norm, self.scale(site), self.x_init, replace=not starred)

    def readout(self, norm: NormSpec) -> Readout:
        """Nx_out(X) + Ny_out(Y)."""
        return _Readout(norm, self.x_init)

    def _hybrid_attention(self, site: Site) -> bool:
        return self.x == "hybrid" and site.kind == "attention"
