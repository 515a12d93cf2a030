"""What the schemes of several streams share: weighted sums, and a softmax over sources that saves nothing of its own.

Weights and sums are computed in float32, or wider where the streams are, whatever autocast says.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .norms import widen

__all__ = ["combine", "linear", "rms_scores", "softmax_mix"]


def combine(weights: Tensor, streams: Tensor) -> Tensor:
    """``Σ_j weights[i, j] · streams[j]`` in the wide dtype.

    Args:
        weights: (…, m, n), or (m, n) for every position alike.
        streams: (…, n, d).

    Returns:
        (…, m, d).
    """
    with _full_precision(streams):
        streams = widen(streams)
        return weights.to(streams.dtype) @ streams


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weightᵀ`` in the wide dtype: (…, d) and (m, d) to (…, m)."""
    with _full_precision(x):
        x = widen(x)
        return F.linear(x, weight.to(x.dtype))


def rms_scores(query: Tensor, sources: Sequence[Tensor], eps: float, scale: float) -> list[Tensor]:
    """``scale · query · RMSNorm(source)`` of each source in the wide dtype, the norm being without a weight.

    Nothing of a source's size is kept for the backward pass but the source: the query meets it before its norm does.

    Args:
        query: (d,).
        sources: each (…, d).
        eps: of the norm.
        scale: a constant factor.

    Returns:
        One tensor (…, 1) for each source.
    """
    scores = []
    for source in sources:
        wide = widen(source)
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        scores.append((wide * query.to(wide.dtype)).sum(-1, keepdim=True) * (inverse * scale))
    return scores


def softmax_mix(query: Tensor, sources: Sequence[Tensor], eps: float, scale: float = 1.0) -> Tensor:
    """``Σ_j softmax_j(scale · query · RMSNorm(source_j)) · source_j``, in the sources' dtype.

    The backward pass computes the scores again from the sources, so a stack whose sources grow by one at every sublayer
    holds each source once, and not once for every sublayer that reads it.

    Args:
        query: (d,).
        sources: one or more, each (…, d).
        eps: of the norm, which has no weight: with one, w·(g ⊙ k) is (w ⊙ g)·k.
        scale: a constant factor.
    """
    return cast(Tensor, _SoftmaxMix.apply(query, eps, scale, *sources))  # type: ignore[no-untyped-call]


class _SoftmaxMix(torch.autograd.Function):
    """With k_j = v_j · r_j the norm of source v_j, s_j = scale · w·k_j and p = softmax(s): u = Σ_j p_j v_j.

    For a gradient g of u,

        ds_j = p_j (g·v_j - Σ_i p_i g·v_i)
        dv_j = p_j g + scale · ds_j · r_j (w - (w·k_j) k_j / d)
        dw   = scale · Σ_j ds_j k_j
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(query: Tensor, eps: float, scale: float, *sources: Tensor) -> Tensor:
        weights = torch.cat(rms_scores(query, sources, eps, scale), -1).softmax(-1)
        mixed = torch.zeros((), dtype=weights.dtype, device=weights.device)
        for weight, source in zip(weights.chunk(len(sources), -1), sources, strict=True):
            mixed = mixed + weight * source
        return mixed.to(sources[0].dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        query, ctx.eps, ctx.scale, *sources = inputs
        ctx.save_for_backward(query, *sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, *sources = ctx.saved_tensors
        g = widen(grad)
        w = query.to(g.dtype)
        weights = torch.cat(rms_scores(query, sources, ctx.eps, ctx.scale), -1).softmax(-1)
        along = torch.cat([(g * source).sum(-1, keepdim=True) for source in sources], -1)
        d_scores = weights * (along - (weights * along).sum(-1, keepdim=True)) * ctx.scale
        d_query, d_sources = torch.zeros_like(w), []
        each = (values.chunk(len(sources), -1) for values in (weights, d_scores))
        for p, ds, source in zip(*each, sources, strict=True):
            v = widen(source)
            r = torch.rsqrt(v.square().mean(-1, keepdim=True) + ctx.eps)
            k = v * r
            d_query = d_query + (ds * k).reshape(-1, w.shape[0]).sum(0)
            through_norm = ds * r * (w - (k * w).mean(-1, keepdim=True) * k)
            d_sources.append((p * g + through_norm).to(source.dtype))
        return d_query.to(query.dtype), None, None, *d_sources


def _full_precision(x: Tensor) -> AbstractContextManager[object]:
    """No autocast of matrix products on ``x``'s device, where there is such a thing."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
