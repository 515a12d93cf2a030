"""What a rewired block and a rewired final norm do, as mixins over the host's own classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from ..residual import (
    Block,
    ConfigError,
    LayerNorm,
    Norm,
    NormSpec,
    Readout,
    RMSNorm,
    Scheme,
    Step,
    close_streams,
    open_streams,
    through,
)
from ..residual.scheme import NormPlace, Streams
from .families import Branch

__all__ = ["FinalLayerNorm", "FinalRMSNorm", "HostBlock", "ReadoutNorm", "ResidualBlock", "Tap"]

_CACHES = ("cache", "past_key_values", "layer_past")


class Tap(nn.Module):
    """The identity, as a module: what passes here is what ``output_hidden_states`` records."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``hidden_states`` as it is."""
        return hidden_states


@dataclass(frozen=True)
class Placed:
    """A sublayer of a block: the name of its read and write, its branches, and where their host norms go.

    Attributes:
        norm: what the host's norm is, or was where the scheme removed it.
        norms_before: the names of the host norms before the branches, of which two branches may share one.
    """

    residual: str
    branches: tuple[Branch, ...]
    place: NormPlace
    norm: NormSpec
    norms_before: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        before = dict.fromkeys(branch.norm for branch in self.branches) if self.place == "before" else ()
        object.__setattr__(self, "norms_before", tuple(before))

    def step(self, block: nn.Module, branch: Callable[..., Tensor], tap: Tap | None = None) -> Step:
        """The sublayer in ``block``; ``branch`` is called with an input for each of :attr:`norms_before`, or one."""
        norms = tuple(cast(Norm, block.get_submodule(name)) for name in self.norms_before)
        return Step(getattr(block, self.residual), branch, norms, tap)


class HostBlock(Block):
    """A host's block whose sublayers are joined by a scheme."""

    sublayers: tuple[Placed, ...]

    def parts(self) -> tuple[tuple[nn.Module, ...], ...]:
        """As :meth:`Block.parts`; what a host shares between sublayers, such as adaLN, is no sublayer's own."""
        return tuple(
            (
                self.get_submodule(placed.residual),
                *(self.get_submodule(branch.module) for branch in placed.branches),
                *(self.get_submodule(branch.norm) for branch in placed.branches if placed.place != "none"),
            )
            for placed in self.sublayers
        )


class ResidualBlock(HostBlock):
    """A host's block whose sublayers are joined by a scheme.

    It is given one tensor (the embedding, in the first block) or finished streams, and returns finished streams.
    """

    scheme: Scheme
    tap: Tap
    positional: ClassVar[tuple[str, ...]]
    gradient_checkpointing: bool
    _gradient_checkpointing_func: Callable[..., Streams]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # transformers wraps the forward of every subclass of its block in an activation checkpoint that is given the
        # streams as one tuple, which loses their gradients. This class checkpoints itself, so it skips that.
        pass

    __call__ = nn.Module.__call__

    def forward(self, hidden_states: Tensor | Streams, *args: Any, **kwargs: Any) -> Streams:
        """Run the block; ``args`` and ``kwargs`` are the host's, for its attention."""
        kwargs.update(zip(self.positional, args, strict=False))
        if kwargs.get("encoder_hidden_states") is not None:
            raise ConfigError("a rewired decoder has no cross-attention that could read encoder_hidden_states")
        if isinstance(hidden_states, Tensor):
            self.tap(hidden_states)
            streams, tap = open_streams(self.scheme, hidden_states), None
        else:
            streams, tap = hidden_states, self.tap
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            self._refuse_lost_loss()
            # Recomputing would write to a cache a second time, so none is filled, as in transformers' own layers.
            kwargs.update(use_cache=False, **{name: None for name in _CACHES if name in kwargs})
            return self._gradient_checkpointing_func(partial(self._run, tap=tap, kwargs=kwargs), *streams)
        return self._run(*streams, tap=tap, kwargs=kwargs)

    def _run(self, *streams: Tensor, tap: Tap | None, kwargs: dict[str, Any]) -> Streams:
        taps = (tap, *[None] * len(self.sublayers))
        steps = [
            placed.step(self, partial(self._branches, placed, kwargs), of_sublayer)
            for placed, of_sublayer in zip(self.sublayers, taps, strict=False)
        ]
        return through(steps, streams)

    def _branches(self, placed: Placed, kwargs: dict[str, Any], *inputs: Tensor) -> Tensor:
        """The sum of a sublayer's branches at ``inputs``, each (batch, seq, hidden), to the same shape."""
        by_norm = dict(zip(placed.norms_before, inputs, strict=False))
        first, *others = (
            self._branch(branch, placed.place, kwargs, by_norm.get(branch.norm, inputs[0]))
            for branch in placed.branches
        )
        for other in others:
            first = first + other
        return first

    def _branch(self, branch: Branch, place: NormPlace, kwargs: dict[str, Any], u: Tensor) -> Tensor:
        """One branch, with the host's own norm behind it if that is its place, and the host's dropout."""
        module = getattr(self, branch.module)
        if place != "before" and branch.in_place:
            u = u.clone()
        o = module(hidden_states=u, **kwargs) if branch.kind == "attention" else module(u)
        if isinstance(o, tuple):
            o = o[0]
        if place == "after":
            o = getattr(self, branch.norm)(o)
        return getattr(self, branch.dropout)(o) if branch.dropout else o

    def _refuse_lost_loss(self) -> None:
        """Reentrant checkpoints run a block without gradients at first, which loses what a router says there."""
        keywords = getattr(self._gradient_checkpointing_func, "keywords", {"use_reentrant": False})
        # torch takes what is not said for reentrant.
        if keywords.get("use_reentrant", True) and "router_logits" in (_active_collector.get() or ()):
            raise ConfigError(
                "reentrant activation checkpointing loses the gradient of the routers' auxiliary loss: enable it with "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )


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
