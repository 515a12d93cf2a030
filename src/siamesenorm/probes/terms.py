"""How much of what a branch reads comes from each stream.

A branch reads a sum u = Σ_j T_j, before the host's own norm. Where a sublayer says what its terms are
(:meth:`~siamesenorm.residual.Sublayer.terms`), T_j is the term of stream j, such as a norm of it. Elsewhere it is what
u changes by, to first order, as stream j alone is scaled up: T_j = ∂/∂a u(…, a·s_j, …) at a = 1. Where streams are read
with weights that do not depend on how large a stream is (attention residuals, multi-gate residuals, hyper-connections,
but for a norm's eps), T_j is the weight times s_j. Where only their sizes relative to each other matter (mHC), the T_j
still sum to u, by Euler's theorem on homogeneous functions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..residual import Norm, Streams, Sublayer, Term, terms_of

__all__ = ["read_terms", "shares_of"]

# Half the width of the difference quotient; its error is the square of it, and float64 leaves a thousandth of that.
_STEP = 1e-4


def read_terms(sublayer: Sublayer, streams: Streams, like: Tensor) -> list[Tensor]:
    """The terms T_j that the branch of ``sublayer`` reads the sum of, each (…, d), in float32 or wider.

    Args:
        sublayer: reads each token by itself, as all do.
        streams: finished.
        like: (…, d), to tell a stream of (…, n, d), which has n terms.
    """
    declared = terms_of(sublayer)
    if declared:
        return [_value(term, stream) for term, stream in zip(declared, streams, strict=True)]
    streams = tuple(stream.double() for stream in streams)
    found = []
    for index, stream in enumerate(streams):
        for lane in range(stream.shape[-2]) if stream.ndim > like.ndim else (None,):
            up, down = (
                sublayer.read((*streams[:index], _scaled(stream, lane, 1 + step), *streams[index + 1 :]))[0]
                for step in (_STEP, -_STEP)
            )
            found.append((up - down) / (2 * _STEP))
    return found


def shares_of(sublayer: Sublayer, streams: Streams, like: Tensor) -> tuple[Tensor, Tensor]:
    """For each term T_j, two shares of u summed over tokens, both (terms,) in float64.

    The share by size is ‖T_j‖ / Σ_k ‖T_k‖, at least 0. The share by projection is T_j·u / u·u, which is negative for a
    term that the others outweigh. Either sums to 1 over the terms of a token, and is 0 for a
    token of which nothing is read.
    """
    by_size, by_projection = [], []
    for row in _rows(streams):
        found = torch.stack([term.double() for term in read_terms(sublayer, row, like)])
        u = found.sum(0)
        sizes = torch.linalg.vector_norm(found, dim=-1)
        tiny = torch.finfo(torch.float64).tiny
        by_size.append((sizes / sizes.sum(0).clamp_min(tiny)).flatten(1).sum(1))
        along = (found * u).sum(-1) / u.square().sum(-1).clamp_min(tiny)
        by_projection.append(along.flatten(1).sum(1))
    return torch.stack(by_size).sum(0), torch.stack(by_projection).sum(0)


def _rows(streams: Streams) -> Iterator[Streams]:
    """A part of the batch at a time, so that terms take little room beside the streams."""
    return zip(*(stream.split(1) for stream in streams), strict=True)


def _value(term: Term, stream: Tensor) -> Tensor:
    wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
    if not term.summed:
        return torch.zeros_like(wide)
    if term.of is None:
        return wide
    return term.of.wide(wide) if isinstance(term.of, Norm) else term.of.to(wide.dtype) * wide


def _scaled(stream: Tensor, lane: int | None, by: float) -> Tensor:
    if lane is None:
        return by * stream
    factors = stream.new_ones(stream.shape[-2], 1)
    factors[lane] = by
    return factors * stream
