"""The schemes of several streams, in a dense model and in one with experts."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from torch.func import functional_call
from transformers import DynamicCache

import siamesenorm
from siamesenorm import hosts
from siamesenorm.probes import capture_streams
from siamesenorm.residual import Norm, set_step
from tests import oracle
from tests.hosts.running import (
    assert_built_without_memory_as_with,
    assert_checkpoints_change_nothing,
    assert_one_graph_with_the_same_gradients,
    assert_padding_changes_nothing,
    by_hand,
    padded,
    positions_of,
    sharded,
    step,
    token_by_token,
    trained,
)
from tests.hosts.tiny import FORMS, host, plain, scatter, shape, tokens
from tests.oracle_streams import extras
from tests.parity import relative_error
from tests.residual.test_streams import without_gradient

STREAMS = {
    "hyper": ("hyper", {}),
    "hyper-static": ("hyper", {"n": 2, "dynamic": False}),
    "mhc": ("mhc", {}),
    "attnres": ("attnres", {}),
    "attnres-3": ("attnres", {"block_size": 3}),
    "mgr": ("mgr", {}),
    "mgr-competitive": ("mgr", {"n": 2, "gates": "competitive"}),
}
PAIRS = [*(("llama", s) for s in STREAMS), *(("qwen3_moe", s) for s in ("hyper", "mhc", "attnres-3", "mgr"))]
MATRICES = ("hyper", "mhc")


def fresh(family, scheme, **changes):
    options = changes.pop("options", {})
    if family in FORMS:
        changes = {**FORMS[family][1], **changes}
    name, given = STREAMS[scheme]
    model = siamesenorm.rewire(host(family, **changes), name, **{**given, **options})
    return scatter(model, 1).eval()


@functools.cache
def of(family, scheme):
    """A model that no test may change."""
    return fresh(family, scheme)


@functools.cache
def exact_of(family, scheme):
    """In float64; a test may leave gradients in it. Its eps lets the scale of what a norm reads show."""
    model = fresh(family, scheme, rms_norm_eps=0.1).double()
    model.config._experts_implementation = "eager"
    return model


def experts(model):
    mlps = copy.deepcopy([layer.mlp for layer in model.model.layers])
    return [lambda weights, u, mlp=mlp: functional_call(mlp, dict(weights), (u,)) for mlp in mlps]


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_float64_against_the_oracle(family, scheme):
    name, options = STREAMS[scheme]
    model = exact_of(family, scheme)
    weights = dict(model.named_parameters())
    mlps = experts(model) if family == "qwen3_moe" else None
    more = extras(name, 0.1, weights, "model.norm.readout.")
    expected, states = oracle.hf_lm(weights, model.config, name, tokens(), mlps=mlps, **options, **more)
    with capture_streams(model) as streams:
        logits = model(input_ids=tokens()).logits
    assert relative_error(logits, expected) < 1e-10
    assert len(streams) == len(states) == 3
    for got, wanted in zip(streams, states, strict=True):
        assert all(relative_error(a, b) < 1e-10 for a, b in zip(got, wanted, strict=True))
    probe = torch.randn(logits.shape, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((out * probe).sum(), list(weights.values()), materialize_grads=True)
        for out in (logits, expected)
    )
    for n, a, b in zip(weights, ours, theirs, strict=True):
        if dead(n, scheme):
            assert max(a.abs().max(), b.abs().max()) < 1e-12, n
        else:
            assert b.abs().max() > 0, n
            assert relative_error(a, b) < 1e-10, n


@pytest.mark.parametrize("scheme", ["hyper", "mhc", "attnres-3", "mgr"])
@pytest.mark.parametrize("form", ["phi", "gpt2", "gemma"])
def test_hosts_of_other_kinds_against_the_oracle(form, scheme):
    """Attention and MLP in parallel; LayerNorm with a bias and fused projections; an offset to the norms' weights."""
    name, options = STREAMS[scheme]
    model = scatter(siamesenorm.rewire(copy.deepcopy(plain(form)).double(), name, **options), 1)
    body = next(module for module in model.modules() if hasattr(module, "layers") or hasattr(module, "h"))
    mlps = copy.deepcopy([layer.mlp for layer in (body.h if form == "gpt2" else body.layers)])
    mlps = [lambda own, u, mlp=mlp: functional_call(mlp, dict(own), (u,)) for mlp in mlps]
    weights, names = dict(model.named_parameters()), oracle.NAMES.get(form, oracle.Names())
    eps = next(module.eps for module in model.modules() if isinstance(module, Norm))
    more = extras(name, eps, weights, f"{names.body}{names.final}.readout.")
    expected, _ = oracle.hf_lm(weights, model.config, name, tokens(), mlps=mlps, **options, **more)
    assert relative_error(model(input_ids=tokens()).logits, expected) < 1e-10


@pytest.mark.parametrize(
    "scheme", ["attnres-3", *(pytest.param(s, marks=pytest.mark.slow) for s in ("hyper", "mhc", "mgr"))]
)
def test_export_with_any_batch_and_length(scheme):
    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = of("llama", scheme)

        def forward(self, ids):
            return self.model(input_ids=ids, use_cache=False).logits

    dims = {"ids": {0: torch.export.Dim("batch", max=16), 1: torch.export.Dim("seq", max=48)}}
    exported = torch.export.export(Logits(), (tokens(2, 9),), dynamic_shapes=dims)
    ids = tokens(3, 14)
    expected = of("llama", scheme)(input_ids=ids).logits
    torch.testing.assert_close(exported.module()(ids), expected, rtol=1e-5, atol=1e-5)


def dead(parameter, scheme):
    """Whether the equations leave a parameter without gradient."""
    name, options = STREAMS[scheme]
    if not parameter.startswith("model.layers.0.attn_residual."):
        return False
    own = "blocks.0.residuals.0." + parameter.rpartition(".")[2]
    return own.endswith(without_gradient(name, **options))


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
@torch.no_grad()
def test_token_by_token_is_the_full_forward_with_left_padding(family, scheme):
    model = of(family, scheme)
    ids, mask = padded((9, 4, 7), 9)
    full = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    steps = token_by_token(model, ids, mask, DynamicCache(config=model.config))
    assert relative_error(steps[mask.bool()], full[mask.bool()]) < 1e-5
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, by_hand(model, ids, mask, 3))


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_batches_and_padding_change_nothing(family, scheme):
    assert_padding_changes_nothing(of(family, scheme))


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_equal_bits_after_saving_and_loading(family, scheme, tmp_path):
    model = of(family, scheme)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert hosts.scheme_of(again.config) == hosts.scheme_of(model.config)
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in model.named_parameters())
    # Weights in a file's memory start where its header ends, and products of the host's experts round by their place.
    for parameter in again.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_a_model_built_without_memory_is_initialised_and_loaded_like_any(family, scheme):
    given = (family, shape(family), *STREAMS[scheme])
    assert_built_without_memory_as_with(given, lambda n: "residual" in n)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_activation_checkpointing_changes_nothing(family, scheme, reentrant):
    assert_checkpoints_change_nothing(exact_of(family, scheme), step, reentrant, 1e-10, lambda n: dead(n, scheme))


@pytest.mark.parametrize(
    ("family", "scheme", "layers"),
    [
        ("llama", "hyper", 1),
        ("llama", "mhc", 1),
        ("llama", "attnres-3", 2),
        ("llama", "mgr-competitive", 1),
        pytest.param("llama", "mgr", 3, marks=pytest.mark.slow),
        *(pytest.param("qwen3_moe", scheme, 2, marks=pytest.mark.slow) for scheme in ("hyper", "mhc", "attnres-3")),
    ],
)
def test_compiled_training_is_one_graph_with_the_same_gradients(family, scheme, layers):
    model = fresh(family, scheme, num_hidden_layers=layers, rms_norm_eps=0.1).train()
    assert_one_graph_with_the_same_gradients(model, 1e-4, lambda name: dead(name, scheme))


@pytest.mark.parametrize("scheme", MATRICES)
def test_blocks_compiled_one_by_one_share_their_graphs(scheme):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = fresh("llama", scheme, num_hidden_layers=10)
    expected = model(input_ids=tokens(), use_cache=False).logits
    counter = CompileCounterWithBackend("eager")
    for block in hosts.blocks(model):
        block.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(model(input_ids=tokens(), use_cache=False).logits, expected)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("stream_dtype", [None, "float32"])
@pytest.mark.parametrize("scheme", STREAMS)
def test_bf16_weights(scheme, stream_dtype):
    model = fresh("llama", scheme, options={"stream_dtype": stream_dtype}).bfloat16()
    exact = copy.deepcopy(model).float()
    with capture_streams(model) as streams:
        out = model(input_ids=tokens(), labels=tokens())
    assert {t.dtype for s in streams for t in s} == {torch.float32 if stream_dtype else torch.bfloat16}
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if not dead(n, scheme)}
    assert all(g.isfinite().all() and g.dtype == torch.bfloat16 for g in gradients.values())
    assert relative_error(out.logits, exact(input_ids=tokens()).logits) < 0.2


@pytest.mark.parametrize("scheme", STREAMS)
def test_bf16_autocast_keeps_float32_streams(scheme):
    model = of("llama", scheme)
    exact = model(input_ids=tokens()).logits
    with torch.autocast("cpu", torch.bfloat16), capture_streams(model) as streams:
        logits = model(input_ids=tokens()).logits
    assert {t.dtype for s in streams for t in s} == {torch.float32}
    assert relative_error(logits, exact) < 0.2


@pytest.mark.parametrize("scheme", STREAMS)
def test_hidden_states_are_what_blocks_read(scheme):
    model = of("llama", scheme)
    with capture_streams(model) as streams:
        out = model(input_ids=tokens(), output_hidden_states=True)
    assert len(out.hidden_states) == 4
    assert torch.equal(out.hidden_states[0], model.model.embed_tokens(tokens()))
    for i in (1, 2):
        u, _ = model.model.layers[i].attn_residual.read(streams[i - 1])
        torch.testing.assert_close(out.hidden_states[i], u)


@pytest.mark.parametrize("scheme", ["hyper", "mhc", "attnres", "attnres-3"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@torch.no_grad()
def test_a_built_model_starts_as_pre_norm(family, scheme):
    logits = []
    for name, options in (STREAMS[scheme], ("pre", {})):
        torch.manual_seed(3)
        # The eps of a norm is all that tells a sum of streams from a mean.
        model = hosts.build(family, {**shape(family), "rms_norm_eps": 1e-12}, name, options).eval()
        logits.append(model(input_ids=tokens()).logits)
    assert relative_error(*logits) < 1e-4


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_a_step_leaves_no_parameter_without_gradient_but_those_listed(family, scheme):
    name, options = STREAMS[scheme]
    # Where the streams are read through a norm, only its eps shows their scale.
    model = hosts.build(family, {**shape(family), "rms_norm_eps": 1e-3}, name, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for seed in (1, 2, 3):
        optimizer.zero_grad()
        ids = tokens(8, 32, seed)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert {n for n in without if not dead(n, scheme)} == set()


# Sharding


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_fully_sharded_blocks_train_as_plain_ones(mesh, family, scheme, checkpointing):
    plain = fresh(family, scheme, options={"warmup_steps": 2}).train()
    model = copy.deepcopy(plain)
    for each in (plain, model):
        set_step(each, hosts.scheme_of(each.config), 1)
    expected = trained(plain)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    sharded(model, mesh)
    assert trained(model) == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < expected[0]
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(a.full_tensor(), b) < 1e-5, name
