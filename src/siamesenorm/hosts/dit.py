"""DiT as a host: diffusers' own model rewired, and a subclass of it that can hold the official one (arXiv 2212.09748).

:class:`ResidualDiTTransformer2DModel` is what becomes of diffusers' ``DiTTransformer2DModel``: it keeps an embedder of
time step and label in every block, a label dropout in each of them, and a table of positions that is computed anew.
:class:`DiT` has one embedder for all blocks, does not drop labels, and saves the table. Both save and load as any model
of diffusers, carry the scheme in their config, and go into ``diffusers.DiTPipeline``. Importing this module imports
diffusers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, FrozenDict, register_to_config
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.embeddings import (
    CombinedTimestepLabelEmbeddings,
    LabelEmbedding,
    PatchEmbed,
    Timesteps,
    get_2d_sincos_pos_embed,
)
from diffusers.models.modeling_outputs import Transformer2DModelOutput

# A saved pipeline is loaded by looking for this name, too, in the module of a component's class.
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import AdaLayerNormZero
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from ..residual import ConfigError, Norm, Readout, Scheme, Sublayer, make_scheme, nearest, open_streams
from .configs import scheme_of, scheme_to_dict
from .dit_block import HOST, DiTBlock, check_scheme, init_by_scheme, install
from .surgery import warn_of_removed

__all__ = [
    "HOST",
    "DiT",
    "ResidualDiT",
    "ResidualDiTTransformer2DModel",
    "build",
    "exchange",
    "model_config",
    "rewire",
]

# diffusers' own class refuses a config of another ``norm_type`` than its own, so it cannot load a rewired model as a
# Pre-Norm one.
_HOST_NORM_TYPE, _NORM_TYPE = "ada_norm_zero", "residual_ada_norm_zero"
_NULL_OF_PIPELINES = 1000
_GUIDED_CHANNELS = 3
_ACTIVATIONS = ("gelu", "gelu-approximate", "geglu", "geglu-approximate", "swiglu", "linear-silu")
_WIDTH_OF_SINUSOID = 256


class ResidualDiT(DiTTransformer2DModel):
    """What :class:`DiT` and a rewired model of diffusers share.

    Attributes:
        scheme: how the blocks are joined.
        num_classes: number of classes, the null class not counted.
        null_class: the label of no class, for classifier-free guidance; ``None`` where the model has none.
        shardable: whether each block, and then what is left, can be given to FSDP.
    """

    shardable = True

    scheme: Scheme
    num_classes: int
    null_class: int | None
    transformer_blocks: Any

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in diffusers, but a missing or unexpected weight is an error, not a warning.

        Raises:
            ConfigError: such weights, all of them listed.
        """
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        for kind in ("missing_keys", "unexpected_keys"):
            if names := sorted(info.get(kind) or ()):
                raise ConfigError(f"{kind.replace('_', ' ')} in the checkpoint of {cls.__name__}: {', '.join(names)}")
        return (model, info) if output_loading_info else model

    def join(self, scheme: Scheme, drop_path_rate: float = 0.0) -> list[str]:
        """Join the blocks by ``scheme`` and write it into the config; the names of trained norms that were removed."""
        self.record(residual_scheme=scheme_to_dict(scheme), norm_type=_NORM_TYPE)
        self.scheme = scheme
        return install(self, scheme, drop_path_rate)

    def record(self, **values: Any) -> None:
        """Set keys of the config, none of which is a default any longer."""
        defaults = [key for key in self.config.get("_use_default_values", ()) if key not in values]
        self.register_to_config(_use_default_values=defaults, **values)

    def keep_labels(self) -> None:
        """Drop no label in training, which is then for a training loop to do, once for all blocks."""
        for module in self.modules():
            if isinstance(module, LabelEmbedding):
                module.dropout_prob = 0.0

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Any:
        """As in diffusers.

        Args:
            hidden_states: noisy latents (batch, in_channels, height, width).
            timestep: (batch,), whole numbers or fractions.
            class_labels: (batch,), whole numbers. 1000, which ``DiTPipeline`` takes for the null class whatever the
                number of classes, is the null class of a model with fewer classes than that, and a class like any
                other of one with more.
            cross_attention_kwargs: further arguments of the attention's processor.
            return_dict: whether to return an output with ``.sample``, or a tuple of the sample alone.

        Returns:
            The sample (batch, out_channels, height, width).

        Raises:
            ConfigError: latents of a size that the model is not for, no time step or no label, or labels that are no
                classes (only where they are on the CPU, as elsewhere the check would have to wait for the device).
        """
        rows, columns = self._grid(hidden_states)
        labels = self._checked_labels(timestep, class_labels)
        h = self.pos_embed(hidden_states)
        conditioning = self._shared_conditioning(timestep, labels, h.dtype)
        streams = open_streams(self.scheme, h)
        for block in self.transformer_blocks:
            inputs = (conditioning, timestep, labels, cross_attention_kwargs, *streams)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                streams = self._gradient_checkpointing_func(block, *inputs)
            else:
                streams = block(*inputs)
        h = self.norm_out(streams)
        if conditioning is None:
            conditioning = self.transformer_blocks[0].norm1.emb(timestep, labels, hidden_dtype=h.dtype)
        shift, scale = self.proj_out_1(F.silu(conditioning)).unsqueeze(1).chunk(2, dim=-1)
        patches = self.proj_out_2(h * (1 + scale) + shift)

        side = self.patch_size
        patches = patches.unflatten(2, (side, side, self.out_channels)).unflatten(1, (rows, columns))
        sample = torch.einsum("nhwpqc->nchpwq", patches).reshape(-1, self.out_channels, rows * side, columns * side)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def forward_with_cfg(
        self, hidden_states: Tensor, timestep: Tensor, class_labels: Tensor, guidance_scale: float
    ) -> Tensor:
        """Classifier-free guidance as in the official code, which guides the first three channels alone.

        Args:
            hidden_states: (2·batch, in_channels, height, width). Only the first half is read, for both.
            timestep: (2·batch,).
            class_labels: (2·batch,), the classes and then as often the null class.
            guidance_scale: s in null + s · (class - null); 1 is no guidance.

        Returns:
            (2·batch, out_channels, height, width): the guided channels, the same in both halves, and then the other
            channels of each half as they were predicted.

        Raises:
            ConfigError: as :meth:`forward`, a batch that has no halves, or a model without a null class.
        """
        if self.null_class is None:
            raise ConfigError(self._no_null_class())
        if len(hidden_states) % 2:
            raise ConfigError(f"guidance takes a batch of two halves, not of {len(hidden_states)}")
        half = hidden_states.chunk(2)[0]
        sample = self(torch.cat((half, half)), timestep, class_labels).sample
        guided, rest = sample[:, :_GUIDED_CHANNELS], sample[:, _GUIDED_CHANNELS:]
        of_class, of_null = guided.chunk(2)
        guided = of_null + guidance_scale * (of_class - of_null)
        return torch.cat((torch.cat((guided, guided)), rest), dim=1)

    def _shared_conditioning(self, timestep: Tensor | None, labels: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Time step and label embedded (batch, d), or None where each block does it itself."""
        return None

    def _grid(self, hidden_states: Tensor) -> tuple[int, int]:
        """The number of patches in height and width."""
        shape, channels, side = tuple(hidden_states.shape), self.pos_embed.proj.in_channels, self.patch_size
        if len(shape) != 4 or shape[1] != channels or shape[2] % side or shape[3] % side:
            raise ConfigError(
                f"hidden_states must be (batch, {channels}, height, width), both sides a multiple of the patch size "
                f"{side}, not {shape}"
            )
        return shape[2] // side, shape[3] // side

    def _checked_labels(self, timestep: Tensor | None, class_labels: Tensor | None) -> Tensor:
        if timestep is None or class_labels is None:
            raise ConfigError("a DiT needs both timestep and class_labels")
        labels = class_labels
        if self.num_classes < _NULL_OF_PIPELINES:
            labels = labels.masked_fill(labels == _NULL_OF_PIPELINES, self.num_classes)
        # Elsewhere the check would wait for the device, and what is traced or only counted has no values.
        valued = labels.device.type == "cpu" and not isinstance(labels, FakeTensor)
        if valued and labels.numel() and not torch.compiler.is_compiling():
            last = self.num_classes - 1 if self.null_class is None else self.null_class
            low, high = (int(label) for label in labels.aminmax())
            if self.null_class is None and high == self.num_classes and low >= 0:
                raise ConfigError(self._no_null_class())
            if low < 0 or high > last:
                raise ConfigError(f"class_labels must be from 0 to {last}, not {low if low < 0 else high}")
        return labels

    def _no_null_class(self) -> str:
        return (
            f"this model has {self.num_classes} classes and no null class (class_dropout_prob was 0), so it can only "
            "sample without guidance: guidance_scale=1"
        )


class ResidualDiTTransformer2DModel(ResidualDiT):
    """diffusers' ``DiTTransformer2DModel``, rewired: see :func:`siamesenorm.rewire`.

    Its config has the keys of diffusers' class and ``residual_scheme``. As in diffusers, the final layer uses the first
    block's embedder, so blocks cannot be sharded one by one; and in training every block drops labels for itself. A
    pipeline that had the model before it was rewired saves it under the name of its new class once it is told:
    ``pipeline.register_modules(transformer=model)``.
    """

    shardable = False

    def __init__(self, *, residual_scheme: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "norm_type": _HOST_NORM_TYPE})
        self.register_to_config(residual_scheme=residual_scheme)
        self.adopt(scheme_of(self.config))

    @staticmethod
    def _get_init_keys(input_class: type) -> set[str]:
        keys = ConfigMixin._get_init_keys(input_class)
        if issubclass(input_class, ResidualDiTTransformer2DModel):
            keys |= ConfigMixin._get_init_keys(DiTTransformer2DModel)
        return keys

    def adopt(self, scheme: Scheme) -> list[str]:
        """Make of diffusers' model, which this was until now, a rewired one; as :meth:`join`."""
        self.record(out_channels=self.out_channels)
        self.num_classes = self.null_class = self.config.num_embeds_ada_norm
        return self.join(scheme)


class DiT(ResidualDiT):
    """A DiT that can hold the official model; Pre-Norm where its config carries no scheme.

    It differs from diffusers' in three things: one embedder ``emb`` of time step and label serves all blocks, so that
    the conditioning is computed once; no label is dropped, which is for a training loop to do, once for all blocks; and
    the table of positions is saved, so it need not be the one of sines and cosines. A new model is initialised as in
    the paper's code.

    Args:
        num_attention_heads: number of heads.
        attention_head_dim: width of a head; the model is as wide as all heads.
        in_channels: channels of the latents.
        out_channels: channels of the output, as many as ``in_channels`` by default; twice those with a learned sigma.
        num_layers: number of blocks.
        dropout: behind attention, and within the MLP.
        norm_num_groups: unused, as in diffusers.
        attention_bias: whether q, k and v have a bias.
        sample_size: height and width of the latents.
        patch_size: height and width of a patch.
        activation_fn: of the MLP.
        num_embeds_ada_norm: number of classes.
        upcast_attention: unused, as in diffusers with torch's own attention.
        norm_type: ``"ada_norm_zero"``; the config of a rewired model has another name there, which is not for choosing.
        norm_elementwise_affine: whether the blocks' own norms learn a weight and a bias.
        norm_eps: of the blocks' own norms.
        mlp_ratio: width of the MLP, as a multiple of the model's.
        class_dropout_prob: how often training should drop a label; at 0 there is no null class.
        timestep_shift: 0 as in the official code, or 1 as in diffusers, where the lowest frequency is the other end's.
        drop_path_rate: of stochastic depth in the last block, growing with depth from none in the first.
        residual_scheme: the scheme, as it stands in a saved config.

    Raises:
        ConfigError: for a value that is not possible.
    """

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 16,
        attention_head_dim: int = 72,
        in_channels: int = 4,
        out_channels: int | None = None,
        num_layers: int = 28,
        dropout: float = 0.0,
        norm_num_groups: int = 32,
        attention_bias: bool = True,
        sample_size: int = 32,
        patch_size: int = 2,
        activation_fn: str = "gelu-approximate",
        num_embeds_ada_norm: int = 1000,
        upcast_attention: bool = False,
        norm_type: str = _HOST_NORM_TYPE,
        norm_elementwise_affine: bool = False,
        norm_eps: float = 1e-6,
        mlp_ratio: float = 4.0,
        class_dropout_prob: float = 0.1,
        timestep_shift: int = 0,
        drop_path_rate: float = 0.0,
        residual_scheme: Mapping[str, Any] | None = None,
    ) -> None:
        _check_values(self.config)
        scheme = make_scheme("pre") if residual_scheme is None else scheme_of(self.config)
        check_scheme(scheme, num_layers)
        # diffusers' own constructor would build an embedder for every block.
        ModelMixin.__init__(self)
        self.attention_head_dim = attention_head_dim
        self.inner_dim = num_attention_heads * attention_head_dim
        self.out_channels = out_channels or in_channels
        self.height = self.width = sample_size
        self.patch_size = patch_size
        self.gradient_checkpointing = False
        self.num_classes = num_embeds_ada_norm
        self.null_class = num_embeds_ada_norm if class_dropout_prob else None
        self.record(out_channels=self.out_channels)

        self.pos_embed = PatchEmbed(sample_size, sample_size, patch_size, in_channels, self.inner_dim)
        self.pos_embed.register_buffer("pos_embed", self.pos_embed.pos_embed, persistent=True)
        self.emb = CombinedTimestepLabelEmbeddings(num_embeds_ada_norm, self.inner_dim, class_dropout_prob)
        self.emb.time_proj = Timesteps(_WIDTH_OF_SINUSOID, flip_sin_to_cos=True, downscale_freq_shift=timestep_shift)
        self.keep_labels()
        self.transformer_blocks = nn.ModuleList(self._block() for _ in range(num_layers))
        self.norm_out = nn.LayerNorm(self.inner_dim, elementwise_affine=False, eps=1e-6)
        self.proj_out_1 = nn.Linear(self.inner_dim, 2 * self.inner_dim)
        self.proj_out_2 = nn.Linear(self.inner_dim, patch_size**2 * self.out_channels)
        if residual_scheme is None:
            self.scheme = scheme
            install(self, scheme, drop_path_rate)
        else:
            self.join(scheme, drop_path_rate)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values as in the paper's code, where adaLN and the output start at 0, and the scheme's own."""
        for block in self.transformer_blocks:
            for part in (block.attn1, block.ff):
                for linear in (module for module in part.modules() if isinstance(module, nn.Linear)):
                    _spread(linear)
            _zero(block.norm1.linear)
        for linear in (self.emb.timestep_embedder.linear_1, self.emb.timestep_embedder.linear_2):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        nn.init.normal_(self.emb.class_embedder.embedding_table.weight, std=0.02)
        _spread(self.pos_embed.proj)
        side = self.pos_embed.height
        table = get_2d_sincos_pos_embed(self.inner_dim, side, base_size=side, output_type="pt")
        self.pos_embed.pos_embed.copy_(table[None])
        for linear in (self.proj_out_1, self.proj_out_2):
            _zero(linear)
        for module in self.modules():
            if isinstance(module, Norm | Sublayer | Readout):
                module.reset_parameters()
        init_by_scheme(self, self.scheme)

    def _block(self) -> nn.Module:
        config = self.config
        affine = config.norm_elementwise_affine
        block = BasicTransformerBlock(
            self.inner_dim,
            config.num_attention_heads,
            config.attention_head_dim,
            dropout=config.dropout,
            activation_fn=config.activation_fn,
            attention_bias=config.attention_bias,
            upcast_attention=config.upcast_attention,
            norm_elementwise_affine=affine,
            norm_eps=config.norm_eps,
            ff_inner_dim=_mlp_width(config),
        )
        block.norm1 = AdaLayerNormZero(self.inner_dim)
        block.norm1.norm = nn.LayerNorm(self.inner_dim, elementwise_affine=affine, eps=config.norm_eps)
        return block

    def _shared_conditioning(self, timestep: Tensor | None, labels: Tensor, dtype: torch.dtype) -> Tensor | None:
        return self.emb(timestep, labels, hidden_dtype=dtype)

    def _grid(self, hidden_states: Tensor) -> tuple[int, int]:
        grid = super()._grid(hidden_states)
        if grid != (self.pos_embed.height, self.pos_embed.width):
            # Patches elsewhere would get positions of sines and cosines in place of those that the table holds.
            raise ConfigError(
                f"this model has positions for latents of {self.height}×{self.width}, not of "
                f"{hidden_states.shape[2]}×{hidden_states.shape[3]}"
            )
        return grid


def rewire(model: Any, scheme: Scheme, *, init: bool = False) -> Any:
    """Rewire a DiT in place, its class too where it is diffusers'; as :func:`siamesenorm.rewire`.

    Raises:
        ConfigError: a model that is rewired already, a subclass that may compute something else, blocks that are not
            diffusers' own any more, or a scheme that does not go with a DiT.
    """
    if getattr(model.config, "residual_scheme", None) is not None:
        name = scheme_of(model.config).name
        raise ConfigError(f"this {type(model).__name__} is rewired already (scheme '{name}')")
    if type(model) is not DiTTransformer2DModel and not isinstance(model, DiT):
        raise ConfigError(f"cannot rewire a {type(model).__name__}: it may differ from the DiT of diffusers it extends")
    for block in model.transformer_blocks:
        if type(block) not in (BasicTransformerBlock, DiTBlock):
            raise ConfigError(
                f"cannot rewire a DiT whose blocks are {type(block).__name__}: rewire it before wrapping it"
            )
    check_scheme(scheme, len(model.transformer_blocks))
    if isinstance(model, DiT):
        removed = model.join(scheme, model.config.drop_path_rate)
    else:
        model.__class__ = ResidualDiTTransformer2DModel
        removed = model.adopt(scheme)
    if init:
        init_by_scheme(model, scheme)
    warn_of_removed(scheme, removed)
    return model


def exchange(model: Any, scheme: Scheme) -> None:
    """What :func:`siamesenorm.hosts.exchange` does for a DiT, but for keeping values."""
    check_scheme(scheme, len(model.transformer_blocks))
    model.join(scheme, model.config.get("drop_path_rate", 0.0))


def build(config: Mapping[str, Any], scheme: Scheme) -> DiT:
    """A new :class:`DiT`; as :func:`siamesenorm.hosts.build`."""
    return DiT(**model_config(config, scheme))


def model_config(config: Mapping[str, Any], scheme: Scheme) -> FrozenDict:
    """The config of such a model with all its keys; errors as in :func:`build`."""
    parameters = inspect.signature(DiT.__init__).parameters
    known = {name: p.default for name, p in parameters.items() if name not in ("self", "residual_scheme")}
    for key in config:
        if key not in known:
            raise ConfigError(f"a DiT config has no key '{key}': {nearest(str(key), known)}")
    values = FrozenDict({**known, **config, "residual_scheme": scheme_to_dict(scheme)})
    _check_values(values)
    check_scheme(scheme, values.num_layers)
    return FrozenDict({**values, "out_channels": values.out_channels or values.in_channels, "norm_type": _NORM_TYPE})


def _check_values(config: Any) -> None:
    """Refuse what a DiT cannot be made of."""
    for key in (
        "num_attention_heads", "attention_head_dim", "in_channels", "num_layers", "sample_size", "patch_size",
        "num_embeds_ada_norm", *(("out_channels",) if config["out_channels"] is not None else ()),
    ):  # fmt: skip
        _require(config, key, type(config[key]) is int and config[key] >= 1, "a whole number of at least 1")
    for key in ("dropout", "class_dropout_prob", "drop_path_rate"):
        _require(config, key, _is_number(config[key]) and 0 <= config[key] < 1, "a number of at least 0 and below 1")
    for key in ("attention_bias", "upcast_attention", "norm_elementwise_affine"):
        _require(config, key, isinstance(config[key], bool), "true or false")
    eps, shift, activation = config["norm_eps"], config["timestep_shift"], config["activation_fn"]
    _require(config, "norm_eps", _is_number(eps) and 0 <= eps < math.inf, "a number of at least 0")
    _require(config, "timestep_shift", type(shift) is int and shift in (0, 1), "0 or 1")
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"unknown activation_fn {activation!r} of a DiT: {nearest(str(activation), _ACTIVATIONS)}")
    if config["norm_type"] not in (_HOST_NORM_TYPE, _NORM_TYPE):
        raise ConfigError(f"a DiT has no norm_type {config['norm_type']!r}, only '{_HOST_NORM_TYPE}'")
    if config["sample_size"] % config["patch_size"]:
        raise ConfigError(f"patch_size {config['patch_size']} does not divide sample_size {config['sample_size']}")
    width = config["num_attention_heads"] * config["attention_head_dim"]
    if width % 4:
        raise ConfigError(
            f"num_attention_heads · attention_head_dim must be a multiple of 4, a quarter for each sine and cosine of "
            f"height and width, not {width}"
        )
    ratio = config["mlp_ratio"]
    leaves_width = _is_number(ratio) and 1 <= width * ratio < math.inf
    _require(config, "mlp_ratio", leaves_width, "a number that leaves the MLP a width")


def _require(config: Any, key: str, fits: bool, wanted: str) -> None:
    if not fits:
        raise ConfigError(f"{key} of a DiT must be {wanted}, not {config[key]!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mlp_width(config: Any) -> int:
    return int(config.num_attention_heads * config.attention_head_dim * config.mlp_ratio)


def _spread(layer: nn.Linear | nn.Conv2d) -> None:
    """Glorot's uniform weights, a convolution's as those of the linear map of a patch, and no bias."""
    nn.init.xavier_uniform_(layer.weight.view(len(layer.weight), -1))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _zero(linear: nn.Linear) -> None:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
