"""Images from a class-conditional diffusion model, by diffusers' own pipeline and schedulers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from siamesenorm.hub.loading import PIPELINE, check_pipeline, is_pipeline
from siamesenorm.residual import ConfigError, nearest, one_line

SAMPLERS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
}
_MOST_CLASSES = 10


def check_sampler(name: str) -> None:
    """Refuse a sampler that there is none of.

    Raises:
        ConfigError: naming the nearest.
    """
    if name not in SAMPLERS:
        raise ConfigError(f"unknown sampler {name!r}; {nearest(name, SAMPLERS)}")


def load_pipeline(path: Path) -> Any:
    """The pipeline saved in a folder.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    from diffusers import DiTPipeline
    from diffusers.utils import logging

    verbosity = logging.get_verbosity()
    if not is_pipeline(path):
        raise ConfigError(f"'{path}' holds no diffusion model: it has no {PIPELINE}")
    check_pipeline(path)
    logging.disable_progress_bar()
    # It warns that an autoencoder of pixels is none of its own, and of numbers that JSON keeps as text.
    logging.set_verbosity_error()
    try:
        pipeline = DiTPipeline.from_pretrained(
            path, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged file makes the readers raise
        raise ConfigError(f"cannot load the diffusion model in '{path}': {one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    return pipeline


def draw(
    pipeline: Any,
    labels: Sequence[int],
    *,
    steps: int,
    guidance: float,
    sampler: str,
    seed: int,
    batch_size: int = 64,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Samples of classes, each from a noise of its own that the seed and its place decide.

    Args:
        pipeline: diffusers' ``DiTPipeline``.
        labels: the class of each sample, by number.
        steps: of the sampler.
        guidance: scale of classifier-free guidance; up to 1 there is none.
        sampler: one of `SAMPLERS`.
        seed: of the noise.
        batch_size: samples at a time; only the sampler ``ddpm``, which adds noise on its way, gives others by it.
        progress: told how many samples each batch had.

    Returns:
        (samples, height, width, channels), float32 between 0 and 1.

    Raises:
        ConfigError: an unknown sampler or class, more steps than time steps, or guidance without a null class.
    """
    check_sampler(sampler)
    transformer, config = pipeline.transformer, pipeline.scheduler.config
    classes = transformer.num_classes
    for label in labels:
        if not 0 <= label < classes:
            raise ConfigError(f"there is no class {label}: the model has 0 to {classes - 1}")
    if not 1 <= steps <= config.num_train_timesteps:
        raise ConfigError(f"steps must be from 1 to {config.num_train_timesteps}, not {steps}")
    if guidance > 1 and transformer.null_class is None:
        raise ConfigError("this model was trained without a null class, so it cannot be guided: take guidance 1")
    pipeline.scheduler = getattr(importlib.import_module("diffusers"), SAMPLERS[sampler]).from_config(config)
    pipeline.set_progress_bar_config(disable=True)
    transformer.eval()
    made = []
    device = transformer.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, len(labels), batch_size):
            here = list(labels[start : start + batch_size])
            noise = [torch.Generator().manual_seed(_seed(seed, start + index)) for index in range(len(here))]
            out = pipeline(here, guidance, noise, steps, output_type="np").images
            made.append(np.asarray(out, dtype=np.float32))
            if progress is not None:
                progress(len(here))
    return np.concatenate(made)


def class_names(pipeline: Any) -> list[str]:
    """The names of a pipeline's classes, or their numbers where it has no names."""
    # A class may have several names there, in the order of the alphabet.
    found: dict[int, str] = {}
    for name, label in pipeline.labels.items():
        found.setdefault(label, name)
    return [found.get(label, str(label)) for label in range(pipeline.transformer.num_classes)]


def chosen_classes(text: str | None, names: Sequence[str]) -> list[int]:
    """The classes that a text with commas names, or the first ten of all.

    Raises:
        ConfigError: for a class that there is none of.
    """
    if text is None:
        return list(range(min(len(names), _MOST_CLASSES)))
    chosen = []
    for each in (part.strip() for part in text.split(",")):
        if each in names:
            chosen.append(names.index(each))
        elif each.isdecimal() and int(each) < len(names):
            chosen.append(int(each))
        else:
            raise ConfigError(f"there is no class {each!r}; {nearest(each, names)}")
    return chosen


def _seed(seed: int, place: int) -> int:
    return (seed * 1_000_003 + place) % 2**63
