"""The one place where the training engine (ai2-olmo-core) is met.

The engine brings the loop, the checkpoints, the data loader of token arrays, the schedule and the optimiser. What is
added here is a train module that takes what it minimises from a task, a data loader for images, and a callback that
hands each step's numbers on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed.checkpoint as dist_cp
import torch.distributed.checkpoint.state_dict as dcp
from olmo_core.data import DataCollator, DataLoaderBase, NumpyFSLDataLoader, NumpyFSLDataset
from olmo_core.data.utils import get_labels
from olmo_core.distributed.checkpoint import RemoteFileSystemReader
from olmo_core.optim import AdamWConfig, CosWithWarmup, OptimGroupOverride
from olmo_core.train import Duration, LoadStrategy, Trainer, TrainerConfig
from olmo_core.train.callbacks import Callback, CheckpointerCallback
from olmo_core.train.train_module import EvalBatchSizeUnit, EvalBatchSpec, TrainModule
from olmo_core.utils import move_to_device
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from siamesenorm import hosts
from siamesenorm.probes import overflow
from siamesenorm.residual import ConfigError, Scheme, Sublayer, one_line, open_by, own_parameters, set_step
from siamesenorm.training import checkpoints, parallel
from siamesenorm.training.average import WeightAverage
from siamesenorm.training.build import checkpoint_activations
from siamesenorm.training.decay import undecayed
from siamesenorm.training.evaluate import IGNORED
from siamesenorm.training.events import Listener, NonFiniteError, SaveError, Step
from siamesenorm.training.processes import ALONE, Processes
from siamesenorm.training.recipe import Recipe, digest
from siamesenorm.training.tasks import Batch, Batches, Evaluation, Objective, Task

# The part of a checkpoint that is tensors; the rest is the state of the loop.
_STATE = "model_and_optim"
# Bytes that are read from a checkpoint at a time.
_AT_ONCE = 1 << 28


@dataclass(frozen=True)
class Outcome:
    """How `fit` ended; ``interrupted`` where a signal stopped it before the last step."""

    step: int
    seconds: float
    interrupted: bool
    validation: Evaluation | None


class EngineModule(TrainModule):
    """A model and what a task minimises, as the engine drives them.

    Each part of what is minimised is summed over a whole batch, all micro-batches and processes, and divided by the
    number of what counts in all of them, so that no split of the batch changes it.

    A residual warm-up follows the trainer's step, which is restored with a checkpoint. Its gates stay as the last step
    left them, so a validation in between measures the model as it is being trained.
    """

    def __init__(
        self,
        model: Any,
        scheme: Scheme,
        objective: Objective,
        optim: torch.optim.Optimizer,
        scheduler: CosWithWarmup,
        *,
        micro_batch_size: int,
        max_grad_norm: float | None,
        seed: int,
        device: torch.device,
        compile: bool = False,
        average: WeightAverage | None = None,
        skip_nonfinite: int = 0,
        own_steps: int = 0,
        open_steps: int = 0,
        processes: Processes = ALONE,
    ) -> None:
        super().__init__()
        self.model = model
        self.scheme = scheme
        self.objective = objective
        # The compiled and the replicated form share the parameters; state dictionaries see the plain model.
        self._forward: Any = model
        if compile and isinstance(model, FSDPModule):
            blocks = hosts.blocks(model)
            # Blocks share their graphs, but where a scheme adds streams with depth; training and not are two of them.
            dynamo = torch._dynamo.config
            dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * len(blocks) + 2)
            for block in blocks:
                block.compile()
        elif compile:
            self._forward = torch.compile(model)
        if processes.count > 1 and not isinstance(model, FSDPModule):
            self._forward = DistributedDataParallel(self._forward)
        self.optim = optim
        self.scheduler = scheduler
        self.micro_batch_size = micro_batch_size
        self.max_grad_norm = max_grad_norm
        self.seed = seed
        self.device = device
        self.average = average
        self.skip_nonfinite = skip_nonfinite
        self.own_steps = own_steps
        self.open_steps = open_steps
        self.processes = processes
        self.loss = float("nan")
        self.parts: dict[str, float] = {}
        self.grad_norm = float("nan")
        self.lr = 0.0
        self.skipped = False
        self.skipped_in_a_row = 0
        self._batch: Batch = {}
        self._batch_losses = torch.zeros(len(objective.names), device=device)

    @property
    def eval_batch_spec(self) -> EvalBatchSpec:
        """How the engine's own evaluators, which are not used, should cut their batches."""
        return EvalBatchSpec(self.micro_batch_size, EvalBatchSizeUnit.instances)

    def state_dict(self, *, optim: bool | None = None) -> dict[str, Any]:
        """Model and optimiser state by parameter name, so that it does not depend on the number of processes."""
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = {"model": dcp.get_model_state_dict(self.model, options=options)}
        if optim is not False:
            state["optim"] = dcp.get_optimizer_state_dict(self.model, self.optim, options=options)
            if self.average is not None:
                state["average"] = dict(self.average.weights)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=True, strict=True)
        dcp.set_model_state_dict(self.model, state_dict["model"], options=options)
        if "optim" in state_dict:
            dcp.set_optimizer_state_dict(self.model, self.optim, state_dict["optim"], options=options)
        if self.average is not None and "average" in state_dict:
            self.average.load(state_dict["average"])

    def train_batch(self, batch: dict[str, Any], dry_run: bool = False) -> None:
        """Forward and backward over one process's share of a batch, micro-batch by micro-batch.

        Args:
            batch: as the data loader gives it; of tokens, with masks as the engine's collator makes them, or with
                ``labels`` already aligned to the logits.
            dry_run: nothing of it is recorded.
        """
        self.model.train()
        set_step(self.model, self.scheme, max(self.trainer.global_step, 1))
        # The engine restores the generators before it draws its trial batch and opens the data, so after a resume they
        # would have moved on. A seed that only the step decides makes dropout the same in a broken and unbroken run.
        self._seed(0 if dry_run else self.trainer.global_step)
        batch = move_to_device(batch, self.device)
        if "input_ids" in batch and "labels" not in batch:
            batch["labels"] = get_labels(batch, label_ignore_index=IGNORED)
        objective = self.objective
        batch = objective.prepare(batch)
        # Where nothing counts anywhere, the summed loss is zero and so must be the mean.
        counts = self.processes.sum(objective.counts(batch)).clamp(min=1)
        losses = torch.zeros(len(objective.names), device=self.device)
        micro_batches = _cut(batch, self.micro_batch_size)
        for index, micro_batch in enumerate(micro_batches):
            with self._gradients_in_step(last=index == len(micro_batches) - 1):
                parts = [
                    part / count for part, count in zip(objective.sums(self._forward, micro_batch), counts, strict=True)
                ]
                loss = parts[0]
                for weight, part in zip(objective.weights[1:], parts[1:], strict=True):
                    loss = loss + weight * part
                # Processes average their gradients, and what is wanted is their sum.
                (loss * self.processes.count).backward()
            losses += torch.stack([part.detach() for part in parts])
        if not dry_run:
            self._batch = batch
            self._batch_losses = self.processes.sum(losses)

    def _seed(self, step: int) -> None:
        seed = _step_seed(self.seed, step, self.processes.rank)
        torch.manual_seed(seed)
        # timm mixes images by numpy's generator, and erases parts of them by Python's.
        np.random.seed(seed % 2**32)
        random.seed(seed)

    @contextlib.contextmanager
    def _gradients_in_step(self, *, last: bool) -> Iterator[None]:
        """Bring the processes' gradients together after the last micro-batch; parts of a model are, after each."""
        parallel.announce_backward(self.model, last=last)
        if isinstance(self._forward, DistributedDataParallel) and not last:
            with self._forward.no_sync():
                yield
        else:
            yield

    def eval_batch(self, batch: dict[str, Any], labels: Any = None) -> Any:
        """For the engine's own evaluators, of which there are none: tasks validate themselves."""
        raise NotImplementedError

    def optim_step(self) -> None:
        """Clip and step, or skip the step where a number is not finite and that is allowed.

        Raises:
            NonFiniteError: before anything is changed, and on every process, since the numbers are over all of them.
        """
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        numbers = torch.stack([*self._batch_losses, norm.to(self._batch_losses.dtype)])
        self.loss, *parts, self.grad_norm = numbers.tolist()
        self.parts = dict(zip(self.objective.names[1:], parts, strict=True))
        for group in self.optim.param_groups:
            self.lr = float(self.scheduler.set_lr(group, self.trainer))
        if self.trainer.global_step <= self.own_steps:
            self._hold_the_rest()
        self.skipped = not bool(torch.isfinite(numbers).all())
        if self.skipped:
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row > self.skip_nonfinite:
                raise NonFiniteError(self.trainer.global_step, self.loss, self.grad_norm, self._first_overflow())
        # In a step that is skipped too, so that the step alone decides how far it is open.
        if self.trainer.global_step <= self.open_steps:
            open_by(self.model, self.scheme, 1 / self.open_steps)
        if self.skipped:
            return
        self.skipped_in_a_row = 0
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.max_grad_norm, norm)
        self.optim.step()
        if self.average is not None:
            self.average.update(self.trainer.global_step)
        self.record_ce_loss(self.loss)
        self.record_metric("total grad norm", self.grad_norm, namespace="optim")
        self.record_metric("LR", self.lr, namespace="optim")

    def _hold_the_rest(self) -> None:
        """Let nothing move in this step but what the scheme has added.

        With a learning rate of 0 and not without gradients: checkpoints want a state of the optimiser for every weight,
        and by the time that the others move, theirs knows them.
        """
        own = set(map(id, own_parameters(self.model).values()))
        for group in self.optim.param_groups:
            if not all(id(parameter) in own for parameter in group["params"]):
                group["lr"] = 0.0

    def _first_overflow(self) -> str:
        """Where the last batch's numbers stopped being finite, in words; runs the model over it once more."""
        found = overflow.first_in_gradients(self.model)

        def forward() -> None:
            self._seed(self.trainer.global_step)
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                for micro_batch in _cut(self._batch, self.micro_batch_size):
                    self.objective.sums(self.model, micro_batch)

        in_streams = self.processes.smallest(overflow.first_in_streams(self.model, forward))
        if in_streams != overflow.NOWHERE:
            return f"the streams overflowed first in {overflow.name_of(self.model, in_streams)}"
        # The backward pass comes from the end, so the first of its overflows is the one of the largest number.
        in_gradients = -self.processes.smallest(-found if found != overflow.NOWHERE else overflow.NOWHERE)
        if in_gradients != -overflow.NOWHERE:
            return (
                "the streams are finite; in the backward pass, the gradients overflowed first in "
                f"{overflow.name_of(self.model, in_gradients)}"
            )
        return "the streams are finite in every sublayer, so it happened in the embedding or behind the last sublayer"

    def zero_grads(self) -> None:
        """Drop the gradients."""
        self.optim.zero_grad(set_to_none=True)

    def num_flops_per_token(self, seq_len: int) -> int | None:
        """Not known to the engine; ``siamesenorm inspect`` counts them."""
        del seq_len
        return None

    def global_num_flops_in_batch(self, batch: dict[str, Any]) -> int | None:
        """Not known to the engine."""
        del batch
        return None


@dataclass
class Recorder(Callback):
    """Validates when it is due, times the steps and tells the listener.

    It runs before the checkpointer, so a checkpoint's step has been heard of when the checkpoint is written.
    """

    priority: ClassVar[int] = 2

    listener: Listener
    validate: Callable[[], Evaluation]
    validate_every: int
    run: str
    probe: Callable[[], Sequence[Mapping[str, Any]]] | None = None
    probe_every: int | None = None
    tokens_per_image: int | None = None
    last_validation: Evaluation | None = None
    seconds: float = 0.0
    _started: float = field(default=0.0, repr=False)

    @property
    def _module(self) -> EngineModule:
        module = self.trainer.train_module
        assert isinstance(module, EngineModule)
        return module

    def pre_load_batch(self) -> None:
        """Start the step's clock."""
        self._started = time.perf_counter()

    def post_train_batch(self) -> None:
        """Stop the clock, validate if it is due, and report."""
        self.seconds += time.perf_counter() - self._started
        module = self._module
        self.last_validation = self.validate() if self._is_due(self.validate_every) else None
        probed = self.probe_every is not None and self._is_due(self.probe_every)
        sites = self.probe() if probed and self.probe is not None else ()
        seen = self.trainer.global_train_tokens_seen
        self.listener.step(
            Step(
                step=self.step,
                loss=module.loss,
                lr=module.lr,
                grad_norm=module.grad_norm,
                tokens=seen * (self.tokens_per_image or 1),
                images=None if self.tokens_per_image is None else seen,
                seconds=self.seconds,
                validation=self.last_validation,
                parts=module.parts,
                skipped=module.skipped,
                sites=sites,
            )
        )

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.trainer.max_steps

    def state_dict(self) -> dict[str, Any]:
        """The seconds so far; what the listener heard is on disk before they are."""
        # The engine asks for this while it gathers what a checkpoint will hold, before it writes.
        self.listener.flush()
        return {"seconds": self.seconds, "skipped_in_a_row": self._module.skipped_in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self.seconds = state_dict["seconds"]
        self._module.skipped_in_a_row = state_dict["skipped_in_a_row"]

    def post_checkpoint_saved(self, path: Any) -> None:
        """Mark the checkpoint as whole."""
        if self._module.processes.is_first:
            checkpoints.seal(Path(path), self.run)


class Saver(CheckpointerCallback):
    """The engine's checkpointer, for whom a checkpoint that cannot be written is an end with a message."""

    def _save_checkpoint(self, save_async: bool | None = None, ephemeral: bool = False) -> str:
        try:
            return super()._save_checkpoint(save_async=save_async, ephemeral=ephemeral)
        except (Exception, CheckpointException) as error:
            if isinstance(_root_cause(error), KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise SaveError(
                f"the checkpoint of step {self.step} cannot be written to {self.save_folder}: {_in_words(error)}. "
                "The run stopped; its older checkpoints are whole"
            ) from error


def fit(
    model: Any,
    scheme: Scheme,
    task: Task[Any, Any],
    data: Any,
    *,
    folder: Path,
    device: torch.device,
    listener: Listener,
    validate: Callable[[], Evaluation],
    probe: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
    processes: Processes = ALONE,
) -> Outcome:
    """Train `model` in place by the task's recipe, from the newest whole checkpoint in `folder` where there is one.

    SIGINT and SIGTERM save a checkpoint after the running step and end the training. A run that averages its weights
    leaves the model with the average.

    Args:
        model: freshly initialised, on `device`, as `parallel.place` gives it.
        scheme: the model's, for what it exempts from weight decay and for its residual warm-up.
        task: its recipe is already checked against `data`.
        data: the task's.
        folder: where checkpoints are kept; the run's own, since loading one executes what it holds.
        device: where to train.
        listener: told of every step, on this process.
        validate: measures the model as it is.
        probe: looks into the model as it is, where the recipe wants that, on this process alone.
        processes: those that train together, all calling this.

    Raises:
        NonFiniteError: where the loss or the gradient is not finite; nothing is written after that.
        SaveError: where a checkpoint cannot be written.
        ConfigError: where no checkpoint of a run that has some can be loaded.
    """
    recipe = task.recipe
    run = digest(recipe)
    module = _module(model, scheme, task, data, device, processes)
    average = module.average

    def validate_average() -> Evaluation:
        with contextlib.nullcontext() if average is None else average.applied():
            return validate()

    recorder = Recorder(
        listener=listener,
        validate=validate_average,
        validate_every=recipe.train.validate_every,
        run=run,
        probe=probe,
        probe_every=recipe.train.probe_every,
        tokens_per_image=task.example(model, 1, "meta")[1] if task.counts_images else None,
    )
    loader = _data_loader(task, data, folder / "order", device, processes)
    trainer = _trainer(module, loader, recipe, recorder, folder, device)
    listener.resumed(_load_newest(trainer, folder, run, listener, processes))
    # Where no step is left to do, no batch sets the gates of a residual warm-up.
    set_step(model, scheme, max(trainer.global_step, 1))
    _warn_of_gates(model, scheme, recipe.train.steps, listener)
    trainer.fit()
    # The engine removes a checkpoint that has become one too many at the step after, which the last step has not.
    for path in _checkpointer(trainer)._checkpoints_to_remove if processes.is_first else ():
        shutil.rmtree(path, ignore_errors=True)
    if average is not None:
        average.apply()
    return Outcome(
        step=trainer.global_step,
        seconds=recorder.seconds,
        interrupted=trainer.global_step < recipe.train.steps,
        validation=recorder.last_validation,
    )


def read_weights(
    checkpoint: Path, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, average: bool
) -> None:
    """Read a model out of a checkpoint of any number of processes, without the optimiser's moments.

    Read at a time, and held in memory beside what is given, are 256 MB, or one tensor where that is more.

    Args:
        checkpoint: of the user's own run, since reading one executes what it holds.
        parameters: by name, each overwritten; in main memory, or mapped from a file.
        buffers: the same, of those that are saved with a model.
        average: take the average of the parameters, which only runs with ``train.ema_decay`` keep.

    Raises:
        ConfigError: the checkpoint lacks some of them, has them in other shapes or cannot be read.
    """
    part = "average" if average else "model"
    wanted = {f"{part}.{name}": tensor for name, tensor in parameters.items()}
    wanted |= {f"model.{name}": tensor for name, tensor in buffers.items()}
    reader = RemoteFileSystemReader(str(checkpoint / _STATE))
    try:
        missing = sorted(wanted.keys() - reader.read_metadata().state_dict_metadata.keys())
        if missing:
            raise ConfigError(f"the checkpoint {checkpoint} lacks {', '.join(missing)}")
        for keys in _portions(wanted):
            dist_cp.load({key: wanted[key] for key in keys}, storage_reader=reader, no_dist=True)
    except ConfigError:
        raise
    except (Exception, CheckpointException) as error:  # whatever a damaged file makes the readers raise
        raise ConfigError(f"the checkpoint {checkpoint} cannot be read: {_in_words(error)}") from error


def _portions(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names of tensors, in groups of no more than `_AT_ONCE` bytes or of a single one."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > _AT_ONCE:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names


def _warn_of_gates(model: Any, scheme: Scheme, steps: int, listener: Listener) -> None:
    """Warn where a residual warm-up outlasts the run."""
    sites = (module.site for module in model.modules() if isinstance(module, Sublayer))
    if any(scheme.gate(site, steps) != 1.0 for site in sites):
        listener.warn(
            f"the residual warm-up of scheme '{scheme.name}' is not over at the last step, {steps}: the run's losses "
            "are those of a model with its gates partly closed, and the saved model, once loaded, has them open"
        )


def _module(
    model: Any, scheme: Scheme, task: Task[Any, Any], data: Any, device: torch.device, processes: Processes
) -> EngineModule:
    """What the engine drives."""
    recipe = task.recipe
    train = recipe.train
    if train.activation_checkpointing:
        checkpoint_activations(model)
    return EngineModule(
        model,
        scheme,
        task.objective(model, data, device),
        _optimizer(model, scheme, recipe),
        CosWithWarmup(warmup=recipe.schedule.warmup_steps, alpha_f=recipe.schedule.final_fraction),
        micro_batch_size=parallel.micro_batch_size(recipe, processes.count),
        max_grad_norm=train.max_grad_norm,
        seed=recipe.seed,
        device=device,
        compile=train.compile,
        average=None if train.ema_decay is None else WeightAverage(model, train.ema_decay),
        skip_nonfinite=train.skip_nonfinite,
        own_steps=recipe.schedule.own_steps,
        open_steps=recipe.schedule.open_steps,
        processes=processes,
    )


def _trainer(
    module: EngineModule,
    loader: DataLoaderBase,
    recipe: Recipe,
    recorder: Recorder,
    folder: Path,
    device: torch.device,
) -> Trainer:
    """The engine's loop over a run's steps, with the callbacks that report and save."""
    train = recipe.train
    config = TrainerConfig(
        save_folder=str(folder),
        load_strategy=LoadStrategy.never,
        # A step that is reached again replaces the broken checkpoint that a resume stepped back from.
        save_overwrite=True,
        device=str(device),
        max_duration=Duration.steps(train.steps),
        cancel_check_interval=1,
        metrics_collect_interval=max(train.log_every, 1),
        # In a thread of its own, what one process learns of a signal may reach the others a step later, and then they
        # wait for each other.
        async_bookkeeping=False,
        callbacks={
            "recorder": recorder,
            "checkpointer": Saver(
                save_interval=train.checkpoint_every,
                pre_train_checkpoint=False,
                # The asynchronous kind can leave two processes waiting for each other.
                save_async=False,
                max_checkpoints=train.keep_checkpoints,
            ),
        },
    )
    return config.build(module, loader)


def _optimizer(model: Any, scheme: Scheme, recipe: Recipe) -> torch.optim.Optimizer:
    optim = recipe.optim
    exempt = set(undecayed(model, scheme, optim))
    # What waits is stepped apart from what does not.
    own = set(own_parameters(model)) if recipe.schedule.own_steps else set()
    groups: dict[tuple[bool, bool], list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((name in own, name in exempt), []).append(name)
    overrides = [
        OptimGroupOverride(params=names, opts={"weight_decay": 0.0} if is_exempt else {})
        for (is_own, is_exempt), names in groups.items()
        if is_own or is_exempt
    ]
    return AdamWConfig(
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        # One pass over all parameters; without it, a CPU steps them one operation and one parameter at a time.
        fused=True,
        group_overrides=overrides or None,
    ).build(model)


def _data_loader(
    task: Task[Any, Any], data: Any, order: Path, device: torch.device, processes: Processes
) -> DataLoaderBase:
    """The batches of a task's data, in an order that the recipe's seed decides."""
    recipe, batches = task.recipe, task.batches(data)
    if batches is not None:
        return ImageLoader(batches, recipe.train.batch_size, recipe.seed, order, processes)
    dataset = NumpyFSLDataset(
        *map(str, data.train_paths),
        sequence_length=recipe.data.sequence_length,
        pad_token_id=data.vocabulary.pad_id,
        eos_token_id=data.vocabulary.eos_id,
        vocab_size=data.vocabulary.size,
        dtype=data.vocabulary.dtype,
    )
    dataset.work_dir = order
    dataset.prepare()
    processes.first(lambda: _make_room(dataset))
    return NumpyFSLDataLoader(
        dataset,
        collator=DataCollator(pad_token_id=dataset.pad_token_id),
        global_batch_size=recipe.train.batch_size * recipe.data.sequence_length,
        work_dir=dataset.work_dir,
        seed=recipe.seed,
        # Reading a memory map is quicker than handing it between threads on the cores that train.
        num_threads=0 if device.type == "cpu" else None,
        target_device_type=device.type,
        dp_world_size=processes.count,
        dp_rank=processes.rank,
    )


class ImageLoader(DataLoaderBase):
    """Images in an order of its own each epoch; what is left over at an epoch's end is left out.

    The engine counts images where it speaks of tokens. A batch depends on the seed, the epoch and its number alone, so
    a resumed run sees what an unbroken one would, on any number of processes.
    """

    def __init__(self, data: Batches, batch_size: int, seed: int, work_dir: Path, processes: Processes) -> None:
        super().__init__(
            work_dir=work_dir,
            global_batch_size=batch_size,
            dp_world_size=processes.count,
            dp_rank=processes.rank,
        )
        self.data = data
        self.seed = seed
        self._epoch: int | None = None

    @property
    def total_batches(self) -> int:
        """Whole batches in an epoch."""
        return len(self.data) // self.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch is."""
        return {"batches_processed": self.batches_processed, "epoch": self._epoch, "data": self.data.sha256}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        self.batches_processed = state_dict["batches_processed"]
        self._epoch = state_dict["epoch"] or self._epoch

    def reshuffle(self, epoch: int | None = None, **kwargs: Any) -> None:
        """Take another order for an epoch."""
        del kwargs
        self._epoch = epoch or (self._epoch or 0) + 1

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        order = torch.randperm(len(self.data), generator=_generator(self.seed, self.epoch, -1)).numpy()
        rest = range(self.batches_processed, self.total_batches)
        shares = _Shares(self, order)
        yield from DataLoader(
            shares, sampler=rest, batch_size=None, num_workers=self.data.workers, worker_init_fn=_ignore_signals
        )

    def get_mock_batch(self) -> dict[str, Any]:
        """The first images there are, as often as it takes."""
        indices = np.arange(self.rank_batch_size) % len(self.data)
        return self.data.batch(indices, _generator(self.seed, 0, 0))

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        """The images in a batch of all processes."""
        del batch
        return self.global_batch_size


class _Shares(torch.utils.data.Dataset[Any]):
    """One process's share of each batch of an epoch."""

    def __init__(self, loader: ImageLoader, order: np.ndarray) -> None:
        self.data, self.order, self.size = loader.data, order, loader.global_batch_size
        self.seed, self.epoch, self.rank, self.world = loader.seed, loader.epoch, loader.dp_rank, loader.dp_world_size

    def __getitem__(self, number: int) -> dict[str, Any]:
        share = self.size // self.world
        start = number * self.size + self.rank * share
        generator = _generator(self.seed, self.epoch, number * self.world + self.rank)
        return self.data.batch(self.order[start : start + share], generator)


def _ignore_signals(worker: int) -> None:
    """Leave SIGINT and SIGTERM, which may go to all processes of a job, to the one that saves a checkpoint on them."""
    del worker
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


def _generator(*numbers: int) -> torch.Generator:
    """A generator of its own for each sequence of numbers."""
    return torch.Generator().manual_seed(_step_seed(*numbers))


def _cut(batch: Batch, size: int) -> list[Batch]:
    """A batch in micro-batches of ``size`` rows."""
    cut = {name: value.split(size) for name, value in batch.items() if isinstance(value, Tensor)}
    return [dict(zip(cut, parts, strict=True)) for parts in zip(*cut.values(), strict=True)]


def _make_room(dataset: NumpyFSLDataset) -> None:
    """See that the order of an epoch can be written; the engine maps that file, and a full disk kills who writes there.

    Orders of earlier sessions go, whole or not: the engine would take them unseen, and they are soon made again.

    Raises:
        ConfigError: with the size that is needed.
    """
    folder = Path(dataset.work_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("global_indices*"):
        earlier.unlink()
    needed = len(dataset) * np.dtype(np.uint32).itemsize
    if shutil.disk_usage(folder).free < needed:
        raise ConfigError(f"no space left on device: the order of the data needs {needed:,} bytes in {folder}")


def _load_newest(trainer: Trainer, folder: Path, run: str, listener: Listener, processes: Processes) -> int:
    """Load the newest checkpoint that can be loaded, warning of each that cannot; the step to go on after."""
    found = processes.first(lambda: checkpoints.newest_first(folder))
    failed_to_load = False
    for index, (step, path) in enumerate(found):
        fault = processes.first(functools.partial(checkpoints.fault, path, run))
        if fault is None:
            try:
                trainer.load_checkpoint(str(path), load_trainer_state=True, load_optim_state=True)
            except (Exception, CheckpointException) as error:  # whatever a damaged file makes the readers raise
                fault = f"loading it fails ({type(error).__name__}: {_in_words(error)})"
                failed_to_load = True
            else:
                _adopt(trainer, found[index:], run)
                return step
        listener.warn(f"checkpoint {path} is not used: {fault}")
    if failed_to_load:
        raise ConfigError(f"no checkpoint in {folder} can be loaded; start the run anew with another --out")
    if found:
        listener.warn("no whole checkpoint is left, so the run starts from its beginning")
    return 0


def _adopt(trainer: Trainer, found: list[tuple[int, Path]], run: str) -> None:
    """Count the whole ones among checkpoints of earlier sessions, newest first, towards the number that is kept."""
    checkpointer = _checkpointer(trainer)
    checkpointer._latest_checkpoint_step = found[0][0]
    checkpointer._checkpoints = [str(path) for _, path in reversed(found) if checkpoints.fault(path, run) is None]


def _checkpointer(trainer: Trainer) -> CheckpointerCallback:
    callback = trainer.callbacks["checkpointer"]
    assert isinstance(callback, CheckpointerCallback)
    return callback


def _root_cause(error: BaseException) -> BaseException:
    """The error at the bottom of those that wrap each other."""
    # Distributed checkpoints collect the errors of all processes, each with its trace.
    inner = next((each for each, _ in getattr(error, "failures", {}).values()), None)
    cause = inner or error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error if cause is None else _root_cause(cause)


def _in_words(error: BaseException) -> str:
    """What went wrong, on one line."""
    error = _root_cause(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error)


def _step_seed(*numbers: int) -> int:
    """A generator seed of its own for each sequence of numbers: the run's seed, the step and the process."""
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
