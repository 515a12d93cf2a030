"""What depth does: by hand where branches are constants, and against runs that leave blocks out by themselves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from siamesenorm import hosts
from siamesenorm.probes import (
    DEPTH_PROBES,
    capture_streams,
    categorical,
    depth_tables,
    effective_rank,
    participation,
    removed,
)
from siamesenorm.probes.depth import forwards
from siamesenorm.residual import ConfigError, Stack, close_streams
from tests.hosts.tiny import host
from tests.probes.models import constant_stack, every_modality, of_stack, of_text, text_and_batch
from tests.residual.test_against_oracle import Branch, D, embedding, make_stack

MODALITIES = ("text", "mixture", "parallel", "vit", "dit")


@pytest.fixture(scope="module")
def modalities():
    return every_modality()


class Without(nn.Module):
    """A stack some of whose blocks are not called."""

    def __init__(self, stack, blocks):
        super().__init__()
        self.stack, self.blocks = stack, blocks

    def forward(self, h):
        streams = self.stack.scheme.open(h)
        for index, block in enumerate(self.stack.blocks):
            if index not in self.blocks:
                streams = block(streams, {})
        return self.stack.norm(close_streams(self.stack.readout, streams))


def test_by_hand():
    """Readouts (3, 4), (3, -4), (-3, -4): each block adds a constant, and logits are the normed readout's."""
    stack = constant_stack([[0.0, -8.0], [0.0, 0.0], [-6.0, 0.0], [0.0, 0.0]], eps=0.0)
    h = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    batch = categorical(lambda: stack(h), torch.tensor([[1]]))
    found = depth_tables(stack, [batch])
    a, b = 3 / 5 * math.sqrt(2), 4 / 5 * math.sqrt(2)

    def loss(x, y):
        return math.log(math.exp(x) + math.exp(y)) - y

    def divergence(x, y):
        """Of (-a, -b) from (x, y)."""
        q = math.exp(y) / (math.exp(x) + math.exp(y))
        p = math.exp(-b) / (math.exp(-a) + math.exp(-b))
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    assert found.loss == pytest.approx(loss(-a, -b))
    wanted = [(a, b), (a, -b), (-a, -b)]
    assert [row["loss"] for row in found.depths] == pytest.approx([loss(*each) for each in wanted])
    assert [row["loss_increase"] for row in found.depths] == pytest.approx(
        [loss(*each) - loss(-a, -b) for each in wanted]
    )
    assert [row["divergence"] for row in found.depths] == pytest.approx([divergence(*each) for each in wanted])
    assert [(row["depth"], row["removed"]) for row in found.depths] == [(0, 2), (1, 1), (2, 0)]
    # Without block 0 the readout is (-3, 4), without block 1 it is (3, -4).
    assert [row["loss"] for row in found.blocks] == pytest.approx([loss(-a, b), loss(a, -b)])
    # The branches of block 1 do not look at what they are given.
    assert found.skips == [{"skipped": 0, "block": 1, "effect": 0.0}]
    angles = {(row["of"], row["depth"], row["distance"]): row["angle"] for row in found.angles}
    # (3, 4) to (3, -4) to (-3, -4).
    wanted = {(0, 1): math.acos(-7 / 25) / math.pi, (1, 1): math.acos(7 / 25) / math.pi, (0, 2): 1.0}
    for of in ("readout", "Y"):
        assert {key[1:]: angle for key, angle in angles.items() if key[0] == of} == pytest.approx(wanted)


def test_ranks_by_hand():
    assert effective_rank(torch.diag(torch.tensor([4.0, 4.0, 0.0]).double())) == pytest.approx(2)
    # Singular values 3 and 1: p = 3/4, 1/4.
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert effective_rank(torch.diag(torch.tensor([9.0, 1.0]).double())) == pytest.approx(math.exp(entropy))
    assert participation(torch.diag(torch.tensor([9.0, 1.0]).double())) == pytest.approx(100 / 82)
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    assert participation(turn @ turn.T) == pytest.approx(5)
    assert effective_rank(turn @ turn.T) == pytest.approx(5)
    assert effective_rank(torch.zeros(3, 3).double()) == participation(torch.zeros(3, 3).double()) == 0


@pytest.mark.parametrize("scheme", ["siamese", "attnres", "hyper"])
def test_ranks_are_those_of_the_readouts(scheme):
    stack = make_stack(scheme)
    h = embedding(requires_grad=False)
    parts = [of_stack(stack, each) for each in (h, h + torch.randn_like(h))]
    found = depth_tables(stack, parts, only=["rank"])
    assert found.blocks == found.skips == found.angles == []
    with capture_streams(stack) as streams, torch.no_grad():
        readouts = []
        for part in parts:
            part.predict()
            readouts.append([stack.readout.close(each) for each in streams])
    for depth in (1, 2, 3):
        x = torch.cat([each[depth - 1].flatten(0, 1) for each in readouts])
        sigma = torch.linalg.svdvals(x - x.mean(0))
        p = sigma / sigma.sum()
        row = found.depths[depth]
        assert row["effective_rank"] == pytest.approx(torch.exp(-(p * p.log()).sum()).item(), rel=1e-6)
        energy = sigma.square()
        assert row["participation"] == pytest.approx((energy.sum() ** 2 / energy.square().sum()).item(), rel=1e-9)


@pytest.mark.parametrize("scheme", ["pre", "siamese", "post", "spannorm", "attnres", "mgr", "hyper"])
def test_losses_without_blocks(scheme):
    stack = make_stack(scheme)
    h = embedding(requires_grad=False)
    labels = torch.arange(10).view(2, 5)
    found = depth_tables(stack, [categorical(lambda: stack(h), labels)])

    def loss(*blocks):
        with torch.no_grad():
            return F.cross_entropy(Without(stack, blocks)(h).flatten(0, 1), labels.flatten()).item()

    assert found.loss == pytest.approx(loss())
    for depth in range(4):
        assert found.depths[depth]["loss"] == pytest.approx(loss(*range(depth, 3)), rel=1e-9)
    for block in range(3):
        assert found.blocks[block]["loss"] == pytest.approx(loss(block), rel=1e-9)
    with removed(stack, [0, 2]), torch.no_grad():
        assert F.cross_entropy(stack(h).flatten(0, 1), labels.flatten()).item() == pytest.approx(loss(0, 2))
    assert found.depths[3]["divergence"] == found.depths[3]["loss_increase"] == 0


@pytest.mark.parametrize("scheme", ["siamese", "attnres"])
def test_effects_on_later_blocks(scheme):
    stack = make_stack(scheme)
    h = embedding(requires_grad=False)

    def outputs(*without):
        kept = []
        hooks = [
            branch.register_forward_hook(lambda module, args, out, at=at: kept.append((at, out)))
            for at, block in enumerate(stack.blocks)
            for branch in block.branches
        ]
        with torch.no_grad():
            Without(stack, without)(h)
        for hook in hooks:
            hook.remove()
        return {at: torch.stack([out for place, out in kept if place == at]) for at in range(3) if at not in without}

    found = depth_tables(stack, [of_stack(stack, h)], only=["skips"])
    assert found.blocks == found.depths == []
    whole = outputs()
    assert [(row["skipped"], row["block"]) for row in found.skips] == [(0, 1), (0, 2), (1, 2)]
    for row in found.skips:
        changed = outputs(row["skipped"])[row["block"]]
        effect = (changed - whole[row["block"]]).norm() / whole[row["block"]].norm()
        assert row["effect"] == pytest.approx(effect.item(), rel=1e-9)


def test_angles_are_taken_at_a_few_positions_with_the_last_among_them():
    stack = Stack([Branch(i) for i in range(6)], "siamese", D).double()
    h = torch.randn(2, 12, D, dtype=torch.float64)
    found = depth_tables(stack, [of_stack(stack, h)], only=["angles"])
    with capture_streams(stack) as streams, torch.no_grad():
        stack(h)
    # Four depths share twelve positions.
    places = [11, 7, 3]
    for of, which in (("X", 0), ("Y", 1)):
        before, after = streams[0][which][:, places], streams[2][which][:, places]
        angle = torch.arccos(F.cosine_similarity(before, after, dim=-1)).mean() / math.pi
        (row,) = [r for r in found.angles if (r["of"], r["depth"], r["distance"]) == (of, 1, 2)]
        assert row["angle"] == pytest.approx(angle.item(), rel=1e-9)
    assert {row["of"] for row in found.angles} == {"readout", "X", "Y"}
    one = depth_tables(stack, [of_stack(stack, h[:, -3:])], only=["angles"])
    assert len(one.angles) == len(found.angles)


def test_streams_that_come_later_have_no_angles():
    stack = make_stack("attnres")
    found = depth_tables(stack, [of_stack(stack, embedding(requires_grad=False))], only=["angles"])
    assert {row["of"] for row in found.angles} == {"readout", "v0"}
    assert {row["angle"] for row in found.angles if row["of"] == "v0"} == {0.0}


@pytest.mark.parametrize("name", MODALITIES)
def test_every_modality(modalities, name):
    model, batch = modalities[name]
    done = []
    found = depth_tables(model, [batch], progress=done.append)
    assert sum(done) == forwards(3) == 7
    with torch.no_grad():
        whole = batch.predict()
    assert found.loss == pytest.approx(float(batch.loss(whole)) / batch.count, rel=1e-6)
    assert [row["divergence"] > 0 for row in found.depths] == [True, True, True, False]
    # One block gone from the end is both.
    assert found.blocks[-1]["loss"] == pytest.approx(found.depths[2]["loss"], rel=1e-6)
    assert len(found.skips) == 3
    assert all(row["effect"] > 0 for row in found.skips)
    assert all(0 <= row["angle"] <= 1 for row in found.angles)
    assert all(1 <= row["participation"] <= row["effective_rank"] * 1.5 for row in found.depths)
    assert [forwards(3, [probe]) for probe in DEPTH_PROBES] == [4, 4, 4, 1, 1]


def test_removal_of_a_models_blocks_is_the_model_without_them():
    model, batch = text_and_batch(scheme="hybrid-pre")
    layers = model.model.layers
    with torch.no_grad(), removed(model, [1]):
        without = batch.predict()
    model.model.layers = nn.ModuleList([layers[0], layers[2]])
    model.config.num_hidden_layers = 2
    with torch.no_grad():
        assert torch.equal(batch.predict(), without)


def test_kullback_leibler_of_what_counts():
    own, other = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    labels = torch.tensor([[0, 1, -100], [-100, -100, 4]])
    batch = categorical(lambda: own, labels)
    p, q = own.log_softmax(-1), other.log_softmax(-1)
    each = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert batch.count == 3
    assert batch.divergence(own, other).item() == pytest.approx(each[labels != -100].sum().item(), rel=1e-5)


def test_the_model_is_left_as_it_was():
    model, batch = text_and_batch()
    model.train()
    batch.loss(batch.predict()).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    calls = []

    def predict():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return batch.predict()

    with pytest.raises(RuntimeError, match="out of memory"):
        depth_tables(model, [type(batch)(predict, batch.loss, batch.divergence, batch.count)])
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), grads, strict=True))
    model.eval()
    with torch.no_grad():
        expected = batch.predict()
        depth_tables(model, [batch])
        assert torch.equal(batch.predict(), expected)


def test_what_has_no_streams():
    plain = host()
    with pytest.raises(ConfigError, match="rewire it first"):
        depth_tables(plain, [of_text(plain)])
    assert hosts.blocks(plain) == []
