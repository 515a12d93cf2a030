"""A saved model, and what it is measured on: the held-out part of its run's data, or of other data that it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from siamesenorm.data import arrays as token_arrays
from siamesenorm.data import corpus, digits, images
from siamesenorm.data.shards import TokenArrays
from siamesenorm.data.tokenizer import fingerprint
from siamesenorm.hub.loading import is_pipeline
from siamesenorm.probes import Batch
from siamesenorm.residual import ConfigError
from siamesenorm.training.documents import DocumentMask
from siamesenorm.training.evaluate import evaluate, held_out_sequences, text_batches
from siamesenorm.training.example import sees_images
from siamesenorm.training.limits import check_length, check_vocabulary, positions_of
from siamesenorm.training.normalise import Normalise
from siamesenorm.training.processes import ALONE
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.saved import load_model, load_tokenizer
from siamesenorm.training.settings import autocast_of, best_device
from siamesenorm.training.tasks import Task, task_of

_DEFAULT_LENGTH = 256


@dataclass
class Subject(ABC):
    """A model on its device, and what was held out.

    Attributes:
        model: as it was saved.
        device: where it is.
        autocast: what branches compute in, where it is not float32.
        loss_label: what its loss is, in words.
        divergence_label: what its predictions' divergence is, see :class:`siamesenorm.probes.Batch`.
        counts: what the loss is a mean over.
    """

    model: Any
    device: torch.device
    autocast: torch.dtype | None

    loss_label: ClassVar[str]
    divergence_label: ClassVar[str] = "KL divergence (nats)"
    counts: ClassVar[str] = "images"

    @abstractmethod
    def __len__(self) -> int:
        """How many sequences or images were held out."""

    @property
    @abstractmethod
    def source(self) -> tuple[str, str]:
        """What the data is called, and its fingerprint."""

    @abstractmethod
    def measure(self, batch_size: int, progress: Callable[[int], None]) -> dict[str, Any]:
        """The figures of ``siamesenorm eval``; ``progress`` is told how many more of all are done."""

    @abstractmethod
    def batches(self, batch_size: int, count: int) -> list[Batch]:
        """Up to ``count`` batches of what was held out, for probes: spread evenly over it, and always the same."""


def find(
    path: Path,
    recipe: Recipe | None,
    *,
    source: str | None = None,
    sequence_length: int | None = None,
    sequences: int | None = None,
    images: int | None = None,
) -> Subject:
    """The model saved in a folder, with what it is measured on.

    Args:
        path: the folder.
        recipe: of the run that it comes from, where it comes from one.
        source: a corpus or a set of images in place of the run's.
        sequence_length: of a language model, in tokens.
        sequences: how many, of a language model; by default the run's, or all.
        images: how many, of other models; by default the run's, or all.

    Raises:
        ConfigError: the model or its data cannot be had, or an option is not for such a model.
    """
    of_text = {"--source": source, "--sequence-length": sequence_length, "--sequences": sequences}
    if is_pipeline(path):
        for name, given in of_text.items():
            if given is not None:
                raise ConfigError(f"{name} is not for diffusion models")
        if recipe is None:
            raise ConfigError(f"'{path}' is a diffusion model without its run, whose data it would be measured on")
        return _denoiser(path, recipe, images)
    model = load_model(path)
    if not sees_images(model):
        if images is not None:
            raise ConfigError("--images is for models of images; --sequences chooses how much text")
        return _reader(path, model, recipe, source, sequence_length, sequences)
    for name in ("--sequence-length", "--sequences"):
        if of_text[name] is not None:
            raise ConfigError(f"{name} is for language models; --images chooses how many images")
    return _viewer(path, model, recipe, source, images)


@dataclass
class _Reader(Subject):
    """A language model and held-out text."""

    loss_label = "loss (nats per token)"
    counts = "tokens"

    arrays: TokenArrays
    sequences: np.ndarray
    mask: DocumentMask | None

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def source(self) -> tuple[str, str]:
        return self.arrays.source, self.arrays.sha256

    def measure(self, batch_size: int, progress: Callable[[int], None]) -> dict[str, Any]:
        found = evaluate(
            self.model,
            self.sequences,
            batch_size=batch_size,
            device=self.device,
            autocast=self.autocast,
            mask=self.mask,
            progress=progress,
        )
        return {
            **found.figures(),
            "bits_per_byte": found.bits_per_byte(self.arrays.held_out_bytes_per_token),
            "sequence_length": self.sequences.shape[1],
            "corpus": self.arrays.source,
            "corpus_sha256": self.arrays.sha256,
        }

    def batches(self, batch_size: int, count: int) -> list[Batch]:
        return text_batches(
            self.model,
            self.sequences,
            batch_size=batch_size,
            count=count,
            device=self.device,
            autocast=self.autocast,
            mask=self.mask,
        )


def _reader(
    path: Path,
    model: Any,
    recipe: Any,
    source: str | None,
    sequence_length: int | None,
    sequences: int | None,
) -> _Reader:
    tokenizer = load_tokenizer(path)
    source = source or (recipe.data.source if recipe else corpus.NAME)
    check_vocabulary(model.config.vocab_size, token_arrays.vocabulary(source))
    arrays = token_arrays.prepare(source)
    if fingerprint(tokenizer) != arrays.tokenizer_sha256:
        raise ConfigError(f"the corpus {arrays.source} is cut by another tokeniser than the model in {path} has")
    known = recipe.data.sequence_length if recipe else min(_DEFAULT_LENGTH, positions_of(model) or _DEFAULT_LENGTH)
    length = sequence_length or known
    check_length(model, length, "--sequence-length")
    if sequences is None and recipe is not None and sequence_length is None:
        sequences = recipe.data.validation_sequences
    mask = DocumentMask(arrays.vocabulary.eos_id) if recipe is not None and recipe.data.document_masking else None
    if mask is not None:
        mask.check(model, length)
    device = best_device()
    chosen = held_out_sequences(arrays.held_out(), length, sequences)
    return _Reader(model.to(device), device, autocast_of(recipe) if recipe else None, arrays, chosen, mask)


@dataclass
class _Viewer(Subject):
    """An image classifier and held-out images."""

    loss_label = "loss (nats per image)"

    images: Any
    numbers: np.ndarray
    normalise: Normalise

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def source(self) -> tuple[str, str]:
        return self.images.source, self.images.sha256

    def measure(self, batch_size: int, progress: Callable[[int], None]) -> dict[str, Any]:
        from siamesenorm.training.tasks.classification import classify

        measured = classify(
            self.model,
            self.images.validation,
            self.numbers,
            self.normalise,
            batch_size=batch_size,
            device=self.device,
            autocast=self.autocast,
            progress=progress,
        )
        source, sha256 = self.source
        return {**measured.figures(), "images_source": source, "images_sha256": sha256}

    def batches(self, batch_size: int, count: int) -> list[Batch]:
        from siamesenorm.training.tasks.classification import image_batches

        return image_batches(
            self.model,
            self.images.validation,
            self.numbers,
            self.normalise,
            batch_size=batch_size,
            count=count,
            device=self.device,
            autocast=self.autocast,
        )


def _viewer(path: Path, model: Any, recipe: Any, source: str | None, count: int | None) -> _Viewer:
    from siamesenorm.training.tasks.images import chosen, require_classes

    config, own = model.config, recipe.data if recipe else None
    found = images.prepare(
        source or (own.source if own else digits.NAME),
        image_size=config.image_size,
        channels=config.num_channels,
        crop_fraction=(own.crop_fraction if own else None) or 1.0,
    )
    require_classes(config.id2label, found.classes, found.source)
    if count is None and own is not None and source is None:
        count = own.validation_images
    numbers = chosen(found.validation, count, "--images")
    device, autocast = best_device(), autocast_of(recipe) if recipe else None
    return _Viewer(model.to(device), device, autocast, found, numbers, Normalise.load(path))


@dataclass
class _Denoiser(Subject):
    """A diffusion model and the held-out images of its run, by its task."""

    loss_label = "squared error of the prediction"
    divergence_label = "half the squared difference"

    task: Task[Any, Any]
    data: Any

    def __len__(self) -> int:
        return len(self.data.validation) if (wanted := self.task.recipe.data.validation_images) is None else wanted

    @property
    def source(self) -> tuple[str, str]:
        return self.data.source, self.data.sha256

    def measure(self, batch_size: int, progress: Callable[[int], None]) -> dict[str, Any]:
        found = self.task.validate(self.model, self.data, device=self.device, batch_size=batch_size)
        progress(len(self))
        return {**found.figures(), **self.task.facts(self.data, found.figures())}

    def batches(self, batch_size: int, count: int) -> list[Batch]:
        return self.task.probe_batches(self.model, self.data, device=self.device, batch_size=batch_size, count=count)


def _denoiser(path: Path, recipe: Any, count: int | None) -> _Denoiser:
    from siamesenorm.training.sampling import load_pipeline
    from siamesenorm.training.tasks.images import chosen

    data = task_of(recipe).load(ALONE)
    if count is not None:
        chosen(data.validation, count, "--images")
        recipe = replace(recipe, data=replace(recipe.data, validation_images=count))
    task = task_of(recipe)
    task.pinned(data)
    device = best_device()
    model = load_pipeline(path).transformer.to(device)
    return _Denoiser(model, device, autocast_of(recipe), task, data)
