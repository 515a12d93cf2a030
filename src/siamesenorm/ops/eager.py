"""The fused read in torch's own operations.

Both passes go through the rows in pieces, so that what is computed on the way is never as large as a stream; all of it
is in the wide dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .plan import NormPlan, Plan, Weights, rows_of, scaled_sum, wide_dtype

__all__ = ["backward", "forward"]

# Entries of a piece for each thread. Torch splits an operation from 32,768 entries on.
_PIECE = 131_072


class _Stats:
    """What a norm's backward pass wants of its forward pass: the inverse deviation (n, 1), and the mean."""

    __slots__ = ("inverse", "mean")

    def __init__(self, inverse: Tensor, mean: Tensor | None = None) -> None:
        self.inverse = inverse
        self.mean = mean


def _pieces(rows: int, width: int, device: torch.device) -> Iterator[slice]:
    step = max(_PIECE * torch.get_num_threads() // max(width, 1), 1) if device.type == "cpu" else max(rows, 1)
    # The last two share what is left, so that none is too small to be worth its calls.
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _stats(plan: NormPlan, x: Tensor, weights: Weights) -> tuple[_Stats | None, Tensor | None]:
    """The statistics of ``x`` (n, d), and the norm's output where it comes with them."""
    if plan.kind == "rms":
        # The plain form's own operations, so that both give the same bits.
        return _Stats(x.square().mean(-1, keepdim=True).add_(plan.eps).rsqrt_()), None
    if plan.kind == "layer":
        out, mean, inverse = torch.native_layer_norm(x, x.shape[-1:], *weights, plan.eps)
        return _Stats(inverse, mean), out
    return None, None


def _apply(plan: NormPlan, x: Tensor, weights: Weights) -> tuple[Tensor, _Stats | None]:
    """The norm of ``x`` (n, d): a tensor of its own, but that of ``"same"``, which is ``x``."""
    weight, bias = weights
    stats, out = _stats(plan, x, weights)
    if plan.kind == "vector":
        out = x if weight is None else x * weight
    elif plan.kind == "rms" and stats is not None:
        out = x * stats.inverse
        if weight is not None:
            out.mul_(weight)
        if bias is not None:
            out.add_(bias)
    return x if out is None else out, stats


def _apply_backward(
    plan: NormPlan, grad: Tensor, x: Tensor, weights: Weights, stats: _Stats | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``x`` (n, d), weight and bias (d,) from that of the output (n, d); ``grad`` is not written to."""
    weight, bias = weights
    if plan.kind == "same":
        return grad, None, None
    if plan.kind == "vector" or stats is None:
        return (grad if weight is None else grad * weight), (grad * x).sum(0), None
    of_bias = None if bias is None else grad.sum(0)
    if stats.mean is not None:
        wanted = [True, weight is not None, False]
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[-1:], stats.mean, stats.inverse, weight, bias, wanted
        )
        return of_x, of_weight, of_bias
    inverse = stats.inverse
    products = grad * x
    along = products.sum(-1, keepdim=True) if weight is None else (products @ weight).unsqueeze_(-1)
    of_x = grad * inverse if weight is None else (grad * weight).mul_(inverse)
    of_x.addcmul_(x, along.mul_(inverse.pow(3)).div_(x.shape[-1]), value=-1)
    return of_x, None if weight is None else products.mul_(inverse).sum(0), of_bias


def forward(
    plan: Plan, o: Tensor | None, carry: tuple[Tensor, ...], weights: tuple[Weights, ...]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """As :class:`~siamesenorm.ops.function.Kernels`."""
    shape = carry[0].shape
    wide = wide_dtype(o, *carry)
    if o is None:
        streams = [rows_of(each) for each in carry]
        whole = list(carry)
    else:
        whole = [torch.add(each, o, alpha=term.scale) for each, term in zip(carry, plan.terms, strict=True)]
        streams = [rows_of(each) for each in whole]
    out = torch.empty(streams[0].shape, dtype=plan.dtype, device=o.device if o is not None else carry[0].device)
    tapped = torch.empty_like(out) if plan.tap else None
    replaced = [
        torch.empty_like(each) if term.replaces else None for each, term in zip(streams, plan.terms, strict=True)
    ]
    for piece in _pieces(*out.shape, out.device):
        total: Tensor | None = None
        for term, stream, pair, kept in zip(plan.terms, streams, weights, replaced, strict=False):
            if not term.summed and kept is None:
                continue
            x = stream[piece].to(wide)
            made, _ = _apply(term.norm, x, pair)
            if kept is not None:
                kept[piece] = made
            if term.summed:
                total = made if total is None else total + made
        assert total is not None
        if tapped is not None:
            tapped[piece] = total
        out[piece] = total if plan.norm is None else _apply(plan.norm, total, weights[-1])[0]
    next_carry = (each if kept is None else kept.view(shape) for each, kept in zip(whole, replaced, strict=True))
    ends = (out,) if tapped is None else (out, tapped)
    return streams, (*next_carry, *(each.view(shape) for each in ends))


def backward(
    plan: Plan,
    streams: tuple[Tensor, ...],
    weights: tuple[Weights, ...],
    grads: tuple[Tensor | None, ...],
    dtypes: tuple[torch.dtype, ...],
    dtype_of_o: torch.dtype | None,
) -> tuple[Tensor | None, list[Tensor], list[Tensor | None]]:
    """As :class:`~siamesenorm.ops.function.Kernels`."""
    count = len(plan.terms)
    wide = wide_dtype(*streams)
    rows = [None if grad is None else rows_of(grad) for grad in grads]
    of_carry = [
        torch.empty(each.shape, dtype=kept, device=each.device) for each, kept in zip(streams, dtypes, strict=True)
    ]
    of_o = None if dtype_of_o is None else torch.empty(streams[0].shape, dtype=dtype_of_o, device=streams[0].device)
    parts: list[list[Tensor]] = [[] for pair in weights for _ in pair]

    def collect(index: int, *found: Tensor | None) -> None:
        for offset, each in enumerate(found):
            if each is not None:
                parts[2 * index + offset].append(each)

    for piece in _pieces(*streams[0].shape, streams[0].device):
        xs = [each[piece].to(wide) for each in streams]
        given = [None if grad is None else grad[piece].to(wide) for grad in rows]
        grad = given[count]
        known: list[_Stats | None] = [None] * count
        if plan.norm is not None and grad is not None:
            total: Tensor | None = None
            for index, (term, x) in enumerate(zip(plan.terms, xs, strict=True)):
                if term.summed:
                    out, known[index] = _apply(term.norm, x, weights[index])
                    total = out if total is None else total + out
            assert total is not None
            stats, _ = _stats(plan.norm, total, weights[count])
            grad, *found = _apply_backward(plan.norm, grad, total, weights[count], stats)
            collect(count, *found)
        if plan.tap:
            grad = scaled_sum(grad, given[count + 1], 1.0)
        update: Tensor | None = None
        for index, (term, x) in enumerate(zip(plan.terms, xs, strict=True)):
            of_term = grad if term.summed else None
            if term.replaces:
                of_term = scaled_sum(of_term, given[index], 1.0)
            of_stream: Tensor | None = None
            if of_term is not None:
                stats = known[index] or _stats(term.norm, x, weights[index])[0]
                of_stream, *found = _apply_backward(term.norm, of_term, x, weights[index], stats)
                collect(index, *found)
            if not term.replaces:
                of_stream = scaled_sum(of_stream, given[index], 1.0)
            if of_stream is None:
                of_carry[index][piece] = 0
                continue
            of_carry[index][piece] = of_stream
            update = scaled_sum(update, of_stream, term.scale)
        if of_o is not None:
            of_o[piece] = 0 if update is None else update
    flat = [each for pair in weights for each in pair]
    of_weights = [_total(found, each) for found, each in zip(parts, flat, strict=True)]
    return of_o, of_carry, of_weights


def _total(found: list[Tensor], weight: Tensor | None) -> Tensor | None:
    """The sum over pieces of a weight's gradient."""
    if weight is None:
        return None
    return torch.stack(found).sum(0) if found else torch.zeros_like(weight)
