"""Token arrays on disk, the one place that knows their format.

A prepared folder holds ``train-00000.npy``, ``train-00001.npy`` … and ``validation-00000.npy`` …, each a flat run of
uint16 or uint32 without a header (what the training engine maps into memory), ``tokenizer/`` as transformers saves it,
and ``meta.json``, which is written last: a folder without it is not finished. A document lies in one shard as a whole
and ends with the end token.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from siamesenorm.data import tokenizer as tokenizers
from siamesenorm.data.files import check_once, write_whole
from siamesenorm.data.tokenizer import Vocabulary
from siamesenorm.residual import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

META = "meta.json"
# There while a folder is being prepared.
PROGRESS = "progress.json"
TOKENIZER = "tokenizer"
FORMAT = 1
DTYPES: dict[str, type[np.uint16] | type[np.uint32]] = {"uint16": np.uint16, "uint32": np.uint32}

# 256 MiB of uint16.
SHARD_TOKENS = 1 << 27

_CHUNK_BYTES = 1 << 24
_NPY_HEADER = b"\x93NUMPY"


@dataclass(frozen=True)
class Shard:
    """One file: its name, its length in tokens and the SHA-256 of its bytes."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """One side of the split; ``bytes`` are those of the documents' text and ``tokens`` count the ends too."""

    documents: int
    bytes: int
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """In all shards."""
        return sum(shard.tokens for shard in self.shards)

    def sequences(self, length: int) -> int:
        """How many runs of ``length`` tokens there are; like the engine's, they do not go over a shard's end."""
        return sum(shard.tokens // length for shard in self.shards)


@dataclass(frozen=True)
class TokenArrays:
    """A tokenised corpus: arrays to train on and arrays held out, every document followed by ``vocabulary.eos_id``.

    ``source`` is what a recipe calls it; ``sha256`` is its fingerprint. ``facts`` is whatever else the one who prepared
    it wrote down.
    """

    folder: Path
    source: str
    sha256: str
    tokenizer_sha256: str
    vocabulary: Vocabulary
    train: Part
    validation: Part
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def train_paths(self) -> tuple[Path, ...]:
        """The arrays to train on."""
        return tuple(self.folder / shard.file for shard in self.train.shards)

    def held_out(self) -> list[np.ndarray]:
        """The held-out tokens, one array per shard, each of shape (tokens,), mapped and not read."""
        return [
            np.memmap(self.folder / shard.file, dtype=self.vocabulary.dtype, mode="r")
            for shard in self.validation.shards
        ]

    @property
    def held_out_bytes_per_token(self) -> float:
        """Bytes of text per held-out token; document ends are tokens without bytes."""
        return self.validation.bytes / self.validation.tokens

    def tokenizer(self, max_length: int | None = None) -> PreTrainedTokenizerBase:
        """The tokeniser that made these arrays.

        Args:
            max_length: the longest sequence that a model takes, for the tokeniser's warnings and truncation.

        Raises:
            ConfigError: where it cannot be loaded or is another one.
        """
        made = load_tokenizer(self.folder)
        if tokenizers.fingerprint(made) != self.tokenizer_sha256:
            raise ConfigError(
                f"the tokeniser in {self.folder / TOKENIZER} is not the one that made the arrays beside it"
            )
        if max_length is not None:
            made.model_max_length = max_length
        return made


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokeniser in a folder that is or was being prepared.

    Raises:
        ConfigError: where it cannot be loaded.
    """
    path = folder / TOKENIZER
    if not path.is_dir():
        raise ConfigError(f"the tokeniser {path} is missing; {_ANEW}")
    return tokenizers.load(str(path))


def fingerprint(tokenizer_sha256: str, vocabulary: Vocabulary, parts: Mapping[str, Part]) -> str:
    """SHA-256 (hexadecimal) over all that training sees: the tokeniser, its ids, and every shard's content."""
    facts = {
        "tokenizer": tokenizer_sha256,
        "vocabulary": asdict(vocabulary),
        **{name: [asdict(shard) for shard in part.shards] for name, part in parts.items()},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def write_meta(arrays: TokenArrays) -> None:
    """Finish a folder: all that `read_meta` gives back."""
    meta = {
        "format": FORMAT,
        "sha256": arrays.sha256,
        "tokenizer_sha256": arrays.tokenizer_sha256,
        "dtype": np.dtype(arrays.vocabulary.dtype).name,
        "vocab_size": arrays.vocabulary.size,
        "eos_id": arrays.vocabulary.eos_id,
        "pad_id": arrays.vocabulary.pad_id,
        **arrays.facts,
        "train": _part_facts(arrays.train),
        "validation": _part_facts(arrays.validation),
    }
    write_whole(arrays.folder / META, json.dumps(meta, indent=2) + "\n")


def read_meta(folder: Path, source: str) -> TokenArrays:
    """What a finished folder says of itself; the arrays are not looked at.

    Raises:
        ConfigError: where it is not finished, or its ``meta.json`` is damaged or of a later version.
    """
    path = folder / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no prepared corpus: there is no {META} in it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; {_ANEW}") from error
    if isinstance(meta, dict) and isinstance(meta.get("format"), int) and meta["format"] > FORMAT:
        raise ConfigError(f"{folder} was prepared by a later version of siamesenorm: update the package to read it")
    try:
        vocabulary = Vocabulary(*(_whole(meta.pop(key)) for key in ("vocab_size", "eos_id", "pad_id")))
        dtype = meta.pop("dtype")
        arrays = TokenArrays(
            folder=folder,
            source=source,
            sha256=str(meta.pop("sha256")),
            tokenizer_sha256=str(meta.pop("tokenizer_sha256")),
            vocabulary=vocabulary,
            train=_part(meta.pop("train")),
            validation=_part(meta.pop("validation")),
            facts={key: value for key, value in meta.items() if key != "format"},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged: {type(error).__name__} at {error}; {_ANEW}") from error
    if dtype != np.dtype(vocabulary.dtype).name:
        raise ConfigError(
            f"{path} says that the arrays are {dtype}; a vocabulary of {vocabulary.size:,} is kept as "
            f"{np.dtype(vocabulary.dtype).name}"
        )
    return arrays


_ANEW = "delete the folder and prepare the corpus anew"


def check_files(arrays: TokenArrays) -> None:
    """Make sure that every array is there and of the right length.

    Raises:
        ConfigError: naming the first file that is not.
    """
    for shard in (*arrays.train.shards, *arrays.validation.shards):
        path = arrays.folder / shard.file
        expected = shard.tokens * np.dtype(arrays.vocabulary.dtype).itemsize
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header = file.read(len(_NPY_HEADER))
        except OSError as error:
            raise ConfigError(f"the array {path} cannot be read: {error.strerror or error}; {_ANEW}") from error
        if size != expected:
            why = " (it has numpy's file header, which these arrays go without)" if header == _NPY_HEADER else ""
            raise ConfigError(
                f"the array {path} has {size:,} bytes; {shard.tokens:,} tokens of {np.dtype(arrays.vocabulary.dtype)} "
                f"take {expected:,}{why}; {_ANEW}"
            )


def check_content(arrays: TokenArrays, memory: Path | None = None) -> None:
    """Make sure that the arrays are what they were when they were prepared, and that every token is in the vocabulary.

    Args:
        arrays: with files that `check_files` has passed.
        memory: a file that remembers which arrays were found right and when they were last changed, so that big ones
            are not read at each start.

    Raises:
        ConfigError: naming the first array that is not right.
    """
    shards = {shard.file: shard for shard in (*arrays.train.shards, *arrays.validation.shards)}
    check_once(
        {arrays.folder / name: [shard.sha256, arrays.vocabulary.size] for name, shard in shards.items()},
        lambda path: _check_shard(path, shards[path.name], arrays.vocabulary),
        memory,
    )


def _check_shard(path: Path, shard: Shard, vocabulary: Vocabulary) -> None:
    digest, at = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            tokens = np.frombuffer(chunk, dtype=vocabulary.dtype)
            above = np.greater_equal(tokens, vocabulary.size)
            if above.any():
                where = int(np.argmax(above))
                raise ConfigError(
                    f"the array {path} holds token {int(tokens[where]):,} at position {at + where:,}, above the "
                    f"vocabulary of {vocabulary.size:,} tokens; {_ANEW}"
                )
            at += len(tokens)
    if digest.hexdigest() != shard.sha256:
        raise ConfigError(f"the array {path} has changed since it was prepared; {_ANEW}")


def _part_facts(part: Part) -> dict[str, Any]:
    shards = [asdict(shard) for shard in part.shards]
    return {"documents": part.documents, "tokens": part.tokens, "bytes": part.bytes, "shards": shards}


def _part(facts: Mapping[str, Any]) -> Part:
    shards = []
    for each in facts["shards"]:
        if Path(each["file"]).name != each["file"]:
            raise ValueError(f"{each['file']!r}, which is no file name")
        shards.append(Shard(each["file"], _whole(each["tokens"]), str(each["sha256"])))
    return Part(_whole(facts["documents"]), _whole(facts["bytes"]), tuple(shards))


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r}, which is no count")
    return value


class ShardWriter:
    """Writes one side of the split, shard after shard, and can go on where an earlier process stopped."""

    def __init__(self, folder: Path, side: str, vocabulary: Vocabulary, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.side = folder, side
        self.vocabulary, self.shard_tokens = vocabulary, shard_tokens
        self.documents = 0
        self.bytes = 0
        self.finished: list[Shard] = []
        # Of the shard that is being written.
        self.open_tokens = 0
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()

    @property
    def tokens(self) -> int:
        """Written so far."""
        return sum(shard.tokens for shard in self.finished) + self.open_tokens

    def write(self, ids: np.ndarray, text_bytes: int) -> None:
        """Add a document, in a new shard where it would make this one too long.

        Args:
            ids: its tokens, without the end.
            text_bytes: the length of its text.
        """
        if self.open_tokens and self.open_tokens + len(ids) + 1 > self.shard_tokens:
            self.finish_shard()
        if self._file is None:
            self._file = (self.folder / self._name(len(self.finished))).open("wb")
        data = np.append(ids, self.vocabulary.eos_id).astype(self.vocabulary.dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.open_tokens += len(ids) + 1
        self.documents += 1
        self.bytes += text_bytes

    def flush(self) -> None:
        """Put on disk what was written."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish_shard(self) -> None:
        """End the shard that is being written; the next document starts another."""
        if self._file is None:
            return
        self.flush()
        self.close()
        self.finished.append(Shard(self._name(len(self.finished)), self.open_tokens, self._digest.hexdigest()))
        self.open_tokens, self._digest = 0, hashlib.sha256()

    def close(self) -> None:
        """Let go of the file; what was not flushed may be lost."""
        if self._file is not None:
            # On a full disk, closing tries once more to write what could not be written before.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def part(self) -> Part:
        """What was written, once the last shard is finished."""
        return Part(self.documents, self.bytes, tuple(self.finished))

    def state(self) -> dict[str, Any]:
        """What `restore` needs, true of what is on disk after a `flush`."""
        return {
            "documents": self.documents,
            "bytes": self.bytes,
            "finished": [asdict(shard) for shard in self.finished],
            "open_tokens": self.open_tokens,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after what `state` says; anything that was written later is cut off.

        Raises:
            ConfigError: where less is on disk than it says.
        """
        self.documents, self.bytes = _whole(state["documents"]), _whole(state["bytes"])
        self.finished = [Shard(**shard) for shard in state["finished"]]
        self.open_tokens = _whole(state["open_tokens"])
        itemsize = np.dtype(self.vocabulary.dtype).itemsize
        for shard in self.finished:
            self._require(shard.file, shard.tokens * itemsize, exactly=True)
        name = self._name(len(self.finished))
        kept = {shard.file for shard in self.finished}
        if self.open_tokens:
            kept.add(name)
            size = self.open_tokens * itemsize
            self._require(name, size, exactly=False)
            self._file = (self.folder / name).open("r+b")
            self._file.truncate(size)
            for chunk in _chunks(self._file):
                self._digest.update(chunk)
        for path in self.folder.glob(f"{self.side}-*.npy"):
            if path.name not in kept:
                path.unlink()

    def _require(self, name: str, size: int, *, exactly: bool) -> None:
        path = self.folder / name
        try:
            there = path.stat().st_size
        except OSError as error:
            raise ConfigError(
                f"{path}, which was finished, cannot be read: {error.strerror or error}; {_ANEW}"
            ) from error
        if there < size or (exactly and there != size):
            raise ConfigError(f"{path} has {there:,} bytes; {size:,} were written to it; {_ANEW}")

    def _name(self, index: int) -> str:
        return f"{self.side}-{index:05d}.npy"


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk
