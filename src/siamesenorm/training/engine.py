"""The one place where the training engine (ai2-olmo-core) is met.

The engine brings the loop, the checkpoints, the data loader, the schedule and the optimiser. What is added here is a
train module for any causal language model of transformers, and a callback that hands each step's numbers on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed.checkpoint.state_dict as dcp
from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset
from olmo_core.data.utils import get_labels, split_batch
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
from transformers import PreTrainedModel

from siamesenorm import hosts
from siamesenorm.data.shards import TokenArrays
from siamesenorm.residual import ConfigError, Scheme, Sublayer, one_line, set_step
from siamesenorm.training import checkpoints, overflow, parallel
from siamesenorm.training.build import autocast_of, document_mask
from siamesenorm.training.decay import undecayed
from siamesenorm.training.documents import DocumentMask
from siamesenorm.training.evaluate import IGNORED, Evaluation, summed_loss
from siamesenorm.training.events import Listener, NonFiniteError, SaveError, Step
from siamesenorm.training.processes import ALONE, Processes
from siamesenorm.training.recipe import Recipe, digest
from siamesenorm.training.routers import RouterLoss


@dataclass(frozen=True)
class Outcome:
    """How `fit` ended; ``interrupted`` where a signal stopped it before the last step."""

    step: int
    tokens: int
    seconds: float
    interrupted: bool
    validation: Evaluation | None


class CausalLMModule(TrainModule):
    """Any causal language model of transformers, as the engine drives it.

    The loss is the sum of the cross-entropy over a whole batch, all micro-batches and processes, divided by the number
    of tokens that count in all of them, so that no split of the batch changes it. A mixture of experts adds the mean of
    its routers' loss over the batch's sequences.

    A residual warm-up follows the trainer's step, which is restored with a checkpoint. Its gates stay as the last step
    left them, so a validation in between measures the model as it is being trained.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scheme: Scheme,
        optim: torch.optim.Optimizer,
        scheduler: CosWithWarmup,
        *,
        micro_batch_size: int,
        sequence_length: int,
        max_grad_norm: float | None,
        autocast: torch.dtype | None,
        seed: int,
        device: torch.device,
        compile: bool = False,
        mask: DocumentMask | None = None,
        routers: RouterLoss | None = None,
        skip_nonfinite: int = 0,
        processes: Processes = ALONE,
    ) -> None:
        super().__init__()
        self.model = model
        self.scheme = scheme
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
        self.sequence_length = sequence_length
        self.max_grad_norm = max_grad_norm
        self.autocast = autocast
        self.seed = seed
        self.device = device
        self.mask = mask
        self.routers = routers
        self.skip_nonfinite = skip_nonfinite
        self.processes = processes
        self.loss = float("nan")
        self.router_loss: float | None = None
        self.grad_norm = float("nan")
        self.lr = 0.0
        self.skipped = False
        self.skipped_in_a_row = 0
        self._batch: dict[str, Any] = {}
        self._batch_losses = torch.zeros(2, device=device)

    @property
    def eval_batch_spec(self) -> EvalBatchSpec:
        """How the engine's own evaluators should cut their batches."""
        return EvalBatchSpec(self.micro_batch_size, EvalBatchSizeUnit.instances, self.sequence_length)

    def state_dict(self, *, optim: bool | None = None) -> dict[str, Any]:
        """Model and optimiser state by parameter name, so that it does not depend on the number of processes."""
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
        state: dict[str, Any] = {"model": dcp.get_model_state_dict(self.model, options=options)}
        if optim is not False:
            state["optim"] = dcp.get_optimizer_state_dict(self.model, self.optim, options=options)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave."""
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=True, strict=True)
        dcp.set_model_state_dict(self.model, state_dict["model"], options=options)
        if "optim" in state_dict:
            dcp.set_optimizer_state_dict(self.model, self.optim, state_dict["optim"], options=options)

    def train_batch(self, batch: dict[str, Any], dry_run: bool = False) -> None:
        """Forward and backward over one process's share of a batch, micro-batch by micro-batch.

        Args:
            batch: ``input_ids`` (batch, seq), with masks as the engine's collator makes them, or with ``labels``
                already aligned to the logits.
            dry_run: nothing of it is recorded.
        """
        self.model.train()
        set_step(self.model, self.scheme, max(self.trainer.global_step, 1))
        # The engine restores the generators before it draws its trial batch and opens the data, so after a resume they
        # would have moved on. A seed that only the step decides makes dropout the same in a broken and unbroken run.
        torch.manual_seed(_step_seed(self.seed, 0 if dry_run else self.trainer.global_step, self.processes.rank))
        batch = move_to_device(batch, self.device)
        if "labels" not in batch:
            batch["labels"] = get_labels(batch, label_ignore_index=IGNORED)
        if self.mask is not None:
            batch["labels"] = self.mask.labels(batch["input_ids"], batch["labels"])
        labels = batch["labels"]
        totals = torch.stack([(labels != IGNORED).sum(), torch.tensor(len(labels), device=self.device)])
        # Where nothing counts anywhere, the summed loss is zero and so must be the mean.
        counted, sequences = self.processes.sum(totals).clamp(min=1)
        losses = torch.zeros(2, device=self.device)
        micro_batches = split_batch(batch, self.micro_batch_size)
        for index, micro_batch in enumerate(micro_batches):
            with self._gradients_in_step(last=index == len(micro_batches) - 1):
                logits, router_logits = self._run(self._forward, micro_batch)
                parts = [summed_loss(logits, micro_batch["labels"]) / counted, torch.zeros((), device=self.device)]
                loss = parts[0]
                if self.routers is not None:
                    parts[1] = self.routers(router_logits, len(logits)) / sequences
                    loss = loss + self.routers.weight * parts[1]
                # Processes average their gradients, and what is wanted is their sum.
                (loss * self.processes.count).backward()
            losses += torch.stack([part.detach() for part in parts])
        if not dry_run:
            self._batch = batch
            self._batch_losses = self.processes.sum(losses)

    def _run(self, forward: Callable[..., Any], micro_batch: dict[str, Any]) -> tuple[Tensor, Any]:
        """Logits (batch, seq, vocab) and what the routers say, ``None`` without routers."""
        ids = micro_batch["input_ids"]
        inputs: dict[str, Any] = {"attention_mask": micro_batch.get("attention_mask")}
        if self.mask is not None:
            inputs = self.mask.inputs(self.model, ids)
        listening = contextlib.nullcontext() if self.routers is None else self.routers.listening(self.model)
        autocast = torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with listening, autocast:
            out = forward(input_ids=ids, use_cache=False, **inputs)
        return out.logits, None if self.routers is None else out.router_logits

    @contextlib.contextmanager
    def _gradients_in_step(self, *, last: bool) -> Iterator[None]:
        """Bring the processes' gradients together after the last micro-batch; parts of a model are, after each."""
        parallel.announce_backward(self.model, last=last)
        if isinstance(self._forward, DistributedDataParallel) and not last:
            with self._forward.no_sync():
                yield
        else:
            yield

    def eval_batch(self, batch: dict[str, Any], labels: Tensor | None = None) -> Tensor:
        """Logits (batch, seq, vocab) without gradient; `labels` are the caller's to compare."""
        del labels
        self.model.eval()
        with torch.no_grad(), torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            logits = self.model(input_ids=move_to_device(batch["input_ids"], self.device), use_cache=False).logits
        assert isinstance(logits, Tensor)
        return logits

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
        self.loss, router_loss, self.grad_norm = numbers.tolist()
        self.router_loss = None if self.routers is None else router_loss
        for group in self.optim.param_groups:
            self.lr = float(self.scheduler.set_lr(group, self.trainer))
        self.skipped = not bool(torch.isfinite(numbers).all())
        if self.skipped:
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row > self.skip_nonfinite:
                raise NonFiniteError(self.trainer.global_step, self.loss, self.grad_norm, self._first_overflow())
            return
        self.skipped_in_a_row = 0
        if self.max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.max_grad_norm, norm)
        self.optim.step()
        self.record_ce_loss(self.loss)
        self.record_metric("total grad norm", self.grad_norm, namespace="optim")
        self.record_metric("LR", self.lr, namespace="optim")

    def _first_overflow(self) -> str:
        """Where the last batch's numbers stopped being finite, in words; runs the model over it once more."""
        found = overflow.first_in_gradients(self.model)

        def forward() -> None:
            torch.manual_seed(_step_seed(self.seed, self.trainer.global_step, self.processes.rank))
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                for micro_batch in split_batch(self._batch, self.micro_batch_size):
                    self._run(self.model, micro_batch)

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
    last_validation: Evaluation | None = None
    seconds: float = 0.0
    _started: float = field(default=0.0, repr=False)

    @property
    def _module(self) -> CausalLMModule:
        module = self.trainer.train_module
        assert isinstance(module, CausalLMModule)
        return module

    def pre_load_batch(self) -> None:
        """Start the step's clock."""
        self._started = time.perf_counter()

    def post_train_batch(self) -> None:
        """Stop the clock, validate if it is due, and report."""
        self.seconds += time.perf_counter() - self._started
        module = self._module
        due = self.step % self.validate_every == 0 or self.step == self.trainer.max_steps
        self.last_validation = self.validate() if due else None
        self.listener.step(
            Step(
                step=self.step,
                loss=module.loss,
                lr=module.lr,
                grad_norm=module.grad_norm,
                tokens=self.trainer.global_train_tokens_seen,
                seconds=self.seconds,
                validation=self.last_validation,
                router_loss=module.router_loss,
                skipped=module.skipped,
            )
        )

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
    model: PreTrainedModel,
    scheme: Scheme,
    recipe: Recipe,
    arrays: TokenArrays,
    *,
    folder: Path,
    device: torch.device,
    listener: Listener,
    validate: Callable[[], Evaluation],
    processes: Processes = ALONE,
) -> Outcome:
    """Train `model` in place by `recipe`, from the newest whole checkpoint in `folder` where there is one.

    SIGINT and SIGTERM save a checkpoint after the running step and end the training.

    Args:
        model: freshly initialised, on `device`, as `parallel.place` gives it.
        scheme: the model's, for what it exempts from weight decay and for its residual warm-up.
        recipe: already checked against `arrays`.
        arrays: the tokens.
        folder: where checkpoints are kept; the run's own, since loading one executes what it holds.
        device: where to train.
        listener: told of every step, on this process.
        validate: measures the validation loss of the model as it is.
        processes: those that train together, all calling this.

    Raises:
        NonFiniteError: where the loss or the gradient is not finite; nothing is written after that.
        SaveError: where a checkpoint cannot be written.
        ConfigError: where no checkpoint of a run that has some can be loaded.
    """
    run = digest(recipe)
    module = _module(model, scheme, recipe, device, processes)
    dataset = _dataset(recipe, arrays, folder / "order")
    processes.first(lambda: _make_room(dataset))
    loader = _data_loader(recipe, dataset, device, processes)
    recorder = Recorder(listener=listener, validate=validate, validate_every=recipe.train.validate_every, run=run)
    trainer = _trainer(module, loader, recipe, recorder, folder, device)
    listener.resumed(_load_newest(trainer, folder, run, listener, processes))
    # Where no step is left to do, no batch sets the gates of a residual warm-up.
    set_step(model, scheme, max(trainer.global_step, 1))
    _warn_of_gates(model, scheme, recipe.train.steps, listener)
    trainer.fit()
    # The engine removes a checkpoint that has become one too many at the step after, which the last step has not.
    for path in _checkpointer(trainer)._checkpoints_to_remove if processes.is_first else ():
        shutil.rmtree(path, ignore_errors=True)
    return Outcome(
        step=trainer.global_step,
        tokens=trainer.global_train_tokens_seen,
        seconds=recorder.seconds,
        interrupted=trainer.global_step < recipe.train.steps,
        validation=recorder.last_validation,
    )


def _warn_of_gates(model: PreTrainedModel, scheme: Scheme, steps: int, listener: Listener) -> None:
    """Warn where a residual warm-up outlasts the run."""
    sites = (module.site for module in model.modules() if isinstance(module, Sublayer))
    if any(scheme.gate(site, steps) != 1.0 for site in sites):
        listener.warn(
            f"the residual warm-up of scheme '{scheme.name}' is not over at the last step, {steps}: the run's losses "
            "are those of a model with its gates partly closed, and the saved model, once loaded, has them open"
        )


def _module(
    model: PreTrainedModel, scheme: Scheme, recipe: Recipe, device: torch.device, processes: Processes
) -> CausalLMModule:
    """What the engine drives."""
    train = recipe.train
    if train.activation_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    return CausalLMModule(
        model,
        scheme,
        _optimizer(model, scheme, recipe),
        CosWithWarmup(warmup=recipe.schedule.warmup_steps, alpha_f=recipe.schedule.final_fraction),
        micro_batch_size=parallel.micro_batch_size(recipe, processes.count),
        sequence_length=recipe.data.sequence_length,
        max_grad_norm=train.max_grad_norm,
        autocast=autocast_of(recipe),
        seed=recipe.seed,
        device=device,
        compile=train.compile,
        mask=document_mask(recipe),
        routers=RouterLoss.of(model, train.router_loss),
        skip_nonfinite=train.skip_nonfinite,
        processes=processes,
    )


def _trainer(
    module: CausalLMModule,
    loader: NumpyFSLDataLoader,
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


def _optimizer(model: PreTrainedModel, scheme: Scheme, recipe: Recipe) -> torch.optim.Optimizer:
    optim = recipe.optim
    exempt = undecayed(model, scheme, optim)
    return AdamWConfig(
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        # One pass over all parameters; without it, a CPU steps them one operation and one parameter at a time.
        fused=True,
        group_overrides=[OptimGroupOverride(params=exempt, opts={"weight_decay": 0.0})] if exempt else None,
    ).build(model)


def _dataset(recipe: Recipe, arrays: TokenArrays, work_dir: Path) -> NumpyFSLDataset:
    dataset = NumpyFSLDataset(
        *map(str, arrays.train_paths),
        sequence_length=recipe.data.sequence_length,
        pad_token_id=arrays.vocabulary.pad_id,
        eos_token_id=arrays.vocabulary.eos_id,
        vocab_size=arrays.vocabulary.size,
        dtype=arrays.vocabulary.dtype,
    )
    dataset.work_dir = work_dir
    dataset.prepare()
    return dataset


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


def _data_loader(
    recipe: Recipe, dataset: NumpyFSLDataset, device: torch.device, processes: Processes
) -> NumpyFSLDataLoader:
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


def _step_seed(seed: int, step: int, rank: int) -> int:
    """A generator seed of its own for each step of each process."""
    digest = hashlib.sha256(f"{seed},{step},{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
