"""Fused reads: what happens between two branches, in one pass forward and one backward.

Importing this package puts them into the slot of ``residual/fusing.py``; it is imported right behind ``residual``.
"""

from __future__ import annotations

from ..residual import register_backend
from .dispatch import Choice, FusedReads, Mode, explain, has_triton, use

__all__ = ["Choice", "Mode", "explain", "has_triton", "use"]

register_backend(FusedReads())
