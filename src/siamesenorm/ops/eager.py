"""The fused read in torch's own operations.

Both passes go through the rows in pieces, so that what is computed on the way is never as large as a stream; all of it
is in the wide dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .plan import NormPlan, Plan, Weights, outputs, rows_of, scaled_sum, wide_dtype

__all__ = ["backward", "forward"]

# Entries of a piece for each thread. Torch splits an operation from 32,768 entries on.
_PIECE = 131_072


class _Stats:
    """What a norm's backward pass wants of its forward pass.

    Attributes:
        inverse: the inverse deviation (n, 1).
        mean: the mean (n, 1), of a norm that takes it away.
        unit: the input times ``inverse`` (n, d), of one that does not.
    """

    __slots__ = ("inverse", "mean", "unit")

    def __init__(self, inverse: Tensor, mean: Tensor | None = None, unit: Tensor | None = None) -> None:
        self.inverse = inverse
        self.mean = mean
        self.unit = unit


def _pieces(x: Tensor) -> Iterator[slice]:
    """Slices of the rows of ``x`` (n, d): all of them at once where the device is no CPU."""
    rows, width = x.shape
    step = max(_PIECE * torch.get_num_threads() // width, 1) if x.device.type == "cpu" else max(rows, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _at(whole: Tensor | None, piece: slice, dtype: torch.dtype) -> Tensor | None:
    """A piece of ``whole`` to compute into, where it is of the dtype that is computed in."""
    return None if whole is None or whole.dtype != dtype else whole[piece]


def _inverse(plan: NormPlan, x: Tensor) -> Tensor:
    # The plain form's own operations, so that both give the same bits.
    return x.square().mean(-1, keepdim=True).add_(plan.eps).rsqrt_()


def _apply(plan: NormPlan, x: Tensor, weights: Weights, out: Tensor | None = None) -> Tensor:
    """The norm of ``x`` (n, d), in ``out`` or a tensor of its own; but that of ``"same"`` is ``x`` itself."""
    weight, bias = weights
    if plan.kind == "layer":
        return torch.native_layer_norm(x, x.shape[-1:], weight, bias, plan.eps)[0]
    if plan.kind == "rms":
        made = torch.mul(x, _inverse(plan, x), out=out)
        if weight is not None:
            made.mul_(weight)
        return made if bias is None else made.add_(bias)
    return x if weight is None else torch.mul(x, weight, out=out)


def _again(plan: NormPlan, x: Tensor, weights: Weights) -> tuple[Tensor, _Stats | None]:
    """As :func:`_apply`, and what the backward pass wants of it."""
    weight, bias = weights
    if plan.kind == "layer":
        made, mean, inverse = torch.native_layer_norm(x, x.shape[-1:], weight, bias, plan.eps)
        return made, _Stats(inverse, mean)
    if plan.kind == "rms":
        stats = _Stats(_inverse(plan, x))
        stats.unit = x * stats.inverse
        made = stats.unit if weight is None else stats.unit * weight
        return made if bias is None else made + bias, stats
    return x if weight is None else x * weight, None


def _apply_backward(
    plan: NormPlan, grad: Tensor, x: Tensor, weights: Weights, stats: _Stats | None, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``x`` (n, d), weight and bias (d,) from that of the norm's output (n, d), which is not written to.

    The first is in ``out`` or a tensor of its own; but that of ``"same"`` is ``grad`` itself.
    """
    weight, bias = weights
    of_bias = None if bias is None else grad.sum(0)
    if stats is None:
        if weight is None:
            return grad, None, None
        return torch.mul(grad, weight, out=out), (grad * x).sum(0), None
    if stats.unit is None:
        wanted = [True, weight is not None, False]
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[-1:], stats.mean, stats.inverse, weight, bias, wanted
        )
        return of_x, of_weight, of_bias
    along = grad * stats.unit
    if weight is None:
        of_weight, scaled, mean = None, grad.clone(), along.mean(-1, keepdim=True)
    else:
        of_weight, scaled, mean = along.sum(0), grad * weight, (along @ weight).unsqueeze_(-1).div_(x.shape[-1])
    of_x = scaled.addcmul_(stats.unit, mean, value=-1)
    return torch.mul(of_x, stats.inverse, out=of_x if out is None else out), of_weight, of_bias


def forward(
    plan: Plan, o: Tensor | None, carry: tuple[Tensor, ...], weights: tuple[Weights, ...]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """As :class:`~siamesenorm.ops.function.Kernels`."""
    wide = wide_dtype(o, *carry)
    if o is None:
        whole = list(carry)
    else:
        whole = [torch.add(each, o, alpha=term.scale) for each, term in zip(carry, plan.terms, strict=True)]
    streams = [rows_of(each) for each in whole]
    next_carry, ends, (kept, out, tapped) = outputs(plan, whole)
    for piece in _pieces(out):
        total: Tensor | None = None
        for term, stream, pair, term_kept in zip(plan.terms, streams, weights, kept, strict=False):
            if not term.summed and term_kept is None:
                continue
            target = _at(term_kept, piece, wide)
            made = _apply(term.norm, stream[piece].to(wide), pair, target)
            _store(made, term_kept, piece, target)
            if term.summed:
                total = made if total is None else total + made
        assert total is not None
        _store(total, tapped, piece)
        target = _at(out, piece, wide)
        if plan.norm is not None:
            total = _apply(plan.norm, total, weights[-1], target)
        _store(total, out, piece, target)
    return streams, (*next_carry, *ends)


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
    of_carry = [torch.empty_like(each, dtype=kept) for each, kept in zip(streams, dtypes, strict=True)]
    of_o = None if dtype_of_o is None else torch.empty_like(streams[0], dtype=dtype_of_o)
    parts: list[list[Tensor]] = [[] for pair in weights for _ in pair]

    def collect(index: int, *found: Tensor | None) -> None:
        for offset, each in enumerate(found):
            if each is not None:
                parts[2 * index + offset].append(each)

    for piece in _pieces(streams[0]):
        xs = [each[piece].to(wide) for each in streams]
        given = [None if grad is None else grad[piece].to(wide) for grad in rows]
        made = [_again(term.norm, x, pair) for term, x, pair in zip(plan.terms, xs, weights, strict=False)]
        grad = given[count]
        if plan.norm is not None and grad is not None:
            first, *others = (out for term, (out, _) in zip(plan.terms, made, strict=True) if term.summed)
            total = sum(others, first)
            _, stats = _again(plan.norm, total, weights[count])
            grad, *found = _apply_backward(plan.norm, grad, total, weights[count], stats)
            collect(count, *found)
        if plan.tap:
            grad = scaled_sum(grad, given[count + 1], 1.0)
        update, target_of_o = None, _at(of_o, piece, wide)
        for index, (term, x, (_, stats)) in enumerate(zip(plan.terms, xs, made, strict=True)):
            of_term = grad if term.summed else None
            after: Tensor | None = given[index]
            if term.replaces:
                of_term, after = scaled_sum(of_term, after, 1.0), None
            target = _at(of_carry[index], piece, wide)
            of_stream: Tensor | None = None
            if of_term is not None:
                of_stream, *found = _apply_backward(term.norm, of_term, x, weights[index], stats, target)
                collect(index, *found)
            of_stream = scaled_sum(of_stream, after, 1.0, target)
            if of_stream is None:
                of_carry[index][piece] = 0
                continue
            _store(of_stream, of_carry[index], piece, target)
            update = scaled_sum(update, of_stream, term.scale, target_of_o)
        if update is not None:
            _store(update, of_o, piece, target_of_o)
        elif of_o is not None:
            of_o[piece] = 0
    flat = [each for pair in weights for each in pair]
    return of_o, of_carry, [_total(found, each) for found, each in zip(parts, flat, strict=True)]


def _store(made: Tensor, whole: Tensor | None, piece: slice, target: Tensor | None = None) -> None:
    """Put a piece where it belongs, unless it was computed there, in ``target``."""
    if whole is not None and made is not target:
        whole[piece] = made


def _total(found: list[Tensor], weight: Tensor | None) -> Tensor | None:
    """The sum over pieces of a weight's gradient."""
    if weight is None:
        return None
    return torch.stack(found).sum(0) if found else torch.zeros_like(weight)
