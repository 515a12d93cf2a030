"""What a model costs: its parameters, and the operations per token, counted by running it without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from siamesenorm.training.example import forward_inputs

FORMULA = (
    "training counts three times the forward pass (the backward pass is two more); forward counts 2 per multiply-add "
    "of each matrix product, attention over the whole square included, and 1 per number that any other operation "
    "computes or reduces; of a mixture's experts, those that a token passes through"
)

_GROUPED = torch.ops.aten._grouped_mm

# Operations that move or describe numbers and compute none.
_FREE = frozenset(
    {
        "_reshape_alias",
        "_to_copy",
        "_unsafe_view",
        "alias",
        "arange",
        "as_strided",
        "cat",
        "clone",
        "constant_pad_nd",
        "copy_",
        "detach",
        "embedding",
        "empty",
        "empty_like",
        "expand",
        "full",
        "full_like",
        "gather",
        "index",
        "index_select",
        "lift_fresh",
        "narrow",
        "new_empty",
        "new_ones",
        "new_zeros",
        "ones",
        "permute",
        "repeat",
        "reshape",
        "scalar_tensor",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "stack",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "zeros",
        "zeros_like",
    }
)

# Fused norms: the mean of squares, its root's inverse, the product with it and with the weight; LayerNorm's mean too.
_FUSED = {"_fused_rms_norm": 4, "native_layer_norm": 7}


@dataclass(frozen=True)
class Flops:
    """Forward operations per token: in matrix products (attention's included) and in everything else."""

    products: float
    elementwise: float

    @property
    def training(self) -> float:
        """Forward and backward together, see `FORMULA`."""
        return 3 * (self.products + self.elementwise)


def experts_of(model: nn.Module) -> list[nn.Parameter]:
    """The weights of a mixture's experts, each (experts, out, in); none in a dense model."""
    return [
        parameter
        for module in model.modules()
        if hasattr(module, "num_experts")
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 3
    ]


def expert_counts(model: Any) -> tuple[int, int] | None:
    """How many experts a token passes through in a sublayer, and of how many; None for a dense model."""
    experts = experts_of(model)
    return (int(model.config.num_experts_per_tok), len(experts[0])) if experts else None


def active_parameters(model: Any) -> int:
    """The parameters that a token passes through: all but the experts that it is not sent to."""
    total = sum(parameter.numel() for parameter in model.parameters())
    counts = expert_counts(model)
    if counts is None:
        return total
    chosen, of = counts
    return total - sum(weight.numel() for weight in experts_of(model)) * (of - chosen) // of


@contextmanager
def balanced_experts(model: Any) -> Iterator[None]:
    """Lets a mixture of experts run without data.

    Which expert a token goes to is a value, so a loop over the experts needs data. The grouped product, which a mixture
    trains with, takes all tokens at once whatever the routing, so its shapes, work and memory are known without any.
    """
    before = model.config._experts_implementation if expert_counts(model) else None
    if before is None:
        yield
        return
    model.config._experts_implementation = "grouped_mm"
    try:
        with _GroupedShapes():
            yield
    finally:
        model.config._experts_implementation = before


class _GroupedShapes(TorchDispatchMode):
    """The result of a grouped product in any dtype; torch itself gives its shape for bfloat16 alone."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What is sharded is taken apart first.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.overloadpacket is not _GROUPED:
            return func(*args, **(kwargs or {}))
        left, right = args[:2]
        offsets = args[2] if len(args) > 2 else (kwargs or {})["offs"]
        if left.ndim == right.ndim == 2:
            # The gradient of the weights: a matrix for each expert.
            return left.new_empty((len(offsets), left.shape[0], right.shape[1]))
        return left.new_empty((left.shape[0], right.shape[-1]))


def _grouped_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """A token meets one of the matrices. left: (tokens, in); right: (experts, in, out)."""
    tokens, inner = left
    return 2 * tokens * inner * right[-1]


class _Elementwise(TorchDispatchMode):
    """Counts what `FlopCounterMode` does not."""

    def __init__(self, counted_elsewhere: Any) -> None:
        super().__init__()
        self.total = 0
        self._elsewhere = counted_elsewhere

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in _FREE and func.overloadpacket not in self._elsewhere:
            # A reduction reads more numbers than it gives, an operation between tensors gives as many as it reads.
            numbers = max((value.numel() for value in (*args, out) if isinstance(value, Tensor)), default=0)
            self.total += _FUSED.get(name, 1) * numbers
        return out


def flops_per_token(model: Any, length: int | None = None) -> Flops:
    """Operations per token of one forward pass.

    Args:
        model: on the meta device, so that nothing is computed.
        length: of a sequence, in tokens; attention's share grows with it. An image is as many as its model makes of it.
    """
    run: Callable[..., Any] = model.eval()
    products = FlopCounterMode(display=False, custom_mapping={_GROUPED: _grouped_flops})
    elementwise = _Elementwise(products.flop_registry)
    inputs, tokens = forward_inputs(model, length=length)
    with torch.no_grad(), balanced_experts(model), products, elementwise:
        run(**inputs)
    return Flops(products.get_total_flops() / tokens, elementwise.total / tokens)
