"""Where schemes meet models: the families that can be rewired, and :func:`rewire` itself.

Importing this package does not import transformers: the registration of saved models starts here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .families import AttentionRoles, Branch, Host, get_host, hosts, register_host

if TYPE_CHECKING:
    from .configs import scheme_from_dict, scheme_of
    from .surgery import blocks, build, model_config, rewire, site_table

__all__ = [
    "AttentionRoles",
    "Branch",
    "Host",
    "blocks",
    "build",
    "get_host",
    "hosts",
    "model_config",
    "register_host",
    "rewire",
    "scheme_from_dict",
    "scheme_of",
    "site_table",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    home = "configs" if name.startswith("scheme_") else "surgery"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
