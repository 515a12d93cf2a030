"""Multi-gate residuals: n streams that each gate takes over bit by bit (arXiv 2605.23259; second-hand, see below).

    open       s = (h)
    sublayer   u = Σ_j softmax_j(w·RMSNorm(s_j)/√d) s_j          o = F(N(u))
               fewer than n streams:  o is a new stream
               n streams:             s_j = (1 - b_j) s_j + b_j o
    readout    Σ_j softmax_j(w_out·RMSNorm(s_j)/√d) s_j

    independent    b_j = σ(w_b·RMSNorm(s_j)/√d - k)
    competitive    b   = softmax([k, w_b·RMSNorm(s_1)/√d, …, w_b·RMSNorm(s_n)/√d]) without its first

The queries w, w_b and w_out (d) start at 0, so that a branch first reads the mean of the streams. RMSNorm is without
weight; its eps is that of the host's norms. Streams are never seeded with copies, which would stay equal.

These equations are taken from another reading of the paper and are still to be checked against it. k is a constant:
with S' = S - (n - 1) sublayers that have a gate, k = ln(√(S'/21)·(e³ + 1) - n), which makes a competitive gate start at
1/(√(S'/21)·(e³ + 1)), and the same k serves the independent gates. Chosen here: k = 0 where that logarithm has no value
(many streams in a shallow stack), and the readout, which is the branches' mix with a query of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .mixing import rms_scores, softmax_mix
from .norms import NormSpec, widen
from .scheme import Carry, Readout, Scheme, Site, Streams, Sublayer, choose, count, register

__all__ = ["MultiGateResiduals"]

Gates = Literal["independent", "competitive"]


class _MultiGateSublayer(Sublayer):
    def __init__(self, site: Site, norm: NormSpec, n: int, gates: Gates) -> None:
        super().__init__(site)
        self.eps = norm.eps
        self.scale = norm.size**-0.5
        self.gates = gates
        self.has_gate = site.sublayer >= n - 1
        self.k = starting_k(site.sublayers, n)
        self.query = nn.Parameter(torch.empty(norm.size))
        if self.has_gate:
            self.gate_query = nn.Parameter(torch.empty(norm.size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        if self.has_gate:
            nn.init.zeros_(self.gate_query)

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        return softmax_mix(self.query, streams, self.eps, self.scale), streams

    def openness(self, streams: Streams) -> list[Tensor]:
        """The gates b_j, each (…, 1), in the wide dtype."""
        scores = rms_scores(self.gate_query, streams, self.eps, self.scale)
        if self.gates == "independent":
            return [torch.sigmoid(score - self.k) for score in scores]
        closed = torch.full_like(scores[0], self.k)
        return list(torch.cat((closed, *scores), -1).softmax(-1).chunk(len(streams) + 1, -1)[1:])

    def write(self, carry: Carry, o: Tensor) -> Streams:
        if not self.has_gate:
            return (*carry, o.to(carry[0].dtype))
        o = widen(o)
        return tuple(((1 - b) * s + b * o).to(s.dtype) for b, s in zip(self.openness(carry), carry, strict=True))

    def describe(self) -> dict[str, str | float]:
        writes = "s = (1-b) s + b·o" if self.has_gate else "s_new = o"
        return {"reads": "Σ softmax(w·RMSNorm(s)/√d) s", "writes": writes, "scale": 1.0}


def starting_k(sublayers: int, n: int) -> float:
    """The constant k that holds the gates of a stack of ``sublayers`` back."""
    gated = sublayers - (n - 1)
    argument = math.sqrt(max(gated, 0) / 21) * (math.exp(3) + 1) - n
    return math.log(argument) if argument > 0 else 0.0


class _MultiGateReadout(Readout):
    def __init__(self, norm: NormSpec) -> None:
        super().__init__()
        self.eps = norm.eps
        self.scale = norm.size**-0.5
        self.query = nn.Parameter(torch.empty(norm.size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def close(self, streams: Streams) -> Tensor:
        return softmax_mix(self.query, streams, self.eps, self.scale)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "Σ softmax(w·RMSNorm(s)/√d) s", "writes": "", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class MultiGateResiduals(Scheme):
    """Multi-gate residuals with their options.

    Attributes:
        n: the most streams there are; the first n - 1 sublayers each add one.
        gates: ``"independent"``, each stream's own, or ``"competitive"``, a softmax over the streams and k.
    """

    name = "mgr"
    paper = "multi-gate residuals, arXiv 2605.23259"
    n: int = 4
    gates: Gates = "independent"

    def __post_init__(self) -> None:
        super().__post_init__()
        count(self, "n")
        choose(self, "gates", "independent", "competitive")

    def open(self, h: Tensor) -> Streams:
        """One stream, h."""
        return (h,)

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """u = Σ softmax(w·RMSNorm(s)/√d) s; o is a new stream, or enters each through its gate."""
        return _MultiGateSublayer(site, norm, self.n, self.gates)

    def readout(self, norm: NormSpec) -> Readout:
        """The same mix, with a query of its own."""
        return _MultiGateReadout(norm)
