"""The fused read as a pair of Triton kernels: one pass over the rows forward, one backward.

A program holds whole rows, so every width works and the statistics need no second pass. All arithmetic is in float32;
gradients of the weights are summed in float32 over the rows that a program goes through, and then over the programs.
Row offsets are 64 bits wide. Importing this module imports Triton, but compiles nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .plan import NormPlan, Plan, Weights, finished, outputs, rows_of

__all__ = ["MAX_STREAMS", "backward", "forward"]

MAX_STREAMS = 2
_KIND = {"same": 0, "vector": 1, "rms": 2, "layer": 3}
_SAME, _VECTOR, _LAYER = (tl.constexpr(_KIND[kind]) for kind in ("same", "vector", "layer"))
# Programs of a backward pass for each multiprocessor: each holds a sum of every weight's gradient.
_PROGRAMS = 4


@triton.jit
def _load(pointer, offsets, mask, PRESENT: tl.constexpr):
    out = tl.zeros(offsets.shape, tl.float32)
    if PRESENT:
        out = tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)
    return out


@triton.jit
def _normed(x, mask, weight, bias, width, eps, KIND: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """The norm's output, the input without its mean, and the inverse deviation."""
    centred, inverse, out = x, 1.0, x
    if KIND > _VECTOR:
        if KIND == _LAYER:
            centred = tl.where(mask, x - tl.sum(x, 0) / width, 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
        out = centred * inverse
    if WEIGHT:
        out = out * weight
    if BIAS:
        out = out + bias
    return out, centred, inverse


@triton.jit
def _normed_backward(grad, centred, inverse, weight, width, mask, KIND: tl.constexpr, WEIGHT: tl.constexpr):
    """Gradients of the norm's input and of its weight, the latter of this row alone."""
    of_weight = grad * centred * inverse
    scaled = grad
    if WEIGHT:
        scaled = grad * weight
    of_x = scaled
    if KIND > _VECTOR:
        unit = centred * inverse
        along = tl.sum(scaled * unit, 0) / width
        if KIND == _LAYER:
            scaled = scaled - tl.sum(scaled, 0) / width
        of_x = (scaled - unit * along) * inverse
    return tl.where(mask, of_x, 0.0), of_weight


@triton.jit
def _forward_kernel(
    carry0, carry1, o, w0, b0, w1, b1, wn, bn, stream0, stream1, kept0, kept1, out, tapped,
    rows, width, scale0, scale1, eps0, eps1, epsn,
    STREAMS: tl.constexpr, WRITE: tl.constexpr,
    KIND0: tl.constexpr, W0: tl.constexpr, B0: tl.constexpr, SUMMED0: tl.constexpr, REPLACES0: tl.constexpr,
    KIND1: tl.constexpr, W1: tl.constexpr, B1: tl.constexpr, SUMMED1: tl.constexpr, REPLACES1: tl.constexpr,
    KINDN: tl.constexpr, WN: tl.constexpr, BN: tl.constexpr, TAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    weight0, bias0 = _load(w0, cols, mask, W0), _load(b0, cols, mask, B0)
    weight1, bias1 = _load(w1, cols, mask, W1), _load(b1, cols, mask, B1)
    weightn, biasn = _load(wn, cols, mask, WN), _load(bn, cols, mask, BN)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + cols
        total = tl.zeros((BLOCK,), tl.float32)
        update = _load(o, at, mask, WRITE)

        x = _load(carry0, at, mask, True)
        if WRITE:
            # Statistics are of what is kept, so that the backward pass sees the same.
            rounded = (x + scale0 * update).to(stream0.dtype.element_ty)
            tl.store(stream0 + at, rounded, mask=mask)
            x = rounded.to(tl.float32)
        term, _, _ = _normed(x, mask, weight0, bias0, width, eps0, KIND0, W0, B0)
        if REPLACES0:
            tl.store(kept0 + at, term.to(kept0.dtype.element_ty), mask=mask)
        if SUMMED0:
            total += term

        if STREAMS == 2:
            y = _load(carry1, at, mask, True)
            if WRITE:
                rounded = (y + scale1 * update).to(stream1.dtype.element_ty)
                tl.store(stream1 + at, rounded, mask=mask)
                y = rounded.to(tl.float32)
            term, _, _ = _normed(y, mask, weight1, bias1, width, eps1, KIND1, W1, B1)
            if REPLACES1:
                tl.store(kept1 + at, term.to(kept1.dtype.element_ty), mask=mask)
            if SUMMED1:
                total += term

        total = tl.where(mask, total, 0.0)
        if TAP:
            tl.store(tapped + at, total.to(tapped.dtype.element_ty), mask=mask)
        term, _, _ = _normed(total, mask, weightn, biasn, width, epsn, KINDN, WN, BN)
        tl.store(out + at, term.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    stream0, stream1, w0, b0, w1, b1, wn, bn, grad0, grad1, grad_out, grad_tap,
    of_carry0, of_carry1, of_o, of_weights,
    rows, width, scale0, scale1, eps0, eps1, epsn,
    STREAMS: tl.constexpr, WRITE: tl.constexpr,
    KIND0: tl.constexpr, W0: tl.constexpr, B0: tl.constexpr, SUMMED0: tl.constexpr, REPLACES0: tl.constexpr,
    KIND1: tl.constexpr, W1: tl.constexpr, B1: tl.constexpr, SUMMED1: tl.constexpr, REPLACES1: tl.constexpr,
    KINDN: tl.constexpr, WN: tl.constexpr, BN: tl.constexpr,
    GRAD0: tl.constexpr, GRAD1: tl.constexpr, GRAD_OUT: tl.constexpr, GRAD_TAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    weight0, bias0 = _load(w0, cols, mask, W0), _load(b0, cols, mask, B0)
    weight1, bias1 = _load(w1, cols, mask, W1), _load(b1, cols, mask, B1)
    weightn, biasn = _load(wn, cols, mask, WN), _load(bn, cols, mask, BN)
    sum_w0, sum_b0 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    sum_w1, sum_b1 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    sum_wn, sum_bn = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + cols
        total = tl.zeros((BLOCK,), tl.float32)
        x = _load(stream0, at, mask, True)
        term, centred0, inverse0 = _normed(x, mask, weight0, bias0, width, eps0, KIND0, W0, B0)
        if SUMMED0:
            total += term
        if STREAMS == 2:
            y = _load(stream1, at, mask, True)
            term, centred1, inverse1 = _normed(y, mask, weight1, bias1, width, eps1, KIND1, W1, B1)
            if SUMMED1:
                total += term
        total = tl.where(mask, total, 0.0)

        grad = _load(grad_out, at, mask, GRAD_OUT)
        _, centred, inverse = _normed(total, mask, weightn, biasn, width, epsn, KINDN, WN, BN)
        sum_bn += grad
        grad, of_weight = _normed_backward(grad, centred, inverse, weightn, width, mask, KINDN, WN)
        sum_wn += of_weight
        grad += _load(grad_tap, at, mask, GRAD_TAP)

        update = tl.zeros((BLOCK,), tl.float32)
        given = _load(grad0, at, mask, GRAD0)
        of_term = tl.zeros((BLOCK,), tl.float32)
        if SUMMED0:
            of_term += grad
        if REPLACES0:
            of_term += given
        sum_b0 += of_term
        of_stream, of_weight = _normed_backward(of_term, centred0, inverse0, weight0, width, mask, KIND0, W0)
        sum_w0 += of_weight
        if not REPLACES0:
            of_stream += given
        tl.store(of_carry0 + at, of_stream.to(of_carry0.dtype.element_ty), mask=mask)
        update += scale0 * of_stream

        if STREAMS == 2:
            given = _load(grad1, at, mask, GRAD1)
            of_term = tl.zeros((BLOCK,), tl.float32)
            if SUMMED1:
                of_term += grad
            if REPLACES1:
                of_term += given
            sum_b1 += of_term
            of_stream, of_weight = _normed_backward(of_term, centred1, inverse1, weight1, width, mask, KIND1, W1)
            sum_w1 += of_weight
            if not REPLACES1:
                of_stream += given
            tl.store(of_carry1 + at, of_stream.to(of_carry1.dtype.element_ty), mask=mask)
            update += scale1 * of_stream
        if WRITE:
            tl.store(of_o + at, update.to(of_o.dtype.element_ty), mask=mask)

    # (program, weight or bias of each norm, width)
    end = of_weights + tl.cast(program, tl.int64) * 6 * width + cols
    tl.store(end, sum_w0, mask=mask)
    tl.store(end + width, sum_b0, mask=mask)
    tl.store(end + 2 * width, sum_w1, mask=mask)
    tl.store(end + 3 * width, sum_b1, mask=mask)
    tl.store(end + 4 * width, sum_wn, mask=mask)
    tl.store(end + 5 * width, sum_bn, mask=mask)


def forward(
    plan: Plan, o: Tensor | None, carry: tuple[Tensor, ...], weights: tuple[Weights, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """As :class:`~siamesenorm.ops.function.Kernels`."""
    whole = finished(carry, o)
    next_carry, ends, (kept, out, tapped) = outputs(plan, whole)
    if rows := len(out):
        before, update, streams = (
            [None if each is None else rows_of(each).contiguous() for each in given] for given in (carry, (o,), whole)
        )
        arguments = (*_two(before), *update, *_flat(plan, weights), *_two(streams), *_two(kept), out, tapped)
        _launch(_forward_kernel, min(rows, 65_535), plan, weights, o is not None, arguments, out, TAP=plan.tap)
    return whole, (*next_carry, *ends)


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
    streams = tuple(rows_of(each).contiguous() for each in kept)
    given = [None if grad is None else rows_of(grad).contiguous() for grad in grads]
    of_carry = [torch.empty_like(each, dtype=dtype) for each, dtype in zip(streams, dtypes, strict=True)]
    of_o = None if dtype_of_o is None else torch.empty_like(streams[0], dtype=dtype_of_o)
    rows, width = streams[0].shape
    programs = min(rows, _PROGRAMS * _multiprocessors(streams[0].device))
    partial = torch.empty((programs, 6, width), dtype=torch.float32, device=streams[0].device)
    ends = (given[count], given[count + 1] if plan.tap else None)
    if rows:
        arguments = (*_two(streams), *_flat(plan, weights), *_two(given[:count]), *ends, *_two(of_carry), of_o, partial)
        present = {name: grad is not None for name, grad in zip(("GRAD_OUT", "GRAD_TAP"), ends, strict=True)}
        present |= {f"GRAD{i}": grad is not None for i, grad in enumerate(_two(given[:count]))}
        _launch(_backward_kernel, programs, plan, weights, of_o is not None, arguments, streams[0], **present)
    total = partial.sum(0)
    # Of each norm the kernel writes a weight's and a bias's row, the host's norm behind two streams.
    places = [*range(count), MAX_STREAMS]
    of_weights = [
        None if each is None else total[2 * place + offset]
        for place, pair in zip(places, weights, strict=False)
        for offset, each in enumerate(pair)
    ]
    return of_o, of_carry, of_weights


def _two(given: Any) -> tuple[Any, Any]:
    """One entry for each stream that the kernels know, ``None`` where there is no such stream."""
    first, *others = given
    return first, others[0] if others else None


def _padded(plan: Plan, weights: tuple[Weights, ...]) -> list[tuple[NormPlan, Weights]]:
    """Norm and weights of both streams and of the host, the identity where there is none."""
    nothing: tuple[NormPlan, Weights] = (NormPlan("same"), (None, None))
    made = [(term.norm, pair) for term, pair in zip(plan.terms, weights, strict=False)]
    made += [nothing] * (MAX_STREAMS - len(made))
    return [*made, nothing if plan.norm is None else (plan.norm, weights[-1])]


def _flat(plan: Plan, weights: tuple[Weights, ...]) -> list[Tensor | None]:
    return [None if each is None else each.contiguous() for _, pair in _padded(plan, weights) for each in pair]


def _launch(
    kernel: Any,
    programs: int,
    plan: Plan,
    weights: tuple[Weights, ...],
    write: bool,
    arguments: tuple[Any, ...],
    like: Tensor,
    **flags: bool | int,
) -> None:
    padded = _padded(plan, weights)
    for suffix, (norm, (weight, bias)) in zip("01N", padded, strict=True):
        flags |= {f"KIND{suffix}": _KIND[norm.kind], f"W{suffix}": weight is not None, f"B{suffix}": bias is not None}
    for index in range(MAX_STREAMS):
        term = plan.terms[index] if index < len(plan.terms) else None
        flags[f"SUMMED{index}"] = term is not None and term.summed
        flags[f"REPLACES{index}"] = term is not None and term.replaces
    rows, width = like.shape
    scales = [term.scale for term in plan.terms] + [0.0] * (MAX_STREAMS - len(plan.terms))
    epsilons = [norm.eps for norm, _ in padded]
    block = triton.next_power_of_2(width)
    kernel[(programs,)](
        *arguments, rows, width, *scales, *epsilons,
        STREAMS=len(plan.terms), WRITE=write, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **flags,
    )  # fmt: skip


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
