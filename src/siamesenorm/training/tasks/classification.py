"""The task of telling the classes of images apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from siamesenorm import probes
from siamesenorm.data.images import ImageArrays, ImageSplit
from siamesenorm.residual import ConfigError
from siamesenorm.training import augment, form, pictures, pretrained
from siamesenorm.training.evaluate import entropy, evaluating, spread
from siamesenorm.training.normalise import Normalise
from siamesenorm.training.processes import ALONE, Processes
from siamesenorm.training.recipe import ClassificationRecipe
from siamesenorm.training.settings import autocast_of, autocasting
from siamesenorm.training.tasks.base import Batch, Objective
from siamesenorm.training.tasks.images import ImageTask, PixelBatches

CONFUSION, MISTAKES = "confusion.png", "mistakes.png"


@dataclass(frozen=True)
class Classified:
    """Mean cross-entropy in nats, and the shares of images whose class is the likeliest or among the five likeliest."""

    loss: float
    accuracy: float
    top5: float
    images: int

    def figures(self) -> dict[str, float]:
        """As `tasks.Evaluation.figures`."""
        return {
            "val_loss": self.loss,
            "val_accuracy": self.accuracy,
            "val_top5": self.top5,
            "val_images": self.images,
        }


class Classification(ImageTask[ClassificationRecipe]):
    """An image classifier of transformers, on labelled images."""

    head = "ForImageClassification"
    sizes = ("image_size", "num_channels")
    loss_label = "loss (nats per image)"

    def of_data(self, *, needs_data: bool) -> dict[str, Any]:
        """Size, channels and the names of the classes."""
        wanted, config = self.recipe.data, self.recipe.model.config
        known = {"image_size": wanted.image_size, "num_channels": wanted.channels}
        if not needs_data and None not in known.values() and "num_labels" in config:
            return known
        data = self.images
        if config.get("num_labels", len(data.classes)) != len(data.classes):
            raise ConfigError(
                f"model.config.num_labels is {config['num_labels']}, and {data.source} has {len(data.classes)} classes"
            )
        return {
            "image_size": data.image_size,
            "num_channels": data.channels,
            "id2label": dict(enumerate(data.classes)),
            "label2id": {name: index for index, name in enumerate(data.classes)},
        }

    def check(self, model: Any, *, needs_data: bool) -> None:
        """Refuse means that do not go with the channels, and augmentation that cannot be had."""
        recipe = self.recipe
        channels = model.config.num_channels
        for name, numbers in (("mean", recipe.data.mean), ("std", recipe.data.std)):
            if len(numbers) not in (1, channels):
                raise ConfigError(f"data.{name} has {len(numbers)} numbers for {channels} channels")
        if needs_data:
            self._check_normalised(channels)
            size = model.config.image_size
            augment.crops(recipe.augment, size, channels, flip=recipe.data.flip)
            augment.eraser(recipe.augment)
            mixed = augment.mixer(recipe.augment, model.config.num_labels, recipe.loss.label_smoothing)
            if mixed is not None and recipe.train.batch_size % 2:
                raise ConfigError(f"augment.mixup and cutmix pair images; batches of {recipe.train.batch_size} are odd")
            if recipe.augment.shift >= (size if isinstance(size, int) else min(size)):
                raise ConfigError(f"augment.shift ({recipe.augment.shift}) moves images of {size} pixels out of sight")
            if recipe.augment.shift and augment.crops(recipe.augment, size, channels, flip=False) is not None:
                raise ConfigError("augment.shift and augment.random_crop or auto_augment both move the image; use one")

    def _check_normalised(self, channels: int) -> None:
        """See that a saved model gets its pixels as it had them, where it says how."""
        if self.recipe.model.pretrained is None:
            return
        saved = pretrained.find(self.recipe)
        if not saved.local or not Normalise.is_in(Path(saved.where)):
            return
        its = Normalise.load(Path(saved.where))
        if its.by_channel(channels) != self.normalise.by_channel(channels):
            raise ConfigError(
                f"model.pretrained={saved.name} takes pixels less {list(its.mean)} over {list(its.std)}: give these as "
                "data.mean and data.std"
            )

    def objective(self, model: Any, data: ImageArrays, device: torch.device) -> ClassObjective:
        """Cross-entropy over images."""
        recipe = self.recipe
        smoothing = recipe.loss.label_smoothing
        return ClassObjective(
            self.normalise,
            device,
            autocast_of(recipe),
            smoothing,
            augment.mixer(recipe.augment, len(data.classes), smoothing),
            augment.eraser(recipe.augment, device.type),
        )

    @property
    def normalise(self) -> Normalise:
        """How the model takes its pixels."""
        return Normalise(self.recipe.data.mean, self.recipe.data.std)

    def batches(self, data: ImageArrays) -> PixelBatches:
        """Images, changed at random as the recipe says."""
        wanted, changes = self.recipe.data, self.recipe.augment
        crop = augment.crops(changes, data.image_size, data.channels, flip=wanted.flip)
        return PixelBatches(data.train, data.sha256, wanted.workers, wanted.flip, changes.shift, crop)

    def blind_loss(self, data: ImageArrays) -> float:
        """The entropy of the classes, in nats."""
        return entropy(np.asarray(data.validation.labels)[self.held_out(data)])

    def validate(
        self, model: Any, data: ImageArrays, *, device: torch.device, batch_size: int, processes: Processes = ALONE
    ) -> Classified:
        """Loss and accuracy on the held-out images; without label smoothing."""
        return classify(
            model,
            data.validation,
            self.held_out(data),
            self.normalise,
            batch_size=batch_size,
            device=device,
            autocast=autocast_of(self.recipe),
            processes=processes,
        )

    def probe_batches(
        self, model: Any, data: ImageArrays, *, device: torch.device, batch_size: int, count: int
    ) -> list[probes.Batch]:
        """Held-out images."""
        return image_batches(
            model,
            data.validation,
            self.held_out(data),
            self.normalise,
            batch_size=batch_size,
            count=count,
            device=device,
            autocast=autocast_of(self.recipe),
        )

    def save_form(self, model: Any, data: ImageArrays, path: Path) -> None:
        """Configuration, and how the model wants its images."""
        form.save_configuration(model, path)
        self.normalise.save(path, data.image_size, data.channels)

    def show(self, model: Any, data: ImageArrays, folder: Path, note: Callable[[str], None]) -> dict[str, Any]:
        """The confusion matrix, and a sheet of what was told wrongly."""
        found = logits_of(
            model,
            data.validation,
            np.arange(len(data.validation)),
            self.normalise,
            batch_size=self.recipe.train.batch_size,
            device=model.device,
            autocast=autocast_of(self.recipe),
        )
        probabilities = torch.cat([logits.softmax(-1) for logits, _, _ in found]).cpu().numpy()
        labels = data.validation.labels
        guesses = probabilities.argmax(-1)
        pictures.confusion(labels, guesses, data.classes, folder / CONFUSION)
        wrong = np.flatnonzero(guesses != labels)
        # The surest mistakes first.
        wrong = wrong[np.argsort(-probabilities[wrong, guesses[wrong]], kind="stable")]
        pictures.mistakes(data.validation, wrong, guesses, probabilities, data.classes, folder / MISTAKES)
        return {"mistakes": len(wrong), "mistakes_of": len(labels)}

    def files(self) -> dict[str, str]:
        """As `Task.files`."""
        return {CONFUSION: "which class was taken for which", MISTAKES: "the images that were told wrongly"}

    def report(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Accuracy and loss."""
        if summary["val_accuracy"] is None:
            return [("accuracy", "none")]
        return [
            ("accuracy", f"{summary['val_accuracy']:.2%} of {summary['val_images']:,} held-out images"),
            ("among the best 5", f"{summary['val_top5']:.2%}"),
            ("validation loss", f"{summary['val_loss']:.4f} nats per image"),
            ("images", f"{summary['images_source']}, sha256 {summary['images_sha256']}"),
        ]

    def next_command(self, path: Path) -> str:
        """Measuring again."""
        return f"siamesenorm eval {path}"

    def example_loss(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
        """The loss of `example`."""
        logits: Tensor = model(**inputs).logits
        labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        return functional.cross_entropy(logits.float(), labels)


@torch.no_grad()
def logits_of(
    model: Any,
    split: ImageSplit,
    numbers: np.ndarray,
    normalise: Callable[[Tensor], Tensor],
    *,
    batch_size: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
    processes: Processes = ALONE,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of images by number, a batch at a time: logits (batch, classes) in float32, labels, and which of them count."""
    for rows, counting in processes.shares(len(numbers), batch_size):
        pixels, labels = split.batch(numbers[rows])
        images = normalise(torch.from_numpy(pixels).to(device))
        with autocasting(device.type, autocast):
            logits = model(pixel_values=images).logits
        yield logits.float(), torch.from_numpy(labels).to(device), counting.to(device)


def image_batches(
    model: Any,
    split: ImageSplit,
    numbers: np.ndarray,
    normalise: Callable[[Tensor], Tensor],
    *,
    batch_size: int,
    count: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> list[probes.Batch]:
    """Images by number for probes, in up to ``count`` batches, spread evenly over all; the rest as `classify`."""
    chosen = numbers[spread(len(numbers), min(len(numbers), count * batch_size))]

    def batch(rows: np.ndarray) -> probes.Batch:
        pixels, labels = split.batch(rows)

        def predict() -> Tensor:
            images = normalise(torch.from_numpy(pixels).to(device))
            with autocasting(device.type, autocast):
                logits: Tensor = model(pixel_values=images).logits
            return logits

        return probes.categorical(predict, torch.from_numpy(labels).to(device))

    return [batch(chosen[start : start + batch_size]) for start in range(0, len(chosen), batch_size)]


def classify(
    model: Any,
    split: ImageSplit,
    numbers: np.ndarray,
    normalise: Callable[[Tensor], Tensor],
    *,
    batch_size: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
    processes: Processes = ALONE,
    progress: Callable[[int], None] | None = None,
) -> Classified:
    """How well a model tells images apart.

    Args:
        model: of transformers; put into evaluation mode while this runs.
        split: the images.
        numbers: of those to take.
        normalise: from bytes to what the model takes.
        batch_size: images at a time; changes the time and, beyond rounding, nothing else.
        device: where the model is.
        autocast: the dtype of autocast, or None for none.
        processes: those that share the work, all calling this.
        progress: told how many images each batch had.
    """
    totals = torch.zeros(4, dtype=torch.float64, device=device)
    batches = logits_of(
        model, split, numbers, normalise, batch_size=batch_size, device=device, autocast=autocast, processes=processes
    )
    with evaluating(model):
        for logits, labels, counting in batches:
            logits, labels = logits[counting], labels[counting]
            best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            loss = functional.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([each.double() for each in (loss, best[:, 0].sum(), best.sum(), counting.sum())])
            if progress is not None:
                progress(len(counting))
    loss, first, five, images = processes.sum(totals).tolist()
    return Classified(loss / images, first / images, five / images, int(images))


class ClassObjective(Objective):
    """Cross-entropy in nats per image, of labels that may be smoothed and mixed."""

    def __init__(
        self,
        normalise: Callable[[Tensor], Tensor],
        device: torch.device,
        autocast: torch.dtype | None = None,
        smoothing: float = 0.0,
        mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        erase: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.normalise = normalise
        self.device = device
        self.autocast = autocast
        self.smoothing = smoothing
        self.mix = mix
        self.erase = erase

    def prepare(self, batch: Batch) -> Batch:
        """``pixel_values``, and ``labels`` (batch,) or, mixed, their shares (batch, classes).

        Raises:
            ConfigError: images are to be mixed, and there is an odd number of them.
        """
        images, labels = self.normalise(batch["images"]), batch["labels"]
        if self.erase is not None:
            images = self.erase(images)
        if self.mix is not None:
            if len(labels) % 2:
                raise ConfigError(f"augment.mixup and cutmix pair images; a process's share of {len(labels)} is odd")
            images, labels = self.mix(images, labels)
        return {"pixel_values": images, "labels": labels}

    def counts(self, batch: Batch) -> Tensor:
        """Images."""
        return torch.tensor([len(batch["labels"])], device=self.device)

    def sums(self, forward: Callable[..., Any], micro_batch: Batch) -> list[Tensor]:
        """Cross-entropy, in float32."""
        labels = micro_batch["labels"]
        with autocasting(self.device.type, self.autocast):
            logits = forward(pixel_values=micro_batch["pixel_values"]).logits
        # What is mixed has been smoothed with it.
        smoothing = self.smoothing if labels.ndim == 1 else 0.0
        return [functional.cross_entropy(logits.float(), labels, label_smoothing=smoothing, reduction="sum")]
