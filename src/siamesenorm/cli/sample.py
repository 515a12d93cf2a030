"""``siamesenorm sample``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.cli.options import Json, ModelOrRun, bar, model_and_recipe, print_json


def sample(
    model_or_run: ModelOrRun,
    classes: Annotated[
        str | None, typer.Option(help="By name or number, with commas between them; default: all, ten at most.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Of each class.")] = 8,
    steps: Annotated[int | None, typer.Option(min=1, help="Of the sampler; default: the run's, else 50.")] = None,
    guidance: Annotated[float, typer.Option(min=0.0, help="Scale of classifier-free guidance; 1 is none.")] = 2.0,
    sampler: Annotated[
        str | None, typer.Option(help="ddim, ddpm, dpm++ or unipc; default: the run's, else ddim.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples at a time.")] = 64,
    out: Annotated[Path, typer.Option(help="The PNG: a class a row.")] = Path("samples.png"),
    json: Json = False,
) -> None:
    """Draw images from a diffusion model."""
    from siamesenorm.residual import ConfigError
    from siamesenorm.training import pictures, sampling
    from siamesenorm.training.settings import best_device

    if out.suffix.lower() != ".png":
        raise ConfigError(f"--out must end with .png, which {out} does not")
    path, recipe = model_and_recipe(model_or_run)
    pipeline = sampling.load_pipeline(path)
    pipeline.to(best_device())
    names = sampling.class_names(pipeline)
    chosen = sampling.chosen_classes(classes, names)
    wanted = getattr(recipe, "sample", None)
    steps = steps or getattr(wanted, "steps", None) or 50
    sampler = sampler or getattr(wanted, "sampler", None) or "ddim"
    labels = [label for label in chosen for _ in range(count)]
    with bar("sampling", len(labels)) as advance:
        images = sampling.draw(
            pipeline,
            labels,
            steps=steps,
            guidance=guidance,
            sampler=sampler,
            seed=seed,
            batch_size=batch_size,
            progress=advance,
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    pictures.sheet(images, count).save(out)
    if json:
        facts = {"steps": steps, "guidance": guidance, "sampler": sampler, "seed": seed, "model": str(path)}
        print_json({"picture": str(out), "classes": [names[label] for label in chosen], "of_each": count, **facts})
    else:
        rows = ", ".join(names[label] for label in chosen)
        print(f"{out}: {count} of each class in a row, from above: {rows}")
