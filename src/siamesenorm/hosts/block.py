"""What a rewired block and a rewired final norm do, as mixins over the host's own classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..residual import Block, LayerNorm, Readout, RMSNorm, Scheme, close_streams, open_streams, through
from ..residual.scheme import NormPlace, Streams
from .families import SublayerRoles

__all__ = ["FinalLayerNorm", "FinalRMSNorm", "ReadoutNorm", "ResidualBlock", "Tap"]


class Tap(nn.Module):
    """The identity, as a module: what passes here is what ``output_hidden_states`` records."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``hidden_states`` as it is."""
        return hidden_states


@dataclass(frozen=True)
class Placed:
    """A sublayer of a block and where its host norm goes."""

    roles: SublayerRoles
    place: NormPlace


class ResidualBlock(Block):
    """A host's block whose sublayers are joined by a scheme.

    It is given one tensor (the embedding, in the first block) or finished streams, and returns finished streams.
    """

    scheme: Scheme
    sublayers: tuple[Placed, ...]
    tap: Tap
    gradient_checkpointing: bool
    _gradient_checkpointing_func: Callable[..., Streams]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # transformers wraps the forward of every subclass of its block in an activation checkpoint that is given the
        # streams as one tuple, which loses their gradients. This class checkpoints itself, so it skips that.
        pass

    __call__ = nn.Module.__call__

    def forward(self, hidden_states: Tensor | Streams, **kwargs: Any) -> Streams:
        """Run the block; ``kwargs`` are the host's, for its attention."""
        if isinstance(hidden_states, Tensor):
            self.tap(hidden_states)
            streams, tap = open_streams(self.scheme, hidden_states), None
        else:
            streams, tap = hidden_states, self.tap
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # Recomputing would write to a cache a second time, so none is filled, as in transformers' own layers.
            kwargs.update(use_cache=False, **{name: None for name in ("cache", "past_key_values") if name in kwargs})
            return self._gradient_checkpointing_func(partial(self._run, tap=tap, kwargs=kwargs), *streams)
        return self._run(*streams, tap=tap, kwargs=kwargs)

    def _run(self, *streams: Tensor, tap: Tap | None, kwargs: dict[str, Any]) -> Streams:
        for placed in self.sublayers:
            residual = getattr(self, placed.roles.residual)
            streams = through(residual, streams, partial(self._branch, placed, kwargs), tap)
            tap = None
        return streams

    def _branch(self, placed: Placed, kwargs: dict[str, Any], u: Tensor) -> Tensor:
        """The branch of one sublayer with the host's own norm at its place: (batch, seq, hidden) to the same shape."""
        roles, place = placed.roles, placed.place
        branch = getattr(self, roles.branch)
        if place == "before":
            u = getattr(self, roles.norm)(u)
        o = branch(hidden_states=u, **kwargs) if roles.kind == "attention" else branch(u)
        if isinstance(o, tuple):
            o = o[0]
        return getattr(self, roles.norm)(o) if place == "after" else o


class ReadoutNorm(nn.Module):
    """Mixin over a norm: closes the stack first, where it is given streams."""

    readout: Readout

    def forward(self, hidden_states: Tensor | Streams) -> Tensor:
        """Streams, or a readout (batch, seq, hidden), to the last hidden state (batch, seq, hidden)."""
        if isinstance(hidden_states, tuple):
            hidden_states = close_streams(self.readout, hidden_states)
        return super().forward(hidden_states)


class FinalRMSNorm(ReadoutNorm, RMSNorm):
    """RMSNorm behind a readout."""


class FinalLayerNorm(ReadoutNorm, LayerNorm):
    """LayerNorm behind a readout."""
