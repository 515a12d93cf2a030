"""The protocol: names, options and values that are refused, what a scheme declares, and who owns what state."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

import siamesenorm
from siamesenorm.residual import (
    ConfigError,
    NormSpec,
    Readout,
    Scheme,
    Site,
    Stack,
    Sublayer,
    make_scheme,
    nearest,
    parse_scheme,
    register,
    schemes,
    set_step,
    stack_sites,
)
from siamesenorm.residual import scheme as scheme_module
from tests.hosts.tiny import BASELINES

SPEC = NormSpec("rms", 8)
ALL = [
    ("pre", {}),
    ("post", {}),
    ("siamese", {}),
    ("siamese", {"x": "hybrid"}),
    ("siamese", {"x": "hybrid", "first_block_pre": True}),
    *BASELINES.values(),
]


def linear_stack(scheme="siamese", blocks=2, **options):
    branches = [nn.Linear(8, 8) for _ in range(2 * blocks)]
    for branch in branches:
        branch.branch_norms = ("q", "k", "v")
    return Stack(branches, scheme, 8, **options)


def test_the_public_names():
    assert siamesenorm.schemes() == schemes()
    names = "pre post peri reordered hybridnorm mixln deepnorm lns spannorm keel siamese resi_dual"
    assert set(names.split()) <= set(schemes())
    assert list(schemes()) == sorted(schemes())


def test_a_name_is_registered_once():
    with pytest.raises(ConfigError, match="a scheme named 'pre' is registered already"):

        @register
        class Again(type(make_scheme("pre"))):
            name = "pre"

    assert type(make_scheme("pre")).__name__ == "PreNorm"


def test_a_registered_scheme_is_made_by_name(monkeypatch):
    monkeypatch.setattr(scheme_module, "_REGISTRY", dict(scheme_module._REGISTRY))

    @register
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(type(make_scheme("pre"))):
        name = "mine"
        strength: float = 2.0

    assert "mine" in schemes()
    assert make_scheme("mine", strength=3.0) == Mine(strength=3.0)
    assert linear_stack("mine")(torch.ones(1, 8)).shape == (1, 8)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("siamse", {}, "unknown scheme 'siamse': did you mean 'siamese'"),
        ("zzz", {}, "unknown scheme 'zzz': valid: .*siamese"),
        (3, {}, "named by a string, not by 3"),
        (None, {}, "named by a string"),
        ("siamese", {"depthscale": "code"}, "no option 'depthscale': did you mean 'depth_scale'"),
        ("pre", {"x": "post"}, "scheme 'pre' has no option 'x'"),
        ("siamese", {"x": "hybird"}, "option 'x' of scheme 'siamese' cannot be 'hybird': did you mean 'hybrid'"),
        ("siamese", {"depth_scale": "papers"}, "did you mean 'paper'"),
        ("siamese", {"depth_scale": True}, "option 'depth_scale'"),
        ("siamese", {"normalized_input": 1}, "option 'normalized_input'.* cannot be 1"),
        ("siamese", {"normalized_input": "true"}, "did you mean 'True'"),
        ("siamese", {"first_block_pre": True}, "needs x='hybrid'"),
        ("siamese", {"x": "post", "first_block_pre": True}, "needs x='hybrid'"),
        ("siamese", {"x_init": "1"}, "'x_init'.* finite number"),
        ("siamese", {"x_init": float("nan")}, "'x_init'.* finite number"),
        ("siamese", {"x_init": True}, "'x_init'.* finite number"),
        ("siamese", {"x_init": None}, "'x_init'.* finite number"),
        ("siamese", {"stream_dtype": "float23"}, "did you mean 'float32'"),
        ("pre", {"stream_dtype": torch.float32}, "option 'stream_dtype'"),
        ("siamese", {"topology": "dual"}, "option 'topology' of scheme 'siamese' cannot be 'dual': .*resi_dual"),
        ("siamese", {"topology": "singel"}, "did you mean 'single'"),
        ("siamese", {"topology": "single", "x_init": 0}, "cannot be 0 with topology='single'.*leave x_init at 1"),
        ("siamese", {"topology": "resi_dual", "x_init": 0.0}, "cannot be 0 with topology='resi_dual'"),
        ("siamese", {"topology": "single", "first_block_pre": True}, "needs x='hybrid'"),
        ("hybridnorm", {"first_block_pre": 1}, "option 'first_block_pre' of scheme 'hybridnorm' cannot be 1"),
        ("hybridnorm", {"first_block": True}, "no option 'first_block': did you mean 'first_block_pre'"),
        ("peri", {"normalized_embedding": "yes"}, "option 'normalized_embedding' of scheme 'peri'"),
        ("mixln", {"share": 1.5}, "'share' of scheme 'mixln' must be a number from 0 to 1, not 1.5"),
        ("mixln", {"share": -0.1}, "from 0 to 1, not -0.1"),
        ("mixln", {"share": float("nan")}, "from 0 to 1, not nan"),
        ("mixln", {"share": "0.5"}, "from 0 to 1, not '0.5'"),
        ("mixln", {"share": True}, "from 0 to 1, not True"),
        ("mixln", {"share": None}, "from 0 to 1, not None"),
        ("mixln", {"post": 0.5}, "scheme 'mixln' has no option 'post'"),
        ("deepnorm", {"alpha": 2.0}, "scheme 'deepnorm' has no option 'alpha'"),
        ("peri_ln", {}, "unknown scheme 'peri_ln': did you mean 'peri'"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_nearest_name(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_scheme(name, **options)


def test_an_object_takes_no_options_and_is_not_changed():
    made = make_scheme("siamese", x="hybrid")
    assert make_scheme(made) is made
    with pytest.raises(ConfigError, match="takes no further options"):
        make_scheme(made, x="post")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.x = "post"


def test_options_rebuild_the_scheme():
    made = make_scheme(
        "siamese", x="hybrid", first_block_pre=True, depth_scale="none", x_init=0, stream_dtype="float32"
    )
    assert make_scheme(made.name, **made.options()) == made


def test_hybrid_at_a_parallel_site_is_refused():
    with pytest.raises(ConfigError, match="parallel"):
        make_scheme("siamese", x="hybrid").sublayer(Site(0, 0, "parallel", 2, 2), SPEC)
    with pytest.raises(ConfigError, match="parallel"):
        Stack([nn.Linear(8, 8)] * 2, "siamese", 8, kinds=("parallel",), x="hybrid")


def test_nearest_names_one_or_all():
    assert nearest("atention", ("attention", "mlp")) == "did you mean 'attention'?"
    assert nearest("q", ("b", "a")) == "valid: a, b"
    assert nearest("q", ()) == "valid: none"


def test_sites_of_a_stack():
    sites = stack_sites(2, ("attention", "mlp"))
    assert [(s.sublayer, s.block, s.kind, s.first_block) for s in sites] == [
        (0, 0, "attention", True),
        (1, 0, "mlp", True),
        (2, 1, "attention", False),
        (3, 1, "mlp", False),
    ]
    assert {(s.blocks, s.sublayers) for s in sites} == {(2, 4)}


def test_what_siamese_declares():
    attention, mlp = stack_sites(1, ("attention", "mlp"))
    post, hybrid = make_scheme("siamese"), make_scheme("siamese", x="hybrid")
    bare = make_scheme("siamese", normalized_input=False)
    assert [post.input_norm(attention), post.input_norm(mlp)] == ["before", "before"]
    assert [hybrid.input_norm(attention), hybrid.input_norm(mlp)] == ["none", "before"]
    assert [bare.input_norm(attention), bare.input_norm(mlp)] == ["none", "none"]
    assert [post.branch_norms(attention), hybrid.branch_norms(mlp)] == [(), ()]
    assert hybrid.branch_norms(attention) == ("q", "k", "v")
    for made in (post, hybrid, make_scheme("pre"), make_scheme("post")):
        assert {made.init_gain(role, mlp) for role in ("q", "k", "v", "o", "mlp")} == {1.0}
        assert made.decay("anything") is True
        assert made.gate(mlp, 1) == 1.0


def test_descriptions_name_the_scale():
    made = make_scheme("siamese", x="hybrid")
    attention, mlp = (made.sublayer(site, SPEC).describe() for site in stack_sites(1, ("attention", "mlp")))
    assert attention["reads"] == "c1⊙X + Ny(Y)"
    assert mlp["writes"] == "X = Nx(X) + c·o, Y = Y + o"
    assert attention["scale"] == mlp["scale"] == pytest.approx(2**-0.5)


@pytest.mark.parametrize(("scheme", "options"), ALL, ids=str)
def test_no_buffers_and_no_random_numbers(scheme, options):
    made = make_scheme(scheme, **options)
    before = torch.random.get_rng_state()
    modules = [made.sublayer(site, SPEC) for site in stack_sites(3, ("attention", "mlp"))]
    modules.append(made.readout(SPEC))
    for module in modules:
        assert isinstance(module, Sublayer | Readout)
        assert list(module.buffers()) == []
        for part in module.modules():
            part.reset_parameters()
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("scheme", "options"), ALL, ids=str)
def test_reset_restores_every_parameter(scheme, options):
    stack = linear_stack(scheme, **options)
    own = [m for m in stack.modules() if hasattr(m, "reset_parameters") and not isinstance(m, nn.Linear)]
    start = copy.deepcopy(stack.state_dict())
    for module in own:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 9.0)
    for module in own:
        module.reset_parameters()
    assert all(torch.equal(start[name], value) for name, value in stack.state_dict().items())


@pytest.mark.parametrize(("scheme", "options"), ALL, ids=str)
def test_through_the_meta_device(scheme, options):
    stack = linear_stack(scheme, **options)
    with torch.device("meta"):
        empty = linear_stack(scheme, **options)
    empty.load_state_dict(stack.state_dict(), assign=True)
    h = torch.randn(2, 8)
    assert torch.equal(stack(h), empty(h))


@pytest.mark.parametrize(("scheme", "options"), ALL, ids=str)
def test_copies_and_pickles_compute_the_same(scheme, options):
    stack = linear_stack(scheme, **options)
    h = torch.randn(2, 8)
    for again in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert torch.equal(stack(h), again(h))


def test_sharing_no_parameter_between_sublayers():
    stack = linear_stack(x="hybrid", blocks=3)
    assert len({id(p) for p in stack.parameters()}) == len(list(stack.named_parameters(remove_duplicate=False)))


def test_the_gate_multiplies_the_branch_output():
    class Warm(type(make_scheme("siamese"))):
        name = "warm"

        def gate(self, site, step):
            return min(step / (10 * (site.block + 1)), 1.0)

    stack = linear_stack(Warm())
    h = torch.randn(2, 8)
    full = stack(h)
    set_step(stack, stack.scheme, 5)
    assert [r.gate for block in stack.blocks for r in block.residuals] == [0.5, 0.5, 0.25, 0.25]
    warm = stack(h)
    assert not torch.allclose(warm, full)
    for block, factor in zip(stack.blocks, (0.5, 0.25), strict=True):
        for branch in block.branches:
            with torch.no_grad():
                branch.weight.mul_(factor)
                branch.bias.mul_(factor)
    set_step(stack, stack.scheme, 10_000)
    torch.testing.assert_close(stack(h), warm)


# Stack


def test_a_stack_refuses_what_does_not_fit():
    branch = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match="3 branches do not fill whole blocks of 2"):
        Stack([branch] * 3, "pre", 8)
    with pytest.raises(ConfigError, match="0 branches"):
        Stack([], "pre", 8)
    with pytest.raises(ConfigError, match="unknown kind of branch 'atention': did you mean 'attention'"):
        Stack([branch] * 2, "pre", 8, kinds=("atention", "mlp"))
    with pytest.raises(ConfigError, match="wants k, q, v normalised per head inside the attention at sublayer 0"):
        Stack([branch] * 2, "siamese", 8, x="hybrid")
    with pytest.raises(ConfigError, match="has no option 'hybrid'"):
        Stack([branch] * 2, "siamese", 8, hybrid=True)
    with pytest.raises(ConfigError, match="no branches of kind 'atention': did you mean 'attention'"):
        linear_stack()(torch.ones(1, 8), atention={})
    with pytest.raises(ConfigError, match="unknown norm 'batch'"):
        Stack([branch] * 2, "pre", 8, norm="batch")


def test_a_stack_takes_a_scheme_object():
    assert isinstance(make_scheme("post"), Scheme)
    assert linear_stack(make_scheme("post")).scheme == make_scheme("post")


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 3, 4, 8), (1, 257, 8)], ids=str)
def test_any_leading_shape(shape):
    stack = linear_stack()
    h = torch.randn(shape)
    out = stack(h)
    assert out.shape == shape
    torch.testing.assert_close(out.reshape(-1, 8), stack(h.reshape(-1, 8)))


# The dtype of the streams


class Constant(nn.Module):
    """A branch whose output is a constant, and which remembers the dtype it was given."""

    def __init__(self, value):
        super().__init__()
        self.value = value
        self.seen = None

    def forward(self, u):
        self.seen = u.dtype
        return torch.full_like(u, self.value)


@pytest.mark.parametrize("scheme", ["pre", "siamese"])
def test_a_small_update_survives_in_float32_streams_and_is_lost_without(scheme):
    from siamesenorm.probes import capture_streams

    h = torch.full((1, 3, 8), 256.0).bfloat16()
    for dtype, expected in (("float32", 256 + 4 * 0.8984375), (None, 256.0)):
        branches = [Constant(0.9) for _ in range(4)]
        stack = Stack(branches, scheme, 8, stream_dtype=dtype).bfloat16()
        with capture_streams(stack) as streams:
            out = stack(h)
        assert out.dtype == torch.bfloat16
        assert {b.seen for b in branches} == {torch.bfloat16}
        assert len(streams) == 2
        assert all(len(s) == (1 if scheme == "pre" else 2) for s in streams)
        assert {t.dtype for s in streams for t in s} == {torch.float32 if dtype else torch.bfloat16}
        assert (streams[-1][-1].float() == expected).all()


@pytest.mark.parametrize("scheme", ["pre", "post", "siamese"])
def test_float32_streams_change_nothing_in_a_float32_or_float64_stack(scheme):
    for dtype in (torch.float32, torch.float64):
        plain = linear_stack(scheme).to(dtype)
        wide = linear_stack(scheme, stream_dtype="float32").to(dtype)
        wide.load_state_dict(plain.state_dict())
        h = torch.randn(3, 8, dtype=dtype)
        assert torch.equal(plain(h), wide(h))


@pytest.mark.parametrize("scheme", ["pre", "post", "siamese"])
def test_float32_streams_are_nearer_to_float64_and_trainable(scheme):
    exact = linear_stack(scheme, blocks=12).bfloat16().double()
    h = (10 * torch.randn(64, 8)).bfloat16()
    reference = exact(h.double())
    errors = {}
    for dtype in (None, "float32"):
        stack = linear_stack(scheme, blocks=12, stream_dtype=dtype).bfloat16()
        stack.load_state_dict(exact.state_dict())
        out = stack(h)
        out.float().square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in stack.parameters())
        errors[dtype] = (out.double() - reference).abs().mean().item()
    assert errors["float32"] < errors[None]


def test_a_half_precision_stack_may_widen_too():
    stack = linear_stack("siamese", stream_dtype="float32").half()
    assert stack(torch.randn(2, 8).half()).dtype == torch.float16


@pytest.mark.parametrize("name", schemes())
def test_a_label_names_the_scheme(name):
    assert make_scheme(name).label == name
    assert parse_scheme(name) == make_scheme(name)


def test_a_label_has_the_options_that_were_chosen():
    scheme = make_scheme("siamese", x="hybrid", first_block_pre=True, warmup_steps=10, x_init=0.5)
    assert scheme.label == "siamese:warmup_steps=10:x=hybrid:first_block_pre=true:x_init=0.5"
    assert parse_scheme(scheme.label) == scheme
    assert parse_scheme("siamese:stream_dtype=null") == make_scheme("siamese")
    with pytest.raises(ConfigError, match="no option with a value: write siamese:option=value"):
        parse_scheme("siamese:hybrid")
    with pytest.raises(ConfigError, match="did you mean 'siamese'"):
        parse_scheme("siamse:x=post")
