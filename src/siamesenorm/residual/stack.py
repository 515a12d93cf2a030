"""A stack of branches under any scheme, for models written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from .errors import ConfigError, nearest
from .norms import Norm, NormKind, NormSpec
from .run import Step, close_streams, open_streams, through
from .scheme import Block, Kind, Scheme, Site, Streams, Sublayer, make_scheme

__all__ = ["Stack"]

Arguments = Mapping[str, Mapping[str, Any]]


class _StackBlock(Block):
    """Sublayers that form one block: each a branch, the host's norm for it, and the scheme's read and write."""

    def __init__(self, branches: Iterable[nn.Module], sites: Iterable[Site], scheme: Scheme, norm: NormSpec) -> None:
        super().__init__()
        sites = tuple(sites)
        self.places = tuple(scheme.input_norm(site) for site in sites)
        self.branches = nn.ModuleList(branches)
        self.norms = nn.ModuleList(norm.build() if place != "none" else nn.Identity() for place in self.places)
        for site, own in zip(sites, self.norms, strict=True):
            if isinstance(own, Norm):
                own.scale = scheme.input_scale(site)
        self.residuals = nn.ModuleList(scheme.sublayer(site, norm) for site in sites)

    def parts(self) -> tuple[tuple[nn.Module, ...], ...]:
        """As :meth:`Block.parts`."""
        return tuple(zip(self.residuals, self.branches, self.norms, strict=True))

    def forward(self, streams: Streams, arguments: Arguments) -> Streams:
        """Streams in, finished streams out."""
        steps = []
        for index, (residual, norm, place) in enumerate(zip(self.residuals, self.norms, self.places, strict=True)):
            residual = cast(Sublayer, residual)
            keywords = arguments.get(residual.site.kind, {})
            norms = (cast(Norm, norm),) if place == "before" else ()
            steps.append(Step(residual, partial(self._branch, index, keywords), norms))
        return through(steps, streams)

    def _branch(self, index: int, keywords: Mapping[str, Any], u: Tensor) -> Tensor:
        """Branch ``index``, and the stack's own norm where that goes behind it."""
        o = self.branches[index](u, **keywords)
        return cast(Tensor, self.norms[index](o) if self.places[index] == "after" else o)


class Stack(nn.Module):
    """Branches joined by a residual scheme, from embedding to the output of the final norm.

    A branch is any module that maps (…, d_model) to (…, d_model) and has neither a norm of its own nor a residual
    connection. Attention that a scheme wants to normalise q, k and v per head (SiameseNorm's ``x="hybrid"``) has to do
    so itself and say so, with an attribute ``branch_norms = ("q", "k", "v")``.

    Args:
        branches: the branches in order.
        scheme: a scheme's name, or a :class:`Scheme`.
        d_model: width of the streams.
        kinds: what the branches of one block are, in order; the length of ``branches`` is a multiple of it.
        norm: ``"rms"`` or ``"layer"``, for every norm of the stack.
        eps: of every norm.
        bias: give every norm a bias.
        **options: the scheme's options, where it is given by name.

    Raises:
        ConfigError: the branches do not fill whole blocks, an unknown kind, or attention that does not normalise what
            the scheme asks for.

    Example:
        >>> stack = Stack([Attention(64), MLP(64)] * 6, "siamese", 64)
        >>> h = stack(embedding, attention={"mask": mask})
    """

    def __init__(
        self,
        branches: Sequence[nn.Module],
        scheme: str | Scheme,
        d_model: int,
        *,
        kinds: Sequence[str] = ("attention", "mlp"),
        norm: NormKind = "rms",
        eps: float = 1e-6,
        bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.scheme = make_scheme(scheme, **options)
        for kind in kinds:
            if kind not in ("attention", "mlp", "parallel"):
                raise ConfigError(f"unknown kind of branch '{kind}': {nearest(kind, ('attention', 'mlp', 'parallel'))}")
        if not branches or len(branches) % len(kinds):
            raise ConfigError(f"{len(branches)} branches do not fill whole blocks of {len(kinds)} ({', '.join(kinds)})")
        self.kinds = tuple(kinds)
        spec = NormSpec(norm, d_model, eps, bias)
        sites = stack_sites(len(branches) // len(kinds), self.kinds)
        for site, branch in zip(sites, branches, strict=True):
            missing = set(self.scheme.branch_norms(site)) - set(getattr(branch, "branch_norms", ()))
            if missing:
                raise ConfigError(
                    f"scheme '{self.scheme.name}' wants {', '.join(sorted(missing))} normalised per head inside the "
                    f"attention at sublayer {site.sublayer}; normalise them there and set its attribute 'branch_norms'"
                )
        n = len(kinds)
        self.blocks = nn.ModuleList(
            _StackBlock(branches[i : i + n], sites[i : i + n], self.scheme, spec) for i in range(0, len(branches), n)
        )
        self.readout = self.scheme.readout(spec)
        self.norm = spec.build()

    def forward(self, h: Tensor, **arguments: Mapping[str, Any]) -> Tensor:
        """Run the stack.

        Args:
            h: the embedding (…, d_model).
            **arguments: keyword arguments for the branches of a kind, such as ``attention={"mask": mask}``.

        Returns:
            The final norm of the readout (…, d_model), in ``h``'s dtype.
        """
        for kind in arguments:
            if kind not in self.kinds:
                raise ConfigError(f"this stack has no branches of kind '{kind}': {nearest(kind, self.kinds)}")
        streams = open_streams(self.scheme, h)
        for block in self.blocks:
            streams = block(streams, arguments)
        return cast(Tensor, self.norm(close_streams(self.readout, streams)))


def stack_sites(blocks: int, kinds: Sequence[str]) -> tuple[Site, ...]:
    """The sites of a stack of ``blocks`` blocks whose sublayers are of ``kinds``, in order."""
    return tuple(
        Site(block * len(kinds) + i, block, cast(Kind, kind), blocks, blocks * len(kinds))
        for block in range(blocks)
        for i, kind in enumerate(kinds)
    )
