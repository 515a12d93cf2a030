"""Schemes of one stream that, like Post-Norm, is normalised on its way.

    mixln      X = N(X + F(X)) in blocks l < share·L,  Y = Y + F(N(Y)) in the rest      Mix-LN (arXiv 2412.13795)
    deepnorm   X = N(a·X + F(X)),  a = (2L)^(1/4)                                       DeepNet (arXiv 2203.00555)
    keel       X = N1(a·X + F(N2(X))),  a = S = 2L                                      Keel
    spannorm   u = N1(h0 + Attn(h0)),  X = N2(h0 + F(u)),  h0 the block's input         SpanNorm

L is the depth in blocks, S in sublayers. The readout is X, and the host's final norm follows it; the papers of
deepnorm, keel and spannorm have none after the last norm, but with it every scheme keeps the host's names, and mixln at
share 1 is exactly post. The norms of Post-Norm's place are the sublayer's own; N of mixln's upper blocks, N2 of keel
and N0 of spannorm are the host's.

mixln counts a block as lower where l < share·L holds as it is written, so a part of a block makes it a whole one: at
L = 6 and the default share of 0.25, blocks 0 and 1 are Post-Norm.

deepnorm is the decoder-only form of its paper. Its initial weights of v, output projection and MLP are multiplied by
(8L)^(-1/4), those of q and k are left alone. A host that runs attention and MLP in parallel has the constants of its
depth in blocks, too.

keel is second-hand. The first attention has neither N1 nor a (X = X + F(N2(X))), the first MLP has N1 and a = 1. A
block whose attention and MLP run in parallel would have to be both at once, so such a host is refused.

spannorm is second-hand, and the scaling that its paper adds is not recovered: what is here is the topology alone. Both
skips of a block start at the block's input; the attention of block 0 reads N0(h0). Within a block h0 travels as a
second stream. It needs two sublayers a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .errors import ConfigError
from .norms import NormSpec, widen
from .scheme import Carry, NormPlace, Site, Streams, Sublayer, register
from .single import AddSublayer, NormedAddSublayer, PostNorm

__all__ = ["DeepNorm", "Keel", "MixLN", "SpanNorm"]


@register
@dataclass(frozen=True, kw_only=True)
class MixLN(PostNorm):
    """Mix-LN: Post-Norm in the lower blocks, Pre-Norm in the others.

    Attributes:
        share: how much of the depth is Post-Norm, from 0 to 1.
    """

    name = "mixln"
    paper = "Mix-LN, arXiv 2412.13795"
    share: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        share = self.share
        # A number that is not one compares as false, so the test is written to let through what is right.
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ConfigError(f"option 'share' of scheme 'mixln' must be a number from 0 to 1, not {share!r}")

    def is_post(self, site: Site) -> bool:
        """Whether the block of ``site`` is below ``share`` of the depth."""
        # 0.07 · 100 is a little more than 7 in floating point, which is no part of block 7.
        return site.block < round(self.share * site.blocks, 9)

    def is_pre_norm(self) -> bool:
        """Without lower blocks."""
        return self.share == 0

    def input_norm(self, site: Site) -> NormPlace:
        """Nowhere in the lower blocks, before the branch in the others."""
        return "none" if self.is_post(site) else "before"

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """X = N(X + F(X)), or X = X + F(N(X)) with the host's own norm."""
        return NormedAddSublayer(site, norm) if self.is_post(site) else AddSublayer(site, "X")


@register
@dataclass(frozen=True, kw_only=True)
class DeepNorm(PostNorm):
    """DeepNorm: Post-Norm whose skip is scaled up by the depth, and whose branches start smaller."""

    name = "deepnorm"
    paper = "DeepNet, arXiv 2203.00555"

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """X = N(a·X + F(X))."""
        return NormedAddSublayer(site, norm, (2 * site.blocks) ** 0.25)

    def init_gain(self, role: str, site: Site) -> float:
        """(8L)^(-1/4) on what makes the branch's output: v, output projection and MLP."""
        return 1.0 if role in ("q", "k") else (8 * site.blocks) ** -0.25


@register
@dataclass(frozen=True, kw_only=True)
class Keel(PostNorm):
    """Keel: Post-Norm whose skip is scaled up by the depth, and whose branches read a norm of the stream."""

    name = "keel"
    paper = ""

    def input_norm(self, site: Site) -> NormPlace:
        """Before the branch: N2 is the host's own norm."""
        return "before"

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """X = N1(a·X + F(N2(X))), but for the two sublayers of block 0.

        Raises:
            ConfigError: at a site whose attention and MLP run in parallel.
        """
        if site.kind == "parallel":
            raise ConfigError(
                "keel needs attention and MLP one after the other, as their first sublayers differ; this host runs "
                "them in parallel"
            )
        if site.first_block and site.kind == "attention":
            return AddSublayer(site, "X")
        return NormedAddSublayer(site, norm, 1.0 if site.first_block else float(site.sublayers))


class _OpensSpan(Sublayer):
    """u = N1(h0 + Attn(h0)); h0 goes along."""

    def __init__(self, site: Site, norm: NormSpec) -> None:
        super().__init__(site)
        self.norm = norm.build()

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        (h0,) = streams
        return h0, (h0,)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        (h0,) = carry
        return self.norm.wide(widen(h0) + o).to(h0.dtype), h0

    def describe(self) -> dict[str, str | float]:
        return {"reads": "X", "writes": "H0 = X, X = N(H0 + o)", "scale": 1.0}


class _ClosesSpan(Sublayer):
    """X = N2(h0 + F(u))."""

    def __init__(self, site: Site, norm: NormSpec) -> None:
        super().__init__(site)
        self.norm = norm.build()

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        u, h0 = streams
        return u, (h0,)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        (h0,) = carry
        return (self.norm.wide(widen(h0) + o).to(h0.dtype),)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "X", "writes": "X = N(H0 + o)", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class SpanNorm(PostNorm):
    """SpanNorm: Post-Norm whose second skip spans the whole block."""

    name = "spannorm"
    paper = ""
    stream_names = ("X", "H0")

    def input_norm(self, site: Site) -> NormPlace:
        """Before the very first branch, and nowhere else."""
        return "before" if site.sublayer == 0 else "none"

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """The first sublayer of a block, or the second.

        Raises:
            ConfigError: blocks of another number of sublayers.
        """
        if site.sublayers != 2 * site.blocks:
            raise ConfigError(
                "spannorm needs blocks of two sublayers, attention and MLP one after the other"
                + ("; this host runs them in parallel" if site.kind == "parallel" else "")
            )
        return _ClosesSpan(site, norm) if site.sublayer % 2 else _OpensSpan(site, norm)
