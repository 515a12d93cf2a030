"""What a few seeds say: a mean, how sure it is, and whether two schemes differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["CONFIDENCE", "Estimate", "estimate", "paired"]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: of them.
        half: the mean plus and minus this is its interval at `CONFIDENCE`, by Student's t over the seeds; ``None`` for
            a single one, of which no spread is known.
        count: of seeds.
    """

    mean: float
    half: float | None
    count: int

    @property
    def low(self) -> float | None:
        """The interval's lower end."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        """The interval's upper end."""
        return None if self.half is None else self.mean + self.half

    @property
    def is_apart_from_zero(self) -> bool:
        """Whether the interval leaves zero out; of one seed, it is not known to."""
        return self.half is not None and abs(self.mean) > self.half

    @property
    def starred(self) -> str:
        """In words, with a star where the interval leaves zero out."""
        return f"{self} *" if self.is_apart_from_zero else f"{self}"

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.half is None else f"{self.mean:.4f} ± {self.half:.4f}"


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of the values and its interval; ``None`` for no values.

    The interval is mean ± t · s / sqrt(n), with s the standard deviation over n - 1 and t the quantile of Student's
    distribution with n - 1 degrees of freedom: it holds for values that scatter normally around their mean.
    """
    from scipy.stats import t

    count = len(values)
    if not count:
        return None
    if count == 1:
        return Estimate(values[0], None, 1)
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, count - 1))
    return Estimate(statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(count), count)


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Estimate | None:
    """The mean of ``one`` less ``other`` and its interval, over the seeds that both have; ``None`` for none.

    Equal seeds have equal initial weights and data, so what a seed adds to both goes out of the difference.
    """
    return estimate([one[seed] - other[seed] for seed in one if seed in other])
