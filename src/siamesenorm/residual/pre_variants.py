"""Schemes of one stream that, like Pre-Norm, is an identity path from the embedding to the readout.

    peri        Y = Y + Nout(F(Nin(Y)))             Peri-LN (arXiv 2502.02732); the sandwich of CogView (2105.13290)
    reordered   Y = Y + N(F(Y))                     OLMo 2 (arXiv 2501.00656)
    lns         Y = Y + F(N(Y) / sqrt(l+1))         LayerNorm Scaling (arXiv 2502.05795), l the block from 0

The readout is Y, and the host's final norm follows it. Nin of peri and N are the host's own norms.

peri is second-hand: it follows the description of its paper, not its code. That paper also normalises the embedding,
Y = Nh(h), which is the default here; ``normalized_embedding=False`` is the plain sandwich. Where attention and MLP run
in parallel, their sum is one branch: one Nout normalises it, while reordered's N are the host's, one on each.

lns scales the norm's output, bias included, and both sublayers of a block by the same factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from .norms import NormSpec, widen
from .scheme import Carry, NormPlace, Readout, Scheme, Site, Streams, Sublayer, choose, register
from .single import AddSublayer, OneStream, PreNorm

__all__ = ["LayerNormScaling", "PeriNorm", "ReorderedNorm"]


class _PeriSublayer(Sublayer):
    gates_itself = True

    def __init__(self, site: Site, norm: NormSpec, *, opens: bool) -> None:
        super().__init__(site)
        # The first sublayer holds the embedding's norm: the streams are opened without parameters.
        self.norm_embedding = norm.build() if opens else None
        self.norm_out = norm.build()

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        (y,) = streams
        if self.norm_embedding is not None:
            y = self.norm_embedding(y)
        return y, (y,)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        (y,) = carry
        out = self.norm_out.wide(o)
        return ((widen(y) + self.gated(out)).to(y.dtype),)

    def describe(self) -> dict[str, str | float]:
        y = "Y" if self.norm_embedding is None else "Nh(Y)"
        return {"reads": y, "writes": f"Y = {y} + Nout(o)", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class PeriNorm(Scheme):
    """Peri-LN: a norm before each branch and one behind it.

    Attributes:
        normalized_embedding: normalise the embedding too, before anything reads it.
    """

    name = "peri"
    paper = "Peri-LN, arXiv 2502.02732"
    stream_names = ("Y",)
    normalized_embedding: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        choose(self, "normalized_embedding", True, False)

    def open(self, h: Tensor) -> Streams:
        """Y = h."""
        return (h,)

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """Y = Y + Nout(F(Nin(Y))), Nin being the host's own norm; in the first sublayer, Y is the embedding's norm."""
        return _PeriSublayer(site, norm, opens=self.normalized_embedding and site.sublayer == 0)

    def readout(self, norm: NormSpec) -> Readout:
        """Y."""
        return OneStream("Y")


@register
@dataclass(frozen=True, kw_only=True)
class ReorderedNorm(PreNorm):
    """OLMo 2's reordered norm: each branch reads the stream as it is, and its output is normalised."""

    name = "reordered"
    paper = "OLMo 2, arXiv 2501.00656"

    def is_pre_norm(self) -> bool:
        """It is not: the norm stands behind the branch."""
        return False

    def input_norm(self, site: Site) -> NormPlace:
        """After the branch."""
        return "after"

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """Y = Y + N(F(Y)), N being the host's own norm."""
        return AddSublayer(site)


class _ScaledInput(AddSublayer):
    """Pre-Norm's sublayer, that says what the host does with its norm."""

    def __init__(self, site: Site, scale: float) -> None:
        super().__init__(site)
        self.scale = scale

    def describe(self) -> dict[str, str | float]:
        return {**super().describe(), "reads": "c·Nin(Y)", "scale": self.scale}


@register
@dataclass(frozen=True, kw_only=True)
class LayerNormScaling(PreNorm):
    """Pre-Norm whose norms' outputs shrink with depth, so that the stream's variance grows less."""

    name = "lns"
    paper = "LayerNorm Scaling, arXiv 2502.05795"

    def input_scale(self, site: Site) -> float:
        """1/sqrt(l+1) in both sublayers of block l."""
        return 1.0 / math.sqrt(site.block + 1)

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """Y = Y + F(c·N(Y)), N being the host's own norm, which is given the factor c."""
        return _ScaledInput(site, self.input_scale(site))
