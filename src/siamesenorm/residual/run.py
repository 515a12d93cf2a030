"""Streams through a stack: the only place that knows the dtype policy of the streams.

A stack opened with a bfloat16 embedding and ``stream_dtype="float32"`` carries float32 streams, while branches and the
final norm go on in bfloat16. What dtype the stack was opened with then travels with the streams, as an empty tensor of
that dtype behind the last of them: state that survives activation checkpointing, sharding, compilation and export, as
a Python attribute would not. Streams that need no widening have no such marker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from .fusing import Backend, Read, Term, backend, terms_of
from .norms import Norm
from .scheme import Carry, Readout, Scheme, Streams, Sublayer

__all__ = [
    "Step",
    "Watcher",
    "close_streams",
    "finished",
    "open_by",
    "open_streams",
    "own_parameters",
    "set_step",
    "through",
    "watched",
]


def finished(streams: Streams) -> Streams:
    """The streams alone, without the marker of the dtype they were opened with."""
    return streams[:-1] if _marked(streams) else streams


def open_streams(scheme: Scheme, h: Tensor) -> Streams:
    """Open a stack with an embedding ``h`` (…, d)."""
    if scheme.stream_dtype is None:
        return scheme.open(h)
    dtype = torch.promote_types(h.dtype, getattr(torch, scheme.stream_dtype))
    if dtype == h.dtype:
        return scheme.open(h)
    return (*scheme.open(h.to(dtype)), h.new_empty(0))


class Step(NamedTuple):
    """A sublayer as its host runs it.

    Attributes:
        sublayer: its read and write.
        branch: maps what it reads (…, d), one tensor for each of ``norms`` or the one that no norm has touched, to
            (…, d).
        norms: the host's own norms before the branch.
        tap: called with what is read, before ``norms``.
    """

    sublayer: Sublayer
    branch: Callable[..., Tensor]
    norms: tuple[Norm, ...] = ()
    tap: Callable[[Tensor], object] | None = None


Runner = Callable[[Iterable[Step], Streams], Streams]
Watcher = Callable[[tuple[Step, ...], Streams, Runner], Streams]
"""Runs a block in the place of :func:`through`, which it is given too, and returns the streams that the block does."""

_watcher: Watcher | None = None


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Let ``watcher`` run every block of every model meanwhile, so that it sees, repeats, changes or leaves out steps.

    Compiled code runs as it was compiled. One watcher within another takes its place.
    """
    global _watcher
    before = _watcher
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = before


class _Unfinished(NamedTuple):
    """Streams whose last write may still be to do."""

    carry: Carry
    o: Tensor | None = None
    by: Sublayer | None = None
    scales: tuple[float, ...] = ()

    def finish(self) -> Streams:
        if self.o is None or self.by is None:
            return self.carry
        made = backend(self.by)
        streams = made.write(self.carry, self.o, self.scales) if made is not None and self.scales else None
        return self.by.write(self.carry, self.o) if streams is None else streams


def through(steps: Iterable[Step], streams: Streams) -> Streams:
    """The sublayers of one block: for each, read, branch, write.

    Streams come in and go out finished; between two steps a write may be left to the next read.
    """
    if torch.compiler.is_compiling() or _watcher is None:
        return _through(steps, streams)
    return _watcher(tuple(steps), streams, _through)


def _through(steps: Iterable[Step], streams: Streams) -> Streams:
    marker = streams[-1:] if _marked(streams) else ()
    state = _Unfinished(finished(streams))
    for step in steps:
        made = backend(step.sublayer)
        terms = () if made is None else terms_of(step.sublayer)
        read = _fused_read(made, terms, step, state, marker)
        if read is None:
            read = _plain_read(step, state.finish(), marker)
        if step.tap is not None:
            step.tap(cast(Tensor, read.tapped))
        o = step.branch(*read.inputs)
        if not step.sublayer.gates_itself:
            o = step.sublayer.gated(o)
        state = _Unfinished(read.carry, o, step.sublayer, tuple(term.scale for term in terms))
    return state.finish() + marker


def _plain_read(step: Step, streams: Streams, marker: Streams) -> Read:
    u, carry = step.sublayer.read(streams)
    if marker:
        u = u.to(marker[0].dtype)
    return Read(carry, tuple(norm(u) for norm in step.norms) or (u,), u)


def _fused_read(
    made: Backend | None, terms: tuple[Term, ...], step: Step, state: _Unfinished, marker: Streams
) -> Read | None:
    # A write that no terms describe cannot be finished by anyone else.
    if made is None or not terms or (state.o is not None and not state.scales):
        return None
    dtype = marker[0].dtype if marker else None
    return made.read(terms, state.carry, state.o, state.scales, step.norms, dtype, step.tap is not None)


def close_streams(readout: Readout, streams: Streams) -> Tensor:
    """Close a stack: the readout (…, d) in the dtype that the stack was opened with."""
    made = backend(readout)
    terms = () if made is None else terms_of(readout)
    dtype = streams[-1].dtype if _marked(streams) else None
    read = made.read(terms, finished(streams), None, (), (), dtype, False) if made and terms else None
    if read is not None:
        return read.inputs[0]
    h = readout.close(finished(streams))
    return h if dtype is None else h.to(dtype)


def set_step(module: nn.Module, scheme: Scheme, step: int) -> None:
    """Set every sublayer's gate for training step ``step`` (from 1); a schedule is over where the gate is 1.

    Gates are not saved with a model: a resumed run sets them by the step it goes on from, and a loaded model is open.
    """
    # As wide as a weight allows: a gate in float64 makes torch compile a float32 model twice over.
    weight = next(module.parameters(), torch.empty(0))
    dtype = torch.promote_types(weight.dtype, torch.float32)
    for sublayer in module.modules():
        if isinstance(sublayer, Sublayer):
            gate, value = sublayer.gate, scheme.gate(sublayer.site, step)
            if isinstance(gate, Tensor) and gate.dtype == dtype:
                gate.fill_(value)
            elif isinstance(gate, Tensor) or value != 1.0:
                # A tensor without dimensions, in main memory, multiplies on any device and in any dtype. Compiled code
                # reads it anew each time, where a Python number would be part of the code.
                sublayer.gate = torch.tensor(value, dtype=dtype, device="cpu")


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """What a scheme has added to a model, by name: all of reads, writes and readout, and the norms per head."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, part in module.named_modules()
        if isinstance(part, Sublayer | Readout) or (isinstance(part, Norm) and part.added)
        for name, parameter in part.named_parameters()
    }


@torch.no_grad()
def open_by(module: nn.Module, scheme: Scheme, share: float) -> None:
    """Open by ``share`` what the scheme starts closed (:meth:`Scheme.opening`).

    The weights themselves are raised, beside what they learn, so a schedule has nothing to restore or to end: after
    each of the first T steps of an optimiser, open by 1/T.
    """
    for name, parameter in module.named_parameters():
        if amount := scheme.opening(name):
            parameter.add_(share * amount)


def _marked(streams: Streams) -> bool:
    # A stream of one token is (d,), d > 0, so an empty vector can be nothing but the marker.
    return streams[-1].dim() == 1 and streams[-1].shape[0] == 0
