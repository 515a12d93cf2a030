"""What passes through each sublayer: by hand where a branch is a constant, and against plain equations in float64."""

from __future__ import annotations

import math

import pytest
import torch

import siamesenorm
from siamesenorm.probes import capture_streams, read_terms, removed, shares_of, site_table
from siamesenorm.residual import ConfigError, Stack, set_step
from siamesenorm.residual.mixing import rms_scores
from tests.hosts.test_streams import STREAMS
from tests.hosts.tiny import host
from tests.parity import relative_error
from tests.probes.models import (
    constant_stack,
    every_modality,
    of_stack,
    of_text,
    text_and_batch,
)
from tests.residual.test_against_oracle import Branch, D, embedding, make_stack

MODALITIES = ("text", "mixture", "parallel", "vit", "dit")


@pytest.fixture(scope="module")
def modalities():
    return every_modality()


def column(rows, name, stream=None):
    return [row[name] for row in rows if stream in (None, row["stream"])]


def test_pre_norm_by_hand():
    """Y is (3, 4) and (0, 0), then (3, 9) and (0, 5), whatever the branches read."""
    stack = constant_stack([[0.0, 5.0], [-3.0, 0.0]])
    h = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]], dtype=torch.float64)
    first, second = site_table(stack, [of_stack(stack, h)])
    assert (first["sublayer"], first["block"], first["kind"], first["stream"]) == (0, 0, "attention", "Y")
    assert (second["sublayer"], second["kind"]) == (1, "mlp")
    assert first["rms"] == pytest.approx(math.sqrt(25 / 4))
    assert first["l2"] == pytest.approx(5 / 2)
    assert (first["branch_rms"], first["branch_l2"]) == pytest.approx((math.sqrt(50 / 4), 5))
    assert first["ratio"] == pytest.approx(math.sqrt(2))
    # The second token's stream has no direction.
    assert first["cosine"] == pytest.approx(4 / 5 / 2)
    assert second["rms"] == pytest.approx(math.sqrt((90 + 25) / 4))
    assert second["cosine"] == pytest.approx(-(3 / math.sqrt(90)) / 2)
    assert [second[name] for name in ("share", "projection", "scale")] == [1, 1, 1]
    # Of nothing, there is no share.
    assert first["share"] == first["projection"] == 0.5


@pytest.mark.parametrize("gradients", [True, False])
def test_siamese_norm_against_its_equations(gradients):
    stack = make_stack("siamese", blocks=2)
    h = embedding(requires_grad=False)
    batch = of_stack(stack, h, lambda out: (out**3).sum())
    rows = site_table(stack, [batch, batch], gradients=gradients)

    x, y = h.clone().requires_grad_(), h.clone().requires_grad_()
    kept = []
    for block in stack.blocks:
        for residual, norm, branch in zip(block.residuals, block.norms, block.branches, strict=True):
            parts = residual.norm_x(x), residual.norm_y(y)
            o = branch(norm(parts[0] + parts[1]))
            for each in (x, y, o):
                each.retain_grad()
            kept.append((x, y, o, parts, [*residual.parameters(), *norm.parameters(), *branch.parameters()]))
            x, y = parts[0] + o / math.sqrt(2 * (residual.site.block + 1)), y + o
    out = stack.norm(stack.readout.norm_x(x) + stack.readout.norm_y(y))
    ((out**3).sum() / len(h)).backward()

    assert len(rows) == 8
    for index, (x, y, o, parts, own) in enumerate(kept):
        for row, stream, part, name in zip(rows[2 * index :], (x, y), parts, "XY", strict=False):
            assert (row["sublayer"], row["stream"]) == (index, name)
            assert row["rms"] == pytest.approx(stream.square().mean().sqrt().item(), rel=1e-9)
            assert row["l2"] == pytest.approx(stream.norm(dim=-1).mean().item(), rel=1e-9)
            assert row["branch_rms"] == pytest.approx(o.square().mean().sqrt().item(), rel=1e-9)
            assert row["ratio"] == pytest.approx(row["branch_rms"] / row["rms"])
            assert row["cosine"] == pytest.approx(torch.cosine_similarity(o, stream, dim=-1).mean().item(), rel=1e-9)
            sizes = [each.norm(dim=-1) for each in parts]
            assert row["share"] == pytest.approx((part.norm(dim=-1) / sum(sizes)).mean().item(), rel=1e-9)
            u = parts[0] + parts[1]
            along = (part * u).sum(-1) / u.square().sum(-1)
            assert row["projection"] == pytest.approx(along.mean().item(), rel=1e-9)
            assert row["scale"] == pytest.approx(1 if name == "Y" else 1 / math.sqrt(2 * (index // 2 + 1)))
            if not gradients:
                assert "stream_grad" not in row
                continue
            assert row["stream_grad"] == pytest.approx(stream.grad.norm().item(), rel=1e-9)
            assert row["branch_grad"] == pytest.approx(o.grad.norm().item(), rel=1e-9)
            norm = torch.stack([parameter.grad.square().sum() for parameter in own]).sum().sqrt()
            assert row["parameter_grad"] == pytest.approx(norm.item(), rel=1e-9)


def test_a_tensor_of_n_streams_is_n_streams():
    stack = constant_stack([[1.0, 0.0], [0.0, 1.0]], "hyper", n=3, dynamic=False)
    with torch.no_grad():
        stack.blocks[0].residuals[0].static_write.copy_(torch.tensor([1.0, 2.0, 0.0]))
    h = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    rows = site_table(stack, [of_stack(stack, h)])
    assert column(rows, "stream") == ["H[0]", "H[1]", "H[2]"] * 2
    assert column(rows, "l2")[:3] == pytest.approx([5, 5, 5])
    assert column(rows, "l2")[3:] == pytest.approx([math.hypot(4, 4), math.hypot(5, 4), 5])
    # Sublayer 0 reads the first stream alone, sublayer 1 the second.
    assert column(rows, "share") == pytest.approx([1, 0, 0, 0, 1, 0], abs=1e-9)
    # A gradient reaches the streams that are read there or behind: all, by the readout's sum.
    assert all(gradient > 0 for gradient in column(rows, "stream_grad"))


def test_streams_that_grow():
    stack = constant_stack([[1.0, 0.0], [0.0, 1.0]], "attnres")
    h = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    rows = site_table(stack, [of_stack(stack, h)])
    assert [(row["sublayer"], row["stream"]) for row in rows] == [(0, "v0"), (1, "v0"), (1, "v1")]
    assert column(rows, "l2") == pytest.approx([5, 5, 1])
    # The mean of (3, 4) and (1, 0).
    assert column(rows, "share") == pytest.approx([1, 5 / 6, 1 / 6], rel=1e-6)
    assert column(rows, "projection") == pytest.approx([1, 28 / 32, 4 / 32], rel=1e-6)


class TestShares:
    """Of streams under weights that are known."""

    def streams(self, count):
        generator = torch.Generator().manual_seed(7)
        return tuple(torch.randn(2, 5, D, generator=generator, dtype=torch.float64) for _ in range(count))

    @pytest.mark.parametrize("scheme", ["attnres", "mgr"])
    def test_a_softmax(self, scheme):
        stack = make_stack(scheme)
        sublayer = stack.blocks[1].residuals[0]
        streams = self.streams(3)
        scale = getattr(sublayer, "scale", 1.0)
        weights = torch.cat(rms_scores(sublayer.query, streams, sublayer.eps, scale), -1).softmax(-1)
        with torch.no_grad():
            terms = read_terms(sublayer, streams, streams[0])
        for index, term in enumerate(terms):
            assert relative_error(term, weights[..., index : index + 1] * streams[index]) < 1e-5

    @pytest.mark.parametrize("dynamic", [True, False])
    def test_hyper_connections(self, dynamic):
        sublayer = make_stack("hyper", dynamic=dynamic).blocks[1].residuals[0]
        h = torch.stack(self.streams(4), -2)
        a, _, _ = sublayer.weights(h)
        with torch.no_grad():
            terms = read_terms(sublayer, (h,), h[..., 0, :])
        assert len(terms) == 4
        for index, term in enumerate(terms):
            assert relative_error(term, a[..., index, :] * h[..., index, :]) < 1e-5

    @pytest.mark.parametrize("scheme", ["siamese", "resi_dual", "mhc", "hyper", "attnres", "mgr", "post", "keel"])
    def test_terms_sum_to_what_is_read(self, scheme):
        stack = make_stack(scheme)
        for block in stack.blocks:
            seen = []
            block.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
            stack(embedding())
            sublayer, (streams,) = block.residuals[0], seen
            with torch.no_grad():
                u = sublayer.read(streams)[0]
                assert relative_error(sum(read_terms(sublayer, streams, u)), u) < 1e-6
                by_size, by_projection = shares_of(sublayer, streams, u)
            tokens = u[..., 0].numel()
            assert by_size.sum().item() == pytest.approx(tokens)
            assert by_projection.sum().item() == pytest.approx(tokens)
            assert (by_size >= 0).all()

    def test_what_is_not_read_has_none(self):
        sublayer = make_stack("resi_dual").blocks[1].residuals[0]
        streams = self.streams(2)
        by_size, _ = shares_of(sublayer, streams, streams[0])
        assert by_size.tolist() == pytest.approx([10, 0], abs=1e-6)


@pytest.mark.parametrize("name", MODALITIES)
def test_every_modality(modalities, name):
    model, batch = modalities[name]
    with capture_streams(model) as captured, torch.no_grad():
        batch.predict()
    rows = site_table(model, [batch])
    per_block = {"parallel": 1}.get(name, 2)
    assert len(rows) == 3 * per_block * 2
    assert {row["kind"] for row in rows} == ({"parallel"} if name == "parallel" else {"attention", "mlp"})
    for block in (1, 2):
        before = [row for row in rows if row["sublayer"] == block * per_block]
        for row, stream in zip(before, captured[block - 1], strict=True):
            assert row["rms"] == pytest.approx(stream.double().square().mean().sqrt().item(), rel=1e-5)
    # The first block's gradients, by plain autograd.
    model.zero_grad()
    (batch.loss(batch.predict()) / batch.count).backward()
    block = next(module for module in model.modules() if hasattr(module, "parts"))
    for parts, row in zip(block.parts(), rows[::2], strict=False):
        own = {parameter for part in parts for parameter in part.parameters()}
        norm = torch.stack([p.grad.double().square().sum() for p in own if p.grad is not None]).sum().sqrt()
        assert row["parameter_grad"] == pytest.approx(norm.item(), rel=1e-4)
    model.zero_grad()


@pytest.mark.parametrize("scheme", STREAMS)
def test_every_scheme_of_many_streams(scheme):
    name, options = STREAMS[scheme]
    model = siamesenorm.rewire(host(), name, **options).eval()
    rows = site_table(model, [of_text(model)])
    for sublayer in range(6):
        own = [row for row in rows if row["sublayer"] == sublayer]
        assert sum(column(own, "share")) == pytest.approx(1, rel=1e-4)
        assert sum(column(own, "projection")) == pytest.approx(1, rel=1e-4)
        assert all(math.isfinite(row["stream_grad"]) for row in own)


def test_means_are_over_all_batches():
    stack = constant_stack([[0.0, 5.0]] * 2)
    one, two = (torch.tensor([[[3.0, 4.0]]], dtype=torch.float64) * scale for scale in (1, 3))
    both = of_stack(stack, torch.cat((one, two)))
    apart = site_table(stack, [of_stack(stack, one), of_stack(stack, two)], gradients=False)
    assert apart == site_table(stack, [both], gradients=False)
    assert apart[0]["rms"] == pytest.approx(math.sqrt((25 + 225) / 4))
    done = []
    site_table(stack, [both, both], progress=done.append)
    assert done == [1, 1]


def test_a_closed_gate_is_not_in_what_the_branch_gives():
    stack = constant_stack([[0.0, 5.0]] * 2, warmup_steps=10)
    set_step(stack, stack.scheme, 1)
    rows = site_table(stack, [of_stack(stack, torch.ones(1, 1, 2, dtype=torch.float64))])
    assert rows[0]["branch_l2"] == pytest.approx(5)
    assert rows[1]["l2"] == pytest.approx(math.hypot(1, 1 + 0.1 * 5))


def test_frozen_parameters_have_no_gradient():
    stack = constant_stack([[0.0, 5.0], [1.0, 2.0]])
    stack.requires_grad_(False)
    rows = site_table(stack, [of_stack(stack, torch.rand(1, 3, 2, dtype=torch.float64))])
    assert column(rows, "parameter_grad") == [0, 0]
    assert all(gradient > 0 for gradient in column(rows, "stream_grad"))
    assert not any(parameter.requires_grad for parameter in stack.parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    model, batch = text_and_batch()
    model.train()
    model.model.layers[1].eval()
    batch.loss(batch.predict()).backward()
    modes = [module.training for module in model.modules()]
    grads = [parameter.grad for parameter in model.parameters()]
    values = [grad.clone() for grad in grads]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    state = torch.get_rng_state()

    def predict():
        out = batch.predict()
        torch.rand(3)
        if fails:
            raise RuntimeError("out of memory")
        return out

    failing = type(batch)(predict, batch.loss, batch.divergence, batch.count)
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            site_table(model, [failing])
    else:
        site_table(model, [failing])
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads, values, strict=True))
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    with capture_streams(model) as streams:
        batch.predict()
    assert len(streams) == 3


def test_a_compiled_model_is_watched_all_the_same():
    model, batch = text_and_batch()
    expected = site_table(model, [batch])
    model.compile(backend="eager")
    with torch.no_grad():
        batch.predict()
    assert site_table(model, [batch]) == expected
    with torch.no_grad(), removed(model, [0, 1, 2]):
        without = batch.predict()
    with torch.no_grad():
        assert not torch.allclose(without, batch.predict())


def test_what_has_no_streams():
    plain = host()
    with pytest.raises(ConfigError, match="rewire it first"):
        site_table(plain, [of_text(plain)])


def test_a_stack_beside_another():
    """A watcher looks at the blocks of its own model alone."""
    mine, other = (Stack([Branch(i) for i in range(2)], "siamese", D).double() for _ in range(2))
    h = embedding(requires_grad=False)
    alone = site_table(mine, [of_stack(mine, h)])

    def both():
        other(h)
        return mine(h)

    batch = of_stack(mine, h)
    assert site_table(mine, [type(batch)(both, batch.loss, batch.divergence, batch.count)]) == alone
