"""Where schemes meet models: the families that can be rewired, and :func:`rewire` itself.

Importing this package does not import transformers: the registration of saved models starts here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .families import AttentionRoles, Branch, Host, get_host, hosts, register_host

if TYPE_CHECKING:
    from .configs import scheme_from_dict, scheme_of
    from .surgery import (
        blocks,
        build,
        ends_in_norm,
        exchange,
        input_norms,
        model_config,
        rewire,
        scheme_in,
        site_table,
    )

__all__ = [
    "AttentionRoles",
    "Branch",
    "Host",
    "blocks",
    "build",
    "ends_in_norm",
    "exchange",
    "get_host",
    "hosts",
    "input_norms",
    "model_config",
    "register_host",
    "rewire",
    "scheme_from_dict",
    "scheme_in",
    "scheme_of",
    "site_table",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    home = "configs" if name in ("scheme_from_dict", "scheme_of") else "surgery"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
