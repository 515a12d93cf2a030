"""What a study is: a recipe, the axes along which it is varied, and how the outcome is read.

A study in YAML has the fields of `Study`. Its runs are the product of its axes, and each run is an ordinary recipe.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from siamesenorm.residual import ConfigError, nearest
from siamesenorm.study.axes import Axis, axis_named, words
from siamesenorm.training.recipe import SCHEDULE_STEPS, Recipe, digest, valid_keys
from siamesenorm.training.recipe import to_mapping as recipe_mapping
from siamesenorm.training.recipe_files import beside, find, load, parse_value, read
from siamesenorm.training.tasks import task_of

__all__ = ["PaperTable", "Run", "Study", "changed", "load_study", "study_from", "titled", "to_mapping"]

_SEEDS, _SCHEMES, _WARMUPS = "seeds", "schemes", "warmups"
_STEPS = "train.steps"
# What a command may give beside axes and the recipe's keys.
_OPTIONS = ("recipe", "steps", "seconds", "baseline", "best_over", "keep_models")


@dataclass(frozen=True)
class PaperTable:
    """Figures that were published, to be shown beside a study's own and labelled as such.

    Attributes:
        caption: what they are of, and where they are from.
        columns: names of the columns.
        rows: a text or number for each column.
        match: an axis whose values are in the first column: the other columns then stand in the study's own table too.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    match: str | None = None


@dataclass(frozen=True)
class Run:
    """One run of a study.

    Attributes:
        values: by column, its place on each axis as tables show it.
        places: by column, that place as a number, ``None`` where there is none.
        recipe: all of it.
    """

    values: Mapping[str, Any]
    places: Mapping[str, float | None]
    recipe: Recipe

    @cached_property
    def key(self) -> str:
        """The name of its folder: equal for equal recipes, and different for different ones."""
        recipe = self.recipe
        return f"{recipe.model.scheme}-seed{recipe.seed}-{digest(recipe)[:12]}"

    @cached_property
    def data(self) -> str:
        """What its recipe says of data: equal texts for equal data."""
        return json.dumps(recipe_mapping(self.recipe)["data"], sort_keys=True)

    @property
    def title(self) -> str:
        """Its place on each axis, in words."""
        return titled(self.values) or self.recipe.name

    def without(self, *columns: str) -> tuple[Any, ...]:
        """Its place on the other axes."""
        return tuple(value for column, value in self.values.items() if column not in columns)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A grid of runs.

    Attributes:
        name: of the study.
        recipe: that its runs vary, a name or path.
        axes: the values along each axis, by its word (`siamesenorm.study.axes`).
        title: what it asks, on a line.
        about: the same in a few sentences, for its report.
        steps: of each run, with the recipe's warm-up keeping its share of them; ``None`` is the recipe's own.
        seconds: give each run as many steps as take so long at its own pace, instead of the same for all.
        set: what else to change in the recipe, by dotted key.
        baseline: the scheme that others are compared to; by default the first.
        best_over: an axis over which each scheme is taken at its own best value.
        keep_models: keep each run's model; what a run is resumed from goes once it has finished, either way.
        paper: published figures.
    """

    name: str
    recipe: str
    axes: Mapping[str, tuple[Any, ...]]
    title: str = ""
    about: str = ""
    steps: int | None = None
    seconds: float | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None
    best_over: str | None = None
    keep_models: bool = True
    paper: tuple[PaperTable, ...] = ()

    @cached_property
    def base(self) -> Recipe:
        """The recipe with all that its runs have in common, and the baseline's scheme."""
        plain = self._recipe({})
        schemes = self._axis(_SCHEMES)
        return plain if schemes is None else self._recipe(schemes.changes(self.reference, plain), like=plain)

    @property
    def reference(self) -> str | None:
        """The baseline, as a value of the axis of schemes; ``None`` where there is no such axis."""
        schemes = self._axis(_SCHEMES)
        return None if schemes is None else self.baseline or self._values(schemes)[0]

    @cached_property
    def grid(self) -> tuple[Axis, ...]:
        """The axes, in the order in which the study gives them."""
        kind = type(load(self.recipe, _texts(self.set)))
        return tuple(axis_named(word, kind) for word in self.axes)

    @property
    def columns(self) -> tuple[str, ...]:
        """What tables call the axes."""
        return tuple(axis.column for axis in self.grid)

    def axis_of(self, column: str) -> Axis:
        """The axis that tables call ``column``."""
        return next(axis for axis in self.grid if axis.column == column)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All runs, one seed after the other, so that what is done before all is done covers the other axes.

        Raises:
            ConfigError: for what cannot be varied so, or a run that is there twice.
        """
        self._check()
        along = {
            axis: [(value, self._changes(axis, value)) for value in self._values(axis)]
            for axis in sorted(self.grid, key=lambda axis: axis.word != _SEEDS)
        }
        self._check_keys({axis: values[0][1] for axis, values in along.items()})
        runs: dict[str, Run] = {}
        for point in itertools.product(*along.values()):
            recipe = self._recipe({key: made for _, changes in point for key, made in changes.items()}, like=self.base)
            at = {axis: value for axis, (value, _) in zip(along, point, strict=True)}
            run = Run(
                {axis.column: axis.shown(at[axis], recipe) for axis in self.grid},
                {axis.column: axis.place(at[axis], recipe) for axis in self.grid},
                recipe,
            )
            if run.key in runs:
                raise ConfigError(
                    f"the grid has a run twice: ({runs[run.key].title}) and ({run.title}) come to the same recipe"
                )
            runs[run.key] = run
        return tuple(runs.values())

    def _axis(self, word: str) -> Axis | None:
        return next((axis for axis in self.grid if axis.word == word), None)

    def _values(self, axis: Axis) -> list[Any]:
        values = [axis.read(value) for value in axis.expanded(list(self.axes[axis.word]))]
        if not values:
            raise ConfigError(f"the axis '{axis.word}' is empty: give it at least one value")
        return values

    def _changes(self, axis: Axis, value: Any) -> dict[str, Any]:
        return axis.changes(value, self.base)

    @cached_property
    def _length(self) -> dict[str, Any]:
        """What `steps` sets."""
        if self.steps is None:
            return {}
        recipe = load(self.recipe, _texts(self.set))
        schedule = recipe.schedule.scaled(self.steps, of=recipe.train.steps)
        keys = {f"schedule.{name}": getattr(schedule, name) for name in SCHEDULE_STEPS}
        return {_STEPS: self.steps} | {key: value for key, value in keys.items() if key not in self.set}

    def _recipe(self, changes: Mapping[str, Any], like: Recipe | None = None) -> Recipe:
        """The study's recipe with changes, and with what has been looked at for another."""
        recipe = load(self.recipe, _texts({**self.set, **self._length, **changes}))
        if like is not None and recipe.data == like.data:
            task_of(like).lend(task_of(recipe))
        return recipe

    def _check(self) -> None:
        """Refuse what contradicts itself."""
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps must be at least 1, not {self.steps}")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ConfigError(f"seconds must be above 0, not {self.seconds}")
        lengths = [
            word
            for word, given in (
                ("steps", self.steps is not None),
                ("seconds", self.seconds is not None),
                (_STEPS, _STEPS in self.set or _STEPS in self.axes),
            )
            if given
        ]
        if len(lengths) > 1:
            raise ConfigError(f"{' and '.join(lengths)} both say how long a run is; give one of them")
        if _STEPS in self.axes and any(isinstance(value, str) for value in self.axes.get(_WARMUPS, ())):
            raise ConfigError(
                f"a warm-up 'N of M' is a share of one length, and the axis '{_STEPS}' has several: give it in steps"
            )
        schemes = self._axis(_SCHEMES)
        if self.baseline is not None:
            if schemes is None:
                raise ConfigError("a baseline is one of several schemes, and the grid has no axis 'schemes'")
            if self.baseline not in (known := self._values(schemes)):
                raise ConfigError(
                    f"the baseline '{self.baseline}' is none of the grid's schemes: {nearest(self.baseline, known)}"
                )
        for table in self.paper:
            if table.match is not None and (not isinstance(table.match, str) or table.match not in self.axes):
                raise ConfigError(f"a table under 'paper' matches the axis '{table.match}', which the grid has not")
        if self.best_over is not None and (self.best_over not in self.axes or self.best_over in (_SEEDS, _SCHEMES)):
            others = [word for word in self.axes if word not in (_SEEDS, _SCHEMES)]
            raise ConfigError(
                f"best_over names an axis of the grid other than {_SCHEMES} and {_SEEDS}, not '{self.best_over}': "
                f"{nearest(self.best_over, others)}"
            )

    def _check_keys(self, changes: Mapping[Axis, Mapping[str, Any]]) -> None:
        """Refuse a key of the recipe that two sides decide."""
        decided = dict.fromkeys(self.set, "'set' or the command line gives")
        for axis, keys in changes.items():
            for key in keys:
                for other, who in decided.items():
                    if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                        raise ConfigError(
                            f"the axis '{axis.word}' varies {key}, and {who} {other}; give one of the two"
                        )
            decided |= dict.fromkeys(keys, f"the axis '{axis.word}' varies")


def titled(values: Mapping[str, Any]) -> str:
    """A place on some axes in words: the scheme, and what each other axis is at."""
    schemes = [str(value) for column, value in values.items() if column == "scheme"]
    return ", ".join(schemes + [f"{column} {value}" for column, value in values.items() if column != "scheme"])


def load_study(name: str, overrides: Sequence[str] = ()) -> Study:
    """A study by name or path, with overrides applied.

    Args:
        name: of a study of the package, or the path of a YAML file; its recipe, if that is a path, is relative to it.
        overrides: ``word=value`` texts, values being read as YAML: an axis with its values as a list, ``recipe``,
            ``steps``, ``baseline``, ``best_over``, ``keep_models``, or a key of the recipe.

    Raises:
        ConfigError: for a study that does not exist or cannot be read, a word that it does not know, or a value of the
            wrong type.
    """
    path = find(name, "study")
    tree = read(path, "study")
    _check_types(tree)
    tree.setdefault("name", path.stem)
    if tree.get("recipe") is not None:
        tree["recipe"] = beside(path.resolve(), tree["recipe"])
    return study_from(_changed(tree, overrides))


def changed(study: Study, overrides: Sequence[str]) -> Study:
    """A study with overrides, as in `load_study`, applied.

    Raises:
        ConfigError: as there.
    """
    return study_from(_changed(to_mapping(study), overrides)) if overrides else study


def study_from(tree: Mapping[str, Any]) -> Study:
    """A study from nested mappings.

    Raises:
        ConfigError: for a key that does not exist, a missing one, or a value of the wrong type.
    """
    _check_types(tree)
    values = {key: value for key, value in tree.items() if value is not None}
    for spec in fields(Study):
        if spec.default is MISSING and spec.default_factory is MISSING and spec.name not in values:
            raise ConfigError(f"the study lacks '{spec.name}'")
    if not values["name"] or set(values["name"]) & set("/\\"):
        raise ConfigError(f"a study cannot be called {values['name']!r}")
    values["axes"] = {str(word): _axis_values(word, given) for word, given in values["axes"].items()}
    if not values["axes"]:
        raise ConfigError(f"the study has no axis; there are {', '.join(words())}, and the recipe's keys")
    values["paper"] = tuple(_paper(table) for table in values.get("paper", ()))
    return Study(**values)


_TYPES: tuple[tuple[str, tuple[type, ...], str], ...] = (
    *((key, (str,), "text") for key in ("name", "recipe", "title", "about", "baseline", "best_over")),
    *((key, (dict,), "a mapping") for key in ("axes", "set")),
    ("steps", (int,), "a whole number"),
    ("seconds", (int, float), "a number"),
    ("keep_models", (bool,), "true or false"),
    ("paper", (list,), "a list of tables"),
)


def _check_types(tree: Mapping[str, Any]) -> None:
    """Refuse a key that a study has not, and a value that its key cannot have."""
    names = [spec.name for spec in fields(Study)]
    for key in tree:
        if key not in names:
            raise ConfigError(f"a study has no key '{key}'; {nearest(str(key), names)}")
    for key, kinds, what in _TYPES:
        value = tree.get(key)
        # To Python, true and false are whole numbers too.
        if value is not None and type(value) not in kinds:
            raise ConfigError(f"{key} of a study must be {what}, not {value!r}")


def _axis_values(word: Any, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        raise ConfigError(f"the axis '{word}' must be a list of values, such as [{values}], not {values!r}")
    return tuple(values)


def _paper(table: Any) -> PaperTable:
    """One published table."""
    names = [spec.name for spec in fields(PaperTable)]
    if not isinstance(table, Mapping):
        raise ConfigError(f"a table under 'paper' is a mapping with {', '.join(names)}, not {table!r}")
    for key in table:
        if key not in names:
            raise ConfigError(f"a table under 'paper' has no key '{key}'; {nearest(str(key), names)}")
    try:
        made = PaperTable(
            str(table["caption"]),
            tuple(map(str, table["columns"])),
            tuple(tuple(row) for row in table["rows"]),
            table.get("match"),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"a table under 'paper' needs a caption, columns and rows: {error}") from error
    for row in made.rows:
        if len(row) != len(made.columns):
            raise ConfigError(f"a row of a table under 'paper' has {len(row)} of {len(made.columns)} columns: {row}")
    return made


def _changed(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A study's mapping with a command's words put in."""
    out = {**tree, "axes": dict(tree.get("axes") or {}), "set": dict(tree.get("set") or {})}
    given: dict[str, Any] = {}
    for text in overrides:
        word, sign, value = text.partition("=")
        if not sign or not word:
            raise ConfigError(f"'{text}' is no override; write word=value, such as seeds=[0,1,2] or train.batch_size=8")
        parsed = parse_value(word, value)
        if word in given and given[word] != parsed:
            raise ConfigError(f"{word} is given twice, as {given[word]!r} and as {parsed!r}")
        given[word] = parsed
    if isinstance(given.get("recipe"), str):
        # What is written down must be found from any folder.
        given["recipe"] = beside(Path.cwd() / "words", given["recipe"])
    recipe = given.get("recipe", out.get("recipe"))
    kind = type(load(recipe)) if isinstance(recipe, str) else Recipe
    for word, value in given.items():
        if word in _OPTIONS:
            out[word] = value
        elif word in words() or word in out["axes"]:
            out["axes"][word] = value
        elif "." in word or word in valid_keys(kind):
            out["set"][word] = value
        else:
            known = (*words(), *out["axes"], *_OPTIONS)
            raise ConfigError(
                f"unknown axis or key '{word}': {nearest(word, known)} Any key of the recipe is one too, with the "
                "section that it is in: optim.weight_decay"
            )
    return out


def to_mapping(study: Study) -> dict[str, Any]:
    """The nested mappings that `study_from` turns back into an equal study."""
    tree: dict[str, Any] = {spec.name: getattr(study, spec.name) for spec in fields(Study)}
    tree["axes"] = {word: list(values) for word, values in study.axes.items()}
    tree["set"] = dict(study.set)
    tree["paper"] = [
        {
            "caption": table.caption,
            "columns": [*table.columns],
            "rows": [[*row] for row in table.rows],
            "match": table.match,
        }
        for table in study.paper
    ]
    return tree


def _texts(changes: Mapping[str, Any]) -> list[str]:
    """Changes as the overrides that a recipe takes; JSON is YAML."""
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]
