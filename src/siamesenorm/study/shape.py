"""How deep and how wide a model is, and the width that gives another depth the same number of parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from siamesenorm.residual import ConfigError
from siamesenorm.training.build import empty_model, parameter_counts
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.tasks import task_of

__all__ = ["EQUAL", "Shape", "solve"]

EQUAL = 1e-3
"""Parameter counts that differ by no more than this share are called equal."""

# Experts are multiplied in groups, whose kernels take rows of 16 bytes, which are eight numbers of bfloat16.
_EXPERTS_STEP = 8
# So their counts are far apart, and this many widths on either side of the closest are tried, with MLPs whose share of
# the width is changed by no more than this factor.
_WIDTHS_TRIED, _MOST_CHANGE = 6, 1.6

_WRITTEN = re.compile(r"(\d+)(?:x(\d+)(?:x(\d+(?:\.\d+)?))?)?")


@dataclass(frozen=True)
class Shape:
    """The size of a stack.

    Attributes:
        layers: blocks.
        width: of the streams; ``None`` where it is to be solved for.
        mlp: width of the MLP, or in a host that is configured so, that width over the stream's; ``None`` likewise.
    """

    layers: int
    width: int | None = None
    mlp: float | None = None

    @classmethod
    def read(cls, value: Any) -> Shape:
        """The shape that 12, ``12x128`` or ``12x128x352`` stands for.

        Raises:
            ConfigError: for anything else.
        """
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return cls(value)
        found = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
        numbers = [float(number) for number in found.groups() if number] if found else []
        if not numbers or not all(numbers):
            raise ConfigError(f"a depth is a number of layers, or layers x width such as 12x128, not {value!r}")
        layers, width, mlp = (*numbers, None, None)[:3]
        return cls(int(layers or 0), None if width is None else int(width), mlp)

    @classmethod
    def of(cls, recipe: Recipe) -> Shape:
        """The shape of a recipe's model."""
        config = empty_model(recipe, needs_data=False).config
        return _Keys.of(recipe, config).shape(config)


def solve(shape: Shape, base: Recipe) -> dict[str, Any]:
    """What to set in ``base`` for a model of ``shape``, by dotted key.

    A width that is not given is the one that comes closest to the parameters of ``base`` with the MLP's share of the
    width as it is there; an MLP that is not given makes up for the rest. The number of heads stays, so their width
    follows the model's. As widths are whole numbers, the count can be off by half of what one more unit of the MLP is.
    In a mixture of experts all widths are multiples of 8, and of several the one is taken that comes closest.

    Raises:
        ConfigError: for a width that the heads do not divide, or parameters that no width of so many layers has.
    """
    model = empty_model(base, needs_data=False)
    keys = _Keys.of(base, model.config)
    own, target = keys.shape(model.config), parameter_counts(model)[0]
    heads = int(_get(model.config, "num_attention_heads"))
    assert own.width is not None
    assert own.mlp is not None
    if shape.width is not None and shape.width % heads:
        raise ConfigError(f"a width of {shape.width} does not divide over the {heads} heads of {base.name}")
    ratio = own.mlp if keys.mlp_is_ratio else own.mlp / own.width

    def changes(width: int, mlp: float) -> dict[str, Any]:
        return keys.changes(Shape(shape.layers, width, mlp), heads)

    def count(width: int, mlp: float) -> int:
        config = {**base.model.config, **{key.split(".")[-1]: value for key, value in changes(width, mlp).items()}}
        changed = replace(base, model=replace(base.model, config=config))
        task_of(base).lend(task_of(changed))
        return parameter_counts(empty_model(changed, needs_data=False))[0]

    def share(width: int) -> float:
        return ratio if keys.mlp_is_ratio else max(round(ratio * width), 1)

    has_experts = any(_get(model.config, name) for name in ("num_experts", "num_local_experts"))
    # The width of a head is even for RoPE, and a quarter of a model's goes to each sine and cosine of an image's grid.
    unit = heads * (4 if keys.mlp_is_ratio else 2)
    if has_experts:
        unit = math.lcm(unit, _EXPERTS_STEP)

    def fitted(width: int) -> tuple[float, int]:
        """The width of the MLP that comes closest to the parameters, with which they grow evenly, and their count."""
        # A ratio is a fraction of the width.
        step = 1.0 / width if keys.mlp_is_ratio else _EXPERTS_STEP if has_experts else 1
        start = share(width) if step < _EXPERTS_STEP else max(round(share(width) / step), 1) * step
        found = count(width, start)
        more = count(width, start + step) - found
        units = round((target - found) / more)
        return start + units * step, found + units * more

    def distance(width: int) -> tuple[bool, float, float]:
        """From the parameters that are asked for, where they are not equal, and then from the MLP's share."""
        mlp, found = fitted(width)
        change = abs(math.log(mlp / share(width))) if mlp > 0 else math.inf
        gap = abs(found / target - 1)
        return change > math.log(_MOST_CHANGE), (0.0 if gap <= EQUAL else gap), change

    # Matrices grow with the square of the width, so this is close.
    guess = max(round(own.width * math.sqrt(own.layers / shape.layers) / unit), 1)
    width = shape.width or unit * _nearest(lambda units: count(unit * units, share(unit * units)), target, guess)
    if shape.mlp is not None:
        return changes(width, shape.mlp)
    if has_experts and shape.width is None:
        near = range(width - _WIDTHS_TRIED * unit, width + (_WIDTHS_TRIED + 1) * unit, unit)
        width = min((each for each in near if each > 0), key=distance)
    mlp, _ = fitted(width)
    if mlp <= 0:
        raise ConfigError(
            f"{shape.layers} layers of width {width} have more than the {target:,} parameters of {base.name}, however "
            "narrow the MLP"
        )
    return changes(width, mlp if keys.mlp_is_ratio else round(mlp))


@dataclass(frozen=True)
class _Keys:
    """The names that a host's configuration has for these sizes."""

    layers: str
    width: str
    mlp: str

    @classmethod
    def of(cls, recipe: Recipe, config: Any) -> _Keys:
        """Those of a recipe's host, given the configuration of its model.

        Raises:
            ConfigError: for a host without them.
        """
        found = [
            next((name for name in names if _get(config, name) is not None), None)
            for names in (
                ("num_hidden_layers", "num_layers"),
                ("hidden_size", "attention_head_dim"),
                ("moe_intermediate_size", "intermediate_size", "mlp_ratio"),
            )
        ]
        if None in found:
            raise ConfigError(f"the axis 'depths' cannot change the size of host '{recipe.model.host}'")
        return cls(*(name for name in found if name))

    @property
    def mlp_is_ratio(self) -> bool:
        return self.mlp == "mlp_ratio"

    def shape(self, config: Any) -> Shape:
        """The sizes in a configuration."""
        width = int(_get(config, self.width))
        if self.width == "attention_head_dim":
            width *= int(_get(config, "num_attention_heads"))
        return Shape(int(_get(config, self.layers)), width, float(_get(config, self.mlp)))

    def changes(self, shape: Shape, heads: int) -> dict[str, Any]:
        """The sizes as a recipe's dotted keys."""
        assert shape.width is not None
        assert shape.mlp is not None
        width = shape.width // heads if self.width == "attention_head_dim" else shape.width
        mlp = shape.mlp if self.mlp_is_ratio else int(shape.mlp)
        return {
            f"model.config.{key}": value
            for key, value in zip((self.layers, self.width, self.mlp), (shape.layers, width, mlp), strict=True)
        }


def _get(config: Any, name: str) -> Any:
    """A value of a configuration of transformers or of diffusers."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _nearest(count: Callable[[int], int], target: int, guess: int) -> int:
    """The whole number from 1 whose count, which grows with it, is the closest to ``target``; it is near the guess."""
    counts = {guess: count(guess)}
    number, step = guess, 1 if counts[guess] < target else -1
    while (counts[number] - target) * step < 0 and number + step >= 1:
        number += step
        counts[number] = count(number)
    return min(counts, key=lambda each: abs(counts[each] - target))
