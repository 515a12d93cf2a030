"""What the tasks on images share: their data, and how it comes in batches."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from siamesenorm import hosts
from siamesenorm.data import images
from siamesenorm.data.images import ImageSplit
from siamesenorm.residual import ConfigError
from siamesenorm.training import pretrained
from siamesenorm.training.augment import flipped, shifted
from siamesenorm.training.evaluate import spread
from siamesenorm.training.example import forward_inputs
from siamesenorm.training.processes import Processes
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.tasks import task_of
from siamesenorm.training.tasks.base import Batch, Task, require_host

R = TypeVar("R", bound=Recipe)


class ImageTask(Task[R, Any]):
    """A task whose data are labelled images."""

    counts_images = True
    head: str | None
    # Those keys of `of_data` that a saved model must already have as the data says.
    sizes: ClassVar[tuple[str, ...]]

    def build(self, *, needs_data: bool = True) -> Any:
        """The model, made for the size and the classes of the data; a saved one must have been made for them."""
        recipe = self.recipe
        require_host(recipe, self.head)
        if recipe.model.pretrained is not None:
            return self._saved(needs_data=needs_data)
        config = self.of_data(needs_data=needs_data)
        for key, value in config.items():
            given = recipe.model.config.get(key, value)
            if given != value:
                raise ConfigError(f"model.config.{key} is {given!r}, and the data says {value!r}; leave it out")
        torch.manual_seed(recipe.seed)
        whole = {**config, **recipe.model.config}
        return hosts.build(recipe.model.host, whole, recipe.model.scheme, dict(recipe.model.options))

    def _saved(self, *, needs_data: bool) -> Any:
        recipe = self.recipe
        saved = pretrained.find(recipe)
        torch.manual_seed(recipe.seed)
        model = saved.build()
        if needs_data:
            wanted, data = self.of_data(needs_data=True), self.images
            for key in self.sizes:
                own, value = getattr(model.config, key), wanted[key]
                # A square may be written as its height and width.
                if own != value and own not in ([value, value], (value, value)):
                    raise ConfigError(f"{key} of model.pretrained={saved.name} is {own!r}, and the data says {value!r}")
            if saved.class_names is not None:
                require_classes(saved.class_names, data.classes, data.source)
        return model

    @abstractmethod
    def of_data(self, *, needs_data: bool) -> dict[str, Any]:
        """The keys of the model's configuration that the data decides."""

    @cached_property
    def images(self) -> Any:
        """What the recipe names, looked through once."""
        return self.look()

    def look(self) -> Any:
        """Look through the images that the recipe names, and split them."""
        wanted = self.recipe.data
        return images.prepare(
            wanted.source,
            image_size=wanted.image_size,
            channels=wanted.channels,
            crop_fraction=wanted.crop_fraction or 1.0,
            unreadable=wanted.unreadable,
        )

    def load(self, processes: Processes) -> Any:
        """The images."""
        self.keep(processes.first(lambda: self.images))
        return self.images

    def keep(self, data: Any) -> None:
        """Not look again."""
        self.images = data

    def lend(self, other: Task[Any, Any]) -> None:
        """The images, where they have been looked through."""
        if "images" in vars(self):
            other.keep(self.images)

    def pinned(self, data: Any) -> R:
        """The recipe with the fingerprint of its images in it."""
        recipe = self.recipe
        wanted = recipe.data.sha256
        if wanted is not None and wanted != data.sha256:
            raise ConfigError(
                f"the images of {data.source} are not those that data.sha256 asks for: they have {data.sha256[:16]}…, "
                f"not {wanted[:16]}… (data.sha256=null takes them as they are)"
            )
        if len(data.train) < recipe.train.batch_size:
            raise ConfigError(
                f"train.batch_size ({recipe.train.batch_size}) asks for more images than there are to train on "
                f"({len(data.train):,})"
            )
        self.held_out(data)
        pinned = replace(recipe, data=replace(recipe.data, source=data.source, sha256=data.sha256))
        task_of(pinned).keep(data)
        return pinned

    def describe(self, data: Any) -> str:
        """The set."""
        return (
            f"images {data.source}, sha256 {data.sha256}: {len(data.train):,} to train on, {len(data.validation):,} "
            f"held out, {len(data.classes):,} classes"
        )

    def facts(self, data: Any, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The set."""
        return {"images_source": data.source, "images_sha256": data.sha256, "classes": len(data.classes)}

    def example(self, model: Any, rows: int, device: str) -> tuple[dict[str, Any], int]:
        """Empty images."""
        return forward_inputs(model, rows, device=device)

    def held_out(self, data: Any) -> np.ndarray:
        """The numbers of the held-out images that a validation is measured on."""
        return chosen(data.validation, self.recipe.data.validation_images, "data.validation_images")


@dataclass(frozen=True)
class PixelBatches:
    """Training images as bytes, changed at random.

    Attributes:
        split: the images.
        sha256: of the set.
        workers: processes that read ahead.
        flip: mirror half of them.
        shift: move them by up to so many pixels.
        crop: from an image in its own size to (channels, size, size); draws from the global generators.
    """

    split: ImageSplit
    sha256: str
    workers: int = 0
    flip: bool = False
    shift: int = 0
    crop: Callable[[Any], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, indices: np.ndarray, generator: torch.Generator) -> Batch:
        """``images`` (batch, channels, height, width), bytes, and ``labels`` (batch,)."""
        if self.crop is not None:
            seed = int(torch.randint(2**31, (), generator=generator))
            random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
            pixels = np.stack([self.crop(self.split.image(int(index))) for index in indices])
            return {"images": torch.from_numpy(pixels), "labels": torch.from_numpy(self.split.labels[indices])}
        pixels, labels = self.split.batch(indices)
        images = torch.from_numpy(pixels)
        if self.flip:
            images = flipped(images, generator)
        if self.shift:
            images = shifted(images, self.shift, generator)
        return {"images": images, "labels": torch.from_numpy(labels)}


def chosen(split: Any, count: int | None, name: str) -> np.ndarray:
    """The numbers of so many images of a split, spread evenly over all; ``None`` is all.

    Raises:
        ConfigError: it has fewer than ``name`` asks for.
    """
    available = len(split)
    wanted = available if count is None else count
    if wanted > available:
        raise ConfigError(f"{name} asks for {wanted:,} held-out images, and there are {available:,}")
    return spread(available, wanted)


def require_classes(known: Mapping[int, str], classes: Sequence[str], source: str) -> None:
    """Refuse images of other classes than a model knows, or of the same in another order.

    Raises:
        ConfigError: naming the first that differs.
    """
    mine = [known[index] for index in sorted(known)]
    named = any(name != f"LABEL_{index}" for index, name in enumerate(mine))
    if len(mine) != len(classes):
        raise ConfigError(f"the model tells {len(mine)} classes apart, and {source} has {len(classes)}")
    for index, (own, other) in enumerate(zip(mine, classes, strict=True)):
        if named and own != other:
            raise ConfigError(f"class {index} of the model is '{own}', and that of {source} is '{other}'")
