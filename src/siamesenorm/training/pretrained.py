"""Training on from a saved model: found and checked by its configuration, loaded, and rewired where it is not yet."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from siamesenorm import hosts, hub
from siamesenorm.data import byte_tokenizer, corpus, shards
from siamesenorm.data import tokenizer as tokenizers
from siamesenorm.residual import ConfigError, Scheme, make_scheme, nearest, one_line
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.run_folder import model_folder

# These say what the weights are; the recipe's other keys choose the scheme, and training keeps weights in float32.
_FIXED = ("model_type", "dtype", "residual_scheme", "residual_norm")
# A repository may hold the same weights in several forms.
_HUB_FILES = ["config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"]


@dataclass(frozen=True)
class Pretrained:
    """A saved model, known by its configuration alone.

    Attributes:
        name: what the recipe calls it.
        where: its folder, or its name on the hub.
        local: which of the two.
        config: its configuration, with the recipe's changes.
        saved_scheme: the scheme that it was saved with; None for a plain model of its family.
        scheme: the recipe's, equal to the other where there is one.
    """

    name: str
    where: str
    local: bool
    config: Any
    saved_scheme: Scheme | None
    scheme: Scheme

    def build(self) -> PreTrainedModel:
        """The model with its weights in float32 on torch's current default device, without them on the meta device.

        Raises:
            ConfigError: for weights that cannot be had or do not fit the configuration.
        """
        config, device = copy.deepcopy(self.config), torch.get_default_device()
        if device.type == "meta":
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            model = hub.load(self._weights(), config=config, dtype=torch.float32).to(device)
        return model if self.saved_scheme is not None else hosts.rewire(model, self.scheme)

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
        try:
            return Path(snapshot_download(self.where, allow_patterns=_HUB_FILES))
        except Exception as error:  # the hub's client, its HTTP library and the disk have errors of their own
            raise ConfigError(f"cannot fetch model.pretrained={self.name} from the hub: {one_line(error)}") from error


def find(recipe: Recipe) -> Pretrained:
    """The saved model that a recipe starts from, without its weights.

    Raises:
        ConfigError: where there is none, it is of another family or scheme than the recipe says, or the recipe changes
            what cannot be changed in its configuration.
    """
    name = recipe.model.pretrained
    assert name is not None, "the recipe starts from no saved model"
    path = Path(name).expanduser()
    local = path.exists()
    where = str(_folder(path)) if local else name
    config = _config(name, where, local)
    host = _host(name, config)
    if host.name != recipe.model.host:
        raise ConfigError(
            f"model.pretrained={name} is a model of host {host.name}, and model.host is {recipe.model.host}"
        )
    scheme = make_scheme(recipe.model.scheme, **recipe.model.options)
    saved_scheme = hosts.scheme_of(config) if config.model_type == host.residual_type else None
    if saved_scheme is not None and saved_scheme != scheme:
        raise ConfigError(
            f"model.pretrained={name} was saved with the scheme {_show(saved_scheme)}, and the recipe asks for "
            f"{_show(scheme)}; a model's scheme cannot be changed"
        )
    if recipe.model.config:
        config = _changed(config, recipe.model.config, name)
    return Pretrained(name, where, local, config, saved_scheme, scheme)


def _folder(path: Path) -> Path:
    """The folder of a saved model that is here."""
    if not path.is_dir():
        raise ConfigError(f"model.pretrained={path} is a file; it takes the folder of a saved model")
    folder = model_folder(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.pretrained={path} holds no saved model: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.pretrained={path} holds no weights: there is no .safetensors file in it")
    return folder


def _config(name: str, where: str, local: bool) -> Any:
    """The configuration as it was saved."""
    if not local:
        try:
            validate_repo_id(name)
        except HFValidationError:
            raise ConfigError(f"model.pretrained={name}: there is no such folder") from None
    try:
        config = AutoConfig.from_pretrained(where, local_files_only=local, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:  # files that are not right have many kinds of errors, and so has the hub's client
        why = "" if local else ", which is no folder here and cannot be had from the hub"
        raise ConfigError(f"cannot load model.pretrained={name}{why}: {one_line(error)}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"model.pretrained={name} is quantised; training needs weights that are not")
    return config


def _host(name: str, config: Any) -> hosts.Host:
    for host_name in hosts.hosts():
        host = hosts.get_host(host_name)
        if config.model_type in (host.name, host.residual_type):
            return host
    raise ConfigError(
        f"model.pretrained={name} is a model of type {config.model_type}; supported are {', '.join(hosts.hosts())}"
    )


def _changed(config: Any, changes: Mapping[str, Any], name: str) -> Any:
    """`config` with a recipe's changes, which leave every weight its place and shape."""
    known = set(config.to_dict()) | set(config.attribute_map)
    for key in changes:
        if key in _FIXED:
            raise ConfigError(f"model.config.{key} cannot be changed in a saved model ({name})")
        if key not in known:
            raise ConfigError(
                f"the configuration of model.pretrained={name} has no key '{key}': {nearest(key, known - set(_FIXED))}"
            )
    changed = copy.deepcopy(config)
    try:
        for key, value in changes.items():
            setattr(changed, key, value)
        changed.validate()
        before, after = _shapes(config), _shapes(changed)
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


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a model with this configuration; a weight in two places counts in the first."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _tokenizer_of(source: str) -> str:
    """The fingerprint of the tokeniser that cut a recipe's data."""
    if source == corpus.NAME:
        return tokenizers.fingerprint(byte_tokenizer.build())
    return shards.read_meta(Path(source), source).tokenizer_sha256


def _show(scheme: Scheme) -> str:
    options = ", ".join(f"{key}={value}" for key, value in scheme.options().items())
    return f"{scheme.name} ({options})" if options else scheme.name
