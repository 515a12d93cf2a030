"""What the steps of a run say of it, and whether it is one to compare or diverged."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from siamesenorm.probes.stability import spike_score

__all__ = ["lost", "over_steps", "verdict"]

_SHARE_LOST = 0.1
_FEWEST_STEPS = 20
_STANDARD_ERRORS = 6


def over_steps(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Figures of a run over all its steps, given the lines of its ``metrics.jsonl``.

    ``loss_lost`` is `lost`; ``loss_spikes`` and ``grad_norm_spikes`` are the shares of steps that are spikes
    (`siamesenorm.probes.spikes`); ``grad_norm_median`` and ``grad_norm_max`` are of the norm before clipping, where
    it is finite. ``None`` stands for what so few steps do not tell.
    """
    norms = [line["grad_norm"] for line in lines if line["grad_norm"] is not None]
    return {
        "loss_lost": lost([line["loss"] for line in lines if line["loss"] is not None]),
        "loss_spikes": spike_score([line["loss"] for line in lines]),
        "grad_norm_spikes": spike_score([line["grad_norm"] for line in lines]),
        "grad_norm_median": statistics.median(norms) if norms else None,
        "grad_norm_max": max(norms, default=None),
    }


def lost(losses: Sequence[float]) -> float | None:
    """The share of what a run had learnt that it lost again, from 0 to 1; ``None`` for fewer than 20 steps.

    With the loss as its mean over a tenth of the steps, it is how far the end is above the lowest, over how far the
    lowest is below the first step. It is 0 where the end is so little above the lowest that the scatter from one step
    to the next explains it (six standard errors of such a mean, the lowest being picked from many), and 1 for a run
    that was never below its first step otherwise.

    Args:
        losses: of the training steps, in order.
    """
    if len(losses) < _FEWEST_STEPS:
        return None
    width = len(losses) // 10
    sums = list(itertools.accumulate(losses, initial=0.0))
    means = [(high - low) / width for low, high in zip(sums, sums[width:], strict=False)]
    lowest = min(means)
    # The differences of neighbours have twice the variance of the scatter, and next to nothing of the trend.
    scatter = statistics.stdev(later - earlier for earlier, later in itertools.pairwise(losses)) / math.sqrt(2)
    if means[-1] - lowest <= _STANDARD_ERRORS * scatter / math.sqrt(width):
        return 0.0
    learnt = losses[0] - lowest
    return 1.0 if learnt <= 0 else min((means[-1] - lowest) / learnt, 1.0)


def verdict(summary: Mapping[str, Any], gone: float | None) -> str | None:
    """Why a run counts as diverged, in words; ``None`` for one that does not.

    It does where its loss or gradient stopped being finite, which ends the training, and where more than a tenth of
    what it had learnt was lost in the end: most runs that break at a high learning rate stay finite under gradient
    clipping.

    Args:
        summary: of the run.
        gone: as `lost` gives it.
    """
    if summary.get("diverged"):
        return f"not finite at step {summary.get('diverged_at_step')}"
    if gone is not None and gone > _SHARE_LOST:
        return f"lost {gone:.0%} of what it had learnt"
    return None
