"""Pre-Norm and Post-Norm: one stream. Other schemes of one stream are built from their parts.

    pre    Y = Y + F(N(Y))        readout Y      (Wang et al., arXiv 1906.01787; Xiong et al., arXiv 2002.04745)
    post   X = N(X + F(X))        readout X      (Vaswani et al., arXiv 1706.03762)

The host's final norm follows either readout. Post-Norm's paper has none after the last norm; here it stays, so that
every scheme keeps the host's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .fusing import Term
from .norms import NormSpec, widen
from .scheme import Carry, NormPlace, Readout, Scheme, Site, Streams, Sublayer, register

__all__ = ["AddSublayer", "NormedAddSublayer", "OneStream", "PostNorm", "PreNorm"]


class AddSublayer(Sublayer):
    """Reads the stream as it is, and adds the branch output to it."""

    def __init__(self, site: Site, stream: str = "Y") -> None:
        super().__init__(site)
        self.stream = stream

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        """The stream, and the stream."""
        (stream,) = streams
        return stream, (stream,)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        """The stream plus o."""
        (stream,) = carry
        return (stream + o,)

    def terms(self) -> tuple[Term, ...]:
        """The stream itself."""
        return (Term(),)

    def describe(self) -> dict[str, str | float]:
        """As :meth:`Sublayer.describe`."""
        return {"reads": self.stream, "writes": f"{self.stream} = {self.stream} + o", "scale": 1.0}


class NormedAddSublayer(Sublayer):
    """Reads the stream as it is, and replaces it by N(a·X + o)."""

    def __init__(self, site: Site, norm: NormSpec, a: float = 1.0) -> None:
        super().__init__(site)
        self.norm = norm.build()
        self.a = a

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        """The stream, and the stream."""
        (x,) = streams
        return x, (x,)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        """N(a·X + o)."""
        (x,) = carry
        wide = widen(x)
        total = wide + o if self.a == 1.0 else self.a * wide + o
        return (self.norm.wide(total).to(x.dtype),)

    def describe(self) -> dict[str, str | float]:
        """As :meth:`Sublayer.describe`."""
        return {"reads": "X", "writes": "X = N(X + o)" if self.a == 1.0 else "X = N(a·X + o)", "scale": self.a}


class OneStream(Readout):
    """The stream, as it is."""

    def __init__(self, stream: str) -> None:
        super().__init__()
        self.stream = stream

    def close(self, streams: Streams) -> Tensor:
        """The stream."""
        (stream,) = streams
        return stream

    def describe(self) -> dict[str, str | float]:
        """As :meth:`Sublayer.describe`."""
        return {"reads": self.stream, "writes": "", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class PreNorm(Scheme):
    """Pre-Norm: the stream is an identity path, each branch reads a norm of it."""

    name = "pre"
    paper = "Wang et al., arXiv 1906.01787; Xiong et al., arXiv 2002.04745"
    stream_names = ("Y",)

    def is_pre_norm(self) -> bool:
        """It is."""
        return True

    def open(self, h: Tensor) -> Streams:
        """Y = h."""
        return (h,)

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """Y = Y + F(N(Y)), N being the host's own norm."""
        return AddSublayer(site)

    def readout(self, norm: NormSpec) -> Readout:
        """Y."""
        return OneStream("Y")


@register
@dataclass(frozen=True, kw_only=True)
class PostNorm(Scheme):
    """Post-Norm: the stream is normalised after every update."""

    name = "post"
    paper = "Vaswani et al., arXiv 1706.03762"
    stream_names: ClassVar[tuple[str, ...]] = ("X",)

    def open(self, h: Tensor) -> Streams:
        """X = h."""
        return (h,)

    def input_norm(self, site: Site) -> NormPlace:
        """Nowhere: the branch reads the stream as it is, and the norm after the add is the sublayer's own."""
        return "none"

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """X = N(X + F(X))."""
        return NormedAddSublayer(site, norm)

    def readout(self, norm: NormSpec) -> Readout:
        """X."""
        return OneStream("X")
