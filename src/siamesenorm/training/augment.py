"""How training images are changed at random."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siamesenorm.residual import ConfigError, one_line
from siamesenorm.training.recipe import AugmentRecipe


def flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the images (batch, channels, height, width), at random, mirrored left to right."""
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


def shifted(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Images (batch, channels, height, width) moved by up to ``most`` pixels each way, with zeros behind them."""
    count, _, height, width = images.shape
    padded = torch.nn.functional.pad(images, (most, most, most, most))
    down, right = torch.randint(0, 2 * most + 1, (2, count, 1), generator=generator)
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    return padded[torch.arange(count)[:, None, None, None], torch.arange(images.shape[1])[:, None, None],
                  rows[:, None, :, None], columns[:, None, None, :]]  # fmt: skip


def crops(recipe: AugmentRecipe, size: int, channels: int, *, flip: bool) -> Callable[[Any], np.ndarray] | None:
    """timm's random crop and policy over PIL images, to (channels, size, size) of bytes; ``None`` where none is asked.

    A policy without a random crop is given the centre of an image. All of it draws from the generators of Python, numpy
    and torch.

    Raises:
        ConfigError: timm is not installed, or does not know the policy.
    """
    if recipe.random_crop is None and recipe.auto_augment is None:
        return None
    data = _timm_data("augment.random_crop and augment.auto_augment")
    try:
        transform = data.create_transform(
            size,
            is_training=True,
            use_prefetcher=True,
            # timm's defaults crop to 0.08 of the area.
            scale=(1.0 if recipe.random_crop is None else recipe.random_crop, 1.0),
            ratio=(1.0, 1.0) if recipe.random_crop is None else None,
            hflip=0.5 if flip else 0.0,
            color_jitter=None,
            auto_augment=recipe.auto_augment,
            interpolation="bicubic",
            # What fills an image that a policy has moved: a colour, or a shade of grey.
            mean=data.constants.IMAGENET_DEFAULT_MEAN if channels == 3 else (0.5,),
        )
    except (AssertionError, ValueError, KeyError) as error:
        raise ConfigError(f"timm cannot make augment.auto_augment={recipe.auto_augment}: {one_line(error)}") from error
    for step in transform.transforms:
        _keep_a_bit(step)
    return lambda image: np.asarray(transform(image))


def _keep_a_bit(step: Any) -> None:
    """timm's policies may keep none of an image's bits, which newer releases of Pillow refuse: keep one."""
    pairs = getattr(step, "policy", ())
    for op in (*getattr(step, "ops", ()), *(op for pair in pairs for op in pair)):
        if op.name.startswith("Posterize"):
            op.level_fn = partial(_at_least_one, op.level_fn)


def _at_least_one(bits_at: Callable[..., tuple[int]], level: float, hparams: Any) -> tuple[int]:
    return (max(bits_at(level, hparams)[0], 1),)


def mixer(
    recipe: AugmentRecipe, classes: int, smoothing: float
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """timm's mixup and cutmix over a batch of an even number of images; ``None`` where neither is asked for.

    It draws from numpy's generator, and smooths the labels itself.
    """
    if not recipe.mixup and not recipe.cutmix:
        return None
    data = _timm_data("augment.mixup and augment.cutmix")
    made: Any = data.Mixup(
        mixup_alpha=recipe.mixup, cutmix_alpha=recipe.cutmix, label_smoothing=smoothing, num_classes=classes
    )
    return made


def eraser(recipe: AugmentRecipe, device: str = "cpu") -> Callable[[Tensor], Tensor] | None:
    """timm's random erasing over a batch of normalised images on a device; ``None`` where none is asked for.

    It draws from the generators of Python and torch.
    """
    if not recipe.erase:
        return None
    made: Any = _timm_data("augment.erase").random_erasing.RandomErasing(recipe.erase, mode="pixel", device=device)
    return made


def _timm_data(what: str) -> Any:
    try:
        import timm.data
    except ImportError as error:
        raise ConfigError(f'{what} come from timm: pip install "siamesenorm[timm]" ({one_line(error)})') from error
    return timm.data
