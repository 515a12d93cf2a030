"""What a language model can hold: its vocabulary and its positions."""

from __future__ import annotations

import math

from transformers import PreTrainedModel

from siamesenorm.data.tokenizer import Vocabulary
from siamesenorm.residual import ConfigError

# Vocabularies are often rounded up so that the last matrix product runs on whole tiles.
_LARGEST_ROUNDING = 256


def check_vocabulary(size: int, vocabulary: Vocabulary) -> None:
    """Refuse a model whose vocabulary is not the tokeniser's, or that rounded up.

    Raises:
        ConfigError: with both sizes.
    """
    needed = vocabulary.size
    most = math.ceil(needed / _LARGEST_ROUNDING) * _LARGEST_ROUNDING
    if not needed <= size <= most:
        raise ConfigError(
            f"the model's vocabulary of {size:,} does not match the tokeniser's {needed:,} tokens: vocab_size must be "
            f"{needed}, or up to {most}"
        )


def check_length(model: PreTrainedModel, length: int, name: str) -> None:
    """Refuse sequences that the model has no positions for.

    Raises:
        ConfigError: with both lengths.
    """
    positions = positions_of(model)
    if positions is not None and length > positions:
        raise ConfigError(f"{name} ({length}) is longer than the model's max_position_embeddings ({positions})")


def positions_of(model: PreTrainedModel) -> int | None:
    """The longest sequence that the model is made for, in tokens; None where its configuration does not say."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return None if positions is None else int(positions)
