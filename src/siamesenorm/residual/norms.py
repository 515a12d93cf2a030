"""RMSNorm and LayerNorm under the package's numerics.

One order of operations, the same everywhere: widen the input to float32 (float64 stays float64), take the statistics
and multiply by the weight there, round once at the end. The input is never written to. Weight gradients are therefore
summed in the wide dtype too, and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .errors import ConfigError
from .fusing import backend

__all__ = ["LayerNorm", "Norm", "NormSpec", "RMSNorm", "narrow", "widen"]

NormKind = Literal["rms", "layer"]
# Up to so many entries torch computes in one thread.
_FEW = 32_768
_WIDE = (torch.float32, torch.float64)


def widen(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is where its dtype is already as wide."""
    return x if x.dtype in _WIDE else x.float()


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``. A token that is decoded costs more calls than arithmetic, so this spares one where it can."""
    return x if x.dtype == dtype else x.to(dtype)


class Norm(nn.Module):
    """What both norms share: their parameters, and the rounding.

    Args:
        size: width d of the last dimension.
        eps: added to the mean square (RMSNorm) or the variance (LayerNorm).
        bias: learn a bias of shape (size,).
        affine: learn a weight of shape (size,); without it there is no bias either.
        init: what the norm multiplies by at first; a bias starts at 0.
        offset: added to the weight before it multiplies (Gemma's is 1, and its weight starts at 0).

    Attributes:
        scale: a constant on the output, before it is rounded (see :meth:`Scheme.input_scale`).
        added: whether a scheme brought it to a place where the host has no norm (see :meth:`Scheme.branch_norms`).
    """

    kind: NormKind
    scale: float = 1.0
    added: bool = False

    def __init__(
        self,
        size: int,
        eps: float = 1e-6,
        *,
        bias: bool = False,
        affine: bool = True,
        init: float = 1.0,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.init = init
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size)) if affine else None
        self.bias = nn.Parameter(torch.empty(size)) if affine and bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight to ``init`` (less the offset), bias to 0. Draws no random numbers."""
        if self.weight is not None:
            nn.init.constant_(self.weight, self.init - self.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def spec(self) -> NormSpec:
        """What kind of norm this is."""
        return NormSpec(self.kind, self.size, self.eps, self.bias is not None, self.weight is not None, self.offset)

    def affine(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What a normalised input like ``x`` is multiplied by, and what is added then: (size,) in ``x``'s dtype."""
        weight = None if self.weight is None else narrow(self.weight, x.dtype)
        bias = None if self.bias is None else narrow(self.bias, x.dtype)
        if weight is not None and self.offset:
            weight = weight + self.offset
        if self.scale != 1.0:
            weight = x.new_full((self.size,), self.scale) if weight is None else weight * self.scale
            bias = None if bias is None else bias * self.scale
        return weight, bias

    def wide(self, x: Tensor) -> Tensor:
        """The norm of ``x`` (…, size) in the wide dtype, for a caller that goes on computing before it rounds."""
        return self._normed(widen(x))

    def _normed(self, x: Tensor) -> Tensor:
        """Statistics, weight and bias, all in ``x``'s dtype."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """The norm of ``x`` (…, size), in ``x``'s dtype."""
        made = backend(self)
        out = None if made is None else made.norm(self, x)
        return narrow(self.wide(x), x.dtype) if out is None else out

    def extra_repr(self) -> str:
        """Width, eps, whether there is a bias, and the scale where there is one."""
        scale = "" if self.scale == 1.0 else f", scale={self.scale:.4g}"
        return f"{self.size}, eps={self.eps}, bias={self.bias is not None}{scale}"


class RMSNorm(Norm):
    """``x / sqrt(mean(x²) + eps) · weight (+ bias)`` over the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

    kind = "rms"

    def _normed(self, x: Tensor) -> Tensor:
        weight, bias = self.affine(x)
        alone = not torch.compiler.is_compiling() and not torch.is_grad_enabled()
        if alone and bias is None and x.numel() <= _FEW:
            # The same operations and bits in one call, which is what a token that is decoded costs.
            return F.rms_norm(x, (self.size,), weight, self.eps)
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        if weight is not None:
            out = out * weight
        return out if bias is None else out + bias


class LayerNorm(Norm):
    """``(x - mean(x)) / sqrt(var(x) + eps) · weight (+ bias)`` over the last dimension (Ba, arXiv 1607.06450)."""

    kind = "layer"

    def _normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.size,), *self.affine(x), self.eps)


_KINDS: dict[str, type[Norm]] = {"rms": RMSNorm, "layer": LayerNorm}


@dataclass(frozen=True)
class NormSpec:
    """The norm that a host uses, so that a scheme's own norms can be of the same kind.

    Attributes:
        kind: ``"rms"`` or ``"layer"``.
        size: width of the normalised dimension.
        eps: as in :class:`Norm`.
        bias: whether the norm learns a bias.
        affine: whether it learns a weight.
        offset: as in :class:`Norm`.
    """

    kind: NormKind
    size: int
    eps: float = 1e-6
    bias: bool = False
    affine: bool = True
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ConfigError(f"unknown norm {self.kind!r}: valid are {', '.join(_KINDS)}")

    def resized(self, size: int) -> NormSpec:
        """The same norm over another width, such as a head's."""
        return replace(self, size=size)

    def build(self, *, init: float = 1.0) -> Norm:
        """A new norm of this kind that multiplies by ``init`` at first."""
        kind = _KINDS[self.kind]
        return kind(self.size, self.eps, bias=self.bias, affine=self.affine, init=init, offset=self.offset)
