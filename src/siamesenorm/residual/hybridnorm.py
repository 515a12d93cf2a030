"""HybridNorm: q, k and v normalised in attention, Post-Norm in the MLP (arXiv 2503.04598).

    attention   X = X + Attn_qkv(X)                    q, k and v normalised per head
    MLP         X̂ = N(X),  X = X̂ + F(X̂)
    readout     X

and HybridNorm* (``first_block_pre=True``) in block 0, with the host's own norms:

    attention   X = X + Attn_qkv(N(X))
    MLP         X = X + F(N(X))

The host's final norm follows the readout. hybrid-pre SiameseNorm has this stream for its X.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .errors import ConfigError
from .fusing import Term
from .norms import NormSpec
from .scheme import Carry, NormPlace, Readout, Scheme, Site, Streams, Sublayer, choose, register
from .single import AddSublayer, OneStream

__all__ = ["HybridNorm"]


class _NormedRead(Sublayer):
    """X̂ = N(X) replaces X when it is read, and the branch output is added to it."""

    def __init__(self, site: Site, norm: NormSpec) -> None:
        super().__init__(site)
        self.norm = norm.build()

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        (x,) = streams
        x_hat = self.norm(x)
        return x_hat, (x_hat,)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        (x_hat,) = carry
        return (x_hat + o,)

    def terms(self) -> tuple[Term, ...]:
        return (Term(self.norm, replaces=True),)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "N(X)", "writes": "X = N(X) + o", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class HybridNorm(Scheme):
    """HybridNorm with its first-block form.

    Attributes:
        first_block_pre: HybridNorm*, whose block 0 is Pre-Norm (with q, k and v normalised all the same).
    """

    name = "hybridnorm"
    paper = "HybridNorm, arXiv 2503.04598"
    stream_names = ("X",)
    first_block_pre: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        choose(self, "first_block_pre", False, True)

    def open(self, h: Tensor) -> Streams:
        """X = h."""
        return (h,)

    def input_norm(self, site: Site) -> NormPlace:
        """Nowhere, but before both branches of HybridNorm*'s block 0."""
        return "before" if self._is_pre(site) else "none"

    def branch_norms(self, site: Site) -> tuple[str, ...]:
        """q, k and v of every attention."""
        return ("q", "k", "v") if site.kind == "attention" else ()

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """The sublayer's read and write.

        Raises:
            ConfigError: at a site whose attention and MLP run in parallel.
        """
        if site.kind == "parallel":
            raise ConfigError("hybridnorm needs attention and MLP one after the other; this host runs them in parallel")
        if site.kind == "attention" or self._is_pre(site):
            return AddSublayer(site, "X")
        return _NormedRead(site, norm)

    def readout(self, norm: NormSpec) -> Readout:
        """X."""
        return OneStream("X")

    def _is_pre(self, site: Site) -> bool:
        return self.first_block_pre and site.first_block
