"""Loading a saved model, with messages for what can be wrong with a directory."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..hosts.families import all_hosts
from ..residual import ConfigError, one_line
from . import checks
from .autoload import HEADS

__all__ = [
    "DENOISER", "PIPELINE", "auto_class", "check_part", "check_pipeline", "dit_in", "fetch", "is_pipeline",
    "key_names", "load", "load_dit", "read_config", "read_dit_config",
]  # fmt: skip

PIPELINE = "model_index.json"
"""What a pipeline of diffusers has in its folder, with the names of its parts."""
DENOISER = "transformer"
"""The part of a pipeline of diffusers that is its DiT."""

# A repository may hold the same weights in several forms and precisions.
_OF_DIFFUSERS_MODEL = [
    "config.json", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model-*.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
]  # fmt: skip
_HUB_FILES = [
    "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "tokenizer*",
    "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*", "*processor_config.json",
    # A DiT alone, or a pipeline of one.
    *_OF_DIFFUSERS_MODEL, PIPELINE, "scheduler/scheduler_config.json",
    *(f"{part}/{file}" for part in (DENOISER, "vae") for file in _OF_DIFFUSERS_MODEL),
]  # fmt: skip
# What configs lead transformers to that are no models.
_UNFIT = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, AssertionError,
    ImportError, MemoryError,
)  # fmt: skip
_GENERATION = "generation_config.json"
_OF_DIFFUSERS = "diffusers"
# Schedulers have tables of their steps, which some of them fill one by one.
_MOST_TIMESTEPS = 100_000
# A saved pipeline names the modules of its parts, and whoever imports one runs it.
_MODULES = (_OF_DIFFUSERS, "transformers", "siamesenorm.hosts.dit", "siamesenorm.hub.pixels")


def load(path: str | Path, **kwargs: Any) -> Any:
    """The model saved in directory ``path``, rewired or not, with its family's usual head.

    That is a causal language model, or an image classifier where the family is one for images; of several classes with
    such a head, the one that was saved. Nothing is run that the directory brings along, and no more memory is taken
    than its files account for (:mod:`siamesenorm.hub.checks`).

    Args:
        path: a directory with ``config.json`` and safetensors.
        **kwargs: as for transformers' ``from_pretrained``, such as ``dtype``.

    Raises:
        ConfigError: there is no such directory, no readable config, or the weights do not fit it.
    """
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"no model directory at '{path}'")
    written = _written(path)
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"'{path}' holds no weights: there is no .safetensors file in it")
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    where = f"the model in '{path}'"
    if (path / "adapter_config.json").is_file():
        raise ConfigError(
            f"cannot load {where}: it has an adapter of PEFT, whose sizes are its own; load it with PEFT, or merge it "
            "(merge_and_unload) and save the model"
        )
    if (path / _GENERATION).is_file():
        # transformers would read it whatever its size.
        checks.read_json(path / _GENERATION)
    weights = checks.weights_in(path)
    checks.check_config(written, weights, where)
    auto = auto_class(written.get("model_type"))
    try:
        config = kwargs.get("config") or _config(path)
        checks.check_size(lambda: auto.from_config(copy.deepcopy(config)), weights, where)
        model, info = auto.from_pretrained(
            path,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            # transformers' own error for these does not say which they are.
            ignore_mismatched_sizes=True,
            **kwargs,
        )
    except ConfigError:
        raise
    except (*_UNFIT, SafetensorError, StrictDataclassError) as error:
        raise ConfigError(f"cannot load {where}: {one_line(error)}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if names := key_names(info, kind):
            raise ConfigError(f"{kind.replace('_', ' ')} in the checkpoint '{path}': {', '.join(names)}")
    return model


def read_config(path: str | Path) -> Any:
    """The configuration of the model saved in directory ``path``, which need not have weights.

    Raises:
        ConfigError: there is none, or none that can be had.
    """
    path = Path(path)
    _checked(path)
    from huggingface_hub.errors import StrictDataclassError

    try:
        return _config(path)
    except ConfigError:
        raise
    except (*_UNFIT, StrictDataclassError) as error:
        raise ConfigError(f"cannot read the model in '{path}': {one_line(error)}") from error


def fetch(name: str) -> Path:
    """The folder to which a model is downloaded from the hub: its weights in safetensors, never others.

    That is a model of transformers, or a DiT of diffusers alone or with its pipeline.

    Raises:
        ConfigError: it cannot be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except HFValidationError:
        raise ConfigError(f"there is no folder '{name}', and it is no name on the hub") from None
    except Exception as error:  # the hub's client, its HTTP library and the disk have errors of their own
        raise ConfigError(f"there is no folder '{name}', and the hub does not give it: {one_line(error)}") from error


def is_pipeline(path: str | Path) -> bool:
    """Whether a saved model's folder holds a pipeline of diffusers, and not a model alone."""
    return (Path(path) / PIPELINE).is_file()


def dit_in(path: str | Path) -> Path | None:
    """Where the DiT lies in a saved model's folder, which is its own or a pipeline's; ``None`` for other models.

    Raises:
        ConfigError: the folder's config cannot be read.
    """
    path = Path(path)
    if is_pipeline(path):
        return path / DENOISER
    file = path / "config.json"
    written = checks.read_json(file) if file.is_file() else None
    return path if isinstance(written, dict) and "_class_name" in written else None


def read_dit_config(path: str | Path) -> tuple[Any, dict[str, Any]]:
    """The class of the DiT saved in directory ``path``, which need not have weights, and its config as it is written.

    The class is diffusers' own, what becomes of that when it is rewired, or this package's.

    Raises:
        ConfigError: there is none.
    """
    path = Path(path)
    written = _checked(path)
    ours, theirs = _imported("siamesenorm.hosts.dit"), _imported(_OF_DIFFUSERS)
    known = (ours.DiT, ours.ResidualDiTTransformer2DModel, theirs.DiTTransformer2DModel)
    name = str(written.get("_class_name"))
    found = {cls.__name__: cls for cls in known}.get(name)
    if found is None:
        raise ConfigError(f"'{path}' holds no DiT: its config names the class '{name}'")
    return found, written


def load_dit(path: str | Path, **kwargs: Any) -> Any:
    """The DiT saved in directory ``path``: diffusers' own, one of it rewired, or this package's.

    Args:
        path: a directory with ``config.json`` and safetensors.
        **kwargs: as for diffusers' ``from_pretrained``: keys of the config among them, or ``torch_dtype``.

    Raises:
        ConfigError: there is none, or its weights do not fit it.
    """
    path = Path(path)
    found, _ = read_dit_config(path)
    check_part(path, found)
    try:
        model, info = found.from_pretrained(
            path, use_safetensors=True, local_files_only=True, output_loading_info=True, **kwargs
        )
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged file makes the readers raise
        raise ConfigError(f"cannot load the model in '{path}': {one_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys"):
        if names := key_names(info, kind):
            raise ConfigError(f"{kind.replace('_', ' ')} in the checkpoint '{path}': {', '.join(names)}")
    return model


def check_pipeline(path: Path) -> None:
    """Refuse a saved pipeline of diffusers that would run code, or take more memory than its files account for.

    Raises:
        ConfigError: naming the part.
    """
    index = checks.read_json(path / PIPELINE)
    if not isinstance(index, dict):
        raise ConfigError(f"'{path}' holds no pipeline: its {PIPELINE} names no parts")
    for part, named in index.items():
        if part.startswith("_") or not (isinstance(named, list) and len(named) == 2 and isinstance(named[0], str)):
            continue
        module, name = named
        if module not in _MODULES:
            raise ConfigError(
                f"cannot load the pipeline in '{path}': its part {part} is of module {module!r}, which would be run; "
                f"known are {', '.join(_MODULES)}"
            )
        scheduler = path / part / "scheduler_config.json"
        written = checks.read_json(scheduler) if scheduler.is_file() else {}
        steps = written.get("num_train_timesteps", 1) if isinstance(written, dict) else None
        if not isinstance(steps, int) or steps > _MOST_TIMESTEPS:
            raise ConfigError(f"cannot load the pipeline in '{path}': its scheduler has {steps!r} time steps")
        if any((path / part).glob("*.safetensors")):
            check_part(path / part, getattr(_imported(module), str(name), None))


def check_part(folder: Path, kind: Any) -> None:
    """Refuse a saved model of diffusers as :mod:`siamesenorm.hub.checks` does.

    Args:
        folder: with ``config.json`` and safetensors.
        kind: its class.

    Raises:
        ConfigError: saying why.
    """
    where = f"the model in '{folder}'"
    if not hasattr(kind, "from_config"):
        raise ConfigError(f"cannot load {where}: there is no such class")
    written, weights = _written(folder), checks.weights_in(folder)
    checks.check_config(written, weights, where)
    try:
        checks.check_size(lambda: kind.from_config(copy.deepcopy(written)), weights, where)
    except ConfigError:
        raise
    except Exception as error:  # each class has errors of its own for a config that is not right
        raise ConfigError(f"cannot load {where}: {one_line(error)}") from error


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != _OF_DIFFUSERS:
            raise
        raise ConfigError('this model needs diffusers: pip install "siamesenorm[diffusion]"') from error


def _written(path: Path) -> dict[str, Any]:
    """A config as it stands in its file."""
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"'{path}' holds no saved model: it has no config.json")
    written = checks.read_json(file)
    if not isinstance(written, dict):
        raise ConfigError(f"cannot read '{file}': it holds no config, which maps keys to values")
    return written


def _checked(path: Path) -> dict[str, Any]:
    """A config as it stands in its file, looked at before it is expanded."""
    written = _written(path)
    try:
        weights = checks.weights_in(path)
    except ConfigError:
        # What is wrong with the weights is said when they are loaded.
        weights = None
    checks.check_config(written, weights, f"the model in '{path}'")
    return written


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def auto_class(model_type: object) -> Any:
    """transformers' Auto class for the usual head of the family of a ``model_type``; a language model's for others."""
    import transformers

    host = next((host for host in all_hosts() if model_type in (host.name, host.residual_type)), None)
    head = (host and host.head) or "ForCausalLM"
    return getattr(transformers, next(auto_name for auto_name, ending in HEADS.items() if ending == head))


def key_names(info: Mapping[str, Any], kind: str) -> list[str]:
    """The parameters listed under ``kind`` in what transformers says of a loading, sorted."""
    return sorted(str(key[0] if isinstance(key, tuple) else key) for key in info.get(kind) or ())
