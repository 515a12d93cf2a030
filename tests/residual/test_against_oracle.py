"""Every scheme and option against the plain float64 oracle: values, streams and gradients through a ``Stack``."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from siamesenorm.probes import capture_streams
from siamesenorm.residual import Site, Stack, make_scheme
from siamesenorm.residual.norms import NormSpec
from tests import oracle
from tests.hosts import tiny
from tests.parity import relative_error

D = 12
EPS = 1e-6


class Branch(nn.Module):
    """A branch that mixes features and positions, so that no transposition goes unseen."""

    branch_norms = ("q", "k", "v")

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.up = nn.Parameter(torch.randn(D, D, generator=g, dtype=torch.float64) / D**0.5)
        self.down = nn.Parameter(torch.randn(D, D, generator=g, dtype=torch.float64) / D**0.5)

    def forward(self, u, shift=0):
        return torch.tanh(u @ self.up + shift) @ self.down + 0.1 * u.roll(1, -2)


def scatter(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter away from where it starts."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=g, dtype=parameter.dtype))
    return module


def make_stack(scheme, blocks=3, norm="rms", bias=False, eps=EPS, **options):
    branches = [Branch(i) for i in range(2 * blocks)]
    return scatter(Stack(branches, scheme, D, norm=norm, bias=bias, eps=eps, **options).double())


def embedding(requires_grad=True):
    g = torch.Generator().manual_seed(9)
    return (2 * torch.randn(2, 5, D, generator=g, dtype=torch.float64)).requires_grad_(requires_grad)


def follow(stack, h, scheme, kind="rms", eps=EPS, **options):
    """The oracle's output and streams per block with the parameters of ``stack``."""
    w = dict(stack.named_parameters())

    def norm(name):
        return oracle.norm_of(w, name, kind, eps)

    parts = []
    for (block, made), j in itertools.product(enumerate(stack.blocks), (0, 1)):
        prefix = f"blocks.{block}.residuals.{j}."
        parts.append(
            oracle.Part(
                [(made.branches[j], norm(f"blocks.{block}.norms.{j}"))],
                oracle.within(w, prefix),
                lambda name, prefix=prefix: norm(prefix + name),
                block,
                j == 0,
            )
        )
    followed = oracle.Stack(parts, len(stack.blocks), lambda name: norm(f"readout.{name}"))
    out, states = oracle.ORACLES[scheme](h, followed, **options)
    return norm("norm")(out), states[1::2]


BASELINES = [case for case in tiny.BASELINES.values() if case[0] != "siamese"]
SIAMESE = [
    {"x": x, "first_block_pre": starred, "normalized_input": nin, "depth_scale": c}
    for x, starred, nin, c in itertools.product(
        ("post", "hybrid"), (False, True), (True, False), ("code", "paper", "none")
    )
    if x == "hybrid" or not starred
]
TOPOLOGIES = [
    {"topology": topology, **options}
    for topology in ("resi_dual", "single")
    for options in (
        {},
        {"normalized_input": False, "depth_scale": "none"},
        {"x": "hybrid"},
        {"x": "hybrid", "first_block_pre": True, "normalized_input": False},
    )
]
CASES = [
    ("pre", {}),
    ("post", {}),
    *BASELINES,
    ("mixln", {"share": 0.5}),
    *(("siamese", options) for options in (*SIAMESE, *TOPOLOGIES)),
]


def named(case):
    scheme, options = case
    return scheme + "".join(f"-{v}" for v in options.values())


@pytest.mark.parametrize(("kind", "bias"), [("rms", False), ("layer", True), ("rms", True)])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_values_streams_and_gradients(case, kind, bias):
    scheme, options = case
    stack = make_stack(scheme, norm=kind, bias=bias, **options)
    h = embedding()
    with capture_streams(stack) as streams:
        out = stack(h)
    expected, states = follow(stack, h, scheme, kind, **options)
    assert out.dtype == torch.float64
    assert relative_error(out, expected) < 1e-10
    assert len(streams) == len(states)
    for got, wanted in zip(streams, states, strict=True):
        assert len(got) == len(wanted)
        for stream, reference in zip(got, wanted, strict=True):
            assert relative_error(stream, reference) < 1e-10

    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    inputs = {"h": h, **dict(stack.named_parameters())}
    ours = torch.autograd.grad((out * probe).sum(), list(inputs.values()))
    theirs = torch.autograd.grad((expected * probe).sum(), list(inputs.values()))
    for name, a, b in zip(inputs, ours, theirs, strict=True):
        assert b.abs().max() > 0, name
        assert relative_error(a, b) < 1e-10, name


@pytest.mark.parametrize("eps", [1e-5, 1.0])
def test_eps_reaches_every_norm(eps):
    stack = make_stack("siamese", eps=eps)
    h = embedding(False)
    assert relative_error(stack(h), follow(stack, h, "siamese", eps=eps)[0]) < 1e-10


def test_x_init_starts_all_that_x_is_read_through():
    for x in ("post", "hybrid"):
        stack = Stack([Branch(i) for i in range(4)], "siamese", D, x=x, x_init=0.25)
        started = {n: p for n, p in stack.named_parameters() if n.endswith(("norm_x.weight", "c1"))}
        assert len(started) == 5
        assert all((p == 0.25).all() for p in started.values())
        rest = [p for n, p in stack.named_parameters() if "norm" in n and n not in started]
        assert all((p == 1).all() for p in rest)


def test_arguments_reach_the_branches_of_their_kind_alone():
    stack, h = make_stack("pre"), embedding(False)
    shifted = stack(h, attention={"shift": 0.5})
    assert not torch.allclose(shifted, stack(h))
    for block in stack.blocks:
        block.branches[0] = Shifted(block.branches[0])
    assert torch.equal(stack(h), shifted)


class Shifted(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.branch = branch

    def forward(self, u):
        return self.branch(u, shift=0.5)


def test_a_parallel_block_reads_and_writes_once():
    stack = scatter(Stack([Branch(0), Branch(1)], "siamese", D, kinds=("parallel",)).double())
    h = embedding(False)
    w = dict(stack.named_parameters())
    subs = [
        oracle.Sub(
            stack.blocks[block].branches[0],
            oracle.norm_of(w, f"blocks.{block}.residuals.0.norm_y"),
            oracle.norm_of(w, f"blocks.{block}.norms.0"),
            oracle.norm_of(w, f"blocks.{block}.residuals.0.norm_x"),
            c=oracle.scale("code", 2 * block),
        )
        for block in range(2)
    ]
    out, _ = oracle.siamese(h, subs, oracle.norm_of(w, "readout.norm_x"), oracle.norm_of(w, "readout.norm_y"))
    assert relative_error(stack(h), oracle.norm_of(w, "norm")(out)) < 1e-10


# Limits


def set_to(stack, ending, value):
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            if ending in name:
                parameter.fill_(value)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_nx_at_zero_is_pre_norm_whose_norm_is_nin_of_ny(kind):
    stack, h = make_stack("siamese", norm=kind, bias=True), embedding()
    set_to(stack, "norm_x", 0.0)
    w = dict(stack.named_parameters())

    def norm(name):
        return oracle.norm_of(w, name, kind)

    def of_both(outer, inner):
        return lambda y: norm(outer)(norm(inner)(y))

    parts = [
        oracle.Part(
            [(f, of_both(f"blocks.{block}.norms.{j}", f"blocks.{block}.residuals.{j}.norm_y"))], {}, norm, block, j == 0
        )
        for block, made in enumerate(stack.blocks)
        for j, f in enumerate(made.branches)
    ]
    out, states = oracle.ORACLES["pre"](h, oracle.Stack(parts, 3, norm))
    out = of_both("norm", "readout.norm_y")(out)
    with capture_streams(stack) as streams:
        got = stack(h)
    assert relative_error(got, out) < 1e-12
    for (_, y), (wanted,) in zip(streams, states[1::2], strict=True):
        assert relative_error(y, wanted) < 1e-12
    a, b = (torch.autograd.grad(t.square().sum(), h)[0] for t in (got, out))
    assert relative_error(a, b) < 1e-10


def test_ny_at_zero_and_c_1_is_post_norm_normalised_at_read():
    stack, h = make_stack("siamese", depth_scale="none", bias=True), embedding()
    set_to(stack, "norm_y", 0.0)
    w = dict(stack.named_parameters())
    x = h
    for i in range(6):
        prefix, j = f"blocks.{i // 2}.", i % 2
        x = oracle.norm_of(w, f"{prefix}residuals.{j}.norm_x")(x)
        x = x + stack.blocks[i // 2].branches[j](oracle.norm_of(w, f"{prefix}norms.{j}")(x))
    wanted = oracle.norm_of(w, "norm")(oracle.norm_of(w, "readout.norm_x")(x))
    got = stack(h)
    assert relative_error(got, wanted) < 1e-12
    a, b = (torch.autograd.grad(t.square().sum(), h)[0] for t in (got, wanted))
    assert relative_error(a, b) < 1e-10


def test_that_post_norm_is_the_scheme_post_with_its_norms_one_place_on():
    """post normalises after the write, siamese at the next read: equal from the second sublayer on, and at the end."""
    siamese = make_stack("siamese", depth_scale="none", normalized_input=False)
    post, h = make_stack("post"), embedding(False)
    set_to(siamese, "norm_y", 0.0)
    set_to(siamese, "blocks.0.residuals.0.norm_x", 1.0)
    h = oracle.rms_norm(h)
    with torch.no_grad():
        reads = [siamese.blocks[i // 2].residuals[i % 2].norm_x.weight for i in range(6)] + [
            siamese.readout.norm_x.weight
        ]
        for i, weight in enumerate(reads[1:]):
            post.blocks[i // 2].residuals[i % 2].norm.weight.copy_(weight)
        post.norm.weight.copy_(siamese.norm.weight)
    for a, b in zip(post.blocks, siamese.blocks, strict=True):
        b.branches = a.branches
    # The first read normalises an input of unit mean square: the identity, up to eps.
    assert relative_error(siamese(h), post(h)) < 1e-5


@pytest.mark.parametrize("depth_scale", ["code", "paper", "none"])
def test_the_jacobian_blocks_of_one_sublayer(depth_scale):
    scheme = make_scheme("siamese", depth_scale=depth_scale)
    site = Site(sublayer=4, block=2, kind="attention", blocks=4, sublayers=8)
    spec = NormSpec("rms", D)
    sublayer = scatter(scheme.sublayer(site, spec).double())
    nin = scatter(spec.build().double(), 1)
    branch = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)).double()
    g = torch.Generator().manual_seed(3)
    x, y = (torch.randn(D, generator=g, dtype=torch.float64) for _ in range(2))

    def step(x, y):
        u, carry = sublayer.read((x, y))
        return sublayer.write(carry, branch(nin(u)))

    jacobian = torch.autograd.functional.jacobian
    (xx, xy), (yx, yy) = jacobian(step, (x, y))
    w = dict(sublayer.named_parameters())
    nx, ny = oracle.norm_of(w, "norm_x"), oracle.norm_of(w, "norm_y")
    j_nx, j_ny = jacobian(nx, x), jacobian(ny, y)
    j = jacobian(lambda u: branch(oracle.rms_norm(u, nin.weight)), nx(x) + ny(y))
    eye, c = torch.eye(D, dtype=torch.float64), {"code": 6**-0.5, "paper": 5**-0.5, "none": 1.0}[depth_scale]
    for got, wanted in ((xx, (eye + c * j) @ j_nx), (xy, c * j @ j_ny), (yx, j @ j_nx), (yy, eye + j @ j_ny)):
        assert relative_error(got, wanted) < 1e-12


@pytest.mark.parametrize(
    "case", [("pre", {}), ("post", {}), ("siamese", {}), ("siamese", {"x": "hybrid"}), *BASELINES], ids=named
)
def test_gradcheck_of_a_sublayer(case):
    name, options = case
    scheme = make_scheme(name, **options)
    sublayer = scatter(scheme.sublayer(Site(2, 1, "attention", 2, 4), NormSpec("layer", 5, bias=True)).double())
    streams = tuple(torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in scheme.open(torch.zeros(1)))

    def step(*inputs):
        u, carry = sublayer.read(inputs[: len(streams)])
        return (u, *sublayer.write(carry, torch.tanh(u).roll(1, -1)))

    def with_parameters(*inputs):
        for (name, _), value in zip(list(sublayer.named_parameters()), inputs[len(streams) :], strict=True):
            module, _, leaf = name.rpartition(".")
            parts = sublayer.get_submodule(module)
            parts._parameters[leaf] = value
        return step(*inputs)

    torch.manual_seed(0)
    assert torch.autograd.gradcheck(with_parameters, (*streams, *sublayer.parameters()))
