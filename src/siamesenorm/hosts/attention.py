"""Attention that normalises q, k and v per head, between projection and RoPE.

One forward for every layout of the projections (three matrices, or one); RoPE, cache and attention functions are the
host's. A norm hooked to a projection would do the same arithmetic, but break adapters that merge into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .families import AttentionRoles

__all__ = ["NORM_NAMES", "HeadNormedAttention"]

NORM_NAMES = {"q": "q_norm", "k": "k_norm", "v": "v_norm"}


class HeadNormedAttention(nn.Module):
    """Mixin over a host's attention.

    The norms that a scheme adds are called as in :data:`NORM_NAMES`, each over one head's width; what the host norms
    itself, it goes on norming its own way. Values are normalised before they enter the cache.
    """

    config: Any
    roles: AttentionRoles
    rotate: Callable[..., tuple[Tensor, Tensor]]
    attend_eagerly: Callable[..., tuple[Tensor, Tensor]]

    @staticmethod
    def functions_of(module: Any) -> dict[str, Any]:
        """What the forward below calls of the host's modelling ``module``, as class attributes."""
        functions = {"rotate": "apply_rotary_pos_emb", "attend_eagerly": "eager_attention_forward"}
        return {ours: staticmethod(getattr(module, name)) for ours, name in functions.items() if hasattr(module, name)}

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As the host's forward: ``hidden_states`` (batch, seq, hidden) to the same shape, and attention weights.

        ``past_key_values`` and ``layer_past`` are what earlier transformers 5 releases and GPT-NeoX call ``cache``.
        """
        q, k, v = (
            self._norm(x.transpose(1, 2), role, whole=False)
            for role, x in zip("qkv", self._project(hidden_states), strict=True)
        )
        if position_embeddings is not None:
            q, k = self._rotated(q, k, *position_embeddings)

        cache = next((given for given in (cache, past_key_values, layer_past) if given is not None), None)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)

        # Hosts with a window per layer hold it in the module, hosts with one for all layers in the config.
        holder = self if hasattr(self, "sliding_window") else self.config
        window = getattr(holder, "sliding_window", None)
        o, weights = self._attention_function()(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self._dropout() if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=window,
            **kwargs,
        )
        o = getattr(self, self.roles.out)(o.reshape(*hidden_states.shape[:-1], -1).contiguous())
        return (getattr(self, self.roles.out_dropout)(o) if self.roles.out_dropout else o), weights

    def _attention_function(self) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The attention function that the config asks for; GPT-2 may have an eager one of its own."""
        implementation = self.config._attn_implementation
        if implementation == "eager" and getattr(self, "reorder_and_upcast_attn", False):
            return lambda module, q, k, v, mask, **kwargs: module._upcast_and_reordered_attn(q, k, v, mask)
        return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, self.attend_eagerly)

    def _project(self, hidden_states: Tensor) -> list[Tensor]:
        """(batch, seq, hidden) to q, k and v, each (batch, seq, heads, head_dim)."""
        shape, head_dim = hidden_states.shape[:-1], getattr(self, self.roles.head_dim)
        parts = [getattr(self, name)(hidden_states) for name in self.roles.projections]
        if len(parts) == 1 and self.roles.by_head:
            return list(parts[0].view(*shape, -1, 3 * head_dim).chunk(3, dim=-1))
        if len(parts) == 1:
            parts = list(parts[0].chunk(3, dim=-1))
        parts = [self._norm(x, role, whole=True) for role, x in zip("qkv", parts, strict=True)]
        if (clip := getattr(self.config, "clip_qkv", None)) is not None:
            parts = [x.clamp(-clip, clip) for x in parts]
        return [x.view(*shape, -1, head_dim) for x in parts]

    def _norm(self, x: Tensor, role: str, *, whole: bool) -> Tensor:
        """``x`` through the norm of ``role``, if it has one of this kind: over a whole projection, or over a head."""
        host_norm = getattr(self, self.roles.norms.get(role, ""), None)
        if host_norm is not None:
            return host_norm(x) if self.roles.whole == whole else x
        norm = getattr(self, NORM_NAMES[role], None)
        return x if norm is None or whole else norm(x)

    def _rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE over the first entries of a head, as many as the host rotates."""
        turned = cos.shape[-1]
        if turned == q.shape[-1]:
            return self.rotate(q, k, cos, sin)
        q_turned, k_turned = self.rotate(q[..., :turned], k[..., :turned], cos, sin)
        return torch.cat((q_turned, q[..., turned:]), dim=-1), torch.cat((k_turned, k[..., turned:]), dim=-1)

    def _dropout(self) -> float:
        dropout = getattr(self, self.roles.dropout)
        return dropout.p if isinstance(dropout, nn.Dropout) else dropout
