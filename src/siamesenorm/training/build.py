"""From a recipe to a model, and the checks that can be made before anything is trained or written."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from siamesenorm import hosts
from siamesenorm.data import arrays as token_arrays
from siamesenorm.data import corpus
from siamesenorm.data.shards import TokenArrays
from siamesenorm.data.tokenizer import Vocabulary
from siamesenorm.residual import ConfigError, Scheme, make_scheme
from siamesenorm.training import pretrained
from siamesenorm.training.documents import DocumentMask
from siamesenorm.training.processes import local_device
from siamesenorm.training.recipe import Recipe

# Vocabularies are often rounded up so that the last matrix product runs on whole tiles.
_LARGEST_ROUNDING = 256


def scheme_of(recipe: Recipe) -> Scheme:
    """The residual scheme that a recipe names, with its options checked."""
    return make_scheme(recipe.model.scheme, **recipe.model.options)


def build_model(recipe: Recipe, *, needs_data: bool = True) -> PreTrainedModel:
    """The recipe's model on torch's current default device: initialised from its seed, or with a saved model's weights.

    The vocabulary and the ids of the document end and of padding are the tokeniser's unless the recipe gives them; a
    saved model keeps its own, and what the scheme adds to it starts at the scheme's initial values.

    Args:
        recipe: what to build.
        needs_data: whether the data must be there; otherwise its tokeniser is not asked where the recipe itself gives
            ``model.config.vocab_size``, or a saved model.

    Raises:
        ConfigError: for an unknown host, scheme, option or configuration key, a vocabulary that is not the data's, or a
            saved model that cannot be had or is another than the recipe says.
    """
    if recipe.model.pretrained is not None:
        saved = pretrained.find(recipe)
        if needs_data:
            saved.check_size(token_arrays.vocabulary(recipe.data.source))
        torch.manual_seed(recipe.seed)
        return saved.build()
    if not needs_data and "vocab_size" in recipe.model.config:
        unknown = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return _build(recipe, {**unknown, **recipe.model.config})
    vocabulary = token_arrays.vocabulary(recipe.data.source)
    config: dict[str, Any] = {
        "vocab_size": vocabulary.size,
        "bos_token_id": None,
        "eos_token_id": vocabulary.eos_id,
        # A model keeps the row of its padding out of training, which must not befall the document end.
        "pad_token_id": None if vocabulary.pad_id == vocabulary.eos_id else vocabulary.pad_id,
        **recipe.model.config,
    }
    if isinstance(config["vocab_size"], int):
        check_vocabulary(config["vocab_size"], vocabulary)
    if config["eos_token_id"] != vocabulary.eos_id:
        raise ConfigError(
            f"model.config.eos_token_id ({config['eos_token_id']}) is not what ends the documents in "
            f"{recipe.data.source} ({vocabulary.eos_id}); leave it out"
        )
    return _build(recipe, config)


def _build(recipe: Recipe, config: dict[str, Any]) -> PreTrainedModel:
    for key in ("dtype", "torch_dtype"):
        if key in recipe.model.config:
            raise ConfigError(f"model.config.{key} has no effect: weights are float32; see train.precision")
    torch.manual_seed(recipe.seed)
    return hosts.build(recipe.model.host, config, recipe.model.scheme, dict(recipe.model.options))


def empty_model(recipe: Recipe, *, needs_data: bool = True) -> PreTrainedModel:
    """The recipe's model on the meta device: the class and configuration of `build_model`'s, without weights."""
    with torch.device("meta"):
        return build_model(recipe, needs_data=needs_data)


def check(recipe: Recipe, *, needs_data: bool = True) -> PreTrainedModel:
    """Refuse a recipe that could not be trained; what comes back is its model on the meta device, without weights.

    Args:
        recipe: what to check.
        needs_data: as in `build_model`.

    Raises:
        ConfigError: naming what does not fit together.
    """
    model = empty_model(recipe, needs_data=needs_data)
    if recipe.model.pretrained is not None and needs_data:
        pretrained.find(recipe).check_tokenizer(recipe.data.source)
    if not hosts.blocks(model):
        raise ConfigError("the model has no blocks; give it at least one")
    check_length(model, recipe.data.sequence_length, "data.sequence_length")
    if recipe.data.document_masking:
        # What a mask can be put into does not depend on the token that ends a document.
        DocumentMask(eos_id=0).check(model, recipe.data.sequence_length)
    return model


def document_mask(recipe: Recipe) -> DocumentMask | None:
    """What keeps documents apart, where the recipe asks for it."""
    if not recipe.data.document_masking:
        return None
    return DocumentMask(token_arrays.vocabulary(recipe.data.source).eos_id)


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


def with_corpus(recipe: Recipe, arrays: TokenArrays) -> Recipe:
    """The recipe with the corpus's place and fingerprint in it.

    Raises:
        ConfigError: where the recipe asks for a corpus with another one, or for more than it holds.
    """
    embedded = arrays.source == corpus.NAME
    tokenizer = recipe.data.tokenizer_sha256
    if tokenizer is not None and tokenizer != arrays.tokenizer_sha256:
        raise ConfigError(
            f"the corpus {arrays.source} is cut by another tokeniser than data.tokenizer_sha256 asks for: by "
            f"{arrays.tokenizer_sha256[:16]}…, not {tokenizer[:16]}…"
        )
    wanted = recipe.data.sha256
    if wanted is not None and wanted != arrays.sha256:
        raise ConfigError(
            f"the corpus {arrays.source} is not the one that data.sha256 asks for: it has {arrays.sha256[:16]}…, not "
            f"{wanted[:16]}… ({'it differs between Python versions; ' if embedded else ''}data.sha256=null takes it as "
            "it is)"
        )
    sequences = arrays.train.sequences(recipe.data.sequence_length)
    if sequences < recipe.train.batch_size:
        raise ConfigError(
            f"train.batch_size ({recipe.train.batch_size}) asks for more sequences of {recipe.data.sequence_length} "
            f"tokens than the corpus has ({sequences:,})"
        )
    data = replace(
        recipe.data,
        source=arrays.source,
        sha256=arrays.sha256,
        tokenizer_sha256=tokenizer if embedded else arrays.tokenizer_sha256,
    )
    return replace(recipe, data=data)


def parameter_counts(model: PreTrainedModel) -> tuple[int, int]:
    """Parameters in total, and without the tables that turn tokens into vectors and back."""
    total = sum(parameter.numel() for parameter in model.parameters())
    tables = {id(table.weight): table.weight.numel() for table in (
        model.get_input_embeddings(), model.get_output_embeddings()
    ) if isinstance(table, torch.nn.Embedding | torch.nn.Linear)}  # fmt: skip
    return total, total - sum(tables.values())


def autocast_of(recipe: Recipe) -> torch.dtype | None:
    """What branches compute in where it is not float32."""
    return torch.bfloat16 if recipe.train.precision == "bfloat16" else None


def device_of(recipe: Recipe) -> torch.device:
    """Where the recipe trains.

    Raises:
        ConfigError: where it names a device that is not there.
    """
    name = recipe.train.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device is cuda and this machine has no CUDA device; use train.device=cpu")
    return local_device(name)
