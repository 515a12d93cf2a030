"""timm's augmentation, as image training uses it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from PIL import Image

from siamesenorm.residual import ConfigError
from siamesenorm.training.augment import crops, eraser, mixer
from siamesenorm.training.recipe import AugmentRecipe


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_a_policy_of_timm_without_a_random_crop_keeps_the_centre(mode, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    still = crops(AugmentRecipe(auto_augment="rand-m0-n1-p0.0"), 20, channels, flip=False)
    expected = np.asarray(image.crop((5, 0, 25, 20))).reshape(20, 20, channels).transpose(2, 0, 1)
    assert np.array_equal(still(image), expected)
    # Rotations and shears among them fill what they uncover.
    policy = crops(AugmentRecipe(auto_augment="rand-m9-mstd0.5-inc1"), 16, channels, flip=True)
    assert {policy(image).shape for _ in range(60)} == {(channels, 16, 16)}


def test_a_random_crop_is_part_of_the_image():
    pixels = np.zeros((40, 40, 3), dtype=np.uint8)
    pixels[:, 20:] = 255
    crop = crops(AugmentRecipe(random_crop=0.3), 8, 3, flip=False)
    shares = {round(float(crop(Image.fromarray(pixels)).mean()) / 255, 1) for _ in range(60)}
    assert len(shares) > 3
    assert crops(AugmentRecipe(), 8, 3, flip=True) is None


@pytest.mark.parametrize("policy", ["rand-m10-n1-inc1", "rand-m0-n1", "original", "augmix-m10"])
def test_a_policy_leaves_a_bit_of_each_image(policy):
    random.seed(0)
    np.random.seed(0)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8))
    crop = crops(AugmentRecipe(auto_augment=policy), 12, 3, flip=False)
    # At the ends of the scale timm asks for no bits at all, once in some thirty draws.
    assert {crop(image).shape for _ in range(400)} == {(3, 12, 12)}


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="auto_augment=rnad"):
        crops(AugmentRecipe(auto_augment="rnad-m9"), 8, 3, flip=False)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_images_and_labels_are_mixed_in_the_same_shares(kind):
    np.random.seed(0)
    images = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 1, 8, 8).clone()
    mixed, labels = mixer(AugmentRecipe(**{kind: 1.0}), 6, 0.0)(images, torch.arange(6))
    assert labels.shape == (6, 6)
    torch.testing.assert_close(labels.sum(1), torch.ones(6))
    # An image's mean is that of its labels, as each image is its own number everywhere.
    torch.testing.assert_close(mixed.mean((1, 2, 3)), labels @ torch.arange(6.0), rtol=1e-5, atol=1e-5)
    assert mixer(AugmentRecipe(), 6, 0.1) is None


def test_parts_of_some_images_are_erased():
    torch.manual_seed(0)
    images = torch.full((200, 1, 16, 16), 7.0)
    out = eraser(AugmentRecipe(erase=0.5))(images.clone())
    changed = (out != 7).flatten(1).any(1)
    assert 60 < changed.sum() < 140
    assert (out != 7).float().mean() < 0.3
    assert eraser(AugmentRecipe()) is None
