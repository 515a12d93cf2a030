"""The fused read in torch's own operations, with a backward pass of its own that keeps the streams and nothing else.

    s_k  = carry_k + scale_k · o                     the write to finish, where there is one
    t_k  = N_k(s_k), c ⊙ s_k, or s_k                 one term a stream
    u    = Σ t_k                                     over the terms that the branch reads
    read   Nin(u), or u; and t_k or s_k of each stream, for the next write

Terms, sum and statistics are computed again in the backward pass. Both passes go through the rows in pieces that stay
in a core's cache; all between reading the streams and writing the results is in the wide dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .plan import NormPlan, Plan, Weights, wide_dtype

__all__ = ["read", "write"]

# Entries of a piece for each thread. Torch splits an operation from 32,768 entries on.
_PIECE = 131_072


class _Stats:
    """What a norm's backward pass wants of its forward pass: the inverse deviation (n, 1), and the mean if it has one."""

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


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def read(plan: Plan, o: Tensor | None, carry: tuple[Tensor, ...], weights: tuple[Weights, ...]) -> tuple[Tensor, ...]:
    """The carry for the next write, the branch's input, and the sum if the plan wants it, all shaped as the streams.

    Args:
        plan: what to do.
        o: the branch output (…, d) to finish a write with.
        carry: what it is added to, or the streams, each (…, d).
        weights: those of each term, and of the host's norm.
    """
    flat = tuple(each for pair in weights for each in pair)
    made: tuple[Tensor, ...] = _Read.apply(plan, o, *carry, *flat)
    return made


def write(carry: tuple[Tensor, ...], o: Tensor, scales: tuple[float, ...]) -> tuple[Tensor, ...]:
    """The streams after ``scales`` times ``o``, each (…, d), is added to ``carry``."""
    made: tuple[Tensor, ...] = _Write.apply(scales, o, *carry)
    return made


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, o: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        carry, weights = _split(plan, tensors)
        with torch.autocast(carry[0].device.type, enabled=False):
            streams, outputs = _read_forward(plan, o, carry, weights)
        ctx.plan = plan
        ctx.shape = carry[0].shape
        ctx.dtypes = tuple(each.dtype for each in carry), None if o is None else o.dtype
        ctx.weighed = tuple(each is not None for pair in weights for each in pair)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*streams, *(each for pair in weights for each in pair if each is not None))
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        saved = list(ctx.saved_tensors)
        streams = tuple(saved[: len(plan.terms)])
        rest = iter(saved[len(plan.terms) :])
        _, weights = _split(plan, (*streams, *(next(rest) if there else None for there in ctx.weighed)))
        with torch.autocast(streams[0].device.type, enabled=False):
            of_o, of_carry, of_weights = _read_backward(plan, streams, weights, grads, *ctx.dtypes)
        shaped = (each.view(ctx.shape) for each in of_carry)
        return None, None if of_o is None else of_o.view(ctx.shape), *shaped, *of_weights


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scales: tuple[float, ...], o: Tensor, *carry: Tensor) -> tuple[Tensor, ...]:
        ctx.scales, ctx.dtypes = scales, tuple(each.dtype for each in (o, *carry))
        ctx.set_materialize_grads(False)
        return tuple(torch.add(each, o, alpha=scale) for each, scale in zip(carry, scales, strict=True))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        of_o = None
        for grad, scale in zip(grads, ctx.scales, strict=True):
            of_o = _scaled_sum(of_o, grad, scale)
        dtype, *dtypes = ctx.dtypes
        of_carry = (None if grad is None else grad.to(kept) for grad, kept in zip(grads, dtypes, strict=True))
        return None, None if of_o is None else of_o.to(dtype), *of_carry


def _scaled_sum(total: Tensor | None, grad: Tensor | None, scale: float) -> Tensor | None:
    """``total + scale · grad``, neither of them written to."""
    if grad is None:
        return total
    if total is None:
        return grad if scale == 1.0 else grad * scale
    return torch.add(total, grad, alpha=scale)


def _split(plan: Plan, tensors: tuple[Tensor | None, ...]) -> tuple[tuple[Tensor, ...], tuple[Weights, ...]]:
    """Streams, and pairs of weights, from a flat tuple of both."""
    count = len(plan.terms)
    streams = tuple(each for each in tensors[:count] if each is not None)
    flat = tensors[count:]
    return streams, tuple((flat[i], flat[i + 1]) for i in range(0, len(flat), 2))


def _read_forward(
    plan: Plan, o: Tensor | None, carry: tuple[Tensor, ...], weights: tuple[Weights, ...]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The streams (n, d) and the outputs of :func:`read`."""
    shape = carry[0].shape
    wide = wide_dtype(o, *carry)
    if o is None:
        streams = [_rows(each) for each in carry]
        whole = list(carry)
    else:
        whole = [torch.add(each, o, alpha=term.scale) for each, term in zip(carry, plan.terms, strict=True)]
        streams = [_rows(each) for each in whole]
    out = torch.empty(streams[0].shape, dtype=plan.dtype, device=o.device if o is not None else carry[0].device)
    tapped = torch.empty_like(out) if plan.tap else None
    replaced = [torch.empty_like(each) if term.replaces else None for each, term in zip(streams, plan.terms, strict=True)]
    for piece in _pieces(*out.shape, out.device):
        total, owned = None, False
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


def _read_backward(
    plan: Plan,
    streams: tuple[Tensor, ...],
    weights: tuple[Weights, ...],
    grads: tuple[Tensor | None, ...],
    dtypes: tuple[torch.dtype, ...],
    dtype_of_o: torch.dtype | None,
) -> tuple[Tensor | None, list[Tensor], list[Tensor | None]]:
    """Gradients of the branch output, of the carry, both (n, d), and of the weights."""
    count = len(plan.terms)
    wide = wide_dtype(*streams)
    rows = [None if grad is None else _rows(grad) for grad in grads]
    of_carry = [torch.empty(each.shape, dtype=kept, device=each.device) for each, kept in zip(streams, dtypes, strict=True)]
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
            grad = _scaled_sum(grad, given[count + 1], 1.0)
        update: Tensor | None = None
        for index, (term, x) in enumerate(zip(plan.terms, xs, strict=True)):
            of_term = grad if term.summed else None
            if term.replaces:
                of_term = _scaled_sum(of_term, given[index], 1.0)
            of_stream: Tensor | None = None
            if of_term is not None:
                stats = known[index] or _stats(term.norm, x, weights[index])[0]
                of_stream, *found = _apply_backward(term.norm, of_term, x, weights[index], stats)
                collect(index, *found)
            if not term.replaces:
                of_stream = _scaled_sum(of_stream, given[index], 1.0)
            if of_stream is None:
                of_carry[index][piece] = 0
                continue
            of_carry[index][piece] = of_stream
            update = _scaled_sum(update, of_stream, term.scale)
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
