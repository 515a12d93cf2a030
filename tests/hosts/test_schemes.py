"""One suite for every scheme that SiameseNorm is compared with, in a dense model and in one with experts."""

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
from siamesenorm.residual import ConfigError, Norm
from tests import oracle
from tests.hosts.running import (
    assert_built_without_memory_as_with,
    assert_one_graph_with_the_same_gradients,
    assert_padding_changes_nothing,
    by_hand,
    padded,
    positions_of,
    same,
    step,
    token_by_token,
)
from tests.hosts.tiny import BASELINES, SHAPE, formed, host, plain, rewired, scatter, shape, shared, tokens
from tests.parity import relative_error

FAMILIES = ("llama", "qwen3_moe")
PAIRS = [(family, scheme) for family in FAMILIES for scheme in BASELINES]
# Host norms that a scheme has no place for, by block.
BOTH = {"input_layernorm", "post_attention_layernorm"}
GONE = {
    "hybridnorm": [BOTH] * 3,
    "hybridnorm*": [set(), BOTH, BOTH],
    "mixln": [BOTH, set(), set()],
    "deepnorm": [BOTH] * 3,
    "spannorm": [{"post_attention_layernorm"}, BOTH, BOTH],
    "resi_dual": [BOTH] * 3,
    "topology-single": [{"input_layernorm"}] * 3,
}
# All that they do, peri and hybridnorm* do as well: not worth the seconds of another compilation.
COVERED = ("sandwich", "hybridnorm")
# Those that add no parameters, so that a Pre-Norm checkpoint has all they need.
BARE = ("reordered", "lns")


def of(family, scheme):
    """A model that no test may change."""
    return shared(family, scheme) if family == "llama" else formed(family, scheme)


def fresh(family, scheme, **changes):
    return rewired(family, scheme, **({"norm_topk_prob": True} if family == "qwen3_moe" else {}), **changes)


@functools.cache
def exact_of(family, scheme):
    """In float64, which transformers' fused experts do not know; a test may leave gradients in it."""
    model = copy.deepcopy(of(family, scheme)).double()
    model.config._experts_implementation = "eager"
    return model


@functools.cache
def mlps_of(form):
    """The MLPs of a host, as functions of their weights and input, in float64."""
    model = copy.deepcopy(plain(form)).double()
    model.config._experts_implementation = "eager"
    base = getattr(model, model.base_model_prefix)
    return [
        lambda weights, u, mlp=block.mlp: functional_call(mlp, dict(weights), (u,))
        for block in (base.h if form == "gpt2" else base.layers)
    ]


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_names_and_values_stay_and_new_ones_start_at_1(family, scheme):
    model = copy.deepcopy(plain(family)) if family == "qwen3_moe" else host(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name for name, _ in model.named_buffers()}
    name, options = BASELINES[scheme]
    siamesenorm.rewire(model, name, **options)
    after = dict(model.named_parameters())
    gone = {f"model.layers.{i}.{norm}.weight" for i, norms in enumerate(GONE.get(scheme, ())) for norm in norms}
    assert before.keys() - after.keys() == gone
    assert all(torch.equal(after[n], before[n]) for n in before.keys() - gone)
    new = after.keys() - before.keys()
    assert all("residual." in n or ".readout." in n or n.endswith("_norm.weight") for n in new)
    assert all((after[n] == 1).all() for n in new)
    assert (not new) == (scheme in BARE)
    assert {name for name, _ in model.named_buffers()} == buffers
    assert all(isinstance(m, Norm) for n, m in model.named_modules() if n.split(".")[-1].startswith("norm"))


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_float64_against_the_oracle(family, scheme):
    name, options = BASELINES[scheme]
    model = exact_of(family, scheme)
    weights = dict(model.named_parameters())
    mlps = mlps_of(family) if family == "qwen3_moe" else None
    expected, states = oracle.hf_lm(weights, model.config, name, tokens(), mlps=mlps, **options)
    with capture_streams(model) as streams:
        logits = model(input_ids=tokens()).logits
    assert relative_error(logits, expected) < 1e-10
    assert len(streams) == len(states) == 3
    for got, wanted in zip(streams, states, strict=True):
        assert all(relative_error(a, b) < 1e-10 for a, b in zip(got, wanted, strict=True))
    probe = torch.randn(logits.shape, dtype=torch.float64)
    ours = torch.autograd.grad((logits * probe).sum(), list(weights.values()))
    theirs = torch.autograd.grad((expected * probe).sum(), list(weights.values()))
    for n, a, b in zip(weights, ours, theirs, strict=True):
        assert b.abs().max() > 0, n
        assert relative_error(a, b) < 1e-10, n


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
    assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_a_model_built_without_memory_is_initialised_and_loaded_like_any(family, scheme):
    given = (family, shape(family), *BASELINES[scheme])
    assert_built_without_memory_as_with(given, lambda n: "norm" in n)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_activation_checkpointing_changes_nothing(family, scheme, reentrant):
    model = copy.deepcopy(exact_of(family, scheme)).train()
    expected = step(model)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    same(step(model), expected, 1e-12)


@pytest.mark.parametrize(
    ("family", "scheme"),
    # Compilation takes seconds: what experts add to it is the same under every scheme.
    [
        pytest.param(*pair, marks=pytest.mark.slow) if pair[0] == "qwen3_moe" else pair
        for pair in PAIRS
        if pair[1] not in COVERED
    ],
)
def test_compiled_training_is_one_graph_with_the_same_gradients(family, scheme):
    # Of two blocks, as the first differs from the others under some schemes.
    model = fresh(family, scheme, num_hidden_layers=2).train()
    assert_one_graph_with_the_same_gradients(model)


@pytest.mark.parametrize("stream_dtype", [None, "float32"])
@pytest.mark.parametrize("scheme", BASELINES)
def test_bf16_weights(scheme, stream_dtype):
    model = rewired("llama", scheme, options={"stream_dtype": stream_dtype}).bfloat16()
    exact = copy.deepcopy(model).float()
    with capture_streams(model) as streams:
        out = model(input_ids=tokens(), labels=tokens())
    assert {t.dtype for s in streams for t in s} == {torch.float32 if stream_dtype else torch.bfloat16}
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert relative_error(out.logits, exact(input_ids=tokens()).logits) < 0.1


@pytest.mark.parametrize(("family", "scheme"), PAIRS)
def test_a_step_moves_every_parameter_from_its_start(family, scheme):
    """No scheme here leaves a parameter without gradient, in its initial state either."""
    name, options = BASELINES[scheme]
    model = hosts.build(family, shape(family), name, options)
    model(input_ids=tokens(8, 32), labels=tokens(8, 32)).loss.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not (p.grad != 0).any()] == []


@pytest.mark.parametrize("scheme", BASELINES)
def test_the_site_table(scheme):
    rows = hosts.site_table(of("llama", scheme))
    assert [row["kind"] for row in rows] == ["attention", "mlp"] * 3 + ["readout"]
    assert all(row["reads"] and isinstance(row["scale"], float) for row in rows)
    assert all(row["writes"] for row in rows[:-1])


def test_what_the_table_says():
    def said(scheme, *keys):
        return [tuple(row[key] for key in keys) for row in hosts.site_table(of("llama", scheme))]

    assert said("lns", "reads", "writes", "scale", "norms")[4] == (
        "c·Nin(Y)", "Y = Y + o", pytest.approx(3**-0.5), "Nin before"
    )  # fmt: skip
    assert said("keel", "writes", "scale", "norms")[:3] == [
        ("X = X + o", 1.0, "Nin before"),
        ("X = N(X + o)", 1.0, "Nin before"),
        ("X = N(a·X + o)", 6.0, "Nin before"),
    ]
    assert said("hybridnorm*", "reads", "writes", "norms")[:4] == [
        ("X", "X = X + o", "Nin before; q, k, v per head"),
        ("X", "X = X + o", "Nin before"),
        ("X", "X = X + o", "no Nin; q, k, v per head"),
        ("N(X)", "X = N(X) + o", "no Nin"),
    ]
    assert said("reordered", "reads", "writes", "norms")[0] == ("Y", "Y = Y + o", "Nin after")
    assert said("spannorm", "writes")[2:4] == [("H0 = X, X = N(H0 + o)",), ("X = N(H0 + o)",)]
    assert said("topology-single", "reads", "writes")[0] == ("c1⊙X", "X = X + c·o")
    assert said("topology-resi_dual", "reads", "writes")[0] == ("Nx(X)", "X = Nx(X) + c·o, Y = Y + o")
    assert said("resi_dual", "reads")[-1] == ("X + Ny(Y)",)
    assert said("peri", "reads", "writes")[:2] == [("Nh(Y)", "Y = Nh(Y) + Nout(o)"), ("Y", "Y = Y + Nout(o)")]


# Hosts of another kind


@pytest.mark.parametrize("scheme", ["peri", "reordered", "lns", "deepnorm", "mixln", "resi_dual", "topology-single"])
@pytest.mark.parametrize("form", ["gpt_neox-parallel", "phi"])
def test_attention_and_mlp_in_parallel_against_the_oracle(form, scheme):
    name, options = BASELINES[scheme]
    options = {key: value for key, value in options.items() if key != "x"}
    model = scatter(siamesenorm.rewire(copy.deepcopy(plain(form)).double(), name, **options))
    weights = dict(model.named_parameters())
    expected, _ = oracle.hf_lm(weights, model.config, name, tokens(), mlps=mlps_of(form), **options)
    assert relative_error(model(input_ids=tokens()).logits, expected) < 1e-10


@pytest.mark.parametrize("scheme", ["hybridnorm", "keel", "spannorm"])
def test_a_host_that_a_scheme_refuses_stays_as_it_is(scheme):
    model = copy.deepcopy(plain("phi"))
    with pytest.raises(ConfigError, match=f"{scheme} needs .*this host runs them in parallel"):
        siamesenorm.rewire(model, scheme)
    assert type(model) is type(plain("phi"))
    assert torch.equal(model(input_ids=tokens()).logits, plain("phi")(input_ids=tokens()).logits)


@pytest.mark.parametrize("scheme", ["reordered", "lns", "peri", "hybridnorm*"])
def test_norms_of_another_kind(scheme):
    """LayerNorm with a bias in GPT-2; norms without weights in OLMo; an offset to the weight in Gemma."""
    name, options = BASELINES[scheme]
    for form in ("gpt2", "olmo", "gemma"):
        model = scatter(siamesenorm.rewire(copy.deepcopy(plain(form)).double(), name, **options))
        weights = dict(model.named_parameters())
        expected, _ = oracle.hf_lm(weights, model.config, name, tokens(), mlps=mlps_of(form), **options)
        assert relative_error(model(input_ids=tokens()).logits, expected) < 1e-10, form


# Initialisation


def drawn(scheme, layers, family="llama"):
    torch.manual_seed(7)
    model = hosts.build(family, {**shape(family), "num_hidden_layers": layers}, scheme)
    return dict(model.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [1, 6])
def test_deepnorms_gains_in_a_built_model(layers, family):
    reference, gained = drawn("pre", layers, family), drawn("deepnorm", layers, family)
    gain = (8 * layers) ** -0.25
    scaled = set()
    for name in reference.keys() & gained.keys():
        if torch.equal(gained[name], reference[name]):
            continue
        torch.testing.assert_close(gained[name], reference[name] * gain, msg=name)
        scaled.add(name.split(".", 3)[-1])
    inner = (
        {"gate_proj", "up_proj", "down_proj"} if family == "llama" else {"experts.gate_up_proj", "experts.down_proj"}
    )
    end = ".weight" if family == "llama" else ""
    assert scaled == {"self_attn.v_proj.weight", "self_attn.o_proj.weight", *(f"mlp.{name}{end}" for name in inner)}


def test_deepnorms_gains_are_for_new_models_and_applied_once(tmp_path):
    model = host()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    siamesenorm.rewire(model, "deepnorm")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    model = siamesenorm.rewire(host(), "deepnorm", init=True)
    name = "model.layers.1.self_attn.v_proj.weight"
    torch.testing.assert_close(model.get_parameter(name), before[name] * 24**-0.25)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.get_parameter(name), model.get_parameter(name))


def test_other_schemes_have_no_gains_and_equal_seeds_give_equal_weights():
    made = {}
    for scheme, (name, options) in BASELINES.items():
        torch.manual_seed(7)
        made[scheme] = dict(hosts.build("llama", SHAPE, name, options).named_parameters())
    reference = made.pop("sandwich")
    for scheme, weights in made.items():
        names = reference.keys() & weights.keys()
        assert len(names) >= 3 * 7 + 3
        assert scheme == "deepnorm" or all(torch.equal(weights[n], reference[n]) for n in names), scheme


@pytest.mark.parametrize(("share", "other"), [(0, "pre"), (1, "post")])
def test_mixln_at_its_ends_in_a_model(share, other):
    mixed = scatter(siamesenorm.rewire(host(), "mixln", share=share))
    whole = scatter(siamesenorm.rewire(host(), other))
    assert mixed.state_dict().keys() == whole.state_dict().keys()
    assert torch.equal(mixed(input_ids=tokens()).logits, whole(input_ids=tokens()).logits)


def test_lns_takes_a_pre_norm_model_as_it_is():
    model = siamesenorm.rewire(host(), "lns")
    assert {n for n, _ in model.named_parameters()} == {n for n, _ in host().named_parameters()}
    for index, block in enumerate(hosts.blocks(model)):
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            assert norm.scale == pytest.approx((index + 1) ** -0.5)
    assert model.model.norm.scale == 1.0
