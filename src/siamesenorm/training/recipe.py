"""What a run is made of: a recipe, as frozen dataclasses with typed fields.

A recipe in YAML has the same shape as `Recipe`; a key that does not exist is an error and so is a value of the wrong
type. Recipes are compared field by field when a run is resumed.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from siamesenorm.residual import ConfigError, nearest

CAUSAL_LM = "causal-lm"

# What the libraries take for a seed or a count, and the lowest temperature at which float32 logits can be divided.
_MOST = 2**63
_COLDEST = 1e-3


@dataclass(frozen=True)
class ModelRecipe:
    """A host, the residual scheme put into it, and the host's size.

    ``options`` belong to the scheme and ``config`` holds the keys of the host's own Hugging Face configuration; what
    both may hold is checked where the scheme and the host are built. With ``pretrained``, a saved model's folder or hub
    name, training starts from its weights, and ``config`` holds what to change in its configuration.
    """

    host: str
    scheme: str
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    pretrained: str | None = None


@dataclass(frozen=True)
class DataRecipe:
    """The corpus and how it is cut.

    ``source`` is the embedded corpus, ``python-stdlib``, or a folder that ``siamesenorm data prepare`` made.
    ``sequence_length`` is in tokens. ``validation_sequences`` of that length, spread evenly over the held-out tokens,
    are what every validation loss is measured on (null: all of them). ``sha256`` is the fingerprint that the corpus
    must have, and ``tokenizer_sha256`` that of a prepared folder's tokeniser; null takes them as they are, and a run
    writes down what it found. With ``document_masking``, attention stays inside a document, positions start anew in
    each, and the step from one to the next is not counted in any loss.
    """

    sequence_length: int
    source: str = "python-stdlib"
    validation_sequences: int | None = None
    sha256: str | None = None
    tokenizer_sha256: str | None = None
    document_masking: bool = False


@dataclass(frozen=True)
class OptimRecipe:
    """AdamW.

    Weight decay reaches matrices alone: not norms, biases, scalars and vectors, not what the scheme exempts, and not
    the table of input embeddings (its rows for rare tokens would shrink for want of a gradient) unless
    ``decay_embeddings`` is true. ``decay_all`` decays every parameter without exception, as the paper's code base does.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embeddings: bool = False
    decay_all: bool = False


@dataclass(frozen=True)
class ScheduleRecipe:
    """Linear warm-up from 0 over ``warmup_steps``, then a half cosine down to ``final_fraction`` of the peak."""

    warmup_steps: int
    final_fraction: float = 0.1


@dataclass(frozen=True)
class TrainRecipe:
    """The loop.

    ``batch_size`` and ``micro_batch_size`` count sequences, the first over all processes for one optimiser step, the
    second for one forward pass on one process (null: all of the process's share). Intervals are in steps.
    ``precision`` is ``float32``, or ``bfloat16`` for autocast over float32 weights. ``device`` is ``auto``, ``cpu`` or
    ``cuda``.

    ``parallel`` says how several processes share the model: each holds all of it (``ddp``), or a part (``fsdp``), or
    groups of ``shard_degree`` processes (null: those of one machine) hold it in parts (``hsdp``); ``auto`` is ``fsdp``.
    A single process trains without any of them.

    ``router_loss`` says over which tokens a mixture of experts balances its routers: each ``sequence``, so that no
    split of the batch changes anything, or each ``micro_batch``. ``skip_nonfinite`` is the number of steps in a row
    that may be left out because their loss or gradient is not finite, before the run stops.
    """

    steps: int
    batch_size: int
    micro_batch_size: int | None = None
    max_grad_norm: float | None = 1.0
    precision: str = "float32"
    compile: bool = False
    activation_checkpointing: bool = False
    device: str = "auto"
    parallel: str = "auto"
    shard_degree: int | None = None
    router_loss: str = "sequence"
    skip_nonfinite: int = 0
    validate_every: int = 100
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    log_every: int = 50


@dataclass(frozen=True)
class SampleRecipe:
    """The text that a finished run writes to show what it learnt; greedy where ``temperature`` is 0."""

    prompt: str = "def "
    tokens: int = 200
    temperature: float = 0.8


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run's numbers; ``seed`` feeds initialisation, data order and dropout alike."""

    name: str
    model: ModelRecipe
    data: DataRecipe
    optim: OptimRecipe
    schedule: ScheduleRecipe
    train: TrainRecipe
    sample: SampleRecipe = SampleRecipe()
    task: str = CAUSAL_LM
    seed: int = 0


def from_mapping(tree: Mapping[str, Any]) -> Recipe:
    """A recipe from nested mappings.

    Raises:
        ConfigError: for a key that does not exist (with the nearest that does), a missing one, or a value of the wrong
            type or outside its range.
    """
    recipe = _build(Recipe, tree, "")
    assert isinstance(recipe, Recipe)
    _check_ranges(recipe)
    return recipe


def to_mapping(recipe: Recipe) -> dict[str, Any]:
    """The nested mappings that `from_mapping` turns back into an equal recipe."""
    return _plain(recipe)


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Every value of a recipe by its dotted key; ``model.options`` and ``model.config`` are followed down too."""
    out: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            out[prefix] = value

    walk("", to_mapping(recipe))
    return out


def digest(recipe: Recipe) -> str:
    """SHA-256 (hexadecimal) over every value of a recipe."""
    return hashlib.sha256(json.dumps(flatten(recipe), sort_keys=True).encode()).hexdigest()


def valid_keys() -> list[str]:
    """All dotted keys that a recipe has; ``model.options`` and ``model.config`` take further keys of their own."""

    def walk(cls: Any, prefix: str) -> list[str]:
        keys = []
        for name, hint in get_type_hints(cls).items():
            keys += walk(hint, f"{prefix}{name}.") if is_dataclass(hint) else [prefix + name]
        return keys

    return walk(Recipe, "")


def open_mappings() -> tuple[str, ...]:
    """The dotted keys whose mappings are checked by the scheme and the host rather than here."""
    return ("model.options", "model.config")


def nearest_key(key: str) -> str:
    """A phrase naming the valid key closest to a wrong one: one with the same last part, else one spelt alike."""
    leaf = key.rsplit(".", 1)[-1]
    same_leaf = [valid for valid in valid_keys() if valid.rsplit(".", 1)[-1] == leaf]
    return f"did you mean '{same_leaf[0]}'?" if len(same_leaf) == 1 else nearest(key, valid_keys())


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {spec.name: _plain(getattr(value, spec.name)) for spec in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return value


def _build(cls: Any, tree: Any, prefix: str) -> object:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'a recipe'} must be a mapping of keys to values, not {tree!r}")
    hints = get_type_hints(cls)
    for key in tree:
        if key not in hints:
            raise ConfigError(f"unknown key '{prefix}{key}' in the recipe; {nearest_key(f'{prefix}{key}')}")
    values = {}
    for spec in fields(cls):
        if spec.name in tree:
            values[spec.name] = _value(hints[spec.name], tree[spec.name], prefix + spec.name)
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise ConfigError(f"the recipe lacks '{prefix}{spec.name}'")
    return cls(**values)


def _value(hint: Any, value: Any, key: str) -> Any:
    """`value` as the type that `hint` names, or a ConfigError with the key, the value and that type."""
    if is_dataclass(hint):
        return _build(hint, value, f"{key}.")
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional:
        if value is None:
            return None
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    if get_origin(hint) is Mapping:
        if isinstance(value, Mapping) and all(isinstance(inner, str) for inner in value):
            return dict(value)
        expected = "a mapping of names to values"
    elif hint is float:
        # A whole number is a fine float; true and false are ints to Python and neither here.
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        expected = "a number"
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        expected = "a whole number"
    elif hint is bool:
        if isinstance(value, bool):
            return value
        expected = "true or false"
    else:
        if isinstance(value, str):
            return value
        expected = "text"
    raise ConfigError(f"{key} must be {expected}{' or null' if optional else ''}, not {value!r}")


def _check_ranges(recipe: Recipe) -> None:
    train, optim = recipe.train, recipe.optim
    if recipe.task != CAUSAL_LM:
        raise ConfigError(f"unknown task {recipe.task!r}; {nearest(recipe.task, [CAUSAL_LM])}")
    at_least: list[tuple[str, float | None, float]] = [
        ("data.sequence_length", recipe.data.sequence_length, 2),
        ("data.validation_sequences", recipe.data.validation_sequences, 1),
        ("schedule.warmup_steps", recipe.schedule.warmup_steps, 0),
        ("sample.tokens", recipe.sample.tokens, 0),
        ("sample.temperature", recipe.sample.temperature, 0),
        ("seed", recipe.seed, 0),
        ("optim.weight_decay", optim.weight_decay, 0),
        *[(f"train.{name}", getattr(train, name), 1) for name in (
            "steps", "batch_size", "micro_batch_size", "validate_every", "checkpoint_every", "keep_checkpoints",
            "log_every", "shard_degree",
        )],
        ("train.skip_nonfinite", train.skip_nonfinite, 0),
    ]  # fmt: skip
    for key, value, least in at_least:
        if value is not None and not value >= least:
            raise ConfigError(f"{key} must be at least {least}, not {value}")
        if value is not None and not value < _MOST:
            raise ConfigError(f"{key} must be below {_MOST}, not {value}")
    if 0 < recipe.sample.temperature < _COLDEST:
        raise ConfigError(f"sample.temperature must be 0 or at least {_COLDEST}, not {recipe.sample.temperature}")
    if not recipe.name or set(recipe.name) & set("/\\") or recipe.name.startswith("."):
        raise ConfigError(f"name becomes part of a folder's name, which {recipe.name!r} cannot be")
    above_zero = [("optim.lr", optim.lr), ("optim.eps", optim.eps), ("train.max_grad_norm", train.max_grad_norm)]
    for key, value in above_zero:
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{key} must be above 0, not {value}")
    below_one = [("optim.beta1", optim.beta1), ("optim.beta2", optim.beta2)]
    for key, value in below_one:
        if not 0 <= value < 1:
            raise ConfigError(f"{key} must be at least 0 and below 1, not {value}")
    if not 0 <= recipe.schedule.final_fraction <= 1:
        raise ConfigError(f"schedule.final_fraction must be between 0 and 1, not {recipe.schedule.final_fraction}")
    if recipe.schedule.warmup_steps > train.steps:
        raise ConfigError(
            f"schedule.warmup_steps ({recipe.schedule.warmup_steps}) must not exceed train.steps ({train.steps})"
        )
    choices = {
        "precision": ("float32", "bfloat16"),
        "device": ("auto", "cpu", "cuda"),
        "parallel": ("auto", "ddp", "fsdp", "hsdp"),
        "router_loss": ("sequence", "micro_batch"),
    }
    for name, valid in choices.items():
        value = getattr(train, name)
        if value not in valid:
            raise ConfigError(f"train.{name} must be one of {', '.join(valid)}, not {value!r}; {nearest(value, valid)}")
    if train.shard_degree is not None and train.parallel != "hsdp":
        raise ConfigError(f"train.shard_degree belongs to train.parallel=hsdp, not to {train.parallel}")
    if train.micro_batch_size is not None and train.batch_size % train.micro_batch_size:
        raise ConfigError(
            f"train.batch_size ({train.batch_size}) must be a multiple of train.micro_batch_size "
            f"({train.micro_batch_size})"
        )
