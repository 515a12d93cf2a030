"""What follows from the rows of a study: each condition over its seeds, schemes against the baseline, and one advice.

A condition is a place on all axes but that of the seeds. Schemes are compared within a *setting*, a place on all axes
but those of seeds, schemes and the one over which each scheme is taken at its own best value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from siamesenorm.study.folder import DIVERGED, FAILED, FINISHED, PENDING
from siamesenorm.study.grid import Run, Study, titled
from siamesenorm.study.results import Row
from siamesenorm.study.statistics import Estimate, estimate, paired

__all__ = ["Comparison", "Condition", "compare"]

METRIC = "val_loss"
"""What is compared: the loss on what was held out, the lower the better, in every task."""

_HARDLY = 0.01


@dataclass(frozen=True)
class Condition:
    """The runs that differ in nothing but the seed.

    Attributes:
        values: by column, the place on each axis but that of the seeds.
        places: the same as numbers, where an axis has a scale.
        rows: of its runs.
    """

    values: Mapping[str, Any]
    places: Mapping[str, float | None]
    rows: tuple[Row, ...]

    @cached_property
    def by_seed(self) -> dict[int, float]:
        """The loss of each run that finished."""
        return {row["seed"]: row[METRIC] for row in self.rows if row["status"] == FINISHED and row[METRIC] is not None}

    @property
    def loss(self) -> Estimate | None:
        """Over the runs that finished."""
        return self.mean_of(METRIC)

    def mean_of(self, column: str) -> Estimate | None:
        """Of any column of numbers, over the runs that finished."""
        rows = [row for row in self.rows if row["status"] == FINISHED]
        return estimate([float(row[column]) for row in rows if row.get(column) is not None])

    def count(self, status: str) -> int:
        """How many runs ended so."""
        return sum(row["status"] == status for row in self.rows)

    @property
    def is_blind(self) -> bool:
        """Whether its mean is hardly below, or above, that of a prediction that ignores its input."""
        limit = self.rows[0]["blind_loss"]
        return self.loss is not None and limit is not None and self.loss.mean > (1 - _HARDLY) * limit

    @property
    def is_sound(self) -> bool:
        """Whether every run finished, so that its mean is one of all seeds."""
        return len(self.by_seed) == len(self.rows)

    @property
    def title(self) -> str:
        """Its place on each axis, in words."""
        return titled(self.values) or "the recipe"

    @property
    def fate(self) -> str:
        """What became of the runs that did not finish, in words; nothing where all did."""
        words = {DIVERGED: "diverged", FAILED: "failed", PENDING: "not done yet"}
        parts = [f"{self.count(status)} {word}" for status, word in words.items() if self.count(status)]
        return f"{', '.join(parts)} of {len(self.rows)}" if parts else ""


@dataclass(frozen=True)
class Comparison:
    """A study's outcome.

    Attributes:
        study: what was asked.
        conditions: all of them, in the order of the grid.
        best: the conditions that are compared: where the study has an axis to take the best over, the best of each
            scheme in each setting; else all.
    """

    study: Study
    conditions: tuple[Condition, ...]
    best: tuple[Condition, ...]

    def setting(self, condition: Condition) -> tuple[Any, ...]:
        """In which of the settings a condition is."""
        out = {"scheme", self._best_column}
        return tuple(value for column, value in condition.values.items() if column not in out)

    def baseline_of(self, condition: Condition) -> Condition | None:
        """What a condition is compared to: the baseline in the same setting, ``None`` for the baseline itself."""
        if self.study.reference is None or condition.values["scheme"] == self.study.reference:
            return None
        same = (
            other
            for other in self.best
            if other.values["scheme"] == self.study.reference and self.setting(other) == self.setting(condition)
        )
        return next(same, None)

    def difference(self, condition: Condition) -> Estimate | None:
        """The loss less the baseline's, seed by seed; ``None`` where one of the two has no run in common."""
        other = self.baseline_of(condition)
        return None if other is None else paired(condition.by_seed, other.by_seed)

    @property
    def _best_column(self) -> str | None:
        words = dict(zip(self.study.axes, self.study.columns, strict=True))
        return None if self.study.best_over is None else words[self.study.best_over]

    @property
    def settings_won(self) -> dict[str, tuple[int, int, int]]:
        """By scheme, in how many settings it is below the baseline, in how many beyond the noise, and of how many."""
        won: dict[str, tuple[int, int, int]] = {}
        for condition in self.best:
            gap = self.difference(condition)
            if gap is not None:
                below, sure, count = won.get(condition.values["scheme"], (0, 0, 0))
                is_below = gap.mean < 0
                sure += is_below and gap.is_apart_from_zero
                won[condition.values["scheme"]] = (below + is_below, sure, count + 1)
        return won

    @property
    def winner(self) -> Condition | None:
        """The condition with the lowest loss of those whose runs all finished."""
        sound = [condition for condition in self.best if condition.is_sound and condition.loss]
        return min(sound, key=_mean, default=None)

    @property
    def advice(self) -> str:
        """One recommendation, in words."""
        winner = self.winner
        if winner is None:
            waiting = any(condition.count(PENDING) for condition in self.conditions)
            return (
                "Nothing can be recommended yet: no condition has all its seeds."
                if waiting
                else "Nothing can be recommended: in every condition a run diverged or failed."
            )
        assert winner.loss is not None
        missing = sum(condition.count(PENDING) + condition.count(FAILED) for condition in self.conditions)
        so_far = f" Runs that are missing: {missing}, so this may change." if missing else ""
        reference = self.study.reference
        sound = {each.values["scheme"] for each in self.best if each.is_sound} if reference is not None else set()
        if reference is not None and reference not in sound:
            so_far = f" The baseline, {reference}, has no condition in which all its runs finished.{so_far}"
        rival, name = self._rival(winner)
        if rival is None:
            return f"Take {winner.title}: it has the lowest loss, {winner.loss}. {name}{so_far}"
        gap = paired(winner.by_seed, rival.by_seed)
        if gap is None or gap.half is None:
            return (
                f"{winner.title} has the lowest loss, {winner.loss}, and {name} has {rival.loss}. With one seed there "
                f"is no telling whether that is more than chance: run the study with three or more.{so_far}"
            )
        by = f"{-gap.mean:.4f} ± {gap.half:.4f} over {gap.count} seeds"
        if gap.is_apart_from_zero:
            below = f"its loss, {winner.loss}, is below that of {name} ({rival.loss}), by {by}"
            return f"Take {winner.title}: {below}.{so_far}"
        keep = "keep the baseline" if reference in sound else "take whichever is cheaper"
        return (
            f"{winner.title} has the lowest loss, {winner.loss}, but its distance to {name} ({rival.loss}), {by}, is "
            f"within the noise: {keep}, or add seeds.{so_far}"
        )

    def _rival(self, winner: Condition) -> tuple[Condition | None, str]:
        """What the winner has to beat, and its name in a sentence; or that there is nothing, and why."""
        reference = self.study.reference
        sound = [condition for condition in self.best if condition.is_sound and condition is not winner]
        if reference is not None and winner.values["scheme"] != reference:
            rival = min((each for each in sound if each.values["scheme"] == reference), key=_mean, default=None)
            if rival is not None:
                return rival, f"the baseline at its best, {rival.title}"
        # Without a sound baseline, the next best is what has to be beaten.
        rival = min(sound, key=_mean, default=None)
        if rival is None:
            return None, "No other condition has all its runs."
        return rival, f"the next best, {rival.title}"


def _mean(condition: Condition) -> float:
    return float("inf") if condition.loss is None else condition.loss.mean


def compare(study: Study, runs: Sequence[Run], rows: Sequence[Row]) -> Comparison:
    """The outcome of a study's runs, one row each."""
    found: dict[tuple[Any, ...], list[tuple[Run, Row]]] = {}
    for run, row in zip(runs, rows, strict=True):
        found.setdefault(run.without("seed"), []).append((run, row))
    conditions = tuple(
        Condition(
            {column: value for column, value in pairs[0][0].values.items() if column != "seed"},
            pairs[0][0].places,
            tuple(row for _, row in pairs),
        )
        for pairs in found.values()
    )
    whole = Comparison(study, conditions, conditions)
    if study.best_over is None:
        return whole
    rivals: dict[tuple[Any, ...], list[Condition]] = {}
    for condition in conditions:
        rivals.setdefault((condition.values.get("scheme"), whole.setting(condition)), []).append(condition)
    # One in which a seed diverged is the best only where every value has one.
    best = tuple(
        min(each, key=lambda condition: (not condition.is_sound, _mean(condition))) for each in rivals.values()
    )
    return Comparison(study, conditions, best)
