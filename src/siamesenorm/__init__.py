"""SiameseNorm and its baselines: residual schemes for any Transformer.

    import siamesenorm
    model = siamesenorm.rewire(model, "siamese")

Importing the package imports neither torch nor transformers; each name below brings what it needs on first use. What a
saved model needs to load is registered with transformers, and with diffusers, when those are imported, and models of
this package with timm when timm is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .hub.autoload import watch

if TYPE_CHECKING:
    from . import convert, hosts, hub, ops, probes, residual
    from .hosts import register_host, rewire
    from .residual import ConfigError, schemes

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "convert",
    "hosts",
    "hub",
    "ops",
    "probes",
    "register_host",
    "residual",
    "rewire",
    "schemes",
]

_HOME = {
    "ConfigError": "residual",
    "register_host": "hosts",
    "rewire": "hosts",
    "schemes": "residual",
}

watch()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
