"""The task of taking noise out of images, knowing their class (DiT, arXiv 2212.09748)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siamesenorm import probes
from siamesenorm.data import images, latents
from siamesenorm.data.images import ImageArrays
from siamesenorm.data.latents import LatentArrays
from siamesenorm.residual import ConfigError
from siamesenorm.training import form, pictures, sampling
from siamesenorm.training.evaluate import evaluating, spread
from siamesenorm.training.frechet import Judge, check_judge, distance, judge_for
from siamesenorm.training.processes import ALONE, Processes
from siamesenorm.training.recipe import DiffusionRecipe, ImageDiffusionRecipe
from siamesenorm.training.settings import autocast_of, autocasting
from siamesenorm.training.tasks.base import Batch, Objective
from siamesenorm.training.tasks.images import ImageTask, PixelBatches
from siamesenorm.training.variational import Bound

SAMPLES = "samples.png"


@dataclass(frozen=True)
class Denoised:
    """Mean squared error of the prediction, and where the variance is learned the bound in bits per number."""

    loss: float
    variational: float | None
    images: int

    def figures(self) -> dict[str, float]:
        """As `tasks.Evaluation.figures`."""
        figures = {"val_loss": self.loss, "val_images": self.images}
        return figures if self.variational is None else {**figures, "val_variational": self.variational}


class Noise:
    """The noise of a recipe, by diffusers' DDPM scheduler."""

    def __init__(self, recipe: DiffusionRecipe) -> None:
        from diffusers import DDIMScheduler, DDPMScheduler

        common = {
            "num_train_timesteps": recipe.timesteps,
            "beta_start": recipe.beta_start,
            "beta_end": recipe.beta_end,
            "beta_schedule": recipe.beta_schedule,
            "prediction_type": recipe.prediction,
            # DDIM would clip its guess of the image and not the noise that goes with it, which guidance makes much of.
            "clip_sample": False,
            "timestep_spacing": "trailing",
        }
        self.recipe = recipe
        self.scheduler = DDPMScheduler(**common)
        # What a saved pipeline samples with, unless it is given another.
        self.sampler = DDIMScheduler(**common)
        self.bound = Bound(self.scheduler.betas) if recipe.learned_sigma else None

    def onto(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_t (batch, channels, height, width) of images, noise (both the same) and time steps (batch,) from 0."""
        out: Tensor = self.scheduler.add_noise(x0, noise, t)
        return out

    def errors(self, out: Tensor, x0: Tensor, xt: Tensor, noise: Tensor, t: Tensor) -> list[Tensor]:
        """Of a model's output for ``xt``: the squared error and the bound of each image, (batch,), in float32."""
        out = out.float()
        prediction = self.prediction(out)
        parts = [(prediction - self.target(x0, noise, t)).square().flatten(1).mean(1)]
        if self.bound is not None:
            kept = self.scheduler.alphas_cumprod.to(t.device)[t].view(-1, 1, 1, 1)
            if self.recipe.prediction == "epsilon":
                guess = (xt - (1 - kept).sqrt() * prediction) / kept.sqrt()
            else:
                guess = kept.sqrt() * xt - (1 - kept).sqrt() * prediction
            parts.append(self.bound(x0, xt, t, guess, out.chunk(2, dim=1)[1]))
        return parts

    def prediction(self, out: Tensor) -> Tensor:
        """What of a model's output is compared with `target`: all but what is said of the variance."""
        return out.chunk(2, dim=1)[0] if self.bound is not None else out

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What is to be predicted, (batch, channels, height, width)."""
        found: Tensor = noise if self.recipe.prediction == "epsilon" else self.scheduler.get_velocity(x0, noise, t)
        return found


class Diffusion(ImageTask[ImageDiffusionRecipe]):
    """A DiT of diffusers, on labelled images or latents."""

    head = None
    sizes = ("sample_size", "in_channels", "out_channels", "num_embeds_ada_norm")
    loss_label = "squared error of the prediction"

    def build(self, *, needs_data: bool = True) -> Any:
        """As for all images; a saved model has to have a null class where labels are to be dropped, and only there."""
        model, recipe = super().build(needs_data=needs_data), self.recipe
        if recipe.model.pretrained is None:
            return model
        dropout = recipe.diffusion.label_dropout
        if bool(dropout) != (model.null_class is not None):
            has, wanted = ("no", "0") if dropout else ("a", "above 0")
            raise ConfigError(
                f"model.pretrained={recipe.model.pretrained} has {has} null class, so diffusion.label_dropout must be "
                f"{wanted}, not {dropout:g}"
            )
        model.keep_labels()
        if "class_dropout_prob" in model.config:
            model.record(class_dropout_prob=dropout)
        return model

    def look(self) -> Any:
        """As for images, or the latents that ``siamesenorm data encode-latents`` made of some."""
        wanted = self.recipe.data
        if not latents.is_folder(wanted.source):
            return super().look()
        decided = {"image_size": "null", "channels": "null", "crop_fraction": "null", "flip": "false"}
        for name, nothing in decided.items():
            if getattr(wanted, name):
                raise ConfigError(
                    f"data.{name} was decided when {wanted.source} was made of images: give data.{name}={nothing}"
                )
        found = latents.prepare(Path(wanted.source))
        scaling = found.encoded.autoencoder_config.get("scaling_factor") or 1.0
        if set(found.encoded.shift) != {0.0} or set(found.encoded.scale) != {float(scaling)}:
            raise ConfigError(
                f"the autoencoder {found.encoded.autoencoder} shifts its latents, or scales each channel in its own "
                "way, which diffusers' DiTPipeline does not undo"
            )
        return found

    def of_data(self, *, needs_data: bool) -> dict[str, Any]:
        """Size, channels and classes."""
        recipe, config = self.recipe, self.recipe.model.config
        out = {"class_dropout_prob": recipe.diffusion.label_dropout}
        double = 2 if recipe.diffusion.learned_sigma else 1
        if not needs_data and {"sample_size", "in_channels", "num_embeds_ada_norm"} <= config.keys():
            return {**out, "out_channels": double * config["in_channels"]}
        data = self.images
        channels, size = _shape(data)
        return {
            **out,
            "sample_size": size,
            "in_channels": channels,
            "out_channels": double * channels,
            "num_embeds_ada_norm": len(data.classes),
        }

    def check(self, model: Any, *, needs_data: bool) -> None:
        """Refuse samples that could not be drawn."""
        recipe = self.recipe
        wanted = recipe.sample
        sampling.check_sampler(wanted.sampler)
        timesteps = recipe.diffusion.timesteps
        if wanted.steps > timesteps:
            raise ConfigError(f"sample.steps ({wanted.steps}) exceeds diffusion.timesteps ({timesteps})")
        if not recipe.diffusion.label_dropout and any(scale > 1 for scale in wanted.guidance):
            raise ConfigError(
                "diffusion.label_dropout=0 makes a model without a null class, which cannot be guided: "
                "sample.guidance=1"
            )
        if wanted.distance_images == 1:
            raise ConfigError("sample.distance_images must be 0 or at least 2: a single sample has no spread")
        if wanted.distance_images and wanted.classifier is None and latents.is_folder(recipe.data.source):
            raise ConfigError("sample.distance_images needs a classifier of images in sample.classifier, or to be 0")
        # What only the end of a run needs had better be missed at its beginning.
        if needs_data and latents.is_folder(recipe.data.source):
            self.images.autoencoder()
        if needs_data and wanted.distance_images:
            check_judge(recipe, _images_of(self.images))

    def objective(self, model: Any, data: Any, device: torch.device) -> NoiseObjective:
        """The error of the prediction, and the variational bound."""
        recipe = self.recipe
        noise = Noise(recipe.diffusion)
        return NoiseObjective(noise, len(data.classes), device, autocast_of(recipe))

    def batches(self, data: Any) -> Any:
        """Images, or latents drawn from what the autoencoder says of them."""
        wanted = self.recipe.data
        if isinstance(data, ImageArrays):
            return PixelBatches(data.train, data.sha256, wanted.workers, wanted.flip)
        return LatentBatches(data, wanted.workers)

    @torch.no_grad()
    def validate(
        self, model: Any, data: Any, *, device: torch.device, batch_size: int, processes: Processes = ALONE
    ) -> Denoised:
        """The errors on the held-out images, each with a noise and a time step of its own that never change."""
        noise = Noise(self.recipe.diffusion)
        low = autocast_of(self.recipe)
        totals = torch.zeros(3, dtype=torch.float64, device=device)
        numbers = self.held_out(data)
        with evaluating(model):
            for rows, counting in processes.shares(len(numbers), batch_size):
                x0, drawn, t, labels = self._noisy(data, numbers[rows], device)
                xt = noise.onto(x0, drawn, t)
                with autocasting(device.type, low):
                    out = model(hidden_states=xt, timestep=t, class_labels=labels).sample
                parts = noise.errors(out, x0, xt, drawn, t)
                sums = [part[counting.to(device)].double().sum() for part in parts]
                totals[: len(sums)] += torch.stack(sums)
                totals[2] += counting.sum()
        loss, variational, count = processes.sum(totals).tolist()
        learned = self.recipe.diffusion.learned_sigma
        return Denoised(loss / count, variational / count if learned else None, int(count))

    def _noisy(self, data: Any, indices: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Held-out images by number, a noise and a time step for each that never change, and their labels."""
        generators = [torch.Generator().manual_seed(int(index)) for index in indices]
        x0, labels = _held_out_batch(data, indices, generators)
        drawn = torch.stack([torch.randn(x0.shape[1:], generator=each) for each in generators])
        timesteps = self.recipe.diffusion.timesteps
        t = torch.stack([torch.randint(timesteps, (), generator=each) for each in generators])
        return x0.to(device), drawn.to(device), t.to(device), labels.to(device)

    def probe_batches(
        self, model: Any, data: Any, *, device: torch.device, batch_size: int, count: int
    ) -> list[probes.Batch]:
        """Held-out images, with the noise and time steps that they are validated with."""
        noise, low = Noise(self.recipe.diffusion), autocast_of(self.recipe)
        numbers = self.held_out(data)
        numbers = numbers[spread(len(numbers), min(len(numbers), count * batch_size))]

        def batch(indices: np.ndarray) -> probes.Batch:
            x0, drawn, t, labels = self._noisy(data, indices, device)
            xt, target = noise.onto(x0, drawn, t), noise.target(x0, drawn, t)

            def predict() -> Tensor:
                with autocasting(device.type, low):
                    out = model(hidden_states=xt, timestep=t, class_labels=labels).sample
                return noise.prediction(out.float())

            def loss(prediction: Tensor) -> Tensor:
                return (prediction - target).square().flatten(1).mean(1).sum()

            return probes.unit_gaussian(predict, loss, len(indices))

        return [batch(numbers[start : start + batch_size]) for start in range(0, len(numbers), batch_size)]

    def save_form(self, model: Any, data: Any, path: Path) -> None:
        """A pipeline of diffusers: autoencoder, scheduler and the model's configuration."""
        form.save_pipeline(self._pipeline(model, data), path)

    def _pipeline(self, model: Any, data: Any) -> Any:
        from diffusers import DiTPipeline

        from siamesenorm.hub.pixels import PixelAutoencoder

        pixels = isinstance(data, ImageArrays)
        autoencoder = PixelAutoencoder() if pixels else data.autoencoder().model
        sampler = Noise(self.recipe.diffusion).sampler
        names = dict(enumerate(data.classes))
        pipeline = DiTPipeline(model, autoencoder, sampler, id2label=names)
        pipeline.register_to_config(id2label=names)
        return pipeline

    def show(self, model: Any, data: Any, folder: Path, note: Callable[[str], None]) -> dict[str, Any]:
        """A sheet of samples at each guidance scale, and the Fréchet distance of many to the held-out images."""
        wanted, pipeline = self.recipe.sample, self._pipeline(model, data).to(model.device)

        def draw(labels: list[int], guidance: float) -> np.ndarray:
            return sampling.draw(
                pipeline, labels, steps=wanted.steps, guidance=guidance, sampler=wanted.sampler, seed=self.recipe.seed
            )

        if wanted.per_class:
            classes = data.classes[: pictures.MOST_ROWS]
            note(f"drawing samples at guidance {', '.join(f'{scale:g}' for scale in wanted.guidance)}")
            labels = [label for label in range(len(classes)) for _ in range(wanted.per_class)]
            drawn = [(f"guidance {scale:g}", draw(labels, scale)) for scale in wanted.guidance]
            sheets = [(title, pictures.sheet(made, wanted.per_class)) for title, made in drawn]
            pictures.samples(sheets, classes, folder / SAMPLES)
        if not wanted.distance_images:
            return {}
        note(f"drawing {wanted.distance_images:,} samples for the Fréchet distance")
        held_out = _images_of(data)
        judge = judge_for(self.recipe, image_size=held_out.image_size, channels=held_out.channels, note=note)
        # As often as they are held out, class by class.
        of = data.validation.labels
        labels = [int(label) for label in of[spread(len(of), wanted.distance_images)]]
        drawn_features = judge.features((draw(labels, 1.0) * 255).round().astype(np.uint8))
        real, trained = (_features(judge, split) for split in (held_out.validation, held_out.train))
        return {
            "frechet_distance": distance(drawn_features, real),
            "frechet_distance_of_training_images": distance(trained, real),
            "frechet_samples": wanted.distance_images,
            "frechet_classifier": str(judge.path),
        }

    def files(self) -> dict[str, str]:
        """As `Task.files`."""
        return {SAMPLES: "samples of each class, at each guidance scale"}

    def report(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Errors and distance."""
        loss = summary["val_loss"]
        lines = [("validation loss", "none" if loss is None else f"{loss:.4f}, squared error")]
        if summary.get("val_variational") is not None:
            lines.append(("bound", f"{summary['val_variational']:.4f} bits per number"))
        if summary.get("frechet_distance") is not None:
            text = (
                f"{summary['frechet_distance']:.2f} between {summary['frechet_samples']:,} samples and the held-out "
                f"images ({summary['frechet_distance_of_training_images']:.2f} for the training images), in the "
                f"features of {summary['frechet_classifier']}; this is not FID"
            )
            lines.append(("Fréchet distance", text))
        return [*lines, ("images", f"{summary['images_source']}, sha256 {summary['images_sha256']}")]

    def next_command(self, path: Path) -> str:
        """Drawing more."""
        return f"siamesenorm sample {path} --guidance {2 if self.recipe.diffusion.label_dropout else 1}"

    def example_loss(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
        """The loss of `example`."""
        sample: Tensor = model(**inputs).sample
        return sample.float().square().mean()


class NoiseObjective(Objective):
    """The squared error of the prediction, a mean over images; and the variational bound, which trains the variance."""

    def __init__(self, noise: Noise, classes: int, device: torch.device, autocast: torch.dtype | None = None) -> None:
        self.noise = noise
        self.classes = classes
        self.device = device
        self.autocast = autocast
        if noise.bound is not None:
            self.names, self.weights = ("loss", "variational"), (1.0, 1.0)

    def prepare(self, batch: Batch) -> Batch:
        """Images between -1 and 1, their noise and time steps, and their labels, some replaced by the null class."""
        x0, labels, recipe = _scaled(batch["images"]), batch["labels"], self.noise.recipe
        noise = torch.randn_like(x0)
        t = torch.randint(recipe.timesteps, (len(x0),), device=x0.device)
        # Once for all blocks, and not drawn anew where a block is run again.
        dropped = torch.rand(len(x0), device=x0.device) < recipe.label_dropout
        return {
            "x0": x0,
            "xt": self.noise.onto(x0, noise, t),
            "noise": noise,
            "t": t,
            "labels": labels.masked_fill(dropped, self.classes),
        }

    def counts(self, batch: Batch) -> Tensor:
        """Images, for both parts."""
        return torch.tensor([len(batch["t"])] * len(self.names), device=self.device)

    def sums(self, forward: Callable[..., Any], micro_batch: Batch) -> list[Tensor]:
        """Both errors."""
        x0, xt, noise, t = (micro_batch[name] for name in ("x0", "xt", "noise", "t"))
        with autocasting(self.device.type, self.autocast):
            out = forward(hidden_states=xt, timestep=t, class_labels=micro_batch["labels"]).sample
        return [part.sum() for part in self.noise.errors(out, x0, xt, noise, t)]


@dataclass(frozen=True)
class LatentBatches:
    """Training latents, each drawn anew from what the autoencoder says of its image.

    Attributes:
        data: the latents.
        workers: processes that read ahead.
    """

    data: LatentArrays
    workers: int = 0

    @property
    def sha256(self) -> str:
        """Of the set."""
        return self.data.sha256

    def __len__(self) -> int:
        return len(self.data.train)

    def batch(self, indices: np.ndarray, generator: torch.Generator) -> Batch:
        """``images`` (batch, channels, height, width), float32, and ``labels`` (batch,)."""
        drawn, labels = self.data.train.batch(indices, generator)
        return {"images": torch.as_tensor(drawn), "labels": torch.as_tensor(labels)}


def _scaled(images: Tensor) -> Tensor:
    """Bytes to numbers between -1 and 1; latents are as they should be."""
    return images.float() / 127.5 - 1 if images.dtype == torch.uint8 else images


def _shape(data: Any) -> tuple[int, int]:
    """Channels and side of what the model sees."""
    if isinstance(data, ImageArrays):
        return data.channels, data.image_size
    channels, height, width = data.latent_shape
    if height != width:
        raise ConfigError(f"the latents in {data.source} are {height}×{width}; the model needs squares")
    return channels, height


def _held_out_batch(data: Any, indices: np.ndarray, generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
    if isinstance(data, ImageArrays):
        pixels, labels = data.validation.batch(indices)
        return _scaled(torch.from_numpy(pixels)), torch.from_numpy(labels)
    # One by one, so that what is drawn does not depend on what it is drawn with.
    found = [data.validation.batch([int(index)], each) for index, each in zip(indices, generators, strict=True)]
    return (
        torch.cat([torch.as_tensor(drawn) for drawn, _ in found]),
        torch.cat([torch.as_tensor(labels) for _, labels in found]),
    )


def _images_of(data: Any) -> ImageArrays:
    """The images, also those that latents were made of."""
    if isinstance(data, ImageArrays):
        return data
    encoded, arguments = data.encoded, data.facts.get("arguments") or {}
    found = images.prepare(
        encoded.source,
        image_size=encoded.image_size,
        channels=encoded.image_channels,
        crop_fraction=arguments.get("crop_fraction", 1.0),
    )
    if found.sha256 != encoded.source_sha256:
        raise ConfigError(
            f"the latents in {data.source} were made of other images than there are now in {encoded.source}, or of "
            "another split of them, so the Fréchet distance to those held out cannot be told: "
            "sample.distance_images=0"
        )
    return found


def _features(judge: Judge, split: Any) -> np.ndarray:
    # Part by part, for all images of a set may be more than memory holds.
    parts = (np.arange(start, min(start + 512, len(split))) for start in range(0, len(split), 512))
    return np.concatenate([judge.features(split.batch(part)[0].transpose(0, 2, 3, 1)) for part in parts])
