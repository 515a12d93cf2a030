"""What a fused read does, as static data beside the tensors that it does it to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..residual import LayerNorm, Norm, RMSNorm, Term
from ..residual.norms import widen

__all__ = [
    "NormPlan",
    "Plan",
    "Rows",
    "TermPlan",
    "Weights",
    "finished",
    "is_ours",
    "is_watched",
    "outputs",
    "read_plan",
    "rows_of",
    "scaled_sum",
    "weights_of",
    "wide_dtype",
]

Weights = tuple[Tensor | None, Tensor | None]
"""Weight and bias (d,) in the wide dtype, offset and scale included."""


class NormPlan(NamedTuple):
    """A norm over the last dimension; ``"vector"`` multiplies by the weight alone, ``"same"`` is the identity."""

    kind: Literal["rms", "layer", "vector", "same"]
    eps: float = 0.0


class TermPlan(NamedTuple):
    """As :class:`~siamesenorm.residual.Term`, but that ``scale`` is that of the write to finish."""

    norm: NormPlan
    summed: bool
    replaces: bool
    scale: float


class Plan(NamedTuple):
    """A read.

    Attributes:
        terms: one a stream.
        norm: the host's own norm, where the read applies it.
        tap: whether the sum before that norm is wanted too.
        dtype: of the branch's input.
    """

    terms: tuple[TermPlan, ...]
    norm: NormPlan | None
    tap: bool
    dtype: torch.dtype


class Rows(NamedTuple):
    """What a read computes, each (n, d): a stream's term where that replaces the stream, and the ends."""

    kept: list[Tensor | None]
    out: Tensor
    tapped: Tensor | None = None


def wide_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What sums and statistics of ``tensors`` are computed in: float32, or the widest of theirs."""
    dtype = torch.float32
    for tensor in tensors:
        if tensor is not None:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _norm_plan(of: Norm | Tensor | None) -> NormPlan:
    """The plan of a term's ``of``."""
    if of is None:
        return NormPlan("same")
    return NormPlan(of.kind, of.eps) if isinstance(of, Norm) else NormPlan("vector")


def weights_of(of: Norm | Tensor | None, like: Tensor) -> Weights:
    """What the plan leaves out, under autograd: gradients reach the parameters in the parameters' dtype.

    Args:
        of: a term's, or the host's norm.
        like: a tensor of the wide dtype, where the weights are.
    """
    if isinstance(of, Norm):
        return of.affine(like)
    return None if of is None else widen(of).to(like.dtype), None


def read_plan(
    terms: tuple[Term, ...], scales: tuple[float, ...], norm: Norm | None, tap: bool, dtype: torch.dtype
) -> Plan:
    """The plan of a read that finishes a write of ``scales``, if there is one to finish."""
    made = tuple(
        TermPlan(_norm_plan(term.of), term.summed, term.replaces, scale)
        for term, scale in zip(terms, scales or (0.0,) * len(terms), strict=True)
    )
    return Plan(made, None if norm is None else _norm_plan(norm), tap, dtype)


def is_ours(norm: Norm) -> bool:
    """Whether a norm computes what the package's own of its kind do."""
    kind = type(norm)
    return issubclass(kind, Norm) and kind.wide is Norm.wide and kind._normed in (RMSNorm._normed, LayerNorm._normed)


def is_watched(module: Norm) -> bool:
    """Whether calling ``module`` does more than its norm. Hooks of all modules see those alone that are called."""
    return (
        bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
        or "forward" in vars(module)
        or type(module).forward is not Norm.forward
    )


def rows_of(x: Tensor) -> Tensor:
    """``x`` (…, d) as (n, d), a view where that can be."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def finished(carry: tuple[Tensor, ...], o: Tensor | None) -> tuple[Tensor, ...]:
    """Memory for the streams (…, d) that a write of ``o`` makes of ``carry``; without one they are the carry."""
    if o is None:
        return carry
    return tuple(each.new_empty(each.shape, dtype=torch.promote_types(each.dtype, o.dtype)) for each in carry)


def outputs(plan: Plan, streams: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Rows]:
    """Memory for what a read gives.

    Args:
        plan: of the read.
        streams: what it reads, each (…, d).

    Returns:
        The carry for the next write and the ends (the branch's input; the sum, where it is wanted), in the streams'
        shape, and views of what is to be computed there as rows. A branch may write into its input, so that is no
        view of anything.
    """
    shape, device = streams[0].shape, streams[0].device
    kept = [
        torch.empty_like(each, memory_format=torch.contiguous_format) if term.replaces else None
        for each, term in zip(streams, plan.terms, strict=True)
    ]
    ends = tuple(torch.empty(shape, dtype=plan.dtype, device=device) for _ in range(1 + plan.tap))
    carry = tuple(each if made is None else made for each, made in zip(streams, kept, strict=True))
    rows = Rows([None if each is None else rows_of(each) for each in kept], *map(rows_of, ends))
    return carry, ends, rows


def scaled_sum(total: Tensor | None, grad: Tensor | None, scale: float, out: Tensor | None = None) -> Tensor | None:
    """``total + scale · grad``, in ``out`` where anything is computed; else neither of them is written to."""
    if grad is None:
        return total
    if total is None:
        return grad if scale == 1.0 else torch.mul(grad, scale, out=out)
    return torch.add(total, grad, alpha=scale, out=out)
