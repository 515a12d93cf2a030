"""From a host's norms to the package's: what kind they are, and new ones like them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from ..residual import ConfigError, Norm, NormSpec
from .attention import NORM_NAMES
from .families import Host

__all__ = ["HostNorms"]

M = TypeVar("M", bound=nn.Module)


class HostNorms:
    """The norms of one model.

    Args:
        host: its family.
        override: what the config's ``residual_norm`` says, where the norms are not of the family's kind: fields of
            :class:`~siamesenorm.residual.NormSpec`, and ``affine_heads``: per-head norms learn a weight (and a bias, if
            the override has one) even so.
    """

    def __init__(self, host: Host, override: Mapping[str, Any] | None = None) -> None:
        self.host = host
        self.override = dict(override or {})
        self.affine_heads = self.override.pop("affine_heads", False)

    def spec(self, norm: Any) -> NormSpec:
        """What kind of norm ``norm`` is.

        Raises:
            ConfigError: none that is known.
        """
        if isinstance(norm, Norm):
            return norm.spec
        name, weight = type(norm).__name__, getattr(norm, "weight", None)
        eps = next(
            (getattr(norm, key) for key in ("variance_epsilon", "eps") if hasattr(norm, key)), self.host.norm_eps
        )
        if "rmsnorm" in name.lower() and weight is not None and eps is not None:
            return NormSpec("rms", weight.shape[-1], eps, offset=self.host.norm_offset)
        if "LayerNorm" in name and hasattr(norm, "normalized_shape") and eps is not None:
            has_bias = getattr(norm, "bias", None) is not None
            return NormSpec(
                "layer", norm.normalized_shape[-1], eps, has_bias, weight is not None, self.host.norm_offset
            )
        raise ConfigError(f"cannot tell what kind of norm a {name} is")

    def ours(self, norm: Any) -> Norm:
        """The package's norm over the parameters of a host's norm, of the host's kind unless overridden."""
        made = self.like(replace(self.spec(norm), **self.override).build(), norm)
        for name in ("weight", "bias"):
            theirs = getattr(norm, name, None)
            if theirs is not None and getattr(made, name) is not None:
                setattr(made, name, theirs)
        made.added = getattr(norm, "added", False)
        return made

    def for_scheme(self, norm: Norm) -> NormSpec:
        """The kind of a scheme's own norms beside ``norm``: they learn a weight even where a family's norms do not."""
        spec = self.spec(norm)
        return spec if "affine" in self.override else replace(spec, affine=True)

    def norm_heads(self, attention: Any, roles: tuple[str, ...], norm: Norm) -> bool:
        """Give an attention the per-head norms that ``roles`` ask for; whether any had to be added.

        Those that the host has stay, and become the package's where they are of a kind it knows.
        """
        added = False
        for role, name in NORM_NAMES.items():
            own = self.host.attention.norms.get(role, "")
            theirs = getattr(attention, own, None)
            # timm has the identity where it has no norm.
            if isinstance(theirs, nn.Module) and not isinstance(theirs, nn.Identity):
                setattr(attention, own, self._ours_if_known(theirs))
            elif role in roles:
                spec = self.for_scheme(norm).resized(getattr(attention, self.host.attention.head_dim))
                if self.affine_heads:
                    spec = replace(spec, affine=True, bias=self.override.get("bias", spec.bias))
                setattr(attention, name, self.added(spec, norm, attention))
                added = True
        return added

    def added(self, spec: NormSpec, *references: nn.Module) -> Norm:
        """A new norm where the host has none, as :meth:`like` the references."""
        made = self.like(spec.build(), *references)
        made.added = True
        return made

    def like(self, module: M, *references: nn.Module) -> M:
        """``module`` in the mode of the first reference, in dtype and place like the first that has parameters."""
        module.train(references[0].training)
        for reference in references:
            for parameter in reference.parameters():
                return module.to(device=parameter.device, dtype=parameter.dtype)
        return module

    def is_trained(self, norm: Norm) -> bool:
        """Whether removing ``norm`` loses something: it is more than the norm alone."""
        if norm.weight is None or norm.weight.is_meta:
            return False
        return bool((norm.weight != 1 - norm.offset).any()) or (norm.bias is not None and bool((norm.bias != 0).any()))

    def _ours_if_known(self, norm: nn.Module) -> nn.Module:
        try:
            return self.ours(norm)
        except ConfigError:
            return norm
