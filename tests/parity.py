"""Numeric fixtures of the official implementation: where they are, and how they are read.

They are found through ``SIAMESENORM_PARITY`` or at ``../shared/parity`` beside the repository, and are not part of it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

_ROOT = Path(__file__).parent.parent


def folder() -> Path:
    return Path(os.environ.get("SIAMESENORM_PARITY") or _ROOT.parent / "shared" / "parity")


@dataclass(frozen=True)
class Case:
    args: dict[str, Any]
    tensors: dict[str, Tensor]

    def group(self, prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}


def load_case(name: str) -> Case:
    path = folder() / f"{name}.json"
    if not path.exists():
        pytest.skip(f"parity fixture '{name}' is not at {folder()}: set SIAMESENORM_PARITY")
    return Case(json.loads(path.read_text())["constructor_args"], load_file(path.with_suffix(".safetensors")))


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest difference, relative to the reference's largest entry."""
    difference = (value.to(torch.float64) - reference.to(torch.float64)).abs().max()
    return (difference / reference.abs().max().clamp_min(1e-300)).item()
