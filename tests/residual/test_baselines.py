"""What is particular to the schemes that SiameseNorm is compared with: constants, limits, and what they refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from siamesenorm.probes import capture_streams
from siamesenorm.residual import ConfigError, NormSpec, Site, Stack, Step, make_scheme, set_step, stack_sites, through
from tests.hosts.tiny import BASELINES
from tests.parity import relative_error
from tests.residual.test_against_oracle import D, embedding, make_stack, set_to

SERIAL = ("attention", "mlp")


def sublayers(scheme, blocks, kinds=SERIAL, **options):
    made = make_scheme(scheme, **options)
    return [made.sublayer(site, NormSpec("rms", D)) for site in stack_sites(blocks, kinds)]


# Constants


@pytest.mark.parametrize(
    ("blocks", "a", "gain"),
    [
        (6, 1.8612097182041991, 0.37991784282579627),
        (12, 2.2133638394006434, 0.3194715521231362),
        (32, 2.82842712474619, 0.25),
    ],
)
def test_deepnorms_constants_follow_the_depth(blocks, a, gain):
    made = make_scheme("deepnorm")
    for kinds in (SERIAL, ("parallel",)):
        for sublayer in sublayers("deepnorm", blocks, kinds):
            assert sublayer.describe()["scale"] == pytest.approx(a, rel=1e-12)
        for site in stack_sites(blocks, kinds):
            gains = {role: made.init_gain(role, site) for role in ("q", "k", "v", "o", "mlp")}
            assert gains == {"q": 1, "k": 1, **dict.fromkeys(("v", "o", "mlp"), pytest.approx(gain, rel=1e-12))}
    assert a**4 == pytest.approx(2 * blocks)
    assert gain**-4 == pytest.approx(8 * blocks)


def test_keels_constants():
    rows = [(s.describe()["writes"], s.describe()["scale"]) for s in sublayers("keel", 3)]
    assert rows[:2] == [("X = X + o", 1.0), ("X = N(X + o)", 1.0)]
    assert rows[2:] == [("X = N(a·X + o)", 6.0)] * 4
    assert list(sublayers("keel", 3)[0].parameters()) == []


def test_lns_shrinks_with_the_block():
    made = make_scheme("lns")
    scales = [made.input_scale(site) for site in stack_sites(4, SERIAL)]
    assert scales == pytest.approx([1, 1, 2**-0.5, 2**-0.5, 3**-0.5, 3**-0.5, 0.5, 0.5])
    assert [s.describe()["scale"] for s in sublayers("lns", 4)] == scales


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_lns_scales_the_norms_output_bias_included_and_its_constant_survives(kind):
    stack, h = make_stack("lns", norm=kind, bias=True), embedding(False)
    plain = make_stack("pre", norm=kind, bias=True)
    assert stack.state_dict().keys() == plain.state_dict().keys()
    norm = stack.blocks[2].norms[1]
    torch.testing.assert_close(norm(h), plain.blocks[2].norms[1](h) / 3**0.5)
    assert "scale=0.5774" in repr(norm)
    assert list(stack.buffers()) == []
    with torch.device("meta"):
        empty = make_stack("lns", norm=kind, bias=True)
    empty.load_state_dict(stack.state_dict(), assign=True)
    for block, branches in zip(empty.blocks, stack.blocks, strict=True):
        block.branches = branches.branches
    assert torch.equal(empty(h), stack(h))
    assert torch.equal(copy.deepcopy(stack)(h), stack(h))


@pytest.mark.parametrize(
    ("share", "blocks", "post"),
    [(0.25, 4, 1), (0.25, 6, 2), (0.25, 12, 3), (0.25, 32, 8), (0, 5, 0), (1, 5, 5), (0.07, 100, 7), (1 / 3, 3, 1)],
)
def test_mixlns_lower_blocks(share, blocks, post):
    made = make_scheme("mixln", share=share)
    lower = [made.input_norm(site) == "none" for site in stack_sites(blocks, SERIAL)]
    assert lower == [True] * 2 * post + [False] * 2 * (blocks - post)


# Limits: one scheme as another


@pytest.mark.parametrize(("share", "other"), [(0, "pre"), (1, "post"), (0.0, "pre"), (1.0, "post")])
def test_mixln_without_a_share_is_pre_and_with_all_of_it_post(share, other):
    mixed, plain, h = make_stack("mixln", share=share), make_stack(other), embedding()
    assert mixed.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(mixed(h), plain(h))
    a, b = (torch.autograd.grad(stack(h).square().sum(), [h, *stack.parameters()]) for stack in (mixed, plain))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_lns_of_one_block_and_hybridnorms_first_block_are_pre():
    h = embedding(False)
    assert torch.equal(make_stack("lns", blocks=1)(h), make_stack("pre", blocks=1)(h))
    starred = make_stack("hybridnorm", blocks=1, first_block_pre=True)
    assert torch.equal(starred(h), make_stack("pre", blocks=1)(h))


def moved(stack, other, first=1.0):
    """``other``, which normalises after the write, with the norms of ``stack``, which does so at the next read."""
    reads = [r.norm_x for block in stack.blocks for r in block.residuals] + [stack.readout.norm_x]
    writes = [r.norm for block in other.blocks for r in block.residuals]
    with torch.no_grad():
        reads[0].weight.fill_(first)
        for read, write in zip(reads[1:], writes, strict=True):
            write.weight.copy_(read.weight)
        other.norm.weight.copy_(stack.norm.weight)
    for a, b in zip(other.blocks, stack.blocks, strict=True):
        a.branches = b.branches
    return other


ABLATED = {"normalized_input": False, "depth_scale": "none"}


@pytest.mark.parametrize(("topology", "other"), [("single", "post"), ("resi_dual", "resi_dual")])
def test_a_topology_without_scale_and_nin_is_the_scheme_of_that_flow(topology, other):
    stack = make_stack("siamese", topology=topology, **ABLATED)
    plain = moved(stack, make_stack(other))
    # The first read normalises an input of unit mean square: the identity, up to eps.
    h = embedding(False)
    h = h / h.square().mean(-1, keepdim=True).sqrt()
    if topology == "resi_dual":
        with torch.no_grad():
            plain.readout.norm_y.weight.copy_(stack.readout.norm_y.weight)
    assert relative_error(stack(h), plain(h)) < 1e-5


@pytest.mark.parametrize("starred", [False, True])
def test_the_single_hybrid_stream_is_hybridnorm(starred):
    stack = make_stack("siamese", topology="single", x="hybrid", first_block_pre=starred, **ABLATED)
    plain, h = make_stack("hybridnorm", first_block_pre=starred), embedding(False)
    set_to(stack, "c1", 1.0)
    set_to(stack, "readout.norm_x", 1.0)
    with torch.no_grad():
        plain.norm.weight.copy_(stack.norm.weight)
        for i, (a, b) in enumerate(zip(plain.blocks, stack.blocks, strict=True)):
            a.branches = b.branches
            theirs = a.norms if starred and i == 0 else [r.norm if hasattr(r, "norm") else None for r in a.residuals]
            for norm, residual in zip(theirs, b.residuals, strict=True):
                if norm is not None:
                    norm.weight.copy_(residual.norm_x.weight)
    # The readout's norm and the final one follow each other: the same, up to eps.
    assert relative_error(stack(h), plain(h)) < 1e-5


def test_a_topology_has_the_streams_and_norms_of_its_flow_alone():
    h, count = embedding(False), {}
    for topology in ("siamese", "resi_dual", "single"):
        stack = make_stack("siamese", topology=topology)
        with capture_streams(stack) as streams:
            stack(h)
        names = [n for n, _ in stack.named_parameters() if "norm_y" in n]
        count[topology] = ({len(s) for s in streams}, len(names))
    assert count == {"siamese": ({2}, 7), "resi_dual": ({2}, 1), "single": ({1}, 0)}


def test_x_follows_the_same_path_whether_y_collects_or_not():
    h, seen = embedding(False), []
    for topology in ("resi_dual", "single"):
        stack = make_stack("siamese", topology=topology)
        with torch.no_grad(), capture_streams(stack) as streams:
            for n, p in stack.named_parameters():
                if "norm" in n:
                    p.fill_(0.7)
            stack(h)
        seen.append([s[0] for s in streams])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


# Where things stand


def test_what_each_declares():
    sites = (*stack_sites(2, SERIAL),)
    places = {
        name: [make_scheme(scheme, **options).input_norm(site) for site in sites]
        for name, (scheme, options) in BASELINES.items()
    }
    before, none = ["before"] * 4, ["none"] * 4
    assert places == {
        "peri": before,
        "sandwich": before,
        "reordered": ["after"] * 4,
        "hybridnorm": none,
        "hybridnorm*": ["before", "before", "none", "none"],
        "mixln": ["none", "none", "before", "before"],
        "deepnorm": none,
        "lns": before,
        "spannorm": ["before", "none", "none", "none"],
        "keel": before,
        "resi_dual": none,
        "topology-resi_dual": before,
        "topology-single": ["none", "before"] * 2,
    }
    for name, (scheme, options) in BASELINES.items():
        heads = [make_scheme(scheme, **options).branch_norms(site) for site in sites]
        normed = name in ("hybridnorm", "hybridnorm*", "topology-single")
        assert heads == ([("q", "k", "v"), ()] * 2 if normed else [()] * 4), name


def test_the_embedding_is_normalised_once_and_before_anything_reads_it():
    stack, h = make_stack("peri"), embedding(False)
    names = [n for n, _ in stack.named_parameters() if "norm_embedding" in n]
    assert names == ["blocks.0.residuals.0.norm_embedding.weight"]
    assert not any("norm_embedding" in n for n, _ in make_stack("peri", normalized_embedding=False).named_parameters())
    assert relative_error(stack(100 * h), stack(h)) < 1e-5


def test_spannorm_carries_the_blocks_input_and_drops_it_at_its_end():
    stack, h = make_stack("spannorm"), embedding(False)
    opens, closes = stack.blocks[1].residuals
    u, carry = opens.read((h,))
    streams = opens.write(carry, torch.ones_like(u))
    assert len(streams) == 2
    assert streams[1] is h
    _, carry = closes.read(streams)
    assert len(closes.write(carry, torch.ones_like(u))) == 1
    with capture_streams(stack) as streams:
        stack(h)
    assert [len(s) for s in streams] == [1, 1, 1]


@pytest.mark.parametrize("scheme", ["hybridnorm", "keel", "spannorm"])
def test_what_has_no_meaning_in_parallel_is_refused(scheme):
    message = f"{scheme} needs .*one after the other.*in parallel"
    with pytest.raises(ConfigError, match=message):
        make_scheme(scheme).sublayer(Site(0, 0, "parallel", 2, 2), NormSpec("rms", 8))
    with pytest.raises(ConfigError, match=message):
        Stack([nn.Linear(8, 8)] * 2, scheme, 8, kinds=("parallel",))


def test_spannorm_needs_two_sublayers_a_block():
    with pytest.raises(ConfigError, match="spannorm needs blocks of two sublayers"):
        Stack([nn.Linear(8, 8)] * 3, "spannorm", 8, kinds=("attention", "mlp", "mlp"))


# The gate of a residual warm-up


@pytest.mark.parametrize("scheme", ["pre", "peri", "reordered", "lns", "resi_dual"])
def test_the_gate_scales_what_is_added_though_a_norm_stands_behind_the_branch(scheme):
    """A factor before a norm would be lost: at its start a warm-up would be no warm-up."""
    stack, h = (
        make_stack(scheme, blocks=2, **({"normalized_embedding": False} if scheme == "peri" else {})),
        embedding(False),
    )
    residual = stack.blocks[1].residuals[0]
    streams = tuple(h + i for i in range(len(stack.scheme.open(h))))

    def added(gate):
        residual.gate = gate
        return through([Step(residual, torch.tanh)], streams)[-1] - streams[-1]

    full = added(1.0)
    assert full.abs().max() > 0.1
    torch.testing.assert_close(added(0.25), 0.25 * full)
    assert (added(0.0) == 0).all()


@pytest.mark.parametrize("name", BASELINES)
def test_a_shut_gate_is_a_branch_that_says_nothing(name):
    class Shut(type(make_scheme(BASELINES[name][0]))):
        def gate(self, site, step):
            return 0.0

    scheme, options = BASELINES[name]
    stack, h = make_stack(Shut(**options)), embedding(False)
    silent = make_stack(scheme, **options)
    for block in silent.blocks:
        block.branches = nn.ModuleList(Silent() for _ in block.branches)
    set_step(stack, stack.scheme, 1)
    torch.testing.assert_close(stack(h), silent(h))


class Silent(nn.Module):
    branch_norms = ("q", "k", "v")

    def forward(self, u):
        return torch.zeros_like(u)


# Rounding


@pytest.mark.parametrize("name", ["post", "mixln", "deepnorm", "keel", "spannorm", "resi_dual", "peri", "sandwich"])
def test_a_write_in_bf16_rounds_once(name):
    scheme, options = BASELINES.get(name, (name, {}))
    made, g = make_scheme(scheme, **options), torch.Generator().manual_seed(4)
    site = Site(sublayer=0, block=0, kind="mlp", blocks=4, sublayers=8)
    sublayer = made.sublayer(site, NormSpec("rms", 64)).bfloat16()
    exact = copy.deepcopy(sublayer).double()
    streams = [(4 * torch.randn(50, 64, generator=g)).bfloat16() for _ in range(2)]
    o = torch.randn(50, 64, generator=g).bfloat16()
    carry = tuple(streams[: 2 if name == "resi_dual" else 1])
    got, wanted = sublayer.write(carry, o)[0], exact.write(tuple(s.double() for s in carry), o.double())[0]
    assert got.dtype == torch.bfloat16
    # Half of a unit in the last place; what is float32 within errs far less than that.
    assert ((got.double() - wanted).abs() <= wanted.abs() * (2**-8 + 1e-5) + 1e-5).all()
