"""timm's ``VisionTransformer`` under a residual scheme.

timm's block is ``x = x + drop_path1(ls1(attn(norm1(x))))`` and the same for the MLP, which a scheme takes apart:
``ls1`` over ``attn`` is the branch, ``norm1`` the host's own norm, and the probability of ``drop_path1`` becomes
:attr:`Sublayer.drop_path`, one draw for all streams. The first block opens the stack, and the module ``norm`` at the
end of the blocks closes it, also where timm has no norm there but behind the pooling (``fc_norm``): then ``norm`` is
the readout and nothing more. What is before the blocks and behind ``norm`` stays timm's.

``timm.create_model("siamese_deit_tiny_patch16_224", scheme=..., scheme_options=...)`` makes a model with a scheme of
its own. Any other one is rewired::

    model = siamesenorm.rewire(timm.create_model("vit_small_patch16_224"), "siamese", x="hybrid")
    torch.save({"scheme": model.residual_scheme, "weights": model.state_dict()}, path)

and comes back by the same steps, as timm saves weights alone::

    saved = torch.load(path)
    model = timm.create_model("vit_small_patch16_224")
    siamesenorm.rewire(model, siamesenorm.hosts.scheme_from_dict(saved["scheme"])).load_state_dict(saved["weights"])

timm's training script knows no residual warm-up: a scheme with ``warmup_steps`` needs a loop that calls
:func:`siamesenorm.residual.set_step`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from timm.layers import Attention, DiffAttention, DropPath, LayerNormFp32, RmsNormFp32, maybe_add_mask
from timm.layers import LayerNorm as TimmLayerNorm
from timm.layers import RmsNorm as TimmRmsNorm
from timm.layers import resolve_self_attn_mask as additive_mask
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from ..residual import (
    ConfigError,
    Readout,
    Scheme,
    close_streams,
    make_scheme,
    open_streams,
    stack_sites,
    through,
)
from ..residual.scheme import Streams
from .block import HostBlock, Placed, ReadoutNorm
from .configs import scheme_of, scheme_to_dict
from .families import AttentionRoles, Branch, Host
from .norms import HostNorms
from .surgery import apply_gains, check_sites, install_block, install_readout, warn_of_removed

__all__ = [
    "HOST",
    "BareReadout",
    "HeadNormedViTAttention",
    "ResidualViT",
    "ResidualViTBlock",
    "exchange",
    "residual_class",
    "rewire",
]

HOST = Host(
    name="timm_vit",
    modeling="timm.models.vision_transformer",
    prefix="VisionTransformer",
    branches=(Branch("attention", "attn", "norm1"), Branch("mlp", "mlp", "norm2")),
    attention=AttentionRoles(("qkv",), out="proj", out_dropout="proj_drop", dropout="attn_drop"),
    mlp_weights=("mlp.fc1", "mlp.fc1_g", "mlp.fc1_x", "mlp.fc2"),
    blocks="blocks",
)
_KINDS = tuple(branch.kind for branch in HOST.branches)
_LAYER_SCALES = {"attention": "ls1", "mlp": "ls2"}
_DROP_PATHS = {"attention": "drop_path1", "mlp": "drop_path2"}
# Exactly these: what derives from them may do more, such as an activation.
_NORMS = (TimmLayerNorm, LayerNormFp32, nn.LayerNorm, TimmRmsNorm, RmsNormFp32)
_THROUGH_THE_BLOCKS = ("forward_features", "forward_intermediates")


class ResidualViTBlock(HostBlock, TimmBlock):
    """timm's ``Block`` whose two sublayers are joined by a scheme."""

    scheme: Scheme

    def parts(self) -> tuple[tuple[nn.Module, ...], ...]:
        """As :meth:`Block.parts`."""
        scales = (getattr(self, _LAYER_SCALES[placed.branches[0].kind]) for placed in self.sublayers)
        return tuple((*own, scale) for own, scale in zip(super().parts(), scales, strict=True))

    def forward(
        self,
        x: Tensor | Streams,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        recompute: bool = False,
    ) -> Streams:
        """Run the block.

        Args:
            x: finished streams, or in the first block the embedding (batch, tokens, d).
            attn_mask: as for timm's attention: what is added to the scores, or a boolean mask of what is seen.
            is_causal: whether a token sees the earlier ones alone.
            recompute: keep no activations, and run the block again in the backward pass.

        Returns:
            Finished streams.

        Raises:
            ConfigError: a later block is given one tensor.
        """
        if isinstance(x, Tensor):
            site = getattr(self, self.sublayers[0].residual).site
            if not site.first_block:
                raise ConfigError(f"block {site.block} takes the streams of the block before it, not a tensor")
            x = open_streams(self.scheme, x)
        run = partial(self._run, {"attn_mask": attn_mask, "is_causal": is_causal})
        # Streams are flat arguments: a reentrant checkpoint loses the gradients of tensors in a tuple.
        return checkpoint(run, *x) if recompute else run(*x)

    def _run(self, masks: Mapping[str, Any], *streams: Tensor) -> Streams:
        return through([placed.step(self, partial(self._branch, placed, masks)) for placed in self.sublayers], streams)

    def _branch(self, placed: Placed, masks: Mapping[str, Any], u: Tensor) -> Tensor:
        """A branch, and the host's norm if that goes behind it: (batch, tokens, d) to the same shape."""
        (branch,) = placed.branches
        o = getattr(self, branch.module)(u, **(masks if branch.kind == "attention" else {}))
        o = getattr(self, _LAYER_SCALES[branch.kind])(o)
        return getattr(self, branch.norm)(o) if placed.place == "after" else o


class HeadNormedViTAttention(Attention):
    """timm's ``Attention`` with values normalised per head, beside the queries and keys that it normalises itself."""

    v_norm: nn.Module

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """As timm's: (batch, tokens, d) to (batch, tokens, d)."""
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = (norm(part) for norm, part in zip((self.q_norm, self.k_norm, self.v_norm), qkv, strict=True))
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
        else:
            scores = q * self.scale @ k.mT
            scores = maybe_add_mask(scores, additive_mask(tokens, scores, attn_mask, is_causal=is_causal))
            o = self.attn_drop(scores.softmax(-1)) @ v
        o = self.norm(o.transpose(1, 2).reshape(batch, tokens, -1))
        # timm before 1.0.27 has no gates.
        if (gate := getattr(self, "gate", None)) is not None:
            o = o * gate(x).sigmoid()
        return self.proj_drop(self.proj(o))


class BareReadout(ReadoutNorm, nn.Identity):
    """The end of the blocks where no norm follows: closes the stack, and is the identity for a readout."""


class ResidualViT(VisionTransformer):
    """Mixin over timm's ``VisionTransformer``, or a class derived from it, whose blocks are rewired.

    A feature "after block i", here and wherever timm returns such features, is one tensor: the streams that block i
    returns, closed by the model's own readout, which is the one at the end of the blocks. With ``norm=True``, the
    module ``norm`` follows it as it does at the end; where timm norms behind the pooling, that module has no norm, in
    timm as here.

    Args:
        *args: as for timm's class.
        scheme: a scheme's name, or a :class:`~siamesenorm.residual.Scheme`.
        scheme_options: the options of a scheme that is given by name.
        **kwargs: as for timm's class.

    Attributes:
        residual_scheme: the scheme, as :func:`siamesenorm.hosts.scheme_from_dict` takes it.

    Raises:
        ConfigError: an unknown scheme or option, or blocks that no scheme can be put into.
    """

    host_class: type[Any]
    residual_scheme: dict[str, Any]
    norm: Any

    def __init__(
        self,
        *args: Any,
        scheme: str | Scheme = "siamese",
        scheme_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if scheme_options is not None and not isinstance(scheme_options, Mapping):
            raise ConfigError(f"scheme_options are names and values, such as {{'x': 'hybrid'}}, not {scheme_options!r}")
        made = make_scheme(scheme, **(scheme_options or {}))
        super().__init__(*args, **kwargs)
        _check(self, made)
        _install(self, made, init=True)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is found by the one it is made from.
        return _empty, (self.host_class,), self.__getstate__()

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """As timm's: draw the weights anew, and then apply the scheme's own initialisation."""
        super().init_weights(mode=mode, needs_reset=needs_reset)
        drawn = needs_reset or (mode or self.weight_init_mode) != "reset"
        # timm draws them before there is a scheme, too.
        if drawn and hasattr(self, "residual_scheme"):
            _apply_gains(self, scheme_of(self))

    def no_weight_decay(self) -> set[str]:
        """timm's names, and the parameters of the scheme that it exempts from weight decay."""
        scheme = scheme_of(self)
        return super().no_weight_decay() | {name for name, _ in self.named_parameters() if not scheme.decay(name)}

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """As timm's: images (batch, channels, height, width) to (batch, tokens, d) behind ``norm``."""
        streams, _ = self._run_blocks(x, len(self.blocks), (), attn_mask, is_causal)
        return self.norm(streams)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """As timm's, for features as they are defined above.

        Args:
            x: images (batch, channels, height, width).
            indices: after which blocks: of all with ``None``, of the last n, or of those listed.
            return_prefix_tokens: return class and register tokens too, of each feature.
            norm: let ``norm`` follow the readout of each feature.
            stop_early: run no blocks behind the last of ``indices``.
            output_fmt: ``"NCHW"`` or ``"NLC"``.
            intermediates_only: return the features alone.
            output_dict: return a dictionary with ``image_intermediates``, and ``image_intermediates_prefix`` and
                ``image_features`` where they are asked for.
            attn_mask: as in :meth:`ResidualViTBlock.forward`.
            is_causal: likewise.

        Returns:
            The last hidden state (batch, tokens, d) and the features, each (batch, d, rows, columns) or
            (batch, patches, d), with the prefix tokens (batch, prefix, d) a pair.

        Raises:
            ConfigError: an unknown ``output_fmt``.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ConfigError(f"output_fmt is 'NCHW' or 'NLC', not {output_fmt!r}")
        taken, last = feature_take_indices(len(self.blocks), indices)
        depth = last + 1 if stop_early else len(self.blocks)
        streams, kept = self._run_blocks(x, depth, taken, attn_mask, is_causal)
        features = [self.norm(each) if norm else close_streams(self.norm.readout, each) for each in kept]
        prefix = [feature[:, : self.num_prefix_tokens] for feature in features]
        features = [feature[:, self.num_prefix_tokens :] for feature in features]
        if output_fmt == "NCHW":
            grid = self.patch_embed.dynamic_feat_size(x.shape[-2:])
            features = [feature.mT.unflatten(-1, grid).contiguous() for feature in features]
        with_prefix = return_prefix_tokens and self.num_prefix_tokens > 0
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": features}
            if with_prefix:
                result["image_intermediates_prefix"] = prefix
            if not intermediates_only:
                result["image_features"] = self.norm(streams)
            return result
        found: list[Any] = list(zip(features, prefix, strict=True)) if with_prefix else features
        return found if intermediates_only else (self.norm(streams), found)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """As timm's; without its norm, ``norm`` goes on closing the stack."""
        taken = super().prune_intermediate_layers(indices, prune_norm=False, prune_head=prune_head)
        if prune_norm:
            self.norm = _bare(self.norm.readout)
        return taken

    def _run_blocks(
        self, images: Tensor, depth: int, keep: Collection[int], attn_mask: Tensor | None, is_causal: bool
    ) -> tuple[Streams, list[Streams]]:
        """The streams after the first ``depth`` blocks, and those after each block that ``keep`` numbers."""
        x = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(images))))
        kept = []
        for index, block in zip(range(depth), self.blocks, strict=False):
            x = block(x, attn_mask=attn_mask, is_causal=is_causal, recompute=self.grad_checkpointing)
            if index in keep:
                kept.append(x)
        return x, kept


@functools.cache
def residual_class(host_class: Any) -> type[Any]:
    """The rewired counterpart of timm's ``VisionTransformer`` or a class derived from it.

    Raises:
        ConfigError: it leads features through the blocks in a way of its own.
    """
    for name in _THROUGH_THE_BLOCKS:
        if getattr(host_class, name) is not getattr(VisionTransformer, name):
            raise _own_way(host_class, name)
    attributes = {"__module__": __name__, "__doc__": f"{host_class.__name__}, rewired.", "host_class": host_class}
    return type(f"Residual{host_class.__name__}", (ResidualViT, host_class), attributes)


def rewire(model: Any, scheme: Scheme, *, init: bool = False) -> Any:
    """What :func:`siamesenorm.rewire` does for timm's ``VisionTransformer``, or a class derived from it.

    Raises:
        ConfigError: it is rewired already, or has blocks, norms or an attention of a kind that is not known.
    """
    if isinstance(model, ResidualViT):
        raise ConfigError(f"this {type(model).__name__} is rewired already (scheme '{scheme_of(model).name}')")
    for name in _THROUGH_THE_BLOCKS:
        if name in vars(model):
            raise _own_way(type(model), name)
    cls: Any = type(model)
    made_class = residual_class(cls)
    _check(model, scheme)
    model.__class__ = made_class
    warn_of_removed(scheme, _install(model, scheme, init=init))
    return model


def exchange(model: Any, scheme: Scheme) -> None:
    """What :func:`siamesenorm.hosts.exchange` does for a rewired one, but for keeping values."""
    check_sites(scheme, stack_sites(len(model.blocks), _KINDS))
    rates = [[getattr(block, placed.residual).drop_path for placed in block.sublayers] for block in model.blocks]
    _install(model, scheme, init=False)
    for block, of_block in zip(model.blocks, rates, strict=True):
        for placed, rate in zip(block.sublayers, of_block, strict=True):
            getattr(block, placed.residual).drop_path = rate


def _empty(host_class: Any) -> Any:
    made_class: Any = residual_class(host_class)
    return made_class.__new__(made_class)


def _own_way(cls: type[Any], name: str) -> ConfigError:
    return ConfigError(
        f"cannot rewire a {cls.__name__}: its {name} is not VisionTransformer's, and may not know what streams are"
    )


def _check(model: Any, scheme: Scheme) -> None:
    """See that a scheme can be put into a model, before anything is changed.

    Raises:
        ConfigError: it cannot.
    """
    if not len(model.blocks):
        raise ConfigError(f"cannot rewire a {type(model).__name__} without blocks")
    sites = stack_sites(len(model.blocks), _KINDS)
    check_sites(scheme, sites)
    for site, branch in zip(sites, itertools.cycle(HOST.branches)):
        block = model.blocks[site.block]
        where = f"cannot rewire this {type(model).__name__}: its block {site.block}"
        if type(block) is not TimmBlock:
            raise ConfigError(
                f"{where} is a {type(block).__name__}, and of timm's blocks only 'Block' has attention and MLP one "
                "after the other, each with a norm before it"
            )
        if not isinstance(block.attn, Attention | DiffAttention):
            raise ConfigError(f"{where} has a {type(block.attn).__name__}: known are Attention and DiffAttention")
        if (heads := scheme.branch_norms(site)) and type(block.attn) is not Attention:
            raise ConfigError(
                f"scheme '{scheme.name}' wants {', '.join(heads)} normalised per head, which is known of timm's "
                f"Attention alone; block {site.block} has a {type(block.attn).__name__}"
            )
        path = getattr(block, _DROP_PATHS[site.kind])
        if not isinstance(path, nn.Identity) and not (type(path) is DropPath and path.scale_by_keep):
            raise ConfigError(f"{where} has stochastic depth of another kind than a scaling DropPath: {path}")
        _check_norm(getattr(block, branch.norm), where)
    if not isinstance(model.norm, nn.Identity):
        _check_norm(model.norm, f"cannot rewire this {type(model).__name__}: it")


def _check_norm(norm: nn.Module, where: str) -> None:
    if type(norm) not in _NORMS:
        known = ", ".join(dict.fromkeys(cls.__name__ for cls in _NORMS))
        raise ConfigError(f"{where} has a norm of unknown kind, {type(norm).__name__}; known are {known}")
    HostNorms(HOST).spec(norm)


def _install(model: Any, scheme: Scheme, *, init: bool) -> list[str]:
    """Rewire a model that was checked; the names of trained norms that were removed."""
    norms = HostNorms(HOST)
    sites = stack_sites(len(model.blocks), _KINDS)
    removed = []
    for index, block in enumerate(model.blocks):
        here = sites[index * len(_KINDS) : (index + 1) * len(_KINDS)]
        sublayers = tuple(((branch,), site) for branch, site in zip(HOST.branches, here, strict=True))
        removed += [f"blocks.{index}.{name}" for name in install_block(block, scheme, norms, sublayers, _swap_class)]
        for placed, site in zip(block.sublayers, here, strict=True):
            path = getattr(block, _DROP_PATHS[site.kind])
            getattr(block, placed.residual).drop_path = getattr(path, "drop_prob", 0.0)
            setattr(block, _DROP_PATHS[site.kind], nn.Identity().train(path.training))
    if isinstance(model.norm, nn.Identity):
        first = model.blocks[0]
        spec = norms.for_scheme(first.sublayers[0].norm.build())
        model.norm = _bare(norms.like(scheme.readout(spec), first, model))
    else:
        model.norm = install_readout(model.norm, scheme, norms, model)
    model.residual_scheme = scheme_to_dict(scheme)
    if init:
        _apply_gains(model, scheme)
    return removed


def _apply_gains(model: Any, scheme: Scheme) -> None:
    for block in model.blocks:
        apply_gains(HOST, scheme, block, [getattr(block, placed.residual).site for placed in block.sublayers])


def _swap_class(module: nn.Module) -> None:
    module.__class__ = ResidualViTBlock if isinstance(module, TimmBlock) else HeadNormedViTAttention


def _bare(readout: Readout) -> BareReadout:
    bare = BareReadout().train(readout.training)
    bare.readout = readout
    return bare
