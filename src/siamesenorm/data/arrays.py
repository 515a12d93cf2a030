"""From what a recipe calls its data to token arrays: the embedded corpus, or a folder that was prepared."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from siamesenorm.data import byte_tokenizer, corpus, shards
from siamesenorm.data import tokenizer as tokenizers
from siamesenorm.data.shards import ShardWriter, TokenArrays
from siamesenorm.data.tokenizer import Vocabulary
from siamesenorm.residual import ConfigError, nearest

# Part of the cache's folder name: raise it when the arrays of an unchanged corpus would come out different.
_FORMAT = 2


def cache_root() -> Path:
    """Where prepared corpora are kept: ``$SIAMESENORM_CACHE``, or a folder in the user's cache."""
    own = os.environ.get("SIAMESENORM_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "siamesenorm"


def check_memory(folder: Path, cache: Path) -> Path:
    """Where `files.check_once` remembers what it has found right in a prepared folder, given by its absolute path."""
    return cache / "checked" / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}.json"


def vocabulary(source: str) -> Vocabulary:
    """The ids of a source's tokeniser, without looking at its arrays.

    Raises:
        ConfigError: for a source that there is none of; the message names those there are.
    """
    return tokenizers.BYTES if source == corpus.NAME else shards.read_meta(_folder(source), source).vocabulary


def prepare(source: str = corpus.NAME, cache: Path | None = None, root: Path | None = None) -> TokenArrays:
    """The arrays of a source, checked; the embedded corpus is tokenised unless it is found in the cache.

    The cache is keyed by the corpus's fingerprint. Arrays are written into a folder of another name that is renamed
    when it is complete, so an interrupted preparation is never taken for a finished one.

    Args:
        source: the embedded corpus's name, or the path of a folder that ``siamesenorm data prepare`` made.
        cache: the folder of prepared corpora, by default `cache_root`.
        root: the folder that the embedded corpus is read from, by default the standard library's.

    Raises:
        ConfigError: for an unknown source, arrays that are not what they were, an embedded corpus without files on one
            side, or a cache that cannot be written.
    """
    cache = cache or cache_root()
    if source != corpus.NAME:
        return _prepared(_folder(source), cache)
    docs = list(corpus.documents(root))
    sha256 = corpus.fingerprint(docs)
    folder = cache / f"{source}-bytes-v{_FORMAT}-{sha256[:16]}"
    found = _cached(folder)
    if found is not None:
        return found
    train = [doc for doc in docs if not doc.held_out]
    held_out = [doc for doc in docs if doc.held_out]
    if not train or not held_out:
        raise ConfigError(
            f"the corpus {source!r} has {len(train)} files to train on and {len(held_out)} to validate on; it needs "
            "both. Is this Python's standard library installed as source files?"
        )
    try:
        return _write(folder, sha256, train, held_out)
    except OSError as error:
        raise ConfigError(
            f"cannot write the prepared corpus to {folder}: {error}; set SIAMESENORM_CACHE to a folder that can be "
            "written"
        ) from error


def _folder(source: str) -> Path:
    """The prepared folder that `source` names."""
    path = Path(source)
    if (path / shards.META).exists():
        return path
    if (path / shards.PROGRESS).exists():
        raise ConfigError(f"the preparation of {source} has not finished; the command that began it goes on with it")
    if path.exists():
        raise ConfigError(f"{source} is not prepared; 'siamesenorm data prepare {source} --out DIR' makes DIR of it")
    if path.parent != Path("."):
        raise ConfigError(
            f"unknown data source: there is no folder {source}; it can be made of text files or of a dataset on the "
            f"hub, by siamesenorm data prepare SOURCE --tokenizer NAME --out {source}"
        )
    raise ConfigError(
        f"unknown data source {source!r}; {nearest(source, [corpus.NAME])} A folder made by 'siamesenorm data prepare' "
        "is one too, and there is none of this name"
    )


def _prepared(folder: Path, cache: Path) -> TokenArrays:
    folder = folder.resolve()
    arrays = shards.read_meta(folder, str(folder))
    parts = {"train": arrays.train, "validation": arrays.validation}
    if shards.fingerprint(arrays.tokenizer_sha256, arrays.vocabulary, parts) != arrays.sha256:
        raise ConfigError(f"{folder / shards.META} has been changed by hand; prepare the corpus anew")
    shards.check_files(arrays)
    # A trained model is saved with it, so what is wrong with it must not show only then.
    arrays.tokenizer()
    shards.check_content(arrays, check_memory(folder, cache))
    return arrays


def _cached(folder: Path) -> TokenArrays | None:
    """The embedded corpus in `folder`, or None where there is none that is whole."""
    try:
        arrays = shards.read_meta(folder, corpus.NAME)
        shards.check_files(arrays)
    except ConfigError:
        return None
    return arrays


def _write(
    folder: Path, sha256: str, train: Sequence[corpus.Document], held_out: Sequence[corpus.Document]
) -> TokenArrays:
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer = byte_tokenizer.build()
        tokenizer.save_pretrained(unfinished / shards.TOKENIZER)
        arrays = TokenArrays(
            folder=unfinished,
            source=corpus.NAME,
            sha256=sha256,
            tokenizer_sha256=tokenizers.fingerprint(tokenizer),
            vocabulary=tokenizers.BYTES,
            train=_part(unfinished, "train", train),
            validation=_part(unfinished, "validation", held_out),
        )
        shards.write_meta(arrays)
        if folder.exists():
            # Either another process has just finished the same corpus, or the cache was damaged.
            found = _cached(folder)
            if found is not None:
                return found
            shutil.rmtree(folder)
        unfinished.rename(folder)
        return replace(arrays, folder=folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _part(folder: Path, side: str, docs: Sequence[corpus.Document]) -> shards.Part:
    writer = ShardWriter(folder, side, tokenizers.BYTES)
    try:
        for doc in docs:
            writer.write(np.frombuffer(doc.content, dtype=np.uint8), len(doc.content))
        writer.finish_shard()
    finally:
        writer.close()
    return writer.part()
