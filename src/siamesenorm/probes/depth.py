"""What depth does: blocks removed, how far apart blocks are, how much later blocks depend on earlier ones.

A model of L blocks has depths 0 to L: at depth l, its streams are those that block l - 1 returned, and at 0 those that
the stack was opened with. To remove a block is to hand its streams on as they are. Depth l of the logit lens
(nostalgebraist, 2020) is what the model predicts with all blocks from l on removed: by its own readout, final norm and
head from the streams at depth l. So "the deepest k blocks removed" and "the lens at depth L - k" are one and the same.

    loss             mean loss over what counts, with all blocks from l on removed
    loss_increase    that, less the whole model's loss
    divergence       mean KL(whole ‖ removed) between what both predict, 0 at depth L

    loss, loss_increase of a block     the same with that block alone removed
    effect(s, l)     how much block l's branches change when block s < l is removed:
                     √( Σ ‖o' - o‖² / Σ ‖o‖² ) over all tokens and the branch outputs o of block l, o' with s removed
    angle(l, n)      arccos(h_l·h_(l+n) / (‖h_l‖ ‖h_(l+n)‖)) / π, a mean over positions: 0 is one direction, 1/2 a right
                     angle (Gromov et al., arXiv 2403.17887, who take the last position). h_l is the readout at depth l,
                     or a stream. Positions are spread evenly over a sequence, the last among them, at most eight and so
                     few that those of all depths are no more than one sequence, or else the last alone.
    effective_rank   exp(-Σ p ln p), p_i = σ_i / Σ σ (Roy and Vetterli, 2007), σ the singular values of the readouts at
                     a depth: one row a token of any batch, less their mean
    participation    (Σ λ)² / Σ λ², λ = σ², the eigenvalues of the readouts' covariance

For the last two, a matrix of d × d numbers is kept for each depth, d the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..residual import Step, Streams, close_streams, finished, watched
from .subject import Batch, Row, as_it_was, blocks_of, lane_names, lanes, readout_of, uncompiled

__all__ = ["DEPTH_PROBES", "Depth", "depth_tables", "effective_rank", "forwards", "participation", "removed"]

DEPTH_PROBES = ("lens", "removal", "skips", "angles", "rank")
_MOST_POSITIONS = 8
Runner = Callable[[Iterable[Step], Streams], Streams]


@dataclass(frozen=True)
class Depth:
    """What `depth_tables` found; a table that was not asked for is empty.

    Attributes:
        loss: of the whole model, mean over what counts.
        depths: rows of ``depth``, with ``removed`` (L - depth), ``loss``, ``loss_increase`` and ``divergence`` of the
            lens, and ``effective_rank`` and ``participation``.
        blocks: rows of ``block``, ``loss`` and ``loss_increase``.
        skips: rows of ``skipped``, ``block`` and ``effect``.
        angles: rows of ``of`` (``readout``, or a stream that is there at every depth), ``depth``, ``distance`` and
            ``angle``.
    """

    loss: float
    depths: list[Row]
    blocks: list[Row]
    skips: list[Row]
    angles: list[Row]


def depth_tables(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    only: Sequence[str] = DEPTH_PROBES,
    progress: Callable[[int], None] | None = None,
) -> Depth:
    """Measure a model in depth.

    Args:
        model: rewired, or a :class:`~siamesenorm.residual.Stack`; left as it was.
        batches: at least one. Of each, the whole model's predictions are kept while others are made.
        only: of :data:`DEPTH_PROBES`. ``lens`` takes a forward pass of each depth, ``removal`` and ``skips`` one
            without each block; ``skips`` runs the blocks behind it twice in that.
        progress: told after each forward pass; there are as many in a batch as :func:`forwards` says.

    Raises:
        ConfigError: the model has no streams.
    """
    told = progress or (lambda done: None)
    measured = _Depth(model, only)
    with as_it_was(model), torch.no_grad():
        for batch in batches:
            measured.batch(batch, told)
    return measured.tables()


def forwards(blocks: int, only: Sequence[str] = DEPTH_PROBES) -> int:
    """The forward passes that `depth_tables` takes for each batch of a model of so many blocks."""
    return 1 + blocks * ("lens" in only) + blocks * ("removal" in only or "skips" in only)


@contextmanager
def removed(model: nn.Module, blocks: Iterable[int]) -> Iterator[None]:
    """A model without the blocks of these numbers, counted from 0: each hands its streams on as they are.

    Raises:
        ConfigError: the model has no streams.
    """
    without = set(blocks)
    own = _own(model)

    def watch(steps: tuple[Step, ...], streams: Streams, run: Runner) -> Streams:
        sublayer = steps[0].sublayer
        return streams if id(sublayer) in own and sublayer.site.block in without else run(steps, streams)

    with uncompiled(), watched(watch):
        yield


def effective_rank(covariance: Tensor) -> float:
    """exp of the entropy of the singular values, the roots of the eigenvalues of a covariance (d, d).

    NaN where a number of it is not finite.
    """
    sigma = _eigenvalues(covariance).sqrt()
    if sigma.isnan().any():
        return math.nan
    if not sigma.sum() > 0:
        return 0.0
    p = sigma / sigma.sum()
    return float(torch.special.entr(p).sum().exp())


def participation(covariance: Tensor) -> float:
    """(Σ λ)² / Σ λ² of the eigenvalues of a covariance (d, d): 1 for one direction, d where all weigh the same."""
    values = _eigenvalues(covariance)
    if values.isnan().any():
        return math.nan
    return float(values.sum().square() / values.square().sum()) if values.sum() > 0 else 0.0


@dataclass
class _Spectrum:
    """The covariance of vectors that come a batch at a time, in float64."""

    count: int = 0
    total: Tensor | None = None
    products: Tensor | None = None

    def add(self, x: Tensor) -> None:
        # Row by row: a copy in float64 is twice the size.
        for row in x:
            flat = row.reshape(-1, x.shape[-1]).double()
            self.count += len(flat)
            self.total = flat.sum(0) if self.total is None else self.total + flat.sum(0)
            products = flat.T @ flat
            self.products = products if self.products is None else self.products + products

    def covariance(self) -> Tensor:
        assert self.total is not None
        assert self.products is not None
        mean = self.total / self.count
        return self.products / self.count - mean[:, None] * mean


@dataclass
class _Angles:
    """Sums of angles between all pairs of depths, of the readout or a stream."""

    sums: dict[tuple[int, int], float] = field(default_factory=dict)
    positions: int = 0

    def add(self, by_depth: Sequence[Tensor]) -> None:
        unit = [each.double() for each in by_depth]
        unit = [each / torch.linalg.vector_norm(each, dim=-1, keepdim=True).clamp_min(1e-300) for each in unit]
        self.positions += unit[0][..., 0].numel()
        for start, first in enumerate(unit):
            for end in range(start + 1, len(unit)):
                # Two equal vectors have a product of 1 but for rounding, whose arc cosine would be 1e-8.
                half = torch.linalg.vector_norm(first - unit[end], dim=-1) / 2
                angle = 2 * torch.asin(half.clamp(max=1)) / math.pi
                self.sums[start, end] = self.sums.get((start, end), 0.0) + float(angle.sum())

    def rows(self, of: str) -> list[Row]:
        return [
            {"of": of, "depth": start, "distance": end - start, "angle": total / self.positions}
            for (start, end), total in sorted(self.sums.items())
        ]


class _Depth:
    """Sums over batches."""

    def __init__(self, model: nn.Module, only: Sequence[str]) -> None:
        self.model = model
        self.only = frozenset(only)
        self.blocks = len(blocks_of(model))
        self.readout = readout_of(model)
        self.own = _own(model)
        self.count = 0
        self.loss = 0.0
        self.lens = [[0.0, 0.0] for _ in range(self.blocks)]
        self.without = [0.0] * self.blocks
        self.effects: dict[tuple[int, int], list[float]] = {}
        self.spectra = [_Spectrum() for _ in range(self.blocks + 1)]
        self.angles: dict[str, _Angles] = {}

    def batch(self, batch: Batch, told: Callable[[int], None]) -> None:
        """All forward passes over a batch."""
        kept: dict[str, list[Tensor]] = {}
        with watched(lambda steps, streams, run: self._along(kept, steps, streams, run)):
            whole = batch.predict()
        for of, by_depth in kept.items():
            # What was not there at every depth has no distances.
            if len(by_depth) == self.blocks + 1:
                self.angles.setdefault(of, _Angles()).add(by_depth)
        kept.clear()
        self.count += batch.count
        self.loss += float(batch.loss(whole))
        told(1)
        if "lens" in self.only:
            for depth in range(self.blocks):
                with removed(self.model, range(depth, self.blocks)):
                    other = batch.predict()
                self.lens[depth][0] += float(batch.loss(other))
                self.lens[depth][1] += float(batch.divergence(whole, other))
                told(1)
        del whole
        if {"removal", "skips"} & self.only:
            for block in range(self.blocks):
                self.without[block] += float(batch.loss(self._skip(batch, block)))
                told(1)

    def _along(self, kept: dict[str, list[Tensor]], steps: tuple[Step, ...], streams: Streams, run: Runner) -> Streams:
        """Run a block, and keep what angles and ranks need of the streams before it and, at the end, behind it."""
        if id(steps[0].sublayer) not in self.own:
            return run(steps, streams)
        block = steps[0].sublayer.site.block
        if block == 0:
            self._at(kept, 0, streams)
        after = run(steps, streams)
        self._at(kept, block + 1, after)
        return after

    def _at(self, kept: dict[str, list[Tensor]], depth: int, streams: Streams) -> None:
        if not {"angles", "rank"} & self.only:
            return
        readout = close_streams(self.readout, streams)
        if "rank" in self.only:
            self.spectra[depth].add(readout)
        if "angles" in self.only:
            single = finished(streams)
            named = zip(lane_names(self.model, single, readout), lanes(single, readout), strict=True)
            for of, each in (("readout", readout), *named):
                if depth == 0 or len(kept.get(of, ())) == depth:
                    kept.setdefault(of, []).append(_some(each, self.blocks))

    def _skip(self, batch: Batch, skipped: int) -> Tensor:
        """What the model predicts without one block; the blocks behind it also run as if it were there."""
        if "skips" not in self.only:
            with removed(self.model, [skipped]):
                return batch.predict()
        whole: Streams = ()

        def watch(steps: tuple[Step, ...], streams: Streams, run: Runner) -> Streams:
            nonlocal whole
            block = steps[0].sublayer.site.block
            if id(steps[0].sublayer) not in self.own or block < skipped:
                return run(steps, streams)
            if block == skipped:
                whole = run(steps, streams)
                return streams
            given: list[Tensor] = []
            whole = run([_told(step, given.append) for step in steps], whole)
            sums = self.effects.setdefault((skipped, block), [0.0, 0.0])

            def compare(o: Tensor) -> None:
                with_all = given.pop(0)
                sums[0] += _square(o - with_all)
                sums[1] += _square(with_all)

            return run([_told(step, compare) for step in steps], streams)

        with watched(watch):
            return batch.predict()

    def tables(self) -> Depth:
        """Means over all batches."""
        count = max(self.count, 1)
        whole = self.loss / count
        depths: list[Row] = []
        for depth in range(self.blocks + 1):
            row: Row = {"depth": depth, "removed": self.blocks - depth}
            if "lens" in self.only:
                loss, divergence = self.lens[depth] if depth < self.blocks else (self.loss, 0.0)
                row |= {
                    "loss": loss / count,
                    "loss_increase": loss / count - whole,
                    "divergence": divergence / count,
                }
            if "rank" in self.only:
                covariance = self.spectra[depth].covariance()
                row |= {"effective_rank": effective_rank(covariance), "participation": participation(covariance)}
            depths.append(row)
        without = [loss / count for loss in self.without]
        return Depth(
            whole,
            depths if {"lens", "rank"} & self.only else [],
            [
                {"block": block, "loss": loss, "loss_increase": loss - whole}
                for block, loss in enumerate(without)
                if "removal" in self.only
            ],
            [
                {"skipped": skipped, "block": block, "effect": math.sqrt(change / size) if size else math.nan}
                for (skipped, block), (change, size) in sorted(self.effects.items())
            ],
            [row for of, angles in self.angles.items() for row in angles.rows(of)],
        )


def _own(model: nn.Module) -> set[int]:
    return {id(parts[0]) for block in blocks_of(model) for parts in block.parts()}


def _told(step: Step, tell: Callable[[Tensor], object]) -> Step:
    """A step that tells what its branch gives."""

    def branch(*inputs: Tensor) -> Tensor:
        o = step.branch(*inputs)
        tell(o)
        return o

    return step._replace(branch=branch)


def _some(x: Tensor, blocks: int) -> Tensor:
    """Some positions of x (batch, seq, d), a copy; all of x (batch, d)."""
    if x.ndim < 3:
        return x.clone()
    length = x.shape[-2]
    count = max(1, min(_MOST_POSITIONS, length // (blocks + 1)))
    return x[..., [length - 1 - index * length // count for index in range(count)], :]


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())


def _eigenvalues(covariance: Tensor) -> Tensor:
    """At least 0, and exactly 0 where they are within rounding of it; NaN where a number is not finite."""
    if not covariance.isfinite().all():
        return covariance.new_full(covariance.shape[:1], math.nan)
    values = torch.linalg.eigvalsh(covariance)
    least = values[-1].clamp_min(0) * len(values) * torch.finfo(values.dtype).eps
    return torch.where(values > least, values, 0.0)
