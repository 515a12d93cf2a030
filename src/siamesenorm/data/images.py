"""Labelled images as the training code reads them: two sides of a split, of one size, in an order that never changes.

Nothing here is random: crops, flips and other augmentation are the training's, on arrays or on `ImageSplit.image`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from siamesenorm.data import digits, pixels
from siamesenorm.data.arrays import cache_root
from siamesenorm.data.files import write_whole
from siamesenorm.data.image_sources import Columns, ImageSource, Pictures, open_source
from siamesenorm.data.pixels import Form, UnreadableError
from siamesenorm.data.sources import needed
from siamesenorm.residual import ConfigError, nearest

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
R = TypeVar("R")

UNREADABLE = ("skip", "error")

# Raise it when an unchanged image would be judged differently.
_FORMAT = 1
# Images of a split are kept decoded where they take no more than this.
_KEPT_BYTES = 256 << 20
_SCANNED_AT_ONCE = 512
_MOST_THREADS = 16
_NAMED = 10
# What is done sooner is not worth a display.
_QUIET_SECONDS = 1.0


class Watcher(Protocol):
    """What the person who waits is told."""

    def note(self, message: str) -> None:
        """Something worth one line."""

    def begin(self, what: str, total: int | None) -> None:
        """Going through so many images starts."""

    def show_images(self, done: int, images: int) -> None:
        """How many of them are done, and how many of those in this session."""

    def end(self) -> None:
        """It is over, for whatever reason."""


class ImageSplit:
    """One side of the split: images by number, sorted by class, then by name (or row). It can be pickled."""

    def __init__(self, pictures: Pictures, rows: np.ndarray, form: Form) -> None:
        self._pictures, self._rows, self._form = pictures, rows, form
        self.labels: np.ndarray = pictures.labels[rows]
        self._shape = (form.channels, form.size, form.size)
        self._keeps = len(rows) * int(np.prod(self._shape)) <= _KEPT_BYTES
        self._kept: np.ndarray | None = None
        self._is_kept = np.zeros(len(self._rows) if self._keeps else 0, dtype=bool)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None, "_is_kept": np.zeros_like(self._is_kept)}

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        """Where an image comes from: its file, or the row of a table."""
        return self._pictures.where(int(self._rows[index]))

    def image(self, index: int) -> Image:
        """An image in the size that it has, upright, in mode L or RGB: what a random crop starts from.

        Raises:
            ConfigError: where it has become unreadable since the source was looked through.
        """
        return pixels.convert(self._decoded(index), self._form.channels)

    def _decoded(self, index: int) -> Image:
        row = int(self._rows[index])
        try:
            return pixels.decode(self._pictures.content(row))
        except (UnreadableError, OSError) as error:
            raise ConfigError(
                f"the image {self._pictures.where(row)} could be read when the run began, and no longer can: "
                f"{_words(error)}"
            ) from error

    def _array(self, index: int) -> np.ndarray:
        return self._form.array(self._decoded(index))

    def batch(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images and labels by number, as in numpy counted from the end where negative.

        Returns:
            uint8 of shape (n, channels, size, size) and int64 of shape (n,), the caller's own.

        Raises:
            IndexError: for a number that there is no image of.
            ConfigError: where an image has become unreadable since the source was looked through.
        """
        asked = np.asarray(indices, dtype=np.int64)
        labels = self.labels[asked]
        if not self._keeps:
            found = _mapped(self._array, asked.tolist())
            return np.stack(found) if found else np.empty((0, *self._shape), np.uint8), labels
        if self._kept is None:
            self._kept = np.empty((len(self), *self._shape), np.uint8)
        missing = np.unique(asked[~self._is_kept[asked]])
        found = _mapped(self._array, missing.tolist())
        for index, array in zip(missing, found, strict=True):
            self._kept[index] = array
        self._is_kept[missing] = True
        return self._kept[asked], labels


@dataclass(frozen=True)
class ImageArrays:
    """Labelled images to train on and to validate on.

    A label is an index into ``classes``. ``sha256`` is a fingerprint of the images' files, their labels and the split;
    what size they are prepared in is no part of it. ``unreadable`` says of each image that was left out where it is and
    why.
    """

    source: str
    classes: tuple[str, ...]
    sha256: str
    image_size: int
    channels: int
    train: ImageSplit
    validation: ImageSplit
    unreadable: tuple[str, ...] = ()


def prepare(
    source: str = digits.NAME,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    validation_fraction: float | None = None,
    crop_fraction: float = 1.0,
    unreadable: str = "skip",
    image_column: str | None = None,
    label_column: str | None = None,
    cache: Path | None = None,
    watcher: Watcher | None = None,
) -> ImageArrays:
    """Labelled images by what a recipe calls them.

    Every image is read and checked once; what was found is remembered in the cache until the image's file changes, also
    where the looking through was broken off. Several processes let one of them do this and pass on what it returns.

    Args:
        source: ``digits``; a folder of class folders (``DIR/CLASS/…``, or ``DIR/train/CLASS/…`` and ``DIR/val/…``);
            Parquet files, or a folder of them, with a column of images and one of labels; the folder of a saved
            Hugging Face dataset; ``hf:NAME`` or ``hf:NAME:CONFIG`` for one that ``datasets.load_dataset`` loads.
        image_size: the side of the square that images are made, by default that of all images (``digits``).
        channels: 1 or 3, by default 1 for ``digits`` and 3 for all others.
        validation_fraction: the share of each class that is held out where the source has no split of its own, by
            default 0.2 of ``digits`` and 0.1 of all others. A hash of the images' names (of their content where they
            have none) chooses them, so every run holds out the same. A class of one image is only trained on.
        crop_fraction: the share of an image's short side that is kept; see `pixels.Form`.
        unreadable: ``skip`` names, counts and leaves out images that cannot be read; ``error`` stops at the first.
        image_column: in a table, by default the column of images.
        label_column: in a table, by default the column of class labels, or the one named ``label``.
        cache: where what was found is remembered, by default `arrays.cache_root`.
        watcher: told what happens, by default on stderr.

    Raises:
        ConfigError: for a source that there is none of or that cannot be read; for labels that are missing, out of
            range or not the same on both sides; for a class without an image; for arguments that make no sense.
    """
    _require_sensible(image_size, channels, validation_fraction, crop_fraction, unreadable)
    needed("PIL")
    if watcher is None:
        from siamesenorm.data.progress import for_terminal

        watcher = for_terminal()
    found = _open(source, Columns(image_column, label_column))
    if found.validation is not None and validation_fraction is not None:
        raise ConfigError(f"{source} has a validation split of its own; validation_fraction is for those without one")
    size = image_size or found.size
    if size is None:
        raise ConfigError(f"the images of {source} are of many sizes; image_size says which one to make them")
    form = _form(found, size, channels, crop_fraction)
    for note in found.notes:
        watcher.note(note)

    sides = [found.train] if found.validation is None else [found.train, found.validation]
    scans = [_scan(side, cache or cache_root(), watcher, strict=unreadable == "error") for side in sides]
    messages = tuple(message for scan in scans for message in scan.messages())
    _tell(messages, sum(map(len, sides)), watcher)
    for scan in scans:
        scan.require_every_class(found.classes, source)
    if found.validation is None:
        fraction = found.validation_fraction if validation_fraction is None else validation_fraction
        parts = _split(scans[0], fraction, source)
    else:
        parts = [(scan, scan.readable()) for scan in scans]
    train, validation = (ImageSplit(scan.pictures, rows, form) for scan, rows in parts)
    return ImageArrays(
        source=source,
        classes=found.classes,
        sha256=_fingerprint(found.classes, parts),
        image_size=size,
        channels=form.channels,
        train=train,
        validation=validation,
        unreadable=messages,
    )


def _require_sensible(
    image_size: int | None,
    channels: int | None,
    validation_fraction: float | None,
    crop_fraction: float,
    unreadable: str,
) -> None:
    if image_size is not None and image_size < 1:
        raise ConfigError(f"image_size must be at least 1, not {image_size}")
    if channels not in (None, 1, 3):
        raise ConfigError(f"channels must be 1 (grey) or 3 (red, green, blue), not {channels}")
    if validation_fraction is not None and not 0 < validation_fraction < 1:
        raise ConfigError(f"validation_fraction must be between 0 and 1, not {validation_fraction}")
    if not 0 < crop_fraction <= 1:
        raise ConfigError(f"crop_fraction must be above 0 and at most 1, not {crop_fraction}")
    if unreadable not in UNREADABLE:
        raise ConfigError(f"unknown value {unreadable!r} of unreadable; {nearest(unreadable, UNREADABLE)}")


def _open(source: str, columns: Columns) -> ImageSource:
    if source != digits.NAME:
        return open_source(source, columns)
    if columns != Columns():
        raise ConfigError(f"'{digits.NAME}' is no table; image and label columns are for tables")
    return digits.source()


def _form(found: ImageSource, size: int, channels: int | None, crop_fraction: float) -> Form:
    from PIL.Image import Resampling

    return Form(size, channels or found.channels, crop_fraction, found.resampling or Resampling.BICUBIC)


@dataclass(frozen=True)
class _Scan:
    """What was found in pictures: the SHA-256 of each, uint8 of shape (images, 32), and what is wrong with some."""

    pictures: Pictures
    digests: np.ndarray
    faults: dict[int, str] = field(default_factory=dict)

    def readable(self) -> np.ndarray:
        """The numbers of those that can be read."""
        return np.setdiff1d(np.arange(len(self.digests)), list(self.faults))

    def messages(self) -> list[str]:
        """One for each fault."""
        return [f"{self.pictures.where(index)}: {fault}" for index, fault in sorted(self.faults.items())]

    def require_every_class(self, classes: Sequence[str], source: str) -> None:
        """Refuse a class that has images none of which can be read."""
        labels = self.pictures.labels
        gone = np.setdiff1d(labels, labels[self.readable()])
        if len(gone):
            index = next(index for index in sorted(self.faults) if labels[index] == gone[0])
            raise ConfigError(
                f"no image of the class '{classes[gone[0]]}' of {source} can be read; the first is "
                f"{self.pictures.where(index)}: {self.faults[index]}"
            )


@dataclass(frozen=True)
class _Found:
    """What one picture is: the SHA-256 of its bytes, and what is wrong with it. ``lasting`` as long as the bytes do."""

    sha256: bytes
    fault: str | None
    lasting: bool = True


def _scan(pictures: Pictures, cache: Path, watcher: Watcher, *, strict: bool) -> _Scan:
    """Read and check what has not been before."""
    memory = _Memory(cache, pictures.identity)
    scan = _Scan(pictures, np.zeros((len(pictures), 32), np.uint8))

    def take(index: int, found: _Found) -> None:
        scan.digests[index] = np.frombuffer(found.sha256, np.uint8)
        if found.fault is None:
            return
        if strict:
            raise ConfigError(f"{pictures.where(index)}: {found.fault}; unreadable=skip leaves out such images")
        scan.faults[index] = found.fault

    keys = [(pictures.name(index) or pictures.where(index), pictures.stamp(index)) for index in range(len(pictures))]
    missing = []
    for index, key in enumerate(keys):
        known = memory.recall(*key)
        if known is None:
            missing.append(index)
        else:
            take(index, known)
    if not missing:
        return scan
    started, shown_from, done = time.monotonic(), None, 0
    try:
        for some in _pieces(missing, _SCANNED_AT_ONCE):
            judged = _mapped(lambda index: _judge(pictures, index), some)
            memory.add([(*keys[index], found) for index, found in zip(some, judged, strict=True)])
            for index, found in zip(some, judged, strict=True):
                take(index, found)
            done += len(some)
            if shown_from is None and done < len(missing) and time.monotonic() - started > _QUIET_SECONDS:
                watcher.begin("looking through the images", len(missing))
                shown_from = done
            if shown_from is not None:
                watcher.show_images(done, done - shown_from)
        memory.tidy()
    finally:
        if shown_from is not None:
            watcher.end()
    return scan


def _judge(pictures: Pictures, index: int) -> _Found:
    try:
        content = pictures.content(index)
    except OSError as error:
        return _Found(bytes(32), _words(error), lasting=False)
    digest = hashlib.sha256(content).digest()
    try:
        pixels.check(content)
    except UnreadableError as error:
        return _Found(digest, _words(error))
    return _Found(digest, None)


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


class _Memory:
    """What earlier scans found, in a file that each piece of a scan is added to, one JSON list a line."""

    def __init__(self, cache: Path, identity: str | None) -> None:
        self._path: Path | None = None
        self._known: dict[str, tuple[str, str, str | None]] = {}
        self._lines = 0
        if identity is None:
            return
        import PIL

        # Another version of Pillow may read what this one cannot.
        key = hashlib.sha256(f"{_FORMAT} {PIL.__version__} {identity}".encode("utf-8", "surrogateescape"))
        self._path = cache / "images" / f"{key.hexdigest()[:16]}.jsonl"
        with suppress(OSError):
            for line in filter(None, self._path.read_bytes().split(b"\n")):
                self._lines += 1
                # A killed process may have left part of a line.
                with suppress(ValueError, TypeError):
                    name, stamp, sha256, fault = json.loads(line)
                    self._known[name] = (stamp, sha256, fault)

    def recall(self, name: str, stamp: str | None) -> _Found | None:
        """What was found in the picture of this name and stamp."""
        known = self._known.get(name)
        if stamp is None or known is None or known[0] != stamp:
            return None
        with suppress(ValueError, TypeError):
            sha256 = bytes.fromhex(known[1])
            if len(sha256) == hashlib.sha256().digest_size:
                return _Found(sha256, known[2])
        return None

    def add(self, found: Iterable[tuple[str, str | None, _Found]]) -> None:
        """Remember more."""
        new = {
            name: (stamp, each.sha256.hex(), each.fault)
            for name, stamp, each in found
            if stamp is not None and each.lasting
        }
        if self._path is None or not new:
            return
        self._known.update(new)
        self._lines += len(new)
        # Without a memory the next start only takes longer.
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write(_lines(new))

    def tidy(self) -> None:
        """Drop what has been replaced by something newer."""
        if self._path is not None and self._lines > len(self._known):
            with suppress(OSError):
                write_whole(self._path, _lines(self._known))


def _lines(known: Mapping[str, Sequence[Any]]) -> bytes:
    # The first line break ends whatever part of a line a killed process has left.
    return "\n".join(["", *(json.dumps([name, *facts]) for name, facts in known.items()), ""]).encode()


def _tell(messages: Sequence[str], images: int, watcher: Watcher) -> None:
    for message in messages[:_NAMED]:
        watcher.note(f"left out: {message}")
    if messages:
        watcher.note(f"unreadable and left out: {len(messages):,} of {images:,} images")


def _split(scan: _Scan, fraction: float, source: str) -> list[tuple[_Scan, np.ndarray]]:
    """Hold out the images of each class that have the smallest hashes, but never all of them.

    Returns:
        What to train on and what to validate on, as numbers of pictures.
    """
    rows = scan.readable()
    labels = scan.pictures.labels[rows]
    keys = [_hash(scan, int(row)) for row in rows]
    order = np.array(sorted(range(len(rows)), key=lambda at: (labels[at], keys[at])))
    held_out = np.zeros(len(rows), dtype=bool)
    ends = np.cumsum(np.bincount(labels))
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        count = min(max(round(fraction * (end - start)), 1), end - start - 1)
        held_out[order[start : start + count]] = True
    if not held_out.any():
        raise ConfigError(f"each class of {source} has a single image, so none can be held out to validate on")
    return [(scan, rows[~held_out]), (scan, rows[held_out])]


def _hash(scan: _Scan, index: int) -> bytes:
    name = scan.pictures.name(index)
    if name is None:
        return scan.digests[index].tobytes()
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def _fingerprint(classes: Sequence[str], parts: Sequence[tuple[_Scan, np.ndarray]]) -> str:
    """SHA-256 (hexadecimal) over the classes and each side's labels and digests."""
    whole = hashlib.sha256(json.dumps([list(classes), [len(rows) for _, rows in parts]]).encode())
    for scan, rows in parts:
        whole.update(scan.pictures.labels[rows].astype("<i8").tobytes())
        whole.update(scan.digests[rows].tobytes())
    return whole.hexdigest()


def _pieces(items: Sequence[T], length: int) -> Iterator[Sequence[T]]:
    return (items[start : start + length] for start in range(0, len(items), length))


def _mapped(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The function of each item, on several cores where that helps: reading and decoding let go of the interpreter."""
    threads = min(_cores(), _MOST_THREADS, len(items))
    if threads < 2:
        return [function(item) for item in items]
    # A pool of its own for each call, since one that is there at a fork is dead in the child.
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
