"""How an image classifier wants its pixels, from a recipe or from what is saved with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from siamesenorm.residual import ConfigError, one_line

_FILE = "preprocessor_config.json"


@dataclass(frozen=True)
class Normalise:
    """Pixels between 0 and 1 less ``mean``, over ``std``, one number or one a channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """Bytes (batch, channels, height, width), or numbers between 0 and 1, as the model takes them, float32."""
        mean, std = (torch.tensor(each, device=images.device).view(1, -1, 1, 1) for each in (self.mean, self.std))
        return ((images.float() / 255 if images.dtype == torch.uint8 else images) - mean) / std

    def save(self, path: Path, size: int, channels: int) -> None:
        """Write it into a model's folder, as transformers' image processor."""
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        mean, std = self.by_channel(channels)
        made = ViTImageProcessorPil(size={"height": size, "width": size}, image_mean=mean, image_std=std)
        made.save_pretrained(path)

    def by_channel(self, channels: int) -> tuple[list[float], list[float]]:
        """Mean and std, one number a channel."""
        mean, std = (list(each) * (channels if len(each) == 1 else 1) for each in (self.mean, self.std))
        return mean, std

    @staticmethod
    def is_in(path: Path) -> bool:
        """Whether a model's folder says how its images are normalised."""
        return (path / _FILE).is_file()

    @classmethod
    def load(cls, path: Path) -> Normalise:
        """What is saved in a model's folder.

        Raises:
            ConfigError: nothing is, or nothing that can be read.
        """
        try:
            found = json.loads((path / _FILE).read_text(encoding="utf-8"))
            return cls(*(tuple(float(each) for each in found[key]) for key in ("image_mean", "image_std")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"'{path}' does not say how its images are normalised: {one_line(error)}") from error
