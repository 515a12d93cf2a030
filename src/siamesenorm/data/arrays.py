"""Token arrays on disk: flat numpy memory maps of uint16, the format that the engine's data sets read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from siamesenorm.data import byte_tokenizer, corpus
from siamesenorm.residual import ConfigError, nearest

DTYPE = np.uint16

# Part of the cache's folder name: raise it when the arrays of an unchanged corpus would come out different.
_FORMAT = 1

_META = "meta.json"


@dataclass(frozen=True)
class TokenArrays:
    """A tokenised corpus: one array to train on and one held out, every document followed by ``eos_id``.

    ``sha256`` is the corpus's fingerprint before tokenisation; counts are in tokens.
    """

    folder: Path
    source: str
    sha256: str
    vocab_size: int
    eos_id: int
    pad_id: int
    train_documents: int
    validation_documents: int
    train_tokens: int
    validation_tokens: int

    @property
    def train_path(self) -> Path:
        """The array to train on."""
        return self.folder / "train.npy"

    @property
    def validation_path(self) -> Path:
        """The held-out array."""
        return self.folder / "validation.npy"

    def validation(self) -> np.ndarray:
        """The held-out tokens, shape (validation_tokens,), mapped and not read."""
        return np.memmap(self.validation_path, dtype=DTYPE, mode="r")


def cache_root() -> Path:
    """Where prepared corpora are kept: ``$SIAMESENORM_CACHE``, or a folder in the user's cache."""
    own = os.environ.get("SIAMESENORM_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "siamesenorm"


def check_source(source: str) -> None:
    """Refuse a source that this version cannot prepare.

    Raises:
        ConfigError: naming the sources there are.
    """
    if source != corpus.NAME:
        raise ConfigError(f"unknown data source {source!r}; {nearest(source, [corpus.NAME])}")


def prepare(source: str = corpus.NAME, cache: Path | None = None, root: Path | None = None) -> TokenArrays:
    """Tokenise a corpus, or find it in the cache.

    The cache is keyed by the corpus's fingerprint. Arrays are written into a folder of another name that is renamed
    when it is complete, so an interrupted preparation is never taken for a finished one.

    Args:
        source: the corpus's name.
        cache: the folder of prepared corpora, by default `cache_root`.
        root: the folder that the corpus is read from, by default the standard library's.

    Raises:
        ConfigError: for an unknown source, a corpus without files on one side, or a cache that cannot be written.
    """
    check_source(source)
    docs = list(corpus.documents(root))
    sha256 = corpus.fingerprint(docs)
    folder = (cache or cache_root()) / f"{source}-bytes-v{_FORMAT}-{sha256[:16]}"
    found = _load(folder)
    if found is not None:
        return found
    train = [doc for doc in docs if not doc.held_out]
    held_out = [doc for doc in docs if doc.held_out]
    if not train or not held_out:
        raise ConfigError(
            f"the corpus {source!r} has {len(train)} files to train on and {len(held_out)} to validate on; it needs "
            "both. Is this Python's standard library installed as source files?"
        )
    arrays = TokenArrays(
        folder=folder,
        source=source,
        sha256=sha256,
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        eos_id=byte_tokenizer.EOS_ID,
        pad_id=byte_tokenizer.PAD_ID,
        train_documents=len(train),
        validation_documents=len(held_out),
        train_tokens=_length(train),
        validation_tokens=_length(held_out),
    )
    try:
        _write(arrays, train, held_out)
    except OSError as error:
        raise ConfigError(
            f"cannot write the prepared corpus to {folder}: {error}; set SIAMESENORM_CACHE to a folder that can be "
            "written"
        ) from error
    return arrays


def _length(docs: Sequence[corpus.Document]) -> int:
    return sum(len(doc.content) + 1 for doc in docs)


def _tokens(docs: Sequence[corpus.Document]) -> np.ndarray:
    """All documents in order, each with its end: shape (tokens,)."""
    out = np.empty(_length(docs), dtype=DTYPE)
    at = 0
    for doc in docs:
        out[at : at + len(doc.content)] = np.frombuffer(doc.content, dtype=np.uint8)
        at += len(doc.content)
        out[at] = byte_tokenizer.EOS_ID
        at += 1
    return out


def _write(arrays: TokenArrays, train: Sequence[corpus.Document], held_out: Sequence[corpus.Document]) -> None:
    arrays.folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{arrays.folder.name}-", dir=arrays.folder.parent))
    try:
        _tokens(train).tofile(unfinished / "train.npy")
        _tokens(held_out).tofile(unfinished / "validation.npy")
        facts = {key: value for key, value in asdict(arrays).items() if key != "folder"}
        (unfinished / _META).write_text(json.dumps(facts, indent=2) + "\n")
        if arrays.folder.exists():
            # Either another process has just finished the same corpus, or the cache was damaged.
            if _load(arrays.folder) is not None:
                return
            shutil.rmtree(arrays.folder)
        unfinished.rename(arrays.folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _load(folder: Path) -> TokenArrays | None:
    """The prepared corpus in `folder`, or None where there is none that is whole."""
    try:
        arrays = TokenArrays(folder=folder, **json.loads((folder / _META).read_text()))
        sizes = (arrays.train_path.stat().st_size, arrays.validation_path.stat().st_size)
    except (OSError, ValueError, TypeError):
        return None
    item = np.dtype(DTYPE).itemsize
    return arrays if sizes == (arrays.train_tokens * item, arrays.validation_tokens * item) else None
