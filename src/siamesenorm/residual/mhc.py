"""Manifold-constrained hyper-connections: n streams, mixed by a doubly stochastic matrix (arXiv 2512.24880).

    open       H = n copies of h                                        H: n × d at every position
    sublayer   v = RMSNorm(flatten H)
               P = σ(α₁·φ₁v + b₁)     Q = 2σ(α₂·φ₂v + b₂)     M = Sinkhorn(exp(α₃·φ₃v + b₃))
               u = P·H                o = F(N(u))             H = Q oᵀ + M H
    readout    mean of the streams

P and Q are n weights, M is n × n. Sinkhorn's 20 iterations divide each column by its sum, then each row: the rows sum
to 1 exactly, the columns as nearly as 20 iterations get. They run on logarithms, so no logits overflow.

Chosen here, where implementations differ, so that a model starts as Pre-Norm for every n:

- α = 0.01 (the paper's) and φ = 0, so the biases alone count at first.
- b₁ gives P = 1/(2n), and 1/2 more for stream i mod n at sublayer i. They sum to 1, so u is the stream itself while all
  are equal, and they differ, without which equal streams would have equal gradients for ever. With n = 1 the weight
  would be 1, which no sigmoid reaches: it is 1 - 1/4096.
- b₂ = 0 gives Q = 1.
- b₃ is 0 on the diagonal and -8 elsewhere, so M is near the identity. Equal streams stay equal under any M.
- The readout is a mean, Pre-Norm's stream itself where a sum would be n times it.
- RMSNorm(flatten H) has no weight, which φ could hold as well; its eps is that of the host's norms.

The biases get no weight decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .mixing import combine, linear
from .norms import NormSpec, widen
from .scheme import Carry, Readout, Scheme, Site, Streams, Sublayer, count, register

__all__ = ["ManifoldHyperConnections", "sinkhorn"]

_OFF_DIAGONAL = -8.0


def sinkhorn(logits: Tensor, iterations: int = 20) -> Tensor:
    """``exp(logits)`` (…, n, n) made doubly stochastic: columns first, rows last."""
    return cast(Tensor, _LogSinkhorn.apply(logits, iterations)).exp()  # type: ignore[no-untyped-call]


class _LogSinkhorn(torch.autograd.Function):
    """Takes the log-sum-exp off along columns and rows in turn; keeps the logits alone for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, iterations: int) -> Tensor:
        return _iterates(logits, iterations)[-1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        logits, ctx.iterations = inputs
        ctx.save_for_backward(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        axis = -1
        for normed in reversed(_iterates(logits, ctx.iterations)):
            grad = grad - normed.exp() * grad.sum(axis, keepdim=True)
            axis = -3 - axis
        return grad, None


def _iterates(logits: Tensor, iterations: int) -> list[Tensor]:
    """The logarithms after each of the ``2 · iterations`` divisions."""
    found = []
    for _ in range(iterations):
        for axis in (-2, -1):
            logits = logits - logits.logsumexp(axis, keepdim=True)
            found.append(logits)
    return found


class _ManifoldSublayer(Sublayer):
    def __init__(self, site: Site, norm: NormSpec, n: int) -> None:
        super().__init__(site)
        self.n = n
        self.eps = norm.eps
        width = n * norm.size
        self.phi_read = nn.Parameter(torch.empty(n, width))
        self.phi_write = nn.Parameter(torch.empty(n, width))
        self.phi_mix = nn.Parameter(torch.empty(n * n, width))
        self.alpha_read = nn.Parameter(torch.empty(1))
        self.alpha_write = nn.Parameter(torch.empty(1))
        self.alpha_mix = nn.Parameter(torch.empty(1))
        self.bias_read = nn.Parameter(torch.empty(n))
        self.bias_write = nn.Parameter(torch.empty(n))
        self.bias_mix = nn.Parameter(torch.empty(n, n))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for phi in (self.phi_read, self.phi_write, self.phi_mix):
            nn.init.zeros_(phi)
        for alpha in (self.alpha_read, self.alpha_write, self.alpha_mix):
            nn.init.constant_(alpha, 0.01)
        share = 0.5 / self.n
        nn.init.constant_(self.bias_read, _logit(share))
        nn.init.constant_(self.bias_read[self.site.sublayer % self.n], _logit(min(share + 0.5, 1 - 2**-12)))
        nn.init.zeros_(self.bias_write)
        nn.init.constant_(self.bias_mix, _OFF_DIAGONAL)
        nn.init.zeros_(self.bias_mix.diagonal())

    def weights(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """P (…, 1, n), Q (…, n, 1) and M (…, n, n) for the streams ``h`` (…, n, d), in the wide dtype."""
        v = widen(h).flatten(-2)
        v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.eps)
        maps = torch.cat((self.phi_read, self.phi_write, self.phi_mix))
        to_p, to_q, to_m = torch.split(linear(v, maps), [self.n, self.n, self.n**2], -1)
        p = torch.sigmoid(self.alpha_read * to_p + self.bias_read)
        q = 2 * torch.sigmoid(self.alpha_write * to_q + self.bias_write)
        m = sinkhorn(self.alpha_mix * to_m.reshape(*h.shape[:-1], self.n) + self.bias_mix)
        return p.unsqueeze(-2), q.unsqueeze(-1), m

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        (h,) = streams
        p, q, m = self.weights(h)
        mixed = combine(torch.cat((p, m), -2), h)
        return mixed[..., 0, :].to(h.dtype), (h, q, mixed[..., 1:, :])

    def write(self, carry: Carry, o: Tensor) -> Streams:
        h, q, mixed = carry
        return ((mixed + q * widen(o).unsqueeze(-2)).to(h.dtype),)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "P·H", "writes": "H = Q oᵀ + M H", "scale": 1.0}


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


class _MeanOfStreams(Readout):
    def close(self, streams: Streams) -> Tensor:
        (h,) = streams
        return widen(h).mean(-2).to(h.dtype)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "mean of H", "writes": "", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class ManifoldHyperConnections(Scheme):
    """Manifold-constrained hyper-connections.

    Attributes:
        n: number of streams.
    """

    name = "mhc"
    paper = "manifold-constrained hyper-connections, arXiv 2512.24880"
    stream_names = ("H",)
    n: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        count(self, "n")

    def open(self, h: Tensor) -> Streams:
        """n copies of h."""
        return (h.unsqueeze(-2).repeat_interleave(self.n, -2),)

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """u = P·H, H = Q oᵀ + M H."""
        return _ManifoldSublayer(site, norm, self.n)

    def readout(self, norm: NormSpec) -> Readout:
        """The mean of the streams."""
        return _MeanOfStreams()

    def upcycled(self, source: Scheme, *, final_norm: bool = True) -> Scheme:
        """Of any Pre-Norm model, as which it starts."""
        return self if source.is_pre_norm() else super().upcycled(source, final_norm=final_norm)

    def decay(self, name: str) -> bool:
        """Not for the biases."""
        return not name.rpartition(".")[2].startswith("bias_")
