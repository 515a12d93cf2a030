"""Where documents come from: text files, JSON lines, Parquet, and whatever Hugging Face's `datasets` reads.

A source yields what it finds in an order that never changes, and with each document the position behind it, so that
reading can go on from there in another process. What cannot be taken as a document is yielded too, as `Bad`.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from siamesenorm.residual import ConfigError, nearest, one_line

# One document is held in memory as a whole, several times over while it is cut into tokens.
LARGEST_DOCUMENT = 64 << 20
# JSON spells out a character in up to six bytes.
_LONGEST_LINE = 6 * LARGEST_DOCUMENT

_BLOCK = 1 << 20
_ROWS = 256

FORMATS = {
    "text": (".txt", ".text", ".txt.gz", ".text.gz"),
    "json": (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz"),
    "parquet": (".parquet",),
    # Read by the `datasets` library.
    "table": (".csv", ".tsv", ".arrow"),
}
# Only nothing is no text, not "NA"; and a row that ends with a comma does not move the columns.
_CSV: dict[str, Any] = {"keep_default_na": False, "na_values": [""], "index_col": False}
_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", _CSV),
    ".tsv": ("csv", {"sep": "\t", **_CSV}),
    ".arrow": ("arrow", {}),
}

WHOLE_FILE = "file"
BLANK_LINE = "blank-line"
_BLANK_LINES = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")

# The names that splits go by.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


@dataclass(frozen=True)
class Position:
    """How far a source has been read: files done, the offset in the next one (bytes or rows), and its records done."""

    file: int = 0
    offset: int = 0
    record: int = 0


@dataclass(frozen=True)
class Document:
    """A document's text in UTF-8, and the position behind it."""

    content: bytes
    after: Position


@dataclass(frozen=True)
class Bad:
    """Something that is no document: why in a few words, and all about it in a message."""

    reason: str
    message: str
    after: Position


class Source(Protocol):
    """Documents in an order that never changes.

    ``digest`` changes with what is read, ``revision`` is that of a dataset on the hub, ``total_bytes`` is the size on
    disk where that is known, and ``notes`` are for the person who waits.
    """

    digest: str
    revision: str | None
    total_bytes: int | None
    notes: Sequence[str]

    def done(self, position: Position) -> int:
        """Bytes of ``total_bytes`` before a position; never too many."""

    def items(self, start: Position) -> Iterator[Document | Bad]:
        """All that comes after `start`."""


@dataclass(frozen=True)
class Reading:
    """How to read a source.

    ``text_field`` is the field or column that holds the text. ``document_end`` says where documents end in a text file:
    ``file`` (at the file's end), ``blank-line``, or a text that stands between documents; None is ``blank-line`` for a
    single file and ``file`` in a folder. ``format`` is one of `FORMATS`, None where names tell. ``split``, ``subset``
    and ``revision`` (None for the newest) name parts of a dataset on the hub; the first also chooses among local files
    of different splits.
    """

    text_field: str = "text"
    document_end: str | None = None
    format: str | None = None
    split: str = "train"
    subset: str | None = None
    revision: str | None = None


def open_source(source: str, reading: Reading) -> Source:
    """A source by its path, or by its name on the Hugging Face hub where there is no such path.

    Raises:
        ConfigError: where there is nothing there that could be read.
    """
    if reading.format is not None and reading.format not in FORMATS:
        raise ConfigError(f"unknown format {reading.format!r}; {nearest(reading.format, FORMATS)}")
    path = Path(source)
    if not path.exists():
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) or source.startswith(".") or _format_of(path):
            raise ConfigError(f"there is no file or folder {source}")
        return _hub(source, reading)
    if path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _saved_dataset(path, reading)
    files, notes = _files(path, reading)
    kind = _kind(path, files, reading)
    files = [file for file in files if _format_of(file) == kind or _named_by_user(file, path, kind, reading)]
    files, more = _of_split(path, files, reading.split)
    notes += more
    if kind == "table":
        return _tables(path, files, reading, notes)
    if kind == "text":
        end = reading.document_end or (WHOLE_FILE if path.is_dir() else BLANK_LINE)
        if reading.document_end is None:
            what = "each file is one document" if path.is_dir() else "blank lines end a document"
            notes.append(f"{what} (--document-end says otherwise)")
        return FileSource(path, files, lambda file: TextFile(file, end), notes)
    if reading.document_end is not None:
        raise ConfigError(f"--document-end is for text files; {source} is read as {kind}")
    reader = JsonLines if kind == "json" else ParquetFile
    return FileSource(path, files, lambda file: reader(file, reading.text_field), notes)


def _format_of(path: Path) -> str | None:
    name = path.name.lower()
    return next((kind for kind, suffixes in FORMATS.items() if name.endswith(suffixes)), None)


def _files(path: Path, reading: Reading) -> tuple[list[Path], list[str]]:
    """All files that might be read, in the order of their names; hidden ones are left out."""
    if path.is_file():
        return [path], []
    below = [file for file in walk(path) if file.is_file() or not file.exists()]
    below.sort(key=lambda file: file.relative_to(path).as_posix())
    if not below:
        raise ConfigError(f"there is no file in {path}")
    ours = sum(_format_of(file) is not None for file in below)
    others = len(below) - ours
    return below, [
        f"{others} files of other kinds are left out"
    ] if ours and others and reading.format != "text" else []


def walk(path: Path) -> Iterator[Path]:
    """All that is no folder, below a folder; links to folders are followed, hidden things left out.

    Raises:
        ConfigError: for a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise ConfigError(f"cannot read the folder {error.filename}: {error.strerror or error}") from error

    met: set[str] = set()
    for folder, subfolders, names in os.walk(path, onerror=refuse, followlinks=True):
        # A link may lead back to where it comes from.
        real = os.path.realpath(folder)
        if real in met:
            subfolders.clear()
            continue
        met.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _kind(path: Path, files: Sequence[Path], reading: Reading) -> str:
    if reading.format is not None:
        usable = [file for file in files if _named_by_user(file, path, reading.format, reading)]
        if usable or any(_format_of(file) == reading.format for file in files):
            return reading.format
        raise ConfigError(f"there is no {reading.format} file in {path} ({', '.join(FORMATS[reading.format])})")
    kinds = Counter(kind for file in files if (kind := _format_of(file)) is not None)
    known = ", ".join(suffix for suffixes in FORMATS.values() for suffix in suffixes)
    if not kinds and path.is_file():
        raise ConfigError(
            f"unknown file type {path.suffix or path.name!r} of {path}; known: {known}. --format forces one"
        )
    if not kinds:
        there = ", ".join(sorted({file.suffix or file.name for file in files})[:8])
        raise ConfigError(
            f"there is nothing readable in {path}: it holds {there}; known: {known}. --format text takes all as text"
        )
    if len(kinds) > 1:
        there = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise ConfigError(f"{path} holds files of several kinds ({there}); name one with --format")
    return next(iter(kinds))


def _named_by_user(file: Path, path: Path, kind: str, reading: Reading) -> bool:
    """Whether ``--format`` makes a file with an unknown name one of this kind."""
    if reading.format != kind or _format_of(file) == kind or kind == "table":
        return False
    # In a folder, only text goes by other names; the file that is named itself may be called anything.
    return path.is_file() or (kind == "text" and _format_of(file) is None)


def _of_split(path: Path, files: list[Path], split: str) -> tuple[list[Path], list[str]]:
    """The files of one split, where all files are named after splits; else all files."""
    if path.is_file():
        return files, []

    splits = [split_of(file.relative_to(path).as_posix()) for file in files]
    there = {name for name in splits if name is not None}
    if None in splits or len(there) < 2:
        return files, []
    if split not in there:
        raise ConfigError(f"{path} has no split '{split}'; {nearest(split, there)}")
    kept = [file for file, name in zip(files, splits, strict=True) if name == split]
    return kept, [f"the {len(files) - len(kept)} files of other splits than '{split}' are left out"]


def split_of(name: str) -> str | None:
    """The split that one of the words in a file's relative name stands for, one of `SPLITS`."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((split for word in words for split, alike in SPLITS.items() if word in alike), None)


def _listing_digest(path: Path, files: Sequence[Path]) -> str:
    """A digest of names, sizes, and both ends of each file: a change is all but sure to show, and no file is read."""
    digest = hashlib.sha256()
    for file in files:
        name = file.name if path.is_file() else file.relative_to(path).as_posix()
        try:
            size = file.stat().st_size
            with file.open("rb") as opened:
                ends = opened.read(4096)
                opened.seek(max(size - 4096, 0))
                ends += opened.read(4096)
        except OSError:
            # Reading the file says so, with its name, when its turn comes.
            size, ends = -1, b""
        digest.update(f"{len(name)},{size},{len(ends)};{name}".encode("utf-8", "surrogateescape"))
        digest.update(ends)
    return digest.hexdigest()


# A document's text; or why there is none in a few words, and all about it.
_Found = bytes | tuple[str, str]


class _GivenUpError(Exception):
    """A file of which no more can be read: why in a few words, and all about it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _File(Protocol):
    """One file's reader: what is found, the offset behind it, and the records done."""

    def read(self, offset: int, record: int) -> Iterator[tuple[_Found, int, int]]: ...


class FileSource:
    """Files, one after the other."""

    revision: str | None = None

    def __init__(
        self, path: Path, files: Sequence[Path], reader: Callable[[Path], _File], notes: Sequence[str]
    ) -> None:
        self.files, self.notes = files, notes
        self.digest = _listing_digest(path, files)
        sizes = [file.stat().st_size if file.exists() else 0 for file in files]
        self.total_bytes: int | None = sum(sizes)
        self._before = [*accumulate(sizes, initial=0)]
        self._reader = reader

    def done(self, position: Position) -> int:
        """Bytes of files before a position; within one that is not read byte by byte, nothing counts until its end."""
        by_byte = position.file < len(self.files) and not self.files[position.file].name.endswith((".gz", ".parquet"))
        return self._before[position.file] + (position.offset if by_byte else 0)

    def items(self, start: Position) -> Iterator[Document | Bad]:
        """All documents after `start`."""
        for index in range(start.file, len(self.files)):
            file, behind = self.files[index], Position(index + 1)
            offset, record = (start.offset, start.record) if index == start.file else (0, 0)
            try:
                for found, now, records in self._reader(file).read(offset, record):
                    after = Position(index, now, records)
                    yield Document(found, after) if isinstance(found, bytes) else Bad(*found, after)
            except _GivenUpError as error:
                yield Bad(error.reason, str(error), behind)
            except (OSError, EOFError, zlib.error) as error:
                yield Bad("unreadable file", f"cannot read {file}: {getattr(error, 'strerror', None) or error}", behind)


def _opened(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


def _checked(content: bytes, where: str, at: int | None = None) -> _Found:
    """`content` where it is UTF-8 and not too long, else what is wrong; `at` is its place in the file, in bytes."""
    if len(content) > LARGEST_DOCUMENT:
        return _too_long(where)
    fault = _invalid_utf8(content, where, at)
    return content if fault is None else fault


def _invalid_utf8(content: bytes, where: str, at: int | None) -> tuple[str, str] | None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        offset = "" if at is None else f" at byte {at + error.start:,} of the file"
        return "invalid UTF-8", f"{where}: invalid UTF-8{offset} ({content[error.start]:#04x})"
    return None


def _too_long(where: str) -> tuple[str, str]:
    limit = f"{LARGEST_DOCUMENT >> 20} MiB"
    return "document too long", f"{where}: a document is longer than {limit}; in text, --document-end can cut it"


class TextFile:
    """A text file of one document, or of many with something between them."""

    def __init__(self, path: Path, document_end: str) -> None:
        self.path = path
        self._end = None if document_end == WHOLE_FILE else _BLANK_LINES
        if document_end not in (WHOLE_FILE, BLANK_LINE):
            self._end = re.compile(re.escape(document_end.encode()))

    def read(self, offset: int, record: int) -> Iterator[tuple[_Found, int, int]]:
        """Documents from the byte `offset` on."""
        with _opened(self.path) as file:
            file.seek(offset)
            buffer, at_end = b"", False
            while not at_end:
                # As much again as there is, so that a long document is not searched for its end over and over.
                block = file.read(max(_BLOCK, len(buffer)))
                at_end = not block
                if at_end and offset == 0 and not buffer:
                    raise _GivenUpError("empty file", f"{self.path} is empty")
                buffer += block
                start = 0
                if self._end is not None:
                    for match in self._end.finditer(buffer):
                        if match.end() == len(buffer) and not at_end:
                            # What stands between two documents may be longer than what has been read of it.
                            break
                        record += 1
                        found = self._document(buffer[start : match.start()], offset)
                        offset += match.end() - start
                        start = match.end()
                        yield found, offset, record
                buffer = buffer[start:]
                if len(buffer) > LARGEST_DOCUMENT:
                    # Where the next document would begin is not known, so the rest of the file is given up.
                    raise _GivenUpError(*_too_long(str(self.path)))
            if buffer:
                yield self._document(buffer, offset), offset + len(buffer), record + 1

    def _document(self, content: bytes, at: int) -> _Found:
        # Some editors begin a file with a mark that is no part of its text.
        mark = len(codecs.BOM_UTF8) if at == 0 and content.startswith(codecs.BOM_UTF8) else 0
        return _checked(content[mark:], str(self.path), at + mark)


class JsonLines:
    """A file of JSON objects, one a line."""

    def __init__(self, path: Path, text_field: str) -> None:
        self.path, self.text_field = path, text_field

    def read(self, offset: int, record: int) -> Iterator[tuple[_Found, int, int]]:
        """Documents from the byte `offset`, which begins the line after number `record`, on."""
        with _opened(self.path) as file:
            file.seek(offset)
            while line := file.readline(_LONGEST_LINE):
                record += 1
                if len(line) == _LONGEST_LINE:
                    raise _GivenUpError(*_too_long(f"{self.path}, line {record}"))
                before, offset = offset, offset + len(line)
                if line.strip():
                    yield self._document(line, before, record), offset, record
            if offset == 0:
                raise _GivenUpError("empty file", f"{self.path} is empty")

    def _document(self, line: bytes, at: int, number: int) -> _Found:
        where = f"{self.path}, line {number}"
        fault = _invalid_utf8(line, where, at)
        if fault is not None:
            return fault
        try:
            found = json.loads(line.decode().removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            return "broken JSON", f"{where}: broken JSON ({error}); each line must be one object"
        if not isinstance(found, dict):
            return "no object", f"{where}: {_named(found)} where one object a line is expected"
        if self.text_field not in found:
            return _missing(self.text_field, list(found), where)
        return _text(found[self.text_field], self.text_field, where)


class ParquetFile:
    """A Parquet file, of which one column is read."""

    def __init__(self, path: Path, text_field: str) -> None:
        self.path, self.text_field = path, text_field

    def read(self, offset: int, record: int) -> Iterator[tuple[_Found, int, int]]:
        """Documents from row `offset` on."""
        del record
        parquet = needed("pyarrow.parquet")
        if not self.path.stat().st_size:
            raise _GivenUpError("empty file", f"{self.path} is empty")
        try:
            # pyarrow's own errors are ValueErrors and OSErrors.
            with parquet.ParquetFile(self.path) as file:
                names = file.schema_arrow.names
                if self.text_field not in names:
                    raise _GivenUpError(*_missing(self.text_field, names, str(self.path)))
                first, groups, metadata = 0, file.num_row_groups, file.metadata
                group = 0
                while group < groups and first + metadata.row_group(group).num_rows <= offset:
                    first += metadata.row_group(group).num_rows
                    group += 1
                for batch in file.iter_batches(_ROWS, row_groups=range(group, groups), columns=[self.text_field]):
                    rows = _column(batch.column(0), self.text_field, str(self.path), first)
                    yield from ((found, row, row) for found, row in rows if row > offset)
                    first += len(batch)
        except ValueError as error:
            raise OSError(one_line(error)) from error


def _column(column: Any, name: str, where: str, first: int) -> Iterator[tuple[_Found, int]]:
    """The texts of a column of Arrow data and the row behind each; `first` is the row of the first one."""
    arrow = needed("pyarrow")
    if arrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kinds = (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_binary, arrow.types.is_large_binary)
    if not any(is_kind(column.type) for is_kind in kinds):
        raise _GivenUpError("no text", f"{where}: the column '{name}' holds {column.type}, not text")
    # As bytes, so that a text that is not UTF-8 is found here and named, and does not end the whole batch.
    for row, value in enumerate(column.cast(arrow.large_binary()).to_pylist(), start=first + 1):
        yield _text(value, name, f"{where}, row {row}"), row


class TableSource:
    """A Hugging Face dataset on this machine or the hub.

    ``dataset`` gives the rows from one on, as an iterator of columns of Arrow data or of single values.
    """

    def __init__(
        self,
        name: str,
        field: str,
        rows: Callable[[int], Iterator[Any]],
        digest: str,
        notes: Sequence[str],
        revision: str | None = None,
    ) -> None:
        self.name, self.field, self.notes = name, field, notes
        self.digest, self.revision = digest, revision
        self.total_bytes: int | None = None
        self._rows = rows

    def done(self, position: Position) -> int:
        """Rows tell nothing about bytes."""
        del position
        return 0

    def items(self, start: Position) -> Iterator[Document | Bad]:
        """All documents after `start`."""
        row = start.offset
        try:
            for found in self._rows(row):
                if isinstance(found, Mapping):
                    row += 1
                    yield self._item(self._of_mapping(found, row), row)
                    continue
                for each, now in _column(found, self.field, self.name, row):
                    row = now
                    yield self._item(each, row)
        except ConfigError:
            raise
        except _GivenUpError as error:
            raise ConfigError(str(error)) from None
        except Exception as error:  # networks and whatever reads the rows have errors of many kinds
            raise ConfigError(f"reading {self.name} stopped after row {row}: {one_line(error)}") from error

    def _item(self, found: _Found, row: int) -> Document | Bad:
        after = Position(0, row, row)
        return Document(found, after) if isinstance(found, bytes) else Bad(*found, after)

    def _of_mapping(self, found: Mapping[str, Any], row: int) -> _Found:
        where = f"{self.name}, row {row}"
        if self.field not in found:
            return _missing(self.field, list(found), where)
        return _text(found[self.field], self.field, where)


def _saved_dataset(path: Path, reading: Reading) -> TableSource:
    """What ``save_to_disk`` wrote."""
    datasets = needed("datasets")
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:
        raise ConfigError(f"cannot load the dataset saved in {path}: {one_line(error)}") from error
    if isinstance(dataset, Mapping):
        if reading.split not in dataset:
            raise ConfigError(
                f"the dataset in {path} has no split '{reading.split}'; {nearest(reading.split, dataset)}"
            )
        dataset = dataset[reading.split]
    _require_column(reading.text_field, dataset.column_names, str(path))
    dataset = dataset.select_columns([reading.text_field]).with_format("arrow")

    def rows(start: int) -> Iterator[Any]:
        # To select nothing at a dataset's end is an error there.
        if start == len(dataset):
            return
        for table in dataset.select(range(start, len(dataset))).iter(_ROWS):
            yield table.column(0).combine_chunks()

    files = sorted(file for file in path.rglob("*") if file.is_file())
    return TableSource(str(path), reading.text_field, rows, _listing_digest(path, files), [])


def _tables(path: Path, files: Sequence[Path], reading: Reading, notes: Sequence[str]) -> TableSource:
    """Files that the `datasets` library reads."""
    kinds = {file.suffix.lower() for file in files}
    if len(kinds) > 1:
        raise ConfigError(f"{path} holds tables of several kinds ({', '.join(sorted(kinds))}); put them apart")
    builder, options = _TABLES[kinds.pop()]
    names = [str(file) for file in files]

    def load() -> Any:
        # Instead of a warning that the rest of a row is lost.
        warnings.filterwarnings("error", message="Length of header or names does not match")
        return needed("datasets").load_dataset(builder, data_files=names, split="train", streaming=True, **options)

    return TableSource(
        str(path),
        reading.text_field,
        _streamed(str(path), load, reading.text_field),
        _listing_digest(path, files),
        notes,
    )


def _hub(name: str, reading: Reading) -> TableSource:
    """A dataset on the Hugging Face hub, streamed at the revision that it has now."""
    datasets, hub = needed("datasets"), needed("huggingface_hub")
    try:
        revision = hub.HfApi().dataset_info(name, revision=reading.revision).sha
    except Exception as error:
        raise ConfigError(
            f"{name} is no file or folder here and cannot be found as a Hugging Face dataset: {one_line(error)}"
        ) from error

    def load() -> Any:
        return datasets.load_dataset(name, reading.subset, split=reading.split, revision=revision, streaming=True)

    rows = _streamed(name, load, reading.text_field)
    return TableSource(
        name, reading.text_field, rows, f"{name} at {revision}", [f"{name} at revision {revision}"], revision
    )


def _streamed(name: str, load: Callable[[], Any], text_field: str) -> Callable[[int], Iterator[Any]]:
    def rows(start: int) -> Iterator[Any]:
        try:
            dataset = load()
            columns = dataset.column_names
        except Exception as error:
            raise ConfigError(f"cannot load the dataset {name}: {one_line(error)}") from error
        if columns is not None:
            _require_column(text_field, columns, name)
            dataset = dataset.select_columns([text_field])
        yield from dataset.skip(start) if start else dataset

    return rows


def _require_column(name: str, columns: Sequence[str], where: str) -> None:
    if name not in columns:
        raise ConfigError(_missing(name, columns, where)[1])


def _missing(name: str, fields: Sequence[str], where: str) -> tuple[str, str]:
    return "no text field", f"{where}: there is no field '{name}'; {nearest(name, fields)} (--text-field)"


def _text(value: Any, name: str, where: str) -> _Found:
    if isinstance(value, str):
        try:
            value = value.encode()
        except UnicodeEncodeError as error:
            return "invalid UTF-8", f"{where}: the field '{name}' holds half a character ({value[error.start]!a})"
    if isinstance(value, bytes):
        return _checked(value, where)
    return "no text", f"{where}: the field '{name}' holds {_named(value)}, not text"


def _named(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def needed(module: str) -> Any:
    """A module of a package that the core does without.

    Raises:
        ConfigError: where it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"this source needs the package {module.partition('.')[0]}: pip install 'siamesenorm[train]'"
        ) from error
