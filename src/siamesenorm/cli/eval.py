"""``siamesenorm eval``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from siamesenorm.cli.options import Json, ModelOrRun, bar, load_model, load_tokenizer, model_and_recipe, print_json


def evaluate(
    model_or_run: ModelOrRun,
    source: Annotated[
        str | None,
        typer.Option(
            help="What to measure on: of a language model the corpus or a prepared folder, of an image classifier any "
            "set of images. Default: the run's, else python-stdlib or digits."
        ),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Of a language model, in tokens; default: the run's, else 256.")
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="How many, spread over the held-out part; default: the run's, else all.")
    ] = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="How many, spread over the held-out ones; default: the run's, else all.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences or images at a time.")] = 8,
    json: Json = False,
) -> None:
    """Measure a model on what was held out: loss and perplexity of text, accuracy and loss of images."""
    from siamesenorm.residual import ConfigError
    from siamesenorm.training.example import sees_images
    from siamesenorm.training.run_folder import is_pipeline

    path, recipe = model_and_recipe(model_or_run)
    if is_pipeline(path):
        for name, given in (("--source", source), ("--sequence-length", sequence_length), ("--sequences", sequences)):
            if given is not None:
                raise ConfigError(f"{name} is not for diffusion models")
        if recipe is None:
            raise ConfigError(f"'{path}' is a diffusion model without its run, whose data it would be measured on")
        facts = _denoise(path, recipe, images, batch_size)
    else:
        model = load_model(path)
        if not sees_images(model):
            if images is not None:
                raise ConfigError("--images is for models of images; --sequences chooses how much text")
            facts = _read(path, model, recipe, source, sequence_length, sequences, batch_size)
        else:
            for name, given in (("--sequence-length", sequence_length), ("--sequences", sequences)):
                if given is not None:
                    raise ConfigError(f"{name} is for language models; --images chooses how many images")
            facts = _look(path, model, recipe, source, images, batch_size)
    facts["model"] = str(path)
    if json:
        print_json(facts)
        return
    for label, text in _lines(facts):
        print(f"{label:16} {text}")


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "val_accuracy" in facts:
        yield "accuracy", f"{facts['val_accuracy']:.2%} of {facts['val_images']:,} images"
        yield "among the best 5", f"{facts['val_top5']:.2%}"
        yield "loss", f"{facts['val_loss']:.4f} nats per image"
        yield "images", f"{facts['images_source']}, sha256 {facts['images_sha256']}"
    elif "val_images" in facts:
        yield "squared error", f"{facts['val_loss']:.4f} of the prediction, over {facts['val_images']:,} images"
        if "val_variational" in facts:
            yield "bound", f"{facts['val_variational']:.4f} bits per number"
        yield "images", f"{facts['images_source']}, sha256 {facts['images_sha256']}"
    else:
        of = f"{facts['val_tokens']:,} tokens in sequences of {facts['sequence_length']}"
        yield "validation loss", f"{facts['val_loss']:.4f} nats per token over {of}"
        yield "perplexity", f"{facts['val_ppl']:.4f}"
        yield "bits per byte", f"{facts['bits_per_byte']:.4f}"
        yield "corpus", f"{facts['corpus']}, sha256 {facts['corpus_sha256']}"


def _read(
    path: Path,
    model: Any,
    recipe: Any,
    source: str | None,
    sequence_length: int | None,
    sequences: int | None,
    batch_size: int,
) -> dict[str, Any]:
    """A language model on held-out text."""
    from siamesenorm.data import arrays as token_arrays
    from siamesenorm.data import corpus
    from siamesenorm.data.tokenizer import fingerprint
    from siamesenorm.residual import ConfigError
    from siamesenorm.training.documents import DocumentMask
    from siamesenorm.training.evaluate import evaluate as measure
    from siamesenorm.training.evaluate import held_out_sequences
    from siamesenorm.training.limits import check_length, check_vocabulary, positions_of
    from siamesenorm.training.settings import autocast_of, best_device

    tokenizer = load_tokenizer(path)
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
    device = best_device()
    found = measure(
        model.to(device),
        held_out_sequences(arrays.held_out(), length, sequences),
        batch_size=batch_size,
        device=device,
        autocast=autocast_of(recipe) if recipe else None,
        mask=mask,
    )
    return {
        **found.figures(),
        "bits_per_byte": found.bits_per_byte(arrays.held_out_bytes_per_token),
        "sequence_length": length,
        "corpus": arrays.source,
        "corpus_sha256": arrays.sha256,
    }


def _look(
    path: Path, model: Any, recipe: Any, source: str | None, count: int | None, batch_size: int
) -> dict[str, Any]:
    """An image classifier on held-out images."""
    from siamesenorm.data import digits
    from siamesenorm.data import images as image_sets
    from siamesenorm.training.normalise import Normalise
    from siamesenorm.training.settings import autocast_of, best_device
    from siamesenorm.training.tasks.classification import classify
    from siamesenorm.training.tasks.images import chosen, require_classes

    config, own = model.config, recipe.data if recipe else None
    found = image_sets.prepare(
        source or (own.source if own else digits.NAME),
        image_size=config.image_size,
        channels=config.num_channels,
        crop_fraction=(own.crop_fraction if own else None) or 1.0,
    )
    require_classes(config.id2label, found.classes, found.source)
    if count is None and own is not None and source is None:
        count = own.validation_images
    numbers = chosen(found.validation, count, "--images")
    device = best_device()
    with bar("images", len(numbers)) as advance:
        measured = classify(
            model.to(device),
            found.validation,
            numbers,
            Normalise.load(path),
            batch_size=batch_size,
            device=device,
            autocast=autocast_of(recipe) if recipe else None,
            progress=advance,
        )
    return {**measured.figures(), "images_source": found.source, "images_sha256": found.sha256}


def _denoise(path: Path, recipe: Any, count: int | None, batch_size: int) -> dict[str, Any]:
    """A diffusion model on the held-out images of its run."""
    from dataclasses import replace

    from siamesenorm.training.processes import ALONE
    from siamesenorm.training.sampling import load_pipeline
    from siamesenorm.training.settings import best_device
    from siamesenorm.training.tasks import task_of
    from siamesenorm.training.tasks.images import chosen

    data = task_of(recipe).load(ALONE)
    if count is not None:
        chosen(data.validation, count, "--images")
        recipe = replace(recipe, data=replace(recipe.data, validation_images=count))
    task = task_of(recipe)
    task.pinned(data)
    device = best_device()
    model = load_pipeline(path).transformer.to(device)
    found = task.validate(model, data, device=device, batch_size=batch_size)
    return {**found.figures(), **task.facts(data, found.figures())}
