"""``siamesenorm eval``."""

from __future__ import annotations

from typing import Annotated

import typer

from siamesenorm.cli.options import Json, ModelOrRun, load, model_and_recipe, print_json


def evaluate(
    model_or_run: ModelOrRun,
    source: Annotated[
        str | None, typer.Option(help="The corpus or a prepared folder; default: the run's, else python-stdlib.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(min=2, help="In tokens; default: the run's, else 256.")] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="How many, spread over the held-out part; default: the run's, else all.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 8,
    json: Json = False,
) -> None:
    """Measure a model's loss and perplexity on held-out text."""
    import torch

    from siamesenorm.data import arrays as token_arrays
    from siamesenorm.data import corpus
    from siamesenorm.data.tokenizer import fingerprint
    from siamesenorm.residual import ConfigError
    from siamesenorm.training.documents import DocumentMask
    from siamesenorm.training.evaluate import evaluate as measure
    from siamesenorm.training.evaluate import held_out_sequences
    from siamesenorm.training.limits import check_length, check_vocabulary, positions_of
    from siamesenorm.training.settings import autocast_of

    path, recipe = model_and_recipe(model_or_run)
    model, tokenizer = load(path)
    source = source or (recipe.data.source if recipe else corpus.NAME)
    check_vocabulary(model.config.vocab_size, token_arrays.vocabulary(source))
    arrays = token_arrays.prepare(source)
    if fingerprint(tokenizer) != arrays.tokenizer_sha256:
        raise ConfigError(f"the corpus {arrays.source} is cut by another tokeniser than the model in {path} has")
    length = sequence_length or (recipe.data.sequence_length if recipe else min(256, positions_of(model) or 256))
    check_length(model, length, "--sequence-length")
    if sequences is None and recipe is not None and sequence_length is None:
        sequences = recipe.data.validation_sequences
    mask = DocumentMask(arrays.vocabulary.eos_id) if recipe is not None and recipe.data.document_masking else None
    if mask is not None:
        mask.check(model, length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = measure(
        model.to(device),
        held_out_sequences(arrays.held_out(), length, sequences),
        batch_size=batch_size,
        device=device,
        autocast=autocast_of(recipe) if recipe else None,
        mask=mask,
    )
    bits_per_byte = found.bits_per_byte(arrays.held_out_bytes_per_token)
    if json:
        print_json(
            {
                "val_loss": found.loss,
                "val_ppl": found.perplexity,
                "val_tokens": found.tokens,
                "bits_per_byte": bits_per_byte,
                "sequence_length": length,
                "corpus": arrays.source,
                "corpus_sha256": arrays.sha256,
                "model": str(path),
            }
        )
        return
    print(f"validation loss  {found.loss:.4f} nats per token over {found.tokens:,} tokens in sequences of {length}")
    print(f"perplexity       {found.perplexity:.4f}")
    print(f"bits per byte    {bits_per_byte:.4f}")
    print(f"corpus           {arrays.source}, sha256 {arrays.sha256}")
