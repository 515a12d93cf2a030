"""The loss of a causal language model on held-out tokens, and on a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from siamesenorm.probes import Batch, categorical
from siamesenorm.residual import ConfigError
from siamesenorm.training.processes import ALONE, Processes
from siamesenorm.training.settings import autocasting

if TYPE_CHECKING:
    from siamesenorm.training.documents import DocumentMask

IGNORED = -100


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats per token, over ``tokens`` predicted tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinite where that overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def figures(self) -> dict[str, float]:
        """As `tasks.Evaluation.figures`."""
        return {"val_loss": self.loss, "val_ppl": self.perplexity, "val_tokens": self.tokens}

    def bits_per_byte(self, bytes_per_token: float) -> float:
        """The loss in bits per byte of text, which does not depend on the tokeniser.

        Args:
            bytes_per_token: over the whole held-out text, document ends counted among the tokens.
        """
        return self.loss / math.log(2) / bytes_per_token


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy summed over the tokens that count, computed in float32 or wider.

    Args:
        logits: (batch, seq, vocab).
        labels: (batch, seq), aligned with the logits: ``labels[:, t]`` is what ``logits[:, t]`` predicts. `IGNORED`
            marks what does not count; where nothing counts, the sum and its gradient are zero.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode, and afterwards in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def spread(available: int, wanted: int) -> np.ndarray:
    """So many numbers, (wanted,), of those below ``available``, evenly spread over them and always the same."""
    return np.arange(wanted) * available // wanted


def entropy(values: np.ndarray) -> float:
    """The entropy of whole numbers by their frequencies, in nats."""
    _, counts = np.unique(values, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def held_out_sequences(shards: Sequence[np.ndarray], sequence_length: int, count: int | None) -> np.ndarray:
    """Sequences to evaluate on, shape (count, sequence_length): always the same, spread evenly over all the tokens.

    Args:
        shards: token arrays; no sequence goes over the end of one.
        sequence_length: in tokens.
        count: how many; None for all.

    Raises:
        ConfigError: where there are fewer than `count`, or none.
    """
    ends = np.cumsum([len(tokens) // sequence_length for tokens in shards])
    available = int(ends[-1]) if len(ends) else 0
    wanted = available if count is None else count
    if available < max(wanted, 1):
        raise ConfigError(
            f"the held-out tokens ({sum(map(len, shards)):,}) make {available} sequences of {sequence_length}; data."
            f"validation_sequences asks for {max(wanted, 1)}"
        )
    chosen = spread(available, wanted)
    shard_of = np.searchsorted(ends, chosen, side="right")
    out = np.empty((wanted, sequence_length), dtype=shards[0].dtype)
    for row, (sequence, shard) in enumerate(zip(chosen, shard_of, strict=True)):
        start = (int(sequence) - int(ends[shard - 1] if shard else 0)) * sequence_length
        out[row] = shards[shard][start : start + sequence_length]
    return out


def text_batches(
    model: PreTrainedModel,
    sequences: np.ndarray,
    *,
    batch_size: int,
    count: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
    mask: DocumentMask | None = None,
) -> list[Batch]:
    """Held-out sequences for probes, in up to ``count`` batches, spread evenly over all; the rest as `evaluate`."""
    chosen = sequences[spread(len(sequences), min(len(sequences), count * batch_size))]

    def batch(ids: Tensor) -> Batch:
        def predict() -> Tensor:
            with autocasting(device.type, autocast):
                more = {} if mask is None else mask.inputs(model, ids)
                logits: Tensor = model(input_ids=ids, use_cache=False, **more).logits
            return logits[:, :-1]

        return categorical(predict, ids[:, 1:] if mask is None else mask.labels(ids[:, :-1], ids[:, 1:]))

    parts = (chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size))
    return [batch(torch.as_tensor(part.astype(np.int64), device=device)) for part in parts]


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    sequences: np.ndarray,
    *,
    batch_size: int,
    device: torch.device,
    autocast: torch.dtype | None = None,
    mask: DocumentMask | None = None,
    processes: Processes = ALONE,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Mean loss over all next-token predictions within the sequences, each token weighing the same.

    Args:
        model: put into evaluation mode while this runs, and back into the mode it was in.
        sequences: (count, seq) token ids.
        batch_size: sequences at a time; changes the time and, beyond rounding, nothing else.
        device: where the model is.
        autocast: the dtype of autocast, or None for none.
        mask: keeps documents apart, where they were apart in training.
        processes: those that share the work, all calling this with the same sequences.
        progress: told how many sequences each batch had.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    counted = torch.zeros((), dtype=torch.long, device=device)
    with evaluating(model):
        for rows, counting in processes.shares(len(sequences), batch_size):
            ids = torch.as_tensor(sequences[rows].astype(np.int64), device=device)
            with autocasting(device.type, autocast):
                more = {} if mask is None else mask.inputs(model, ids)
                logits = model(input_ids=ids, use_cache=False, **more).logits
            labels = ids[:, 1:] if mask is None else mask.labels(ids[:, :-1], ids[:, 1:])
            labels = labels.masked_fill(~counting.to(device)[:, None], IGNORED)
            total += summed_loss(logits[:, :-1], labels).double()
            counted += (labels != IGNORED).sum()
            if progress is not None:
                progress(len(ids))
    processes.sum(total), processes.sum(counted)
    # Only sequences of nothing but document ends leave nothing to count.
    tokens = max(int(counted), 1)
    return Evaluation(loss=total.item() / tokens, tokens=tokens)
