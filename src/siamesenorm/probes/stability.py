"""How steadily a run went, from what it wrote down at each step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["LEAST_HISTORY", "THRESHOLD", "WINDOW", "spike_score", "spikes"]

WINDOW = 1000
THRESHOLD = 7.0
LEAST_HISTORY = 50


def spikes(
    values: Sequence[float | None],
    *,
    window: int = WINDOW,
    threshold: float = THRESHOLD,
    least: int = LEAST_HISTORY,
) -> tuple[list[int], int]:
    """The places of spikes in a series, and how many of its values were judged.

    A value is a spike if it is ``threshold`` or more standard deviations off the mean of the last ``window`` values
    before it, up or down. Mean and standard deviation (that of the values themselves, not of a larger population) are
    over those that are finite, of which ``least`` must be there, or the value is not judged. One that equals their mean
    is none, even where all are equal. A value that is ``None`` or not finite is a spike wherever it stands.

    The measure is that of OLMo 2 (arXiv 2501.00656), which says neither whether a value counts towards its own mean nor
    how a series begins.
    """
    history: list[float] = []
    found, judged = [], 0
    for place, value in enumerate(values):
        if value is None or not math.isfinite(value):
            found.append(place)
            judged += 1
            continue
        if len(history) >= least:
            judged += 1
            last = np.array(history[-window:], dtype=np.float64)
            off = abs(value - last.mean())
            if off >= threshold * last.std() and value != last.mean():
                found.append(place)
        history.append(value)
    return found, judged


def spike_score(values: Sequence[float | None], **options: float) -> float | None:
    """The share of the judged values that are spikes, from 0 to 1; ``None`` where none could be judged.

    Args:
        values: one a step.
        **options: as for :func:`spikes`.
    """
    found, judged = spikes(values, **options)  # type: ignore[arg-type]
    return len(found) / judged if judged else None
