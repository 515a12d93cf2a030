"""How far a set of generated images is from a set of real ones, in the features of a classifier.

The Fréchet distance between the Gaussians that fit two sets of features (Heusel et al., arXiv 1706.08500),

    d² = ‖μ - μ'‖² + tr(Σ + Σ' - 2 (ΣΣ')^½)

It is FID where the classifier is Inception-v3; here it is one of the images at hand, so the numbers say nothing beside
FIDs, nor beside those of another classifier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from siamesenorm import hub
from siamesenorm.data.arrays import cache_root
from siamesenorm.data.images import ImageArrays
from siamesenorm.residual import ConfigError
from siamesenorm.training.build import check
from siamesenorm.training.example import sees_images
from siamesenorm.training.normalise import Normalise
from siamesenorm.training.recipe import ImageDiffusionRecipe, digest
from siamesenorm.training.recipe_files import load
from siamesenorm.training.run_folder import model_folder
from siamesenorm.training.tasks import task_of

_RECIPE = "vit-tiny"
_BATCH = 64
_SECONDS_BETWEEN_LOOKS = 5


def distance(features: np.ndarray, others: np.ndarray) -> float:
    """d² of two sets of features, each (images, width), computed in float64."""
    (mean, spread), (other_mean, other_spread) = (
        (each.mean(0), np.cov(each, rowvar=False)) for each in (features.astype(np.float64), others.astype(np.float64))
    )
    # The eigenvalues of ΣΣ' are those of Σ^½ Σ' Σ^½, which is symmetric.
    values, vectors = np.linalg.eigh(spread)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    inner = np.linalg.eigvalsh(root @ other_spread @ root).clip(min=0)
    apart = np.square(mean - other_mean).sum()
    return float(apart + np.trace(spread) + np.trace(other_spread) - 2 * np.sqrt(inner).sum())


@dataclass(frozen=True)
class Judge:
    """A saved image classifier, for its features: the class token behind the final norm.

    Attributes:
        path: where it was saved.
        model: of transformers.
        normalise: from pixels to what it takes.
    """

    path: Path
    model: Any
    normalise: Normalise

    @classmethod
    def load(cls, path: Path) -> Judge:
        """The classifier in a model's or a finished run's folder.

        Raises:
            ConfigError: there is none.
        """
        folder = model_folder(path)
        model = hub.load(folder)
        if not sees_images(model):
            raise ConfigError(f"'{folder}' holds no image classifier, which the Fréchet distance needs")
        return cls(path, model.eval(), Normalise.load(folder))

    def check_channels(self, channels: int) -> None:
        """Refuse images of another number of channels than the classifier takes."""
        own = self.model.config.num_channels
        if channels != own:
            raise ConfigError(f"the classifier in {self.path} takes images of {own} channels, not {channels}")

    @torch.no_grad()
    def features(self, images: np.ndarray) -> np.ndarray:
        """Features (images, width) of images (images, height, width, channels), bytes; resized if they have to be."""
        side = self.model.config.image_size
        self.check_channels(images.shape[-1])
        found = []
        for start in range(0, len(images), _BATCH):
            pixels = torch.from_numpy(images[start : start + _BATCH]).permute(0, 3, 1, 2).float() / 255
            if pixels.shape[-2:] != (side, side):
                pixels = functional.interpolate(pixels, (side, side), mode="bicubic", antialias=True).clamp(0, 1)
            hidden = self.model.base_model(pixel_values=self.normalise(pixels)).last_hidden_state
            found.append(hidden[:, 0].numpy())
        return np.concatenate(found)


def judge_for(recipe: ImageDiffusionRecipe, *, image_size: int, channels: int, note: Callable[[str], None]) -> Judge:
    """The classifier that a diffusion recipe names, or that of `vit-tiny` on its images, trained where it is not yet.

    Raises:
        ConfigError: it cannot be loaded or trained.
    """
    if recipe.sample.classifier is not None:
        return Judge.load(Path(recipe.sample.classifier))
    overrides = _overrides(recipe, image_size, channels)
    wanted = load(_RECIPE, overrides)
    folder = cache_root() / "classifiers" / f"{_RECIPE}-{digest(wanted)[:16]}"
    if not (folder / "summary.json").is_file():
        note(f"training a classifier for the Fréchet distance, once: {_RECIPE}, in {folder}")
        # A process of its own, since the processes that have met to train this run cannot part and meet again.
        alone = {key: value for key, value in os.environ.items() if key not in _OF_TORCHRUN}
        command = [sys.executable, "-m", "siamesenorm", "train", _RECIPE, *overrides, "--out", str(folder), "--json"]
        while True:
            done = subprocess.run(command, capture_output=True, text=True, env=alone)
            if "another process is training" not in done.stderr:
                break
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if done.returncode:
            raise ConfigError(
                f"the classifier for the Fréchet distance cannot be trained: {done.stderr[-500:].strip()}"
            )
    return Judge.load(folder)


def check_judge(recipe: ImageDiffusionRecipe, data: ImageArrays) -> None:
    """Refuse a recipe whose images `judge_for` would have no classifier for, before there is a use for it.

    Args:
        recipe: with a distance to measure.
        data: its images.

    Raises:
        ConfigError: the classifier takes images of other channels, or `vit-tiny` cannot be trained on these.
    """
    if recipe.sample.classifier is not None:
        Judge.load(Path(recipe.sample.classifier)).check_channels(data.channels)
        return
    # Whether they are the right images is not the question here.
    recipe = replace(recipe, data=replace(recipe.data, sha256=None))
    wanted = load(_RECIPE, _overrides(recipe, data.image_size, data.channels))
    task = task_of(wanted)
    task.keep(data)
    try:
        check(wanted)
        task.pinned(data)
    except ConfigError as error:
        raise ConfigError(
            f"{_RECIPE} cannot be trained on these images to make the classifier for the Fréchet distance: {error}; "
            "sample.classifier names another one, and sample.distance_images=0 does without"
        ) from error


def _overrides(recipe: ImageDiffusionRecipe, image_size: int, channels: int) -> list[str]:
    """What makes `vit-tiny` a recipe for the images of another."""
    data = recipe.data
    return [
        f"data.source={json.dumps(data.source)}",
        f"data.image_size={image_size}",
        f"data.channels={channels}",
        f"data.crop_fraction={json.dumps(data.crop_fraction)}",
        f"data.sha256={json.dumps(data.sha256)}",
    ]


_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
