"""Registration with transformers, diffusers and timm, at no cost to those who do not use them.

Each library is told of this package's models right after it is imported, or at once if it is already. This module
imports only the standard library until then.

Rewired models of transformers have a ``model_type`` and classes of their own. Each family puts a stand-in into
transformers' table of configs that becomes its config class on first use; with the first config the models are
registered too. Nothing can be made earlier, since transformers imports that table while it is still importing its own
configs and models. diffusers has no table of models: a pipeline that it saves names the module of a class, which is
looked for among those that are imported, so ours are imported right behind the one that they extend. timm's registry
holds functions, and importing ``timm_models`` puts ours there.

In the same way this package's own ``residual`` is followed by ``ops``, which it does not import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..hosts.families import Host

__all__ = ["DIT_MODELS", "HEADS", "register_config_if_loaded", "register_models", "watch"]

DIT_MODELS = "diffusers.models.transformers.dit_transformer_2d"
"""The module that defines diffusers' DiT."""
_SCHEMES = "siamesenorm.residual"
_CONFIGS = "transformers.models.auto.configuration_auto"
HEADS = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    "AutoModelForImageClassification": "ForImageClassification",
    "AutoModelForMaskedImageModeling": "ForMaskedImageModeling",
}
"""transformers' Auto classes, and how the names of a family's own classes for them end."""


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``action`` once, right after the module ``name`` has been imported."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self not in sys.meta_path:
            return None
        # Whoever only looks whether the module is there asks too, so this finder stays until the module is imported.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Then(spec.loader, self.imported)
                return spec
        return None

    def imported(self) -> None:
        """Act, and be gone."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self.action()


class _Then(importlib.abc.Loader):
    """A loader that calls ``then`` after the module has run, and is the module's own loader in everything else."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self.loader = loader
        self.then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.then()


def watch() -> None:
    """Register with transformers, diffusers and timm, each now or when it is imported, and fused reads with ours."""
    actions = {
        _CONFIGS: _register_configs,
        DIT_MODELS: _import_dit,
        "timm": _register_with_timm,
        _SCHEMES: _fill_the_slot,
    }
    for name, action in actions.items():
        if name in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, _AfterImport(name, action))


def register_config_if_loaded(host: Host) -> None:
    """Register one more family's config, where transformers' table is there already."""
    if _CONFIGS in sys.modules:
        _register_config(host)


def register_models(host: Host) -> type[Any]:
    """Register a family's rewired config, and its rewired models with the Auto classes that have such a head.

    Returns:
        The config class.
    """
    import transformers

    from ..hosts.classes import residual_class
    from ..hosts.configs import residual_config

    config_class = residual_config(host.name)
    transformers.AutoConfig.register(host.residual_type, config_class, exist_ok=True)
    for auto_name, head in HEADS.items():
        made = tuple(residual_class(found) for found in host.classes_with(head))
        if made:
            # Of several classes with a head, transformers takes the one that the config's architectures name.
            each: Any = made if len(made) > 1 else made[0]
            getattr(transformers, auto_name).register(config_class, each, exist_ok=True)
    return config_class


def _register_configs() -> None:
    from ..hosts.families import all_hosts

    for host in all_hosts():
        _register_config(host)


def _register_config(host: Host) -> None:
    class StandIn:
        """A config class that is made when it is first asked for a config."""

        model_type = host.residual_type

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return register_models(host)(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
            return register_models(host).from_dict(*args, **kwargs)

        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return register_models(host).from_pretrained(*args, **kwargs)

    StandIn.__name__ = f"Residual{host.prefix}Config"
    sys.modules[_CONFIGS].AutoConfig.register(host.residual_type, StandIn, exist_ok=True)


def _import_dit() -> None:
    # A saved pipeline names the modules of its parts, and diffusers takes only those that are imported.
    importlib.import_module("siamesenorm.hosts.dit")
    importlib.import_module("siamesenorm.hub.pixels")


def _fill_the_slot() -> None:
    # residual/ knows nothing of who computes its reads.
    importlib.import_module("siamesenorm.ops")


def _register_with_timm() -> None:
    importlib.import_module(f"{__package__}.timm_models")
