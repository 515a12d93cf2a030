"""Which backend computes a read: by device, dtype and shape, or as told."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from ..residual import ConfigError, Norm, Read, Term, nearest
from . import eager
from .function import Kernels, read, write
from .plan import is_ours, is_watched, read_plan, weights_of, wide_dtype

__all__ = ["Choice", "FusedReads", "Mode", "explain", "has_triton", "use"]

Mode = Literal["auto", "plain", "fused", "triton"]

_EAGER = Kernels(eager.forward, eager.backward)
_TENSORS = (Tensor, nn.Parameter, FakeTensor)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Choice:
    """What computes a read, and why.

    Attributes:
        backend: ``"plain"``, ``"fused"`` or ``"triton"``.
        reason: in words.
    """

    backend: Literal["plain", "fused", "triton"]
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


_mode: Mode = "auto"


class use:  # noqa: N801 - read as a verb, called or entered
    """Choose the backend from now on, or within a ``with`` block.

    ``"plain"`` is each scheme's own read and write; ``"fused"`` torch's operations with a backward pass that keeps the
    streams alone; ``"triton"`` kernels for CUDA, compiled on first use, which is why ``"auto"`` never picks them. What
    a backend cannot compute is left to the one before it (:func:`explain` says why).

    Raises:
        ConfigError: an unknown backend.

    Example:
        >>> with siamesenorm.ops.use("plain"):
        ...     loss = model(input_ids=ids, labels=ids).loss
    """

    def __init__(self, mode: Mode) -> None:
        global _mode
        if mode not in get_args(Mode):
            raise ConfigError(f"unknown backend {mode!r} of fused reads: {nearest(str(mode), get_args(Mode))}")
        self._before = _mode
        _mode = mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        global _mode
        _mode = self._before


def explain(x: Tensor, *norms: Norm) -> Choice:
    """What would compute a read of streams like ``x`` (…, d) through ``norms``, here and now."""
    return _choose((x,), norms, norms)


def _choose(tensors: tuple[Tensor, ...], norms: tuple[Norm, ...], passed: tuple[Norm, ...] = ()) -> Choice:
    """As :func:`explain`; ``passed`` are the norms that the read would pass by as modules."""
    if torch.compiler.is_compiling():
        return Choice("plain", "a compiler fuses the plain form by itself")
    if _mode == "plain":
        return Choice("plain", "asked for")
    if any(is_watched(norm) for norm in passed):
        return Choice("plain", "a norm has hooks or is wrapped, which a fused read would pass by")
    if obstacle := _obstacle(tensors, norms):
        return Choice("plain", obstacle)
    if _mode == "triton":
        obstacle = _obstacle_of_triton(tensors)
        return Choice("fused", obstacle) if obstacle else Choice("triton", "asked for")
    if _mode == "fused":
        return Choice("fused", "asked for")
    if tensors[0].device.type == "cuda":
        return Choice("fused", "kernels would have to be compiled first: use('triton') asks for them")
    return Choice("fused", f"keeps least on {tensors[0].device.type}")


def _obstacle_of_triton(tensors: tuple[Tensor, ...]) -> str:
    """What keeps ``tensors`` from the kernels, where nothing keeps them from a fused read."""
    first = tensors[0]
    if _triton() is None:
        return "Triton is not installed"
    if first.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the kernels are for CUDA, not {first.device.type}"
    if isinstance(first, FakeTensor):
        return "a tensor without data reaches no kernel"
    if wide_dtype(*tensors) != torch.float32:
        return "the kernels compute in float32, which is narrower than these tensors"
    return ""


def has_triton() -> bool:
    """Whether Triton is installed."""
    return _triton() is not None


@functools.cache
def _triton() -> Kernels | None:
    """The kernels, where Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    made = importlib.import_module(".triton_kernels", __package__)
    return Kernels(made.forward, made.backward)


def _obstacle(tensors: tuple[Tensor, ...], norms: tuple[Norm, ...]) -> str:
    """What keeps ``tensors`` and ``norms`` from any fused read."""
    first = tensors[0]
    for each in tensors:
        if type(each) not in _TENSORS:
            return f"a {type(each).__name__} is more than a tensor"
        if each.dtype not in _DTYPES:
            return f"{each.dtype} is no dtype of streams"
        if each.device != first.device or each.shape != first.shape:
            return "streams and branch output differ in shape or device"
    if first.dim() == 0 or first.shape[-1] == 0:
        return "there is no width to norm over"
    for norm in norms:
        if not is_ours(norm):
            return f"{type(norm).__name__} is a norm of someone else's"
        if not (norm.weight is None or type(norm.weight) in _TENSORS):
            return "a norm's weights are more than tensors"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func transforms the plain form"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives are those of the plain form"
    if torch.jit.is_tracing():  # type: ignore[no-untyped-call]
        return "a trace is of the plain form"
    return ""


class FusedReads:
    """The backend that fills the slot of :mod:`siamesenorm.residual.fusing`."""

    def wanted(self, training: bool) -> bool:
        """As :meth:`siamesenorm.residual.Backend.wanted`."""
        # Without a backward pass to keep things for, torch's operations do no better than the plain form. A block that
        # is training without one is in an activation checkpoint, and what is computed again is to be the same.
        return _mode == "triton" or (_mode != "plain" and (training or torch.is_grad_enabled()))

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
        """As :meth:`siamesenorm.residual.Backend.read`."""
        own = tuple(term.of for term in terms)
        # Several norms of the host read the same sum, so they stay behind it; one is part of the read.
        inside = norms[0] if len(norms) == 1 else None
        if inside is None and not norms and own == (None,):
            return None
        tensors = carry if o is None else (*carry, o)
        # What stands in a norm's place, such as an adapter's copy of one with a switch, is a module too.
        checked = tuple(each for each in (*own, inside) if isinstance(each, nn.Module))
        choice = _choose(tensors, checked, checked)
        if choice.backend == "plain":
            return None
        like = carry[0].new_empty(0, dtype=wide_dtype(*tensors))
        stream = carry[0].dtype if o is None else torch.promote_types(carry[0].dtype, o.dtype)
        plan = read_plan(terms, scales if o is not None else (), inside, tap, dtype or stream)
        weights = [weights_of(each, like) for each in own]
        if inside is not None:
            weights.append(weights_of(inside, like))
        *kept, first = read(self._kernels(choice), plan, o, carry, tuple(weights))
        tapped = None
        if tap:
            first, tapped = kept.pop(), first
        inputs = (first,) if inside is not None or not norms else tuple(norm(first) for norm in norms)
        return Read(tuple(kept), inputs, tapped)

    def norm(self, norm: Norm, x: Tensor) -> Tensor | None:
        """As :meth:`siamesenorm.residual.Backend.norm`."""
        if x.shape[-1:] != (norm.size,):
            return None
        choice = _choose((x,), (norm,))
        if choice.backend == "plain":
            return None
        # The heads of q, k and v are a transposed view. What is made of them is one like it: else attention would be
        # given, and give, another layout than the host's, and copy.
        order = sorted(range(x.dim() - 1), key=x.stride, reverse=True)
        rows = x.permute(*order, -1)
        plan = read_plan((Term(norm),), (), None, False, x.dtype)
        made = read(
            self._kernels(choice), plan, None, (rows,), (weights_of(norm, x.new_empty(0, dtype=wide_dtype(x))),)
        )[-1]
        return made.permute(*(order.index(axis) for axis in range(len(order))), -1)

    def write(self, carry: tuple[Tensor, ...], o: Tensor, scales: tuple[float, ...]) -> tuple[Tensor, ...] | None:
        """As :meth:`siamesenorm.residual.Backend.write`."""
        if len(carry) == 1 or _choose((*carry, o), ()).backend == "plain":
            return None
        return write(carry, o, scales)

    def _kernels(self, choice: Choice) -> Kernels:
        # Triton's know two streams, as many as any scheme with terms has.
        return (_triton() if choice.backend == "triton" else None) or _EAGER
