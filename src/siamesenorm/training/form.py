"""The form of a saved model: all of it but the weights, as transformers or diffusers read it.

A run writes its form down before its first step. So what it has trained can be saved from any of its checkpoints by who
has its folder alone, without the data: ``model/`` at the end of a run and what ``siamesenorm export`` makes are both a
copy of the form with weights put into it, by `fill`.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from siamesenorm import hub
from siamesenorm.hub.loading import DENOISER, is_pipeline, read_dit_config
from siamesenorm.residual import ConfigError, one_line

# The most bytes in a file of weights; saving takes no more memory than one of them beside the model.
_FILE = "5GB"


def save_configuration(model: PreTrainedModel, path: Path) -> None:
    """Write what transformers saves of a model, which may be on the meta device, but for its weights."""
    model.save_pretrained(path, state_dict={})


def save_pipeline(pipeline: Any, path: Path) -> None:
    """Write what diffusers saves of a ``DiTPipeline`` but for the weights of its transformer."""
    pipeline.transformer.save_config(path / DENOISER)
    pipeline.vae.save_pretrained(path / "vae")
    pipeline.scheduler.save_pretrained(path / "scheduler")
    pipeline.save_config(path)


def empty(path: Path) -> nn.Module:
    """The model of a form, on the meta device: its weights are float32 and have shapes alone.

    Raises:
        ConfigError: the form cannot be read.
    """
    try:
        with torch.device("meta"):
            return _of_pipeline(path / DENOISER) if is_pipeline(path) else _of_transformers(path)
    except ConfigError:
        raise
    except Exception as error:  # whatever a damaged file makes the readers raise
        raise ConfigError(f"no model can be made of {path}: {one_line(error)}") from error


def fill(path: Path, model: Any, out: Path) -> None:
    """Save a model whole: its form, copied from ``path``, and its weights, in files of at most 5 GB.

    Beside the model this takes as much memory as one such file. Equal weights give equal files.

    Args:
        path: the form.
        model: of that form; on any device.
        out: a folder that is empty or not there yet.

    Raises:
        ConfigError: the weights cannot be written, for want of space as a rule.
    """
    shutil.copytree(path, out, dirs_exist_ok=True)
    try:
        if is_pipeline(path):
            model.save_pretrained(out / DENOISER, max_shard_size=_FILE)
        else:
            with _file_by_file(model):
                model.save_pretrained(out, max_shard_size=_FILE)
    except SafetensorError as error:
        raise ConfigError(f"cannot write the weights to {out}: {one_line(error)}") from error


def _of_transformers(path: Path) -> nn.Module:
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    model: nn.Module = hub.auto_class(config.model_type).from_config(config, dtype=torch.float32)
    return model


def _of_pipeline(path: Path) -> nn.Module:
    model_class, config = read_dit_config(path)
    model: nn.Module = model_class.from_config(config)
    return model


@contextmanager
def _file_by_file(model: Any) -> Iterator[None]:
    """Let transformers bring weights into the form that it saves, such as one tensor an expert, one file at a time.

    It does so for models that are partly on disk, since these may not fit into memory; of others it copies all weights
    first.
    """
    model.hf_device_map = {"": "cpu"}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
            yield
    finally:
        del model.hf_device_map
