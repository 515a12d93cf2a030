"""From a source of documents to a prepared folder, in steps that a sudden end does not undo.

While a folder is being prepared, ``progress.json`` says how much of the source has been read and how much of each array
is on disk. It is written anew whenever a shard is finished, and every half minute, after the arrays are. Who goes on
from it cuts off what came later, so what comes out does not depend on where a preparation was broken off.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import siamesenorm
from siamesenorm.data import byte_tokenizer, folders, shards
from siamesenorm.data import tokenizer as tokenizers
from siamesenorm.data.files import write_whole
from siamesenorm.data.shards import ShardWriter, TokenArrays
from siamesenorm.data.sources import Bad, Document, Position, Reading, Source, open_source
from siamesenorm.residual import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

# Enough to keep all cores at work, little enough to hold in memory as tokens.
_BATCH_DOCUMENTS = 1024
_BATCH_BYTES = 4 << 20

# More text hardly changes which merges come first, and the words counted meanwhile have to fit into memory.
_BPE_BYTES = 1 << 30

_COMMIT_SECONDS = 30.0

_MARKS = (shards.META, shards.PROGRESS)


@dataclass(frozen=True)
class Request:
    """What to prepare.

    ``tokenizer`` is a name or path for transformers, ``train_bpe`` the size of a vocabulary to learn from the documents
    to train on; with neither, tokens are bytes. About ``validation_fraction`` of the documents are held out, chosen by
    a hash of their text and ``seed``. ``skip_bad`` leaves out what cannot be read instead of stopping there. A new
    array begins before one would exceed ``shard_tokens``.
    """

    source: str
    reading: Reading = field(default_factory=Reading)
    tokenizer: str | None = None
    train_bpe: int | None = None
    validation_fraction: float = 0.01
    skip_bad: bool = False
    seed: int = 0
    shard_tokens: int = shards.SHARD_TOKENS

    def check(self) -> None:
        """Refuse what contradicts itself or is out of range.

        Raises:
            ConfigError: naming the option.
        """
        if not self.source:
            raise ConfigError("the source is empty; give a path, or the name of a dataset on the hub")
        if self.tokenizer is not None and self.train_bpe is not None:
            raise ConfigError("--tokenizer takes a tokeniser that there is and --train-bpe makes one; give one of them")
        if self.train_bpe is not None and self.train_bpe < tokenizers.SMALLEST_BPE:
            raise ConfigError(
                f"--train-bpe must be at least {tokenizers.SMALLEST_BPE} (256 bytes, the document end and padding), "
                f"not {self.train_bpe}"
            )
        if not 0 < self.validation_fraction < 1:
            raise ConfigError(f"--validation-fraction must be between 0 and 1, not {self.validation_fraction}")
        if self.seed < 0:
            raise ConfigError(f"--seed must be at least 0, not {self.seed}")
        if self.shard_tokens < 1:
            raise ConfigError(f"--shard-tokens must be at least 1, not {self.shard_tokens}")
        if self.reading.document_end == "":
            raise ConfigError("--document-end is empty; give the text that stands between documents")

    def arguments(self) -> dict[str, Any]:
        """All of it by the options' names, flat, as it is written down."""
        flat = asdict(self)
        return {"source": flat.pop("source"), **flat.pop("reading"), **flat}


@dataclass(frozen=True)
class Prepared:
    """How `prepare` ended: ``status`` is ``finished`` or ``already finished``; seconds are this session's."""

    status: str
    arrays: TokenArrays
    seconds: float

    def summary(self) -> dict[str, Any]:
        """What there is now, in documents, tokens and bytes of text."""
        arrays = self.arrays
        parts = {"train": arrays.train, "validation": arrays.validation}
        tokens, size = (sum(getattr(part, name) for part in parts.values()) for name in ("tokens", "bytes"))
        return {
            "status": self.status,
            "out": arrays.source,
            "documents": sum(part.documents for part in parts.values()),
            "tokens": tokens,
            "bytes": size,
            "bytes_per_token": size / tokens,
            "empty": arrays.facts["empty"],
            "skipped": sum(arrays.facts["skipped"].values()),
            "skipped_reasons": arrays.facts["skipped"],
            **{
                name: {
                    "documents": part.documents,
                    "tokens": part.tokens,
                    "bytes": part.bytes,
                    "shards": len(part.shards),
                }
                for name, part in parts.items()
            },
            "vocab_size": arrays.vocabulary.size,
            "eos_id": arrays.vocabulary.eos_id,
            "pad_id": arrays.vocabulary.pad_id,
            "dtype": arrays.vocabulary.dtype.__name__,
            "tokenizer_sha256": arrays.tokenizer_sha256,
            "sha256": arrays.sha256,
            "seconds": round(self.seconds, 3),
        }


class Watcher(Protocol):
    """What a preparation tells the person who waits."""

    def note(self, message: str) -> None:
        """Something worth one line."""

    def begin(self, what: str, total: int | None) -> None:
        """A pass over the source starts; its size on disk in bytes, where that is known."""

    def show(self, done_bytes: int, documents: int, text_bytes: int, tokens: int) -> None:
        """How far the pass is: bytes of its size on disk, and this session's documents, bytes of text and tokens."""

    def end(self) -> None:
        """The pass is over, for whatever reason."""


def held_out(content: bytes, fraction: float, seed: int = 0) -> bool:
    """Whether a document is for validation.

    Its text and the seed alone decide, so equal documents lie on the same side wherever they stand.
    """
    digest = hashlib.sha256(f"{seed}:".encode())
    digest.update(content)
    return int.from_bytes(digest.digest()[:8], "big") < int(fraction * 2**64)


def prepare(request: Request, out: Path, watcher: Watcher) -> Prepared:
    """Prepare a folder, going on where an earlier session of the same request stopped.

    Args:
        request: what to prepare.
        out: the folder, new, empty, or of the same request.
        watcher: shown what happens.

    Raises:
        ConfigError: for all that is wrong with the request, the source or the folder. What was finished stays, and the
            same request goes on with it.
    """
    request.check()
    started = time.perf_counter()
    folders.check(out, _MARKS, "prepared corpus")
    if Path(request.source).is_dir() and out.resolve().is_relative_to(Path(request.source).resolve()):
        raise ConfigError(
            f"--out {out} lies in the source {request.source}, so its files would be taken for documents; choose "
            "another --out"
        )
    source, reading = _open(request, out)
    arguments = replace(request, reading=reading).arguments()
    for note in source.notes:
        watcher.note(note)
    with folders.claimed(out, "preparing"):
        for path in folders.half_written(out, _MARKS):
            path.unlink()
        if (out / shards.META).exists():
            arrays = shards.read_meta(out, str(out))
            _require_equal(out, arrays.facts, arguments, source.digest)
            shards.check_files(arrays)
            arrays.tokenizer()
            (out / shards.PROGRESS).unlink(missing_ok=True)
            return Prepared("already finished", arrays, time.perf_counter() - started)
        job = _Job(request, arguments, source, out, watcher)
        try:
            arrays = job.run()
        except OSError as error:
            raise ConfigError(
                f"writing to {out} failed: {error.strerror or error}; what was finished stays, and the same command "
                "goes on from there"
            ) from error
        finally:
            job.close()
        return Prepared("finished", arrays, time.perf_counter() - started)


class _Job:
    """One session of a preparation, in a folder that is its own."""

    def __init__(
        self, request: Request, arguments: Mapping[str, Any], source: Source, out: Path, watcher: Watcher
    ) -> None:
        self.request, self.arguments = request, arguments
        self.source, self.out, self.watcher = source, out, watcher
        self.position = Position()
        self.empty = 0
        self.skipped: Counter[str] = Counter()
        self.tokenizer_sha256: str | None = None
        self.sides: dict[str, ShardWriter] = {}
        self._committed_shards = 0
        self._committed_at = time.monotonic()

    def run(self) -> TokenArrays:
        """All that is left to do."""
        tokenizer = self._resume()
        try:
            tokenizer = tokenizer or self._start()
            self._read(tokenizers.Encoder(tokenizer))
            return self._finish()
        except ConfigError:
            if self.documents:
                self._commit()
            else:
                # Nothing is lost, and the next try may have other arguments.
                _clear(self.out)
            raise

    def close(self) -> None:
        """Let go of the files and the display."""
        self.watcher.end()
        for side in self.sides.values():
            side.close()

    @property
    def documents(self) -> int:
        return sum(side.documents for side in self.sides.values())

    def _start(self) -> PreTrainedTokenizerBase:
        _clear(self.out)
        # Before anything else, so that a folder with anything in it is known to be ours.
        self._commit()
        tokenizer = self._tokenizer()
        tokenizer.save_pretrained(self.out / shards.TOKENIZER)
        self.tokenizer_sha256 = tokenizers.fingerprint(tokenizer)
        self._make_sides(tokenizer)
        self._commit()
        return tokenizer

    def _resume(self) -> PreTrainedTokenizerBase | None:
        """Go back to what was committed; None where there is nothing to go back to."""
        path = self.out / shards.PROGRESS
        if not path.exists():
            return None
        try:
            progress = json.loads(path.read_text(encoding="utf-8"))
            if not sum(side["documents"] for side in progress["sides"].values()):
                return None
            _require_equal(self.out, progress, self.arguments, self.source.digest)
            self.position = Position(**progress["position"])
            self.empty, self.skipped = int(progress["empty"]), Counter(progress["skipped"])
            self.tokenizer_sha256 = progress["tokenizer_sha256"]
            tokenizer = shards.load_tokenizer(self.out)
            self._make_sides(tokenizer)
            for name, side in self.sides.items():
                side.restore(progress["sides"][name])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} is damaged ({error}); delete {self.out} and prepare the corpus anew") from error
        given = tokenizer if self.request.tokenizer is None else tokenizers.load(self.request.tokenizer)
        for made in (tokenizer, given):
            if tokenizers.fingerprint(made) != self.tokenizer_sha256:
                raise ConfigError(
                    f"the tokeniser {made.name_or_path} has changed since the preparation of {self.out} began; delete "
                    "the folder to prepare the corpus anew"
                )
        self.watcher.note(f"going on after {self.documents:,} documents")
        return tokenizer

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.request.tokenizer is not None:
            return tokenizers.load(self.request.tokenizer)
        if self.request.train_bpe is None:
            return byte_tokenizer.build()
        self.watcher.begin("learning a vocabulary", self.source.total_bytes)
        tokenizer = tokenizers.train_bpe(self._training_texts(), self.request.train_bpe)
        self.watcher.end()
        if len(tokenizer) < self.request.train_bpe:
            self.watcher.note(
                f"the documents to train on give {len(tokenizer):,} tokens, not {self.request.train_bpe:,}"
            )
        return tokenizer

    def _training_texts(self) -> Iterator[str]:
        """The documents to train on, up to a number of bytes that a vocabulary can be learnt from."""
        documents = size = 0
        for item in self.source.items(Position()):
            if isinstance(item, Bad):
                self._refuse_unless_skipped(item)
            elif item.content.strip() and not self._held_out(item.content):
                documents, size = documents + 1, size + len(item.content)
                yield item.content.decode()
                self.watcher.show(self.source.done(item.after), documents, size, 0)
            if size >= _BPE_BYTES:
                self.watcher.note(f"the vocabulary is learnt from the first {size >> 20:,} MiB of text")
                return

    def _make_sides(self, tokenizer: PreTrainedTokenizerBase) -> None:
        vocabulary = tokenizers.vocabulary(tokenizer)
        self.sides = {
            name: ShardWriter(self.out, name, vocabulary, self.request.shard_tokens) for name in ("train", "validation")
        }

    def _read(self, encoder: tokenizers.Encoder) -> None:
        """The rest of the source, into the arrays."""
        self.watcher.begin("tokenising", self.source.total_bytes)
        documents = size = tokens = 0
        for batch in _batches(self.source.items(self.position)):
            kept = [item.content for item in batch if isinstance(item, Document) and item.content.strip()]
            encoded = iter(encoder.encode(kept))
            for item in batch:
                if isinstance(item, Bad):
                    self._refuse_unless_skipped(item)
                    self.skipped[item.reason] += 1
                elif not item.content.strip():
                    self.empty += 1
                else:
                    ids = next(encoded)
                    self._write(item, ids)
                    documents, size, tokens = documents + 1, size + len(item.content), tokens + len(ids) + 1
                self.position = item.after
                if self._due():
                    self._commit()
            self.watcher.show(self.source.done(self.position), documents, size, tokens)
        self.watcher.end()

    def _write(self, document: Document, ids: np.ndarray) -> None:
        side = self.sides["validation" if self._held_out(document.content) else "train"]
        side.write(ids, len(document.content))

    def _held_out(self, content: bytes) -> bool:
        return held_out(content, self.request.validation_fraction, self.request.seed)

    def _refuse_unless_skipped(self, bad: Bad) -> None:
        if not self.request.skip_bad:
            raise ConfigError(f"{bad.message}; --skip-bad leaves such things out and counts them")

    def _due(self) -> bool:
        finished = sum(len(side.finished) for side in self.sides.values())
        return finished > self._committed_shards or time.monotonic() - self._committed_at > _COMMIT_SECONDS

    def _commit(self) -> None:
        """Make what was done until now what the next session goes on from."""
        for side in self.sides.values():
            side.flush()
        progress = {
            "format": shards.FORMAT,
            "arguments": dict(self.arguments),
            "source_digest": self.source.digest,
            "tokenizer_sha256": self.tokenizer_sha256,
            "position": asdict(self.position),
            "empty": self.empty,
            "skipped": dict(self.skipped),
            "sides": {name: side.state() for name, side in self.sides.items()},
        }
        write_whole(self.out / shards.PROGRESS, json.dumps(progress, indent=2) + "\n")
        self._committed_shards = sum(len(side.finished) for side in self.sides.values())
        self._committed_at = time.monotonic()

    def _finish(self) -> TokenArrays:
        self._require_both_sides()
        for side in self.sides.values():
            side.finish_shard()
        vocabulary = self.sides["train"].vocabulary
        parts = {name: side.part() for name, side in self.sides.items()}
        assert self.tokenizer_sha256 is not None
        request = self.request
        arrays = TokenArrays(
            folder=self.out,
            source=str(self.out),
            sha256=shards.fingerprint(self.tokenizer_sha256, vocabulary, parts),
            tokenizer_sha256=self.tokenizer_sha256,
            vocabulary=vocabulary,
            train=parts["train"],
            validation=parts["validation"],
            facts={
                "arguments": dict(self.arguments),
                "source_digest": self.source.digest,
                "split": f"validation where SHA-256 of '{request.seed}:' and the text, as a fraction of its range, is "
                f"below {request.validation_fraction}",
                "empty": self.empty,
                "skipped": dict(sorted(self.skipped.items())),
                "version": siamesenorm.__version__,
            },
        )
        shards.write_meta(arrays)
        (self.out / shards.PROGRESS).unlink()
        return arrays

    def _require_both_sides(self) -> None:
        documents = self.documents
        train, validation = (self.sides[name].documents for name in ("train", "validation"))
        if train and validation:
            return
        # A preparation that can come to no end is nothing to go on with.
        self.close()
        self.sides = {}
        source, fraction = self.request.source, self.request.validation_fraction
        if not documents:
            left_out = [f"{self.empty:,} empty"] if self.empty else []
            left_out += [f"{count:,} skipped for {reason}" for reason, count in sorted(self.skipped.items())]
            raise ConfigError(f"there is no document in {source}{' (' + ', '.join(left_out) + ')' if left_out else ''}")
        if documents == 1:
            raise ConfigError(
                f"there is a single document in {source}, and both splits need one; --document-end cuts text into more"
            )
        missing, other = ("train", "smaller") if not train else ("validation", "larger")
        raise ConfigError(
            f"the {missing} split is empty: none of the {documents:,} documents in {source} falls into it with "
            f"--validation-fraction {fraction}; give a {other} one, or cut text into more documents with --document-end"
        )


def _batches(items: Iterator[Document | Bad]) -> Iterator[list[Document | Bad]]:
    """Items in lists, none of them lost where reading fails."""
    batch: list[Document | Bad] = []
    size = 0
    try:
        for item in items:
            batch.append(item)
            size += len(item.content) if isinstance(item, Document) else 0
            if len(batch) == _BATCH_DOCUMENTS or size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    except ConfigError:
        yield batch
        raise
    yield batch


def _open(request: Request, out: Path) -> tuple[Source, Reading]:
    """The source; one on the hub, at the revision that a preparation in `out` began with."""
    reading = request.reading
    there = _written(out)
    if there.get("source") == request.source and reading.revision is None and there.get("revision") is not None:
        reading = replace(reading, revision=there["revision"])
    source = open_source(request.source, reading)
    return source, replace(reading, revision=source.revision)


def _written(out: Path) -> dict[str, Any]:
    """The arguments that a folder was made with, as far as they can be read."""
    for name in _MARKS:
        with suppress(OSError, ValueError, KeyError, TypeError):
            arguments = json.loads((out / name).read_text(encoding="utf-8"))["arguments"]
            return arguments if isinstance(arguments, dict) else {}
    return {}


def _require_equal(out: Path, there: Mapping[str, Any], arguments: Mapping[str, Any], source_digest: str) -> None:
    """Refuse to take one preparation for another.

    The path of a source may differ where its content does not. Leaving out what is bad may be switched on at any time,
    and off again as long as nothing was left out, since neither changes what was made so far.
    """
    here = there["arguments"]
    ignored = set()
    if there["source_digest"] == source_digest:
        ignored.add("source")
    elif here["source"] == arguments["source"]:
        raise ConfigError(
            f"{arguments['source']} has changed since the preparation of {out} began; choose another --out, or delete "
            "that folder"
        )
    if arguments["skip_bad"] or not there["skipped"]:
        ignored.add("skip_bad")
    differing = folders.differences(here, arguments, ignored)
    if differing:
        raise ConfigError(
            "\n".join([f"{out} is prepared with other arguments; choose another --out. What differs:", *differing])
        )


def _clear(out: Path) -> None:
    """Take away what a preparation that has come to nothing wrote; its mark goes last."""
    shutil.rmtree(out / shards.TOKENIZER, ignore_errors=True)
    for side in ("train", "validation"):
        for path in out.glob(f"{side}-*.npy"):
            path.unlink()
    (out / shards.PROGRESS).unlink(missing_ok=True)
