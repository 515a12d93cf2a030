"""Where the numbers of a model stopped being finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm import hosts
from siamesenorm.residual import Sublayer
from siamesenorm.residual.scheme import Streams

NOWHERE = 1 << 30


def first_in_streams(model: nn.Module, forward: Callable[[], Any]) -> int:
    """The number of the first sublayer whose streams are not finite after it, `NOWHERE` where all are.

    Args:
        model: rewired.
        forward: runs ``model``, in this thread and without a compiled graph.
    """
    found = [NOWHERE]
    with _watched(model, lambda number: found.append(number)):
        forward()
    return min(found)


def first_in_gradients(model: nn.Module) -> int:
    """The number of the last sublayer whose block has a gradient that is not finite, which is the first in the backward
    pass; `NOWHERE` where no block has one.
    """
    found = NOWHERE
    for block in hosts.blocks(model):
        gradients = (parameter.grad for parameter in block.parameters() if parameter.grad is not None)
        if not all(_finite(gradient) for gradient in gradients):
            found = max(sublayer.site.sublayer for sublayer in _sublayers(block))
    return found


def name_of(model: nn.Module, number: int) -> str:
    """What people call a sublayer: its number, its block's, and its kind."""
    site = next(sublayer.site for sublayer in _sublayers(model) if sublayer.site.sublayer == number)
    return f"sublayer {site.sublayer} (block {site.block}, {site.kind})"


@contextmanager
def _watched(model: nn.Module, tell: Callable[[int], object]) -> Iterator[None]:
    """Call ``tell`` with the number of each sublayer that writes streams which are not finite."""

    def watch(sublayer: Sublayer) -> Callable[..., Streams]:
        write = sublayer.write

        def watching(carry: Streams, o: Tensor) -> Streams:
            streams = write(carry, o)
            if not all(_finite(stream) for stream in streams):
                tell(sublayer.site.sublayer)
            return streams

        return watching

    sublayers = list(_sublayers(model))
    for sublayer in sublayers:
        # An attribute of the object hides the method of its class.
        sublayer.__dict__["write"] = watch(sublayer)
    try:
        yield
    finally:
        for sublayer in sublayers:
            del sublayer.__dict__["write"]


def _sublayers(module: nn.Module) -> Iterable[Sublayer]:
    return (part for part in module.modules() if isinstance(part, Sublayer))


def _finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(torch.isfinite(local).all())
