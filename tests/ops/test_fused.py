"""Fused reads against float64, with the plain form as the measure of what rounding costs."""

from __future__ import annotations

import copy
import importlib.util
import os

import pytest
import torch

import siamesenorm.ops as ops
from siamesenorm.ops import dispatch
from siamesenorm.residual import ConfigError, NormSpec, Site, Stack, Step, make_scheme, through

D = 24
SITES = (Site(2, 1, "attention", 4, 8), Site(3, 1, "mlp", 4, 8))
CASES = {
    "pre": ("pre", {}),
    "post-pre": ("siamese", {"x": "post"}),
    "post-pre, no Nin": ("siamese", {"x": "post", "normalized_input": False}),
    "hybrid-pre": ("siamese", {"x": "hybrid"}),
    "hybrid-pre*": ("siamese", {"x": "hybrid", "first_block_pre": True}),
    "resi_dual": ("siamese", {"topology": "resi_dual"}),
    "single": ("siamese", {"topology": "single"}),
    "hybridnorm": ("hybridnorm", {}),
    "lns": ("lns", {}),
}
WITH_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and its interpreter: TRITON_INTERPRET=1",
)
BACKENDS = ["fused", pytest.param("triton", marks=WITH_TRITON)]


class Branch(torch.nn.Module):
    branch_norms = ("q", "k", "v")

    def __init__(self, d: int = D) -> None:
        super().__init__()
        self.map = torch.nn.Linear(d, d)

    def forward(self, u):
        return torch.tanh(self.map(u))


def stack(case, norm="rms", d=D, seed=0, bias=None, blocks=2):
    scheme, options = CASES[case]
    torch.manual_seed(seed)
    bias = norm == "layer" if bias is None else bias
    made = Stack([Branch(d) for _ in range(2 * blocks)], scheme, d, norm=norm, bias=bias, **options).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made


def results(module, h, mode):
    """The output, and gradients of all that has some, in float64."""
    h = h.detach().requires_grad_()
    with ops.use(mode):
        out = module(h)
        weight = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape)
        (out.double() * weight).sum().backward()
    found = {"out": out.detach(), "h": h.grad, **{n: p.grad for n, p in module.named_parameters()}}
    module.zero_grad(set_to_none=True)
    return {name: None if each is None else each.double() for name, each in found.items()}


def error(value, reference):
    return (value - reference).norm().item() / max(reference.norm().item(), 1e-300)


def errors(module, h, dtype, mode):
    """Of the output and each gradient: the error of the plain form in ``dtype``, and of ``mode``."""
    narrow = copy.deepcopy(module).to(dtype)
    # Both are held to the function of the rounded weights.
    exact = results(copy.deepcopy(narrow).double(), h.to(dtype).double(), "plain")
    plain, fused = (results(narrow, h.to(dtype), each) for each in ("plain", mode))
    assert exact.keys() == fused.keys()
    assert all((exact[name] is None) == (fused[name] is None) for name in exact)
    return {n: (error(plain[n], each), error(fused[n], each)) for n, each in exact.items() if each is not None}


def assert_as_exact_as_the_plain_form(module, h, dtype, mode):
    floor = 4 * torch.finfo(dtype).eps
    for name, (plain, fused) in errors(module, h, dtype, mode).items():
        assert fused <= max(2 * plain, floor), (name, fused, plain)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_plain_form_in_float64(case, norm):
    module, h = stack(case, norm), torch.randn(3, 7, D, dtype=torch.float64)
    plain, fused = results(module, h, "plain"), results(module, h, "fused")
    for name, reference in plain.items():
        assert (reference is None) == (fused[name] is None), name
        if reference is not None:
            assert error(fused[name], reference) < 1e-12, name


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("case", CASES)
def test_the_forward_pass_has_the_bits_of_the_plain_form(case, norm):
    # So that a model says the same with gradients, without them, and in evaluation.
    module, h = stack(case, norm).float(), torch.randn(3, 7, D)
    with ops.use("plain"):
        expected = module(h)
    assert torch.equal(module(h), expected)
    with torch.no_grad():
        assert torch.equal(module.eval()(h), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("case", ["pre", "post-pre", "post-pre, no Nin", "hybrid-pre", "hybrid-pre*", "single"])
def test_rounding_costs_at_most_twice_that_of_the_plain_form(case, norm, dtype, backend):
    torch.manual_seed(3)
    assert_as_exact_as_the_plain_form(stack(case, norm), torch.randn(2, 9, D), dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5), (1, 8), (1, 1, 7), (257, 9), (5, 6), (2, 0, 4)])
@pytest.mark.parametrize("case", ["post-pre", "hybrid-pre"])
def test_odd_shapes(case, shape, backend):
    module = stack(case, d=shape[-1])
    h = torch.randn(shape)
    if h.numel():
        assert_as_exact_as_the_plain_form(module, h, torch.float32, backend)
        return
    found = results(module.float(), h, backend)
    assert found["out"].shape == shape
    assert all(each is None or (each == 0).all() for each in found.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", [1, 2, 3])
def test_widths_at_which_gradients_all_but_cancel(d, backend):
    # What is left of a gradient is then mostly rounding, so that only the errors of many can be compared.
    found = []
    for seed in range(10):
        torch.manual_seed(seed)
        found += errors(stack("hybrid-pre", d=d, seed=seed), torch.randn(17, d), torch.float32, backend).values()
    plain, fused = (torch.tensor(each).quantile(torch.tensor([0.5, 0.9])) for each in zip(*found, strict=True))
    assert (fused <= 2 * plain).all(), (plain, fused)


def test_what_is_not_contiguous():
    module = stack("post-pre")
    h = torch.randn(D, 5, 3).permute(2, 1, 0)
    assert not h.is_contiguous()
    assert_as_exact_as_the_plain_form(module, h, torch.float32, "fused")


def test_a_norm_keeps_the_layout_of_its_input():
    norm = NormSpec("rms", 8).build()
    x = torch.randn(2, 5, 3, 8).transpose(1, 2).requires_grad_()
    with ops.use("plain"):
        expected = norm(x)
    out = norm(x)
    assert out.stride() == expected.stride() == x.stride()
    assert error(out.double(), expected.double()) < 1e-6
    (grad,), (wanted,) = (torch.autograd.grad(each.sin().sum(), x) for each in (out, expected))
    assert error(grad, wanted) < 1e-6
    for strange in (torch.randn(8, 4).t(), torch.randn(4, 1).expand(4, 8), torch.randn(8)):
        assert torch.allclose(norm(strange), norm.wide(strange), atol=1e-6)


@pytest.mark.parametrize("pieces", [1, 3, 10])
def test_rows_are_gone_through_in_pieces(pieces, monkeypatch):
    from siamesenorm.ops import eager

    monkeypatch.setattr(eager, "_PIECE", -(-20 // pieces) * D // torch.get_num_threads() + 1)
    test_values_and_gradients_are_those_of_the_plain_form_in_float64("post-pre", "rms")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["norm_x", "norm_y"])
def test_a_norm_at_zero(name, backend):
    module = stack("post-pre", bias=False)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if name in key:
                parameter.zero_()
    torch.manual_seed(3)
    assert_as_exact_as_the_plain_form(module, torch.randn(4, 6, D), torch.float32, backend)


def test_one_tensor_is_read_by_two_norms_and_an_add():
    # The embedding is X and Y at once, and here the branch output, too.
    for case in CASES:
        scheme, options = CASES[case]
        made = make_scheme(scheme, **options)
        sublayers = [made.sublayer(site, NormSpec("rms", D)).double() for site in SITES]
        grads = []
        for mode in ("plain", "fused"):
            h = torch.linspace(-2, 3, 4 * D, dtype=torch.float64).view(4, D).sin().requires_grad_()
            with ops.use(mode):
                ends = through([Step(sublayer, lambda u, h=h: h + u) for sublayer in sublayers], made.open(h))
                loss = sum((end.sin() * (i + 1)).sum() for i, end in enumerate(ends)) + (h * ends[-1]).sum()
            grads.append(torch.autograd.grad(loss, h)[0])
        assert error(grads[1], grads[0]) < 1e-12, case


def test_gradients_of_every_input_by_finite_differences():
    module = stack("post-pre", "layer", d=3, blocks=1)
    names = [name for name, _ in module.named_parameters()]

    def run(h, *parameters):
        with ops.use("fused"):
            return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (h,))

    # A mapping of parameters calls the module and transforms nothing, so the read stays fused.
    h = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (h, *module.parameters()))


def test_incoming_gradients_are_not_written_to():
    module = stack("post-pre")
    h = torch.randn(6, D, dtype=torch.float64, requires_grad=True)
    with ops.use("fused"):
        streams = module.blocks[0]((h, h), {})
    given = tuple(torch.randn_like(each) for each in streams)
    before = tuple(each.clone() for each in given)
    torch.autograd.backward(streams, given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def kept(module, h, mode):
    """Bytes that autograd keeps, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with ops.use(mode), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(h)
    return sum(size for size, _ in seen.values())


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_siamese_keeps_one_stream_more_than_pre_norm_and_statistics_of_rows(dtype, norm):
    sublayers, rows, d = 4, 512, 256
    h = torch.randn(rows, d, dtype=dtype, requires_grad=True)
    stream = rows * d * h.element_size()
    small = stream // 4

    def of(case, mode):
        return kept(stack(case, norm, d).to(dtype), h, mode)

    pre, siamese = of("pre", "fused"), of("post-pre", "fused")
    # One more in each sublayer but the first, where X and Y are one tensor, the embedding; two more at the end, where
    # the readout reads both and the final norm reads their sum.
    assert abs(siamese - pre - (sublayers + 1) * stream) < small
    assert pre <= of("pre", "plain")
    assert siamese < of("post-pre", "plain")


def test_a_mode_is_forced_and_explained():
    x, norm = torch.randn(3, D), NormSpec("rms", D).build()
    assert ops.explain(x, norm).backend == "fused"
    with ops.use("plain"):
        assert str(ops.explain(x, norm)) == "plain: asked for"
        with ops.use("fused"):
            assert ops.explain(x, norm).backend == "fused"
        assert ops.explain(x, norm).backend == "plain"
    assert ops.explain(x.to(torch.int64), norm).backend == "plain"
    with ops.use("triton"):
        assert ops.explain(x.double(), norm).backend == "fused"
    norm.register_forward_hook(lambda *_: None)
    assert "hooks" in ops.explain(x, norm).reason
    with pytest.raises(ConfigError, match="did you mean 'fused'"):
        ops.use("fusd")
    assert dispatch._mode == "auto"


def test_a_hook_on_the_hosts_norm_sees_what_it_saw():
    module, seen = stack("post-pre"), []
    module.blocks[0].norms[1].register_forward_hook(lambda _, args, out: seen.append(args[0]))
    module(torch.randn(4, D, dtype=torch.float64))
    assert len(seen) == 1


def test_the_compiler_sees_through_and_graphs_do_not_grow():
    module = stack("post-pre", blocks=3)
    h = torch.randn(5, D, dtype=torch.float64)
    expected = results(module, h, "fused")
    torch._dynamo.reset()
    got = results(torch.compile(module, fullgraph=True, backend="aot_eager"), h, "fused")
    assert error(got["out"], expected["out"]) < 1e-12


def test_derivatives_of_derivatives_are_refused_and_the_plain_form_has_them():
    module, h = stack("post-pre"), torch.randn(2, D, dtype=torch.float64, requires_grad=True)
    with ops.use("fused"):
        first = torch.autograd.grad(module(h).square().sum(), h, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    with ops.use("plain"):
        first = torch.autograd.grad(module(h).square().sum(), h, create_graph=True)[0]
    first.sum().backward()
    assert h.grad is not None


@pytest.mark.parametrize("case", ["pre", "post-pre", "hybrid-pre"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_autocast_gates_and_wide_streams(case, reentrant):
    scheme, options = CASES[case]
    torch.manual_seed(0)
    module = Stack([Branch() for _ in range(4)], scheme, D, stream_dtype="float32", **options).bfloat16()
    for block in module.blocks:
        block.residuals[0].gate = torch.tensor(0.5)
    h = torch.randn(4, 5, D).bfloat16()

    def run(mode, again):
        x = h.clone().requires_grad_()
        with ops.use(mode), torch.autocast("cpu", torch.bfloat16):
            out = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=reentrant) if again else module(x)
            (out.float() * torch.linspace(-1, 2, out.numel()).view(out.shape)).sum().backward()
        found = [x.grad.double(), *(p.grad.double() for p in module.parameters())]
        module.zero_grad()
        return found

    for a, b in zip(run("fused", True), run("fused", False), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(run("fused", False), run("plain", False), strict=True):
        assert error(a, b) < 0.05


def counting(monkeypatch):
    """How often a fused read was computed since."""
    calls = []
    plain = dispatch._EAGER

    def forward(*arguments):
        calls.append(arguments[0])
        return plain.forward(*arguments)

    monkeypatch.setattr(dispatch, "_EAGER", dispatch.Kernels(forward, plain.backward))
    return calls


def test_a_forward_pass_alone_is_plain_unless_it_is_one_of_training(monkeypatch):
    calls = counting(monkeypatch)
    module, h = stack("post-pre"), torch.randn(3, D, dtype=torch.float64)
    with torch.no_grad():
        module.eval()(h)
        assert not calls
        # An activation checkpoint's first pass, which the second is to repeat.
        inside = module.train()(h)
    assert calls
    assert torch.equal(inside, module(h))


def test_a_sublayer_that_overrides_its_plain_form_is_not_fused():
    class Louder(type(make_scheme("siamese").sublayer(SITES[0], NormSpec("rms", D)))):
        def write(self, carry, o):
            return super().write(carry, 2 * o)

    module, h = stack("post-pre"), torch.randn(3, D, dtype=torch.float64)
    before = module(h)
    for block in module.blocks:
        for sublayer in block.residuals:
            sublayer.__class__ = Louder
    with ops.use("plain"):
        expected = module(h)
    assert error(module(h), expected) < 1e-12
    assert error(before, expected) > 0.01


def test_a_write_that_is_watched_is_called():
    module, seen = stack("post-pre", blocks=1), []
    last = module.blocks[0].residuals[1]
    write = last.write
    last.__dict__["write"] = lambda carry, o: seen.append(o) or write(carry, o)
    module(torch.randn(3, D, dtype=torch.float64))
    assert len(seen) == 1


def test_the_plain_form_is_explained():
    x, norm = torch.randn(3, D), NormSpec("rms", D).build()

    class Special(torch.Tensor):
        pass

    assert "more than a tensor" in ops.explain(x.as_subclass(Special), norm).reason
    reasons = []
    torch.func.grad(lambda y: (reasons.append(ops.explain(y, norm).reason), y.sum())[1])(x)
    with torch.autograd.forward_ad.dual_level():
        reasons.append(ops.explain(x, norm).reason)
    assert reasons == ["torch.func transforms the plain form", "forward-mode derivatives are those of the plain form"]
    norm.weight = torch.nn.Parameter(norm.weight.as_subclass(Special))
    assert "more than tensors" in ops.explain(x, norm).reason


def test_transforms_of_torch_give_what_the_plain_form_gives():
    module, h = stack("post-pre", d=6), torch.randn(4, 6, dtype=torch.float64)
    with ops.use("plain"):
        expected = torch.func.jacrev(module)(h[0])
    assert torch.allclose(torch.func.jacrev(module)(h[0]), expected, rtol=1e-12)
    assert torch.allclose(torch.func.jacfwd(module)(h[0]), expected, rtol=1e-10)
    assert torch.allclose(torch.func.vmap(module)(h), module(h), rtol=1e-12)
