"""What a training step takes of one process's memory, measured by running it on tensors without data.

The step is the real one: the model's own forward and backward under autocast and activation checkpointing, and torch's
own FSDP over a group of processes that are not there. Only the ledger of what is alive is ours. torch's MemTracker has
one too; it gives the same totals, by module as well, and takes ten times as long.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from siamesenorm.training import parallel
from siamesenorm.training.build import checkpoint_activations, tie_weights
from siamesenorm.training.cost import balanced_experts
from siamesenorm.training.processes import Processes
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.settings import autocast_of, autocasting
from siamesenorm.training.tasks import task_of


@dataclass(frozen=True)
class Memory:
    """Bytes that the tensors of one process take when a step takes most.

    Parameters, gradients and the optimiser's state are this process's own; a moving average of the weights is counted
    with the last. ``activations`` is all else: what the forward pass keeps for the backward one, the logits, and what
    passes, such as weights gathered from other processes. What a GPU's allocator, libraries and communication take
    beyond tensors is not in it.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def training_memory(model: Any, recipe: Recipe, ranks: int = 1) -> Memory:
    """The memory that one of ``ranks`` processes needs to train by a recipe.

    A mixture of experts is taken to be balanced, and ``train.compile`` to be off.

    Args:
        model: the recipe's, on the meta device; it is used up.
        recipe: what is trained.
        ranks: processes that take part.

    Raises:
        ConfigError: for a number of processes that the batch or ``train.shard_degree`` does not divide over.
    """
    processes = Processes(count=ranks, local=per_machine(ranks))
    parallel.check(recipe, processes)
    how = parallel.strategy(recipe, ranks)
    batch = parallel.micro_batch_size(recipe, ranks)
    # With several micro-batches, the gradients of those before are alive; a third is no different from the second.
    count = 2 if batch < recipe.train.batch_size // ranks else 1
    if recipe.train.activation_checkpointing:
        checkpoint_activations(model)
    cpu = torch.device("cpu")
    with ExitStack() as stack:
        if how in ("fsdp", "hsdp"):
            stack.enter_context(_absent(ranks))
            mesh = parallel.mesh_for(recipe, how, cpu, processes)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(balanced_experts(model))
        if how in ("fsdp", "hsdp"):
            parallel.shard(model, mesh, recipe)
        model = model.to_empty(device=cpu).train()
        tie_weights(model)
        ledger = _Ledger()
        for parameter in model.parameters():
            ledger.add(_local(parameter))
        parameters = ledger.now
        gradients = sum(_local(parameter).nbytes for parameter in model.parameters() if parameter.requires_grad)
        stack.enter_context(ledger)
        for index in range(count):
            parallel.announce_backward(model, last=index == count - 1)
            _forward_and_backward(model, recipe, batch)
    activations = max(ledger.peak - parameters - gradients, 0)
    average = parameters if recipe.train.ema_decay is not None else 0
    # DDP brings gradients together in buckets, a second copy. AdamW's two moments have been there since the first step.
    return Memory(parameters, 2 * gradients if how == "ddp" else gradients, 2 * gradients + average, activations)


def per_machine(ranks: int) -> int:
    """How many of ``ranks`` processes a machine is taken to run: at most eight, the same number on each."""
    return next(local for local in range(min(ranks, 8), 0, -1) if ranks % local == 0)


def _forward_and_backward(model: Any, recipe: Recipe, batch: int) -> None:
    """A micro-batch, as the train module runs it."""
    task = task_of(recipe)
    inputs, _ = task.example(model, batch, "cpu")
    with autocasting("cpu", autocast_of(recipe)):
        loss = task.example_loss(model, inputs)
    loss.backward()


@contextmanager
def _absent(ranks: int) -> Iterator[None]:
    """A process group whose other processes are not there, so that whatever they would send arrives at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Ledger(TorchDispatchMode):
    """The bytes of all storages that are alive, now and at most, among those that it was shown or saw being made."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._mode = active_fake_mode()
        self._resize = torch.UntypedStorage.resize_

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, for as long as it lives."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._sizes:
            self._alive[key] = weakref.ref(storage, partial(self._gone, key))
            self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, _: object) -> None:
        self.now -= self._sizes.pop(key)
        del self._alive[key]

    def __enter__(self) -> Any:
        resize, sizes = self._resize, self._sizes

        # FSDP gives the memory of gathered weights back in this way, which no dispatcher sees.
        def resized(storage: Any, size: int) -> None:
            resize(storage, size)
            if id(storage) in sizes:
                self._set(id(storage), storage.nbytes())

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*args)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What is sharded is taken apart first, and the parts are seen.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        # Sharding works out shapes on tensors of its own, which no real run has.
        if active_fake_mode() is self._mode:
            for tensor in out if isinstance(out, list | tuple) else (out,):
                if isinstance(tensor, Tensor):
                    self.add(tensor)
        return out
