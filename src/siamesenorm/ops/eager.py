"""The fused read in torch's own operations.

Both passes go through the rows in pieces, so that what is computed on the way is never as large as a stream and stays
in the processor's cache; all of it is in the wide dtype. Besides the streams, the statistics of each row are kept.

With r = 1/√(mean(x²) + ε), the backward pass of RMSNorm, y = x·r·w, is written so that it reads x alone, and not x·r:

    gx = r · (g·w + x·c),   c = −r² · mean(g·w·x),   gw = Σ r · g·x      over the rows
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..residual.norms import narrow
from .plan import NormPlan, Plan, Weights, finished, outputs, rows_of, scaled_sum, wide_dtype

__all__ = ["backward", "forward"]

# Entries of a piece for each thread. Torch splits an operation from 32,768 entries on.
_PIECE = 262_144
_MOST_PIECES_COUNTED = 8

Piece = slice | None
"""Of rows; ``None`` is all of them."""

Stats = tuple[Tensor, ...]
"""Of each row (n, 1): the inverse deviation, and the mean where the norm takes it away; nothing without a norm."""
_STATS = {"rms": 1, "layer": 2, "vector": 0, "same": 0}


def forward(
    plan: Plan, o: Tensor | None, carry: tuple[Tensor, ...], weights: tuple[Weights, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """As :class:`~siamesenorm.ops.function.Kernels`."""
    wide = wide_dtype(o, *carry)
    whole = finished(carry, o)
    before, streams = ([rows_of(each) for each in given] for given in (carry, whole))
    update = None if o is None else rows_of(o)
    next_carry, ends, (kept, out, tapped) = outputs(plan, whole)
    stats = [_new_stats(norm, out, wide) for norm in _norms(plan)]
    for piece in _pieces(out):
        total: Tensor | None = None
        for index, (term, stream) in enumerate(zip(plan.terms, streams, strict=True)):
            if update is not None:
                torch.add(_cut(before[index], piece), _cut(update, piece), alpha=term.scale, out=_cut(stream, piece))
            if not (term.summed or term.replaces):
                continue
            here, target = _at_rows(stats[index], piece), _at(kept[index], piece, wide)
            made = _measured(term.norm, narrow(_cut(stream, piece), wide), weights[index], here, target)
            _store(made, kept[index], piece, target)
            if term.summed and total is not None:
                # Into the term's own memory, where it has some that nobody else reads.
                made = torch.add(total, made, out=None if term.replaces or term.norm.kind == "same" else made)
            total = made if term.summed else total
        assert total is not None
        _store(total, tapped, piece)
        target = _at(out, piece, wide)
        if plan.norm is not None:
            total = _measured(plan.norm, total, weights[-1], _at_rows(stats[-1], piece), target)
        _store(total, out, piece, target)
    return (*whole, *(each for pair in stats for each in pair)), (*next_carry, *ends)


def backward(
    plan: Plan,
    kept: tuple[Tensor, ...],
    weights: tuple[Weights, ...],
    grads: tuple[Tensor | None, ...],
    dtypes: tuple[torch.dtype, ...],
    dtype_of_o: torch.dtype | None,
) -> tuple[Tensor | None, list[Tensor], list[Tensor | None]]:
    """As :class:`~siamesenorm.ops.function.Kernels`."""
    count = len(plan.terms)
    streams, rest = [rows_of(each) for each in kept[:count]], iter(kept[count:])
    stats = [tuple(next(rest) for _ in range(_STATS[norm.kind])) for norm in _norms(plan)]
    wide = wide_dtype(*streams)
    rows = [None if grad is None else rows_of(grad) for grad in grads]
    of_carry = [torch.empty_like(each, dtype=dtype) for each, dtype in zip(streams, dtypes, strict=True)]
    of_o = None if dtype_of_o is None else torch.empty_like(streams[0], dtype=dtype_of_o)
    if count == 1 and plan.terms[0].scale == 1.0 and dtype_of_o == of_carry[0].dtype:
        # What is added to a stream has the gradient of the stream.
        of_o = of_carry[0]
    sums = _Sums(weights)
    for piece in _pieces(streams[0]):
        xs = [narrow(_cut(each, piece), wide) for each in streams]
        given = [None if grad is None else narrow(_cut(grad, piece), wide) for grad in rows]
        here = [_at_rows(each, piece) for each in stats]
        grad = given[count]
        if plan.norm is not None and grad is not None:
            total: Tensor | None = None
            for term, x, pair, each in zip(plan.terms, xs, weights, here, strict=False):
                if term.summed:
                    total = _applied(term.norm, x, pair, each, total)
            assert total is not None
            grad = _of_input(plan.norm, grad, total, weights[count], here[count], sums.of(count))
        if plan.tap:
            grad = scaled_sum(grad, given[count + 1], 1.0)
        update, target_of_o = None, _at(of_o, piece, wide)
        for index, (term, x) in enumerate(zip(plan.terms, xs, strict=True)):
            of_term, after = grad if term.summed else None, given[index]
            if term.replaces:
                of_term, after = scaled_sum(of_term, after, 1.0), None
            target = _at(of_carry[index], piece, wide)
            of_stream = after
            if of_term is not None:
                own = sums.of(index)
                of_stream = _of_input(term.norm, of_term, x, weights[index], here[index], own, after, target)
            if of_stream is None:
                _cut(of_carry[index], piece).zero_()
                continue
            _store(of_stream, of_carry[index], piece, target)
            if of_o is not of_carry[index]:
                update = scaled_sum(update, of_stream, term.scale, target_of_o)
        if update is not None:
            _store(update, of_o, piece, target_of_o)
        elif of_o is not None and of_o is not of_carry[0]:
            _cut(of_o, piece).zero_()
    return of_o, of_carry, sums.done()


def _norms(plan: Plan) -> list[NormPlan]:
    """The norm of each stream, and the host's where the read applies it."""
    return [*(term.norm for term in plan.terms), *(() if plan.norm is None else (plan.norm,))]


def _new_stats(norm: NormPlan, like: Tensor, dtype: torch.dtype) -> Stats:
    return tuple(like.new_empty((len(like), 1), dtype=dtype) for _ in range(_STATS[norm.kind]))


def _measured(norm: NormPlan, x: Tensor, weights: Weights, stats: Stats, out: Tensor | None = None) -> Tensor:
    """As :func:`_applied`, with the statistics of ``x`` written first.

    These are the plain form's own operations: in a wide dtype both give the same bits.
    """
    if norm.kind == "rms":
        torch.mean(x.square(), -1, keepdim=True, out=stats[0]).add_(norm.eps).rsqrt_()
    elif norm.kind == "layer":
        made, mean, inverse = torch.native_layer_norm(x, x.shape[-1:], *weights, norm.eps)
        stats[0].copy_(inverse)
        stats[1].copy_(mean)
        return made
    return _applied(norm, x, weights, stats, None, out)


def _applied(
    norm: NormPlan, x: Tensor, weights: Weights, stats: Stats, total: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The norm of ``x`` (n, d), and ``total`` added; neither of the two is written to.

    It is in ``out`` or in a tensor of its own; but of the identity without ``total`` it is ``x`` itself.
    """
    weight, bias = weights
    if norm.kind == "layer":
        x = torch.sub(x, stats[1], out=out)
        out = x
    if norm.kind in ("rms", "layer"):
        x = torch.mul(x, stats[0], out=out)
        out = x
    if weight is None:
        made = x if total is None else torch.add(total, x, out=out)
    elif total is None:
        made = torch.mul(x, weight, out=out)
    else:
        made = torch.addcmul(total, x, weight, out=out)
    return made if bias is None else made.add_(bias)


def _of_input(
    norm: NormPlan,
    grad: Tensor,
    x: Tensor,
    weights: Weights,
    stats: Stats,
    sums: _Sums,
    after: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The gradient (n, d) of the norm's input, with ``after`` added; those of its weights go to ``sums``.

    None of what is given is written to. The result is in ``out`` or in a tensor of its own; but of the identity without
    ``after`` it is ``grad`` itself.
    """
    weight, bias = weights
    if bias is not None:
        sums.bias(grad.sum(0))
    if norm.kind == "layer":
        inverse, mean = stats
        wanted = [True, weight is not None, False]
        made, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[-1:], mean, inverse, weight, bias, wanted
        )
        sums.weight(of_weight)
        return made if after is None else torch.add(made, after, out=out)
    if norm.kind == "rms":
        (inverse,) = stats
        along = grad * x
        if weight is not None:
            sums.weight(inverse.view(-1) @ along)
        mean = along.mean(-1) if weight is None else (along @ weight).div_(x.shape[-1])
        scale = inverse * mean.neg_().unsqueeze_(-1) * inverse
        # Nobody reads the product any more.
        made = torch.mul(x, scale, out=along)
        made = made.add_(grad) if weight is None else made.addcmul_(grad, weight)
        return torch.mul(made, inverse, out=out) if after is None else torch.addcmul(after, made, inverse, out=out)
    if weight is None:
        return grad if after is None else torch.add(grad, after, out=out)
    sums.weight((grad * x).sum(0))
    return torch.mul(grad, weight, out=out) if after is None else torch.addcmul(after, grad, weight, out=out)


class _Sums:
    """Gradients of weights and biases (d,), one sum over pieces for each."""

    def __init__(self, weights: tuple[Weights, ...]) -> None:
        self._weights = weights
        self._parts: dict[tuple[int, int], Tensor] = {}
        self._norm = 0

    def of(self, norm: int) -> _Sums:
        """Itself, with what comes next belonging to norm number ``norm``."""
        self._norm = norm
        return self

    def weight(self, part: Tensor | None) -> None:
        """Add a piece's gradient of the weight."""
        self._add(0, part)

    def bias(self, part: Tensor) -> None:
        """Add a piece's gradient of the bias."""
        self._add(1, part)

    def _add(self, which: int, part: Tensor | None) -> None:
        if part is None:
            return
        key = self._norm, which
        self._parts[key] = part if key not in self._parts else self._parts[key].add_(part)

    def done(self) -> list[Tensor | None]:
        """One for each weight and bias that there is, in order."""
        return [
            None if each is None else self._parts.get((norm, which), torch.zeros_like(each))
            for norm, pair in enumerate(self._weights)
            for which, each in enumerate(pair)
        ]


def _pieces(x: Tensor) -> Iterator[Piece]:
    """Pieces of the rows of ``x`` (n, d): all of them at once where they are few, or the device is no CPU."""
    rows, width = x.shape
    step = max(_PIECE * torch.get_num_threads() // width, 1)
    if type(x) is not Tensor:
        # Where nothing is computed, as when memory is counted, each piece takes as long as the whole.
        step = max(step, -(-rows // _MOST_PIECES_COUNTED))
    if rows <= step or x.device.type != "cpu":
        if rows:
            yield None
        return
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _cut(x: Tensor, piece: Piece) -> Tensor:
    return x if piece is None else x[piece]


def _at(whole: Tensor | None, piece: Piece, dtype: torch.dtype) -> Tensor | None:
    """A piece of ``whole`` to compute into, where it is of the dtype that is computed in."""
    return None if whole is None or whole.dtype != dtype else _cut(whole, piece)


def _at_rows(stats: Stats, piece: Piece) -> Stats:
    return stats if piece is None else tuple([each[piece] for each in stats])


def _store(made: Tensor, whole: Tensor | None, piece: Piece, target: Tensor | None = None) -> None:
    """Put a piece where it belongs, unless it was computed there, in ``target``."""
    if whole is not None and made is not target:
        _cut(whole, piece).copy_(made)
