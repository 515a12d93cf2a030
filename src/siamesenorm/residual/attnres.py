"""Attention residuals: every branch reads a softmax over all that was computed before it (arXiv 2603.15031).

    open       v_0 = h
    sublayer   u = Σ_j softmax_j(w·RMSNorm(v_j)) v_j          o = F(N(u))          v_{i+1} = o
    readout    Σ_j softmax_j(w_out·RMSNorm(v_j)) v_j

Streams are the sources v_j, one more after every sublayer. In the block form, a source is the sum of ``block_size``
sublayers' outputs; within a block the running sum is the last source:

    first of a block      v_{last+1} = o
    later in a block      v_last = v_last + o

With one sublayer per block both are the same. Each query w (d) starts at 0, where the softmax is a mean: under a norm
the same as Pre-Norm's sum, but for the norm's eps. The host's norm stands before the branch, as in Pre-Norm.
RMSNorm(v_j) has no weight, which w could hold as well; its eps is that of the host's norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .mixing import softmax_mix
from .norms import NormSpec
from .scheme import Carry, Readout, Scheme, Site, Streams, Sublayer, count, register

__all__ = ["AttentionResiduals"]


class _AttnResSublayer(Sublayer):
    def __init__(self, site: Site, norm: NormSpec, block_size: int) -> None:
        super().__init__(site)
        self.opens_source = site.sublayer % block_size == 0
        self.eps = norm.eps
        self.query = nn.Parameter(torch.empty(norm.size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        return softmax_mix(self.query, streams, self.eps), streams

    def write(self, carry: Carry, o: Tensor) -> Streams:
        if self.opens_source:
            return (*carry, o.to(carry[0].dtype))
        return (*carry[:-1], carry[-1] + o)

    def describe(self) -> dict[str, str | float]:
        writes = "v_new = o" if self.opens_source else "v_last = v_last + o"
        return {"reads": "Σ softmax(w·RMSNorm(v)) v", "writes": writes, "scale": 1.0}


class _AttnResReadout(Readout):
    def __init__(self, norm: NormSpec) -> None:
        super().__init__()
        self.eps = norm.eps
        self.query = nn.Parameter(torch.empty(norm.size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def close(self, streams: Streams) -> Tensor:
        return softmax_mix(self.query, streams, self.eps)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "Σ softmax(w·RMSNorm(v)) v", "writes": "", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class AttentionResiduals(Scheme):
    """Attention residuals with their option.

    Attributes:
        block_size: sublayers whose outputs are summed into one source; ``None`` is the full form, a source for each.
    """

    name = "attnres"
    paper = "attention residuals, arXiv 2603.15031"
    block_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        count(self, "block_size", optional=True)

    def stream_name(self, index: int) -> str:
        """v_0, v_1 and so on."""
        return f"v{index}"

    def open(self, h: Tensor) -> Streams:
        """v_0 = h."""
        return (h,)

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """u = Σ softmax(w·RMSNorm(v)) v; o is a new source, or is added to the last."""
        return _AttnResSublayer(site, norm, self.block_size or 1)

    def readout(self, norm: NormSpec) -> Readout:
        """The same mix, with a query of its own."""
        return _AttnResReadout(norm)
