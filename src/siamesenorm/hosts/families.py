"""Which models can be rewired: one small table of roles per family.

A family says by what names a transformers model calls its parts. Everything a scheme needs to know of a model is in
its :class:`Host`; adding a family is adding a table, and :func:`register_host` does it from outside the package. A host
of another library has a table too, and a module of this package that extends it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

from ..hub.autoload import DIT_MODELS
from ..residual import ConfigError, nearest

__all__ = [
    "AttentionRoles",
    "Branch",
    "Host",
    "all_hosts",
    "find_host",
    "get_host",
    "home_named",
    "home_of",
    "host_of",
    "hosts",
    "register_host",
]

_PREFIX = "siamesenorm_"
# Models that are no transformers models, by their class, and the module of this package that rewires them.
_HOMES = {
    f"{DIT_MODELS}.DiTTransformer2DModel": "dit",
    "timm.models.vision_transformer.VisionTransformer": "timm_vit",
}


@dataclass(frozen=True)
class Branch:
    """A branch of a block, as attribute names within the block, with dots where a part is deeper.

    Attributes:
        kind: what it is. Attention is called with the block's own keyword arguments and may return a tuple whose first
            item is its output.
        module: the branch itself.
        norm: the norm that the host applies to its input.
        dropout: the dropout that the host applies to its output, where it has one.
        in_place: whether it may write into its input, which is a stream where no norm stands before it.
    """

    kind: Literal["attention", "mlp"]
    module: str
    norm: str
    dropout: str | None = None
    in_place: bool = False


@dataclass(frozen=True)
class AttentionRoles:
    """The parts of an attention, as attribute names within it, for the per-head norms that some schemes ask for.

    Attributes:
        projections: the matrices of q, k and v, or the one that holds all three.
        by_head: in the one matrix, whether each head's q, k and v follow each other (GPT-NeoX) or all of q comes before
            all of k (GPT-2).
        out: the output projection.
        out_dropout: the dropout behind it, where the attention has one.
        head_dim: width of a head, a number.
        dropout: dropout on the attention weights, a number or a module.
        norms: the host's own norms by ``"q"`` and ``"k"``, where it may have some.
        whole: whether those norm a whole projection at once and not each head.
    """

    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    by_head: bool = False
    out: str = "o_proj"
    out_dropout: str | None = None
    head_dim: str = "head_dim"
    dropout: str = "attention_dropout"
    norms: Mapping[str, str] = field(default_factory=lambda: {"q": "q_norm", "k": "k_norm"})
    whole: bool = False


@dataclass(frozen=True)
class Host:
    """A family of models whose blocks can be rewired.

    Attributes:
        name: the family's ``model_type``.
        modeling: the module that defines its classes, such as ``<prefix>Model``; ``<prefix>Config`` is found in the
            module's ``configuration_`` sibling.
        prefix: what the class names start with.
        branches: the branches of a block in order, each a sublayer of its own.
        parallel: the branches where they share one sublayer, all reading the same input. Two may name the same norm.
        parallel_if: the config's key that says whether they do; ``None`` where ``parallel``, if given, always holds.
        attention: the parts of the attention.
        mlp_weights: for a scheme's own initialisation, the weights of the MLP or of its experts, as names within the
            block. A block need not have all of them.
        blocks: attribute of the base model that lists the blocks.
        final_norm: attribute of the base model that holds the final norm.
        head: that of a new model, as the class name's end: ``"ForCausalLM"`` or ``"ForImageClassification"``; ``None``
            in another library, whose models have but one form.
        classes: class names by head, where they are not the prefix and the head; several where a head has variants.
        head_parts: what only some heads have in their base model, as names within it.
        norm_offset: added to a norm's weight before it multiplies.
        norm_eps: the norms' eps, where the modules do not hold it.
        more_keys: keys of the config that its models read though its class does not declare them.
        home: the module beside this one that builds such models, where they are another library's than transformers.
        extra: the extra of this package that brings that library.
    """

    name: str
    modeling: str
    prefix: str
    branches: tuple[Branch, ...]
    parallel: tuple[Branch, ...] = ()
    parallel_if: str | None = None
    attention: AttentionRoles = AttentionRoles()
    mlp_weights: tuple[str, ...] = ()
    blocks: str = "layers"
    final_norm: str = "norm"
    head: Literal["ForCausalLM", "ForImageClassification"] | None = "ForCausalLM"
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    head_parts: tuple[str, ...] = ()
    norm_offset: float = 0.0
    norm_eps: float | None = None
    more_keys: tuple[str, ...] = ()
    home: str | None = None
    extra: str | None = None

    @property
    def residual_type(self) -> str:
        """The ``model_type`` of the family's rewired models."""
        return _PREFIX + self.name

    def sublayers(self, config: Any) -> tuple[tuple[Branch, ...], ...]:
        """The sublayers of a block in a model with this config, each the branches that share its read and write."""
        if self.parallel and (self.parallel_if is None or getattr(config, self.parallel_if)):
            return (self.parallel,)
        return tuple((branch,) for branch in self.branches)

    def kinds(self, config: Any) -> tuple[str, ...]:
        """The kinds of those sublayers."""
        return tuple("parallel" if len(branches) > 1 else branches[0].kind for branches in self.sublayers(config))

    def module(self) -> ModuleType:
        """The module with the family's model classes, imported on first use."""
        return importlib.import_module(self.modeling)

    def config_class(self) -> type[Any]:
        """The family's own config class; importing it does not import the models."""
        sibling = self.modeling.replace(".modeling_", ".configuration_")
        return getattr(importlib.import_module(sibling), f"{self.prefix}Config")

    def classes_with(self, head: str | None) -> tuple[Any, ...]:
        """The family's own classes with a head, the usual one first; none where it has no such head."""
        names = () if head is None else self.classes.get(head, (self.prefix + head,))
        return tuple(found for name in names if (found := getattr(self.module(), name, None)) is not None)


_ATTENTION = Branch("attention", "self_attn", "input_layernorm")
_MLP = Branch("mlp", "mlp", "post_attention_layernorm")
_NEOX = (
    Branch("attention", "attention", "input_layernorm", "post_attention_dropout"),
    Branch("mlp", "mlp", "post_attention_layernorm", "post_mlp_dropout"),
)
_GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def _llama_like(name: str, prefix: str, **changes: Any) -> Host:
    """A decoder with Llama's names: separate projections, a gated MLP, a norm before each branch."""
    return Host(
        **{
            "name": name,
            "modeling": f"transformers.models.{name}.modeling_{name}",
            "prefix": prefix,
            "branches": (_ATTENTION, _MLP),
            "mlp_weights": _GATED,
            **changes,
        }
    )


def _vit_like(name: str, prefix: str, **changes: Any) -> Host:
    """An image classifier with ViT's names: a class token, attention to both sides, and LayerNorm."""
    return Host(
        **{
            "name": name,
            "modeling": f"transformers.models.{name}.modeling_{name}",
            "prefix": prefix,
            "branches": (
                Branch("attention", "attention", "layernorm_before", "dropout"),
                Branch("mlp", "mlp", "layernorm_after", "dropout"),
            ),
            "mlp_weights": ("mlp.fc1", "mlp.fc2"),
            "final_norm": "layernorm",
            "head": "ForImageClassification",
            "head_parts": ("pooler", "embeddings.mask_token"),
            # Its class holds the labels' names, and their number is what they are counted as.
            "more_keys": ("num_labels",),
            **changes,
        }
    )


_HOSTS: dict[str, Host] = {
    host.name: host
    for host in (
        _llama_like("llama", "Llama"),
        _llama_like("mistral", "Mistral"),
        _llama_like("qwen2", "Qwen2"),
        _llama_like("qwen3", "Qwen3"),
        _llama_like("olmo", "Olmo", norm_eps=1e-5),
        _llama_like("gemma", "Gemma", norm_offset=1.0),
        # Its router's noise is multiplied into the input of the experts.
        _llama_like("mixtral", "Mixtral", branches=(_ATTENTION, replace(_MLP, in_place=True)), mlp_weights=_EXPERTS),
        _llama_like("qwen3_moe", "Qwen3Moe", mlp_weights=_EXPERTS + _GATED, more_keys=("head_dim",)),
        _llama_like("olmoe", "Olmoe", mlp_weights=_EXPERTS, attention=AttentionRoles(whole=True)),
        _llama_like(
            "stablelm",
            "StableLm",
            branches=(_ATTENTION, Branch("mlp", "mlp", "post_attention_layernorm", "dropout")),
            parallel=(_ATTENTION, Branch("mlp", "mlp", "input_layernorm", "dropout")),
            parallel_if="use_parallel_residual",
            attention=AttentionRoles(norms={"q": "q_layernorm", "k": "k_layernorm"}),
        ),
        Host(
            name="phi",
            modeling="transformers.models.phi.modeling_phi",
            prefix="Phi",
            branches=(),
            parallel=(
                Branch("attention", "self_attn", "input_layernorm", "resid_dropout"),
                Branch("mlp", "mlp", "input_layernorm", "resid_dropout"),
            ),
            attention=AttentionRoles(out="dense", norms={"q": "q_layernorm", "k": "k_layernorm"}),
            mlp_weights=("mlp.fc1", "mlp.fc2"),
            final_norm="final_layernorm",
        ),
        Host(
            name="gpt_neox",
            modeling="transformers.models.gpt_neox.modeling_gpt_neox",
            prefix="GPTNeoX",
            branches=_NEOX,
            parallel=_NEOX,
            parallel_if="use_parallel_residual",
            attention=AttentionRoles(("query_key_value",), by_head=True, out="dense", head_dim="head_size"),
            mlp_weights=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
            final_norm="final_layer_norm",
        ),
        Host(
            name="gpt2",
            modeling="transformers.models.gpt2.modeling_gpt2",
            prefix="GPT2",
            branches=(Branch("attention", "attn", "ln_1"), Branch("mlp", "mlp", "ln_2")),
            attention=AttentionRoles(("c_attn",), out="c_proj", out_dropout="resid_dropout", dropout="attn_dropout"),
            mlp_weights=("mlp.c_fc", "mlp.c_proj"),
            blocks="h",
            final_norm="ln_f",
            classes={"ForCausalLM": ("GPT2LMHeadModel",)},
        ),
        _vit_like("vit", "ViT"),
        _vit_like(
            "deit",
            "DeiT",
            classes={
                "ForImageClassification": ("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
            },
        ),
        Host(
            name="dit",
            modeling=DIT_MODELS,
            prefix="DiT",
            branches=(Branch("attention", "attn1", "norm1.norm"), Branch("mlp", "ff", "norm3")),
            attention=AttentionRoles(("to_q", "to_k", "to_v"), out="to_out.0", norms={}),
            mlp_weights=("ff.net.0.proj", "ff.net.2"),
            blocks="transformer_blocks",
            final_norm="norm_out",
            head=None,
            home="dit",
            extra="diffusion",
        ),
    )
}


def hosts() -> tuple[str, ...]:
    """The names of all families that can be rewired, sorted."""
    return tuple(sorted(_HOSTS))


def all_hosts() -> tuple[Host, ...]:
    """All families of transformers that can be rewired."""
    return tuple(host for host in _HOSTS.values() if host.home is None)


def home_named(name: str) -> ModuleType | None:
    """The module of this package that builds the host called ``name`` where it is another library's, or None.

    It has functions ``build(config, scheme)`` and ``model_config(config, scheme)``.

    Raises:
        ConfigError: the library is not installed, or too old; the message says how to install it.
    """
    host = _HOSTS.get(name)
    if host is None or host.home is None:
        return None
    try:
        return importlib.import_module(f"{__package__}.{host.home}")
    except ModuleNotFoundError as error:
        library = host.modeling.partition(".")[0]
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ConfigError(f"host '{name}' needs {library}: pip install \"siamesenorm[{host.extra}]\"") from error


def register_host(host: Host) -> Host:
    """Make another family known to :func:`siamesenorm.rewire`, saving and loading; returns ``host``.

    Raises:
        ConfigError: a family of that name is registered already.
    """
    if host.name in _HOSTS:
        raise ConfigError(f"a host named '{host.name}' is registered already")
    _HOSTS[host.name] = host
    from ..hub.autoload import register_config_if_loaded

    register_config_if_loaded(host)
    return host


def get_host(name: str) -> Host:
    """The family called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in _HOSTS:
        raise ConfigError(f"unknown host '{name}': {nearest(str(name), hosts())}")
    return _HOSTS[name]


def host_of(config: Any) -> Host:
    """The family of a rewired model's config."""
    return get_host(config.model_type.removeprefix(_PREFIX))


def home_of(model: Any) -> ModuleType | None:
    """The module of this package that rewires ``model`` where it is another library's than transformers, or None.

    It has functions ``rewire(model, scheme, *, init)`` and ``exchange(model, scheme)``, and its table as ``HOST``.
    """
    for cls in type(model).__mro__:
        if (home := _HOMES.get(f"{cls.__module__}.{cls.__qualname__}")) is not None:
            return importlib.import_module(f"{__package__}.{home}")
    return None


def find_host(model: Any) -> Host:
    """The family that ``model`` belongs to.

    Raises:
        ConfigError: none; the message lists the families there are and how to register another.
    """
    from transformers import PreTrainedModel

    model_type = getattr(getattr(model, "config", None), "model_type", None)
    # Wrappers (compiled, adapted) pass on every attribute of the model in them, so attributes alone do not tell.
    if model_type in _HOSTS and isinstance(model, PreTrainedModel):
        return _HOSTS[model_type]
    raise ConfigError(
        f"cannot rewire a {type(model).__name__}"
        + (f" (model_type '{model_type}')" if model_type else "")
        + f": supported are {', '.join(hosts())}. Models of other libraries may be {', '.join(_HOMES)}. Another one of "
        "transformers is added by describing its parts in a table: "
        "siamesenorm.register_host(siamesenorm.hosts.Host(...))"
    )
