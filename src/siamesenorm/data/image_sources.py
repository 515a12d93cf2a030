"""Where labelled images come from: folders of classes, Parquet files, and what Hugging Face's `datasets` reads.

A source gives images as they are encoded, by class and then by name, so that their order never changes. Nothing is
decoded here.
"""

from __future__ import annotations

import glob
import hashlib
import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from siamesenorm.data.sources import SPLITS, needed, split_of, walk
from siamesenorm.residual import ConfigError, nearest, one_line

if TYPE_CHECKING:
    from PIL.Image import Resampling

HUB = "hf:"

# What Pillow reads wherever it is installed; other files in a class folder are left out.
SUFFIXES = (
    ".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
_PARQUET = ".parquet"

# Named in a message; there may be thousands.
_SHOWN = 8


class Pictures(ABC):
    """Encoded images with labels, int64 of shape (images,).

    ``identity`` names them as long as they are the same set, for what is remembered of them; None where nothing is.
    """

    labels: np.ndarray
    identity: str | None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def content(self, index: int) -> bytes:
        """The bytes of an image's file.

        Raises:
            OSError: where they cannot be read.
        """

    @abstractmethod
    def where(self, index: int) -> str:
        """Where an image is, for messages."""

    def name(self, index: int) -> str | None:
        """What an image is called in its set, wherever the set lies; None where it has no name."""
        del index
        return None

    def stamp(self, index: int) -> str | None:
        """What changes when an image does, found without reading it; None where nothing tells."""
        del index
        return None


class Files(Pictures):
    """Images that are files.

    Args:
        root: the folder that their names are relative to.
        names: sorted by class, then by name.
        labels: of each.
        identity: as for all `Pictures`.
        named: whether the names belong to the images, and not to a cache.
    """

    def __init__(
        self, root: Path, names: Sequence[str], labels: Sequence[int] | np.ndarray, identity: str, *, named: bool
    ) -> None:
        # Plain bytes in one block of memory, since there may be millions.
        self._names = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
        self._root, self._named = os.fsencode(root), named
        self.labels = np.asarray(labels, dtype=np.int64)
        self.identity = identity

    def _path(self, index: int) -> bytes:
        return os.path.join(self._root, self._names[index])

    def content(self, index: int) -> bytes:
        """The file's bytes."""
        with open(self._path(index), "rb") as file:
            return file.read()

    def where(self, index: int) -> str:
        """The file's path."""
        return os.fsdecode(self._path(index))

    def name(self, index: int) -> str | None:
        """The file's path below the root, with forward slashes."""
        return os.fsdecode(self._names[index]) if self._named else None

    def stamp(self, index: int) -> str | None:
        """Its size and when it was last changed."""
        try:
            stat = os.stat(self._path(index))
        except OSError:
            return None
        return f"{stat.st_size}-{stat.st_mtime_ns}"


class Rows(Pictures):
    """Images in rows of a dataset of the `datasets` library, whose column ``column`` gives bytes or paths."""

    def __init__(self, dataset: Any, column: str, labels: np.ndarray, what: str) -> None:
        self._dataset, self._column, self._what = dataset, column, what
        self._rows = np.argsort(labels, kind="stable")
        self.labels = labels[self._rows]
        files = [Path(each["filename"]) for each in dataset.cache_files]
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        self._stamp = hashlib.sha256(repr(stats).encode()).hexdigest()[:16] if stats else None
        self.identity = f"rows of {what}, column {column}" if stats else None

    def content(self, index: int) -> bytes:
        """The bytes in its row, or those of the file that the row names."""
        value = self._dataset[int(self._rows[index])][self._column]
        if value is None or (value["bytes"] is None and value["path"] is None):
            raise OSError("the row holds no image")
        return Path(value["path"]).read_bytes() if value["bytes"] is None else value["bytes"]

    def where(self, index: int) -> str:
        """The row's number, counted from 1."""
        return f"{self._what}, row {self._rows[index] + 1}"

    def stamp(self, index: int) -> str | None:
        """That of the files that hold the rows."""
        del index
        return self._stamp


@dataclass(frozen=True)
class ImageSource:
    """Labelled images and how they are split.

    ``validation`` is None where the source has no split of its own. ``size`` is the images' own, None where each has
    another; ``channels``, ``validation_fraction`` and ``resampling`` (None: bicubic) are what they are prepared with
    where nothing else is asked for. ``notes`` are for the person who waits.
    """

    classes: tuple[str, ...]
    train: Pictures
    validation: Pictures | None = None
    size: int | None = None
    channels: int = 3
    validation_fraction: float = 0.1
    resampling: Resampling | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Columns:
    """The columns of a table that hold the images and their labels; None for those whose type or name tells."""

    image: str | None = None
    label: str | None = None


def open_source(source: str, columns: Columns) -> ImageSource:
    """A folder of images, Parquet files, a saved dataset, or ``hf:NAME`` and ``hf:NAME:CONFIG`` for one on the hub.

    Raises:
        ConfigError: where there is nothing there that could be read, or labels that make no sense.
    """
    if source.startswith(HUB):
        return _hub(source, columns)
    path = Path(source)
    if not path.exists():
        raise ConfigError(
            f"there is no file or folder {source}; images are 'digits', a folder of class folders, Parquet files, or "
            f"{HUB}NAME for a dataset on the Hugging Face hub"
        )
    if path.is_file():
        if path.suffix.lower() != _PARQUET:
            raise ConfigError(f"{source} is a file; images are read from a folder of class folders or from Parquet")
        return _parquet(path, [path], columns)
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _saved(path, columns)
    files = sorted(file.relative_to(path).as_posix() for file in walk(path))
    tables = [name for name in files if name.lower().endswith(_PARQUET)]
    images = [name for name in files if name.lower().endswith(SUFFIXES)]
    if tables and images:
        raise ConfigError(f"{path} holds {len(images):,} images and {len(tables):,} Parquet files; put them apart")
    if tables:
        return _parquet(path, [path / name for name in tables], columns)
    if columns != Columns():
        raise ConfigError(f"{path} is a folder of images; image and label columns are for tables")
    return _folder(path, images)


def _folder(path: Path, images: Sequence[str]) -> ImageSource:
    """Class folders, below split folders where there are such."""
    subfolders = _subfolders(path)
    # A class may be called "train" too; its folder holds images, and that of a split holds folders.
    if not any(_exact_split(name) and _subfolders(path / name) for name in subfolders):
        classes, train, notes = _classes(path, "", images)
        return ImageSource(classes, train, notes=notes)
    sides = _sides(subfolders, f"the folders in {path}")
    classes, train, notes = _classes(path, f"{sides.train}/", images)
    source = ImageSource(classes, train, notes=sides.notes + notes)
    if sides.validation is None:
        return source
    others, validation, more = _classes(path, f"{sides.validation}/", images)
    _require_equal(classes, others, (str(path / sides.train), str(path / sides.validation)))
    return replace(source, validation=validation, notes=source.notes + more)


def _classes(path: Path, below: str, images: Sequence[str]) -> tuple[tuple[str, ...], Files, tuple[str, ...]]:
    """The images in the class folders of ``path / below``."""
    root = path / below
    classes = tuple(_subfolders(root))
    if not classes:
        found = "images without class folders" if any(map(_in(below), images)) else "no class folders"
        raise ConfigError(f"{root} holds {found}; an image's class is the name of the folder that it lies in")
    members: dict[str, list[str]] = {name: [] for name in classes}
    stray = 0
    for image in filter(_in(below), images):
        name, slash, _ = image[len(below) :].partition("/")
        if slash:
            members[name].append(image)
        else:
            stray += 1
    empty = [name for name in classes if not members[name]]
    if empty:
        raise ConfigError(
            f"no images ({', '.join(SUFFIXES)}) are in {_some(empty)} in {root}; a class folder needs one at least"
        )
    labels = np.repeat(np.arange(len(classes)), [len(members[name]) for name in classes])
    notes = (f"images in {root} that lie in no class folder are left out: {stray:,}",) if stray else ()
    names = [image[len(below) :] for name in classes for image in members[name]]
    return classes, Files(root.resolve(), names, labels, f"files in {root.resolve()}", named=True), notes


def _in(below: str) -> Any:
    return lambda name: name.startswith(below)


def _subfolders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _exact_split(name: str) -> str | None:
    return next((split for split, names in SPLITS.items() if name.lower() in names), None)


@dataclass(frozen=True)
class _Sides:
    """Which of several splits are trained on and validated on, and what to say about it."""

    train: str
    validation: str | None = None
    notes: tuple[str, ...] = ()


def _sides(names: Sequence[str], what: str) -> _Sides:
    """The sides of a split by their names; without one to validate on, the one to test on is taken for it."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[_exact_split(name) or ""].append(name)
    if "train" not in found:
        raise ConfigError(f"of {what}, none is to train on: there are {_some(names)}; expected: train")
    held_out = "validation" if "validation" in found else "test"
    for split in ("train", held_out):
        if len(found[split]) > 1:
            raise ConfigError(f"of {what}, {_some(found[split])} all name the split '{split}'; leave one of them")
    train, validation = found["train"][0], next(iter(found[held_out]), None)
    notes = []
    if validation is not None and held_out == "test":
        notes.append(f"of {what}, none is to validate on, so '{validation}' is taken")
    if others := sorted(set(names) - {train, validation}):
        notes.append(f"of {what}, {_some(others)} are left out")
    return _Sides(train, validation, tuple(notes))


def _require_equal(train: Sequence[str], validation: Sequence[str], where: tuple[str, str]) -> None:
    """Refuse two sides with different classes."""
    only = [
        f"only in {place}: {_some(missing)}"
        for place, here, other in ((where[0], train, validation), (where[1], validation, train))
        if (missing := sorted(set(here) - set(other)))
    ]
    if only:
        raise ConfigError(f"the classes to train and to validate on differ; {'; '.join(only)}")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_SHOWN]) + more


def _parquet(path: Path, files: Sequence[Path], columns: Columns) -> ImageSource:
    """Parquet files, split by their names where all are named after splits."""
    by_split: dict[str, list[str]] = defaultdict(list)
    unnamed: list[str] = []
    for file in files:
        split = None if file == path else split_of(file.relative_to(path).as_posix())
        (unnamed if split is None else by_split[split]).append(str(file))
    if unnamed and by_split:
        raise ConfigError(
            f"some Parquet files in {path} are named after splits ({_some(sorted(by_split))}) and {unnamed[0]} is not; "
            "name all of them so, or none"
        )
    named = {"train": unnamed} if unnamed else by_split
    # A name is taken as a pattern there.
    data_files = {split: [glob.escape(name) for name in sorted(names)] for split, names in named.items()}
    datasets = needed("datasets")
    try:
        found = datasets.load_dataset("parquet", data_files=data_files)
    except Exception as error:  # whatever a broken file leads the reader to
        raise ConfigError(f"cannot read the Parquet files of {path}: {_cause(error)}") from error
    return _dataset(found, str(path), columns)


def _saved(path: Path, columns: Columns) -> ImageSource:
    """What ``save_to_disk`` wrote."""
    datasets = needed("datasets")
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:
        raise ConfigError(f"cannot load the dataset saved in {path}: {_cause(error)}") from error
    return _dataset(found, str(path), columns)


def _hub(source: str, columns: Columns) -> ImageSource:
    """A dataset that ``load_dataset`` loads by its name, downloaded whole."""
    datasets = needed("datasets")
    name, _, config = source.removeprefix(HUB).partition(":")
    if not name:
        raise ConfigError(f"{source!r} names no dataset; write {HUB}NAME or {HUB}NAME:CONFIG")
    try:
        found = datasets.load_dataset(name, config or None)
    except Exception as error:
        raise ConfigError(f"cannot load the dataset {name}: {_cause(error)}") from error
    return _dataset(found, source, columns)


def _cause(error: BaseException) -> str:
    """What an error says, and what led to it where it says no more than that something failed."""
    return one_line(error.__cause__ or error)


def _dataset(found: Any, where: str, columns: Columns) -> ImageSource:
    """Images and labels of a ``Dataset`` or a ``DatasetDict``."""
    splits: dict[str, Any] = dict(found) if isinstance(found, Mapping) else {"train": found}
    sides = _Sides(next(iter(splits))) if len(splits) == 1 else _sides(list(splits), f"the splits of {where}")
    train, what = splits[sides.train], f"{where}, split {sides.train}"
    image = _image_column(train, columns.image, where)
    label = _label_column(train, image, columns.label, where)
    labels = _Labels(train, label, what)
    classes = labels.classes()
    source = ImageSource(classes, _pictures(train, image, labels.indices(classes), what), notes=sides.notes)
    if sides.validation is None:
        return source
    held_out, what = splits[sides.validation], f"{where}, split {sides.validation}"
    for name in (image, label):
        if name not in held_out.column_names:
            raise ConfigError(f"{what} has no column '{name}'; it has {_some(held_out.column_names)}")
    others = _Labels(held_out, label, what)
    _require_equal(classes, others.names or others.found_names(), (labels.where, what))
    return replace(source, validation=_pictures(held_out, image, others.indices(classes), what))


def _image_column(dataset: Any, asked: str | None, where: str) -> str:
    """The column of images: the one of that type, or of the type that they are stored as."""
    datasets = needed("datasets")
    features = dataset.features
    if asked is not None:
        return _there(features, asked, "image", where)
    found = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    found = found or [
        name for name, kind in features.items() if isinstance(kind, dict) and {*kind} == {"bytes", "path"}
    ]
    return _only(found, features, "image", where)


def _label_column(dataset: Any, image: str, asked: str | None, where: str) -> str:
    """The column of labels: the one of class labels, or the one that is called so."""
    datasets = needed("datasets")
    features = dataset.features
    if asked is not None:
        return _there(features, asked, "label", where)
    found = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    found = found or [name for name in ("label",) if name in features and name != image]
    return _only(found, features, "label", where)


def _there(features: Mapping[str, Any], asked: str, what: str, where: str) -> str:
    if asked not in features:
        raise ConfigError(f"{where} has no column '{asked}'; {nearest(asked, features)} ({what} column)")
    return asked


def _only(found: Sequence[str], features: Mapping[str, Any], what: str, where: str) -> str:
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{name} ({_kind(kind)})" for name, kind in features.items())
    why = f"{len(found)} columns could hold" if found else "no column is known to hold"
    raise ConfigError(f"{why} the {what}s of {where}; name one of {listed} as the {what} column")


def _kind(feature: Any) -> str:
    return str(getattr(feature, "dtype", None) or type(feature).__name__)


class _Labels:
    """The column of labels of one split: class labels, numbers from 0 on, or names."""

    def __init__(self, dataset: Any, column: str, where: str) -> None:
        arrow = needed("pyarrow")
        feature = dataset.features[column]
        self.where, self._column = where, column
        names = getattr(feature, "names", None)
        self.names: tuple[str, ...] | None = None if names is None else tuple(names)
        if not len(dataset):
            raise ConfigError(f"{where} is empty")
        values = dataset.select_columns([column]).with_format("arrow")[:].column(0)
        if values.null_count:
            row = values.is_null().to_pylist().index(True) + 1
            raise ConfigError(f"{where}: {values.null_count:,} labels are missing, the first in row {row}")
        if arrow.types.is_integer(values.type):
            self._values = values.to_numpy()
            self._check_range()
        elif arrow.types.is_string(values.type) or arrow.types.is_large_string(values.type):
            self._values = values.to_numpy()
            if "" in self._values:
                raise ConfigError(f"{where}: labels are missing, the first in row {list(self._values).index('') + 1}")
        else:
            raise ConfigError(f"{where}: the label column '{column}' holds {values.type}, not numbers or names")

    def _check_range(self) -> None:
        most = len(self.names) if self.names is not None else None
        wrong = self._values < 0
        if most is not None:
            wrong |= self._values >= most
        if wrong.any():
            row = int(np.argmax(wrong))
            limit = "and labels count from 0" if most is None else f"and there are {most} classes, from 0 on"
            raise ConfigError(
                f"{self.where}: {wrong.sum():,} labels are out of range, the first in row {row + 1}: it is "
                f"{self._values[row]}, {limit} (-1 stands for no label in many datasets)"
            )

    def found_names(self) -> tuple[str, ...]:
        """The classes that occur, by name, in their order."""
        present = np.unique(self._values)
        return tuple(str(value) for value in present) if self.names is None else tuple(self.names[i] for i in present)

    def classes(self) -> tuple[str, ...]:
        """The names of all classes, each of which must have an image."""
        found = self.found_names()
        if self.names is not None:
            all_names: Iterable[str] = self.names
        elif self._values.dtype == object:
            all_names = found
        else:
            # The first number without an image is among these, however far the largest lies.
            all_names = tuple(str(number) for number in range(min(int(self._values.max()), len(found)) + 1))
        missing = [name for name in all_names if name not in set(found)]
        if missing:
            raise ConfigError(
                f"{self.where}: no image has the label {_some(missing)} of the column '{self._column}'; all classes "
                "must have images, and numbers count from 0"
            )
        return tuple(all_names)

    def indices(self, classes: Sequence[str]) -> np.ndarray:
        """Labels as indices into ``classes``, int64."""
        index = {name: number for number, name in enumerate(classes)}
        if self.names is not None:
            return np.array([index[name] for name in self.names], dtype=np.int64)[self._values]
        return np.array([index[str(value)] for value in self._values], dtype=np.int64)


def _pictures(dataset: Any, column: str, labels: np.ndarray, what: str) -> Pictures:
    """The images of one split; where all of them are files that are only named, those."""
    datasets = needed("datasets")
    try:
        raw = dataset.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    except Exception as error:
        kind = _kind(dataset.features[column])
        raise ConfigError(f"{what}: the column '{column}' ({kind}) does not hold images: {one_line(error)}") from error
    stored = raw.data.column(column)
    if all(chunk.field("bytes").null_count == len(chunk) for chunk in stored.chunks) and not stored.null_count:
        paths = [path for chunk in stored.chunks for path in chunk.field("path").to_pylist()]
        if None not in paths:
            order = np.argsort(labels, kind="stable")
            return Files(Path(), [paths[row] for row in order], labels[order], f"files of {what}", named=False)
    return Rows(raw, column, labels, what)
