"""The streams between blocks, as they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..residual import Streams, finished
from .subject import blocks_of, in_backward

__all__ = ["capture_streams"]


@contextmanager
def capture_streams(model: nn.Module) -> Iterator[list[Streams]]:
    """Record the streams of a rewired model, or of a :class:`~siamesenorm.residual.Stack`, while it runs.

    Yields:
        A list that is cleared at each forward and then has one entry per block: the finished streams it returned, a
        flat tuple such as (X, Y), each (…, d). They are live: part of the graph, in the streams' own dtype.

    Raises:
        ConfigError: ``model`` has no blocks of this package.

    Example:
        >>> with capture_streams(model) as streams:
        ...     model(input_ids=ids)
        >>> x, y = streams[-1]
    """
    blocks = blocks_of(model)
    captured: list[Streams] = []

    # A block in an activation checkpoint of someone else's runs again in the backward pass, which is no new forward.
    def clear(module: nn.Module, args: Any) -> None:
        if not in_backward():
            captured.clear()

    def record(module: nn.Module, args: Any, output: Streams) -> None:
        if not in_backward():
            captured.append(finished(output))

    handles = [blocks[0].register_forward_pre_hook(clear)]
    handles += [block.register_forward_hook(record) for block in blocks]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
