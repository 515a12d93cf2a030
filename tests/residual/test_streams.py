"""The schemes of several streams: the oracle, how a stack starts, what it keeps in memory, known mistakes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from siamesenorm import ops
from siamesenorm.probes import capture_streams
from siamesenorm.residual import ConfigError, NormSpec, Site, Stack, make_scheme, stack_sites
from siamesenorm.residual.mgr import starting_k
from siamesenorm.residual.mhc import sinkhorn
from siamesenorm.residual.mixing import combine, rms_scores, softmax_mix
from tests import oracle
from tests.oracle_streams import doubly_stochastic, extras
from tests.parity import relative_error
from tests.residual.test_against_oracle import EPS, Branch, D, embedding, make_stack, named, scatter

CASES = [
    *(("hyper", {"n": n, "dynamic": dynamic}) for n, dynamic in itertools.product((1, 2, 4, 5), (True, False))),
    *(("mhc", {"n": n}) for n in (1, 2, 4, 5)),
    *(("attnres", {"block_size": size}) for size in (None, 1, 2, 3, 4, 100)),
    *(("mgr", {"n": n, "gates": g}) for n, g in itertools.product((1, 2, 4, 9), ("independent", "competitive"))),
]
ONE_EACH = [("hyper", {}), ("hyper", {"dynamic": False}), ("mhc", {}), ("attnres", {}), ("attnres", {"block_size": 2})]
ONE_EACH += [("mgr", {}), ("mgr", {"gates": "competitive"})]


def follow(stack, h, scheme, kind="rms", eps=EPS, **options):
    """The oracle's output and streams per sublayer with the parameters of ``stack``."""
    w = dict(stack.named_parameters())

    def norm(name):
        return oracle.norm_of(w, name, kind, eps)

    parts = []
    for block, made in enumerate(stack.blocks):
        for j, branch in enumerate(made.branches):
            prefix = f"blocks.{block}.residuals.{j}."
            branches = [(branch, norm(f"blocks.{block}.norms.{j}"))]
            own = oracle.within(w, prefix)
            parts.append(oracle.Part(branches, own, lambda name, prefix=prefix: norm(prefix + name), block, j == 0))
    followed = oracle.Stack(parts, len(stack.blocks), lambda name: norm(f"readout.{name}"))
    more = extras(scheme, eps, w, "readout.")
    out, states = oracle.ORACLES[scheme](h, followed, **more, **options)
    return norm("norm")(out), states


def without_gradient(scheme, n=4, **_):
    """The parameters that the equations themselves leave without gradient, by the ends of their names."""
    first = "0.residuals.0."
    # A softmax over one source is 1 whatever its query is.
    if scheme == "attnres":
        return (first + "query",)
    if scheme == "mgr":
        return (first + "query",) if n > 1 else ("residuals.0.query", "residuals.1.query", "readout.query")
    # Rows that sum to 1 leave streams that are all equal as they are, and a single one always.
    if scheme == "mhc":
        return tuple(f"{first if n > 1 else ''}{part}_mix" for part in ("phi", "alpha", "bias"))
    return ()


@pytest.mark.parametrize(("kind", "bias"), [("rms", False), ("layer", True)])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_values_streams_and_gradients(case, kind, bias):
    scheme, options = case
    # Behind a norm, the scale of what is read shows through the norm's eps alone: a small one would leave nothing but
    # rounding of the gradients of the weights that set it.
    stack = make_stack(scheme, norm=kind, bias=bias, eps=0.1, **options)
    h = embedding()
    with capture_streams(stack) as streams:
        out = stack(h)
    expected, states = follow(stack, h, scheme, kind, 0.1, **options)
    assert relative_error(out, expected) < 1e-10
    assert len(streams) == 3
    for got, wanted in zip(streams, states[1::2], strict=True):
        assert [tuple(stream.shape) for stream in got] == [tuple(stream.shape) for stream in wanted]
        for stream, reference in zip(got, wanted, strict=True):
            assert relative_error(stream, reference) < 1e-10

    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    inputs = {"h": h, **dict(stack.named_parameters())}
    ours = torch.autograd.grad((out * probe).sum(), list(inputs.values()), materialize_grads=True)
    theirs = torch.autograd.grad((expected * probe).sum(), list(inputs.values()), materialize_grads=True)
    for name, a, b in zip(inputs, ours, theirs, strict=True):
        if name.endswith(without_gradient(scheme, **options)):
            assert max(a.abs().max(), b.abs().max()) < 1e-12, name
        else:
            assert b.abs().max() > 0, name
            # What all but cancels is known to rounding of its terms.
            assert relative_error(a, b) < 1e-10 or (a - b).abs().max() < 1e-14, name


# How a stack starts


def fresh(scheme, eps=EPS, blocks=3, **options):
    return Stack([Branch(i) for i in range(2 * blocks)], scheme, D, eps=eps, **options).double()


@pytest.mark.parametrize(
    "case",
    [
        *((s, {"n": n}) for s in ("hyper", "mhc") for n in (1, 2, 4, 5)),
        *(("hyper", {"n": n, "dynamic": False}) for n in (1, 2, 4, 5)),
        ("attnres", {}),
        ("attnres", {"block_size": 2}),
    ],
    ids=named,
)
def test_starts_as_pre_norm(case):
    scheme, options = case
    h = 2 * torch.randn(2, 5, D, dtype=torch.float64)
    # A norm does not see the scale of its input, but for its eps.
    assert relative_error(fresh(scheme, 1e-14, **options)(h), fresh("pre", 1e-14)(h)) < 1e-10
    if options.get("n", 1) > 1:
        tolerance = 1e-6 if scheme == "hyper" else 1e-12
        assert relative_error(fresh(scheme, **options)(h), fresh("pre")(h)) < tolerance


@pytest.mark.parametrize("n", [2, 4, 5])
def test_mhc_starts_as_pre_norm_for_small_embeddings_too(n):
    h = 0.02 * torch.randn(2, 5, D, dtype=torch.float64)
    assert relative_error(fresh("mhc", n=n)(h), fresh("pre")(h)) < 1e-9


@pytest.mark.parametrize("case", [("hyper", {}), ("hyper", {"dynamic": False}), ("mhc", {})], ids=named)
def test_equal_streams_do_not_stay_equal(case):
    scheme, options = case
    stack, h = fresh(scheme, **options), torch.randn(4, 5, D, dtype=torch.float64)
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (stack(h) * torch.randn(D, dtype=torch.float64)).sum().backward()
        optimizer.step()
    with capture_streams(stack) as streams:
        stack(h)
    (last,) = streams[-1]
    assert (last - last[..., :1, :]).abs().amax((0, 1, 3))[1:].min() > 1e-4


def test_block_form_of_one_sublayer_is_the_full_form():
    h = embedding(requires_grad=False)
    full, blocks = make_stack("attnres"), make_stack("attnres", block_size=1)
    with capture_streams(full) as a, capture_streams(blocks) as b:
        assert torch.equal(full(h), blocks(h))
    assert [len(s) for s in a] == [len(s) for s in b] == [3, 5, 7]


def test_sources_of_the_block_form():
    h = embedding(requires_grad=False)
    stack = make_stack("attnres", block_size=3)
    with capture_streams(stack) as streams:
        stack(h)
    # h, and 2, 4 and 6 sublayers: one running sum, one whole block and a running sum, two whole blocks.
    assert [len(s) for s in streams] == [2, 3, 3]
    assert all(s[0] is streams[0][0] or torch.equal(s[0], h) for s in streams)


@pytest.mark.parametrize("case", ONE_EACH, ids=named)
def test_every_parameter_has_a_gradient_after_one_step(case):
    scheme, options = case
    stack, h = fresh(scheme, **options), torch.randn(4, 5, D, dtype=torch.float64)
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (stack(h) * torch.randn(D, dtype=torch.float64)).sum().backward()
        optimizer.step()
    # One that is None would keep processes waiting for it.
    assert all(p.grad is not None for p in stack.parameters())
    dead = {name for name, p in stack.named_parameters() if not p.grad.any()}
    assert dead == {name for name in dead if name.endswith(without_gradient(scheme, **options))}


# Numbers


@pytest.mark.parametrize("n", [1, 2, 4, 7])
@pytest.mark.parametrize("spread", [0.1, 3.0, 200.0])
def test_the_mix_sums_to_one_along_the_axis_normalised_last(n, spread):
    logits = spread * torch.randn(50, n, n, dtype=torch.float64)
    mix = sinkhorn(logits)
    torch.testing.assert_close(mix.sum(-1), torch.ones(50, n, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (mix >= 0).all()
    if spread < 10:
        torch.testing.assert_close(mix, doubly_stochastic(logits.exp()), rtol=1e-10, atol=1e-12)
    if spread < 1:
        torch.testing.assert_close(mix.sum(-2), torch.ones(50, n, dtype=torch.float64), rtol=0, atol=1e-10)
    assert sinkhorn(logits.float()).isfinite().all()


def test_random_weights_of_mhc_keep_the_mix_stochastic():
    sublayer = scatter(make_scheme("mhc").sublayer(Site(1, 0, "mlp", 2, 4), NormSpec("rms", D)).double())
    read, write, mix = sublayer.weights(torch.randn(3, 7, 4, D, dtype=torch.float64))
    torch.testing.assert_close(mix.sum(-1), torch.ones(3, 7, 4, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (mix.sum(-2) - 1).abs().max() > 1e-14
    assert ((read > 0) & (read < 1)).all()
    assert ((write > 0) & (write < 2)).all()


def test_sinkhorn_and_the_softmax_mix_pass_gradcheck_twice():
    logits = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 3), (logits,))
    assert torch.autograd.gradgradcheck(lambda x: sinkhorn(x, 3), (logits,))
    query = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for shape in ((4,), (2, 3, 4)):
        sources = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]

        def mix(query, *sources):
            return softmax_mix(query, sources, 1e-3, 0.7)

        assert torch.autograd.gradcheck(mix, (query, *sources))
        assert torch.autograd.gradgradcheck(mix, (query, *sources))


def plain_mix(query, sources, eps, scale=1.0):
    """The softmax mix as its equation, without a backward pass of its own."""
    weights = torch.cat(rms_scores(query, sources, eps, scale), -1).softmax(-1)
    wide = torch.stack([source.to(weights.dtype) for source in sources], -1)
    return (wide * weights.unsqueeze(-2)).sum(-1).to(sources[0].dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, D), (0, D), (7, D), (3, 257, D)], ids=str)
def test_the_softmax_mix_rounds_once(dtype, shape):
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(5)]
    query = torch.randn(D).to(dtype).requires_grad_()
    probe = torch.randn(shape).to(dtype)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in (query, *leaves)]
    exact = plain_mix(exact_leaves[0], exact_leaves[1:], EPS)
    wanted = (exact, *torch.autograd.grad((exact * probe.double()).sum(), exact_leaves))
    errors = []
    for form in (softmax_mix, plain_mix):
        # Views that are not contiguous.
        sources = [leaf.transpose(0, -1).contiguous().transpose(0, -1) for leaf in leaves]
        out = form(query, sources, EPS)
        assert out.dtype == dtype
        got = (out, *torch.autograd.grad(out, (query, *leaves), probe))
        errors.append(
            [(a.double() - b).abs().max().item() if a.numel() else 0.0 for a, b in zip(got, wanted, strict=True)]
        )
    for ours, plain in zip(*errors, strict=True):
        assert ours <= 2 * plain + 1e-7


@pytest.mark.parametrize("case", ONE_EACH, ids=named)
def test_bf16_streams_are_within_rounding_of_float64(case):
    scheme, options = case
    stack = make_stack(scheme, **options).bfloat16()
    exact = make_stack(scheme, **options)
    exact.load_state_dict({name: value.double() for name, value in stack.state_dict().items()})
    h = torch.randn(2, 5, D).bfloat16()
    with capture_streams(stack) as streams:
        out = stack(h)
    assert out.dtype == torch.bfloat16
    assert {stream.dtype for s in streams for stream in s} == {torch.bfloat16}
    assert relative_error(out.double(), exact(h.double())) < 0.1
    out.float().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in stack.parameters())


@pytest.mark.parametrize("case", ONE_EACH, ids=named)
def test_mixes_are_computed_in_float32_under_autocast(case):
    scheme, options = case
    sublayer = scatter(make_scheme(scheme, **options).sublayer(Site(4, 2, "attention", 4, 8), NormSpec("rms", D)))
    h = torch.randn(2, 5, D)
    streams = make_scheme(scheme, **options).open(h)
    if scheme in ("attnres", "mgr"):
        streams = tuple(torch.randn(2, 5, D) for _ in range(4))

    def step():
        u, carry = sublayer.read(streams)
        return u, *sublayer.write(carry, torch.tanh(u))

    plain = step()
    with torch.autocast("cpu", torch.bfloat16):
        cast = step()
    for a, b in zip(plain, cast, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", ONE_EACH, ids=named)
@pytest.mark.parametrize("shape", [(D,), (0, D), (2, 3, 4, D), (1, 257, D)], ids=str)
def test_any_leading_shape(case, shape):
    scheme, options = case
    stack = make_stack(scheme, **options)
    h = torch.randn(shape, dtype=torch.float64)

    class Pointwise(nn.Module):
        def forward(self, u):
            return torch.tanh(u) @ torch.eye(D, dtype=u.dtype).roll(1, 0)

    for block in stack.blocks:
        block.branches = nn.ModuleList(Pointwise() for _ in block.branches)
    out = stack(h)
    assert out.shape == shape
    torch.testing.assert_close(out.reshape(-1, D), stack(h.reshape(-1, D)))
    out.sum().backward()


# Memory


class Product(nn.Module):
    """A branch that keeps one tensor, so that what is counted is the scheme's."""

    def forward(self, u):
        return torch.tanh(u)


def saved_bytes(scheme, sublayers, dtype=torch.float32, width=16, **options):
    """Bytes that a stack's forward keeps for its backward pass, each storage once."""
    stack = Stack([Product() for _ in range(sublayers)], scheme, width, **options).to(dtype)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        stack(torch.randn(4, 8, width, dtype=dtype, requires_grad=True))
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [None, 4])
def test_memory_of_attention_residuals_grows_linearly(block_size, dtype):
    with ops.use("plain"):
        pre = saved_bytes("pre", 32, dtype)
        at = {s: saved_bytes("attnres", s, dtype, block_size=block_size) for s in (8, 16, 32, 64)}
    per_sublayer = (at[16] - at[8]) / 8
    assert at[32] - at[16] == pytest.approx(16 * per_sublayer, rel=0.01)
    assert at[64] - at[32] == pytest.approx(32 * per_sublayer, rel=0.01)
    # No more than Pre-Norm's with one source more for each sublayer.
    assert at[32] <= 1.3 * pre


@pytest.mark.parametrize("case", [c for c in ONE_EACH if c[0] != "attnres"], ids=named)
def test_memory_of_the_other_schemes_grows_linearly(case):
    scheme, options = case
    at = {s: saved_bytes(scheme, s, **options) for s in (8, 16, 32)}
    assert at[32] - at[16] == pytest.approx(2 * (at[16] - at[8]), rel=0.01)


# Known mistakes


def test_the_mix_is_not_thrown_away():
    """Each scheme's mixing weights change the result, and each entry of a mix matrix does."""
    for scheme, name in (("hyper", "static_mix"), ("hyper", "dynamic_mix"), ("mhc", "bias_mix"), ("mhc", "phi_mix")):
        stack, h = make_stack(scheme), embedding(requires_grad=False)
        mix = dict(stack.named_parameters())[f"blocks.1.residuals.0.{name}"]
        (gradient,) = torch.autograd.grad((stack(h) * torch.randn(D, dtype=torch.float64)).sum(), mix)
        assert (gradient.abs() > 0).all(), (scheme, name)


def test_the_mix_is_not_transposed():
    """R[i, j] of hyper-connections goes from stream i to stream j; M[i, j] of mHC from stream j to stream i."""
    site, spec = Site(0, 0, "attention", 1, 2), NormSpec("rms", D)
    h = torch.randn(3, 2, D)
    hyper = make_scheme("hyper", n=2, dynamic=False).sublayer(site, spec)
    with torch.no_grad():
        hyper.static_mix.copy_(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    _, carry = hyper.read((h,))
    (after,) = hyper.write(carry, torch.zeros(3, D))
    assert torch.equal(after, torch.stack((torch.zeros(3, D), h[:, 0]), 1))

    mhc = make_scheme("mhc", n=2).sublayer(site, spec)
    logits = torch.tensor([[0.0, 5.0], [0.0, -5.0]])
    with torch.no_grad():
        mhc.bias_mix.copy_(logits)
    _, carry = mhc.read((h,))
    (after,) = mhc.write(carry, torch.zeros(3, D))
    mix = doubly_stochastic(logits.exp())
    torch.testing.assert_close(after, torch.stack([mix[i, 0] * h[:, 0] + mix[i, 1] * h[:, 1] for i in (0, 1)], 1))
    assert mix[0, 1] > 0.9 > 0.1 > mix[0, 0]


def test_an_n_by_n_mix_is_not_one_row():
    h = torch.randn(3, 4, D)
    weights = torch.randn(4, 4)
    mixed = combine(weights, h)
    for i in range(4):
        torch.testing.assert_close(mixed[:, i], sum(weights[i, j] * h[:, j] for j in range(4)))


@pytest.mark.parametrize("scheme", ["hyper", "mhc"])
def test_the_stream_a_sublayer_starts_with_follows_its_place(scheme):
    made, favoured = make_scheme(scheme, n=3), []
    for site in stack_sites(3, ("attention", "mlp")):
        sublayer = made.sublayer(site, NormSpec("rms", D))
        weights = sublayer.static_read if scheme == "hyper" else sublayer.bias_read
        favoured.append(int(weights.argmax()))
    assert favoured == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("case", ONE_EACH, ids=named)
def test_streams_are_in_neither_batch_nor_features(case):
    scheme, options = case
    stack, seen = make_stack(scheme, **options), []
    for block in stack.blocks:
        for branch in block.branches:
            branch.register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    with capture_streams(stack) as streams:
        stack(embedding())
    assert set(seen) == {(2, 5, D)}
    n = options.get("n", 4)
    for group in streams:
        for stream in group:
            assert stream.shape in {(2, 5, D), (2, 5, n, D)}


# Constants and options


@pytest.mark.parametrize(("sublayers", "n"), [(24, 4), (8, 4), (64, 2), (12, 1)])
def test_gates_of_mgr_start_as_the_equation_says(sublayers, n):
    start = math.sqrt((sublayers - n + 1) / 21) * (math.e**3 + 1)
    assert starting_k(sublayers, n) == pytest.approx(math.log(start - n))
    site = Site(sublayers - 1, sublayers // 2 - 1, "mlp", sublayers // 2, sublayers)
    streams = tuple(torch.randn(2, D) for _ in range(n))
    for gates, wanted in (("competitive", 1 / start), ("independent", 1 / (1 + start - n))):
        sublayer = make_scheme("mgr", n=n, gates=gates).sublayer(site, NormSpec("rms", D))
        for gate in sublayer.openness(streams):
            torch.testing.assert_close(gate, torch.full((2, 1), wanted))


@pytest.mark.parametrize(("sublayers", "n"), [(2, 4), (3, 4), (8, 8), (5, 5)])
def test_gates_of_mgr_in_stacks_too_shallow_for_their_streams(sublayers, n):
    assert starting_k(sublayers, n) == 0.0


def test_streams_of_mgr_are_appended_and_not_copies():
    stack = make_stack("mgr", n=4)
    with capture_streams(stack) as streams:
        stack(embedding())
    assert [len(s) for s in streams] == [3, 4, 4]
    assert [r.has_gate for block in stack.blocks for r in block.residuals] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("value", [0, -1, 1.5, 2.0, "4", True, None, float("nan")])
@pytest.mark.parametrize(("scheme", "option"), [("hyper", "n"), ("mhc", "n"), ("mgr", "n"), ("attnres", "block_size")])
def test_a_count_is_a_whole_number_of_at_least_one(scheme, option, value):
    if (option, value) == ("block_size", None):
        assert make_scheme(scheme, block_size=None).block_size is None
        return
    with pytest.raises(ConfigError, match=f"option '{option}' of scheme '{scheme}' must be a whole number of at least"):
        make_scheme(scheme, **{option: value})


def test_other_values_that_cannot_be_had():
    with pytest.raises(ConfigError, match="option 'dynamic' of scheme 'hyper' cannot be 'yes'"):
        make_scheme("hyper", dynamic="yes")
    with pytest.raises(ConfigError, match="'competetive': did you mean 'competitive'"):
        make_scheme("mgr", gates="competetive")
    with pytest.raises(ConfigError, match="scheme 'mhc' has no option 'dynamic'"):
        make_scheme("mhc", dynamic=True)


def test_what_gets_no_weight_decay():
    decayed = {}
    for scheme in ("hyper", "mhc", "attnres", "mgr"):
        made = make_scheme(scheme)
        names = dict(make_stack(scheme).named_parameters())
        decayed[scheme] = {
            name.rpartition(".")[2]
            for name, p in names.items()
            if "residual" in name and p.ndim > 1 and made.decay(name)
        }
    assert decayed == {
        "hyper": {"dynamic_read", "dynamic_write", "dynamic_mix"},
        "mhc": {"phi_read", "phi_write", "phi_mix"},
        "attnres": set(),
        "mgr": set(),
    }


@pytest.mark.parametrize("case", ONE_EACH, ids=named)
def test_no_parameter_is_without_dimensions_and_nothing_is_a_buffer(case):
    scheme, options = case
    stack = make_stack(scheme, **options)
    assert all(parameter.ndim > 0 for parameter in stack.parameters())
    assert list(stack.buffers()) == []
