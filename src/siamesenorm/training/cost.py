"""What a model costs: floating-point operations per token, counted by running it without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

FORMULA = (
    "training counts three times the forward pass (the backward pass is two more); forward counts 2 per multiply-add "
    "of each matrix product, attention over the whole square included, and 1 per number that any other operation "
    "computes or reduces"
)

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


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> Flops:
    """Operations per token of one forward pass over a sequence.

    Args:
        model: on the meta device, so that nothing is computed.
        sequence_length: in tokens; attention's share grows with it.
    """
    run: Callable[..., Any] = model.eval()
    products = FlopCounterMode(display=False)
    ids = torch.zeros((1, sequence_length), dtype=torch.long, device="meta")
    # A finished mask goes through as it is; without one, transformers asks the tokens' positions for their values.
    mask = torch.ones((1, 1, sequence_length, sequence_length), dtype=torch.bool, device="meta")
    elementwise = _Elementwise(products.flop_registry)
    with torch.no_grad(), products, elementwise:
        run(input_ids=ids, attention_mask=mask, use_cache=False)
    return Flops(products.get_total_flops() / sequence_length, elementwise.total / sequence_length)
