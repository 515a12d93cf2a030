"""The auxiliary loss that keeps the routers of a mixture of experts balanced, in a batch that is cut into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from siamesenorm.hosts.families import host_of


class RouterLoss:
    """The host's own load-balancing loss, and its weight, from the model's configuration.

    The loss is not linear in the tokens it is taken over. Taken over each sequence and averaged, no split of a batch
    over micro-batches or processes changes it; taken over each micro-batch, it lets a sequence be unbalanced.
    """

    def __init__(self, model: Any, *, over_sequences: bool) -> None:
        self.weight: float = model.config.router_aux_loss_coef
        self._loss: Callable[..., Tensor] = host_of(model.config).module().load_balancing_loss_func
        self._experts: int = model.num_experts
        self._active: int = model.num_experts_per_tok
        self._over_sequences = over_sequences

    @classmethod
    def of(cls, model: PreTrainedModel, over: str) -> RouterLoss | None:
        """That of ``model``, over each ``"sequence"`` or ``"micro_batch"``; ``None`` where there are no routers."""
        if not getattr(model.config, "router_aux_loss_coef", 0.0):
            return None
        return cls(model, over_sequences=over == "sequence")

    @contextmanager
    def listening(self, model: PreTrainedModel) -> Iterator[None]:
        """Let a forward pass of ``model`` give what its routers say (``router_logits``).

        The body is asked and not the model: that would compute its own loss too, over all tokens at once and with a
        padding mask, for which it takes a mask of documents.
        """

        def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, {**kwargs, "output_router_logits": True}

        asking = model.base_model.register_forward_pre_hook(ask, with_kwargs=True)
        try:
            yield
        finally:
            asking.remove()

    def __call__(self, router_logits: Sequence[Tensor], batch: int) -> Tensor:
        """The unweighted loss, times the number of sequences that it is about.

        Args:
            router_logits: each router's, (batch * seq, experts), or (batch, seq, experts).
            batch: how many sequences they are.
        """
        if not self._over_sequences:
            return batch * self._loss(tuple(router_logits), self._experts, self._active)
        by_sequence = [logits.reshape(batch, -1, self._experts) for logits in router_logits]
        losses = [
            self._loss(tuple(logits[row] for logits in by_sequence), self._experts, self._active)
            for row in range(batch)
        ]
        return torch.stack(losses).sum()
