"""Upcycling what is saved: a model's folder in, a model's folder out, and what is compared in between."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from .. import hosts, hub
from ..data.files import write_whole
from ..data.folders import made_whole
from ..hosts.families import host_of
from ..hub import checks
from ..hub.loading import PIPELINE, dit_in, is_pipeline, load_dit
from ..residual import ConfigError, Scheme, one_line
from .difference import Difference, difference, output_of, random_inputs, read_inputs
from .upcycle import upcycle

__all__ = ["RECORD", "Upcycled", "upcycle_saved"]

RECORD = "upcycle.json"
_DEFAULT_LENGTH = 64
# What lies beside a model and stays right for it: its tokeniser, how it takes its images, how it generates.
_BESIDE = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "*.model", "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Upcycled:
    """A model that was upcycled and saved.

    Attributes:
        source: where it was.
        out: where it is.
        scheme: its scheme, with the options that the start took.
        host: what kind of model it is.
        difference: of its output to what it was before, in float32.
        inputs: what that was measured on, in words.
        tolerance: how large it was allowed to be, relatively.
    """

    source: Path
    out: Path
    scheme: Scheme
    host: str
    difference: Difference
    inputs: str
    tolerance: float

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": str(self.source),
            "model": str(self.out),
            "host": self.host,
            "scheme": self.scheme.name,
            "scheme_options": self.scheme.options(),
            "largest_difference": self.difference.absolute,
            "largest_relative_difference": self.difference.relative,
            "tolerance": self.tolerance,
            "inputs": self.inputs,
        }


def upcycle_saved(
    source: Path,
    out: Path,
    scheme: Scheme,
    *,
    batch: Path | None = None,
    rows: int = 2,
    length: int | None = None,
    seed: int = 0,
    tolerance: float = 1e-4,
    device: torch.device | None = None,
) -> Upcycled:
    """Upcycle a saved model (:func:`siamesenorm.convert.upcycle`), and save it in the same form and dtype.

    The outputs before and after are compared in float32. A model of transformers keeps its tokeniser and what else lies
    beside it, a pipeline of diffusers its other parts.

    Args:
        source: the folder of a model of transformers, of a DiT, or of a pipeline with one.
        out: a folder that is new or empty.
        scheme: the scheme, with options.
        batch: a safetensors file with arguments of the forward pass; by default they are drawn at random.
        rows: sequences or images to draw.
        length: of a sequence to draw, in tokens; by default 64, or as many as the model has positions for.
        seed: of the drawing.
        tolerance: the largest relative difference that is taken for none.
        device: where to compute.

    Raises:
        ConfigError: the model cannot be had or upcycled, or the outputs differ by more. Nothing is written then.
    """
    logging.disable_progress_bar()
    with made_whole(out) as unfinished:
        loaded = _load(source)
        model = loaded.model.to(device)
        inputs, described = _inputs(model, batch, rows, length, seed)
        before = _output(model, inputs, described)
        upcycle(model, scheme)
        gap = difference(_output(model, inputs, described), before)
        if not gap.relative <= tolerance:
            raise ConfigError(
                f"the upcycled model does not compute what '{source}' does: over {described} the outputs differ by "
                f"{gap}, and {tolerance:g} is allowed. Nothing was written. Another --seed tells whether it is "
                "this batch; --tolerance allows more"
            )
        loaded.save(unfinished)
        made = Upcycled(
            source,
            out,
            hosts.scheme_in(model),
            host_of(model.config).name if hasattr(model.config, "model_type") else type(model).__name__,
            gap,
            described,
            tolerance,
        )
        write_whole(unfinished / RECORD, json.dumps(made.facts(), indent=2) + "\n")
    return made


@dataclass(frozen=True)
class _Loaded:
    """A model in float32, and how it is written to a folder in the form that it was read."""

    model: Any
    save: Callable[[Path], None]


def _load(source: Path) -> _Loaded:
    if not source.is_dir():
        raise ConfigError(f"no model directory at '{source}'")
    if is_pipeline(source):
        return _pipeline(source)
    if dit_in(source) is not None:
        model = load_dit(source)
        return _Loaded(model, model.save_pretrained)
    written = checks.read_json(source / "config.json") if (source / "config.json").is_file() else {}
    if isinstance(written, dict) and "architecture" in written and "model_type" not in written:
        raise ConfigError(
            f"'{source}' holds a model of timm, which saves weights alone: make it in Python, and upcycle it there by "
            "siamesenorm.convert.upcycle"
        )
    return _transformers(source)


def _transformers(source: Path) -> _Loaded:
    model = hub.load(source)
    dtype = model.dtype
    model = model.float()

    def save(folder: Path) -> None:
        model.to(dtype).save_pretrained(folder)
        checks.check_tokenizer(source)
        for path in (path for pattern in _BESIDE for path in source.glob(pattern)):
            if path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)

    return _Loaded(model, save)


def _pipeline(source: Path) -> _Loaded:
    from ..training.sampling import load_pipeline

    pipeline = load_pipeline(source)
    names = checks.read_json(source / PIPELINE).get("id2label")

    def save(folder: Path) -> None:
        pipeline.register_modules(transformer=pipeline.transformer)
        if names is not None:
            # diffusers reads the names of the classes and does not keep them.
            pipeline.register_to_config(id2label=names)
        pipeline.save_pretrained(folder)

    return _Loaded(pipeline.transformer, save)


def _inputs(model: Any, batch: Path | None, rows: int, length: int | None, seed: int) -> tuple[dict[str, Tensor], str]:
    """What to compare on, and in words."""
    if batch is not None:
        return read_inputs(batch), f"the batch {batch}"
    from ..training.limits import positions_of

    positions = positions_of(model)
    if length is not None and positions is not None and length > positions:
        raise ConfigError(f"sequences of {length} are longer than the model's max_position_embeddings ({positions})")
    length = length or min(_DEFAULT_LENGTH, positions or _DEFAULT_LENGTH)
    inputs = random_inputs(model, rows, length, seed)
    if "input_ids" in inputs:
        return inputs, f"{rows} random sequences of {length} tokens"
    return inputs, f"{rows} random {'images' if 'pixel_values' in inputs else 'noisy latents'}"


def _output(model: Any, inputs: dict[str, Tensor], described: str) -> Tensor:
    try:
        return output_of(model, inputs)
    except (AttributeError, ValueError, TypeError, RuntimeError, IndexError) as error:
        raise ConfigError(f"the model cannot take {described}: {one_line(error)}") from error
