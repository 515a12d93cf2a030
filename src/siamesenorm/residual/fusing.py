"""The slot for fused reads: what a sublayer's read and write are made of, as data, and who computes them in one pass.

A sublayer whose read is a sum with one term a stream, and whose write adds a multiple of the branch output to each
stream, can say so (:meth:`Sublayer.terms`). Within a block its write may then travel unfinished, and the next read
completes it, norms, adds, and applies the host's own norm. Who does that is registered here; nobody is at first, and
``read`` and ``write`` of the sublayers, the plain form, are what every backend is held to and falls back to.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .norms import Norm
    from .scheme import Readout, Sublayer

__all__ = ["Backend", "Read", "Term", "backend", "register_backend", "terms_of"]


class Term(NamedTuple):
    """What a sublayer makes of one stream.

    Attributes:
        of: a norm N for the term N(s), a vector c (d,) for c ⊙ s, ``None`` for the stream s itself.
        summed: whether the branch reads the term.
        replaces: whether the term, and not s, is what the write adds to.
        scale: the factor on the branch output in the write.
    """

    of: Norm | Tensor | None = None
    summed: bool = True
    replaces: bool = False
    scale: float = 1.0


class Read(NamedTuple):
    """What a fused read computes.

    Attributes:
        carry: what the sublayer's write adds to, one (…, d) a stream.
        inputs: what the branch is called with, each (…, d): as many as the host has norms there, or one.
        tapped: the sum (…, d) before the host's norms, where it was asked for.
    """

    carry: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    tapped: Tensor | None


class Backend(Protocol):
    """Computes reads, writes and norms. Each may return ``None``, which leaves the work to the plain form."""

    def wanted(self, training: bool) -> bool:
        """Whether there is anything to do for it here and now, in a module that is ``training`` or not."""

    def read(
        self,
        terms: tuple[Term, ...],
        carry: tuple[Tensor, ...],
        o: Tensor | None,
        scales: tuple[float, ...],
        norms: tuple[Norm, ...],
        dtype: torch.dtype | None,
        tap: bool,
    ) -> Read | None:
        """Add ``scales`` times ``o`` to ``carry``, if there is an ``o``, and read the streams that this makes.

        Args:
            terms: what to read of each stream.
            carry: the streams, each (…, d), or what an unfinished write adds to.
            o: the branch output (…, d) of the unfinished write.
            scales: its factor for each stream.
            norms: the host's own norms before the branch.
            dtype: of the inputs, where it is not that of the streams.
            tap: whether the sum is asked for.
        """

    def write(self, carry: tuple[Tensor, ...], o: Tensor, scales: tuple[float, ...]) -> tuple[Tensor, ...] | None:
        """The streams after ``scales`` times ``o`` (…, d) is added to ``carry``, in the dtypes that adding gives."""

    def norm(self, norm: Norm, x: Tensor) -> Tensor | None:
        """The norm of ``x`` (…, d), in its dtype."""


def terms_of(module: Sublayer | Readout) -> tuple[Term, ...]:
    """What a sublayer or readout says that it computes; nothing if it computes something else by now.

    A class that overrides the plain form, or an object with a ``write`` of its own, does not have what it inherits
    there of terms.
    """
    own = vars(module)
    if "write" in own or "read" in own or "close" in own or not _speaks_for_itself(type(module)):
        return ()
    return module.terms() or ()


@functools.cache
def _speaks_for_itself(kind: type) -> bool:
    """Whether no class before the one that says the terms has a plain form."""
    before = itertools.takewhile(lambda each: "terms" not in vars(each), kind.__mro__)
    return not any(_PLAIN_FORM & vars(each).keys() for each in before)


_PLAIN_FORM = frozenset({"read", "write", "close"})
_backend: Backend | None = None


def register_backend(made: Backend | None) -> None:
    """Let ``made`` compute reads and writes from now on; ``None`` leaves all to the plain form."""
    global _backend
    _backend = made


def backend(module: nn.Module) -> Backend | None:
    """Who computes reads and writes of ``module``. A compiler is given the plain form, which it fuses by itself."""
    if _backend is None or torch.compiler.is_compiling() or not _backend.wanted(module.training):
        return None
    return _backend
