"""How far two models are from computing the same: their outputs for the same inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..hub import checks
from ..residual import ConfigError, one_line

__all__ = ["Difference", "difference", "output_of", "random_inputs", "read_inputs"]

_TIMESTEPS = 1000


@dataclass(frozen=True)
class Difference:
    """The largest difference of two outputs.

    Attributes:
        absolute: in the outputs' unit.
        relative: to the largest entry of the output that it is compared with; NaN where either is not finite.
    """

    absolute: float
    relative: float

    def __str__(self) -> str:
        return f"{self.relative:.2e} relative to its largest entry, {self.absolute:.2e} absolute"


def difference(found: Tensor, wanted: Tensor) -> Difference:
    """The largest difference of ``found`` to ``wanted``, of one shape, computed in float64."""
    found, wanted = (each.detach().to("cpu", torch.float64) for each in (found, wanted))
    absolute, largest = (found - wanted).abs().max().item(), wanted.abs().max().item()
    if not (math.isfinite(absolute) and math.isfinite(largest)):
        return Difference(math.nan, math.nan)
    return Difference(absolute, absolute / largest if largest else (0.0 if absolute == 0 else math.inf))


@torch.no_grad()
def output_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The output of a model in evaluation, in which it stays: logits, a sample, or the tensor that it returns."""
    device = next(model.parameters()).device
    out = model.eval()(**{name: tensor.to(device) for name, tensor in inputs.items()})
    for name in ("logits", "sample"):
        out = getattr(out, name, out)
    if not isinstance(out, Tensor) or not out.numel():
        raise ValueError("there is no output to compare")
    return out


def random_inputs(model: Any, rows: int, length: int, seed: int) -> dict[str, Tensor]:
    """Arguments of a model's forward pass, drawn at random: tokens, normal images, or noisy latents of any step.

    Args:
        model: of transformers or diffusers.
        rows: sequences or images.
        length: of a sequence, in tokens.
        seed: of the drawing.
    """
    from ..training.example import forward_inputs

    generator = torch.Generator().manual_seed(seed)
    empty, _ = forward_inputs(model, rows, length=length, device="cpu")
    below = {
        "input_ids": getattr(model.config, "vocab_size", 0),
        "timestep": _TIMESTEPS,
        "class_labels": getattr(model.config, "num_embeds_ada_norm", 0),
    }
    drawn = {}
    for name, each in empty.items():
        if name in below:
            drawn[name] = torch.randint(below[name], each.shape, generator=generator)
        elif name not in ("attention_mask", "use_cache"):
            drawn[name] = torch.randn(each.shape, generator=generator)
    return drawn


def read_inputs(path: Path) -> dict[str, Tensor]:
    """Arguments of a model's forward pass from a safetensors file, by their names.

    Raises:
        ConfigError: it is no such file.
    """
    from safetensors.torch import load_file

    if not path.is_file():
        raise ConfigError(f"there is no batch '{path}'")
    checks.header(path)
    try:
        return load_file(path)
    except OSError as error:
        raise ConfigError(f"cannot read the batch '{path}': {one_line(error)}") from error
