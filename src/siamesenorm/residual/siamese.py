"""SiameseNorm: a normalised stream X and an identity stream Y that share every branch (arXiv 2602.08064).

    open       X = Y = h
    sublayer   X̂ = Nx(X)                 o = F(Nin(X̂ + Ny(Y)))       post-pre, and the MLP of hybrid-pre
               X = X̂ + c·o               Y = Y + o
    readout    Nx_out(X) + Ny_out(Y)

Nin is the host's own norm; its place at the sum is the paper's "normalised input". hybrid-pre differs in attention:

               o = Attn_qkv(c1 ⊙ X + Ny(Y))                          q, k and v normalised per head, no Nin
               X = X + c·o               Y = Y + o

and hybrid-pre*, in block 0 alone, reads Nx(X) + Ny(Y) in both sublayers and leaves X itself un-normalised.

The ablation of the paper's table 3 takes terms with Y away and leaves every other option as it is (``topology``):

    siamese      the branches read X and Y, and so does the readout                  the scheme itself
    resi_dual    the branches read X alone: Ny is gone but for Ny_out                ResiDual's flow (arXiv 2304.14802)
    single       there is no Y: the readout is Nx_out(X)                             the paper's "original"

so that at c = 1 and without Nin resi_dual is ResiDual and single is Post-Norm (HybridNorm at ``x="hybrid"``), each with
the norm moved from the write to the next read.

The scale c enters X only. The paper's text has 1/sqrt(l+1), l a layer index; its three official files agree on
1/sqrt(2(l+1)) for both sublayers of block l, which is the default here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from .errors import ConfigError
from .fusing import Term
from .norms import Norm, NormSpec, narrow, widen
from .scheme import Carry, NormPlace, Readout, Scheme, Site, Streams, Sublayer, choose, register

__all__ = ["SiameseNorm"]

Topology = Literal["siamese", "resi_dual", "single"]


class _NormedX(Sublayer):
    """Reads Nx(X) + Ny(Y); Nx(X) replaces X, but for the starred first block (``replace=False``)."""

    def __init__(
        self, site: Site, norm: NormSpec, topology: Topology, scale: float, x_init: float, *, replace: bool
    ) -> None:
        super().__init__(site)
        self.norm_x = norm.build(init=x_init)
        self.norm_y = norm.build() if topology == "siamese" else None
        self.topology = topology
        self.scale = scale
        self.replace = replace

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        x, *y = streams
        x_hat = self.norm_x(x)
        u = x_hat if self.norm_y is None else narrow(x_hat + self.norm_y.wide(y[0]), x.dtype)
        return u, (x_hat if self.replace else x, *y)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        return _update(carry, o, self.scale)

    def terms(self) -> tuple[Term, ...]:
        return Term(self.norm_x, replaces=self.replace, scale=self.scale), *_terms_of_y(self.norm_y, self.topology)

    def describe(self) -> dict[str, str | float]:
        return _described("Nx(X)", "Nx(X)" if self.replace else "X", self.topology, self.scale)


class _ScaledX(Sublayer):
    """Reads c1 ⊙ X + Ny(Y): hybrid-pre's attention, c1 a learnable vector (d,)."""

    def __init__(self, site: Site, norm: NormSpec, topology: Topology, scale: float, x_init: float) -> None:
        super().__init__(site)
        self.c1 = nn.Parameter(torch.empty(norm.size))
        self.norm_y = norm.build() if topology == "siamese" else None
        self.topology = topology
        self.scale = scale
        self.x_init = x_init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.c1, self.x_init)

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        x, *y = streams
        u = widen(self.c1) * widen(x)
        if self.norm_y is not None:
            u = u + self.norm_y.wide(y[0])
        return narrow(u, x.dtype), (x, *y)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        return _update(carry, o, self.scale)

    def terms(self) -> tuple[Term, ...]:
        return Term(self.c1, scale=self.scale), *_terms_of_y(self.norm_y, self.topology)

    def describe(self) -> dict[str, str | float]:
        return _described("c1⊙X", "X", self.topology, self.scale)


def _update(carry: Carry, o: Tensor, scale: float) -> Streams:
    """The update of each stream there is; each is one operation, so it rounds once."""
    x, *y = carry
    return torch.add(x, o, alpha=scale), *(stream + o for stream in y)


def _terms_of_y(norm: Norm | None, topology: Topology) -> tuple[Term, ...]:
    """The term of Y, which is there in all topologies but one and read in one alone."""
    return () if topology == "single" else (Term(norm, summed=norm is not None),)


def _described(read: str, kept: str, topology: Topology, scale: float) -> dict[str, str | float]:
    """A row of a table: what is read of X, what X is when ``o`` is added, and what there is of Y."""
    reads = f"{read} + Ny(Y)" if topology == "siamese" else read
    writes = f"X = {kept} + c·o" + ("" if topology == "single" else ", Y = Y + o")
    return {"reads": reads, "writes": writes, "scale": scale}


class _Readout(Readout):
    def __init__(self, norm: NormSpec, topology: Topology, x_init: float) -> None:
        super().__init__()
        self.norm_x = norm.build(init=x_init)
        self.norm_y = None if topology == "single" else norm.build()

    def close(self, streams: Streams) -> Tensor:
        x, *y = streams
        if self.norm_y is None:
            return cast(Tensor, self.norm_x(x))
        return narrow(self.norm_x.wide(x) + self.norm_y.wide(y[0]), x.dtype)

    def terms(self) -> tuple[Term, ...]:
        return (Term(self.norm_x),) if self.norm_y is None else (Term(self.norm_x), Term(self.norm_y))

    def describe(self) -> dict[str, str | float]:
        return {"reads": "Nx(X)" if self.norm_y is None else "Nx(X) + Ny(Y)", "writes": "", "scale": 1.0}


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
        topology: ``"siamese"``, or one of the ablations: ``"resi_dual"``, whose branches do not read Y, and
            ``"single"``, which has no Y. Neither can have ``x_init=0``, as X is all that their branches read.
    """

    name = "siamese"
    x: Literal["post", "hybrid"] = "post"
    first_block_pre: bool = False
    normalized_input: bool = True
    depth_scale: Literal["code", "paper", "none"] = "code"
    x_init: float = 1.0
    topology: Topology = "siamese"

    def __post_init__(self) -> None:
        super().__post_init__()
        choose(self, "x", "post", "hybrid")
        choose(self, "first_block_pre", False, True)
        choose(self, "normalized_input", True, False)
        choose(self, "depth_scale", "code", "paper", "none")
        choose(self, "topology", "siamese", "resi_dual", "single")
        if isinstance(self.x_init, bool) or not isinstance(self.x_init, int | float) or not math.isfinite(self.x_init):
            raise ConfigError(f"option 'x_init' of scheme 'siamese' must be a finite number, not {self.x_init!r}")
        if self.first_block_pre and self.x != "hybrid":
            raise ConfigError("option 'first_block_pre' of scheme 'siamese' is hybrid-pre*: it needs x='hybrid'")
        if self.topology != "siamese" and self.x_init == 0:
            raise ConfigError(
                f"option 'x_init' of scheme 'siamese' cannot be 0 with topology='{self.topology}', whose branches read "
                "nothing but X: leave x_init at 1, or take topology='siamese'"
            )

    def open(self, h: Tensor) -> Streams:
        """X = Y = h, or X alone."""
        return (h,) if self.topology == "single" else (h, h)

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
            return _ScaledX(site, norm, self.topology, self.scale(site), self.x_init)
        return _NormedX(site, norm, self.topology, self.scale(site), self.x_init, replace=not starred)

    def readout(self, norm: NormSpec) -> Readout:
        """Nx_out(X) + Ny_out(Y), or Nx_out(X) where there is no Y."""
        return _Readout(norm, self.topology, self.x_init)

    def _hybrid_attention(self, site: Site) -> bool:
        return self.x == "hybrid" and site.kind == "attention"
