"""``siamesenorm eval``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from siamesenorm.cli.options import Json, ModelOrRun, bar, load, model_and_recipe, print_json


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
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME_OR_FILE,...",
            help="Measure a language model on these tasks of lm-eval instead, with commas between or given again: "
            "their names, task files, or paper. Files may hold code.",
        ),
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question; default: the task's.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Of each task, only the first so many examples.")] = None,
    json: Json = False,
) -> None:
    """Measure a model on what was held out: loss and perplexity of text, accuracy and loss of images; or on tasks.

    The results on tasks are kept beside the model, in evaluations.json, and in its card.
    """
    from siamesenorm.residual import ConfigError
    from siamesenorm.training.subjects import find

    path, recipe = model_and_recipe(model_or_run)
    if tasks is not None:
        held_out = {
            "--source": source, "--sequence-length": sequence_length, "--sequences": sequences, "--images": images,
        }  # fmt: skip
        for name, given in held_out.items():
            if given is not None:
                raise ConfigError(f"{name} is about held-out data, and --tasks bring their own")
        names = [name.strip() for each in tasks for name in each.split(",")]
        _on_tasks(path, names, batch_size=batch_size, shots=shots, limit=limit, json=json)
        return
    for name, given in {"--shots": shots, "--limit": limit}.items():
        if given is not None:
            raise ConfigError(f"{name} is for --tasks")
    subject = find(path, recipe, source=source, sequence_length=sequence_length, sequences=sequences, images=images)
    with bar("measured", len(subject)) as advance:
        facts = subject.measure(batch_size, advance)
    facts["model"] = str(path)
    if json:
        print_json(facts)
        return
    for label, text in _lines(facts):
        print(f"{label:16} {text}")


def _on_tasks(
    path: Path, names: list[str], *, batch_size: int, shots: int | None, limit: int | None, json: bool
) -> None:
    from siamesenorm.training import harness
    from siamesenorm.training.settings import best_device

    harness.check_place(path)
    model, tokenizer = load(path)
    results = harness.run(model.to(best_device()), tokenizer, names, batch_size=batch_size, shots=shots, limit=limit)
    if json:
        print_json({"tasks": results, "model": str(path)})
        harness.record(path, results)
        return
    for task, metric, value, error, examples, _ in harness.rows(results):
        print(f"{task:24} {metric:16} {value}{f' ± {error}' if error else ''}{f' over {examples}' if examples else ''}")
    file = harness.record(path, results)
    print(f"\nin {file}, and in the model's card")
    there = harness.recorded(path)
    if kept := [name for name in results if there[name]["examples"] != results[name]["examples"]]:
        print(f"but for {', '.join(kept)}: what was measured over all examples stays")


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
