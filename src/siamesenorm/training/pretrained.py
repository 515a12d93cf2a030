"""Training on from a saved model: found and checked by its configuration, loaded, and rewired where it is not yet."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from siamesenorm import hosts, hub
from siamesenorm.data import byte_tokenizer, corpus, shards
from siamesenorm.data import tokenizer as tokenizers
from siamesenorm.hub import checks
from siamesenorm.hub.loading import DENOISER, PIPELINE, dit_in, is_pipeline, load_dit, read_dit_config
from siamesenorm.residual import ConfigError, Scheme, make_scheme, nearest, one_line
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.run_folder import model_folder

# These say what the weights are; the recipe's other keys choose the scheme, and training keeps weights in float32.
_FIXED = ("model_type", "dtype", "residual_scheme", "residual_norm", "norm_type")


@dataclass(frozen=True)
class Pretrained(ABC):
    """A saved model, known by its configuration alone.

    Attributes:
        name: what the recipe calls it.
        where: its folder, or its name on the hub.
        local: which of the two.
        config: its configuration, with the recipe's changes.
        host: its family.
        saved_scheme: the scheme that it was saved with; None for a plain model of its family.
        scheme: the recipe's, equal to the other where there is one.
    """

    name: str
    where: str
    local: bool
    config: Any
    host: hosts.Host
    saved_scheme: Scheme | None
    scheme: Scheme

    @property
    @abstractmethod
    def class_names(self) -> Mapping[int, str] | None:
        """Of what it tells apart or draws, by number; ``None`` where they are not known."""

    def build(self) -> Any:
        """The model with its weights in float32 on torch's current default device, without them on the meta device.

        Raises:
            ConfigError: for weights that cannot be had or do not fit the configuration.
        """
        device = torch.get_default_device()
        model = self._empty() if device.type == "meta" else self._loaded().to(device)
        return model if self.saved_scheme is not None else hosts.rewire(model, self.scheme)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """With a recipe's changes in the configuration, which leave every weight its place and shape.

        Raises:
            ConfigError: for a key that is none or is not to be changed, and naming the first weight that differs.
        """
        name, known = self.name, self._keys()
        for key in changes:
            if key in _FIXED:
                raise ConfigError(f"model.config.{key} cannot be changed in a saved model ({name})")
            if key not in known:
                raise ConfigError(
                    f"the configuration of model.pretrained={name} has no key '{key}': "
                    f"{nearest(key, known - set(_FIXED))}"
                )
        try:
            changed = replace(self, config=self._config_with(changes))
            before, after = self._shapes(), changed._shapes()
        except (ArithmeticError, RuntimeError, TypeError, ValueError, StrictDataclassError) as error:
            raise ConfigError(f"model.config does not fit model.pretrained={name}: {one_line(error)}") from error
        differing = [weight for weight in before | after if before.get(weight) != after.get(weight)]
        if differing:
            first = differing[0]
            raise ConfigError(
                f"model.config ({', '.join(changes)}) changes the weights that model.pretrained={name} has: {first} is "
                f"{before.get(first, 'not there')} and would be {after.get(first, 'gone')}"
                + (f", and {len(differing) - 1} more" if len(differing) > 1 else "")
            )
        return changed

    @abstractmethod
    def _empty(self) -> Any:
        """A model with this configuration on torch's default device, its weights not those that were saved."""

    @abstractmethod
    def _loaded(self) -> Any:
        """The model with its weights, in main memory."""

    @abstractmethod
    def _keys(self) -> set[str]:
        """Of the configuration."""

    @abstractmethod
    def _config_with(self, changes: Mapping[str, Any]) -> Any:
        """The configuration with other values."""

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight and saved table of such a model; a weight in two places counts in the first."""
        with torch.device("meta"):
            model = self._empty()
        saved = model.state_dict().keys()
        tables = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
        return {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *tables)}


class OfTransformers(Pretrained):
    """A language model or an image classifier."""

    config: PreTrainedConfig

    @property
    def class_names(self) -> Mapping[int, str] | None:
        """A classifier's own."""
        return self.config.id2label if self.host.head == "ForImageClassification" else None

    def check_size(self, vocabulary: tokenizers.Vocabulary) -> None:
        """See that there is a row for each of a tokeniser's ids; there may be more of them.

        Raises:
            ConfigError: with both sizes.
        """
        size = self.config.vocab_size
        if size < vocabulary.size:
            raise ConfigError(
                f"the vocabulary of model.pretrained={self.name} has {size:,} tokens, and the data's tokeniser has "
                f"{vocabulary.size:,}"
            )

    def check_tokenizer(self, source: str) -> None:
        """See that data were cut by the tokeniser that was saved with the model, where there is one.

        Args:
            source: the data, as in a recipe; known to be there.

        Raises:
            ConfigError: with both fingerprints.
        """
        if not self._has_tokenizer():
            return
        its = tokenizers.fingerprint(tokenizers.load(self.where))
        theirs = _tokenizer_of(source)
        if its != theirs:
            raise ConfigError(
                f"model.pretrained={self.name} has another tokeniser than the data: {its[:16]}… there, {theirs[:16]}… "
                f"in {source}; 'siamesenorm data prepare' with --tokenizer {self.where} cuts data for it"
            )

    def _has_tokenizer(self) -> bool:
        if self.local:
            return any((Path(self.where) / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
        return bool(get_tokenizer_config(self.where))

    def _weights(self) -> Path:
        """The folder with the weights, fetched from the hub where they are not here."""
        if self.local:
            return Path(self.where)
        return hub.fetch(self.where)

    def _empty(self) -> Any:
        return hub.auto_class(self.config.model_type).from_config(copy.deepcopy(self.config), dtype=torch.float32)

    def _loaded(self) -> Any:
        return hub.load(self._weights(), config=copy.deepcopy(self.config), dtype=torch.float32)

    def _keys(self) -> set[str]:
        return set(self.config.to_dict()) | set(self.config.attribute_map)

    def _config_with(self, changes: Mapping[str, Any]) -> PreTrainedConfig:
        changed = copy.deepcopy(self.config)
        for key, value in changes.items():
            setattr(changed, key, value)
        changed.validate()
        return changed


@dataclass(frozen=True)
class OfDiffusers(Pretrained):
    """A DiT, alone or in a pipeline.

    Attributes:
        config: as it stands in its file, a mapping.
        model_class: diffusers' own, or one of `siamesenorm.hosts.dit`.
        pipeline: the folder of the pipeline that it is in.
    """

    config: Mapping[str, Any]
    model_class: Any
    pipeline: Path | None

    @property
    def class_names(self) -> Mapping[int, str] | None:
        """Those of its pipeline."""
        written = None if self.pipeline is None else checks.read_json(self.pipeline / PIPELINE)
        names = written.get("id2label") if isinstance(written, dict) else None
        if not isinstance(names, dict) or not all(str(label).isdecimal() for label in names):
            return None
        return {int(label): str(name) for label, name in names.items()}

    def _empty(self) -> Any:
        return self.model_class.from_config(dict(self.config))

    def _loaded(self) -> Any:
        _, written = read_dit_config(self.where)
        changes = {key: value for key, value in self.config.items() if key not in written or written[key] != value}
        return load_dit(self.where, torch_dtype=torch.float32, **changes)

    def _keys(self) -> set[str]:
        return {key for key in self.model_class._get_init_keys(self.model_class) if key not in ("self", "kwargs")}

    def _config_with(self, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**self.config, **changes}


def find(recipe: Recipe) -> Pretrained:
    """The saved model that a recipe starts from, without its weights.

    Raises:
        ConfigError: where there is none, it is of another family or scheme than the recipe says, or the recipe changes
            what cannot be changed in its configuration.
    """
    name = recipe.model.pretrained
    assert name is not None, "the recipe starts from no saved model"
    path = Path(name).expanduser()
    scheme = make_scheme(recipe.model.scheme, **recipe.model.options)
    found = _local(name, path, scheme) if path.exists() else _on_hub(name, scheme)
    if found.host.name != recipe.model.host:
        raise ConfigError(
            f"model.pretrained={name} is a model of host {found.host.name}, and model.host is {recipe.model.host}"
        )
    if found.saved_scheme is not None and found.saved_scheme != scheme:
        raise ConfigError(
            f"model.pretrained={name} was saved with the scheme {_show(found.saved_scheme)}, and the recipe asks for "
            f"{_show(scheme)}; a model's scheme cannot be changed"
        )
    return found.changed(recipe.model.config) if recipe.model.config else found


def text_model(recipe: Recipe) -> OfTransformers:
    """`find` for a recipe whose host is a language model's."""
    found = find(recipe)
    assert isinstance(found, OfTransformers), "only models of transformers have such hosts"
    return found


def _local(name: str, path: Path, scheme: Scheme) -> Pretrained:
    """The model in a folder."""
    folder = _folder(path)
    with _naming(name):
        if (dit := dit_in(folder)) is None:
            config = hub.read_config(folder)
        else:
            model_class, written = read_dit_config(dit)
    if dit is None:
        return _of_transformers(name, str(folder), True, config, scheme)
    saved = None if (given := written.get("residual_scheme")) is None else hosts.scheme_from_dict(given)
    pipeline = None if dit == folder else folder
    return OfDiffusers(name, str(dit), True, written, hosts.get_host("dit"), saved, scheme, model_class, pipeline)


def _on_hub(name: str, scheme: Scheme) -> OfTransformers:
    """The model of transformers by this name on the hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ConfigError(f"model.pretrained={name}: there is no such folder") from None
    with _naming(name, ", which is no folder here and cannot be had from the hub"):
        # Looked at before it is expanded.
        written, _ = PreTrainedConfig.get_config_dict(name)
        checks.check_config(written, None, name)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    return _of_transformers(name, name, False, config, scheme)


@contextmanager
def _naming(name: str, why: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:  # files that are not right have many kinds of errors, and so has the hub's client
        raise ConfigError(f"cannot load model.pretrained={name}{why}: {one_line(error)}") from error


def _of_transformers(name: str, where: str, local: bool, config: PreTrainedConfig, scheme: Scheme) -> OfTransformers:
    host = _host(name, config)
    saved = hosts.scheme_of(config) if config.model_type == host.residual_type else None
    return OfTransformers(name, where, local, config, host, saved, scheme)


def _folder(path: Path) -> Path:
    """The folder of a saved model that is here, which is a pipeline's where its DiT lies in one."""
    if not path.is_dir():
        raise ConfigError(f"model.pretrained={path} is a file; it takes the folder of a saved model")
    folder = model_folder(path)
    weights = folder / DENOISER if is_pipeline(folder) else folder
    if not (weights / "config.json").is_file():
        raise ConfigError(f"model.pretrained={path} holds no saved model: it has no config.json")
    if not any(weights.glob("*.safetensors")):
        raise ConfigError(f"model.pretrained={path} holds no weights: there is no .safetensors file in it")
    return folder


def _host(name: str, config: Any) -> hosts.Host:
    for host_name in hosts.hosts():
        host = hosts.get_host(host_name)
        if config.model_type in (host.name, host.residual_type):
            return host
    raise ConfigError(
        f"model.pretrained={name} is a model of type {config.model_type}; supported are {', '.join(hosts.hosts())}"
    )


def _tokenizer_of(source: str) -> str:
    """The fingerprint of the tokeniser that cut a recipe's data."""
    if source == corpus.NAME:
        return tokenizers.fingerprint(byte_tokenizer.build())
    return shards.read_meta(Path(source), source).tokenizer_sha256


def _show(scheme: Scheme) -> str:
    options = ", ".join(f"{key}={value}" for key, value in scheme.options().items())
    return f"{scheme.name} ({options})" if options else scheme.name
