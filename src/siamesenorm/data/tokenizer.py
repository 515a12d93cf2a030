"""The tokenisers that a corpus can be cut with: bytes, a BPE trained on it, or any of transformers'."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from siamesenorm.data import byte_tokenizer
from siamesenorm.hub import checks
from siamesenorm.residual import ConfigError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Every byte, the end of a document and padding.
SMALLEST_BPE = byte_tokenizer.VOCAB_SIZE
# Vocabularies leave some ids for later.
_WIDEST_GAPS, _ALWAYS_FINE = 4, 1 << 16


@dataclass(frozen=True)
class Vocabulary:
    """The ids that a tokeniser gives are below ``size``; ``pad_id`` is ``eos_id`` where it has no padding."""

    size: int
    eos_id: int
    pad_id: int

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """The smallest type that holds every id and that the training engine reads."""
        return np.uint16 if self.size <= 1 << 16 else np.uint32


BYTES = Vocabulary(byte_tokenizer.VOCAB_SIZE, byte_tokenizer.EOS_ID, byte_tokenizer.PAD_ID)


def load(name_or_path: str) -> PreTrainedTokenizerBase:
    """A tokeniser of transformers, by the path of its folder or its name on the hub.

    One without an end-of-text token but with a separator (BERT's) ends documents with that.

    Raises:
        ConfigError: where it cannot be loaded or has no token to end a document with.
    """
    from transformers import AutoTokenizer

    local = Path(name_or_path).exists()
    if local:
        checks.check_tokenizer(Path(name_or_path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, local_files_only=local, trust_remote_code=False)
    except Exception as error:  # each kind of tokeniser has errors of its own for files that are not right
        where = "" if local else ", which is no folder here and cannot be had from the hub"
        raise ConfigError(f"cannot load the tokeniser {name_or_path}{where}: {one_line(error)}") from error
    if tokenizer.eos_token_id is None:
        if tokenizer.sep_token is None:
            raise ConfigError(
                f"the tokeniser {name_or_path} has neither an end-of-text nor a separator token, so nothing can mark "
                "where a document ends; set its eos_token and save it anew"
            )
        tokenizer.eos_token = tokenizer.sep_token
    return tokenizer


def train_bpe(texts: Iterable[str], size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE learnt from texts; it encodes any text and decodes to the same text.

    Args:
        texts: gone through once.
        size: tokens, the 256 bytes, the document end and padding included; texts with few different words give fewer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[byte_tokenizer.EOS, byte_tokenizer.PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(iter(texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=byte_tokenizer.EOS,
        pad_token=byte_tokenizer.PAD,
        clean_up_tokenization_spaces=False,
    )


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """A tokeniser's ids; gaps in their numbering count.

    Raises:
        ConfigError: the gaps are so wide that a model for it would be made of them.
    """
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids = tokenizer.get_vocab().values()
    size = max(ids) + 1
    if size > _WIDEST_GAPS * len(ids) + _ALWAYS_FINE:
        raise ConfigError(
            f"the tokeniser has {len(ids):,} tokens and numbers them up to {size - 1:,}, and a model has a row for each"
        )
    return Vocabulary(size=size, eos_id=eos, pad_id=eos if pad is None else pad)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (hexadecimal) of all that decides which ids a text gets; saving and loading leave it as it is."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        facts: dict[str, Any] = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    else:
        facts = json.loads(core.to_str())
        # How batches are filled up and cut off is a setting of the moment.
        facts.pop("padding", None)
        facts.pop("truncation", None)
    facts["eos_id"], facts["pad_id"] = tokenizer.eos_token_id, tokenizer.pad_token_id
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Encoder:
    """From documents to token ids; nothing is added, and a special token spelt out in a document is plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.vocabulary = vocabulary(tokenizer)
        self._tokenizer = tokenizer
        self._bytes = fingerprint(tokenizer) == fingerprint(byte_tokenizer.build())
        self._core = None
        core = getattr(tokenizer, "backend_tokenizer", None)
        if core is not None:
            # A copy, since these settings would change how the tokeniser treats everybody else's text.
            self._core = type(core).from_str(core.to_str())
            self._core.no_truncation()
            self._core.no_padding()
            self._core.encode_special_tokens = True

    def encode(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each document, in arrays of the vocabulary's dtype.

        Args:
            documents: valid UTF-8.
        """
        dtype = self.vocabulary.dtype
        if self._bytes:
            return [np.frombuffer(content, dtype=np.uint8).astype(dtype) for content in documents]
        texts = [content.decode() for content in documents]
        if self._core is not None:
            return [
                np.array(found.ids, dtype) for found in self._core.encode_batch_fast(texts, add_special_tokens=False)
            ]
        return [
            np.array(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True), dtype)
            for text in texts
        ]
