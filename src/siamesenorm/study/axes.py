"""The axes of a grid, as the words in which people write them.

An axis turns each of its values into what it changes in a recipe. ``schemes``, ``lrs``, ``seeds``, ``warmups`` and
``depths`` have a word of their own; any other key of a recipe is an axis by its dotted name.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from siamesenorm.residual import ConfigError, nearest, parse_scheme, schemes
from siamesenorm.study.shape import Shape, solve
from siamesenorm.training.recipe import Recipe, valid_keys

__all__ = ["ALL_SCHEMES", "Axis", "axis_named", "words"]

ALL_SCHEMES = "all"
"""As a value of ``schemes``: every scheme there is, with its defaults, but for those that the axis names itself."""


@dataclass(frozen=True)
class Axis(ABC):
    """One axis.

    Attributes:
        word: what a grid calls it.
        column: what tables call one value of it.
        label: what figures call it.
        decides: the recipe's keys that it stands for, which are no axes by their own names.
        logarithmic: whether the scale of a figure is.
    """

    word: str
    column: str
    label: str
    decides: tuple[str, ...]
    logarithmic: ClassVar[bool] = False

    def expanded(self, values: list[Any]) -> list[Any]:
        """The values of the axis, those that stand for several written out."""
        return values

    @abstractmethod
    def read(self, value: Any) -> Any:
        """A value, checked.

        Raises:
            ConfigError: for one that the axis cannot have.
        """

    @abstractmethod
    def changes(self, value: Any, base: Recipe) -> dict[str, Any]:
        """What a value, as `read` gave it, sets in the recipe ``base``, by dotted key."""

    def shown(self, value: Any, recipe: Recipe) -> Any:
        """A value as tables show it, given the recipe that it led to."""
        del recipe
        return value

    def place(self, value: Any, recipe: Recipe) -> float | None:
        """Where on a scale a figure shows a value; ``None`` on an axis that has none."""
        del value, recipe
        return None


class _Schemes(Axis):
    def expanded(self, values: list[Any]) -> list[Any]:
        named = {parse_scheme(value).label for value in values if isinstance(value, str) and value != ALL_SCHEMES}
        rest = [name for name in schemes() if name not in named]
        return [word for value in values for word in (rest if value == ALL_SCHEMES else [value])]

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ConfigError(f"a scheme is a word such as siamese:x=hybrid, not {value!r}")
        parse_scheme(value)
        return value

    def changes(self, value: Any, base: Recipe) -> dict[str, Any]:
        del base
        scheme = parse_scheme(value)
        # All of them, so that a table of runs says what each was, whatever the defaults become.
        return {"model.scheme": scheme.name, "model.options": scheme.options()}


class _Rates(Axis):
    logarithmic = True

    def read(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"a learning rate is a number, not {value!r}")
        return float(value)

    def changes(self, value: Any, base: Recipe) -> dict[str, Any]:
        del base
        return {"optim.lr": value}

    def place(self, value: Any, recipe: Recipe) -> float:
        del recipe
        return float(value)


class _Seeds(Axis):
    def read(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"a seed is a whole number, not {value!r}")
        return value

    def changes(self, value: Any, base: Recipe) -> dict[str, Any]:
        del base
        return {"seed": value}


_SCALED = re.compile(r"\s*(\d+)\s+of\s+(\d+)\s*")


class _Warmups(Axis):
    """Steps, or ``N of M``: what N steps of a run of M come to in the run at hand, at least one unless N is 0."""

    def read(self, value: Any) -> int | str:
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        found = _SCALED.fullmatch(value) if isinstance(value, str) else None
        if found is None or not 0 <= int(found[1]) <= int(found[2]) or int(found[2]) == 0:
            raise ConfigError(f"a warm-up is a number of steps, or 'N of M' with N at most M, not {value!r}")
        return f"{int(found[1])} of {int(found[2])}"

    def changes(self, value: Any, base: Recipe) -> dict[str, Any]:
        if isinstance(value, int):
            return {"schedule.warmup_steps": value}
        part, whole = (int(number) for number in value.split(" of "))
        steps = round(part * base.train.steps / whole)
        return {"schedule.warmup_steps": max(steps, 1) if part else 0}

    def place(self, value: Any, recipe: Recipe) -> float:
        del value
        return 100 * recipe.schedule.warmup_steps / recipe.train.steps


class _Depths(Axis):
    """Layers, whose width is solved for the parameters of the grid's recipe, or ``LxW`` or ``LxWxM`` (MLP) as given."""

    logarithmic = True

    def read(self, value: Any) -> Shape:
        return Shape.read(value)

    def changes(self, value: Shape, base: Recipe) -> dict[str, Any]:
        return solve(value, base)

    def shown(self, value: Shape, recipe: Recipe) -> str:
        found = Shape.of(recipe)
        return f"{found.layers}x{found.width}" + (f"x{found.mlp:g}" if value.mlp else "")

    def place(self, value: Shape, recipe: Recipe) -> float:
        del recipe
        return float(value.layers)


class _Key(Axis):
    """Any key of a recipe, whose values are checked where recipes are."""

    def read(self, value: Any) -> Any:
        return value

    def changes(self, value: Any, base: Recipe) -> dict[str, Any]:
        del base
        return {self.word: value}

    def shown(self, value: Any, recipe: Recipe) -> Any:
        del recipe
        return json.dumps(value) if isinstance(value, list | dict) else value

    def place(self, value: Any, recipe: Recipe) -> float | None:
        del recipe
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


_AXES: Mapping[str, Axis] = {
    axis.word: axis
    for axis in (
        _Schemes("schemes", "scheme", "scheme", ("model.scheme", "model.options")),
        _Rates("lrs", "lr", "learning rate", ("optim.lr",)),
        _Seeds("seeds", "seed", "seed", ("seed",)),
        _Warmups("warmups", "warmup", "warm-up, % of the run", ("schedule.warmup_steps",)),
        _Depths("depths", "depth", "layers", ()),
    )
}


def words() -> tuple[str, ...]:
    """The axes that have a word of their own."""
    return tuple(_AXES)


def axis_named(word: str, kind: type[Recipe]) -> Axis:
    """The axis called ``word`` in a grid over recipes of a kind.

    Raises:
        ConfigError: naming the nearest.
    """
    if word in _AXES:
        return _AXES[word]
    inside = word.startswith(("model.config.", "model.options."))
    if word in valid_keys(kind) or inside:
        for axis in _AXES.values():
            if word in axis.decides:
                raise ConfigError(f"the axis over {word} is called '{axis.word}'")
        return _Key(word, word, word, (word,))
    raise ConfigError(
        f"unknown axis '{word}': {nearest(word, _AXES)} (any key of a recipe is an axis too, by its dotted name, such "
        "as optim.weight_decay)"
    )
