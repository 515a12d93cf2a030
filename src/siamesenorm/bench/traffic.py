"""How many streams a sublayer reads and writes between two branches, counted by running it.

A stream is what a host without a scheme of its own has one of: (tokens, d) numbers in the model's dtype. Counted is all
that goes between memory and operations as large as half a stream or more, in units of a stream; what is smaller, such
as weights and statistics of rows, is left out. A fused read counts as one operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from siamesenorm import ops
from siamesenorm.ops import dispatch, eager
from siamesenorm.ops.function import Kernels
from siamesenorm.residual import NormSpec, Scheme, Site, Step, finished, open_streams, through

__all__ = ["Traffic", "floor", "traffic"]

_ROWS, _WIDTH = 64, 128


class Traffic(NamedTuple):
    """Streams that one sublayer reads and writes: the mean over the two of a block in the middle of a stack."""

    forward_read: float
    forward_written: float
    backward_read: float
    backward_written: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def floor(streams: int) -> Traffic:
    """The least that ``streams`` streams can do with.

    Forward, each stream and the branch's output are read once; each stream and the branch's input are written once.
    Backward, each stream, its gradient and that of the branch's input are read; the gradients of each stream and of the
    branch's output are written, which of a single stream are the same.
    """
    return Traffic(streams + 1, streams + 1, 2 * streams + 1, streams + (streams > 1))


def traffic(scheme: Scheme, norm: NormSpec, mode: ops.Mode, dtype: torch.dtype = torch.float32) -> Traffic:
    """Count the streams of a scheme.

    Args:
        scheme: whose.
        norm: the host's kind; its width is replaced by a small one.
        mode: ``"plain"`` or ``"fused"``.
        dtype: of model and branches.
    """
    norm = norm.resized(_WIDTH)
    sites = (Site(6, 3, "attention", 8, 16), Site(7, 3, "mlp", 8, 16))
    sublayers = [scheme.sublayer(site, norm).to(dtype) for site in sites]
    norms = [(norm.build().to(dtype),) if scheme.input_norm(site) == "before" else () for site in sites]
    branches = [torch.randn(1, _ROWS, _WIDTH, dtype=dtype, requires_grad=True) for _ in sites]
    counter = _Counter(_ROWS * _WIDTH * branches[0].element_size())

    def step(index: int) -> Step:
        return Step(sublayers[index], lambda u: _Branch.apply(u, branches[index], counter), norms[index])

    with ops.use(mode), _fused_as_one(counter):
        h = torch.randn(1, _ROWS, _WIDTH, dtype=dtype)
        # A scheme whose streams grow has by the middle of a stack what the sublayers before left.
        streams = open_streams(scheme, h)
        for site in range(6):
            before = scheme.sublayer(Site(site, site // 2, ("attention", "mlp")[site % 2], 8, 16), norm).to(dtype)
            streams = through([Step(before, lambda u: torch.randn_like(u))], streams)
        streams = tuple(each.detach().clone().requires_grad_(each.numel() > 0) for each in streams)
        counter.take()
        with counter:
            out = through([step(0), step(1)], streams)
        forward = counter.take()
        ends = [each for each in finished(out) if each.requires_grad]
        grads = [torch.randn_like(each) for each in ends]
        wanted = [*branches, *(each for each in streams if each.requires_grad)]
        with counter:
            torch.autograd.grad(ends, wanted, grads, allow_unused=True)
        backward = counter.take()
    return Traffic(*(each / 2 for each in (*forward, *backward)))


class _Branch(torch.autograd.Function):
    """A branch that moves nothing itself: its output, and its input's gradient, are there already."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, o: Tensor, counter: _Counter) -> Tensor:
        ctx.counter = counter
        with counter.paused():
            ctx.grad = torch.randn_like(u)
            return o.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.grad, grad, None


class _Counter(TorchDispatchMode):
    """Counts what operations read and write, in units of ``unit`` bytes."""

    def __init__(self, unit: int) -> None:
        super().__init__()
        self.unit = unit
        self.read = 0.0
        self.written = 0.0
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing for a while."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def take(self) -> tuple[float, float]:
        """What was read and written since the last time."""
        taken, self.read, self.written = (self.read, self.written), 0.0, 0.0
        return taken

    def count(self, read: Any, written: Any) -> None:
        """Count the tensors among ``read`` and ``written``, each once."""
        self.read += self._size(read)
        self.written += self._size(written)

    def _size(self, tensors: Any) -> float:
        seen = {id(each): each.numel() * each.element_size() for each in tensors if isinstance(each, Tensor)}
        return sum(size for size in seen.values() if 2 * size >= self.unit) / self.unit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, tuple | list) else (out,)
        # A view moves nothing, and memory that is only taken has not been written yet.
        if self._paused or any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns):
            return out
        if func._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::detach")):
            return out
        flat = [
            each
            for arg in (*args, *(kwargs or {}).values())
            for each in (arg if isinstance(arg, tuple | list) else (arg,))
        ]
        fills = func._schema.name.startswith(("aten::zero", "aten::fill", "aten::copy_", "aten::ones", "aten::full"))
        self.count(flat[1:] if fills else flat, outputs)
        return out


@contextmanager
def _fused_as_one(counter: _Counter) -> Iterator[None]:
    """Let a fused read count as one operation: what it is given and keeps is read, what it makes is written."""

    def forward(plan: Any, o: Any, carry: Any, weights: Any) -> Any:
        with counter.paused():
            kept, outputs = eager.forward(plan, o, carry, weights)
        given = (*carry, o)
        made = [each for each in (*kept, *outputs) if not any(each is other for other in given)]
        counter.count(given, made)
        return kept, outputs

    def backward(plan: Any, kept: Any, weights: Any, grads: Any, dtypes: Any, dtype_of_o: Any) -> Any:
        with counter.paused():
            of_o, of_carry, of_weights = eager.backward(plan, kept, weights, grads, dtypes, dtype_of_o)
        counter.count((*kept, *grads), (of_o, *of_carry))
        return of_o, of_carry, of_weights

    before, dispatch._EAGER = dispatch._EAGER, Kernels(forward, backward)
    try:
        yield
    finally:
        dispatch._EAGER = before
