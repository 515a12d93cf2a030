"""The configs of rewired models: a family's own, with a ``model_type`` of its own and the scheme in it.

Kept apart from the models, since transformers' table of configs is complete long before its models can be imported.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..hub import checks
from ..residual import ConfigError, Scheme, make_scheme
from .families import all_hosts, get_host

__all__ = ["residual_config", "scheme_from_dict", "scheme_of", "scheme_to_dict"]

_FORMAT = 1


class _Checked:
    """Mixin over a family's config: a folder's is looked at before it is expanded, whoever loads it.

    Raises:
        ConfigError: in both ways of loading, for a config that asks for more parts than the weights beside it have.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        _check(pretrained_model_name_or_path, kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)  # type: ignore[misc]

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        # The Auto classes come here, with the name of what they load.
        _check(kwargs.get("name_or_path"), kwargs)
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]


def _check(name: Any, options: Mapping[str, Any]) -> None:
    folder = None if not name else Path(name, options.get("subfolder") or "")
    if folder is not None and any(folder.glob("*.safetensors")) and (folder / "config.json").is_file():
        written = checks.read_json(folder / "config.json")
        checks.check_parts(written, checks.weights_in(folder), f"the model in '{folder}'")


@functools.cache
def residual_config(name: str) -> type[Any]:
    """The config class of family ``name``'s rewired models; it is found again under its own name in this module."""
    host = get_host(name)
    host_class = host.config_class()
    return type(
        f"Residual{host_class.__name__}",
        (_Checked, host_class),
        {
            "__module__": __name__,
            "__doc__": (
                f"{host_class.__name__} with a residual scheme, its norms' kind where it is not the host's, and the "
                "rate of stochastic depth in the last block."
            ),
            "__annotations__": {
                "residual_scheme": dict | None,
                "residual_norm": dict | None,
                "drop_path_rate": float | int,
            },
            "model_type": host.residual_type,
            "residual_scheme": None,
            "residual_norm": None,
            "drop_path_rate": 0.0,
        },
    )


def scheme_to_dict(scheme: Scheme) -> dict[str, Any]:
    """A scheme as it stands in ``config.json``."""
    return {"format": _FORMAT, "name": scheme.name, **scheme.options()}


def scheme_of(config: Any) -> Scheme:
    """The scheme that a rewired model's config carries, or a rewired model that has no config.

    Raises:
        ConfigError: it carries none, or one that this version does not know.
    """
    return scheme_from_dict(getattr(config, "residual_scheme", None))


def scheme_from_dict(saved: Mapping[str, Any] | None) -> Scheme:
    """The scheme that :func:`scheme_to_dict` made ``saved`` of.

    Raises:
        ConfigError: it is no such thing, or one that this version does not know.
    """
    if not isinstance(saved, Mapping) or "name" not in saved:
        raise ConfigError("this config carries no residual scheme: key 'residual_scheme' is missing or has no 'name'")
    options = dict(saved)
    version = options.pop("format", _FORMAT)
    if not isinstance(version, int):
        raise ConfigError(f"the residual scheme of this config has format {version!r}, which is no whole number")
    if version > _FORMAT:
        raise ConfigError("this model was saved by a newer version of siamesenorm: update the package to load it")
    return make_scheme(options.pop("name"), **options)


def __getattr__(name: str) -> Any:
    for host in all_hosts():
        if name == f"Residual{host.prefix}Config":
            return residual_config(host.name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
