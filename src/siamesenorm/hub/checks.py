"""What is asked of files before they are read: that they run no code, and take no more memory than what they hold.

Nothing here reads a tensor. A header of safetensors says how large each one is, and its library refuses one that does
not add up with the file. A model is then built on the meta device, where it takes no memory, and compared with them: a
config alone could ask for any size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..residual import ConfigError, one_line

__all__ = [
    "Weights", "check_config", "check_parts", "check_size", "check_tokenizer", "header", "read_json", "weights_in",
]  # fmt: skip

_MOST_JSON = 1 << 24
# The largest vocabularies take some tens of megabytes.
_MOST_TOKENIZER = 1 << 28
_TOKENIZER_OBJECTS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
)  # fmt: skip
_TOKENIZER_LISTS = ("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model")
# Keys by which a config is expanded even where no tensor is made: parts of a model, each of which has weights, and the
# names of classes, each of which has a row of some weight. With both, how many are fine whatever the weights are.
_PARTS = re.compile(
    r"(?:^|_)(?:layers?|depth|blocks|repeats|heads?|groups|codebooks|cycles|ngram|with_embedding)$"
    r"|^(?:layers_per_block|attention_types)$"
)
_FEW_PARTS = 1_000
_NAMES, _FEW_NAMES = re.compile(r"^num_(?:labels|classes)$"), 100_000
# Attention functions whose names bring no code from elsewhere.
_ATTENTION = (None, "eager", "sdpa", "flex_attention")
# A model may have a few tensors that its files lack, which is an error with their names later on.
_GROWTH = 4
_ALWAYS_FIT = 1 << 26


@dataclass(frozen=True)
class Weights:
    """What safetensors files hold: the shape of each tensor, by name."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def numbers(self) -> int:
        """In all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def header(path: Path) -> Weights:
    """What a safetensors file holds, by its header, which has to add up with the file.

    Raises:
        ConfigError: it is no such file, or its header lies.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ConfigError(f"'{path}' is no file")
    try:
        with safe_open(path, framework="numpy") as file:
            return Weights({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"'{path}' is no whole safetensors file: {one_line(error)}") from error


def weights_in(folder: Path) -> Weights:
    """What all safetensors files in a folder hold, and that an index of them names no others.

    Raises:
        ConfigError: as :func:`header`, or an index that names what is not there, or is elsewhere.
    """
    for index in folder.glob("*.safetensors.index.json"):
        written = read_json(index)
        named = written.get("weight_map") if isinstance(written, dict) else None
        if not isinstance(named, dict):
            raise ConfigError(f"cannot load the model in '{folder}': {index.name} maps no weights to files")
        for name in sorted(set(map(str, named.values()))):
            if Path(name).name != name:
                raise ConfigError(f"cannot load the model in '{folder}': {index.name} names a file elsewhere, {name!r}")
            if not name.endswith(".safetensors"):
                raise ConfigError(
                    f"cannot load the model in '{folder}': {index.name} names {name!r}, which is no safetensors file"
                )
            if not (folder / name).is_file():
                raise ConfigError(f"cannot load the model in '{folder}': its file {name} is missing")
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            shapes |= header(path).shapes
    except ConfigError as error:
        raise ConfigError(f"cannot load the model in '{folder}': {error}") from error
    return Weights(shapes)


def read_json(path: Path, most: int = _MOST_JSON) -> Any:
    """What a JSON file holds.

    Raises:
        ConfigError: it cannot be read, is none, or is larger than ``most`` bytes.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"'{path}' is no file")
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
        if len(content) <= most:
            return json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read '{path}': {one_line(error)}") from None
    raise ConfigError(f"cannot read '{path}': more than {most:,} bytes are no such file's")


def check_parts(written: Mapping[str, Any], weights: Weights | None, where: str) -> None:
    """Refuse a config that would be expanded to more parts than its weights have.

    Args:
        written: the config as it stands in its file.
        weights: what lies beside it; ``None`` where it is a config alone.
        where: what it is of, for messages.

    Raises:
        ConfigError: saying which key.
    """
    shapes = {} if weights is None else weights.shapes
    # A tensor without numbers can have sides of any length.
    largest = max((side for shape in shapes.values() if 0 not in shape for side in shape), default=0)
    most = {_PARTS: max(_FEW_PARTS, len(shapes), largest), _NAMES: max(_FEW_NAMES, largest)}
    for key, value in _entries(written):
        if isinstance(value, int) and any(kind.search(key) and value > limit for kind, limit in most.items()):
            raise ConfigError(f"cannot load {where}: its config has {key}={value:,}, which its weights have not")


def check_config(written: Mapping[str, Any], weights: Weights | None, where: str) -> None:
    """Refuse a config that brings code along, or that :func:`check_parts` refuses.

    Args:
        written: the config as it stands in its file.
        weights: what lies beside it; ``None`` where it is a config alone.
        where: what it is of, for messages.

    Raises:
        ConfigError: saying which key.
    """
    check_parts(written, weights, where)
    for key, value in _entries(written):
        if key.endswith("attn_implementation") and value not in _ATTENTION:
            raise ConfigError(
                f"cannot load {where}: its config asks for attention by {value!r}, which may be code from the hub; "
                "take the key out, and choose the attention where you load the model"
            )
        if key.endswith("experts_implementation") and isinstance(value, str) and "/" in value:
            raise ConfigError(f"cannot load {where}: its config asks for experts by {value!r}, which is code elsewhere")
    if written.get("transformers_weights") is not None:
        raise ConfigError(
            f"cannot load {where}: its config names the file of its weights, which may be anywhere; take the key "
            "'transformers_weights' out"
        )
    if written.get("quantization_config") is not None:
        raise ConfigError(f"cannot load {where}: it is quantised, which takes code of other packages to read")


def check_size(build: Callable[[], Any], weights: Weights, where: str) -> None:
    """Refuse a model that would take much more memory than its files hold.

    Args:
        build: makes the model; it is called where tensors take no memory.
        weights: what the files hold.
        where: what it is of, for messages.

    Raises:
        ConfigError: with both sizes.
    """
    import torch

    # Initialisation draws nothing where there is no memory, but that is not for us to rely on.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = build()
    asked = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if asked > _GROWTH * weights.numbers + _ALWAYS_FIT:
        raise ConfigError(
            f"cannot load {where}: its config asks for {asked:,} numbers, and its files hold {weights.numbers:,}"
        )


def check_tokenizer(folder: Path) -> None:
    """Refuse files of a tokeniser that are of another kind, before a reader takes them whole.

    Raises:
        ConfigError: naming the file.
    """
    templates = (*folder.glob("chat_template*"), *folder.glob("additional_chat_templates/*"))
    for path in (*(folder / name for name in (*_TOKENIZER_OBJECTS, *_TOKENIZER_LISTS)), *templates):
        name = path.name
        if not path.is_file():
            continue
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                start = file.read(64).lstrip()
        except OSError as error:
            raise ConfigError(f"cannot read '{path}': {error.strerror or error}") from error
        if size > _MOST_TOKENIZER:
            raise ConfigError(f"'{path}' is no tokeniser's file: it has {size:,} bytes")
        if name in _TOKENIZER_OBJECTS and not start.startswith(b"{"):
            raise ConfigError(f"'{path}' is no tokeniser's file: it holds no JSON object")


def _entries(written: Any) -> Iterator[tuple[str, Any]]:
    """Every key with each of its values, at any depth; in a list, all of its values are the key's."""
    if isinstance(written, Mapping):
        for key, value in written.items():
            for each in _leaves(value):
                yield str(key), each
                yield from _entries(each)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value
