"""Latents of images on disk, the one place that knows their format.

A folder of latents holds ``train-00000.safetensors``, ``train-00001.safetensors`` … and
``validation-00000.safetensors`` …, and ``latents.json``, which is written last: a folder without it is not finished. A
shard has, for each of its images,

- ``mean``: what the encoder gave, (images, channels, height, width), float16 or float32;
- ``logvar``: the logarithm of the variance around it, of the same shape; only where the autoencoder is variational;
- ``mean_flipped``, ``logvar_flipped``: the same for the image flipped from left to right; only with ``--flip``;
- ``labels``: int64, (images,).

Latents are stored as the encoder gives them. They are sampled, shifted and scaled when they are read, in
`LatentSplit.batch`. The autoencoder itself is not copied: its name (for a local folder its absolute path), its config
and a fingerprint of that and of its weights are written down, and `LatentArrays.autoencoder` loads it again and
compares them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from siamesenorm.data import autoencoders
from siamesenorm.data.arrays import cache_root, check_memory
from siamesenorm.data.files import check_once, write_whole
from siamesenorm.hub import checks
from siamesenorm.residual import ConfigError

if TYPE_CHECKING:
    from siamesenorm.data.autoencoders import Autoencoder

META = "latents.json"
# There while a folder is being filled.
PROGRESS = "latents-progress.json"
FORMAT = 1
SUFFIX = ".safetensors"
DTYPES = {"float16": np.float16, "float32": np.float32}
_STORED = {"F16": np.float16, "F32": np.float32, "I64": np.int64}

_ANEW = "delete the folder and encode the images anew"


@dataclass(frozen=True)
class Shard:
    """One file: its name, its images, its size in bytes and the SHA-256 of its bytes."""

    file: str
    images: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Encoded:
    """All that a folder says of its latents, but for the shards.

    ``shift`` and ``scale`` have one number for each channel: training sees ``(latent - shift) * scale``.
    ``variational`` says whether there are variances, ``flip`` whether there are latents of flipped images.
    ``autoencoder_sha256`` is its fingerprint; ``source_sha256`` is that of the images, and ``unreadable`` the number of
    those that were left out.
    """

    source: str
    source_sha256: str
    classes: tuple[str, ...]
    unreadable: int
    image_size: int
    image_channels: int
    latent_shape: tuple[int, int, int]
    dtype: str
    variational: bool
    flip: bool
    shift: tuple[float, ...]
    scale: tuple[float, ...]
    autoencoder: str
    autoencoder_subfolder: str
    autoencoder_class: str
    autoencoder_config: Mapping[str, Any]
    autoencoder_sha256: str

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of a shard's tensors, but for the labels."""
        names = ("mean", "logvar") if self.variational else ("mean",)
        return names + tuple(f"{name}_flipped" for name in names) if self.flip else names

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ValueError: saying what.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"the dtype {self.dtype!r}")
        if len(self.latent_shape) != 3 or min(self.latent_shape) < 1:
            raise ValueError(f"the latent shape {self.latent_shape}")
        if not len(self.shift) == len(self.scale) == self.latent_shape[0]:
            raise ValueError(
                f"{len(self.shift)} shifts and {len(self.scale)} scales for {self.latent_shape[0]} channels"
            )


class LatentSplit:
    """One side of the split: latents by number, in the order of the images. It can be pickled."""

    def __init__(self, folder: Path, shards: Sequence[Shard], encoded: Encoded) -> None:
        self.shards = tuple(shards)
        self._folder, self._encoded = folder, encoded
        self._ends = np.cumsum([shard.images for shard in shards])
        self._opened: dict[int, dict[str, np.ndarray]] = {}
        self.labels: np.ndarray = np.concatenate([self._tensors(index)["labels"] for index in range(len(shards))])

    def __getstate__(self) -> dict[str, Any]:
        # A mapped file would be pickled with all that is in it.
        return {**self.__dict__, "_opened": {}}

    def __len__(self) -> int:
        return len(self.labels)

    def _tensors(self, index: int) -> dict[str, np.ndarray]:
        if index not in self._opened:
            self._opened[index] = _mapped(self._folder / self.shards[index].file)
        return self._opened[index]

    def batch(
        self, indices: Sequence[int] | np.ndarray, generator: torch.Generator | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Latents as a model is to see them, and labels, by number; as in numpy counted from the end where negative.

        Args:
            indices: the numbers.
            generator: on the CPU. It chooses for each image whether the flipped one is taken, where there are such, and
                then a sample from each latent's distribution, where there are variances. Without one it is the image as
                it is, and the mean.

        Returns:
            float32 of shape (n, channels, height, width), shifted and scaled, and int64 of shape (n,).

        Raises:
            IndexError: for a number that there is no image of.
        """
        asked = np.asarray(indices, dtype=np.int64)
        labels = self.labels[asked]
        asked = asked % max(len(self), 1)
        facts = self._encoded
        flipped = np.zeros(len(asked), dtype=bool)
        if facts.flip and generator is not None:
            flipped = torch.randint(2, (len(asked),), generator=generator).numpy().astype(bool)
        latents = self._gather("mean", asked, flipped)
        if facts.variational and generator is not None:
            noise = torch.randn(latents.shape, generator=generator).numpy()
            latents += np.exp(0.5 * self._gather("logvar", asked, flipped)) * noise
        shift, scale = (np.array(values, np.float32)[:, None, None] for values in (facts.shift, facts.scale))
        return (latents - shift) * scale, labels

    def _gather(self, name: str, asked: np.ndarray, flipped: np.ndarray) -> np.ndarray:
        """One tensor's rows as float32."""
        out = np.empty((len(asked), *self._encoded.latent_shape), np.float32)
        shards = np.searchsorted(self._ends, asked, side="right")
        for index in np.unique(shards):
            tensors, start = self._tensors(int(index)), self._ends[index] - self.shards[index].images
            for kind, chosen in ((name, ~flipped), (f"{name}_flipped", flipped)):
                at = np.flatnonzero((shards == index) & chosen)
                if len(at):
                    out[at] = tensors[kind][asked[at] - start]
        return out


@dataclass(frozen=True)
class LatentArrays:
    """Latents of labelled images, to train on and to validate on.

    A label is an index into ``encoded.classes``. ``sha256`` is a fingerprint of all that training sees. ``facts`` is
    whatever else the one who encoded the images wrote down.
    """

    folder: Path
    sha256: str
    encoded: Encoded
    train: LatentSplit
    validation: LatentSplit
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """What a recipe calls them: their folder."""
        return str(self.folder)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.encoded.classes

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.encoded.latent_shape

    def autoencoder(self, device: str = "cpu") -> Autoencoder:
        """The autoencoder that made these latents, to turn others into images; it must still be where it was.

        Raises:
            ConfigError: where it cannot be loaded, or has become another one.
        """
        encoded = self.encoded
        loaded = autoencoders.load(encoded.autoencoder, encoded.autoencoder_subfolder, device)
        if loaded.sha256 != encoded.autoencoder_sha256:
            raise ConfigError(
                f"the autoencoder {encoded.autoencoder} is not the one that made the latents in {self.folder}"
            )
        return loaded


def is_folder(source: str) -> bool:
    """Whether a source is a folder of latents, finished or not."""
    return any((Path(source) / name).is_file() for name in (META, PROGRESS))


def prepare(folder: str | Path, cache: Path | None = None) -> LatentArrays:
    """A finished folder of latents, checked: that nothing of it is missing, cut short, or changed.

    Args:
        folder: what ``siamesenorm data encode-latents`` made.
        cache: where it is remembered that the shards' content was checked, by default `arrays.cache_root`; big ones are
            read as a whole once, and again only when they have changed.

    Raises:
        ConfigError: where it is no such folder, or is not what it was.
    """
    path = Path(folder).resolve()
    sha256, encoded, shards, facts = read_meta(path)
    if fingerprint(encoded, shards) != sha256:
        raise ConfigError(f"{path / META} has been changed by hand; {_ANEW}")
    check_files(path, shards)
    for shard in (shard for side in shards.values() for shard in side):
        _check_shapes(path / shard.file, shard, encoded)
    known = {path / shard.file: shard for side in shards.values() for shard in side}
    check_once(
        {file: [shard.sha256] for file, shard in known.items()},
        lambda file: _check_content(file, known[file]),
        check_memory(path, cache or cache_root()),
    )
    return opened(path, sha256, encoded, shards, facts)


def opened(
    folder: Path, sha256: str, encoded: Encoded, shards: Mapping[str, Sequence[Shard]], facts: Mapping[str, Any]
) -> LatentArrays:
    """A finished folder whose files have been checked."""
    sides = {name: LatentSplit(folder, shards[name], encoded) for name in ("train", "validation")}
    return LatentArrays(folder, sha256, encoded, sides["train"], sides["validation"], facts)


def fingerprint(encoded: Encoded, shards: Mapping[str, Sequence[Shard]]) -> str:
    """SHA-256 (hexadecimal) over all that training sees, and the autoencoder that belongs to it."""
    facts = {
        **{key: value for key, value in asdict(encoded).items() if key not in _NAMES_ONLY},
        **{name: [asdict(shard) for shard in side] for name, side in shards.items()},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


# The same images and the same autoencoder may lie elsewhere.
_NAMES_ONLY = frozenset({"source", "autoencoder", "autoencoder_subfolder"})


def write_meta(folder: Path, encoded: Encoded, shards: Mapping[str, Sequence[Shard]], facts: Mapping[str, Any]) -> str:
    """Finish a folder: all that `read_meta` gives back.

    Returns:
        The fingerprint.
    """
    sha256 = fingerprint(encoded, shards)
    meta = {
        "format": FORMAT,
        "sha256": sha256,
        **asdict(encoded),
        **facts,
        **{
            name: {"images": sum(shard.images for shard in side), "shards": [asdict(shard) for shard in side]}
            for name, side in shards.items()
        },
    }
    write_whole(folder / META, json.dumps(meta, indent=2) + "\n")
    return sha256


def read_meta(folder: Path) -> tuple[str, Encoded, dict[str, tuple[Shard, ...]], dict[str, Any]]:
    """What a finished folder says of itself: its fingerprint, its latents, its shards and other facts.

    Raises:
        ConfigError: where it is not finished, or its ``latents.json`` is damaged or of a later version.
    """
    path = folder / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(_no_folder(folder)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {_ANEW}") from error
    if isinstance(meta, dict) and isinstance(meta.get("format"), int) and meta["format"] > FORMAT:
        raise ConfigError(f"{folder} was encoded by a later version of siamesenorm: update the package to read it")
    try:
        sha256 = str(meta.pop("sha256"))
        values = {each.name: meta.pop(each.name) for each in fields(Encoded)}
        for name in ("classes", "latent_shape", "shift", "scale"):
            values[name] = tuple(values[name])
        encoded = Encoded(**values)
        encoded.check()
        shards = {name: _shards(meta.pop(name)["shards"]) for name in ("train", "validation")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {type(error).__name__} at {error}; {_ANEW}") from error
    return sha256, encoded, shards, {key: value for key, value in meta.items() if key != "format"}


def _no_folder(folder: Path) -> str:
    if (folder / PROGRESS).exists():
        return f"the encoding into {folder} has not finished; the command that began it goes on with it"
    if folder.exists():
        return f"{folder} holds no latents; 'siamesenorm data encode-latents' makes a folder of them from images"
    return f"there is no folder {folder}; 'siamesenorm data encode-latents SOURCE --out {folder}' makes one"


def _shards(given: Sequence[Mapping[str, Any]]) -> tuple[Shard, ...]:
    shards = tuple(Shard(**each) for each in given)
    for shard in shards:
        if Path(shard.file).name != shard.file:
            raise ValueError(f"{shard.file!r}, which is no file name")
        if min(shard.images, shard.bytes) < 1:
            raise ValueError(f"{shard.file}, which is empty")
    if not shards:
        raise ValueError("a side without shards")
    return shards


def check_files(folder: Path, shards: Mapping[str, Sequence[Shard]]) -> None:
    """Make sure that every shard is there and of the right length.

    Raises:
        ConfigError: naming the first one that is not.
    """
    for shard in (shard for side in shards.values() for shard in side):
        path = folder / shard.file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"the latents {path} cannot be read: {error.strerror or error}; {_ANEW}") from error
        if size != shard.bytes:
            cut = "have been cut short: they have" if size < shard.bytes else "have"
            raise ConfigError(f"the latents {path} {cut} {size:,} bytes; {shard.bytes:,} were written; {_ANEW}")


def _check_shapes(path: Path, shard: Shard, encoded: Encoded) -> None:
    """Make sure that a shard holds what the folder says: memory is taken by what it says, and mapped by its header."""
    latents = (shard.images, *encoded.latent_shape)
    expected = {**dict.fromkeys(encoded.tensors, latents), "labels": latents[:1]}
    if (found := checks.header(path).shapes) != expected:
        raise ConfigError(f"the latents {path} are {dict(sorted(found.items()))}, not {expected}; {_ANEW}")


def _check_content(path: Path, shard: Shard) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != shard.sha256:
        raise ConfigError(f"the latents {path} have changed since they were encoded; {_ANEW}")


def write_shard(folder: Path, side: str, number: int, tensors: Mapping[str, np.ndarray]) -> Shard:
    """Write a shard so that a crash leaves all of it or nothing that goes by its name.

    Args:
        folder: where.
        side: ``train`` or ``validation``.
        number: of the shard on its side, from 0 on.
        tensors: by the names that this module lists.
    """
    from safetensors.numpy import save

    content = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})
    path = folder / f"{side}-{number:05d}{SUFFIX}"
    write_whole(path, content)
    return Shard(path.name, len(tensors["labels"]), len(content), hashlib.sha256(content).hexdigest())


def clear_shards(folder: Path, kept: Sequence[Shard] = ()) -> None:
    """Take away all shards, finished or not, but those."""
    names = {shard.file for shard in kept}
    for side in ("train", "validation"):
        for path in (*folder.glob(f"{side}-*{SUFFIX}"), *folder.glob(f".{side}-*{SUFFIX}.*")):
            if path.name not in names:
                path.unlink()


def _mapped(path: Path) -> dict[str, np.ndarray]:
    """A shard's tensors, mapped and not read; they lie behind a header of JSON, whose length comes first."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: np.memmap(path, _STORED[each["dtype"]], "r", 8 + length + each["data_offsets"][0], tuple(each["shape"]))
        for name, each in header.items()
    }
