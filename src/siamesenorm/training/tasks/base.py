"""What a run can learn, as the rest of training sees it.

A task knows its data, how a model of it is configured, what a step minimises, how a model is judged and what a finished
run shows. The loop, checkpoints, precision and processes are the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from siamesenorm import hosts, probes
from siamesenorm.residual import ConfigError
from siamesenorm.training.processes import ALONE, Processes
from siamesenorm.training.recipe import Recipe

Batch = dict[str, Any]
R = TypeVar("R", bound=Recipe)
D = TypeVar("D", bound="Data")


class Objective(ABC):
    """What a step minimises: a weighted sum of means, each over all micro-batches and processes of the step.

    Attributes:
        names: of the parts in ``metrics.jsonl``, the first being the loss itself.
        weights: of the parts in what is minimised; the loss itself has 1.
    """

    names: tuple[str, ...] = ("loss",)
    weights: tuple[float, ...] = (1.0,)

    def prepare(self, batch: Batch) -> Batch:
        """One process's share of a batch, on its device, as micro-batches are cut from it.

        All that is drawn at random for a step is drawn here, so that it does not depend on the cutting.
        """
        return batch

    @abstractmethod
    def counts(self, batch: Batch) -> Tensor:
        """How many of this process's numbers each part is a mean of, (parts,), whole numbers."""

    @abstractmethod
    def sums(self, forward: Callable[..., Any], micro_batch: Batch) -> list[Tensor]:
        """Each part summed over a micro-batch, scalars with gradient.

        Args:
            forward: the model, compiled or replicated where it trains like that.
            micro_batch: as `prepare` gave it, fewer rows of it.
        """


class Evaluation(Protocol):
    """How good a model is on what was held out."""

    @property
    def loss(self) -> float:
        """The loss."""

    def figures(self) -> dict[str, float]:
        """For ``metrics.jsonl`` and ``summary.json``, by name; ``val_loss`` among them."""


class Data(Protocol):
    """Data that is ready to train on."""

    @property
    def source(self) -> str:
        """What a recipe calls it."""

    @property
    def sha256(self) -> str:
        """Its fingerprint."""


class Batches(Protocol):
    """Training data that is not text, batch by batch."""

    @property
    def sha256(self) -> str:
        """The fingerprint of what they are of."""

    @property
    def workers(self) -> int:
        """Processes that read ahead."""

    def __len__(self) -> int:
        """How many items there are."""

    def batch(self, indices: Any, generator: torch.Generator) -> Batch:
        """The items at ``indices`` as tensors, on the CPU; all randomness comes from ``generator``."""


@dataclass
class Task(ABC, Generic[R, D]):
    """A recipe's task."""

    recipe: R

    loss_label: ClassVar[str] = "loss"
    counts_images: ClassVar[bool] = False

    @abstractmethod
    def build(self, *, needs_data: bool = True) -> Any:
        """The recipe's model on torch's current default device: initialised from its seed, or with saved weights.

        Args:
            needs_data: whether the data must be there; otherwise it is not asked where the recipe itself gives what
                the model has to know of it.

        Raises:
            ConfigError: for a model that cannot be had, or is not one for the data.
        """

    @abstractmethod
    def check(self, model: Any, *, needs_data: bool) -> None:
        """Refuse a model, on the meta device, that does not go with the rest of the recipe."""

    @abstractmethod
    def load(self, processes: Processes) -> D:
        """The data, checked; made ready by the first of the processes where it is not."""

    def keep(self, data: D) -> None:
        """Take data that has been looked at elsewhere for this recipe's, where looking is long."""

    def lend(self, other: Task[Any, Any]) -> None:
        """Let the task of another recipe with the same data keep what this one has looked at so far."""

    @abstractmethod
    def pinned(self, data: D) -> R:
        """The recipe with the place and fingerprint of its data in it.

        Raises:
            ConfigError: where it asks for data with another fingerprint, or for more than there is.
        """

    def blind_loss(self, data: D) -> float | None:
        """What the held-out loss comes to for the best prediction that ignores its input, in hindsight; ``None`` where
        there is none to speak of.
        """
        return None

    @abstractmethod
    def describe(self, data: D) -> str:
        """The data, on a line."""

    @abstractmethod
    def objective(self, model: Any, data: D, device: torch.device) -> Objective:
        """What a step minimises."""

    @abstractmethod
    def batches(self, data: D) -> Batches | None:
        """What is trained on; ``None`` for text, which the engine reads itself."""

    @abstractmethod
    def validate(
        self, model: Any, data: D, *, device: torch.device, batch_size: int, processes: Processes = ALONE
    ) -> Evaluation:
        """The model as it is, on what was held out."""

    @abstractmethod
    def probe_batches(
        self, model: Any, data: D, *, device: torch.device, batch_size: int, count: int
    ) -> list[probes.Batch]:
        """Up to ``count`` batches of what was held out, for probes: spread evenly over it, and always the same."""

    @abstractmethod
    def save_form(self, model: Any, data: D, path: Path) -> None:
        """Write all of a saved model but its weights to a new folder, in the form that its library reads.

        Args:
            model: one of the recipe's, which may be on the meta device.
            data: what else is saved with a model comes from it, such as a tokeniser.
            path: the folder.
        """

    @abstractmethod
    def show(self, model: Any, data: D, folder: Path, note: Callable[[str], None]) -> dict[str, Any]:
        """Make what a finished run shows, in its folder; what of it belongs into the summary."""

    @abstractmethod
    def facts(self, data: D, figures: Mapping[str, Any]) -> dict[str, Any]:
        """What the summary of a run says beside the figures of a task: of the data, and what follows from both."""

    @abstractmethod
    def report(self, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
        """A finished run's figures for a person, label and text."""

    @abstractmethod
    def next_command(self, path: Path) -> str:
        """What to try next with a finished run."""

    def files(self) -> dict[str, str]:
        """What `show` leaves in a run's folder, by name, in words."""
        return {}

    @abstractmethod
    def example(self, model: Any, rows: int, device: str) -> tuple[dict[str, Any], int]:
        """Arguments of a forward pass over so many sequences or images, without data, and the tokens in each."""

    @abstractmethod
    def example_loss(self, model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
        """A loss of `example`, from which a step's memory can be told."""


def require_host(recipe: Recipe, head: str | None) -> None:
    """Refuse a host whose models have another head than the task needs; diffusion models have none.

    Raises:
        ConfigError: naming the hosts that have it; an unknown host is left to others.
    """
    heads = {name: hosts.get_host(name).head for name in hosts.hosts()}
    fitting = [name for name, found in heads.items() if found == head]
    if recipe.model.host in heads and recipe.model.host not in fitting:
        raise ConfigError(
            f"model.host {recipe.model.host!r} is none for the task {recipe.task}; its hosts are {', '.join(fitting)}"
        )
