"""A block of DiT whose sublayers are joined by a scheme (Peebles and Xie, arXiv 2212.09748).

    o = gate ⊙ F(shift + (1 + scale) ⊙ N(u))

u is what the scheme reads, F the attention or the MLP, N the block's own norm; shift, scale and gate, each (d) per
image, are what adaLN makes of time step and label. The gate multiplies the branch's output before any stream sees it.
Where a scheme has no place for N the modulation stays, and where N goes behind the branch it stands before the gate. A
scheme whose write normalises o would lose the gate, so it is refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor
from torch.nn import functional as F

from ..residual import ConfigError, Norm, NormSpec, Scheme, Site, Streams, stack_sites, through
from .block import HostBlock, Placed
from .families import get_host
from .norms import HostNorms
from .surgery import apply_gains, grow_drop_path, install_block, install_readout

__all__ = ["HOST", "DiTBlock", "check_scheme", "init_by_scheme", "install"]

HOST = get_host("dit")
_KINDS = tuple(branch.kind for branch in HOST.branches)
_HEAD_NORMS = {"q": "norm_q", "k": "norm_k", "v": "norm_v"}


class DiTBlock(HostBlock, BasicTransformerBlock):
    """diffusers' block under a scheme."""

    norm1: Any
    attn1: Any
    ff: Any

    def forward(
        self,
        conditioning: Tensor | None,
        timestep: Tensor | None,
        class_labels: Tensor | None,
        cross_attention_kwargs: dict[str, Any] | None,
        *streams: Tensor,
    ) -> Streams:
        """Run the block. All arguments are positional, as activation checkpointing asks for.

        Args:
            conditioning: time step and label embedded (batch, d), or None in a block with an embedder of its own.
            timestep: (batch,), for that embedder.
            class_labels: (batch,), for that embedder.
            cross_attention_kwargs: further arguments of the attention's processor.
            *streams: finished streams.
        """
        if conditioning is None:
            # The last is in the dtype that the streams were opened with, whatever theirs is.
            conditioning = self.norm1.emb(timestep, class_labels, hidden_dtype=streams[-1].dtype)
        modulation = self.norm1.linear(self.norm1.silu(conditioning)).unsqueeze(1).chunk(6, dim=-1)
        steps = [
            placed.step(self, partial(self._branch, placed, of_branch, cross_attention_kwargs or {}))
            for placed, of_branch in zip(self.sublayers, (modulation[:3], modulation[3:]), strict=True)
        ]
        return through(steps, streams)

    def _branch(
        self, placed: Placed, modulation: tuple[Tensor, ...], attention_kwargs: dict[str, Any], u: Tensor
    ) -> Tensor:
        """A sublayer's branch, (batch, seq, d) to the same shape; shift, scale and gate are (batch, 1, d)."""
        (branch,) = placed.branches
        shift, scale, gate = modulation
        u = u * (1 + scale) + shift
        if branch.kind == "attention":
            o = self.attn1(u, encoder_hidden_states=None, attention_mask=None, **attention_kwargs)
        else:
            o = self.ff(u)
        if placed.place == "after":
            o = self.get_submodule(branch.norm)(o)
        return gate * o


class HeadNormedProcessor:
    """Self-attention of diffusers' ``Attention`` with norms per head, of which diffusers knows those of q and k."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """(batch, seq, d) to the same shape; the other two are part of the interface, and never given in a DiT."""
        heads = []
        for role, name in _HEAD_NORMS.items():
            head = getattr(attn, f"to_{role}")(hidden_states).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            norm = getattr(attn, name, None)
            heads.append(head if norm is None else norm(head))
        o = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        for module in attn.to_out:
            o = module(o)
        return o


class _DiTNorms(HostNorms):
    """A DiT's norms have neither weight nor bias, which adaLN brings; a scheme's own have both."""

    def for_scheme(self, norm: Norm) -> NormSpec:
        return replace(norm.spec, affine=True, bias=True)

    def norm_heads(self, attention: Any, roles: tuple[str, ...], norm: Norm) -> bool:
        """As for all hosts, under diffusers' names; the attention keeps its class and gets another processor."""
        spec = self.for_scheme(norm).resized(attention.inner_dim // attention.heads)
        for role in roles:
            setattr(attention, _HEAD_NORMS[role], self.added(spec, norm, attention))
        if roles:
            attention.set_processor(HeadNormedProcessor())
        return False


_NORMS = _DiTNorms(HOST)


def check_scheme(scheme: Scheme, blocks: int) -> None:
    """Let a scheme and a DiT of that depth refuse each other before anything is made or changed."""
    with torch.device("meta"):
        for site in stack_sites(blocks, _KINDS):
            if scheme.sublayer(site, NormSpec("layer", 1)).gates_itself:
                raise ConfigError(
                    f"scheme '{scheme.name}' normalises the branch output, so the gate of adaLN in a DiT would be lost"
                )


def install(model: Any, scheme: Scheme, drop_path_rate: float = 0.0) -> list[str]:
    """Join the blocks of a DiT by ``scheme``; the names of trained norms that were removed.

    Args:
        model: any DiT of diffusers, or one that was joined before and still has all its norms.
        scheme: what :func:`check_scheme` let pass.
        drop_path_rate: of stochastic depth, from none in the first block to all of it in the last.
    """
    blocks, removed = model.transformer_blocks, []
    for index, block in enumerate(blocks):
        sublayers = tuple(((branch,), site) for branch, site in zip(HOST.branches, _sites(model, index), strict=True))
        names = install_block(block, scheme, _NORMS, sublayers, _as_ours)
        removed += [f"{HOST.blocks}.{index}.{name}" for name in names]
    grow_drop_path(blocks, drop_path_rate)
    model.norm_out = install_readout(model.norm_out, scheme, _NORMS, model)
    return removed


def init_by_scheme(model: Any, scheme: Scheme) -> None:
    """Multiply a new model's weights by the scheme's own gains."""
    for index, block in enumerate(model.transformer_blocks):
        apply_gains(HOST, scheme, block, _sites(model, index))


def _sites(model: Any, block: int) -> tuple[Site, ...]:
    return stack_sites(len(model.transformer_blocks), _KINDS)[block * len(_KINDS) : (block + 1) * len(_KINDS)]


def _as_ours(block: Any) -> None:
    block.__class__ = DiTBlock
