"""A tokeniser whose ids are bytes: id 0 to 255 is that byte, then come the end of a document and padding.

Text goes through the usual ``tokenizer(text)`` and ``tokenizer.decode(ids)``. Python strings cannot hold arbitrary
bytes, so data that is not UTF-8 goes through `encode` and `decode` here, which lose nothing; the tokeniser's own
``decode`` shows bytes that are not UTF-8 as U+FFFD.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOS_ID = 256
PAD_ID = 257
VOCAB_SIZE = 258

EOS = "<|end|>"
PAD = "<|pad|>"


def encode(data: bytes) -> list[int]:
    """The ids of any bytes."""
    return list(data)


def decode(ids: Iterable[int]) -> bytes:
    """The bytes of any ids; document ends and padding stand for no byte.

    Raises:
        ValueError: for an id outside the vocabulary.
    """
    ids = list(ids)
    for token in ids:
        if not 0 <= token < VOCAB_SIZE:
            raise ValueError(f"token {token} is outside the byte vocabulary (0 to {VOCAB_SIZE - 1})")
    return bytes(token for token in ids if token < EOS_ID)


def _byte_symbols() -> list[str]:
    """The character by which the `tokenizers` library names each byte.

    It keeps the visible characters of Latin-1 and moves the rest, in order, to the code points from 256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, moved = [], 0
    for byte in range(256):
        if byte in visible:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + moved))
            moved += 1
    return symbols


def build(max_length: int | None = None) -> PreTrainedTokenizerFast:
    """The tokeniser in transformers' form, ready for ``save_pretrained``.

    Args:
        max_length: the longest sequence that the model takes, for the tokeniser's truncation and warnings.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_byte_symbols())}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    options = {} if max_length is None else {"model_max_length": max_length}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False, **options
    )
    if (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) != (VOCAB_SIZE, EOS_ID, PAD_ID):
        raise RuntimeError("the tokenizers library numbered the special tokens in another order than expected")
    return tokenizer
