"""The exponential moving average of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """w̄ = βw̄ + (1 - β)w after each step t, with β = min(decay, (1 + t) / (10 + t)) so that the start is soon forgotten.

    Args:
        model: whose weights are averaged, whole or this process's part of it.
        decay: β in the end.

    Attributes:
        weights: the average, by parameter name, each like its parameter.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, step: int) -> None:
        """Take in the weights that step ``step``, from 1, has left."""
        decay = min(self.decay, (1 + step) / (10 + step))
        mine = [_local(weight) for weight in self.weights.values()]
        theirs = [_local(p.detach()) for p in self.model.parameters()]
        get_ema_multi_avg_fn(decay)(mine, theirs, step)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from an average that a checkpoint holds."""
        for name, weight in self.weights.items():
            weight.copy_(weights[name])

    def apply(self) -> None:
        """Replace the model's weights by their average."""
        _overwrite(self.model, self.weights)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the average in the place of its weights, which it has back afterwards."""
        kept = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.apply()
        try:
            yield
        finally:
            _overwrite(self.model, kept)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _overwrite(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    # What a model in parts has gathered for its last forward pass stands for its parameters until it is given back.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
