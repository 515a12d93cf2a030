"""The norms' numerics: error, shapes, gradients, what is written to."""

from __future__ import annotations

import pytest
import torch

from siamesenorm.residual import LayerNorm, NormSpec, RMSNorm
from siamesenorm.residual.errors import ConfigError
from tests import oracle
from tests.parity import relative_error

CLASSES = {"rms": RMSNorm, "layer": LayerNorm}
PLAIN = {"rms": oracle.rms_norm, "layer": oracle.layer_norm}


def parameters(d, bias, dtype):
    g = torch.Generator().manual_seed(d)
    weight = (1 + 0.3 * torch.randn(d, generator=g)).to(dtype)
    return weight, (0.3 * torch.randn(d, generator=g)).to(dtype) if bias else None


def make(kind, d, bias, dtype, eps=1e-6):
    norm = CLASSES[kind](d, eps, bias=bias).to(dtype)
    weight, b = parameters(d, bias, dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        if bias:
            norm.bias.copy_(b)
    return norm


def gradients(function, x, norm, seed):
    inputs = [x, *norm.parameters()]
    out = function(x)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    return [out, *torch.autograd.grad((out * probe).sum(), inputs)]


def three_ways(kind, x, bias, eps=1e-6):
    """Value and gradients of ours, of the plain form in the same dtype, and of the float64 oracle."""
    norm = make(kind, x.shape[-1], bias, x.dtype, eps)
    ours = gradients(norm, x.detach().requires_grad_(), norm, 2)
    plain = gradients(lambda t: PLAIN[kind](t, norm.weight, norm.bias, eps), x.detach().requires_grad_(), norm, 2)
    exact = make(kind, x.shape[-1], bias, x.dtype, eps).double()
    wide = x.detach().double().requires_grad_()
    inputs = [wide, *exact.parameters()]
    out = PLAIN[kind](wide, exact.weight, exact.bias, eps)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(x.dtype).double()
    true = [out, *torch.autograd.grad((out * probe).sum(), inputs)]
    return ours, plain, true


SHAPES = [(1, 8), (3, 7), (2, 5, 257), (1, 1, 1, 64), (31, 48)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_at_most_twice_that_of_the_plain_form(shape, kind, bias, dtype):
    x = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    ours, plain, true = three_ways(kind, x, bias)
    unit = torch.finfo(dtype).eps
    for mine, theirs, exact in zip(ours, plain, true, strict=True):
        assert mine.dtype == dtype
        assert mine.shape == exact.shape
        # Where the plain form happens to hit the exact value, one rounding is still allowed.
        allowed = max(2 * relative_error(theirs, exact), unit)
        assert relative_error(mine, exact) <= allowed


@pytest.mark.parametrize("kind", CLASSES)
def test_float64_stays_float64(kind):
    x = torch.randn(4, 33, dtype=torch.float64)
    ours, _, true = three_ways(kind, x, True)
    for mine, exact in zip(ours, true, strict=True):
        assert relative_error(mine, exact) < 1e-14


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6)], ids=str)
def test_no_rows(kind, shape):
    norm = CLASSES[kind](6, bias=True)
    x = torch.randn(shape, requires_grad=True)
    out = norm(x)
    out.sum().backward()
    assert out.shape == shape
    assert x.grad.shape == shape
    assert torch.equal(norm.weight.grad, torch.zeros(6))


VIEWS = {
    "transposed": lambda t: t.transpose(0, 1),
    "features-strided": lambda t: t[..., ::2],
    "rows-strided": lambda t: t[::2],
    "features-transposed": lambda t: t.transpose(1, 2),
    "expanded": lambda t: t[:1].expand(4, -1, -1),
    "sliced": lambda t: t[:, :, 1:],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", CLASSES)
def test_views_give_what_a_copy_gives(kind, view):
    base = torch.randn(6, 7, 10, dtype=torch.float64)
    norm = make(kind, VIEWS[view](base).shape[-1], True, torch.float64)
    through_view, copied = base.clone().requires_grad_(), base.clone().requires_grad_()
    a = norm(VIEWS[view](through_view))
    b = PLAIN[kind](VIEWS[view](copied).contiguous(), norm.weight, norm.bias)
    assert not VIEWS[view](through_view).is_contiguous()
    assert relative_error(a, b) < 1e-14
    for out in (a, b):
        (out * torch.arange(out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    assert relative_error(through_view.grad, copied.grad) < 1e-13


@pytest.mark.parametrize("kind", CLASSES)
def test_a_norm_plus_what_it_read(kind):
    x, y = (torch.randn(9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    norm = make(kind, 16, False, torch.float64)
    x, y = x.requires_grad_(), y.requires_grad_()
    (norm(x) + x).square().sum().backward()
    (PLAIN[kind](y, norm.weight) + y).square().sum().backward()
    assert relative_error(x.grad, y.grad) < 1e-13


def test_one_tensor_into_two_norms():
    first, second = make("rms", 16, False, torch.float64), make("layer", 16, True, torch.float64)
    x = torch.randn(9, 16, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    (first(x) * second(x)).sum().backward()
    (oracle.rms_norm(y, first.weight) * oracle.layer_norm(y, second.weight, second.bias)).sum().backward()
    assert relative_error(x.grad, y.grad) < 1e-12


@pytest.mark.parametrize("kind", CLASSES)
def test_the_weight_gradient_of_many_bf16_rows_does_not_drift(kind):
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, _, true = three_ways(kind, x, True)
    # One rounding to bfloat16 is half of its eps; a bfloat16 sum over 4096 rows would be off by far more.
    for mine, exact in zip(ours[2:], true[2:], strict=True):
        assert relative_error(mine, exact) < torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", CLASSES)
def test_the_input_is_not_written_to(kind, dtype):
    x = torch.randn(5, 12).to(dtype)
    kept, version = x.clone(), x._version
    out = make(kind, 12, True, dtype)(x)
    assert torch.equal(x, kept)
    assert x._version == version
    assert out.data_ptr() != x.data_ptr()
    assert out.dtype == dtype


def test_one_rounding_after_the_weight():
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = make("rms", 32, False, torch.bfloat16)
    exact = oracle.rms_norm(x.double(), norm.weight.double())
    assert torch.equal(norm(x), exact.float().bfloat16())


def test_a_float32_norm_keeps_a_bf16_input_bf16_and_the_other_way_round():
    x = torch.randn(4, 16)
    assert RMSNorm(16)(x.bfloat16()).dtype == torch.bfloat16
    assert RMSNorm(16).bfloat16()(x).dtype == torch.float32
    assert torch.equal(RMSNorm(16).bfloat16()(x), RMSNorm(16)(x))
    assert LayerNorm(16, bias=True).bfloat16()(x).dtype == torch.float32


def test_large_and_small_inputs_stay_finite_in_bf16():
    for value in (1e-30, 1e15, 0.0):
        x = torch.full((2, 16), value, dtype=torch.bfloat16)
        for kind in CLASSES:
            assert make(kind, 16, True, torch.bfloat16)(x).isfinite().all()


@pytest.mark.parametrize("kind", CLASSES)
def test_without_affine_part(kind):
    norm = CLASSES[kind](8, affine=False, bias=True)
    assert list(norm.parameters()) == []
    x = torch.randn(3, 8, dtype=torch.float64)
    assert relative_error(norm(x), PLAIN[kind](x)) < 1e-14
    norm.reset_parameters()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", CLASSES)
def test_an_offset_is_added_to_the_weight_before_anything_is_rounded(kind, dtype):
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    norm = CLASSES[kind](64, bias=True, offset=1.0).to(dtype)
    assert (norm.weight == 0).all()
    with torch.no_grad():
        # 1 + 0.003 is 1 in bfloat16.
        norm.weight.add_(torch.linspace(-0.003, 0.003, 64).to(dtype))
    exact = [t.detach().double().requires_grad_() for t in (x, *norm.parameters())]
    wide, weight, bias = exact
    mine = gradients(norm, x, norm, 2)
    out = PLAIN[kind](wide, 1 + weight, bias)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype).double()
    true = [out, *torch.autograd.grad((out * probe).sum(), exact)]
    for a, b in zip(mine, true, strict=True):
        assert relative_error(a, b) < (1e-13 if dtype == torch.float64 else torch.finfo(dtype).eps)
    norm.reset_parameters()
    assert (norm.weight == 0).all()
    assert (CLASSES[kind](8, init=0.25, offset=1.0).weight == -0.75).all()


@pytest.mark.parametrize("kind", CLASSES)
def test_reset_parameters_restores_the_start_and_draws_nothing(kind):
    norm = CLASSES[kind](8, bias=True, init=0.5)
    with torch.no_grad():
        norm.weight.fill_(7)
        norm.bias.fill_(7)
    state = torch.random.get_rng_state()
    norm.reset_parameters()
    assert torch.equal(state, torch.random.get_rng_state())
    assert (norm.weight == 0.5).all()
    assert (norm.bias == 0).all()


def test_a_spec_builds_what_it_says_and_refuses_what_it_does_not_know():
    norm = NormSpec("layer", 8, 1e-3, bias=True).resized(4).build(init=2.0)
    assert isinstance(norm, LayerNorm)
    assert (norm.size, norm.eps, norm.bias is not None) == (4, 1e-3, True)
    assert (norm.weight == 2).all()
    with pytest.raises(ConfigError, match="unknown norm 'batch': valid are rms, layer"):
        NormSpec("batch", 8)
