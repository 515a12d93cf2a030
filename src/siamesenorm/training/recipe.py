"""What a run is made of: a recipe, as frozen dataclasses with typed fields.

A recipe in YAML has the same shape as the subclass of `Recipe` that belongs to its ``task``; a key that does not exist
is an error and so is a value of the wrong type. Recipes are compared field by field when a run is resumed.
"""

from __future__ import annotations

import hashlib
import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from siamesenorm.residual import ConfigError, nearest

CAUSAL_LM = "causal-lm"
CLASSIFICATION = "image-classification"
DIFFUSION = "class-conditional-diffusion"

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
class ImageDataRecipe:
    """The images and how they are cut.

    ``source`` is the embedded set, ``digits``, a folder of class folders, Parquet files, a Hugging Face image set on
    disk or on the hub (``hf:NAME``), or, for diffusion, a folder that ``siamesenorm data encode-latents`` made.
    Images are brought to ``image_size`` pixels a side and ``channels`` (1 is grey, 3 is colour), of which the short
    side keeps ``crop_fraction``, and ``flip`` mirrors half of those that are trained on; of latents all of that was
    decided when they were made. ``validation_images``, spread evenly over the held-out ones, are what every validation
    is measured on (null: all of them). ``sha256`` is the fingerprint that the set must have; null takes it as it is,
    and a run writes down what it found. An image that cannot be read is left out and counted, or an error with
    ``unreadable: error``. ``workers`` are processes that read ahead.
    """

    source: str
    image_size: int | None = None
    channels: int | None = None
    crop_fraction: float | None = None
    flip: bool = False
    validation_images: int | None = None
    sha256: str | None = None
    unreadable: str = "skip"
    workers: int = 0


@dataclass(frozen=True)
class ClassifiedDataRecipe(ImageDataRecipe):
    """Images to classify: pixels between 0 and 1 less ``mean``, over ``std``, one number or one a channel."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)


@dataclass(frozen=True)
class AugmentRecipe:
    """How training images are changed at random before a classifier sees them.

    ``shift`` moves an image by up to so many pixels in each direction, with black behind it. The rest is timm's, and
    needs it: ``random_crop`` (the smallest share of the area), ``auto_augment`` (a policy such as
    ``rand-m9-mstd0.5-inc1``), ``erase`` (the probability of random erasing), ``mixup`` and ``cutmix`` (their alphas; 0
    is none; with both, one of them is drawn for each batch).
    """

    shift: int = 0
    random_crop: float | None = None
    auto_augment: str | None = None
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0


@dataclass(frozen=True)
class ClassLossRecipe:
    """Cross-entropy, with ``label_smoothing`` of the probability spread over all classes."""

    label_smoothing: float = 0.0


@dataclass(frozen=True)
class DiffusionRecipe:
    """The noise, and what the model says about it.

    ``beta_schedule``, ``beta_start`` and ``beta_end`` are those of diffusers' DDPM scheduler, over ``timesteps``.
    ``prediction`` is ``epsilon`` (the noise) or ``v_prediction``. With ``learned_sigma`` the model also gives the
    variance of a step back, trained on the variational bound as in DiT (arXiv 2212.09748). A share ``label_dropout`` of
    the labels is replaced by the null class, once per step, so that guidance can be had; 0 makes a model without one.
    """

    timesteps: int = 1000
    beta_schedule: str = "linear"
    beta_start: float = 1e-4
    beta_end: float = 0.02
    prediction: str = "epsilon"
    learned_sigma: bool = True
    label_dropout: float = 0.1


@dataclass(frozen=True)
class OptimRecipe:
    """AdamW.

    Weight decay reaches matrices alone: not norms, biases, scalars and vectors, not what the scheme exempts, and not
    the tables of embeddings (rows for rare tokens would shrink for want of a gradient) unless ``decay_embeddings`` is
    true. ``decay_all`` decays every parameter without exception, as the paper's code base does.
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
    """Linear warm-up from 0 over ``warmup_steps``, then a half cosine down to ``final_fraction`` of the peak.

    The other two are for a model that goes on from ``model.pretrained`` under a scheme that is new to it. During the
    first ``own_steps`` only what the scheme has added moves: the optimiser sees the gradients of all weights, and steps
    the others with a learning rate of 0. Over the first ``open_steps``, what the scheme starts closed is opened: its
    weights are raised by equal parts, beside what they learn (for ``siamese`` with ``x_init: 0``, those that X is read
    through, by 1 in all).
    """

    warmup_steps: int
    final_fraction: float = 0.1
    own_steps: int = 0
    open_steps: int = 0

    def scaled(self, steps: int, of: int) -> ScheduleRecipe:
        """The same schedule for a run of ``steps``, of one for a run ``of`` steps: each part keeps its share.

        A part that was there keeps a step at least: a run without a warm-up is another run.
        """
        parts = {name: getattr(self, name) for name in SCHEDULE_STEPS}
        return replace(self, **{name: part and max(round(part * steps / of), 1) for name, part in parts.items()})


SCHEDULE_STEPS = ("warmup_steps", "own_steps", "open_steps")
"""The parts of a schedule that are lengths, none of which may exceed the run's."""


@dataclass(frozen=True)
class TrainRecipe:
    """The loop.

    ``batch_size`` and ``micro_batch_size`` count sequences or images, the first over all processes for one optimiser
    step, the second for one forward pass on one process (null: all of the process's share). Intervals are in steps.
    ``precision`` is ``float32``, or ``bfloat16`` for autocast over float32 weights. ``device`` is ``auto``, ``cpu`` or
    ``cuda``.

    ``parallel`` says how several processes share the model: each holds all of it (``ddp``), or a part (``fsdp``), or
    groups of ``shard_degree`` processes (null: those of one machine) hold it in parts (``hsdp``); ``auto`` is ``fsdp``.
    A single process trains without any of them.

    ``router_loss`` says over which tokens a mixture of experts balances its routers: each ``sequence``, so that no
    split of the batch changes anything, or each ``micro_batch``. ``skip_nonfinite`` is the number of steps in a row
    that may be left out because their loss or gradient is not finite, before the run stops. With ``ema_decay``, what
    is validated and saved as the model is an exponential moving average of the weights, whose decay grows up to that.
    Every ``probe_every`` steps, and after the last, what passes through each sublayer is measured on a batch of what
    was held out, by the weights themselves, and added to ``probes.parquet`` (null: never).
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
    ema_decay: float | None = None
    validate_every: int = 100
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    log_every: int = 50
    probe_every: int | None = None


@dataclass(frozen=True)
class SampleRecipe:
    """The text that a finished run writes to show what it learnt; greedy where ``temperature`` is 0."""

    prompt: str = "def "
    tokens: int = 200
    temperature: float = 0.8


@dataclass(frozen=True)
class PictureRecipe:
    """The pictures that a finished run draws: ``per_class`` of each class at each ``guidance`` scale (1 is none); of
    many classes, the first hundred.

    ``sampler`` is one of ``siamesenorm sample``'s, run for ``steps``. With ``distance_images``, so many more are drawn
    without guidance and compared with the held-out ones: the Fréchet distance of their features in a classifier of the
    same images, which is the run or model folder ``classifier``, or else what the recipe ``vit-tiny`` makes of the set
    (trained once and kept in the cache).
    """

    steps: int = 50
    guidance: tuple[float, ...] = (1.0, 2.0, 4.0)
    sampler: str = "ddim"
    per_class: int = 8
    distance_images: int = 0
    classifier: str | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run's numbers; ``seed`` feeds initialisation, data order and dropout alike."""

    counts: ClassVar[str]
    name: str
    task: str = CAUSAL_LM
    model: ModelRecipe
    data: Any
    optim: OptimRecipe
    schedule: ScheduleRecipe
    train: TrainRecipe
    seed: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Its fields alone: what its task has looked at stays in this process."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self)}


@dataclass(frozen=True, kw_only=True)
class TextRecipe(Recipe):
    """A causal language model."""

    counts = "sequences"
    data: DataRecipe
    sample: SampleRecipe = SampleRecipe()


@dataclass(frozen=True, kw_only=True)
class ClassificationRecipe(Recipe):
    """An image classifier."""

    counts = "images"
    data: ClassifiedDataRecipe
    augment: AugmentRecipe = AugmentRecipe()
    loss: ClassLossRecipe = ClassLossRecipe()


@dataclass(frozen=True, kw_only=True)
class ImageDiffusionRecipe(Recipe):
    """A class-conditional diffusion model of images or latents."""

    counts = "images"
    data: ImageDataRecipe
    diffusion: DiffusionRecipe = DiffusionRecipe()
    sample: PictureRecipe = PictureRecipe()


TASKS: dict[str, type[Recipe]] = {
    CAUSAL_LM: TextRecipe,
    CLASSIFICATION: ClassificationRecipe,
    DIFFUSION: ImageDiffusionRecipe,
}


def from_mapping(tree: Mapping[str, Any]) -> Recipe:
    """A recipe from nested mappings.

    Raises:
        ConfigError: for a key that does not exist (with the nearest that does), a missing one, or a value of the wrong
            type or outside its range.
    """
    recipe = _build(kind_of(tree), tree, "")
    assert isinstance(recipe, Recipe)
    _check_ranges(recipe)
    return recipe


def kind_of(tree: Mapping[str, Any]) -> type[Recipe]:
    """The kind of recipe that belongs to the task which nested mappings name.

    Raises:
        ConfigError: for a task that there is none of.
    """
    task = tree.get("task", CAUSAL_LM)
    if task not in TASKS:
        raise ConfigError(f"unknown task {task!r}; {nearest(str(task), TASKS)}")
    return TASKS[task]


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


def valid_keys(kind: type[Recipe]) -> list[str]:
    """All dotted keys of a kind of recipe; ``model.options`` and ``model.config`` take further keys of their own."""

    def walk(cls: Any, prefix: str) -> list[str]:
        keys = []
        hints = get_type_hints(cls)
        for name in (spec.name for spec in fields(cls)):
            keys += walk(hints[name], f"{prefix}{name}.") if is_dataclass(hints[name]) else [prefix + name]
        return keys

    return walk(kind, "")


def open_mappings() -> tuple[str, ...]:
    """The dotted keys whose mappings are checked by the scheme and the host rather than here."""
    return ("model.options", "model.config")


def nearest_key(key: str, kind: type[Recipe]) -> str:
    """A phrase naming the valid key closest to a wrong one: one with the same last part, else one spelt alike."""
    leaf, keys = key.rsplit(".", 1)[-1], valid_keys(kind)
    same_leaf = [valid for valid in keys if valid.rsplit(".", 1)[-1] == leaf]
    if len(same_leaf) == 1:
        return f"did you mean '{same_leaf[0]}'?"
    # A key with others below it is no valid one of its own.
    elsewhere = [
        task
        for task, other in TASKS.items()
        if other is not kind and any(f"{valid}.".startswith(f"{key}.") for valid in valid_keys(other))
    ]
    return f"it belongs to the task {elsewhere[0]}" if elsewhere else nearest(key, keys)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {spec.name: _plain(getattr(value, spec.name)) for spec in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return value


def _build(cls: Any, tree: Any, prefix: str, kind: type[Recipe] = Recipe) -> object:
    if issubclass(cls, Recipe):
        kind = cls
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'a recipe'} must be a mapping of keys to values, not {tree!r}")
    hints = get_type_hints(cls)
    names = {spec.name for spec in fields(cls)}
    for key in tree:
        if key not in names:
            raise ConfigError(f"unknown key '{prefix}{key}' in the recipe; {nearest_key(f'{prefix}{key}', kind)}")
    values = {}
    for spec in fields(cls):
        if spec.name in tree:
            values[spec.name] = _value(hints[spec.name], tree[spec.name], prefix + spec.name, kind)
        elif spec.default is MISSING and spec.default_factory is MISSING:
            raise ConfigError(f"the recipe lacks '{prefix}{spec.name}'")
    return cls(**values)


def _value(hint: Any, value: Any, key: str, kind: type[Recipe]) -> Any:
    """`value` as the type that `hint` names, or a ConfigError with the key, the value and that type."""
    if is_dataclass(hint):
        return _build(hint, value, f"{key}.", kind)
    optional = get_origin(hint) in (Union, types.UnionType)
    if optional:
        if value is None:
            return None
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
    if get_origin(hint) is Mapping:
        if isinstance(value, Mapping) and all(isinstance(inner, str) for inner in value):
            return dict(value)
        expected = "a mapping of names to values"
    elif get_origin(hint) is tuple:
        numbers = value if isinstance(value, list | tuple) else (value,)
        if numbers and all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers):
            return tuple(float(each) for each in numbers)
        expected = "a number or a list of numbers"
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


# The least that a value may be.
_LEAST: dict[str, float] = {
    "data.sequence_length": 2,
    "data.validation_sequences": 1,
    "data.image_size": 1,
    "data.validation_images": 1,
    "data.workers": 0,
    "augment.shift": 0,
    "augment.mixup": 0,
    "augment.cutmix": 0,
    "diffusion.timesteps": 2,
    **dict.fromkeys((f"schedule.{name}" for name in SCHEDULE_STEPS), 0),
    "sample.tokens": 0,
    "sample.temperature": 0,
    "sample.steps": 1,
    "sample.per_class": 0,
    "sample.distance_images": 0,
    "seed": 0,
    "optim.weight_decay": 0,
    "train.skip_nonfinite": 0,
    **dict.fromkeys(
        (
            "train.steps", "train.batch_size", "train.micro_batch_size", "train.validate_every",
            "train.checkpoint_every", "train.keep_checkpoints", "train.log_every", "train.shard_degree",
            "train.probe_every",
        ),
        1,
    ),
}  # fmt: skip
_ABOVE_ZERO = (
    "optim.lr", "optim.eps", "train.max_grad_norm", "diffusion.beta_start", "diffusion.beta_end", "data.crop_fraction",
)  # fmt: skip
_BELOW_ONE = (
    "optim.beta1", "optim.beta2", "train.ema_decay", "loss.label_smoothing", "diffusion.label_dropout",
    "diffusion.beta_start", "diffusion.beta_end",
)  # fmt: skip
_SHARES = ("schedule.final_fraction", "augment.erase", "augment.random_crop", "data.crop_fraction")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "data.channels": (1, 3),
    "data.unreadable": ("skip", "error"),
    "diffusion.beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "diffusion.prediction": ("epsilon", "v_prediction"),
    "train.precision": ("float32", "bfloat16"),
    "train.device": ("auto", "cpu", "cuda"),
    "train.parallel": ("auto", "ddp", "fsdp", "hsdp"),
    "train.router_loss": ("sequence", "micro_batch"),
}


def _check_ranges(recipe: Recipe) -> None:
    train = recipe.train
    given = {key: value for key, value in flatten(recipe).items() if value is not None}
    for key in _LEAST.keys() & given.keys():
        if not given[key] >= _LEAST[key]:
            raise ConfigError(f"{key} must be at least {_LEAST[key]}, not {given[key]}")
        if not given[key] < _MOST:
            raise ConfigError(f"{key} must be below {_MOST}, not {given[key]}")
    if 0 < given.get("sample.temperature", 0) < _COLDEST:
        raise ConfigError(f"sample.temperature must be 0 or at least {_COLDEST}, not {given['sample.temperature']}")
    if not recipe.name or set(recipe.name) & set("/\\") or recipe.name.startswith("."):
        raise ConfigError(f"name becomes part of a folder's name, which {recipe.name!r} cannot be")
    for key in given.keys() & set(_ABOVE_ZERO):
        if not 0 < given[key] < math.inf:
            raise ConfigError(f"{key} must be above 0, not {given[key]}")
    for key in given.keys() & set(_BELOW_ONE):
        if not 0 <= given[key] < 1:
            raise ConfigError(f"{key} must be at least 0 and below 1, not {given[key]}")
    for key in given.keys() & set(_SHARES):
        if not 0 <= given[key] <= 1:
            raise ConfigError(f"{key} must be between 0 and 1, not {given[key]}")
    for key in given.keys() & _CHOICES.keys():
        value, valid = given[key], _CHOICES[key]
        if value not in valid:
            hint = nearest(str(value), map(str, valid))
            raise ConfigError(f"{key} must be one of {', '.join(map(str, valid))}, not {value!r}; {hint}")
    if not all(0 < each < math.inf for each in given.get("data.std", ())):
        raise ConfigError(f"data.std must be above 0, not {given['data.std']}")
    if not all(0 <= each < math.inf for each in given.get("sample.guidance", ())):
        raise ConfigError(f"sample.guidance must be numbers of at least 0, not {given['sample.guidance']}")
    for name in SCHEDULE_STEPS:
        if (length := getattr(recipe.schedule, name)) > train.steps:
            raise ConfigError(f"schedule.{name} ({length}) must not exceed train.steps ({train.steps})")
    if train.shard_degree is not None and train.parallel != "hsdp":
        raise ConfigError(f"train.shard_degree belongs to train.parallel=hsdp, not to {train.parallel}")
    if train.micro_batch_size is not None and train.batch_size % train.micro_batch_size:
        raise ConfigError(
            f"train.batch_size ({train.batch_size}) must be a multiple of train.micro_batch_size "
            f"({train.micro_batch_size})"
        )
