"""SiameseNorm: a normalised stream X and an identity stream Y that share every branch (arXiv 2602.08064).

    open       X = Y = h
    sublayer   X̂ = Nx(X)                 o = F(Nin(X̂ + Ny(Y)))       post-pre, and the MLP of hybrid-pre
               X = X̂ + c·o               Y = Y + o
    readout    Nx_out(X) + Ny_out(Y)

Nin is the host's own norm; its place at the sum is the paper's "normalised input". hybrid-pre differs in attention:

               o = Attn_qkv(c1 ⊙ X + Ny(Y))                          q, k and v normalised per head, no Nin
               X = X + c·o               Y = Y + o

and hybrid-pre*, in block 0 alone, reads Nx(X) + Ny(Y) in both sublayers and leaves X itself un-normalised.

The ablation of the paper's table 3 takes terms with Y away and leaves every other option as it is (``topology``):

    siamese      the branches read X and Y, and so does the readout                  the scheme itself
    resi_dual    the branches read X alone: Ny is gone but for Ny_out                ResiDual's flow (arXiv 2304.14802)
    single       there is no Y: the readout is Nx_out(X)                             the paper's "original"

so that at c = 1 and without Nin resi_dual is ResiDual and single is Post-Norm (HybridNorm at ``x="hybrid"``), each with
the norm moved from the write to the next read.

The scale c enters X only. The paper's text has 1/sqrt(l+1), l a layer index; its three official files agree on
1/sqrt(2(l+1)) for both sublayers of block l, which is the default here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn

from .errors import ConfigError
from .fusing import Term
from .norms import Norm, NormSpec, narrow, widen
from .scheme import Carry, NormPlace, Readout, Scheme, Site, Streams, Sublayer, choose, register

__all__ = ["SiameseNorm"]

Topology = Literal["siamese", "resi_dual", "single"]
# Each has all terms of those before it.
_TOPOLOGIES: tuple[Topology, ...] = ("single", "resi_dual", "siamese")


class _NormedX(Sublayer):
    """Reads Nx(X) + Ny(Y); Nx(X) replaces X, but for the starred first block (``keeps_x``)."""

    def __init__(self, site: Site, scheme: SiameseNorm, norm: NormSpec, *, keeps_x: bool) -> None:
        super().__init__(site)
        self.norm_x = scheme.norm_x(norm)
        self.norm_y = scheme.norm_y(norm) if scheme.topology == "siamese" else None
        self.topology = scheme.topology
        self.scale = scheme.scale(site)
        self.replace = not keeps_x

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        x, *y = streams
        x_hat = self.norm_x(x)
        u = x_hat if self.norm_y is None else narrow(x_hat + self.norm_y.wide(y[0]), x.dtype)
        return u, (x_hat if self.replace else x, *y)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        return _update(carry, o, self.scale)

    def terms(self) -> tuple[Term, ...]:
        return Term(self.norm_x, replaces=self.replace, scale=self.scale), *_terms_of_y(self.norm_y, self.topology)

    def describe(self) -> dict[str, str | float]:
        return _described("Nx(X)", "Nx(X)" if self.replace else "X", self.topology, self.scale)


class _ScaledX(Sublayer):
    """Reads c1 ⊙ X + Ny(Y): hybrid-pre's attention, c1 a learnable vector (d,)."""

    def __init__(self, site: Site, scheme: SiameseNorm, norm: NormSpec) -> None:
        super().__init__(site)
        self.c1 = nn.Parameter(torch.empty(norm.size))
        self.norm_y = scheme.norm_y(norm) if scheme.topology == "siamese" else None
        self.topology = scheme.topology
        self.scale = scheme.scale(site)
        self.x_init = scheme.x_init
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.c1, self.x_init)

    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        x, *y = streams
        u = widen(self.c1) * widen(x)
        if self.norm_y is not None:
            u = u + self.norm_y.wide(y[0])
        return narrow(u, x.dtype), (x, *y)

    def write(self, carry: Carry, o: Tensor) -> Streams:
        return _update(carry, o, self.scale)

    def terms(self) -> tuple[Term, ...]:
        return Term(self.c1, scale=self.scale), *_terms_of_y(self.norm_y, self.topology)

    def describe(self) -> dict[str, str | float]:
        return _described("c1⊙X", "X", self.topology, self.scale)


def _starting(norm: NormSpec, option: str, init: float) -> Norm:
    """A new norm that multiplies by ``init`` at first, which takes a weight unless it is 1."""
    if init != 1 and not norm.affine:
        raise ConfigError(
            f"option '{option}' of scheme 'siamese' must be 1, not {init:g}: the norms here have no weight"
        )
    return norm.build(init=init)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _update(carry: Carry, o: Tensor, scale: float) -> Streams:
    """The update of each stream there is; each is one operation, so it rounds once."""
    x, *y = carry
    return torch.add(x, o, alpha=scale), *(stream + o for stream in y)


def _terms_of_y(norm: Norm | None, topology: Topology) -> tuple[Term, ...]:
    """The term of Y, which is there in all topologies but one and read in one alone."""
    return () if topology == "single" else (Term(norm, summed=norm is not None),)


def _described(read: str, kept: str, topology: Topology, scale: float) -> dict[str, str | float]:
    """A row of a table: what is read of X, what X is when ``o`` is added, and what there is of Y."""
    reads = f"{read} + Ny(Y)" if topology == "siamese" else read
    writes = f"X = {kept} + c·o" + ("" if topology == "single" else ", Y = Y + o")
    return {"reads": reads, "writes": writes, "scale": scale}


class _Readout(Readout):
    def __init__(self, scheme: SiameseNorm, norm: NormSpec) -> None:
        super().__init__()
        self.norm_x = scheme.norm_x(norm)
        self.norm_y = None if scheme.topology == "single" else scheme.norm_y(norm)

    def close(self, streams: Streams) -> Tensor:
        x, *y = streams
        if self.norm_y is None:
            return cast(Tensor, self.norm_x(x))
        return narrow(self.norm_x.wide(x) + self.norm_y.wide(y[0]), x.dtype)

    def terms(self) -> tuple[Term, ...]:
        return (Term(self.norm_x),) if self.norm_y is None else (Term(self.norm_x), Term(self.norm_y))

    def describe(self) -> dict[str, str | float]:
        return {"reads": "Nx(X)" if self.norm_y is None else "Nx(X) + Ny(Y)", "writes": "", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class SiameseNorm(Scheme):
    """SiameseNorm with its options.

    Attributes:
        x: what the X stream follows: ``"post"`` (post-pre, the general form) or ``"hybrid"`` (hybrid-pre, the paper's
            best form for language models; it needs a host whose attention and MLP are sublayers of their own).
        first_block_pre: hybrid-pre*, whose block 0 leaves X un-normalised. Only with ``x="hybrid"``.
        normalized_input: keep the host's own norm at the sum of both streams (Nin).
        depth_scale: the scale c: ``"code"`` is 1/sqrt(2(l+1)) by block l, as in the official code; ``"paper"`` is
            1/sqrt(i+1) by sublayer i, as the paper's text can be read; ``"none"`` is 1.
        x_init: initial weight of all that X is read through: Nx, Nx_out and c1. At 0 the model starts as Pre-Norm
            whose branch norm is Nin∘Ny.
        y_init: initial weight of all that Y is read through: Ny and Ny_out. At 0 the model starts as its X alone.
        y_eps: eps of Ny and Ny_out; ``None`` is that of the host's norms. At 1, and with ``x_init=0``, Nin∘Ny is Nin
            but for half of Nin's own eps, relatively, whatever the scale of Y: the start of a model that was trained
            with Pre-Norm (:meth:`upcycled`).
        topology: ``"siamese"``, or one of the ablations: ``"resi_dual"``, whose branches do not read Y, and
            ``"single"``, which has no Y and takes none of Y's options. Neither can have ``x_init=0``, as X is all that
            their branches read.
    """

    name = "siamese"
    paper = "SiameseNorm, arXiv 2602.08064"
    stream_names = ("X", "Y")
    x: Literal["post", "hybrid"] = "post"
    first_block_pre: bool = False
    normalized_input: bool = True
    depth_scale: Literal["code", "paper", "none"] = "code"
    x_init: float = 1.0
    y_init: float = 1.0
    y_eps: float | None = None
    topology: Topology = "siamese"

    def __post_init__(self) -> None:
        super().__post_init__()
        choose(self, "x", "post", "hybrid")
        choose(self, "first_block_pre", False, True)
        choose(self, "normalized_input", True, False)
        choose(self, "depth_scale", "code", "paper", "none")
        choose(self, "topology", "siamese", "resi_dual", "single")
        for option in ("x_init", "y_init"):
            if not _is_finite(value := getattr(self, option)):
                raise ConfigError(f"option '{option}' of scheme 'siamese' must be a finite number, not {value!r}")
        if self.y_eps is not None and not (_is_finite(self.y_eps) and self.y_eps >= 0):
            raise ConfigError(
                f"option 'y_eps' of scheme 'siamese' must be a number of at least 0, or none, not {self.y_eps!r}"
            )
        if self.first_block_pre and self.x != "hybrid":
            raise ConfigError("option 'first_block_pre' of scheme 'siamese' is hybrid-pre*: it needs x='hybrid'")
        if self.topology != "siamese" and self.x_init == 0:
            raise ConfigError(
                f"option 'x_init' of scheme 'siamese' cannot be 0 with topology='{self.topology}', whose branches read "
                "nothing but X: leave x_init at 1, or take topology='siamese'"
            )
        if self.x_init == 0 and self.y_init == 0:
            raise ConfigError(
                "options 'x_init' and 'y_init' of scheme 'siamese' cannot both be 0: its branches would read nothing"
            )
        if self.topology == "single" and (self.y_init != 1 or self.y_eps is not None):
            raise ConfigError("options 'y_init' and 'y_eps' of scheme 'siamese' are for Y: topology='single' has none")

    def open(self, h: Tensor) -> Streams:
        """X = Y = h, or X alone."""
        return (h,) if self.topology == "single" else (h, h)

    def scale(self, site: Site) -> float:
        """The scale c of X's update at ``site``."""
        if self.depth_scale == "code":
            return 1.0 / math.sqrt(2 * (site.block + 1))
        if self.depth_scale == "paper":
            return 1.0 / math.sqrt(site.sublayer + 1)
        return 1.0

    def input_norm(self, site: Site) -> NormPlace:
        """Before the branch, but for hybrid-pre's attention, and nowhere without ``normalized_input``."""
        return "none" if self._hybrid_attention(site) or not self.normalized_input else "before"

    def branch_norms(self, site: Site) -> tuple[str, ...]:
        """q, k and v in hybrid-pre's attention."""
        return ("q", "k", "v") if self._hybrid_attention(site) else ()

    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """The sublayer's read and write.

        Raises:
            ConfigError: hybrid-pre at a site whose attention and MLP run in parallel.
        """
        if self.x == "hybrid" and site.kind == "parallel":
            raise ConfigError(
                "siamese x='hybrid' needs attention and MLP one after the other; this host runs them in parallel"
            )
        starred = self.first_block_pre and site.first_block
        if self._hybrid_attention(site) and not starred:
            return _ScaledX(site, self, norm)
        return _NormedX(site, self, norm, keeps_x=starred)

    def readout(self, norm: NormSpec) -> Readout:
        """Nx_out(X) + Ny_out(Y), or Nx_out(X) where there is no Y."""
        return _Readout(self, norm)

    def norm_x(self, norm: NormSpec) -> Norm:
        """A new Nx, like the host's norm."""
        return _starting(norm, "x_init", self.x_init)

    def norm_y(self, norm: NormSpec) -> Norm:
        """A new Ny, like the host's norm but for the eps."""
        return _starting(replace(norm, eps=norm.eps if self.y_eps is None else self.y_eps), "y_init", self.y_init)

    def opening(self, name: str) -> float:
        """1 - ``x_init`` for all that X is read through, and 1 - ``y_init`` for Y."""
        if name.endswith(("norm_x.weight", "c1")):
            return 1.0 - self.x_init
        return 1.0 - self.y_init if name.endswith("norm_y.weight") else 0.0

    def upcycled(self, source: Scheme, *, final_norm: bool = True) -> Scheme:
        """Of Pre-Norm, post-pre with Nx at 0 and Ny at weight 1 and eps 1; of a smaller topology, with Ny at 0.

        Raises:
            ConfigError: as :meth:`Scheme.upcycled`.
        """
        if source.is_pre_norm():
            if why := self._unlike_pre_norm(final_norm):
                raise ConfigError(f"scheme '{self.label}' cannot go on from a Pre-Norm model: {why}")
            return replace(self, x_init=0.0, y_init=1.0, y_eps=1.0)
        if isinstance(source, SiameseNorm) and _TOPOLOGIES.index(source.topology) < _TOPOLOGIES.index(self.topology):
            own = {name: getattr(self, name) for name in ("topology", "stream_dtype", "warmup_steps")}
            eps = self.y_eps if source.topology == "single" else source.y_eps
            grown = replace(source, y_init=0.0, y_eps=eps, **own)
            if grown == replace(self, x_init=source.x_init, y_init=0.0, y_eps=eps):
                return grown
        if isinstance(source, SiameseNorm):
            # Where the streams started is the model's to say.
            start = {name: getattr(source, name) for name in ("x_init", "y_init", "y_eps")}
            return super(SiameseNorm, replace(self, **start)).upcycled(source, final_norm=final_norm)
        return super().upcycled(source, final_norm=final_norm)

    def _unlike_pre_norm(self, final_norm: bool) -> str | None:
        """Why no weights make this scheme Pre-Norm, if none do."""
        if self.x == "hybrid":
            return "hybrid-pre takes the host's norm out of attention and norms q, k and v instead; take x='post'"
        if self.topology != "siamese":
            return f"the branches of topology='{self.topology}' do not read the stream that is never normalised"
        if not self.normalized_input:
            return "normalized_input=False takes out the host's norms, whose trained weights the branches need"
        if not final_norm:
            return "its readout norms each token, which is Pre-Norm's only before a final norm, and this model has none"
        return None

    def _hybrid_attention(self, site: Site) -> bool:
        return self.x == "hybrid" and site.kind == "attention"
