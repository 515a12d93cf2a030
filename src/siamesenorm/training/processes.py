"""The processes that train together: how many there are, which this one is, and what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from siamesenorm.residual import ConfigError, one_line

T = TypeVar("T")

# The first process may take long to initialise or load a large model, while the others wait.
_TIMEOUT = timedelta(minutes=60)


@dataclass(frozen=True)
class Processes:
    """The processes that train together, seen from the one of number ``rank``; ``local`` of them are on its machine."""

    rank: int = 0
    count: int = 1
    local: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    def first(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on the first process, on all of them, or the error that it raises there.

        The others wait. What it gives must be something that can be pickled.
        """
        if self.count == 1:
            return make()
        given: list[Any] = [None, None]
        if self.is_first:
            try:
                given[0] = make()
            except Exception as error:
                given[1] = error
        dist.broadcast_object_list(given, src=0, device=torch.device("cpu"))
        if given[1] is not None:
            raise given[1]
        return given[0]

    def first_only(self, make: Callable[[], T]) -> T | None:
        """What ``make`` gives on the first process, ``None`` on the others; all raise the error that it raises."""
        made: list[T] = []
        self.first(lambda: made.append(make()))
        return made[0] if made else None

    def sum(self, tensor: Tensor) -> Tensor:
        """``tensor`` summed over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def shares(self, count: int, batch_size: int) -> Iterator[tuple[np.ndarray, Tensor]]:
        """This process's share of ``count`` items, in batches: their numbers, and whether each counts.

        Processes that hold a model in parts must run it equally often, so short shares are filled up with items that
        count elsewhere.
        """
        share = -(-count // self.count)
        mine = np.arange(self.rank * share, (self.rank + 1) * share)
        for start in range(0, share, batch_size):
            rows = mine[start : start + batch_size]
            yield rows % count, torch.from_numpy(rows < count)

    def smallest(self, number: int) -> int:
        """The smallest of every process's ``number``."""
        if self.count == 1:
            return number
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)


ALONE = Processes()


def launched() -> int:
    """How many processes ``torchrun`` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def speaks() -> bool:
    """Whether this process is the one that prints; known before the processes have met."""
    return int(os.environ.get("RANK", "0")) == 0


def local_device(kind: str) -> torch.device:
    """This process's device of a kind: with several GPUs in a machine, each process has its own."""
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)


@contextmanager
def together(device: torch.device) -> Iterator[Processes]:
    """Meet the other processes that ``torchrun`` started, and part from them at the end; nothing without it.

    Processes that have met already stay together.

    Raises:
        ConfigError: where the processes cannot reach each other.
    """
    if dist.is_initialized():
        yield _met()
        return
    if launched() == 1:
        yield ALONE
        return
    # Small things go over the CPU even where the model is on GPUs.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # The run's folder is the one place where all processes read and write.
    os.environ.setdefault("OLMO_SHARED_FS", "1")
    try:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the processes cannot reach each other: {one_line(error)}") from error
    try:
        yield _met()
    finally:
        dist.destroy_process_group()


def _met() -> Processes:
    return Processes(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
