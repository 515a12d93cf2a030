"""A model over several processes: how it is cut, and how it comes in and out of its parts as a whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from siamesenorm import hosts
from siamesenorm.residual import ConfigError
from siamesenorm.training.build import build_model, empty_model, tie_weights
from siamesenorm.training.processes import Processes
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.settings import autocast_of


def check(recipe: Recipe, processes: Processes) -> None:
    """Refuse a recipe that the processes cannot share.

    Raises:
        ConfigError: naming the numbers that do not go into each other.
    """
    count = processes.count
    if recipe.train.batch_size % count:
        raise ConfigError(
            f"train.batch_size ({recipe.train.batch_size}) does not divide over {count} processes; choose a multiple "
            f"of {count}"
        )
    if recipe.train.probe_every is not None and strategy(recipe, count) in ("fsdp", "hsdp"):
        raise ConfigError(
            "train.probe_every looks into a model that a process holds whole: use train.parallel=ddp, or leave it null "
            "and run siamesenorm probe on the finished run"
        )
    if strategy(recipe, count) == "hsdp":
        degree = recipe.train.shard_degree or processes.local
        if count % degree:
            raise ConfigError(f"train.shard_degree ({degree}) does not divide {count} processes")


def strategy(recipe: Recipe, count: int) -> str:
    """How ``count`` processes share the model: ``none``, ``ddp``, ``fsdp`` or ``hsdp``."""
    if count == 1:
        return "none"
    return "fsdp" if recipe.train.parallel == "auto" else recipe.train.parallel


def micro_batch_size(recipe: Recipe, count: int) -> int:
    """The sequences or images of one forward pass on each of ``count`` processes."""
    share = recipe.train.batch_size // count
    return min(recipe.train.micro_batch_size or share, share)


def place(recipe: Recipe, device: torch.device, processes: Processes) -> Any:
    """The recipe's model on ``device``, whole or this process's part of it; equal seeds give equal weights either way.

    A model that is held in parts is made whole on the first process alone, in its main memory.
    """
    how = strategy(recipe, processes.count)
    if how in ("none", "ddp"):
        return build_model(recipe).to(device)
    whole = processes.first_only(lambda: build_model(recipe))
    model = empty_model(recipe)
    shard(model, mesh_for(recipe, how, device, processes), recipe)
    model.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, {} if whole is None else whole.state_dict(), options=options)
    tie_weights(model)
    # What is not saved with a model, its RoPE frequencies, is not in the state either.
    for name, buffer in model.named_buffers():
        if whole is not None:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, 0)
    return model


def whole_model(model: Any, recipe: Recipe) -> Any:
    """The model in one piece: on the first process, in its main memory; ``None`` on the others.

    A model that is not held in parts is given back as it is, on every process.
    """
    if not _is_sharded(model):
        return model
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not state:
        return None
    whole = empty_model(recipe).train(model.training)
    whole.load_state_dict(state, assign=True)
    tie_weights(whole)
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        # Keeps whether the buffer is saved with the model.
        whole.get_submodule(owner)._buffers[leaf] = buffer.cpu()
    return whole


def announce_backward(model: nn.Module, *, last: bool) -> None:
    """Say whether the next backward pass is a step's last; replicas of a model in parts wait with their sum for it."""
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        model.set_requires_all_reduce(last)


def _is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def mesh_for(recipe: Recipe, how: str, device: torch.device, processes: Processes) -> DeviceMesh:
    """The processes in one row for ``fsdp``, or in groups that each hold a model, for ``hsdp``."""
    if how == "fsdp":
        return init_device_mesh(device.type, (processes.count,), mesh_dim_names=("shard",))
    degree = recipe.train.shard_degree or processes.local
    return init_device_mesh(device.type, (processes.count // degree, degree), mesh_dim_names=("replicate", "shard"))


def shard(model: Any, mesh: DeviceMesh, recipe: Recipe) -> None:
    """Shard each block, and then what is left.

    Blocks get their weights in the precision that the branches compute in anyway. What they are given is not cast, so
    the streams keep their dtype, and so do the embeddings that they start from.

    Raises:
        ConfigError: for a model that needs parts of a block outside of it.
    """
    if not getattr(model, "shardable", True):
        raise ConfigError(
            f"a {type(model).__name__} uses its first block's embedder behind the last block too, so it cannot be held "
            "in parts: train.parallel=ddp"
        )
    blocks = MixedPrecisionPolicy(autocast_of(recipe), reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in hosts.blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=blocks)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
