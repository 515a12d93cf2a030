"""What the engine tells the rest of the package while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from siamesenorm.training.evaluate import Evaluation


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

    ``loss`` is in nats per token over the step's batch, ``grad_norm`` is taken before clipping, ``tokens`` and
    ``seconds`` count from the start of the run over all its sessions (seconds in steps only, without validation and
    saving). ``validation`` is there where one was due. ``router_loss`` is a mixture of experts' own, without its
    weight. A step that was ``skipped`` left the model as it was.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    validation: Evaluation | None
    router_loss: float | None = None
    skipped: bool = False


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
