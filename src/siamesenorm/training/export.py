"""From a run's checkpoint, made by any number of processes, to a saved model; one process, and little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from siamesenorm.data import folders
from siamesenorm.residual import ConfigError
from siamesenorm.training import card, checkpoints, form
from siamesenorm.training.build import parameter_counts, tie_weights
from siamesenorm.training.recipe import digest
from siamesenorm.training.run import quiet_engine
from siamesenorm.training.run_folder import RunFolder
from siamesenorm.training.saved import no_progress_bars

# Where tensors begin in a file, so that none is split over words of memory.
_ALIGNED = 64


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        run: the run's folder.
        path: the saved model's.
        step: after which the checkpoint was taken.
        averaged: whether its weights are the run's average of the weights.
        params: parameters in total.
        bytes: of the files of weights.
        files: how many of them there are.
        passed_over: newer checkpoints that could not be used, and why.
    """

    run: Path
    path: Path
    step: int
    averaged: bool
    params: int
    bytes: int
    files: int
    passed_over: tuple[str, ...]


def export(path: Path, out: Path, *, step: int | None = None, raw: bool = False) -> Exported:
    """Save the model in a checkpoint as the end of its run would: weights, configuration, and what belongs to them.

    The weights go through a file beside ``out`` that is mapped into memory, so that the memory of this process does not
    grow with the model; what it holds at a time is a part of the checkpoint, and a file of the saved model. Neither the
    data nor the model that a run started from has to be there. Equal weights give equal files of weights, whatever the
    number of processes that made the checkpoint.

    Args:
        path: a run of the user's own: reading its checkpoints executes what they hold.
        out: a folder that is new or empty.
        step: of the checkpoint; by default the newest that is whole.
        raw: of a run that averages its weights, the weights themselves.

    Raises:
        ConfigError: there is no such run or checkpoint, it is not whole, or ``out`` is in use.
    """
    run = RunFolder(path)
    recipe = run.recipe()
    averaged = recipe.train.ema_decay is not None and not raw
    if raw and recipe.train.ema_decay is None:
        raise ConfigError(f"the run in {path} has no average of its weights: they are what is exported without --raw")
    folders.check_new(out)
    found, checkpoint, passed_over = _checkpoint(run, digest(recipe), step)
    if not run.form.is_dir():
        raise ConfigError(
            f"the run in {path} did not write down what is saved beside weights ({run.form} is missing); an unfinished "
            "run does so when it is resumed"
        )
    model = form.empty(run.form)
    with no_progress_bars(), quiet_engine(verbose=False), _mapped(out, model) as (parameters, buffers):
        # The engine is imported for this alone, after all that can be refused; it speaks as it is imported.
        from siamesenorm.training import engine

        engine.read_weights(checkpoint, parameters, buffers, average=averaged)
        model.load_state_dict({**parameters, **buffers}, strict=False, assign=True)
        # A table that is embedding and head in one is read, and was counted, once.
        tie_weights(model)
        with folders.made_whole(out) as unfinished:
            form.fill(run.form, model, unfinished)
    params, _ = parameter_counts(model)
    card.write(
        out,
        recipe,
        card.figures_at(run, found, raw=raw),
        step=found,
        averaged=averaged,
        params=params,
        from_folder=run.starts_from_a_folder(),
    )
    weights = list(out.rglob("*.safetensors"))
    return Exported(
        run=path,
        path=out,
        step=found,
        averaged=averaged,
        params=params,
        bytes=sum(file.stat().st_size for file in weights),
        files=len(weights),
        passed_over=passed_over,
    )


def _checkpoint(run: RunFolder, its_digest: str, step: int | None) -> tuple[int, Path, tuple[str, ...]]:
    """The step and path of the checkpoint to take, and what is wrong with the newer ones."""
    found = checkpoints.newest_first(run.checkpoints)
    steps = ", ".join(str(each) for each, _ in reversed(found))
    if not found:
        if run.model.is_dir() and run.read_summary() is not None:
            raise ConfigError(
                f"the run in {run.path} has ended, and its checkpoints are gone, as a study removes them; what would "
                f"be exported is its model, {run.model}"
            )
        raise ConfigError(f"the run in {run.path} has no checkpoint yet")
    if step is not None:
        found = [each for each in found if each[0] == step]
        if not found:
            raise ConfigError(f"the run in {run.path} has no checkpoint of step {step}; there are those of {steps}")
    passed_over: list[str] = []
    for number, path in found:
        fault = checkpoints.fault(path, its_digest)
        if fault is None:
            return number, path, tuple(passed_over)
        passed_over.append(f"checkpoint {path} is not used: {fault}")
    raise ConfigError("; ".join(passed_over))


@contextmanager
def _mapped(out: Path, model: nn.Module) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """A model's parameters and saved buffers by name, empty, in a file beside ``out`` that is there meanwhile."""
    saved = model.state_dict()
    kinds: tuple[Mapping[str, Any], ...] = (
        dict(model.named_parameters()),
        {name: buffer for name, buffer in model.named_buffers() if name in saved},
    )
    places, size = {}, 0
    for tensors in kinds:
        for name, tensor in tensors.items():
            places[name] = size
            size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_name(f".{out.name}-weights")
    try:
        with file.open("wb") as opened:
            if hasattr(os, "posix_fallocate"):
                # A page of a mapped file for which the disk has no room would kill the process.
                os.posix_fallocate(opened.fileno(), 0, size)
            else:
                opened.truncate(size)
        parameters, buffers = (
            {name: _tensor(file, places[name], tensor) for name, tensor in tensors.items()} for tensors in kinds
        )
        yield parameters, buffers
    finally:
        file.unlink(missing_ok=True)


def _tensor(file: Path, place: int, like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of ``like`` whose bytes are those of a file from ``place`` on."""
    # Each has a mapping of its own: tensors that share one would be taken for parts of a whole where they are saved.
    mapped = np.memmap(file, dtype=np.uint8, mode="r+", offset=place, shape=(like.nbytes,))
    return torch.from_numpy(mapped).view(like.dtype).view(like.shape)
