"""The autoencoder of a diffusion model whose latents are pixels."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config

# A saved pipeline is loaded by looking for this name, too, in the module of a component's class.
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

__all__ = ["PixelAutoencoder"]


class PixelAutoencoder(ModelMixin, ConfigMixin):
    """Leaves images as they are, so that ``diffusers.DiTPipeline`` can sample a model that has no autoencoder.

    Args:
        scaling_factor: of the latents, which are the pixels between -1 and 1.
    """

    @register_to_config
    def __init__(self, scaling_factor: float = 1.0) -> None:
        super().__init__()
        # Pipelines ask a part for its device and dtype, which it knows from its parameters.
        self.register_buffer("place", torch.zeros(()))

    def encode(self, images: Tensor) -> Tensor:
        """The images (batch, channels, height, width)."""
        return images

    def decode(self, latents: Tensor, return_dict: bool = True) -> Any:
        """The latents (batch, channels, height, width), as ``.sample`` or in a tuple."""
        # diffusers' autoencoders import its DiT, with which this module is imported.
        from diffusers.models.autoencoders.vae import DecoderOutput

        return DecoderOutput(sample=latents) if return_dict else (latents,)
