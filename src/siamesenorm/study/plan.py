"""What a study would train: its runs, their parameters, and about how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from siamesenorm.residual import ConfigError, one_line
from siamesenorm.study.folder import PENDING, StudyFolder
from siamesenorm.study.grid import Run, Study
from siamesenorm.study.timing import kind, trial
from siamesenorm.training.build import check, parameter_counts

__all__ = ["Planned", "plan"]


@dataclass(frozen=True)
class Planned:
    """A run that a study would train.

    Attributes:
        run: itself.
        status: as in the results, ``pending`` where it has not been trained.
        params: of its model; ``None`` for one that cannot be had.
        over_baseline: its parameters over those of the baseline at the same place, less one.
        seconds: that it takes on this machine, about; ``None`` where that is not known.
        fault: why its model cannot be had.
    """

    run: Run
    status: str
    params: int | None
    over_baseline: float | None
    seconds: float | None
    fault: str | None


@dataclass(frozen=True)
class _Model:
    params: int | None
    seconds_per_step: float | None
    fault: str | None


def plan(study: Study, out: Path | None = None) -> list[Planned]:
    """All runs of a study, in the order in which they would be trained; nothing is written.

    How long a step takes is taken from the runs of the same kind that ``out`` holds, else tried once for each kind.

    Raises:
        ConfigError: for a grid that is wrong in itself.
    """
    runs = study.runs
    folder = None if out is None else StudyFolder(out)
    states = {run.key: None if folder is None else folder.state(run) for run in runs}
    known = dict(_known(runs, folder))
    models: dict[str, _Model] = {}
    for run in runs:
        name = kind(run.recipe)
        if name not in models:
            models[name] = _model(run, known.get(name))
    references = {
        run.without("scheme"): models[kind(run.recipe)].params
        for run in runs
        if study.reference is not None and run.values["scheme"] == study.reference
    }
    planned = []
    for run in runs:
        model, state = models[kind(run.recipe)], states[run.key]
        reference = references.get(run.without("scheme"))
        over = model.params / reference - 1 if model.params is not None and reference else None
        pace = model.seconds_per_step
        seconds = study.seconds if study.seconds is not None else pace and pace * run.recipe.train.steps
        planned.append(
            Planned(run, PENDING if state is None else state.status, model.params, over, seconds, model.fault)
        )
    return planned


def _known(runs: Sequence[Run], folder: StudyFolder | None) -> Iterator[tuple[str, float]]:
    """The pace of each kind of which a run has ended."""
    for run in runs if folder is not None else ():
        summary = folder.state(run).summary if folder is not None else {}
        if summary.get("steps") and summary.get("seconds"):
            yield kind(run.recipe), summary["seconds"] / summary["steps"]


def _model(run: Run, pace: float | None) -> _Model:
    try:
        model = check(run.recipe, needs_data=False)
        params, _ = parameter_counts(model)
        return _Model(params, trial(run.recipe, model) if pace is None else pace, None)
    except ConfigError as error:
        return _Model(None, None, str(error))
    except Exception as error:  # a model's own code may not take sizes that its configuration does
        return _Model(None, None, f"{type(error).__name__}: {one_line(error)}")
