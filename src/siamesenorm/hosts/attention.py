"""Attention that normalises q, k and v per head, between projection and RoPE.

One forward per layout of the projections; all else (RoPE, cache, attention functions) is the host's. A norm hooked to a
projection would do the same arithmetic, but break adapters that merge into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["NORM_NAMES", "SeparateProjections"]

NORM_NAMES = {"q": "q_norm", "k": "k_norm", "v": "v_norm"}


class SeparateProjections(nn.Module):
    """Mixin for an attention with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj``.

    The norms are the submodules named in :data:`NORM_NAMES`, each over one head's width; one that is missing is the
    identity. Values are normalised too, before they enter the cache.
    """

    config: Any
    o_proj: nn.Module
    rotate: Callable[..., tuple[Tensor, Tensor]]
    attend_eagerly: Callable[..., tuple[Tensor, Tensor]]

    @staticmethod
    def functions_of(module: Any) -> dict[str, Any]:
        """What the forward below calls of the host's modelling ``module``, as class attributes."""
        return {
            "rotate": staticmethod(module.apply_rotary_pos_emb),
            "attend_eagerly": staticmethod(module.eager_attention_forward),
        }

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As the host's forward: ``hidden_states`` (batch, seq, hidden) to the same shape, and attention weights.

        ``past_key_values`` is what earlier transformers 5 releases call ``cache``.
        """
        q, k, v = (self._heads(hidden_states, role) for role in "qkv")
        q, k = self.rotate(q, k, *position_embeddings)

        cache = past_key_values if cache is None else cache
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)

        # Hosts with a window per layer hold it in the module, hosts with one for all layers in the config.
        holder = self if hasattr(self, "sliding_window") else self.config
        window = getattr(holder, "sliding_window", None)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self.attend_eagerly)
        o, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=window,
            **kwargs,
        )
        return self.o_proj(o.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _heads(self, hidden_states: Tensor, role: str) -> Tensor:
        """Projection ``role`` of (batch, seq, hidden), normalised per head: (batch, heads, seq, head_dim)."""
        x = getattr(self, f"{role}_proj")(hidden_states)
        x = x.view(*hidden_states.shape[:-1], -1, self.head_dim)
        norm = getattr(self, NORM_NAMES[role], None)
        return (x if norm is None else norm(x)).transpose(1, 2)
