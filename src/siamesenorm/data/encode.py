"""From labelled images to a folder of latents, in steps that a sudden end does not undo.

While a folder is being filled, ``latents-progress.json`` lists the shards that are whole; it is written anew after
each. Who goes on from it encodes the next shard from its first image on. A batch never reaches over a shard's end, so
what comes out does not depend on where an encoding was broken off.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import siamesenorm
from siamesenorm.data import autoencoders, folders, images, latents
from siamesenorm.data.autoencoders import Autoencoder
from siamesenorm.data.images import ImageArrays, ImageSplit, Watcher
from siamesenorm.data.latents import Encoded, LatentArrays, Shard
from siamesenorm.residual import ConfigError, nearest, one_line

_MARKS = (latents.META, latents.PROGRESS)


@dataclass(frozen=True)
class Request:
    """What to encode, and how.

    ``source`` and the last five are as for `images.prepare`, ``autoencoder`` as for `autoencoders.load`. ``device`` is
    one of torch's, None for a GPU where there is one. ``flip`` encodes each image flipped too. A shard holds
    ``shard_size`` images.
    """

    source: str
    autoencoder: str
    image_size: int
    batch_size: int = 32
    device: str | None = None
    flip: bool = False
    dtype: str = "float16"
    shard_size: int = 4096
    validation_fraction: float | None = None
    crop_fraction: float = 1.0
    unreadable: str = "skip"
    image_column: str | None = None
    label_column: str | None = None

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            ConfigError: naming the option.
        """
        for name in ("image_size", "batch_size", "shard_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in latents.DTYPES:
            raise ConfigError(f"unknown --dtype {self.dtype!r}; {nearest(self.dtype, latents.DTYPES)}")

    def chosen_device(self) -> torch.device:
        """Where the autoencoder runs.

        Raises:
            ConfigError: where there is no such device.
        """
        name = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error
        return device


@dataclass(frozen=True)
class Done:
    """How `encode` ended: ``status`` is ``finished`` or ``already finished``; seconds are this session's."""

    status: str
    arrays: LatentArrays
    seconds: float

    def summary(self) -> dict[str, Any]:
        """What there is now."""
        arrays, encoded = self.arrays, self.arrays.encoded
        sides = {"train": arrays.train, "validation": arrays.validation}
        return {
            "status": self.status,
            "out": str(arrays.folder),
            "classes": len(encoded.classes),
            "unreadable": encoded.unreadable,
            **{name: {"images": len(side), "shards": len(side.shards)} for name, side in sides.items()},
            "bytes": sum(shard.bytes for side in sides.values() for shard in side.shards),
            "image_size": encoded.image_size,
            "latent_shape": list(encoded.latent_shape),
            "dtype": encoded.dtype,
            "variational": encoded.variational,
            "flip": encoded.flip,
            "autoencoder": encoded.autoencoder,
            "autoencoder_class": encoded.autoencoder_class,
            "shift": list(encoded.shift),
            "scale": list(encoded.scale),
            "sha256": arrays.sha256,
            "seconds": round(self.seconds, 3),
        }


def encode(request: Request, out: Path, watcher: Watcher, cache: Path | None = None) -> Done:
    """Fill a folder, going on where an earlier session of the same request stopped.

    Args:
        request: what to encode.
        out: the folder, new, empty, or of the same request.
        watcher: shown what happens.
        cache: as for `images.prepare`.

    Raises:
        ConfigError: for all that is wrong with the request, the images, the autoencoder or the folder. What was
            finished stays, and the same request goes on with it.
    """
    request.check()
    started = time.perf_counter()
    folders.check(out, _MARKS, "latents")
    if Path(request.source).is_dir() and out.resolve().is_relative_to(Path(request.source).resolve()):
        raise ConfigError(f"--out {out} lies in the source {request.source}; choose another --out")
    device = request.chosen_device()
    autoencoder = autoencoders.load(request.autoencoder, device=str(device))
    if autoencoder.channels not in (1, 3):
        raise ConfigError(
            f"the autoencoder {request.autoencoder} takes images of {autoencoder.channels} channels, not 1 or 3"
        )
    found = images.prepare(
        request.source,
        image_size=request.image_size,
        channels=autoencoder.channels,
        validation_fraction=request.validation_fraction,
        crop_fraction=request.crop_fraction,
        unreadable=request.unreadable,
        image_column=request.image_column,
        label_column=request.label_column,
        cache=cache,
        watcher=watcher,
    )
    arguments = _arguments(request, found, autoencoder, device)
    with folders.claimed(out, "encoding into"):
        for path in folders.half_written(out, _MARKS):
            path.unlink()
        if (out / latents.META).exists():
            sha256, encoded, shards, facts = latents.read_meta(out)
            _require_equal(out, facts.get("arguments") or {}, arguments)
            latents.check_files(out, shards)
            (out / latents.PROGRESS).unlink(missing_ok=True)
            arrays = latents.opened(out, sha256, encoded, shards, facts)
            return Done("already finished", arrays, time.perf_counter() - started)
        job = _Job(request, arguments, found, autoencoder, device, out, watcher)
        try:
            arrays = job.run()
        except OSError as error:
            raise ConfigError(
                f"writing to {out} failed: {error.strerror or error}; what was finished stays, and the same command "
                "goes on from there"
            ) from error
        finally:
            watcher.end()
        return Done("finished", arrays, time.perf_counter() - started)


def _arguments(request: Request, found: ImageArrays, autoencoder: Autoencoder, device: torch.device) -> dict[str, Any]:
    """All that decides what the files hold, by the options' names where there are such."""
    return {
        "source": request.source,
        "source_sha256": found.sha256,
        "autoencoder": autoencoder.name,
        "autoencoder_sha256": autoencoder.sha256,
        "image_size": request.image_size,
        "crop_fraction": request.crop_fraction,
        # Sums in another order are other sums, in their last digit.
        "batch_size": request.batch_size,
        "device": device.type,
        "flip": request.flip,
        "dtype": request.dtype,
        "shard_size": request.shard_size,
    }


class _Job:
    """One session of an encoding, in a folder that is its own."""

    def __init__(
        self,
        request: Request,
        arguments: Mapping[str, Any],
        found: ImageArrays,
        autoencoder: Autoencoder,
        device: torch.device,
        out: Path,
        watcher: Watcher,
    ) -> None:
        self.request, self.arguments, self.out, self.watcher = request, arguments, out, watcher
        self.images, self.autoencoder, self.device = found, autoencoder, device
        self.sides: dict[str, ImageSplit] = {"train": found.train, "validation": found.validation}
        self.shards: dict[str, list[Shard]] = {name: [] for name in self.sides}
        self.encoded_now = 0

    def run(self) -> LatentArrays:
        """All that is left to do."""
        self._resume()
        try:
            described = self._describe()
            self._commit()
            self.watcher.begin("encoding", sum(map(len, self.sides.values())))
            for name in self.sides:
                self._encode(name, described)
            return self._finish(described)
        except (ConfigError, OSError):
            if not self.done:
                # Nothing is lost, and the next try may have other arguments.
                latents.clear_shards(self.out)
                (self.out / latents.PROGRESS).unlink(missing_ok=True)
            raise

    @property
    def done(self) -> int:
        """Images in shards that are whole."""
        return sum(shard.images for side in self.shards.values() for shard in side)

    def _resume(self) -> None:
        """Go back to what was committed; whatever was written later is taken away."""
        path = self.out / latents.PROGRESS
        if path.exists():
            try:
                progress = json.loads(path.read_text(encoding="utf-8"))
                found = {name: [Shard(**each) for each in progress["shards"][name]] for name in self.sides}
                if any(found.values()):
                    _require_equal(self.out, progress["arguments"], self.arguments)
                    self.shards = found
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"{path} is damaged ({error}); delete {self.out} and encode the images anew"
                ) from error
            latents.check_files(self.out, self.shards)
            if self.done:
                self.watcher.note(f"going on after {self.done:,} images")
        latents.clear_shards(self.out, [shard for side in self.shards.values() for shard in side])

    def _describe(self) -> Encoded:
        """What the latents will be like, found by encoding an empty image."""
        size, channels = self.request.image_size, self.autoencoder.channels
        mean, logvar = self._call(torch.zeros(1, channels, size, size, device=self.device))
        if mean.dim() != 4:
            raise ConfigError(
                f"the autoencoder {self.autoencoder.name} ({self.autoencoder.kind}) gives latents of shape "
                f"{tuple(mean.shape[1:])}, not (channels, height, width); it is not one for images"
            )
        shape = (mean.shape[1], mean.shape[2], mean.shape[3])
        if size % shape[1] or size % shape[2]:
            raise ConfigError(
                f"--image-size {size} does not fit the autoencoder {self.autoencoder.name}: its latents are "
                f"{shape[1]} × {shape[2]}; take a multiple of {round(size / shape[1])}"
            )
        shift, scale = self.autoencoder.normalisation(shape[0], variational=logvar is not None)
        return Encoded(
            source=self.request.source,
            source_sha256=self.images.sha256,
            classes=self.images.classes,
            unreadable=len(self.images.unreadable),
            image_size=size,
            image_channels=channels,
            latent_shape=shape,
            dtype=self.request.dtype,
            variational=logvar is not None,
            flip=self.request.flip,
            shift=tuple(shift),
            scale=tuple(scale),
            autoencoder=self.autoencoder.name,
            autoencoder_subfolder=self.autoencoder.subfolder,
            autoencoder_class=self.autoencoder.kind,
            autoencoder_config=self.autoencoder.config,
            autoencoder_sha256=self.autoencoder.sha256,
        )

    def _call(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        try:
            # The same sums in the same order each time.
            with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
                return self.autoencoder.encode(batch)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the device {self.device} has too little memory for {len(batch)} images at once; give a smaller "
                "--batch-size"
            ) from error
        except Exception as error:  # each class has errors of its own for what it does not take
            size = self.request.image_size
            raise ConfigError(
                f"the autoencoder {self.autoencoder.name} ({self.autoencoder.kind}) cannot encode images of {size} × "
                f"{size}: {one_line(error)}"
            ) from error

    def _encode(self, name: str, described: Encoded) -> None:
        """The rest of one side."""
        split, size = self.sides[name], self.request.shard_size
        for number in range(len(self.shards[name]), math.ceil(len(split) / size)):
            tensors = self._shard(split, range(number * size, min((number + 1) * size, len(split))), described)
            self.shards[name].append(latents.write_shard(self.out, name, number, tensors))
            self._commit()

    def _shard(self, split: ImageSplit, numbers: range, described: Encoded) -> dict[str, np.ndarray]:
        kind = latents.DTYPES[described.dtype]
        tensors = {key: np.empty((len(numbers), *described.latent_shape), kind) for key in described.tensors}
        tensors["labels"] = split.labels[numbers.start : numbers.stop]
        at = 0
        size = self.request.batch_size
        for pixels in _ahead(split, [numbers[start : start + size] for start in range(0, len(numbers), size)]):
            batch = torch.from_numpy(pixels).to(self.device).float() / 127.5 - 1
            for suffix, each in (("", batch), ("_flipped", batch.flip(-1)))[: 1 + described.flip]:
                for key, found in zip(("mean", "logvar"), self._call(each), strict=True):
                    if found is not None:
                        with np.errstate(over="ignore"):  # found out below, with the image's name
                            stored = found.float().cpu().numpy().astype(kind)
                        self._require_finite(stored, found, split, numbers.start + at)
                        tensors[key + suffix][at : at + len(stored)] = stored
            at += len(pixels)
            self.encoded_now += len(pixels)
            self.watcher.show_images(self.done + at, self.encoded_now)
        return tensors

    def _require_finite(self, stored: np.ndarray, found: torch.Tensor, split: ImageSplit, first: int) -> None:
        good = np.isfinite(stored).all(axis=(1, 2, 3))
        if good.all():
            return
        where = split.where(first + int(np.argmin(good)))
        if torch.isfinite(found).all():
            raise ConfigError(f"the latents of {where} are too large for float16; give --dtype float32")
        raise ConfigError(f"the autoencoder {self.autoencoder.name} gives latents that are not finite for {where}")

    def _commit(self) -> None:
        progress = {
            "format": latents.FORMAT,
            "arguments": dict(self.arguments),
            "shards": {name: [asdict(shard) for shard in side] for name, side in self.shards.items()},
        }
        latents.write_whole(self.out / latents.PROGRESS, json.dumps(progress, indent=2) + "\n")

    def _finish(self, described: Encoded) -> LatentArrays:
        facts = {"arguments": dict(self.arguments), "version": siamesenorm.__version__}
        sha256 = latents.write_meta(self.out, described, self.shards, facts)
        (self.out / latents.PROGRESS).unlink()
        return latents.opened(self.out, sha256, described, self.shards, facts)


def _ahead(split: ImageSplit, batches: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
    """The images of each batch, the next one being decoded while one is used."""
    with ThreadPoolExecutor(1) as pool:
        coming = None
        for numbers in batches:
            here, coming = coming, pool.submit(split.batch, numbers)
            if here is not None:
                yield here.result()[0]
        if coming is not None:
            yield coming.result()[0]


def _require_equal(out: Path, there: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse to take one encoding for another; where images and autoencoder lie may differ, but not what they are."""
    ignored = set()
    for name in ("source", "autoencoder"):
        content = f"{name}_sha256"
        ignored.add(content)
        if there.get(content) == asked[content]:
            ignored.add(name)
        elif there.get(name) == asked[name]:
            raise ConfigError(
                f"the {name} {asked[name]} has changed since the encoding into {out} began; choose another --out, or "
                "delete that folder"
            )
    differing = folders.differences(there, asked, ignored)
    if differing:
        raise ConfigError(
            "\n".join([f"{out} is encoded with other arguments; choose another --out. What differs:", *differing])
        )
