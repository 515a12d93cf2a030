"""Hyper-connections: n streams with learned read, write and mixing weights (arXiv 2409.19606).

    open       H = n copies of h                                        H: n × d at every position
    sublayer   u = Aᵀ H           o = F(N(u))           H = B oᵀ + Rᵀ H
    readout    sum of the streams

    static     A = A₀                      B = B₀                      R = R₀
    dynamic    A = A₀ + s_α·tanh(N(H) w_A)  B = B₀ + s_β·tanh(N(H) w_B)  R = R₀ + s_α·tanh(N(H) W_R)

A₀ (n) starts at e_(i mod n) for sublayer i, B₀ (n) at 1, R₀ (n × n) at the identity; w_A, w_B (d) and W_R (d × n)
start at 0, s_α and s_β at 0.01. The branch F and the norm before it are the host's. At the start every stream is
Pre-Norm's, and after the final norm so is the readout. A₀, B₀ and R₀ get no weight decay.

Chosen here, where implementations differ: one scale s_α serves A and R, N is of the host's kind, over d and with a
weight, and the host's own initial weights stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import ConfigError
from .mixing import combine, linear
from .norms import NormSpec, widen
from .scheme import Carry, Readout, Scheme, Site, Streams, Sublayer, choose, count, register

__all__ = ["HyperConnections"]


class _HyperSublayer(Sublayer):
    def __init__(self, site: Site, norm: NormSpec, n: int, *, dynamic: bool) -> None:
        super().__init__(site)
        self.n = n
        self.dynamic = dynamic
        self.static_read = nn.Parameter(torch.empty(n))
        self.static_write = nn.Parameter(torch.empty(n))
        self.static_mix = nn.Parameter(torch.empty(n, n))
        if dynamic:
            self.norm = norm.build()
            self.dynamic_read = nn.Parameter(torch.empty(1, norm.size))
            self.dynamic_write = nn.Parameter(torch.empty(1, norm.size))
            self.dynamic_mix = nn.Parameter(torch.empty(n, norm.size))
            self.scale_read = nn.Parameter(torch.empty(1))
            self.scale_write = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.static_read)
        nn.init.ones_(self.static_read[self.site.sublayer % self.n])
        nn.init.ones_(self.static_write)
        nn.init.eye_(self.static_mix)
        if self.dynamic:
            for weight in (self.dynamic_read, self.dynamic_write, self.dynamic_mix):
                nn.init.zeros_(weight)
            for scale in (self.scale_read, self.scale_write):
                nn.init.constant_(scale, 0.01)

    def weights(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A (…, n, 1), B (…, n, 1) and R (…, n, n) for the streams ``h`` (…, n, d), in the wide dtype."""
        static = (self.static_read[:, None], self.static_write[:, None], self.static_mix)
        a, b, r = (weight.to(torch.promote_types(h.dtype, torch.float32)) for weight in static)
        if not self.dynamic:
            return a, b, r
        maps = torch.cat((self.dynamic_read, self.dynamic_write, self.dynamic_mix))
        to_a, to_b, to_r = torch.split(torch.tanh(linear(self.norm.wide(h), maps)), [1, 1, self.n], -1)
        return a + self.scale_read * to_a, b + self.scale_write * to_b, r + self.scale_read * to_r

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        (h,) = streams
        a, b, r = self.weights(h)
        mixed = combine(torch.cat((a, r), -1).mT, h)
        return mixed[..., 0, :].to(h.dtype), (h, b, mixed[..., 1:, :])

    def write(self, carry: Carry, o: Tensor) -> Streams:
        h, b, mixed = carry
        return ((mixed + b * widen(o).unsqueeze(-2)).to(h.dtype),)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "AᵀH", "writes": "H = B oᵀ + RᵀH", "scale": 1.0}


class _SumOfStreams(Readout):
    def close(self, streams: Streams) -> Tensor:
        (h,) = streams
        return widen(h).sum(-2).to(h.dtype)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "Σ H", "writes": "", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class HyperConnections(Scheme):
    """Hyper-connections with their options.

    Attributes:
        n: number of streams, the paper's expansion rate.
        dynamic: let A, B and R depend on the streams (the paper's DHC), or keep them static (SHC). The
            default is the more general form.
    """

    name = "hyper"
    paper = "hyper-connections, arXiv 2409.19606"
    stream_names = ("H",)
    n: int = 4
    dynamic: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        count(self, "n")
        choose(self, "dynamic", True, False)

    def open(self, h: Tensor) -> Streams:
        """n copies of h."""
        return (h.unsqueeze(-2).repeat_interleave(self.n, -2),)

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """u = AᵀH, H = B oᵀ + RᵀH."""
        return _HyperSublayer(site, norm, self.n, dynamic=self.dynamic)

    def readout(self, norm: NormSpec) -> Readout:
        """The sum of the streams."""
        return _SumOfStreams()

    def upcycled(self, source: Scheme, *, final_norm: bool = True) -> Scheme:
        """Of any Pre-Norm model, as which a single stream starts.

        Raises:
            ConfigError: as :meth:`Scheme.upcycled`; for several streams too, whose sum at the start is not Pre-Norm's
                stream but n times it, which the eps of the final norm tells apart where the stream is small.
        """
        if not source.is_pre_norm():
            return super().upcycled(source, final_norm=final_norm)
        if self.n > 1:
            raise ConfigError(
                f"scheme '{self.label}' cannot go on from a Pre-Norm model: its readout is the sum of {self.n} equal "
                "streams, and the eps of the final norm tells that from one of them; take n=1, or mhc, which reads "
                "their mean"
            )
        return self

    def decay(self, name: str) -> bool:
        """Not for the static weights."""
        return not name.rpartition(".")[2].startswith("static_")
