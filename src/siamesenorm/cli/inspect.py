"""``siamesenorm inspect``."""

from __future__ import annotations

import copy
import itertools
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siamesenorm.cli.options import Json, model_and_recipe, print_json, split_arguments

if TYPE_CHECKING:
    from siamesenorm.training.recipe import Recipe

_BASELINE = "pre"
_DEFAULT_LENGTH = 2048
_SECONDS_IN_SILENCE = 10.0


def inspect(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE_OR_MODEL] [KEY.SUB=VALUE]...",
            help="A recipe with values to change in it, or the folder of a saved model or run.",
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Processes that train together, for memory and the command line.")
    ] = 1,
    json: Json = False,
) -> None:
    """Show what each sublayer reads and writes, and what a model and its training cost, without making its weights.

    Memory is that of tensors, on each process, when a step takes most; a GPU needs some more for its libraries. A
    recipe that gives its vocabulary can be inspected before its data is there.
    """
    name, overrides = split_arguments(arguments or [])
    with _patience():
        subject = _from_folder(Path(name), overrides) if Path(name).is_dir() else _from_recipe(name, overrides)
        facts = _facts(subject, ranks)
    if json:
        print_json(facts)
    else:
        _show(facts)


@dataclass(frozen=True)
class _Subject:
    """What is inspected: models on the meta device, and how the recipe trains them where there is one."""

    title: str
    model: Any
    baseline: Any
    sequence_length: int | None
    recipe: Recipe | None
    arguments: tuple[str, ...] = ()


def _facts(subject: _Subject, ranks: int) -> dict[str, Any]:
    from siamesenorm.hosts import site_table
    from siamesenorm.training.build import parameter_counts
    from siamesenorm.training.cost import FORMULA, active_parameters, expert_counts, flops_per_token
    from siamesenorm.training.example import forward_inputs

    model, length, recipe = subject.model, subject.sequence_length, subject.recipe
    total, non_embedding = parameter_counts(model)
    base_total, _ = parameter_counts(subject.baseline)
    experts = expert_counts(model)
    flops, base_flops = flops_per_token(model, length), flops_per_token(subject.baseline, length)
    facts = {
        "model": subject.title,
        "sites": site_table(model),
        "params": total,
        "params_active": active_parameters(model),
        "params_non_embedding": non_embedding,
        "experts": None if experts is None else {"active": experts[0], "total": experts[1]},
        "sequence_length": length or forward_inputs(model)[1],
        "of_images": length is None,
        "flops_per_token_forward": flops.products + flops.elementwise,
        "flops_per_token_training": flops.training,
        "flops_formula": FORMULA,
        "over_pre": {
            "params": total - base_total,
            "params_percent": 100 * (total / base_total - 1),
            "flops_per_token_training": flops.training - base_flops.training,
            "flops_percent": 100 * (flops.training / base_flops.training - 1),
        },
        "ranks": ranks,
        "memory": None,
        "torchrun": None,
    }
    if recipe is not None:
        facts["memory"] = _memory(model, recipe, ranks)
        facts["torchrun"] = _torchrun(subject.arguments, ranks)
    return facts


def _memory(model: Any, recipe: Recipe, ranks: int) -> dict[str, Any]:
    """Bytes on one process, and what they depend on."""
    from siamesenorm.training.memory import training_memory
    from siamesenorm.training.parallel import micro_batch_size, strategy

    found = training_memory(model, recipe, ranks)
    train = recipe.train
    return {
        "total": found.total,
        **asdict(found),
        "parallel": strategy(recipe, ranks),
        "precision": train.precision,
        "micro_batch_size": micro_batch_size(recipe, ranks),
        "activation_checkpointing": train.activation_checkpointing,
    }


def _torchrun(arguments: tuple[str, ...], ranks: int) -> str:
    """The command that starts a recipe on that many processes, the same on each machine."""
    from siamesenorm.training.memory import per_machine

    local = per_machine(ranks)
    where = ["--standalone"]
    if local < ranks:
        where = ["--nnodes", str(ranks // local), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
    return shlex.join(["torchrun", *where, "--nproc-per-node", str(local), "-m", "siamesenorm", "train", *arguments])


@contextmanager
def _patience() -> Iterator[None]:
    """Say on stderr that a large model takes a while, once it does."""
    message = "counting; a large model takes up to a minute"
    timer = threading.Timer(_SECONDS_IN_SILENCE, print, [message], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _from_recipe(name: str, overrides: list[str]) -> _Subject:
    from siamesenorm.training.build import check
    from siamesenorm.training.recipe_files import load

    recipe = load(name, overrides)
    baseline = replace(recipe, model=replace(recipe.model, scheme=_BASELINE, options={}))
    return _Subject(
        _title(recipe),
        check(recipe, needs_data=False),
        check(baseline, needs_data=False),
        getattr(recipe.data, "sequence_length", None),
        recipe,
        (name, *overrides),
    )


def _from_folder(path: Path, overrides: list[str]) -> _Subject:
    from siamesenorm.hosts import scheme_of
    from siamesenorm.hub.loading import is_pipeline
    from siamesenorm.residual import ConfigError
    from siamesenorm.training.example import sees_images
    from siamesenorm.training.limits import positions_of

    if overrides:
        raise ConfigError(f"'{overrides[0]}' changes a recipe's values; the model in {path} is as it is")
    folder, recipe = model_and_recipe(path)
    if is_pipeline(folder):
        model, baseline, kind = _of_diffusers(folder)
        length = None
    else:
        model, baseline, kind = _of_transformers(folder)
        of_text = not sees_images(model)
        length = getattr(recipe.data, "sequence_length", None) if recipe else None
        length = length or (positions_of(model) or _DEFAULT_LENGTH if of_text else None)
    scheme = scheme_of(model.config)
    title = f"{path}: {kind} with {_scheme(scheme.name, scheme.options())}"
    arguments = (str(path / "config.yaml"),) if recipe else ()
    return _Subject(title, model, baseline, length, recipe, arguments)


def _of_transformers(folder: Path) -> tuple[Any, Any, str]:
    """The model in a folder and the same with Pre-Norm, without weights, and what kind it is."""
    import torch

    from siamesenorm import hub
    from siamesenorm.hosts import rewire

    config = hub.read_config(folder)
    plain = getattr(config, "residual_scheme", None) is None
    changed = copy.deepcopy(config)
    if not plain:
        changed.residual_scheme = {"name": _BASELINE}
    with torch.device("meta"):
        model, baseline = (hub.auto_class(config.model_type).from_config(each) for each in (config, changed))
        if plain:
            # A model that the package has not touched is Pre-Norm already; rewiring only gives its sites names.
            model, baseline = rewire(model, _BASELINE), rewire(baseline, _BASELINE)
    return model, baseline, config.model_type


def _of_diffusers(folder: Path) -> tuple[Any, Any, str]:
    """As `_of_transformers`, of a pipeline's transformer."""
    import torch

    from siamesenorm.hosts import rewire
    from siamesenorm.training.sampling import load_pipeline

    model = load_pipeline(folder).transformer
    kind = type(model).__name__
    if not hasattr(model, "scheme"):
        model = rewire(model, _BASELINE)
    with torch.device("meta"):
        baseline = type(model).from_config({**model.config, "residual_scheme": {"name": _BASELINE}})
    return model.to("meta"), baseline, kind


def _title(recipe: Recipe) -> str:
    return f"{recipe.name}: {recipe.model.host} with {_scheme(recipe.model.scheme, recipe.model.options)}"


def _scheme(name: str, options: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in options.items())])


def _show(facts: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(facts["model"], highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    rows = _grouped(facts["sites"])
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    console.print()
    lines = Table.grid(padding=(0, 2, 0, 0))
    for label, text in _lines(facts):
        lines.add_row(label, text)
    console.print(lines, highlight=False, markup=False)
    if facts["torchrun"]:
        # Not wrapped, so that it can be copied.
        print(f"\n{facts['torchrun']}")


def _grouped(sites: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The rows of the table: blocks in a row that differ in nothing but their scale are one."""
    blocks: dict[Any, list[Mapping[str, Any]]] = {}
    for site in sites:
        blocks.setdefault(site["block"], []).append(site)
    same = ("kind", "reads", "writes", "norms")
    runs = [
        list(run)
        for _, run in itertools.groupby(blocks.values(), lambda block: [[site[key] for key in same] for site in block])
    ]
    rows = []
    for run in runs:
        for first, last in zip(run[0], run[-1], strict=True):
            row = {key: str(first[key]) for key in ("block", *same[:3])}
            row["scale"], row["norms"] = f"{first['scale']:.3g}", first["norms"]
            if len(run) > 1:
                row["block"] += f"-{last['block']}"
                row["scale"] += "" if last["scale"] == first["scale"] else f"…{last['scale']:.3g}"
            # Two streams are two lines, and so are two kinds of norm.
            row["writes"] = row["writes"].replace(", ", "\n")
            row["norms"] = row["norms"].replace("; ", "\n")
            rows.append(row)
    return rows


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is below the table, each line with its label."""
    over, experts, memory = facts["over_pre"], facts["experts"], facts["memory"]
    parameters = f"{facts['params']:,} in total, {facts['params_non_embedding']:,} without the token tables"
    if experts:
        parameters += f"; {facts['params_active']:,} active, with {experts['active']} of {experts['total']} experts"
    yield "parameters", parameters
    of, tokens = ("images", " tokens") if facts["of_images"] else ("sequences", "")
    yield (
        "FLOPs per token",
        f"{facts['flops_per_token_training']:,.0f} in training, {facts['flops_per_token_forward']:,.0f} forward, in "
        f"{of} of {facts['sequence_length']}{tokens}",
    )
    yield (
        "over Pre-Norm",
        f"{over['params']:+,} parameters ({over['params_percent']:+.3f}%), {over['flops_per_token_training']:+,.0f} "
        f"FLOPs per token ({over['flops_percent']:+.3f}%)",
    )
    if memory:
        ranks = facts["ranks"]
        shared = "in one process" if ranks == 1 else f"in each of {ranks} processes ({memory['parallel']})"
        checkpointing = ", activation checkpointing" if memory["activation_checkpointing"] else ""
        yield (
            "memory",
            f"{_size(memory['total'])} {shared}: parameters {_size(memory['parameters'])}, gradients "
            f"{_size(memory['gradients'])}, optimiser {_size(memory['optimizer'])}, activations "
            f"{_size(memory['activations'])} (micro-batch of {memory['micro_batch_size']}, "
            f"{memory['precision']}{checkpointing})",
        )
    yield "how counted", facts["flops_formula"]


def _size(count: int) -> str:
    """Bytes for a person to read."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
