"""``siamesenorm generate``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from siamesenorm.cli.options import Json, ModelOrRun, load, model_and_recipe, print_json

_DEFAULT_TOKENS = 200


def generate(
    model_or_run: ModelOrRun,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    tokens: Annotated[
        int | None, typer.Option(min=1, help="How many to add at most; default: 200, or as many as fit.")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token each time.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the sampling; 0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among this many likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sample among the likeliest of this much probability.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    json: Json = False,
) -> None:
    """Let a model go on from a prompt; the text appears as it is made."""
    from transformers import TextStreamer

    from siamesenorm.residual import ConfigError
    from siamesenorm.training import text
    from siamesenorm.training.settings import best_device

    if not prompt:
        raise ConfigError("the prompt is empty; give at least one character")
    path, _ = model_and_recipe(model_or_run)
    model, tokenizer = load(path)
    model.to(best_device())
    if tokens is None:
        # At least one, so that a prompt too long for the model is refused rather than echoed.
        tokens = max(text.room(model, tokenizer, prompt, _DEFAULT_TOKENS), 1)
    streamer = None if json else TextStreamer(tokenizer, skip_special_tokens=True)
    out = text.generate(
        model,
        tokenizer,
        prompt,
        tokens=tokens,
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        streamer=streamer,
    )
    if json:
        print_json({"prompt": prompt, "text": out, "seed": seed, "model": str(path)})
    else:
        sys.stdout.flush()
