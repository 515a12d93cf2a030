"""Any of diffusers' image autoencoders, as what makes latents of images."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.hub.loading import check_part
from siamesenorm.residual import ConfigError, one_line

# Where a whole pipeline keeps its autoencoder.
_IN_PIPELINE = "vae"


@dataclass(frozen=True)
class Autoencoder:
    """A loaded autoencoder and what is written down about it.

    ``name`` is what it is loaded by: a name on the hub, or the absolute path of a folder; ``subfolder`` is that below
    it, empty for none. ``config`` is its own; ``sha256`` is a fingerprint of the config and the weights.
    """

    model: Any
    name: str
    subfolder: str
    config: Mapping[str, Any]
    sha256: str

    @property
    def kind(self) -> str:
        """Its class in diffusers."""
        return type(self.model).__name__

    @property
    def channels(self) -> int:
        """Of the images that it takes."""
        return int(self.config.get("in_channels") or 3)

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """What it makes of images.

        Args:
            images: float, (batch, channels, height, width), in [-1, 1], where the model is.

        Returns:
            The mean and the logarithm of the variance of each latent, float of shape (batch, latent channels, latent
            height, latent width); for an autoencoder that is not variational the latents and None. They are as the
            encoder gives them, neither shifted nor scaled.
        """
        with torch.inference_mode():
            found = self.model.encode(images)
        given = getattr(found, "latent_dist", None)
        if given is None:
            # Each class names it in its own way.
            return next(
                value for name in ("latent", "latents") if (value := getattr(found, name, None)) is not None
            ), None
        return (given.mean, given.logvar) if hasattr(given, "logvar") else (given.mode(), None)

    def normalisation(self, channels: int, *, variational: bool) -> tuple[list[float], list[float]]:
        """What diffusers' pipelines make of latents before a model sees them: ``(latent - shift) * scale``.

        ``shift`` is the config's ``shift_factor`` (0 where there is none) and ``scale`` its ``scaling_factor`` (1 where
        there is none); where a variational one's config has ``latents_mean`` and ``latents_std``, one number a channel,
        those shift and divide the scale.

        Returns:
            The shift and the scale of each of the ``channels``.
        """
        scale = [float(self.config.get("scaling_factor") or 1.0)] * channels
        shift = [float(self.config.get("shift_factor") or 0.0)] * channels
        mean, std = (self.config.get(key) for key in ("latents_mean", "latents_std"))
        if variational and mean is not None and std is not None:
            shift = [float(value) for value in mean]
            scale = [one / float(value) for one, value in zip(scale, std, strict=True)]
        return shift, scale


def load(name: str, subfolder: str = "", device: str = "cpu") -> Autoencoder:
    """An autoencoder in float32, ready to encode, by the path of its folder or its name on the hub.

    Args:
        name: of an autoencoder; or of a pipeline, whose own is taken.
        subfolder: where it is below that.
        device: where to put it.

    Raises:
        ConfigError: where there is none, or weights are missing.
    """
    diffusers = _diffusers()
    local = Path(name).is_dir()
    config, subfolder = _config(diffusers, name, subfolder, local)
    kind = getattr(diffusers, str(config.get("_class_name")), None)
    if not isinstance(kind, type) or not hasattr(kind, "encode"):
        raise ConfigError(
            f"{name} is no autoencoder of diffusers: its config names the class {config.get('_class_name')!r}"
        )
    try:
        if local:
            check_part(Path(name) / subfolder, kind)
        model, info = kind.from_pretrained(  # type: ignore[attr-defined]
            name,
            subfolder=subfolder or None,
            local_files_only=local,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # the readers raise whatever a broken file leads them to
        raise ConfigError(f"cannot load the autoencoder {name}: {one_line(error)}") from error
    absent = [*info.get("missing_keys", []), *map(str, info.get("mismatched_keys", []))]
    if absent:
        raise ConfigError(f"the autoencoder {name} lacks weights ({len(absent)}, {absent[0]} for one)")
    model = model.float().eval().requires_grad_(False)
    facts = {key: value for key, value in dict(model.config).items() if not key.startswith("_")}
    return Autoencoder(
        model=model.to(device),
        name=str(Path(name).resolve()) if local else name,
        subfolder=subfolder,
        config=json.loads(json.dumps(facts, default=str)),
        sha256=_fingerprint(type(model).__name__, facts, model),
    )


def _diffusers() -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise ConfigError("latents need the package diffusers: pip install 'siamesenorm[diffusion]'") from error


def _config(diffusers: Any, name: str, subfolder: str, local: bool) -> tuple[dict[str, Any], str]:
    """The autoencoder's config, and the folder below ``name`` that it was found in."""
    first: Exception | None = None
    for below in dict.fromkeys((subfolder, subfolder or _IN_PIPELINE)):
        try:
            # Any class reads the config of another.
            found = diffusers.AutoencoderKL.load_config(name, subfolder=below or None, local_files_only=local)
            return dict(found), below
        except Exception as error:
            first = first or error
    assert first is not None
    where = "" if local else ", which is no folder here and cannot be had from the hub"
    raise ConfigError(f"cannot load the autoencoder {name}{where}: {one_line(first)}") from first


def _fingerprint(kind: str, config: Mapping[str, Any], model: torch.nn.Module) -> str:
    """SHA-256 (hexadecimal) over the class, the config and every weight."""
    digest = hashlib.sha256(json.dumps([kind, config], sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
