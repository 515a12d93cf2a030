"""Streams through a stack: the only place that knows the dtype policy of the streams.

A stack opened with a bfloat16 embedding and ``stream_dtype="float32"`` carries float32 streams, while branches and the
final norm go on in bfloat16. What dtype the stack was opened with then travels with the streams, as an empty tensor of
that dtype behind the last of them: state that survives activation checkpointing, sharding, compilation and export, as
a Python attribute would not. Streams that need no widening have no such marker.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .scheme import Readout, Scheme, Streams, Sublayer

__all__ = ["close_streams", "finished", "open_streams", "set_step", "through"]


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


def through(
    sublayer: Sublayer,
    streams: Streams,
    branch: Callable[[Tensor], Tensor],
    tap: Callable[[Tensor], object] | None = None,
) -> Streams:
    """One sublayer: read, branch, write.

    ``branch`` maps (…, d) to (…, d), the host's own norm included. ``tap`` is called with what is read.
    """
    marker = streams[-1:] if _marked(streams) else ()
    u, carry = sublayer.read(finished(streams))
    if marker:
        u = u.to(marker[0].dtype)
    if tap is not None:
        tap(u)
    o = branch(u)
    if not sublayer.gates_itself:
        o = sublayer.gated(o)
    return sublayer.write(carry, o) + marker


def close_streams(readout: Readout, streams: Streams) -> Tensor:
    """Close a stack: the readout (…, d) in the dtype that the stack was opened with."""
    h = readout.close(finished(streams))
    return h.to(streams[-1].dtype) if _marked(streams) else h


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


def _marked(streams: Streams) -> bool:
    # A stream of one token is (d,), d > 0, so an empty vector can be nothing but the marker.
    return streams[-1].dim() == 1 and streams[-1].shape[0] == 0
