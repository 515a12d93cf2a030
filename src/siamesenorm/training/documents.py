"""Keeping the documents in a sequence apart: positions that start anew in each, and attention that stays inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from siamesenorm.residual import ConfigError
from siamesenorm.training.evaluate import IGNORED

_IMPLEMENTATIONS = ("sdpa", "eager")


class DocumentMask:
    """Makes each document of a sequence be seen as if it were alone.

    A document is what ends with the end token, that token included; a sequence may begin and end inside one. What the
    model would predict from an end token, the next document's first token, is not counted in the loss.

    The mask is spelt out, (batch, 1, seq, seq), for the attention implementations ``sdpa`` and ``eager``; the unpadded
    layout of the flash attention kernels is not supported. Layers with a window shorter than the sequence are refused,
    since the mask would replace the window.
    """

    def __init__(self, eos_id: int) -> None:
        self.eos_id = eos_id

    def check(self, model: PreTrainedModel, sequence_length: int) -> None:
        """Refuse a model that would not follow the mask.

        Raises:
            ConfigError: naming what stands in the way.
        """
        config: Any = model.config
        if config._attn_implementation not in _IMPLEMENTATIONS:
            raise ConfigError(
                f"data.document_masking works with the attention implementations {' and '.join(_IMPLEMENTATIONS)}, not "
                f"with {config._attn_implementation!r}"
            )
        window = getattr(config, "sliding_window", None)
        if window is not None and window < sequence_length:
            raise ConfigError(
                f"data.document_masking does not go with attention windows: the model's sliding_window ({window}) is "
                f"shorter than data.sequence_length ({sequence_length})"
            )

    def inputs(self, model: PreTrainedModel, input_ids: Tensor) -> dict[str, Tensor]:
        """The model's further inputs for `input_ids` (batch, seq): ``position_ids`` and ``attention_mask``."""
        length = input_ids.shape[1]
        steps = torch.arange(length, device=input_ids.device)
        ends = input_ids == self.eos_id
        # A document begins behind an end, so the number of ends before a token tells its document.
        first = torch.zeros_like(ends)
        first[:, 1:] = ends[:, :-1]
        document = first.cumsum(1)
        begin = torch.where(first, steps, 0).cummax(1).values
        same = document[:, :, None] == document[:, None, :]
        mask = (same & (steps[:, None] >= steps[None, :])).unsqueeze(1)
        if model.config._attn_implementation == "eager":
            # It adds the mask to the scores.
            dtype = model.dtype
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return {"position_ids": steps - begin, "attention_mask": mask}

    def labels(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """`labels` (batch, seq), aligned with the logits, without what would be predicted from an end token."""
        return labels.masked_fill(input_ids == self.eos_id, IGNORED)
