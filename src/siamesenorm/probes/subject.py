"""What every probe needs: a model's blocks and scheme, its streams one by one, a batch, and to leave no trace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..residual import Block, ConfigError, Readout, Scheme, Streams, Sublayer

__all__ = [
    "Batch",
    "Row",
    "as_it_was",
    "blocks_of",
    "categorical",
    "in_backward",
    "lane_names",
    "lanes",
    "readout_of",
    "scheme_in",
    "sublayers_of",
    "uncompiled",
    "unit_gaussian",
]

Row = dict[str, Any]
"""A row of a table: plain values by column."""


@dataclass(frozen=True)
class Batch:
    """A held-out batch, as a probe runs it.

    Attributes:
        predict: runs the model on the batch and gives its predictions, a tensor of any shape that the other two take.
            The model's mode and autograd are the probe's to choose.
        loss: the loss of predictions, summed over what counts, a scalar with gradient.
        divergence: of the model's own predictions and others on the same batch, the Kullback-Leibler divergence of the
            distributions that they stand for, KL(own ‖ other), summed over what counts, a scalar.
        count: of what counts: tokens or images.
    """

    predict: Callable[[], Tensor]
    loss: Callable[[Tensor], Tensor]
    divergence: Callable[[Tensor, Tensor], Tensor]
    count: int


def categorical(predict: Callable[[], Tensor], labels: Tensor, *, ignored: int = -100) -> Batch:
    """A batch whose predictions are logits of classes or tokens; loss and divergence are in nats.

    Args:
        predict: gives logits (..., classes).
        labels: (...), aligned with the logits.
        ignored: a label that does not count.
    """
    counting = labels != ignored

    def loss(logits: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=ignored, reduction="sum")

    def divergence(own: Tensor, other: Tensor) -> Tensor:
        total = own.new_zeros((), dtype=torch.float64)
        # Row by row: logarithms of probabilities are as large as the logits.
        for counts, ours, theirs in zip(counting, own, other, strict=True):
            p, q = (logits.double().log_softmax(-1) for logits in (ours, theirs))
            total += ((p.exp() * (p - q)).sum(-1) * counts).sum()
        return total

    return Batch(predict, loss, divergence, int(counting.sum()))


def unit_gaussian(predict: Callable[[], Tensor], loss: Callable[[Tensor], Tensor], count: int) -> Batch:
    """A batch whose predictions are numbers, each the mean of a Gaussian of variance 1.

    Their divergence, half the squared difference, is a mean over the numbers of an image, and a sum over images.

    Args:
        predict: gives (images, ...).
        loss: of such predictions, summed over images.
        count: of images.
    """

    def divergence(own: Tensor, other: Tensor) -> Tensor:
        return (own.double() - other.double()).square().flatten(1).mean(1).sum() / 2

    return Batch(predict, loss, divergence, count)


def blocks_of(model: nn.Module) -> list[Block]:
    """The rewired blocks of a model, or of a :class:`~siamesenorm.residual.Stack`, in order.

    Raises:
        ConfigError: it has none.
    """
    found = [module for module in model.modules() if isinstance(module, Block)]
    if not found:
        raise ConfigError(f"a {type(model).__name__} has no residual streams: rewire it first")
    return found


def sublayers_of(module: nn.Module) -> list[Sublayer]:
    """The sublayers of a model or block, in order."""
    return [part for part in module.modules() if isinstance(part, Sublayer)]


def readout_of(model: nn.Module) -> Readout:
    """The end of the model's stack."""
    return next(module for module in model.modules() if isinstance(module, Readout))


def scheme_in(model: nn.Module) -> Scheme:
    """The scheme of a model that has blocks."""
    found = (getattr(module, "scheme", None) for module in model.modules())
    return next(scheme for scheme in found if isinstance(scheme, Scheme))


def lanes(streams: Streams, like: Tensor) -> list[Tensor]:
    """The streams as vectors of the width of ``like``: one of (…, n, d) is n of (…, d).

    Args:
        streams: finished.
        like: (…, d), what a branch reads or gives.
    """
    return [each for stream in streams for each in (stream.unbind(-2) if stream.ndim > like.ndim else (stream,))]


def lane_names(model: nn.Module, streams: Streams, like: Tensor) -> list[str]:
    """What to call each of :func:`lanes`: as the scheme's equations do, and ``H[1]`` for one of n within a tensor."""
    scheme = scheme_in(model)
    names: list[str] = []
    for index, stream in enumerate(streams):
        name = scheme.stream_name(index)
        names += [f"{name}[{lane}]" for lane in range(stream.shape[-2])] if stream.ndim > like.ndim else [name]
    return names


def uncompiled() -> AbstractContextManager[object]:
    """Runs compiled models as they were written: in compiled code, nobody can watch a block."""
    # Where nothing was compiled, what compiles takes long to import.
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode and without gradients, and afterwards, whatever happens, as it was before.

    That is each module's mode, each parameter's gradient, and torch's random numbers.
    """
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    devices = {parameter.device for parameter, _ in gradients if parameter.device.type == "cuda"}
    with uncompiled(), torch.random.fork_rng(devices=list(devices)):
        try:
            model.eval()
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient


def in_backward() -> bool:
    """Whether a backward pass runs, in which a block under activation checkpointing runs once more."""
    return bool(torch._C._current_graph_task_id() != -1)
