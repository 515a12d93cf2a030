"""Training checkpoints of the official code, read as data alone.

They are pickles: of weights, and of whatever else a training script keeps. torch reads them without running code that
they name, and maps their tensors, so that no memory is taken before a tensor is copied. What remains to be asked is
asked here first: that the archive is one that torch wrote, and that no tensor is larger than the file.
"""

from __future__ import annotations

import argparse
import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from ..hub import checks
from ..residual import ConfigError, nearest, one_line

__all__ = ["Checkpoint", "read_checkpoint"]

# Where training scripts put the weights; the first that is there is taken.
_PARTS = {"lm": ("model", "state_dict"), "deit": ("model", "state_dict"), "dit": ("ema", "model", "state_dict")}
# What wrappers of a model put before every name in it.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
_ARGUMENTS = "args"
# What torch's reader lets a pickle make, and is as large as that says; weights are made of what the archive holds.
_OF_ANY_SIZE = re.compile(r"^(?:builtins|__builtin__) bytearray$|^torch\S* (?:\w*Tensor|UntypedStorage|TypedStorage)$")


@dataclass(frozen=True)
class Checkpoint:
    """What was read of a training checkpoint.

    Attributes:
        weights: by official names.
        part: which of the file's parts they are; empty where the file holds nothing else.
        left: the other parts.
        arguments: those of the training script, where they are kept with the weights.
    """

    weights: dict[str, Tensor]
    part: str
    left: tuple[str, ...]
    arguments: Mapping[str, Any] | None


def read_checkpoint(path: Path, kind: str, part: str | None = None) -> Checkpoint:
    """The weights in a training checkpoint, or in a safetensors file.

    Args:
        path: the file.
        kind: of official model, as for :func:`siamesenorm.convert.load_official`.
        part: the name of the weights in the file, where it has several; by default the averaged ones of a DiT, as its
            official sampling takes them, and ``model`` of others.

    Raises:
        ConfigError: a file that cannot be read, holds code, or says that it holds more than it does.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file '{path}'")
    found = _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)
    arguments = found.get(_ARGUMENTS)
    if _is_weights(found):
        if part is not None:
            raise ConfigError(f"'{path}' holds weights alone, and no part '{part}'")
        weights, name, left = found, "", []
    else:
        parts = [key for key, value in found.items() if isinstance(value, Mapping) and _is_weights(value)]
        name = part if part is not None else next((key for key in _PARTS[kind] if key in parts), "")
        if name not in parts:
            there = f"no part '{name}': {nearest(name, parts)}" if part is not None else "no weights"
            raise ConfigError(f"'{path}' holds {there}; its parts are {', '.join(map(str, found)) or 'none'}")
        weights, left = found[name], [str(key) for key in found if key not in (name, _ARGUMENTS)]
    _check_sizes(weights, path)
    return Checkpoint(
        _unwrapped(weights), name, tuple(left), vars(arguments) if isinstance(arguments, argparse.Namespace) else None
    )


def _safetensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    checks.header(path)
    return dict(load_file(path))


def _pickled(path: Path) -> dict[str, Any]:
    """What torch saved, without running any of it."""
    _check_archive(path)
    _check_pickle(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        named = [name for name in _code_in(path) if name != "argparse.Namespace"]
        if named:
            raise ConfigError(
                f"'{path}' holds more than data: loading it would run {', '.join(named)}, which is refused. Save its "
                "weights alone, where you trust it, and import those"
            ) from None
        raise ConfigError(f"cannot read '{path}': {one_line(error)[:200]}") from None
    except Exception as error:  # whatever a damaged file makes the reader raise
        raise ConfigError(f"cannot read '{path}': {one_line(error)[:200]}") from None
    if not isinstance(found, Mapping):
        raise ConfigError(f"'{path}' holds a {type(found).__name__}, and no weights by name")
    return dict(found)


def _check_archive(path: Path) -> None:
    """Refuse an archive that torch did not write: its entries are not compressed, and lie in one folder."""
    if not zipfile.is_zipfile(path):
        raise ConfigError(
            f"'{path}' is no checkpoint as torch.save has written it since 1.6; where you trust it, save it anew"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ConfigError(f"cannot read '{path}': {one_line(error)}") from error
    for entry in entries:
        name = PurePosixPath(entry.filename.replace("\\", "/"))
        if name.is_absolute() or ".." in name.parts or not name.parts or ":" in name.parts[0]:
            raise ConfigError(f"'{path}' is no checkpoint: its entry {entry.filename!r} points out of the archive")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ConfigError(f"'{path}' is no checkpoint: its entry {entry.filename!r} is compressed")
    if sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise ConfigError(f"'{path}' is no checkpoint: its entries are larger than the file")


def _check_pickle(path: Path) -> None:
    """Refuse what the reader would make as large as a number in the pickle says."""
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
        named = {str(given) for each in pickles for kind, given, _ in pickletools.genops(each) if kind.name == "GLOBAL"}
    except (ValueError, OSError, zipfile.BadZipFile, RuntimeError) as error:
        raise ConfigError(f"cannot read '{path}': {one_line(error)[:200]}") from error
    if sized := sorted(name.replace(" ", ".") for name in named if _OF_ANY_SIZE.search(name)):
        raise ConfigError(f"'{path}' is no checkpoint of weights: it makes {', '.join(sized)}, of any size")


def _code_in(path: Path) -> list[str]:
    """What a pickle would call that is not torch's own for tensors."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # a pickle that is broken has no names to show
        return []


def _is_weights(found: Mapping[Any, Any]) -> bool:
    return bool(found) and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in found.items())


def _check_sizes(weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuse tensors that only say that they are large: views of little memory would be copied whole."""
    size = path.stat().st_size
    for name, tensor in weights.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ConfigError(f"'{path}' holds '{name}' in a form that is not plain: {tensor.layout}")
        if tensor.numel() * tensor.element_size() > size:
            raise ConfigError(f"'{path}' says that '{name}' has the shape {tuple(tensor.shape)}, which is not in it")


def _unwrapped(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what data-parallel training and compilation put before the names."""
    names = dict(weights)
    while wrapper := next((each for each in _WRAPPERS if all(name.startswith(each) for name in names)), None):
        names = {name.removeprefix(wrapper): tensor for name, tensor in names.items()}
    return names
