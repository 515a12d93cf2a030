"""Saved models: registration with transformers' Auto classes and timm's registry, and loading with checks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loading import auto_class, fetch, load, read_config

__all__ = ["auto_class", "fetch", "load", "read_config"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.loading"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
