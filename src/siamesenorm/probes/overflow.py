"""Where the numbers of a model stopped being finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..residual import Step, Streams, finished, watched
from .subject import blocks_of, sublayers_of

__all__ = ["NOWHERE", "first_in_gradients", "first_in_streams", "name_of"]

NOWHERE = 1 << 30


def first_in_streams(model: nn.Module, forward: Callable[[], Any]) -> int:
    """The number of the first sublayer whose streams are not finite after it, `NOWHERE` where all are.

    Args:
        model: rewired.
        forward: runs ``model``, in this thread and without a compiled graph.
    """
    found = NOWHERE
    own = {id(sublayer) for sublayer in sublayers_of(model)}

    def watch(steps: tuple[Step, ...], streams: Streams, run: Callable[[Iterable[Step], Streams], Streams]) -> Streams:
        nonlocal found
        for step in steps:
            streams = run((step,), streams)
            if id(step.sublayer) in own and not all(_finite(stream) for stream in finished(streams)):
                found = min(found, step.sublayer.site.sublayer)
        return streams

    with watched(watch):
        forward()
    return found


def first_in_gradients(model: nn.Module) -> int:
    """The number of the last sublayer whose block has a gradient that is not finite, which is the first in the backward
    pass; `NOWHERE` where no block has one.
    """
    found = NOWHERE
    for block in blocks_of(model):
        gradients = (parameter.grad for parameter in block.parameters() if parameter.grad is not None)
        if not all(_finite(gradient) for gradient in gradients):
            found = max(sublayer.site.sublayer for sublayer in sublayers_of(block))
    return found


def name_of(model: nn.Module, number: int) -> str:
    """What people call a sublayer: its number, its block's, and its kind."""
    site = next(sublayer.site for sublayer in sublayers_of(model) if sublayer.site.sublayer == number)
    return f"sublayer {site.sublayer} (block {site.block}, {site.kind})"


def _finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(torch.isfinite(local).all())
