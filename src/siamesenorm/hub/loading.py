"""Loading a saved model, with messages for what can be wrong with a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..hosts.families import all_hosts
from ..residual import ConfigError, one_line
from .autoload import HEADS

__all__ = ["auto_class", "key_names", "load"]


def load(path: str | Path, **kwargs: Any) -> Any:
    """The model saved in directory ``path``, rewired or not, with its family's usual head.

    That is a causal language model, or an image classifier where the family is one for images; of several classes with
    such a head, the one that was saved.

    Args:
        path: a directory with ``config.json`` and safetensors.
        **kwargs: as for transformers' ``from_pretrained``, such as ``dtype``.

    Raises:
        ConfigError: there is no such directory, no readable config, or the weights do not fit it.
    """
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"no model directory at '{path}'")
    config = path / "config.json"
    try:
        written = json.loads(config.read_text())
    except FileNotFoundError:
        raise ConfigError(f"'{path}' holds no saved model: it has no config.json") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read '{config}': {error}") from None
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"'{path}' holds no weights: there is no .safetensors file in it")
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        model, info = auto_class(written.get("model_type") if isinstance(written, dict) else None).from_pretrained(
            path,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            # transformers' own error for these does not say which they are.
            ignore_mismatched_sizes=True,
            **kwargs,
        )
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ConfigError(f"cannot load the model in '{path}': {one_line(error)}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if names := key_names(info, kind):
            raise ConfigError(f"{kind.replace('_', ' ')} in the checkpoint '{path}': {', '.join(names)}")
    return model


def auto_class(model_type: object) -> Any:
    """transformers' Auto class for the usual head of the family of a ``model_type``; a language model's for others."""
    import transformers

    host = next((host for host in all_hosts() if model_type in (host.name, host.residual_type)), None)
    head = (host and host.head) or "ForCausalLM"
    return getattr(transformers, next(auto_name for auto_name, ending in HEADS.items() if ending == head))


def key_names(info: Mapping[str, Any], kind: str) -> list[str]:
    """The parameters listed under ``kind`` in what transformers says of a loading, sorted."""
    return sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get(kind) or ())
