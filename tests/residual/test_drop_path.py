"""Stochastic depth: a sequence loses a sublayer's output as a whole, for all of its streams, or gets more of it."""

from __future__ import annotations

import pytest
import torch

from siamesenorm.probes import capture_streams
from siamesenorm.residual import NormSpec, Site, Step, make_scheme, set_step, through
from tests.residual import test_against_oracle, test_streams
from tests.residual.test_against_oracle import D, make_stack, named

CASES = [
    ("pre", {}),
    ("post", {}),
    *test_against_oracle.BASELINES,
    *(("siamese", options) for options in ({}, {"x": "hybrid"}, {"x": "hybrid", "first_block_pre": True})),
    *(("siamese", {"topology": topology}) for topology in ("resi_dual", "single")),
    *test_streams.ONE_EACH,
]


def sequences(batch):
    return (2 * torch.randn(batch, 5, D, dtype=torch.float64)).requires_grad_()


def sublayer(scheme="siamese", **options):
    site = Site(sublayer=2, block=1, kind="attention", blocks=3, sublayers=6)
    return make_scheme(scheme, **options).sublayer(site, NormSpec("rms", D)).double()


@pytest.mark.parametrize("place", [(0, 0), (1, 0), (2, 1)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_each_sequence_has_the_output_twice_or_not_at_all(case, place):
    """At p = 1/2: as behind a gate at 2, or at 0, whatever the scheme does with the output."""
    scheme, options = case
    stack, h = make_stack(scheme, **options), sequences(12)
    residual = stack.blocks[place[0]].residuals[place[1]]

    def run():
        with capture_streams(stack) as streams:
            out = stack(h)
        (gradient,) = torch.autograd.grad(out.square().sum(), h)
        return [out, gradient, *(stream for each in streams for stream in each)]

    residual.drop_path = 0.5
    dropped = run()
    residual.drop_path = 0.0
    residual.gate = 0.0
    without = run()
    residual.gate = 2.0
    twice = run()

    kept = (dropped[0] - twice[0]).flatten(1).abs().amax(1) < 1e-12
    assert 0 < kept.sum() < len(kept)
    for got, a, b in zip(dropped, without, twice, strict=True):
        expected = torch.where(kept.view(-1, *(1 for _ in got.shape[1:])), b, a)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(without[0], twice[0])


@pytest.mark.parametrize("x", ["post", "hybrid"])
def test_both_streams_of_a_sequence_lose_the_same_update(x):
    residual = sublayer(x=x)
    residual.drop_path = 0.25
    o = torch.randn(40, 5, D, dtype=torch.float64)
    streams = tuple(torch.randn(2, 40, 5, D, dtype=torch.float64))
    _, (x_kept, y) = residual.read(streams)
    new_x, new_y = through([Step(residual, lambda u: o)], streams)
    kept = (new_y != y).flatten(1).any(1)
    assert 0 < kept.sum() < 40
    update = torch.where(kept[:, None, None], o / 0.75, 0.0)
    torch.testing.assert_close(new_y, y + update)
    torch.testing.assert_close(new_x, x_kept + 0.5 * update)


@pytest.mark.parametrize("p", [0.1, 0.6])
def test_how_often_and_how_much(p):
    residual = sublayer("pre")
    residual.drop_path = p
    kept = residual.gated(torch.ones(40_000, 1))
    assert set(kept.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
    assert (kept == 0).float().mean().item() == pytest.approx(p, abs=0.01)
    assert kept.mean().item() == pytest.approx(1, abs=0.02)


def test_none_in_evaluation_nor_at_a_rate_of_zero():
    o, state = torch.randn(8, 3, D), torch.random.get_rng_state()
    residual = sublayer()
    assert residual.gated(o) is o
    residual.drop_path = 0.9
    assert residual.eval().gated(o) is o
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(6, D), (6, 4, D), (6, 2, 3, D), (0, 4, D)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_any_shape_and_dtype(shape, dtype):
    residual = sublayer("pre")
    residual.drop_path = 0.5
    o = torch.randn(shape).to(dtype)
    out = residual.gated(o)
    assert (out.dtype, out.shape) == (dtype, o.shape)
    assert all(torch.equal(row, 0 * whole) or torch.equal(row, 2 * whole) for row, whole in zip(out, o, strict=True))


def test_a_warm_up_goes_on_beside_it():
    stack = make_stack("siamese", warmup_steps=10)
    set_step(stack, stack.scheme, 5)
    residual = stack.blocks[0].residuals[1]
    residual.drop_path = 0.5
    out = residual.gated(torch.ones(64, D, dtype=torch.float64))
    assert set(out.unique().tolist()) == {0.0, 1.0}


def test_it_is_exported_for_any_batch():
    stack = make_stack("siamese", blocks=1)
    stack.blocks[0].residuals[0].drop_path = 0.5
    batch = torch.export.Dim("batch", max=64)
    exported = torch.export.export(stack, (sequences(3).detach(),), dynamic_shapes=({0: batch},))
    h = sequences(20).detach()
    torch.manual_seed(4)
    out = exported.module()(h)
    torch.manual_seed(4)
    torch.testing.assert_close(out, stack(h))
