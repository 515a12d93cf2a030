"""Loading a saved model, with messages for what can be wrong with a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..residual import ConfigError

__all__ = ["load"]


def load(path: str | Path, **kwargs: Any) -> Any:
    """The causal language model saved in directory ``path``, rewired or not.

    Args:
        path: a directory with ``config.json`` and safetensors.
        **kwargs: as for transformers' ``from_pretrained``, such as ``dtype``.

    Raises:
        ConfigError: there is no such directory, no readable config, or the weights do not fit it.
    """
    from transformers import AutoModelForCausalLM

    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"no model directory at '{path}'")
    config = path / "config.json"
    try:
        json.loads(config.read_text())
    except FileNotFoundError:
        raise ConfigError(f"'{path}' holds no saved model: it has no config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read '{config}': {error}") from None
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"'{path}' holds no weights: there is no .safetensors file in it")
    from safetensors import SafetensorError

    try:
        return AutoModelForCausalLM.from_pretrained(path, use_safetensors=True, local_files_only=True, **kwargs)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"cannot load the model in '{path}': {' '.join(str(error).split())}") from error
