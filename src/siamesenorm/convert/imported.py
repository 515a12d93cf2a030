"""From a file of the official code to a saved model of this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.utils import logging

from ..data.folders import made_whole
from ..hub import checks
from ..residual import ConfigError, one_line
from .checkpoint import Checkpoint, read_checkpoint
from .difference import Difference, difference, output_of
from .official import check_kind, load_official, training_arguments

__all__ = ["Imported", "import_official", "verify"]

TOLERANCE = 2e-5
"""How far a model's output in float32 may be from the official code's, relative to the largest entry."""
# A kind's inputs and output in a fixture, and what the model here calls the inputs.
_FIXTURES = {
    "lm": ({"tokens": "input_ids"}, "output/logits"),
    "deit": ({"x": "pixel_values"}, "output/logits"),
    "dit": ({"x": "hidden_states", "t": "timestep", "y": "class_labels"}, "output/out"),
}
_FLOAT32 = "_f32"
_IN_FIXTURES, _IN_CONFIGS = "constructor_args", "model"


@dataclass(frozen=True)
class Imported:
    """What was imported.

    Attributes:
        model: as it is saved, in evaluation mode.
        checkpoint: what was read.
        arguments: of the official constructor.
        arguments_from: where they were found.
        verified: how far the output is from a fixture's, where it was compared.
    """

    model: nn.Module
    checkpoint: Checkpoint
    arguments: Mapping[str, Any]
    arguments_from: str
    verified: Difference | None


def import_official(
    file: Path,
    out: Path,
    kind: str,
    *,
    arguments: Path | None = None,
    part: str | None = None,
    fixture: Path | None = None,
) -> Imported:
    """Read an official checkpoint, compare it with a fixture if one is given, and save it as any other model is saved.

    Args:
        file: a training checkpoint, or safetensors with official names.
        out: a folder that is new or empty.
        kind: as for :func:`siamesenorm.convert.load_official`.
        arguments: a JSON or YAML file with the official constructor's arguments: alone, below ``constructor_args`` as a
            fixture has them, or below ``model`` as the language model's training config does. By default they are
            looked for with the weights, in a ``config.yaml`` beside the file, and in the fixture.
        part: which of the file's weights; see :func:`~siamesenorm.convert.checkpoint.read_checkpoint`.
        fixture: inputs and outputs of the official model, see :func:`verify`.

    Raises:
        ConfigError: what cannot be read is dangerous or does not fit, arguments are nowhere to be found, or the output
            is not the fixture's. Nothing is written then.
    """
    check_kind(kind)
    logging.disable_progress_bar()
    with made_whole(out) as unfinished:
        checkpoint = read_checkpoint(file, kind, part)
        given, origin = _arguments(file, kind, arguments, checkpoint, fixture)
        model: Any = load_official(checkpoint.weights, kind, given)
        verified = None if fixture is None else verify(model, kind, fixture)
        model.save_pretrained(unfinished)
    return Imported(model, checkpoint, given, origin, verified)


def verify(model: Any, kind: str, fixture: Path) -> Difference:
    """Compare a model's output with what the official code made of the same inputs.

    Args:
        model: from :func:`siamesenorm.convert.load_official`.
        kind: as there.
        fixture: ``NAME.json`` or ``NAME.safetensors``, of which the latter has ``input/…`` and ``output/…``: tokens and
            logits of a language model, images ``x`` and logits of a DeiT, ``x``, ``t``, ``y`` and ``out`` of a DiT. The
            output in float32, ``output/…_f32``, is taken before the one in float64.

    Raises:
        ConfigError: the fixture is not for such a model, or the difference is above :data:`TOLERANCE`.
    """
    from safetensors import safe_open

    path = fixture.with_suffix(".safetensors")
    if not path.is_file():
        raise ConfigError(f"there is no fixture '{path}'")
    names, output = _FIXTURES[kind]
    shapes = checks.header(path).shapes
    output = output + _FLOAT32 if output + _FLOAT32 in shapes else output
    missing = [name for name in (*(f"input/{name}" for name in names), output) if name not in shapes]
    if missing:
        raise ConfigError(f"'{path}' is no fixture for the kind '{kind}': it lacks {', '.join(missing)}")
    with safe_open(path, framework="pt") as file:
        inputs = {ours: file.get_tensor(f"input/{theirs}") for theirs, ours in names.items()}
        wanted: Tensor = file.get_tensor(output)
    try:
        found = output_of(model, inputs)
    except (ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(f"the model cannot take the inputs of '{path}': {one_line(error)}") from error
    if found.shape != wanted.shape:
        raise ConfigError(f"the output is {tuple(found.shape)}, and that in '{path}' is {tuple(wanted.shape)}")
    gap = difference(found, wanted)
    if not gap.relative <= TOLERANCE:
        raise ConfigError(f"the output is not that in '{path}': it differs by {gap}; {TOLERANCE:g} is allowed")
    return gap


def _arguments(
    file: Path, kind: str, given: Path | None, checkpoint: Checkpoint, fixture: Path | None
) -> tuple[Mapping[str, Any], str]:
    """The official constructor's arguments, and where they were found."""
    if given is not None:
        return _read(given), str(given)
    if checkpoint.arguments is not None and (found := training_arguments(kind, checkpoint.arguments)) is not None:
        return found, "the checkpoint"
    beside = file.parent / "config.yaml"
    if kind == "lm" and beside.is_file():
        return _read(beside), str(beside)
    if fixture is not None:
        return _read(fixture.with_suffix(".json")), str(fixture.with_suffix(".json"))
    raise ConfigError(
        f"the arguments of the official constructor are neither with the weights in '{file}' nor beside them: give a "
        "file with them, --args FILE (JSON or YAML)"
    )


def _read(path: Path) -> Mapping[str, Any]:
    """Arguments from a file, wherever in it they are."""
    from ..training.recipe_files import read

    found = checks.read_json(path) if path.suffix == ".json" else read(path, "file of arguments")
    for key in (_IN_FIXTURES, _IN_CONFIGS):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping):
        raise ConfigError(f"'{path}' holds no arguments, which are values by name")
    return found
