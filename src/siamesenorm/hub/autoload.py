"""Registration with transformers, at no cost to those who do not use it.

Rewired models have a ``model_type`` and classes of their own. Their configs are registered when transformers' table of
configs is imported (at once if it is already), their models when the first such config is made: both happen before an
Auto class can ask for them. This module imports nothing that is not in the standard library until then.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["register_config_if_loaded", "register_models", "watch_transformers"]

_CONFIGS = "transformers.models.auto.configuration_auto"
_MODELS = "transformers.models.auto.modeling_auto"
_HEADS = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``action`` once, right after the module ``name`` has been imported."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.action)
        return spec


class _Then(importlib.abc.Loader):
    """A loader that runs ``action`` after the module."""

    def __init__(self, loader: Any, action: Callable[[], None]) -> None:
        self.loader = loader
        self.action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.action()


def watch_transformers() -> None:
    """Register the configs of all families with transformers, now or when it is imported."""
    if _CONFIGS in sys.modules:
        _register_configs()
    for name in (_CONFIGS, _MODELS):
        if name not in sys.modules:
            sys.meta_path.insert(0, _AfterImport(name, _register_configs))


def register_config_if_loaded(host: Any) -> None:
    """Register one more family's config, where transformers' table is there already."""
    if _CONFIGS in sys.modules:
        _register_config(host)


def register_models(host: Any) -> None:
    """Register the rewired models of a family with the Auto classes that have such a head."""
    import transformers

    from ..hosts.classes import residual_class
    from ..hosts.configs import residual_config

    for auto_name, head in _HEADS.items():
        model = getattr(host.module(), host.prefix + head, None)
        if model is not None:
            auto = getattr(transformers, auto_name)
            auto.register(residual_config(host.config_class()), residual_class(model), exist_ok=True)


_registering = False


def _register_configs() -> None:
    from ..hosts.families import all_hosts

    # To document itself, a family's config imports the table of models. So this may be reached a second time from
    # within, or while that table is still being imported, which will end in another call.
    global _registering
    models = sys.modules.get(_MODELS)
    if _registering or (models is not None and not hasattr(models, "AutoModel")):
        return
    _registering = True
    try:
        for host in all_hosts():
            _register_config(host)
    finally:
        _registering = False


def _register_config(host: Any) -> None:
    from ..hosts.configs import residual_config

    config_class = residual_config(host.config_class())
    table = sys.modules[_CONFIGS]
    table.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
