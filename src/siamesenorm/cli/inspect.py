"""``siamesenorm inspect``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siamesenorm.cli.options import Json, model_folder, print_json, split_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from siamesenorm.training.recipe import Recipe

_BASELINE = "pre"
_DEFAULT_LENGTH = 2048


def inspect(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE_OR_MODEL] [KEY.SUB=VALUE]...",
            help="A recipe with values to change in it, or the folder of a saved model or run.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what each sublayer reads and writes, and what a model costs, without making its weights."""
    name, overrides = split_arguments(arguments or [])
    model, baseline, length, title = (
        _from_folder(Path(name), overrides) if Path(name).is_dir() else _from_recipe(name, overrides)
    )
    from siamesenorm.hosts import site_table
    from siamesenorm.training.build import parameter_counts
    from siamesenorm.training.cost import FORMULA, flops_per_token

    table = site_table(model)
    total, non_embedding = parameter_counts(model)
    flops = flops_per_token(model, length)
    base_total, _ = parameter_counts(baseline)
    base_flops = flops_per_token(baseline, length)
    facts = {
        "model": title,
        "sites": table,
        "params": total,
        "params_non_embedding": non_embedding,
        "sequence_length": length,
        "flops_per_token_forward": flops.products + flops.elementwise,
        "flops_per_token_training": flops.training,
        "flops_formula": FORMULA,
        "over_pre": {
            "params": total - base_total,
            "params_percent": 100 * (total / base_total - 1),
            "flops_per_token_training": flops.training - base_flops.training,
            "flops_percent": 100 * (flops.training / base_flops.training - 1),
        },
    }
    if json:
        print_json(facts)
    else:
        _show(facts)


def _from_recipe(name: str, overrides: list[str]) -> tuple[PreTrainedModel, PreTrainedModel, int, str]:
    from siamesenorm.training.build import check
    from siamesenorm.training.recipe_files import load

    recipe = load(name, overrides)
    baseline = replace(recipe, model=replace(recipe.model, scheme=_BASELINE, options={}))
    return check(recipe), check(baseline), recipe.data.sequence_length, _title(recipe)


def _from_folder(path: Path, overrides: list[str]) -> tuple[PreTrainedModel, PreTrainedModel, int, str]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from siamesenorm.hosts import rewire, scheme_of
    from siamesenorm.residual import ConfigError
    from siamesenorm.training.build import positions_of

    if overrides:
        raise ConfigError(f"'{overrides[0]}' changes a recipe's values; the model in {path} is as it is")
    folder, recipe = model_folder(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no saved model: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the model in {folder}: {' '.join(str(error).split())}") from error
    plain = getattr(config, "residual_scheme", None) is None
    changed = copy.deepcopy(config)
    if not plain:
        changed.residual_scheme = {"name": _BASELINE}
    with torch.device("meta"):
        model, baseline = (AutoModelForCausalLM.from_config(each) for each in (config, changed))
        if plain:
            # A model that the package has not touched is Pre-Norm already; rewiring only gives its sites names.
            model, baseline = rewire(model, _BASELINE), rewire(baseline, _BASELINE)
    scheme = scheme_of(model.config)
    length = recipe.data.sequence_length if recipe else positions_of(model) or _DEFAULT_LENGTH
    return model, baseline, length, f"{path}: {config.model_type} with {_scheme(scheme.name, scheme.options())}"


def _title(recipe: Recipe) -> str:
    return f"{recipe.name}: {recipe.model.host} with {_scheme(recipe.model.scheme, recipe.model.options)}"


def _scheme(name: str, options: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in options.items())])


def _show(facts: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    over = facts["over_pre"]
    table = Table(title=facts["model"], box=box.SIMPLE_HEAD, title_justify="left")
    for name in facts["sites"][0]:
        table.add_column(name)
    for row in facts["sites"]:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    console.print(table)
    lines = [
        f"parameters       {facts['params']:,} in total, {facts['params_non_embedding']:,} without the token tables",
        f"FLOPs per token  {facts['flops_per_token_training']:,.0f} in training, "
        f"{facts['flops_per_token_forward']:,.0f} forward, in sequences of {facts['sequence_length']}",
        f"over Pre-Norm    {over['params']:+,} parameters ({over['params_percent']:+.3f}%), "
        f"{over['flops_per_token_training']:+,.0f} FLOPs per token ({over['flops_percent']:+.3f}%)",
        f"how counted      {facts['flops_formula']}",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)
