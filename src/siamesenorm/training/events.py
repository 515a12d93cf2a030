"""What the engine tells the rest of the package while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from siamesenorm.training.tasks.base import Evaluation


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not finite, found before the optimiser used it."""

    def __init__(self, step: int, loss: float, grad_norm: float, where: str) -> None:
        super().__init__(f"step {step}: the loss is {loss} and the gradient norm {grad_norm}; {where}")
        self.step = step
        self.where = where


class SaveError(RuntimeError):
    """A checkpoint that could not be written; those before it are whole."""


@dataclass(frozen=True)
class Step:
    """One optimiser step's numbers.

    ``loss`` is over the step's batch, ``grad_norm`` is taken before clipping, ``tokens``, ``images`` (where there are
    some) and ``seconds`` count from the start of the run over all its sessions (seconds in steps only, without
    validation and saving). ``validation`` is there where one was due. ``parts`` are further parts of what is minimised,
    without their weights, such as the loss of a mixture's routers. A ``skipped`` step left the model as it was.
    ``sites`` are the rows of `probes.site_table` after the step, where they were due.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    validation: Evaluation | None
    parts: Mapping[str, float] = field(default_factory=dict)
    images: int | None = None
    skipped: bool = False
    sites: Sequence[Mapping[str, Any]] = ()

    @property
    def seen(self) -> tuple[int, str]:
        """What the run has gone through so far, and in what it is counted."""
        return (self.tokens, "tokens") if self.images is None else (self.images, "images")


class Listener(Protocol):
    """What wants to know about a run's progress."""

    def resumed(self, step: int) -> None:
        """The run goes on after `step`, from the checkpoint taken there; 0 where it starts afresh."""

    def step(self, step: Step) -> None:
        """A step is done."""

    def flush(self) -> None:
        """A checkpoint is about to be written: what was heard so far must be on disk before it."""

    def warn(self, message: str) -> None:
        """Something that the user should know."""
