"""Pre-Norm and Post-Norm: one stream.

    pre    Y = Y + F(N(Y))        readout Y      (Wang et al., arXiv 1906.01787; Xiong et al., arXiv 2002.04745)
    post   X = N(X + F(X))        readout X      (Vaswani et al., arXiv 1706.03762)

The host's final norm follows either readout. Post-Norm's paper has none after the last norm; here it stays, so that
every scheme keeps the host's names.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .norms import NormSpec, widen
from .scheme import Carry, NormPlace, Readout, Scheme, Site, Streams, Sublayer, register

__all__ = ["PostNorm", "PreNorm"]


class _PreSublayer(Sublayer):
    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        (y,) = streams
        return y, (y,)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        (y,) = carry
        return (y + o,)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "Y", "writes": "Y = Y + o", "scale": 1.0}


class _PostSublayer(Sublayer):
    def __init__(self, site: Site, norm: NormSpec) -> None:
        super().__init__(site)
        self.norm = norm.build()

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        (x,) = streams
        return x, (x,)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        (x,) = carry
        return (self.norm.wide(widen(x) + o).to(x.dtype),)

    def describe(self) -> dict[str, str | float]:
        return {"reads": "X", "writes": "X = N(X + o)", "scale": 1.0}


class _OneStream(Readout):
    def __init__(self, stream: str) -> None:
        super().__init__()
        self.stream = stream

    def close(self, streams: Streams) -> Tensor:
        (stream,) = streams
        return stream

    def describe(self) -> dict[str, str | float]:
        return {"reads": self.stream, "writes": "", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class PreNorm(Scheme):
    """Pre-Norm: the stream is an identity path, each branch reads a norm of it."""

    name = "pre"

    def open(self, h: Tensor) -> Streams:
        """Y = h."""
        return (h,)

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """Y = Y + F(N(Y)), N being the host's own norm."""
        return _PreSublayer(site)

    def readout(self, norm: NormSpec) -> Readout:
        """Y."""
        return _OneStream("Y")


@register
@dataclass(frozen=True, kw_only=True)
class PostNorm(Scheme):
    """Post-Norm: the stream is normalised after every update."""

    name = "post"

    def open(self, h: Tensor) -> Streams:
        """X = h."""
        return (h,)

    def input_norm(self, site: Site) -> NormPlace:
        """Nowhere: the branch reads the stream as it is, and the norm after the add is the sublayer's own."""
        return "none"

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """X = N(X + F(X))."""
        return _PostSublayer(site, norm)

    def readout(self, norm: NormSpec) -> Readout:
        """X."""
        return _OneStream("X")
