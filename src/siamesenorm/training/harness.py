"""Downstream tasks, by the language model evaluation harness (lm-eval), which is met here alone."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from siamesenorm.data.files import finite, write_whole
from siamesenorm.hub import card
from siamesenorm.residual import ConfigError, nearest, one_line
from siamesenorm.training.limits import positions_of

FILE = "evaluations.json"
"""What is beside a model that has been evaluated."""
SUITES = {"paper": ("arc_easy", "arc_challenge", "hellaswag", "piqa", "openbookqa")}
"""Lists of tasks by name; ``paper`` has those that the SiameseNorm paper names (arXiv 2602.08064)."""
# The error of a metric that has no formula for it is that of so many resampled means.
_RESAMPLED = 1000
# What the harness warns of where it is given a model that is there already, or a task that leaves defaults out.
_EXPECTED = (
    "model kwarg is not of type `str`",
    "assuming single-process call",
    "already-initialized model",
    "using default",
)


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    *,
    batch_size: int,
    shots: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """The results of a language model on tasks.

    Args:
        model: on its device; put into evaluation mode.
        tokenizer: the model's.
        names: of tasks and groups of lm-eval, of `SUITES`, or files of tasks in lm-eval's form, which may name Python
            functions beside them, so only files that are trusted.
        batch_size: sequences at a time.
        shots: examples before each question, where a task does not fix their number; by default the task's.
        limit: of each task only so many examples, the first ones; for trying out.

    Returns:
        By task: ``metrics`` (by name ``value`` and ``stderr``, the standard error, which may be None), ``examples``
        measured ``of`` how many, ``shots``, the task's ``version``, and the ``harness``'s.

    Raises:
        ConfigError: lm-eval is not installed, or a task is unknown or cannot be loaded, its data for example.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ConfigError(
            f"--tasks needs lm-eval, which cannot be imported ({one_line(error)}): pip install 'siamesenorm[eval]'"
        ) from error
    with _quiet():
        manager, tasks = _load(names)
        model.eval()
        subject = HFLM(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=positions_of(model),
        )
        try:
            found: Any = lm_eval.simple_evaluate(
                subject,
                tasks=tasks,
                task_manager=manager,
                num_fewshot=shots,
                limit=limit,
                bootstrap_iters=_RESAMPLED,
                log_samples=False,
            )
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(f"lm-eval could not measure: {one_line(error)}") from error
    results = {name: _facts(name, found) for name in found["results"]}
    for name, facts in results.items():
        if facts["examples"] is not None and not facts["metrics"]:
            raise ConfigError(f"lm-eval measured nothing in the task {name}; see that it knows the task's metrics")
    return results


def recorded(folder: Path) -> dict[str, Any]:
    """The results that lie beside a saved model, by task, as `run` gives them.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    path = folder / FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))["tasks"]
        # All that is made of them is made once, to see that it can be.
        list(rows(known)), _harnesses(known)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no evaluations ({one_line(error)}): move it away to write anew") from error
    return dict(known)


def check_place(folder: Path) -> None:
    """See that results could be written beside a saved model and into its card.

    Raises:
        ConfigError: what is there cannot be read.
    """
    recorded(folder)
    card.read(folder)


def record(folder: Path, results: Mapping[str, Any]) -> Path:
    """Write results beside a saved model and into its card; those of other tasks that are there stay.

    Those of a part of a task's examples take no other's place, and are none that the hub would list.

    Returns:
        The file beside the model.

    Raises:
        ConfigError: as `check_place`.
    """
    path, known = folder / FILE, recorded(folder)
    whole = {name for name, task in known.items() if _is_whole(task)}
    taken = {name: task for name, task in results.items() if _is_whole(task) or name not in whole}
    every = finite({**known, **taken})
    write_whole(path, json.dumps({"tasks": every}, indent=2, allow_nan=False) + "\n")
    head = ("task", "metric", "value", "standard error", "examples", "shots")
    listed = [
        card.result(name, "text-generation", name, metric, each["value"])
        for name, task in every.items()
        if _is_whole(task)
        for metric, each in task["metrics"].items()
        if each["value"] is not None
    ]
    card.add_results(folder, f"By {_harnesses(every)}:\n\n{card.table(list(rows(every)), head)}", listed)
    return path


def _harnesses(results: Mapping[str, Any]) -> str:
    return ", ".join(sorted({task["harness"] for task in results.values()}))


def _is_whole(task: Mapping[str, Any]) -> bool:
    """Whether all of a task's examples were measured."""
    return bool(task["of"] in (None, task["examples"]))


def rows(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Results for people: task, metric, value, standard error, examples and shots."""
    for name, task in results.items():
        count = f"{task['examples']:,}" if task["examples"] is not None else ""
        if not _is_whole(task):
            count = f"the first {count} of {task['of']:,}"
        shots = "" if task["shots"] is None else str(task["shots"])
        for metric, each in task["metrics"].items():
            value, error = (("" if number is None else f"{number:.4f}") for number in (each["value"], each["stderr"]))
            yield name, metric, value, error, count, shots


def _load(names: Sequence[str]) -> tuple[Any, list[Any]]:
    """lm-eval's manager of tasks, and the tasks and groups, each with its data."""
    from lm_eval.tasks import TaskManager

    wanted = [each for name in names for each in SUITES.get(name, (name,))]
    if not all(wanted):
        raise ConfigError("a task has no name: --tasks takes names and files with commas between them")
    files = {name: Path(name) for name in wanted if name.endswith((".yaml", ".yml"))}
    for name, path in files.items():
        if not path.is_file():
            raise ConfigError(f"there is no task file {name}")
    # Its own tasks are thousands of files, which take a while to look through.
    manager = TaskManager(include_defaults=len(files) < len(set(wanted)))
    loaded: list[Any] = []
    origin: dict[str, str] = {}
    for name in dict.fromkeys(wanted):
        if name not in files and name not in manager.all_tasks:
            raise ConfigError(f"lm-eval has no task '{name}'; {_nearest(name, [*SUITES, *manager.all_tasks])}")
        try:
            found = manager.load([str(files[name].resolve()) if name in files else name])
        except Exception as error:  # YAML, the task's own code, the hub's client and data sets have errors of their own
            raise ConfigError(f"the task {name} or its data cannot be loaded: {one_line(error)}") from error
        for task in found["tasks"]:
            if task in origin:
                raise ConfigError(f"{origin[task]} and {name} both have a task {task}; evaluate them one by one")
            origin[task] = name
        inside = {task for group in found["groups"].values() for task in group.child_names}
        loaded += [group for name, group in found["groups"].items() if name not in inside]
        loaded += [task for name, task in found["tasks"].items() if name not in inside]
    return manager, loaded


def _nearest(name: str, valid: Sequence[str]) -> str:
    hint = nearest(name, valid)
    # All of them would be thousands.
    return hint if hint.startswith("did you mean") else "a file of a task ends with .yaml"


def _facts(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of the results of a task or group."""
    measured = found["results"][name]
    metrics = {}
    for key, value in measured.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = measured.get(f"{metric}_stderr,{kind}")
        metrics[metric if kind == "none" else f"{metric} ({kind})"] = {
            # Some are numpy's own, which YAML would keep as such.
            "value": float(value) if isinstance(value, int | float) else None,
            "stderr": float(error) if isinstance(error, int | float) else None,
        }
    counts = found["n-samples"].get(name, {})
    return {
        "metrics": metrics,
        "examples": counts.get("effective"),
        "of": counts.get("original"),
        "shots": found["n-shot"].get(name),
        "version": found["versions"].get(name),
        "harness": f"lm-eval {importlib.metadata.version('lm_eval')}",
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's own messages about what it does; of its warnings, each kind once, at the end."""
    logger = logging.getLogger("lm_eval")
    level, propagate = logger.level, logger.propagate
    heard = _Heard()
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(heard)
    try:
        yield
    finally:
        logger.removeHandler(heard)
        logger.setLevel(level)
        logger.propagate = propagate
        for text, count in heard.kinds.values():
            print(f"warning: lm-eval: {text}{f' ({count} such)' if count > 1 else ''}", file=sys.stderr)


class _Heard(logging.Handler):
    """Keeps warnings, those that differ in their numbers alone as one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kinds: dict[str, tuple[str, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Take a message down."""
        text = " ".join(record.getMessage().split())
        if any(known in text for known in _EXPECTED):
            return
        kind = re.sub(r"\d+", "0", text)
        first, count = self.kinds.get(kind, (text, 0))
        self.kinds[kind] = first, count + 1
