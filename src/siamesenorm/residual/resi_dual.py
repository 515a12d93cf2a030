"""ResiDual: a Post-Norm stream X that every branch reads, and a Pre-Norm stream Y that collects (arXiv 2304.14802).

    open       X = Y = h
    sublayer   o = F(X)          X = N(X + o)          Y = Y + o
    readout    X + Ny_out(Y)

No branch reads Y, and the host's own norms before the branches have no place. The paper's output is the readout; here
the host's final norm follows it, as it does under every scheme.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .norms import NormSpec, widen
from .scheme import Carry, NormPlace, Readout, Scheme, Site, Streams, Sublayer, register

__all__ = ["ResiDual"]


class _ResiDualSublayer(Sublayer):
    def __init__(self, site: Site, norm: NormSpec) -> None:
        super().__init__(site)
        self.norm = norm.build()

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        x, y = streams
        return x, (x, y)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        x, y = carry
        return self.norm.wide(widen(x) + o).to(x.dtype), y + o

    def describe(self) -> dict[str, str | float]:
        return {"reads": "X", "writes": "X = N(X + o), Y = Y + o", "scale": 1.0}


class _ResiDualReadout(Readout):
    def __init__(self, norm: NormSpec) -> None:
        super().__init__()
        self.norm_y = norm.build()

    def close(self, streams: Streams) -> Tensor:
        x, y = streams
        return (widen(x) + self.norm_y.wide(y)).to(x.dtype)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "X + Ny(Y)", "writes": "", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class ResiDual(Scheme):
    """ResiDual. It has no options."""

    name = "resi_dual"
    paper = "ResiDual, arXiv 2304.14802"
    stream_names = ("X", "Y")

    def open(self, h: Tensor) -> Streams:
        """X = Y = h."""
        return (h, h)

    def input_norm(self, site: Site) -> NormPlace:
        """Nowhere: the branch reads X, which is normalised already."""
        return "none"

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """X = N(X + F(X)), Y = Y + F(X)."""
        return _ResiDualSublayer(site, norm)

    def readout(self, norm: NormSpec) -> Readout:
        """X + Ny_out(Y)."""
        return _ResiDualReadout(norm)
