"""Probing saved models and runs, one or several: what is asked for, on what data, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from siamesenorm import hosts
from siamesenorm.probes import DEPTH_PROBES, Depth, depth_tables, overflow, site_table, spikes
from siamesenorm.probes.depth import forwards
from siamesenorm.probes.subject import scheme_in
from siamesenorm.residual import ConfigError, nearest
from siamesenorm.training.run_folder import RunFolder, model_folder, read_metrics
from siamesenorm.training.subjects import Subject, find

PROBES = ("sites", *DEPTH_PROBES, "overflow", "stability")
_SERIES = ("loss", "grad_norm")
# What an untouched model is, under the name of a scheme.
_PLAIN = "pre"
_BATCH_SIZE = 8


@dataclass(frozen=True)
class Wanted:
    """What is asked of each model.

    Attributes:
        only: of `PROBES`, in any order.
        batches: of held-out data, at most.
        batch_size: sequences or images in each; ``None`` is as many as the model's run had in a forward pass, or eight.
        source: data in place of the run's own.
    """

    only: Sequence[str] = PROBES
    batches: int = 8
    batch_size: int | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in PROBES:
                raise ConfigError(f"there is no probe '{name}': {nearest(name, PROBES)}")

    @property
    def of_model(self) -> frozenset[str]:
        """What needs the model itself."""
        return frozenset(self.only) - {"stability"}


class Probed:
    """A model or run that is to be probed, or one that has been.

    Args:
        path: of a saved model or a run.
        wanted: what is asked for.
        explicit: whether `wanted.only` was chosen, so that what cannot be had of it is an error.

    Raises:
        ConfigError: nothing can be measured there.
    """

    def __init__(self, path: Path, wanted: Wanted, *, explicit: bool = False) -> None:
        self.path = path
        self.wanted = wanted
        run = RunFolder(path)
        self.run = run if run.config.is_file() else None
        self.subject: Subject | None = None
        recipe = None if self.run is None else self.run.recipe()
        if self.run is None and explicit and "stability" in wanted.only:
            raise ConfigError(f"'{path}' is no run, and stability is measured on what a run wrote down: leave it out")
        if wanted.of_model:
            self.subject = find(model_folder(path), recipe, source=wanted.source)
            if not hosts.blocks(self.subject.model):
                self.subject.model = hosts.rewire(self.subject.model, _PLAIN)
        elif wanted.source is not None:
            raise ConfigError("--source is for probes of the model, of which none is asked for")
        train = None if recipe is None else recipe.train
        own = _BATCH_SIZE if train is None else train.micro_batch_size or train.batch_size
        self.batch_size = wanted.batch_size or own
        self.scheme = (
            scheme_in(self.subject.model).label if self.subject is not None else RunFolder(path).recipe().model.scheme
        )

    @property
    def blocks(self) -> int | None:
        """The depth of the model; ``None`` where it is not looked at."""
        return None if self.subject is None else len(hosts.blocks(self.subject.model))

    @property
    def work(self) -> int:
        """Forward passes, or thereabouts."""
        if self.subject is None:
            return 0
        batches = min(self.wanted.batches, -(-len(self.subject) // self.batch_size))
        only = self.wanted.of_model
        depth = forwards(self.blocks or 0, tuple(only)) if only & set(DEPTH_PROBES) else 0
        return batches * (depth + ("sites" in only) + ("overflow" in only))

    def result(self, label: str, progress: Callable[[int], None]) -> dict[str, Any]:
        """Measure; plain values, as they stand in ``probe.json``, and the run's ``trace``."""
        out: dict[str, Any] = {
            "label": label,
            "path": str(self.path),
            "scheme": self.scheme,
            "blocks_of_model": self.blocks,
            "parameters": None,
            "loss": None,
            "loss_label": None,
            "divergence_label": None,
            "counted": 0,
            "counts": None,
            "source": None,
            "sha256": None,
            "sites": [],
            "depth": [],
            "blocks": [],
            "skips": [],
            "angles": [],
            "overflow": None,
            "stability": None,
            "trace": {},
        }
        if self.subject is not None:
            out |= self._of_model(self.subject, progress)
        if "stability" in self.wanted.only and self.run is not None:
            out |= _of_run(self.run)
        return out

    def _of_model(self, subject: Subject, progress: Callable[[int], None]) -> dict[str, Any]:
        model, only = subject.model, self.wanted.of_model
        batches = subject.batches(self.batch_size, self.wanted.batches)
        source, sha256 = subject.source
        out: dict[str, Any] = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "loss_label": subject.loss_label,
            "divergence_label": subject.divergence_label,
            "counted": sum(batch.count for batch in batches),
            "counts": subject.counts,
            "source": source,
            "sha256": sha256,
        }
        if "sites" in only:
            out["sites"] = site_table(model, batches, progress=progress)
        if depth_only := [name for name in DEPTH_PROBES if name in only]:
            found: Depth = depth_tables(model, batches, only=depth_only, progress=progress)
            out |= {
                "loss": found.loss,
                "depth": found.depths,
                "blocks": found.blocks,
                "skips": found.skips,
                "angles": found.angles,
            }
        if "overflow" in only:
            out["overflow"] = {"first": _first_overflow(model, batches, progress)}
        return out


def labels_of(probed: Sequence[Probed]) -> list[str]:
    """A name for each: its scheme, and where that does not tell them apart its folder too."""
    schemes = [each.scheme for each in probed]
    names = [
        scheme if schemes.count(scheme) == 1 else f"{scheme} ({each.path.resolve().name})"
        for scheme, each in zip(schemes, probed, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{each.scheme} ({each.path})"
        for name, each in zip(names, probed, strict=True)
    ]


def check_comparable(probed: Sequence[Probed]) -> None:
    """Refuse models of different kinds, and the same folder twice.

    Raises:
        ConfigError: naming the two.
    """
    seen: dict[Path, Path] = {}
    for each in probed:
        if each.path.resolve() in seen:
            raise ConfigError(f"'{each.path}' is given twice")
        seen[each.path.resolve()] = each.path
    kinds = [(each, each.subject.loss_label) for each in probed if each.subject is not None]
    for each, label in kinds:
        if label != kinds[0][1]:
            raise ConfigError(
                f"'{kinds[0][0].path}' has a {kinds[0][1]} and '{each.path}' a {label}: models of one task can be "
                "compared, these are for two commands"
            )


def _first_overflow(model: Any, batches: Sequence[Any], progress: Callable[[int], None]) -> str | None:
    first = overflow.NOWHERE
    with torch.no_grad():
        for batch in batches:
            first = min(first, overflow.first_in_streams(model, batch.predict))
            progress(1)
    return None if first == overflow.NOWHERE else overflow.name_of(model, first)


def _of_run(run: RunFolder) -> dict[str, Any]:
    """What a run's own figures say of its stability."""
    lines = read_metrics(run.metrics)
    trace: dict[str, list[Any]] = {name: [line.get(name) for line in lines] for name in ("step", *_SERIES)}
    stability: dict[str, Any] = {}
    for name in _SERIES:
        found, judged = spikes(trace[name])
        stability[name] = {
            "score": len(found) / judged if judged else None,
            "judged": judged,
            "spikes": [trace["step"][place] for place in found],
        }
    summary = run.read_summary() or {}
    diverged = {"step": summary.get("diverged_at_step"), "where": summary.get("diverged_where")}
    stability["diverged"] = diverged if summary.get("diverged") else None
    return {"stability": stability, "trace": trace if lines else {}}
