"""The models that timm's ``create_model`` knows of this package; importing the module registers them.

They are DeiT (arXiv 2012.12877) under a scheme, SiameseNorm unless another is asked for::

    timm.create_model("siamese_deit_small_patch16_224", num_classes=100, scheme_options={"x": "hybrid"})

``scheme`` and ``scheme_options`` are as for :class:`siamesenorm.hosts.timm_vit.ResidualViT`; every other argument is
timm's. So timm's ``train.py`` trains them once a line ``import siamesenorm`` is in it, with ``--model-kwargs
"scheme_options={'x': 'hybrid'}"``.

This module is imported when timm is, so what is not needed to register is imported on use.
"""

from __future__ import annotations

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

__all__ = ["siamese_deit_small_patch16_224", "siamese_deit_tiny_patch16_224"]

_PREPROCESSING = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "fixed_input_size": True,
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
}

default_cfgs = generate_default_cfgs(dict.fromkeys(__all__, _PREPROCESSING))


@register_model
def siamese_deit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeiT-Ti/16 under a residual scheme."""
    return _deit("siamese_deit_tiny_patch16_224", pretrained, **{"embed_dim": 192, "num_heads": 3, **kwargs})


@register_model
def siamese_deit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """DeiT-S/16 under a residual scheme."""
    return _deit("siamese_deit_small_patch16_224", pretrained, **{"embed_dim": 384, "num_heads": 6, **kwargs})


def _deit(variant: str, pretrained: bool, **kwargs: Any) -> VisionTransformer:
    from ..hosts.timm_vit import residual_class
    from ..residual import ConfigError

    if pretrained:
        source = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), kwargs.get("pretrained_cfg_overlay"))
        if not (source.has_weights or source.state_dict):
            raise ConfigError(
                f"there are no pretrained weights of '{variant}': leave pretrained at False, or name a file of your "
                "own with pretrained_cfg_overlay={'file': ...}"
            )
    if kwargs.get("feature_cls", "getter") != "getter":
        raise ConfigError(
            f"feature_cls={kwargs['feature_cls']!r} takes what a block returns for one tensor, but these blocks return "
            "streams: leave it at 'getter', which asks the model for its features"
        )
    return build_model_with_cfg(
        residual_class(VisionTransformer),
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"},
        **{"patch_size": 16, "depth": 12, **kwargs},
    )
