"""Tiny models of timm, away from their initial values, so that what is misplaced shows."""

from __future__ import annotations

import copy
import functools
from functools import partial

import torch
from timm.layers import LayerNorm, RmsNorm, SwiGLUPacked
from timm.models.vision_transformer import VisionTransformer

import siamesenorm
from tests.hosts.test_streams import STREAMS
from tests.hosts.tiny import BASELINES, SCHEMES, scatter
from tests.residual.test_streams import without_gradient

SHAPE = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 10}
HEADS = SHAPE["num_heads"]
# What VisionTransformer's constructor can make of it.
FORMS = {
    "class": {},
    "average": {"global_pool": "avg"},
    "average-alone": {"global_pool": "avg", "class_token": False},
    "registers": {"reg_tokens": 4, "no_embed_class": True},
    "layer-scale": {"init_values": 0.3},
    "norm-before": {"pre_norm": True},
    "attention-pooling": {"global_pool": "map", "class_token": False},
    "no-final-norm": {"final_norm": False},
    "qk-norm": {"qk_norm": True, "scale_attn_norm": True},
    "rms": {"norm_layer": RmsNorm, "global_pool": "avgmax"},
    "swiglu": {"mlp_layer": SwiGLUPacked},
    "differential": {"attn_layer": "diff"},
    "any-size": {"dynamic_img_size": True},
}
# What the oracle computes of it.
PLAIN = ("class", "average", "average-alone", "registers", "layer-scale", "norm-before", "qk-norm", "no-final-norm")
ALL = {**SCHEMES, **BASELINES, **STREAMS}
# The norm whose eps is this lets the scale of what it reads show.
EPS = 0.1


def host(form: str = "class", seed: int = 0, **changes):
    """A plain model of timm in one of its forms."""
    torch.manual_seed(seed)
    return scatter(VisionTransformer(**{**SHAPE, **FORMS[form], **changes}), seed).eval()


def rewired(form: str = "class", scheme: str = "post-pre", seed: int = 0, *, options=None, **changes):
    """The same, rewired, with the scheme's own parameters away from their start too."""
    name, given = ALL[scheme]
    model = siamesenorm.rewire(host(form, seed, **changes), name, **{**given, **(options or {})})
    return scatter(model, seed + 1).eval()


@functools.cache
def _exact(form, scheme):
    return rewired(form, scheme, norm_layer=partial(LayerNorm, eps=EPS)).double()


def exact(form, scheme):
    """In float64, with an eps that shows."""
    return copy.deepcopy(_exact(form, scheme))


def images(batch: int = 2, size: int = 32, channels: int = 3, seed: int = 5, dtype=torch.float32):
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dead(parameter, scheme):
    """Whether the equations leave a parameter without gradient."""
    name, options = ALL[scheme]
    # A bias on keys shifts all scores of a query alike.
    if parameter.endswith("attn.k_norm.bias"):
        return True
    if not parameter.startswith("blocks.0.attn_residual."):
        return False
    own = "blocks.0.residuals.0." + parameter.rpartition(".")[2]
    return own.endswith(without_gradient(name, **options) or ("nothing",))


def gradients(model, given=None, **kwargs):
    """The output's mean square, and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    out = model(images(dtype=next(model.parameters()).dtype) if given is None else given, **kwargs)
    loss = out.square().mean()
    loss.backward()
    return loss.detach(), {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def live(result, scheme):
    """Such a result without the parameters whose gradient is 0, or rounding."""
    loss, found = result
    return loss, {name: gradient for name, gradient in found.items() if not dead(name, scheme)}
