"""What a scheme costs beside Pre-Norm: time, memory, and streams moved, measured in one process."""

from __future__ import annotations

from .measure import BASELINE, UNTOUCHED, Case, Result, bandwidth, cases, measure, modes
from .report import bars, bench, of_shape
from .traffic import Traffic, floor, traffic

__all__ = [
    "BASELINE",
    "UNTOUCHED",
    "Case",
    "Result",
    "Traffic",
    "bandwidth",
    "bars",
    "bench",
    "cases",
    "floor",
    "measure",
    "modes",
    "of_shape",
    "traffic",
]
