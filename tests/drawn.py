"""Random parameters of models that are written down as functions of their weights."""

from __future__ import annotations

import torch
from torch import Tensor


class Drawn(dict[str, Tensor]):
    """Float64 parameters by name, in the order in which they were drawn, with gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, name: str, *shape: int, around: float = 0.0, spread: float = 0.2) -> None:
        """One parameter."""
        noise = torch.randn(*shape, generator=self._generator, dtype=torch.float64)
        self[name] = (around + spread * noise).requires_grad_()

    def both(self, name: str, *shape: int, around: float = 0.0, bias: bool = True) -> None:
        """A weight, and a bias as long as its first dimension."""
        self.draw(name + ".weight", *shape, around=around)
        if bias:
            self.draw(name + ".bias", shape[0])
