"""Training steps of several schemes in several modes, in turn in one process."""

from __future__ import annotations

import gc
import inspect
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from siamesenorm import ops
from siamesenorm.residual import ConfigError, nearest, parse_scheme
from siamesenorm.training.build import build_model, checkpoint_activations
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.settings import autocast_of, autocasting
from siamesenorm.training.tasks import task_of

__all__ = [
    "BASELINE",
    "UNTOUCHED",
    "Case",
    "Mode",
    "Result",
    "Spread",
    "bandwidth",
    "cases",
    "measure",
    "model_of",
    "modes",
]

BASELINE = "pre"
UNTOUCHED = "host"
"""In the place of a scheme: the host's own model, as its library makes it."""
Mode = Literal["plain", "fused", "triton", "compiled"]
_WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """A scheme, as :func:`siamesenorm.residual.parse_scheme` reads it or :data:`UNTOUCHED`, in a mode."""

    scheme: str
    mode: Mode


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles beside it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        low, median, high = (float(each) for each in np.quantile(values, [0.25, 0.5, 0.75]))
        return cls(median, low, high)


@dataclass(frozen=True)
class Result:
    """What a case took.

    Attributes:
        case: which.
        seconds: of a step, which is forward and backward without an optimiser.
        tokens_per_second: of the median.
        kept: bytes that the forward pass leaves for the backward pass.
        peak: bytes that a step takes at most, weights left out and their gradients counted.
        time_to_baseline: of the steps that ran in the same round, in the same mode.
        kept_to_baseline: in the same mode.
        time_to_plain: to the scheme's own plain form, where that was measured.
        time_to_host: to the untouched model, compiled where the case is, where that was measured.
    """

    case: Case
    seconds: Spread
    tokens_per_second: float
    kept: int
    peak: int
    time_to_baseline: Spread
    kept_to_baseline: float
    time_to_plain: Spread | None
    time_to_host: Spread | None


def modes() -> tuple[Mode, ...]:
    """Those that can be measured here."""
    has_triton = torch.cuda.is_available() and ops.has_triton()
    return tuple(mode for mode in get_args(Mode) if mode != "triton" or has_triton)


def cases(schemes: Sequence[str], asked: Sequence[str]) -> list[Case]:
    """Every scheme in every mode, Pre-Norm first; the untouched model runs as it is, and compiled.

    Raises:
        ConfigError: an unknown scheme or mode, or one that cannot run here.
    """
    for mode in asked:
        if mode not in get_args(Mode):
            raise ConfigError(f"unknown mode '{mode}': {nearest(mode, get_args(Mode))}")
        if mode not in modes():
            raise ConfigError("mode 'triton' needs a GPU and Triton")
    labels = [each if each == UNTOUCHED else parse_scheme(each).label for each in schemes]
    made = []
    for mode in dict.fromkeys(asked):
        for label in dict.fromkeys((BASELINE, *labels)):
            if label != UNTOUCHED or mode in ("plain", "compiled"):
                made.append(Case(label, cast(Mode, mode)))
    return made


def measure(
    recipe: Recipe,
    cases: Sequence[Case],
    *,
    rounds: int,
    device: torch.device,
    tell: Callable[[int], object] = lambda done: None,
    seed: int = 0,
) -> list[Result]:
    """Run every case ``rounds`` times, in an order that is drawn anew for each round.

    Args:
        recipe: model, batch (a micro-batch where it has one), precision and activation checkpointing.
        cases: with :data:`BASELINE` in each of their modes.
        rounds: how often.
        device: where.
        tell: told how many further steps are done, of ``len(cases) * (rounds + 4)``.
        seed: of the order.
    """
    torch._dynamo.reset()
    models: dict[str, Any] = {}
    steps: dict[Case, Callable[[], Tensor]] = {}
    for case in cases:
        if case.scheme not in models:
            models[case.scheme] = model_of(recipe, case.scheme, device)
        steps[case] = _step(recipe, models[case.scheme], case.mode, device)
    memory = {}
    for case in cases:
        with _mode(case.mode):
            for _ in range(_WARM_UP):
                _run(steps[case], models[case.scheme], device)
                tell(1)
            memory[case] = _memory(steps[case], models[case.scheme], device)
            tell(2)
    seconds: dict[Case, list[float]] = {case: [] for case in cases}
    order, draw = list(cases), random.Random(seed)
    for _ in range(rounds):
        draw.shuffle(order)
        for case in order:
            with _mode(case.mode):
                seconds[case].append(_run(steps[case], models[case.scheme], device))
            tell(1)
    tokens = _example(recipe, models[cases[0].scheme], device)[1]
    return [_result(case, seconds, memory, tokens) for case in cases]


def _result(case: Case, seconds: dict[Case, list[float]], memory: dict[Case, tuple[int, int]], tokens: int) -> Result:
    baseline, plain = Case(BASELINE, case.mode), Case(case.scheme, "plain")
    host = Case(UNTOUCHED, "compiled" if case.mode == "compiled" else "plain")
    own = Spread.of(seconds[case])
    kept, peak = memory[case]
    return Result(
        case,
        own,
        tokens / own.median,
        kept,
        peak,
        _ratio(seconds[case], seconds[baseline]),
        kept / memory[baseline][0],
        _ratio(seconds[case], seconds[plain]) if plain in seconds else None,
        _ratio(seconds[case], seconds[host]) if host in seconds else None,
    )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    return Spread.of([one / other for one, other in zip(ours, theirs, strict=True)])


def _mode(mode: Mode) -> Any:
    # A compiler is given the plain form, whatever is in use; what runs around it is left to the plain form too.
    return ops.use("plain" if mode == "compiled" else mode)


def model_of(recipe: Recipe, scheme: str, device: torch.device) -> Any:
    """The recipe's model under a scheme, or :data:`UNTOUCHED`, from the recipe's seed."""
    chosen = parse_scheme(BASELINE if scheme == UNTOUCHED else scheme)
    recipe = replace(recipe, model=replace(recipe.model, scheme=chosen.name, options=chosen.options()))
    with device:
        model = build_model(recipe, needs_data=False)
        return (_untouched(model) if scheme == UNTOUCHED else model).train()


def _untouched(model: Any) -> Any:
    """The host's own model of the size of a rewired one."""
    kind: Any = next(base for base in type(model).__mro__ if not base.__module__.startswith("siamesenorm."))
    config: Any = model.config
    if hasattr(config, "to_dict"):
        known = {key: value for key, value in config.to_dict().items() if key not in type(config).__annotations__}
        return kind(kind.config_class.from_dict(known))
    parameters = inspect.signature(kind.__init__).parameters
    # A rewired DiT's norms are its blocks' own, which its config says in this place.
    return kind(**{key: value for key, value in config.items() if key in parameters and key != "norm_type"})


def _step(recipe: Recipe, model: Any, mode: Mode, device: torch.device) -> Callable[[], Tensor]:
    """Forward pass and loss; each call draws the same inputs."""
    if recipe.train.activation_checkpointing:
        checkpoint_activations(model)
    inputs, _ = _example(recipe, model, device)
    task, forward = task_of(recipe), torch.compile(model) if mode == "compiled" else model

    def step() -> Tensor:
        with autocasting(device.type, autocast_of(recipe)):
            return task.example_loss(forward, inputs)

    return step


def _example(recipe: Recipe, model: Any, device: torch.device) -> tuple[dict[str, Any], int]:
    """A batch of random numbers, and how many tokens it has."""
    rows = recipe.train.micro_batch_size or recipe.train.batch_size
    inputs, per_row = task_of(recipe).example(model, rows, str(device))
    draw = torch.Generator(device).manual_seed(0)
    # Attention is causal without it.
    inputs.pop("attention_mask", None)
    for name, each in inputs.items():
        if isinstance(each, Tensor) and each.is_floating_point():
            inputs[name] = torch.randn(each.shape, generator=draw, dtype=each.dtype, device=device)
        elif name == "input_ids":
            inputs[name] = torch.randint(0, model.config.vocab_size, each.shape, generator=draw, device=device)
    return inputs, rows * per_row


def _run(step: Callable[[], Tensor], model: Any, device: torch.device) -> float:
    """The seconds of a step."""
    _wait(device)
    started = time.perf_counter()
    step().backward()
    _wait(device)
    took = time.perf_counter() - started
    model.zero_grad(set_to_none=True)
    return took


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(step: Callable[[], Tensor], model: Any, device: torch.device) -> tuple[int, int]:
    """Bytes kept between the passes, and taken at most."""
    gc.collect()
    if device.type == "cuda":
        _wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        loss = step()
        kept = torch.cuda.memory_allocated(device) - before
        loss.backward()
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        ledger = _Allocations()
        with ledger:
            loss = step()
        kept = ledger.now
        with ledger:
            loss.backward()
        peak = ledger.peak
    del loss
    model.zero_grad(set_to_none=True)
    return kept, peak


class _Allocations:
    """What torch's allocator for main memory gives out and takes back while this is entered, in bytes."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def __enter__(self) -> None:
        # The profiler tells of every start and stop on stderr, unless it hears otherwise before its first.
        os.environ.setdefault("KINETO_LOG_LEVEL", "10")
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        results: Any = self._profile.profiler
        found = [each for each in results.kineto_results.events() if each.name() == "[memory]"]
        for each in sorted(found, key=lambda event: event.start_ns()):
            self.now += each.nbytes()
            self.peak = max(self.peak, self.now)


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(1 << 26, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    taken = []
    for _ in range(5):
        _wait(device)
        started = time.perf_counter()
        target.copy_(source)
        _wait(device)
        taken.append(time.perf_counter() - started)
    return 2 * source.nbytes / statistics.median(taken)
