"""What passes through each sublayer: the streams, the branch's output, and the gradients of both.

All of it is measured in the model's own forward and backward pass over held-out batches, in evaluation mode. Let s be a
stream (…, d) as a sublayer reads it, o what its branch gives (behind the host's dropout and a norm that stands there,
before the gate of a residual warm-up), t a token, and d the width:

    rms              √ mean over tokens and the d numbers of s²
    l2               mean over tokens of ‖s_t‖
    branch_rms, branch_l2    the same of o
    ratio            branch_rms / rms
    cosine           mean over tokens of o_t·s_t / (‖o_t‖ ‖s_t‖), 0 where either is 0
    share, projection        means over tokens of the two shares of :func:`siamesenorm.probes.shares_of`
    stream_grad      ‖∂ℓ/∂s‖ over all tokens of a batch
    branch_grad      ‖∂ℓ/∂o‖
    parameter_grad   ‖∂ℓ/∂θ‖, θ all parameters that are the sublayer's own: branch, norms, and what the scheme adds

ℓ is a batch's mean loss. Gradients are means over batches of the norm in each; all else is over the tokens of all
batches. A stream of (…, n, d) is n streams. The gradient of a stream is that of this sublayer's read and all behind it;
where two streams start as one tensor, each has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..residual import Step, Streams, Sublayer, finished, terms_of, watched
from .subject import Batch, Row, as_it_was, blocks_of, in_backward, lane_names, lanes
from .terms import shares_of

__all__ = ["site_table"]

Runner = Callable[[Iterable[Step], Streams], Streams]


def site_table(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    gradients: bool = True,
    progress: Callable[[int], None] | None = None,
) -> list[Row]:
    """One row for each sublayer and stream, with the columns that the module's docstring defines.

    Beside them, ``sublayer``, ``block`` and ``kind`` say where the row belongs, ``stream`` which stream it is about,
    and ``scale`` by what o is multiplied in the update of this stream, where the sublayer declares it. What is about o
    or the parameters is the same in all rows of a sublayer. Without ``gradients`` those columns are missing.

    The backward pass runs each block once more, so that no more than one block's activations are held at a time, and
    no more than one parameter's gradient.

    Args:
        model: rewired, or a :class:`~siamesenorm.residual.Stack`; left as it was.
        batches: at least one.
        gradients: measure gradients too.
        progress: told after each batch that one more is done.

    Raises:
        ConfigError: the model has no streams.
    """
    measured = _Sites(model)
    with as_it_was(model):
        for batch in batches:
            if gradients:
                with measured.parameters_heard(), watched(measured.with_gradients), torch.enable_grad():
                    (batch.loss(batch.predict()) / max(batch.count, 1)).backward()
            else:
                with watched(measured.without_gradients), torch.no_grad():
                    batch.predict()
            measured.end_batch()
            if progress is not None:
                progress(1)
    return measured.rows(gradients)


@dataclass
class _Measured:
    """Sums at one sublayer; of the streams, one number each."""

    sublayer: Sublayer
    names: list[str]
    scales: Sequence[float | None]
    tokens: int = 0
    width: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    grad_sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value


class _Sites:
    """Watches the blocks of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: dict[int, _Measured] = {}
        self.batches = 0
        self._squares: dict[int, Tensor] = {}
        # By the sublayer's identity, as a block may be one of another model that runs meanwhile.
        self._own = {
            id(parts[0]): {id(parameter) for part in parts for parameter in part.parameters()}
            for block in blocks_of(model)
            for parts in block.parts()
        }

    def without_gradients(self, steps: Sequence[Step], streams: Streams, run: Runner) -> Streams:
        """Run a block step by step, and look at each."""
        if id(steps[0].sublayer) not in self._own:
            return run(steps, streams)
        for step in steps:
            streams = self._step(step, streams, run, listen=False)
        return streams

    def with_gradients(self, steps: Sequence[Step], streams: Streams, run: Runner) -> Streams:
        """The same, so that the block runs again in the backward pass and its streams' gradients are heard."""
        if id(steps[0].sublayer) not in self._own:
            return run(steps, streams)

        def block(*flat: Tensor) -> Streams:
            for step in steps:
                flat = self._step(step, flat, run, listen=not in_backward())
            return flat

        if not any(stream.requires_grad for stream in streams):
            streams = tuple(stream.detach().requires_grad_() for stream in streams)
        return checkpoint(block, *streams, use_reentrant=False)

    def _step(self, step: Step, streams: Streams, run: Runner, *, listen: bool) -> Streams:
        if torch.is_grad_enabled():
            # Streams that start as one tensor have gradients of their own from here on.
            streams = tuple(stream.view_as(stream) for stream in streams)
        outputs: list[Tensor] = []

        def branch(*inputs: Tensor) -> Tensor:
            outputs.append(step.branch(*inputs))
            return outputs[0]

        after = run((step._replace(branch=branch),), streams)
        if not in_backward():
            self._look(step, finished(streams), outputs[0], listen)
        return after

    def _look(self, step: Step, streams: Streams, o: Tensor, listen: bool) -> None:
        site = step.sublayer.site
        if site.sublayer not in self.found:
            names = lane_names(self.model, streams, o)
            declared = terms_of(step.sublayer)
            scales: Sequence[float | None] = [term.scale for term in declared] if declared else [None] * len(names)
            self.found[site.sublayer] = _Measured(step.sublayer, names, scales)
        measured = self.found[site.sublayer]
        measured.tokens += o[..., 0].numel()
        measured.width = o.shape[-1]
        with torch.no_grad():
            size = _sizes(o)
            by_size, by_projection = shares_of(step.sublayer, streams, o)
            each = lanes(streams, o)
            sizes = [_sizes(lane) for lane in each]
            measured.add(
                o_squares=size.square().sum(),
                o_sizes=size.sum(),
                squares=torch.stack([own.square().sum() for own in sizes]),
                sizes=torch.stack([own.sum() for own in sizes]),
                cosine=torch.stack([_cosines(o, size, lane, own) for lane, own in zip(each, sizes, strict=True)]),
                share=by_size,
                projection=by_projection,
            )
        if listen:
            grads = measured.grads = {
                "branch": o.new_zeros((), dtype=torch.float64),
                "stream": o.new_zeros(len(each), dtype=torch.float64),
            }
            start = 0
            for stream in streams:
                count = len(lanes((stream,), o))
                if stream.requires_grad:
                    stream.register_hook(_adder(grads["stream"], slice(start, start + count), o.ndim))
                start += count
            if o.requires_grad:
                o.register_hook(_adder(grads["branch"], ..., o.ndim))

    @contextmanager
    def parameters_heard(self) -> Iterator[None]:
        """Take the size of each parameter's gradient as soon as it is there, and drop the gradient."""

        def hear(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._squares[id(parameter)] = parameter.grad.double().square().sum()
            parameter.grad = None

        handles = [
            parameter.register_post_accumulate_grad_hook(hear)
            for parameter in self.model.parameters()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_batch(self) -> None:
        """Take the batch's gradients into account."""
        self.batches += 1
        for measured in self.found.values():
            if not measured.grads:
                continue
            own = [self._squares[each] for each in self._own[id(measured.sublayer)] if each in self._squares]
            measured.grads["parameter"] = torch.stack(own).sum() if own else measured.grads["branch"].new_zeros(())
            for name, squares in measured.grads.items():
                measured.grad_sums[name] = measured.grad_sums.get(name, torch.zeros_like(squares)) + squares.sqrt()
            measured.grads = {}
        self._squares.clear()

    def rows(self, gradients: bool) -> list[Row]:
        """The table."""
        rows: list[Row] = []
        for _, measured in sorted(self.found.items()):
            site, tokens = measured.sublayer.site, measured.tokens
            numbers = tokens * measured.width
            sums: dict[str, Any] = {name: value.tolist() for name, value in measured.sums.items()}
            grads: dict[str, Any] = {
                name: (value / self.batches).tolist() for name, value in measured.grad_sums.items()
            }
            branch_rms = (sums["o_squares"] / numbers) ** 0.5
            for lane, name in enumerate(measured.names):
                rms = (sums["squares"][lane] / numbers) ** 0.5
                row: Row = {
                    "sublayer": site.sublayer,
                    "block": site.block,
                    "kind": site.kind,
                    "stream": name,
                    "rms": rms,
                    "l2": sums["sizes"][lane] / tokens,
                    "branch_rms": branch_rms,
                    "branch_l2": sums["o_sizes"] / tokens,
                    "ratio": branch_rms / rms if rms else float("inf"),
                    "cosine": sums["cosine"][lane] / tokens,
                    "share": sums["share"][lane] / tokens,
                    "projection": sums["projection"][lane] / tokens,
                    "scale": measured.scales[lane],
                }
                if gradients:
                    row |= {
                        "stream_grad": grads["stream"][lane],
                        "branch_grad": grads["branch"],
                        "parameter_grad": grads["parameter"],
                    }
                rows.append(row)
        return rows


def _sizes(x: Tensor) -> Tensor:
    """The length of each token's vector, in float64."""
    return torch.linalg.vector_norm(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1).double()


def _cosines(o: Tensor, o_sizes: Tensor, stream: Tensor, sizes: Tensor) -> Tensor:
    """The cosine of each token's two vectors, summed; 0 where there is none."""
    product = (o.to(torch.promote_types(o.dtype, torch.float32)) * stream).sum(-1).double()
    lengths = o_sizes * sizes
    return torch.where(lengths > 0, product / lengths, 0.0).sum()


def _adder(into: Tensor, place: Any, ndim: int) -> Callable[[Tensor], None]:
    """A hook that adds up the squares of a gradient, lane by lane where there are some."""

    def add(gradient: Tensor) -> None:
        squares = gradient.double().square()
        if gradient.ndim > ndim:
            into[place] += squares.flatten(0, -3).sum((0, 2))
        else:
            into[place] += squares.sum()

    return add
