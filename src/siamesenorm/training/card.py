"""The model card of what a run has trained: its recipe, data and figures, beside what every card says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import siamesenorm
from siamesenorm.hub import card
from siamesenorm.residual import make_scheme
from siamesenorm.training.recipe import CAUSAL_LM, CLASSIFICATION, DIFFUSION, Recipe, from_mapping, to_mapping
from siamesenorm.training.recipe_files import dump
from siamesenorm.training.run_folder import RunFolder, read_metrics
from siamesenorm.training.tasks import task_of

# A task for people, and what the hub calls it.
_TASKS = {
    CAUSAL_LM: ("language model", "text-generation"),
    CLASSIFICATION: ("image classifier", "image-classification"),
    DIFFUSION: ("class-conditional diffusion model", "unconditional-image-generation"),
}
# The figures that a card shows, by their names in a summary: for people, and for the hub where it lists them.
_FIGURES: dict[str, tuple[str, str | None]] = {
    "val_loss": ("validation {loss}", "loss"),
    "val_ppl": ("validation perplexity", "perplexity"),
    "bits_per_byte": ("bits per byte of the held-out text", None),
    "val_accuracy": ("validation accuracy", "accuracy"),
    "val_top5": ("share of held-out images whose class is among the best 5", None),
    "val_variational": ("variational bound, bits per number", None),
    "frechet_distance": ("Fréchet distance to the held-out images, in features of a classifier (not FID)", None),
    "train_loss": ("{loss} over the last batch", None),
}
# How the names of figures begin that are of a model, and not of its training.
_MEASURED = ("val_", "validated_after", "bits_per_byte", "frechet_")
_UNKNOWN = "not recorded"


def write(
    folder: Path,
    recipe: Recipe,
    figures: Mapping[str, Any],
    *,
    step: int,
    averaged: bool,
    params: int,
    from_folder: bool,
) -> None:
    """Write the card of a model that a run has trained. Folders of the machine that trained are named by name alone.

    Args:
        folder: of the saved model.
        recipe: the run's, its data pinned.
        figures: a summary, or what `figures_at` found.
        step: after which the weights were taken.
        averaged: whether they are the run's average.
        params: in total.
        from_folder: whether the model that the run started from is a folder, and no name on the hub.
    """
    if from_folder and recipe.model.pretrained is not None:
        recipe = replace(recipe, model=replace(recipe.model, pretrained=Path(recipe.model.pretrained).name))
    task, (kind, hub_kind) = task_of(recipe), _TASKS[recipe.task]
    scheme = make_scheme(recipe.model.scheme, **recipe.model.options)
    decay = f", averaged with decay {recipe.train.ema_decay:g}" if averaged else ""
    about = (
        f"A {kind} ({recipe.model.host}, {params:,} parameters) with the residual scheme `{scheme.label}`, trained by "
        f"the recipe `{recipe.name}` with seed {recipe.seed}. The weights are those after step {step:,} of "
        f"{recipe.train.steps:,}{decay}."
    )
    labels = {name: (label.format(loss=task.loss_label), metric) for name, (label, metric) in _FIGURES.items()}
    shown = [(labels[name][0], f"{figures[name]:.4g}") for name in labels if figures.get(name) is not None]
    results = [
        card.result("validation", hub_kind, _named(recipe.data.source), metric, figures[name], name=label)
        for name, (label, metric) in labels.items()
        if metric is not None and figures.get(name) is not None
    ]
    sections = {
        "Training": card.table(_training(recipe, figures)),
        "Data": card.table(_data(recipe)),
        **({"Figures": card.table(shown)} if shown else {}),
        "Recipe": f"```yaml\n{dump(_without_places(recipe))}```",
    }
    base = None if from_folder else recipe.model.pretrained
    card.write(folder, f"{recipe.name}, {scheme.label}", about, sections, results, base_model=base)


def figures_at(run: RunFolder, step: int, *, raw: bool) -> dict[str, Any]:
    """What a run knows of its model after a step: its summary at the end, else what was measured last up to there.

    Args:
        run: its folder.
        step: the model's.
        raw: the model is not the average that the run measured, so only figures of the training are its own.
    """
    figures = _figures_at(run, step)
    return {name: value for name, value in figures.items() if not (raw and name.startswith(_MEASURED))}


def _figures_at(run: RunFolder, step: int) -> dict[str, Any]:
    summary = run.finished_summary()
    if summary is not None and summary.get("steps") == step:
        return summary
    lines = [line for line in read_metrics(run.metrics) if line["step"] <= step]
    if not lines:
        return {}
    last = lines[-1]
    measured: dict[str, Any] = next((line for line in reversed(lines) if "val_loss" in line), {})
    validated = {name: value for name, value in measured.items() if name.startswith("val_")}
    return {**validated, "validated_after": measured.get("step"), "train_loss": last["loss"], **last}


def _training(recipe: Recipe, figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    train, optim, schedule = recipe.train, recipe.optim, recipe.schedule
    seen = "images" if task_of(recipe).counts_images else "tokens"
    rows = [
        (f"{seen} seen", f"{figures[seen]:,}" if figures.get(seen) is not None else _UNKNOWN),
        ("batch", f"{train.batch_size:,} {recipe.counts}"),
        ("optimiser", f"AdamW, betas {optim.beta1:g} and {optim.beta2:g}, weight decay {optim.weight_decay:g}"),
        (
            "learning rate",
            f"{optim.lr:g} after {schedule.warmup_steps:,} steps of warm-up, then a half cosine to "
            f"{schedule.final_fraction:g} of it",
        ),
        ("precision", train.precision),
        ("made with", f"siamesenorm {siamesenorm.__version__}, torch {torch.__version__}"),
    ]
    if figures.get("validated_after") is not None:
        rows.append(("last validation", f"after step {figures['validated_after']:,}"))
    if recipe.model.pretrained is not None:
        rows.insert(0, ("trained on from", _named(recipe.model.pretrained)))
    return rows


def _data(recipe: Recipe) -> list[tuple[str, str]]:
    data = recipe.data
    rows = [("source", f"`{_named(data.source)}`"), ("SHA-256", f"`{data.sha256}`")]
    if getattr(data, "tokenizer_sha256", None) is not None:
        rows.append(("SHA-256 of the tokeniser", f"`{data.tokenizer_sha256}`"))
    if recipe.task == CAUSAL_LM:
        masked = "; attention stays inside a document" if data.document_masking else ""
        rows.append(("sequences", f"{data.sequence_length:,} tokens{masked}"))
    return rows


def _named(source: str) -> str:
    """What to call data or a model: a folder by its name alone, for where it was is nobody's business."""
    path = Path(source).expanduser()
    return path.name if path.is_absolute() or path.exists() else source


def _without_places(recipe: Recipe) -> Recipe:
    """A recipe in which folders have their names alone."""
    tree = to_mapping(recipe)
    for part, key in (("data", "source"), ("model", "pretrained"), ("sample", "classifier")):
        if tree.get(part, {}).get(key) is not None:
            tree[part][key] = _named(tree[part][key])
    return from_mapping(tree)
