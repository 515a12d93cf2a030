"""What a residual scheme is.

A scheme decides what a branch (attention, MLP) reads from the residual streams, and how the branch's output is written
back. Everything else in a Transformer is independent of it. Four moments and nine declared facts say all of it:

    open(h) -> streams                the embedding h (…, d) to the starting streams
    read(streams) -> (u, carry)       what a sublayer's branch reads, and what its write will need
    write(carry, o) -> streams        fold the branch's output o in
    close(streams) -> h               the readout that the final norm sees

    input_norm, input_scale, branch_norms, init_gain, decay, gate, opening, is_pre_norm, upcycled

``read`` and ``write`` belong to one :class:`Sublayer` per sublayer, which owns its norms and scales; ``close`` belongs
to the :class:`Readout`. A host needs to know no more than this file.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor, nn

from .errors import ConfigError, nearest
from .fusing import Term
from .norms import NormSpec

__all__ = [
    "Block",
    "Carry",
    "Readout",
    "Scheme",
    "Site",
    "Streams",
    "Sublayer",
    "choose",
    "count",
    "make_scheme",
    "parse_scheme",
    "register",
    "schemes",
]

Streams = tuple[Tensor, ...]
"""A flat tuple of tensors, each (…, d) or (…, n, d): (Y,) for Pre-Norm, (X, Y) for SiameseNorm."""

Carry = tuple[Tensor, ...]
"""What a sublayer's ``write`` needs from its ``read``; private to the sublayer."""

Kind = Literal["attention", "mlp", "parallel"]
NormPlace = Literal["before", "after", "none"]


@dataclass(frozen=True)
class Site:
    """Where a sublayer stands.

    Attributes:
        sublayer: index i in the stack, from 0.
        block: index l of its block, from 0.
        kind: ``"attention"``, ``"mlp"``, or ``"parallel"`` where attention and MLP share one read and write.
        blocks: depth L of the stack in blocks.
        sublayers: depth S of the stack in sublayers.
    """

    sublayer: int
    block: int
    kind: Kind
    blocks: int
    sublayers: int

    @property
    def first_block(self) -> bool:
        """Whether this is a sublayer of block 0."""
        return self.block == 0


class Sublayer(nn.Module, ABC):
    """The residual part of one sublayer: how its branch reads the streams and how the output is written back.

    Constants that depend on the site are Python floats, never buffers, so that loading through a meta device cannot
    lose them.

    Attributes:
        site: where the sublayer stands.
        gate: factor on the branch output; 1.0 but during a residual warm-up (see :meth:`Scheme.gate`). One that has
            been another number is a tensor from then on, so that compiled code takes the next value as it comes.
        drop_path: probability of stochastic depth (Huang et al., arXiv 1603.09382): in training, each sequence of the
            batch loses this sublayer's output with it, for all streams at once, and the others' grows by 1/(1-p).
        gates_itself: whether ``write`` calls :meth:`gated`. One that first normalises the branch output has to, as a
            factor before a norm is lost.
    """

    gate: float | Tensor = 1.0
    drop_path: float = 0.0
    gates_itself: ClassVar[bool] = False

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    @abstractmethod
    def read(self, streams: Streams) -> tuple[Tensor, Carry]:
        """The branch's input (…, d) before the host's own norm, in the streams' dtype, and the carry."""

    @abstractmethod
    def write(self, carry: Carry, o: Tensor) -> Streams:
        """The streams after the branch's output ``o`` (…, d) is folded in."""

    def terms(self) -> tuple[Term, ...] | None:
        """``read`` and ``write`` as data, one term a stream, where they are no more than that; else ``None``."""
        return None

    def gated(self, o: Tensor) -> Tensor:
        """The branch output ``o`` (batch, …, d) under the gate and stochastic depth, in its own dtype."""
        if self.drop_path and self.training:
            kept = o.new_empty((o.shape[0], *(1 for _ in o.shape[1:]))).bernoulli_(1 - self.drop_path)
            o = o * (kept / (1 - self.drop_path))
        return o * self.gate if isinstance(self.gate, Tensor) or self.gate != 1.0 else o

    @abstractmethod
    def describe(self) -> dict[str, str | float]:
        """For tables: ``reads`` and ``writes`` as short equations, and ``scale``, the constant in them."""

    def reset_parameters(self) -> None:
        """Initial values of the parameters held directly (norms reset themselves). Draws no random numbers."""


class Readout(nn.Module, ABC):
    """The end of a stack: streams to the one hidden state that the host's final norm sees."""

    @abstractmethod
    def close(self, streams: Streams) -> Tensor:
        """The readout (…, d), in the streams' dtype."""

    def terms(self) -> tuple[Term, ...] | None:
        """``close`` as data, one term a stream, where it is no more than a sum of those; else ``None``."""
        return None

    @abstractmethod
    def describe(self) -> dict[str, str | float]:
        """For tables, as :meth:`Sublayer.describe`."""

    def reset_parameters(self) -> None:
        """As :meth:`Sublayer.reset_parameters`."""


class Block(nn.Module):
    """Base of every module whose forward carries finished streams in and out; probes find blocks by it."""

    def parts(self) -> tuple[tuple[nn.Module, ...], ...]:
        """For each sublayer in order, the modules whose parameters are its own: the residual part, branch and norms."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    """A residual scheme with its options, which are the dataclass fields.

    Attributes:
        stream_names: what the equations call the streams, in order; there may be more of them.
        paper: what to cite for the scheme, with its arXiv number; empty where that is not known.
        stream_dtype: ``"float32"`` keeps the streams in float32 in a narrower model (a bfloat16 stream loses an update
            smaller than 1/256 of it); ``None`` keeps them in the dtype of the embedding.
        warmup_steps: T of a progressive residual warm-up (ProRes, arXiv 2603.05369, which takes 1000): at training step
            t, from 1, the branch output of block l is multiplied by min(t / (T·(l+1)), 1), so deeper blocks open later
            and the last of L opens at step T·L. ``None`` is no warm-up. A model that is not in training is open.
    """

    name: ClassVar[str]
    stream_names: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[str] = ""
    stream_dtype: Literal["float32"] | None = None
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        choose(self, "stream_dtype", None, "float32")
        if self.warmup_steps == 0 and not isinstance(self.warmup_steps, bool):
            raise ConfigError(f"option 'warmup_steps' of scheme '{self.name}' cannot be 0: a schedule of no steps")
        count(self, "warmup_steps", optional=True)

    def stream_name(self, index: int) -> str:
        """What the scheme's equations call the stream of that place in :data:`Streams`."""
        return self.stream_names[index] if index < len(self.stream_names) else f"s{index}"

    @abstractmethod
    def open(self, h: Tensor) -> Streams:
        """The starting streams for an embedding ``h`` (…, d)."""

    @abstractmethod
    def sublayer(self, site: Site, norm: NormSpec) -> Sublayer:
        """The residual part of the sublayer at ``site``, its own norms being of the host's kind ``norm``."""

    @abstractmethod
    def readout(self, norm: NormSpec) -> Readout:
        """The end of the stack."""

    def input_norm(self, site: Site) -> NormPlace:
        """Where the host's own norm of this sublayer goes: before the branch, after it, or nowhere (it is removed)."""
        return "before"

    def input_scale(self, site: Site) -> float:
        """Constant factor on the output of the host's own norm, where it stands before the branch."""
        return 1.0

    def branch_norms(self, site: Site) -> tuple[str, ...]:
        """Which of ``"q"``, ``"k"``, ``"v"`` the attention normalises per head, before RoPE and before the cache."""
        return ()

    def init_gain(self, role: str, site: Site) -> float:
        """Factor on the initial weights of a ``role`` at ``site``: ``"q"``, ``"k"``, ``"v"``, ``"o"`` or ``"mlp"``."""
        return 1.0

    def decay(self, name: str) -> bool:
        """Whether the parameter ``name`` may get weight decay; norms and vectors never do, whatever this says."""
        return True

    def gate(self, site: Site, step: int) -> float:
        """Factor on the branch output at training step ``step`` (from 1)."""
        if self.warmup_steps is None:
            return 1.0
        return min(step / (self.warmup_steps * (site.block + 1)), 1.0)

    def opening(self, name: str) -> float:
        """What is added in all to the parameter ``name`` where a part that starts closed is opened on a schedule."""
        return 0.0

    def is_pre_norm(self) -> bool:
        """Whether a model of this scheme is Pre-Norm: Y = Y + F(c·N(Y)), N the host's norm, c the input scale."""
        return False

    def upcycled(self, source: Scheme, *, final_norm: bool = True) -> Scheme:
        """This scheme as a trained model of another one can take it up, computing the same function.

        That is so if what both schemes have of parameters of their own, by name, is kept, all else that is new has its
        initial values, and the host's own norms make up for a difference in :meth:`input_scale`.

        Args:
            source: the model's scheme; ``pre`` for a model of a host as it is.
            final_norm: whether a norm follows the readout in that model.

        Returns:
            The scheme with the options that this takes.

        Raises:
            ConfigError: no values of the new parameters make the model compute the same.
        """
        alike = replace(source, stream_dtype=self.stream_dtype, warmup_steps=self.warmup_steps) == self
        if alike or (source.is_pre_norm() and self.is_pre_norm()):
            return self
        raise ConfigError(
            f"a model of scheme '{source.label}' cannot go on as '{self.label}': no values of the new parameters make "
            "it compute the same function"
        )

    def options(self) -> dict[str, Any]:
        """The options as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def label(self) -> str:
        """The name, and each option that is not the default: what :func:`parse_scheme` reads."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        words = (f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in chosen.items())
        return ":".join((self.name, *words))


def choose(scheme: Scheme, option: str, *valid: object) -> None:
    """Check that ``scheme.option`` is one of ``valid``, the type included (``1`` is not ``True``).

    Raises:
        ConfigError: otherwise, naming the nearest valid value.
    """
    value = getattr(scheme, option)
    if any(type(value) is type(v) and value == v for v in valid):
        return
    hint = nearest(str(value), (str(v) for v in valid))
    raise ConfigError(f"option '{option}' of scheme '{scheme.name}' cannot be {value!r}: {hint}")


def count(scheme: Scheme, option: str, *, optional: bool = False) -> None:
    """Check that ``scheme.option`` is a whole number of at least 1, or ``None`` where it is ``optional``.

    Raises:
        ConfigError: otherwise.
    """
    value = getattr(scheme, option)
    if (optional and value is None) or (type(value) is int and value >= 1):
        return
    wanted = "a whole number of at least 1" + (", or none" if optional else "")
    raise ConfigError(f"option '{option}' of scheme '{scheme.name}' must be {wanted}, not {value!r}")


_REGISTRY: dict[str, type[Scheme]] = {}
S = TypeVar("S", bound=type[Scheme])


def register(cls: S) -> S:
    """Class decorator: make a scheme available under its ``name``.

    Raises:
        ConfigError: the name is taken.
    """
    if cls.name in _REGISTRY:
        raise ConfigError(f"a scheme named '{cls.name}' is registered already ({_REGISTRY[cls.name].__qualname__})")
    _REGISTRY[cls.name] = cls
    return cls


def schemes() -> tuple[str, ...]:
    """The names of all registered schemes, sorted."""
    return tuple(sorted(_REGISTRY))


def make_scheme(name: str | Scheme, **options: Any) -> Scheme:
    """The scheme called ``name`` with ``options``; a :class:`Scheme` is returned as it is.

    Raises:
        ConfigError: unknown name, unknown option, or a value that the option cannot have.
    """
    if isinstance(name, Scheme):
        if options:
            raise ConfigError(f"scheme '{name.name}' is given as an object, so it takes no further options")
        return name
    if not isinstance(name, str):
        raise ConfigError(f"a scheme is named by a string, not by {name!r}")
    if name not in _REGISTRY:
        raise ConfigError(f"unknown scheme '{name}': {nearest(name, schemes())}")
    cls = _REGISTRY[name]
    valid = [f.name for f in fields(cls)]
    for option in options:
        if option not in valid:
            raise ConfigError(f"scheme '{name}' has no option '{option}': {nearest(option, valid)}")
    return cls(**options)


def parse_scheme(text: str) -> Scheme:
    """The scheme that a word names, for command lines and tables: ``"pre"``, ``"siamese:x=hybrid:depth_scale=paper"``.

    Values are read as JSON where they are that (``true``, ``0.5``, ``null``), else as they stand.

    Raises:
        ConfigError: as :func:`make_scheme`, or for an option without a value.
    """
    name, *words = text.split(":")
    options = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals or not option:
            raise ConfigError(f"'{word}' in scheme '{text}' is no option with a value: write {name}:option=value")
        try:
            options[option] = json.loads(value)
        except json.JSONDecodeError:
            options[option] = value
    return make_scheme(name, **options)
