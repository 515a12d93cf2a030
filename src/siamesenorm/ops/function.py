"""The autograd functions around the fused kernels, whoever computes those.

    s_k  = carry_k + scale_k · o                     the write to finish, where there is one
    t_k  = N_k(s_k), c ⊙ s_k, or s_k                 one term a stream
    u    = Σ t_k                                     over the terms that the branch reads
    read   Nin(u), or u; and t_k or s_k of each stream, for the next write

The streams s_k are kept for the backward pass, and statistics of each row at most; terms and sum are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .plan import Plan, Weights, scaled_sum

__all__ = ["Kernels", "read", "write"]


class Kernels(NamedTuple):
    """Who computes both passes of a read.

    Attributes:
        forward: from plan, branch output or ``None``, carry, and weights (of each term, then of the host's norm where
            the plan has it), to what is to be kept, which is the streams (…, d) and whatever the backward pass wants
            beside them, and to the carry for the next write, the branch's input, and the sum if the plan wants it,
            these in the shape of the carry.
        backward: from plan, what was kept, weights, gradients of the outputs, dtypes of the carry and of the branch
            output (``None`` without one), to the gradients of the branch output, of the carry, both (n, d), and of
            each weight and bias that there is. None of the given gradients is written to.
    """

    forward: Callable[
        [Plan, Tensor | None, tuple[Tensor, ...], tuple[Weights, ...]], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    ]
    backward: Callable[
        [
            Plan,
            tuple[Tensor, ...],
            tuple[Weights, ...],
            tuple[Tensor | None, ...],
            tuple[torch.dtype, ...],
            torch.dtype | None,
        ],
        tuple[Tensor | None, list[Tensor], list[Tensor | None]],
    ]


def read(
    kernels: Kernels, plan: Plan, o: Tensor | None, carry: tuple[Tensor, ...], weights: tuple[Weights, ...]
) -> tuple[Tensor, ...]:
    """The carry for the next write, the branch's input, and the sum if the plan wants it, all shaped as the streams.

    Args:
        kernels: who does it.
        plan: what to do.
        o: the branch output (…, d) to finish a write with.
        carry: what it is added to, or the streams, each (…, d).
        weights: those of each term, and of the host's norm.
    """
    flat = tuple(each for pair in weights for each in pair)
    made: tuple[Tensor, ...] = _Read.apply(kernels, plan, o, *carry, *flat)  # type: ignore[no-untyped-call]
    return made


def write(carry: tuple[Tensor, ...], o: Tensor, scales: tuple[float, ...]) -> tuple[Tensor, ...]:
    """The streams after ``scales`` times ``o``, each (…, d), is added to ``carry``."""
    made: tuple[Tensor, ...] = _Write.apply(scales, o, *carry)  # type: ignore[no-untyped-call]
    return made


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, plan: Plan, o: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(plan.terms)
        carry = tuple(each for each in tensors[:count] if each is not None)
        weights = _paired(tensors[count:])
        with _no_autocast(carry[0]):
            kept, outputs = kernels.forward(plan, o, carry, weights)
        ctx.kernels, ctx.plan = kernels, plan
        ctx.shape = carry[0].shape
        ctx.dtypes = tuple(each.dtype for each in carry), None if o is None else o.dtype
        ctx.weighed = tuple(each is not None for pair in weights for each in pair)
        ctx.set_materialize_grads(False)
        ctx.kept = len(kept)
        ctx.save_for_backward(*kept, *(each for pair in weights for each in pair if each is not None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # Activation checkpointing lets it be asked for once.
        saved = ctx.saved_tensors
        kept, rest = saved[: ctx.kept], iter(saved[ctx.kept :])
        weights = _paired([next(rest) if there else None for there in ctx.weighed])
        with _no_autocast(kept[0]):
            of_o, of_carry, of_weights = ctx.kernels.backward(ctx.plan, kept, weights, grads, *ctx.dtypes)
        shaped = (each.view(ctx.shape) for each in of_carry)
        return None, None, None if of_o is None else of_o.view(ctx.shape), *shaped, *of_weights


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scales: tuple[float, ...], o: Tensor, *carry: Tensor) -> tuple[Tensor, ...]:
        ctx.scales, ctx.dtypes = scales, tuple(each.dtype for each in (o, *carry))
        ctx.set_materialize_grads(False)
        return tuple(torch.add(each, o, alpha=scale) for each, scale in zip(carry, scales, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        of_o = None
        for grad, scale in zip(grads, ctx.scales, strict=True):
            of_o = scaled_sum(of_o, grad, scale)
        dtype, *dtypes = ctx.dtypes
        of_carry = (None if grad is None else grad.to(kept) for grad, kept in zip(grads, dtypes, strict=True))
        return None, None if of_o is None else of_o.to(dtype), *of_carry


def _no_autocast(x: Tensor) -> AbstractContextManager[object]:
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _paired(flat: Sequence[Tensor | None]) -> tuple[Weights, ...]:
    """Weight and bias of each norm, from all of them in a row."""
    return tuple((flat[i], flat[i + 1]) for i in range(0, len(flat), 2))
