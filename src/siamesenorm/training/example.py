"""Inputs of a forward pass for which no data is needed, to count what a model costs."""

from __future__ import annotations

from typing import Any

import torch


def sees_images(model: Any) -> bool:
    """Whether a model of transformers is one of images, and not of text."""
    return getattr(model.config, "image_size", None) is not None


def forward_inputs(
    model: Any,
    rows: int = 1,
    *,
    length: int | None = None,
    device: str = "meta",
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Any], int]:
    """Arguments of a model's forward pass, and how many tokens each row of them is to its blocks.

    Args:
        model: of any host.
        rows: sequences or images.
        length: of a sequence, in tokens; images have the size that the model is made for.
        device: where the tensors are.
        dtype: what the model computes in.
    """
    config = model.config
    if "sample_size" in config:
        side, channels = config["sample_size"], config["in_channels"]
        zeros = torch.zeros(rows, dtype=torch.long, device=device)
        latents = torch.zeros((rows, channels, side, side), device=device)
        inputs = {"hidden_states": latents, "timestep": zeros, "class_labels": zeros}
        return inputs, (side // config["patch_size"]) ** 2
    if sees_images(model):
        height, width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
        positions = model.base_model.embeddings.position_embeddings.shape[1]
        return {"pixel_values": torch.zeros((rows, config.num_channels, height, width), device=device)}, positions
    assert length is not None, "a sequence has no length of its own"
    ids = torch.zeros((rows, length), dtype=torch.long, device=device)
    # A finished mask, of one number's size: without one, transformers asks the tokens' positions for their values.
    mask = torch.zeros((1, 1, 1, 1), dtype=dtype, device=device).expand(rows, 1, length, length)
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}, length
