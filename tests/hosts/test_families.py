"""One suite for every family that is not Llama by another name, in every form that it comes in."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call
from torch.nn import functional as F
from transformers import DynamicCache

import siamesenorm
from siamesenorm import hosts
from siamesenorm.probes import capture_streams
from siamesenorm.residual import ConfigError, LayerNorm, Norm, RMSNorm
from tests import oracle
from tests.hosts.running import (
    GAINS,
    assert_built_without_memory_as_with,
    assert_one_graph_with_the_same_gradients,
    by_hand,
    padded,
    positions_of,
    register_gains,
    same,
    step,
    token_by_token,
)
from tests.hosts.tiny import (
    FORMS,
    MOE,
    PARALLEL,
    SCHEMES,
    SIAMESE,
    formed,
    host,
    plain,
    rewired,
    shape,
    tokens,
)
from tests.parity import relative_error

PAIRS = [(form, scheme) for form in FORMS for scheme in SCHEMES if scheme != "hybrid-pre" or form not in PARALLEL]
SIAMESE_PAIRS = [(form, scheme) for form, scheme in PAIRS if scheme in SIAMESE]
# One scheme a form, the one that asks the most of it.
HARDEST = [(form, "post-pre" if form in PARALLEL else "hybrid-pre") for form in FORMS]
ROUTED = [form for form in FORMS if FORMS[form][0] in MOE]
DROPPING = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "gpt_neox": ("hidden_dropout", "attention_dropout"),
    "phi": ("resid_pdrop", "embd_pdrop", "attention_dropout"),
    "stablelm": ("hidden_dropout", "attention_dropout"),
}


def family_of(form):
    return FORMS[form][0]


def fresh(form, scheme="pre", *, options=None, **changes):
    """A model of its own, in the form's shape."""
    family, given = FORMS[form]
    return rewired(family, scheme, options=options, **{**given, **changes})


def exact(model):
    """A copy in float64, which transformers' fused experts do not know."""
    made = copy.deepcopy(model).double()
    made.config._experts_implementation = "eager"
    return made


def base_of(model):
    return getattr(model, model.base_model_prefix)


def blocks_of(model):
    base = base_of(model)
    return base.h if hasattr(base, "h") else base.layers


def mlps_of(model):
    """The MLPs of a plain host, as functions of their weights and input."""
    return [
        lambda weights, u, mlp=block.mlp: functional_call(mlp, dict(weights), (u,)) for block in blocks_of(exact(model))
    ]


# What is kept, and what is computed


@pytest.mark.parametrize(("form", "scheme"), PAIRS)
def test_names_and_values_stay(form, scheme):
    model = copy.deepcopy(plain(form))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    table = hosts.get_host(family_of(form))
    branches = [branch for group in table.sublayers(model.config) for branch in group]
    going = {"post": {b.norm for b in branches}, "hybrid-pre": {branches[0].norm}}.get(scheme, set())
    name, options = SCHEMES[scheme]
    siamesenorm.rewire(model, name, **options)
    after = dict(model.named_parameters())
    gone = before.keys() - after.keys()
    assert gone == {n for n in before if any(f".{norm}." in n for norm in going)}
    assert all(torch.equal(after[n], before[n]) for n in before.keys() - gone)
    new = after.keys() - before.keys()
    assert (not new) == (scheme == "pre")
    for n in new:
        assert (
            "residual." in n
            or ".readout." in n
            or n.endswith(tuple(f"{r}_norm.{p}" for r in "qkv" for p in ("weight", "bias")))
        )
        stored = 0 if n.endswith("bias") or (family_of(form) == "gemma" and n.endswith("weight")) else 1
        assert (after[n] == stored).all(), n


@pytest.mark.parametrize("form", FORMS)
def test_pre_is_the_host(form):
    theirs = exact(plain(form))
    ours = siamesenorm.rewire(copy.deepcopy(theirs), "pre")
    # RMSNorm and OLMo's LayerNorm are float32 in transformers, and the rest agrees to the last bits of float64.
    tolerance = 1e-12 if family_of(form) in ("stablelm", "gpt_neox", "gpt2", "phi") else 1e-5
    got = ours(input_ids=tokens(), output_hidden_states=True)
    wanted = theirs(input_ids=tokens(), output_hidden_states=True)
    assert relative_error(got.logits, wanted.logits) < min(tolerance, 1e-6)
    for a, b in zip(got.hidden_states, wanted.hidden_states, strict=True):
        assert relative_error(a, b) < min(tolerance, 1e-6)
    same(step(ours), step(theirs), tolerance)


@pytest.mark.parametrize(("form", "scheme"), PAIRS)
def test_float64_against_the_oracle(form, scheme):
    name, options = SCHEMES[scheme]
    model = exact(formed(form, scheme))
    weights = dict(model.named_parameters())
    ids = tokens()
    expected, states = oracle.hf_lm(weights, model.config, name, ids, mlps=mlps_of(plain(form)), **options)
    with capture_streams(model) as streams:
        logits = model(input_ids=ids).logits
    assert relative_error(logits, expected) < 1e-10
    for got, wanted in zip(streams, states, strict=True):
        assert all(relative_error(a, b) < 1e-10 for a, b in zip(got, wanted, strict=True))
    probe = torch.randn(logits.shape, dtype=torch.float64)
    ours = torch.autograd.grad((logits * probe).sum(), list(weights.values()))
    theirs = torch.autograd.grad((expected * probe).sum(), list(weights.values()))
    for n, a, b in zip(weights, ours, theirs, strict=True):
        # A bias on keys that are not rotated shifts all scores alike: its gradient is 0, and here rounding errors.
        assert relative_error(a, b) < 1e-10 or max(a.abs().max(), b.abs().max()) < 1e-12, n


@pytest.mark.parametrize("form", PARALLEL)
def test_hybrid_pre_needs_attention_and_mlp_one_after_the_other(form):
    model = copy.deepcopy(plain(form))
    with pytest.raises(ConfigError, match="needs attention and MLP one after the other; this host runs them in para"):
        siamesenorm.rewire(model, "siamese", x="hybrid")
    assert type(model) is type(plain(form))
    assert torch.equal(model(input_ids=tokens()).logits, plain(form)(input_ids=tokens()).logits)
    family, changes = FORMS[form]
    with pytest.raises(ConfigError, match="runs them in parallel"):
        hosts.build(family, {**shape(family), **changes}, "siamese", {"x": "hybrid"})


@pytest.mark.parametrize(("form", "scheme"), SIAMESE_PAIRS)
def test_every_norm_is_of_the_hosts_kind(form, scheme):
    family = family_of(form)
    eps_key = {"gpt2": "layer_norm_epsilon", "olmo": None}.get(family, "layer_norm_eps")
    rms = hasattr(plain(form).config, "rms_norm_eps")
    eps_key = "rms_norm_eps" if rms else eps_key
    model = fresh(form, scheme, **({eps_key: 1e-3} if eps_key else {}))
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    assert len(norms) >= (12 if form in PARALLEL else 18)
    for norm in norms:
        assert isinstance(norm, RMSNorm if rms else LayerNorm)
        assert norm.eps == (1e-3 if eps_key else 1e-5)
        assert norm.offset == (1.0 if family == "gemma" else 0.0)
        assert (norm.bias is not None) == (family in ("gpt2", "gpt_neox", "phi", "stablelm"))
    own = [
        block.get_submodule(name)
        for block in hosts.blocks(model)
        for name in ("input_layernorm", "ln_2")
        if hasattr(block, name)
    ]
    assert all((norm.weight is None) == (family == "olmo") for norm in own)


def test_gemmas_norms_start_at_a_factor_of_one_and_a_stored_weight_of_zero():
    before = copy.deepcopy(plain("gemma"))
    kept = {id(parameter) for parameter in before.parameters()}
    for x_init in (1.0, 0.25):
        model = siamesenorm.rewire(copy.deepcopy(before), "siamese", x="hybrid", x_init=x_init)
        for name, module in model.named_modules():
            if isinstance(module, Norm) and ("_residual." in name or ".readout." in name or "v_norm" in name):
                start = x_init if name.endswith("norm_x") else 1.0
                assert (module.weight == start - 1).all()
                assert (module.affine(torch.empty(0))[0] == start).all()
        assert all((p == x_init).all() for n, p in model.named_parameters() if n.endswith(".c1"))
    model = siamesenorm.rewire(before, "siamese")
    assert all(m.offset == 1 for m in model.modules() if isinstance(m, Norm) and id(m.weight) in kept)


# Caches and generation


@pytest.mark.parametrize(("form", "scheme"), SIAMESE_PAIRS)
@torch.no_grad()
def test_token_by_token_is_the_full_forward_with_left_padding(form, scheme):
    model = formed(form, scheme)
    ids, mask = padded((12, 5, 9), 12)
    full = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    steps = token_by_token(model, ids, mask, DynamicCache(config=model.config))
    assert relative_error(steps[mask.bool()], full[mask.bool()]) < 1e-5


@pytest.mark.parametrize(("form", "scheme"), HARDEST)
def test_greedy_generation_is_decoding_by_hand(form, scheme):
    model = formed(form, scheme)
    ids, mask = padded((9, 4, 7), 9)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(out, by_hand(model, ids, mask, 5))


@pytest.mark.parametrize(("form", "scheme"), HARDEST)
def test_neither_padding_nor_an_empty_row_changes_the_others(form, scheme):
    model = copy.deepcopy(formed(form, scheme))
    ids, mask = padded((8, 0, 5), 8)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    for row, length in ((0, 8), (2, 5)):
        alone = model(input_ids=ids[row : row + 1, 8 - length :]).logits
        assert relative_error(out[row, 8 - length :], alone[0]) < 1e-5
    out[mask.bool()].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(("form", "scheme"), HARDEST)
@torch.no_grad()
def test_sdpa_and_eager_agree_and_attentions_are_recorded(form, scheme):
    model = copy.deepcopy(formed(form, scheme))
    ids, mask = padded((13, 6))
    sdpa = model(input_ids=ids, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    eager = model(input_ids=ids, attention_mask=mask, output_attentions=True)
    assert relative_error(eager.logits[mask.bool()], sdpa[mask.bool()]) < 1e-5
    assert [tuple(weights.shape) for weights in eager.attentions] == [(2, 4, 13, 13)] * 3


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"sliding_window": 4}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}),
    ],
)
@torch.no_grad()
def test_the_sliding_window_of_families_with_experts(family, changes):
    model = exact(rewired(family, "hybrid-pre", **changes))
    mlps = mlps_of(host(family, **changes))
    weights = dict(model.named_parameters())
    expected, _ = oracle.hf_lm(weights, model.config, "siamese", tokens(), x="hybrid", window=4, mlps=mlps)
    sdpa = model(input_ids=tokens()).logits
    assert relative_error(sdpa, expected) < 1e-10
    model.set_attn_implementation("eager")
    assert relative_error(model(input_ids=tokens()).logits, expected) < 1e-5


# Saving, loading, empty models


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("form", "scheme"), HARDEST)
def test_equal_bits_after_loading(form, scheme, tied, tmp_path):
    model = fresh(form, scheme, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied
    assert {n: p.dtype for n, p in again.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


@pytest.mark.parametrize(("form", "scheme"), HARDEST)
def test_a_model_built_without_memory_is_initialised_and_loaded_like_any(form, scheme):
    family, changes = FORMS[form]
    name, options = SCHEMES[scheme]
    given = (family, {**shape(family), **changes}, name, {**options, "x_init": 0.25})
    assert_built_without_memory_as_with(given, lambda n: "norm" in n or "ln_" in n or n.endswith("c1"))


@pytest.mark.parametrize(("form", "scheme"), HARDEST)
def test_a_checkpoint_of_the_host_is_loaded_rewired_saved_and_loaded(form, scheme, tmp_path):
    """transformers saves experts one by one and loads them joined; a rewired model has a format of its own."""
    plain(form).save_pretrained(tmp_path / "host")
    name, options = SCHEMES[scheme]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "host")
    assert torch.equal(loaded(input_ids=tokens()).logits, plain(form)(input_ids=tokens()).logits)
    model = siamesenorm.rewire(loaded, name, **options)
    model.save_pretrained(tmp_path / "rewired")
    with safe_open(tmp_path / "rewired" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "rewired")
    assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


# What others do to a model


@pytest.mark.parametrize(("form", "scheme"), HARDEST)
def test_checkpointing_with_a_cache_given(form, scheme):
    model = exact(formed(form, scheme)).train()
    expected = step(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    cache = DynamicCache(config=model.config)
    same(step(model, cache=cache), expected, 1e-12)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("form", "scheme"), SIAMESE_PAIRS)
def test_activation_checkpointing_changes_nothing(form, scheme, reentrant):
    model = exact(formed(form, scheme)).train()
    expected = step(model)
    calls = []
    hosts.blocks(model)[1].mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    same(step(model), expected, 1e-12)
    assert len(calls) == 2, "a checkpoint computes its block twice"


@pytest.mark.parametrize(("form", "scheme"), HARDEST)
def test_compiled_training_is_one_graph_with_the_same_gradients(form, scheme):
    model = fresh(form, scheme, num_hidden_layers=1).train()
    assert_one_graph_with_the_same_gradients(model)


@pytest.mark.parametrize("form", ["gpt2", "gpt_neox"])
def test_adapters_of_a_fused_projection_merge(form):
    model = copy.deepcopy(formed(form, "hybrid-pre"))
    target = {"gpt2": "c_attn", "gpt_neox": "query_key_value"}[form]
    before = model(input_ids=tokens()).logits
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=[target], init_lora_weights=False, fan_in_fan_out=form == "gpt2")
    ).eval()
    tuned = adapted(input_ids=tokens()).logits
    assert not torch.allclose(tuned, before)
    assert relative_error(adapted.merge_and_unload()(input_ids=tokens()).logits, tuned) < 1e-5


@pytest.mark.parametrize("form", ["gpt2", "gpt_neox-parallel", "mixtral"])
def test_a_second_length_compiles_once_more_and_no_other_does(form):
    torch._dynamo.reset()
    counter, counts = CompileCounterWithBackend("aot_eager"), []
    model = fresh(form, dict(HARDEST)[form], num_hidden_layers=2)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for length in (8, 11, 17, 5):
            logits = compiled(input_ids=tokens(2, length), use_cache=False).logits
            torch.testing.assert_close(logits, model(input_ids=tokens(2, length)).logits)
            counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2]


@pytest.mark.parametrize("stream_dtype", [None, "float32"])
@pytest.mark.parametrize(("form", "scheme"), HARDEST)
def test_bf16_weights(form, scheme, stream_dtype):
    model = fresh(form, scheme, options={"stream_dtype": stream_dtype}).bfloat16()
    with capture_streams(model) as streams:
        out = model(input_ids=tokens(), labels=tokens(), output_hidden_states=True)
    assert {t.dtype for pair in streams for t in pair} == {torch.float32 if stream_dtype else torch.bfloat16}
    assert {h.dtype for h in out.hidden_states} == {out.logits.dtype} == {torch.bfloat16}
    out.loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    # A router that nearly ties picks another expert in bf16: with experts, the mean says more than the largest.
    exact_logits = formed(form, scheme)(input_ids=tokens()).logits
    assert (out.logits.float() - exact_logits).abs().mean() < 0.1 * exact_logits.abs().mean()


@pytest.mark.parametrize(("form", "scheme"), SIAMESE_PAIRS)
@torch.no_grad()
def test_hidden_states_are_what_blocks_read(form, scheme):
    model, entered = copy.deepcopy(formed(form, scheme)), []
    blocks = hosts.blocks(model)
    blocks[0].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    with capture_streams(model) as streams:
        states = model(input_ids=tokens(), output_hidden_states=True).hidden_states
    assert len(states) == 4
    assert torch.equal(states[0], entered[0])
    for index in (1, 2):
        read = getattr(blocks[index], "residual" if form in PARALLEL else "attn_residual").read
        assert torch.equal(states[index], read(streams[index - 1])[0])
    assert torch.equal(states[3], base_of(model)(input_ids=tokens()).last_hidden_state)


# Initialisation and dropout


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("form", FORMS)
def test_init_gains_reach_the_right_weights(form):
    register_gains()
    model = copy.deepcopy(plain(form))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    siamesenorm.rewire(model, "gains", init=True)
    names = oracle.NAMES.get(family_of(form), oracle.Names())
    for name, parameter in model.named_parameters():
        if name in before and names.attention not in name:
            gained = ".mlp." in name and not name.endswith(("bias", "gate.weight"))
            assert torch.equal(parameter, before[name] * (GAINS["mlp"] if gained else 1.0)), name
    after = dict(model.named_parameters())
    for index in range(3):
        prefix = f"{names.body}{names.blocks}{index}.{names.attention}"
        old, new = (oracle.qkvo(oracle.within(w, prefix), model.config) for w in (before, after))
        for name in old:
            gain = GAINS[name[0]] if name.endswith("weight") else 1.0
            assert torch.equal(new[name], old[name] * gain), name


@pytest.mark.parametrize("form", [form for form in FORMS if family_of(form) in DROPPING])
def test_dropout_is_where_the_host_has_it(form):
    family, changes = FORMS[form]
    theirs = host(family, **changes, **dict.fromkeys(DROPPING[family], 0.3)).train()

    def run(model):
        torch.manual_seed(1)
        return model(input_ids=tokens()).logits, torch.rand(3)

    wanted, next_number = run(theirs)
    assert not torch.equal(wanted, theirs.eval()(input_ids=tokens()).logits)
    got, number = run(siamesenorm.rewire(copy.deepcopy(theirs).train(), "pre"))
    assert relative_error(got, wanted) < 1e-5
    assert torch.equal(number, next_number)
    for scheme in ("post-pre",) if form in PARALLEL else SIAMESE:
        name, options = SCHEMES[scheme]
        _, number = run(siamesenorm.rewire(copy.deepcopy(theirs).train(), name, **options))
        assert torch.equal(number, next_number), "as many numbers are drawn"


# Experts


def balancing_loss(router_logits, mask, experts=4, active=2):
    """Equations 4 to 6 of Switch Transformers (arXiv 2101.03961) over all layers' real tokens at once."""
    logits = torch.cat([layer[mask.flatten().bool()] for layer in router_logits])
    picked = F.one_hot(logits.topk(active).indices, experts).sum(1).to(logits.dtype)
    return experts * (picked.mean(0) * logits.softmax(-1).mean(0)).sum()


def routed(model, ids, mask, **kwargs):
    labels = ids.masked_fill(mask == 0, -100)
    positions = positions_of(mask)
    return model(
        input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels, output_router_logits=True, **kwargs
    )


@pytest.mark.parametrize("form", ROUTED)
def test_the_auxiliary_loss_of_pre_is_the_hosts(form):
    ids, mask = padded((13, 6))
    theirs = routed(plain(form), ids, mask)
    ours = routed(siamesenorm.rewire(copy.deepcopy(plain(form)), "pre"), ids, mask)
    assert len(ours.router_logits) == len(theirs.router_logits) > 1
    for a, b in zip(ours.router_logits, theirs.router_logits, strict=True):
        assert relative_error(a[mask.flatten().bool()], b[mask.flatten().bool()]) < 1e-5
    assert relative_error(ours.aux_loss, theirs.aux_loss) < 1e-6
    assert relative_error(ours.loss, theirs.loss) < 1e-6


@pytest.mark.parametrize("coefficient", [0.1, 2.0])
@pytest.mark.parametrize("scheme", SIAMESE)
@pytest.mark.parametrize("form", ROUTED)
def test_the_auxiliary_loss_reaches_the_routers_and_all_before_them(form, scheme, coefficient):
    model = fresh(form, scheme, router_aux_loss_coef=coefficient)
    ids, mask = padded((13, 6))
    out = routed(model, ids, mask)
    by_hand_ = balancing_loss(out.router_logits, mask)
    assert relative_error(out.aux_loss, by_hand_) < 1e-6
    alone = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions_of(mask),
        labels=ids.masked_fill(mask == 0, -100),
        output_router_logits=False,
    )
    assert alone.aux_loss is None
    torch.testing.assert_close(out.loss, alone.loss + coefficient * by_hand_)
    weights = dict(model.named_parameters())
    got = torch.autograd.grad(out.aux_loss, list(weights.values()), allow_unused=True, retain_graph=True)
    wanted = torch.autograd.grad(by_hand_, list(weights.values()), allow_unused=True)
    reached = set()
    for name, a, b in zip(weights, got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert relative_error(a, b) < 1e-4, name
            reached |= {name} if (a != 0).any() else set()
    routers = {name for name in weights if name.endswith("mlp.gate.weight")}
    assert len(routers) == len(out.router_logits)
    assert routers <= reached
    # The last block's own input norms of both streams, and the table that every stream starts from.
    assert {n for n in weights if n.startswith("model.layers.2.mlp_residual.norm_")} <= reached
    assert "model.embed_tokens.weight" in reached


@pytest.mark.parametrize("form", ROUTED)
def test_padding_does_not_count_in_the_auxiliary_loss(form):
    model = formed(form, "hybrid-pre")
    ids, mask = padded((13, 6))
    others = torch.where(mask == 0, ids + 7, ids)
    with torch.no_grad():
        first, second = (routed(model, given, mask).aux_loss for given in (ids, others))
        blind = model(input_ids=ids, output_router_logits=True).aux_loss
    assert relative_error(second, first) < 1e-6
    assert relative_error(blind, first) > 1e-3


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [({"mlp_only_layers": [0, 2]}, [1]), ({"decoder_sparse_step": 2}, [1]), ({"mlp_only_layers": []}, [0, 1, 2])],
    ids=str,
)
def test_router_logits_are_those_of_the_layers_with_experts(changes, sparse):
    model = rewired("qwen3_moe", "hybrid-pre", **changes)
    routers, seen = [model.model.layers[i].mlp.gate for i in sparse], []
    for router in routers:
        router.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    out = model(input_ids=tokens(), output_router_logits=True)
    assert len(out.router_logits) == len(sparse)
    assert all(torch.equal(a, b) for a, b in zip(out.router_logits, seen, strict=True))
    assert sum(hasattr(block.mlp, "gate") for block in hosts.blocks(model)) == len(sparse)


@pytest.mark.parametrize("scheme", SIAMESE)
@pytest.mark.parametrize("form", ROUTED)
def test_every_expert_that_is_used_and_no_other_gets_a_gradient(form, scheme):
    model, used = copy.deepcopy(formed(form, scheme)), []
    blocks = [block for block in hosts.blocks(model) if hasattr(block.mlp, "gate")]
    for block in blocks:
        block.mlp.gate.register_forward_hook(lambda module, args, out: used.append(set(out[2].flatten().tolist())))
    model(input_ids=tokens(1, 2)).logits.square().sum().backward()
    assert any(len(experts) < 4 for experts in used)
    for block, experts in zip(blocks, used, strict=True):
        for weight in (block.mlp.experts.gate_up_proj, block.mlp.experts.down_proj):
            assert {e for e in range(4) if (weight.grad[e] != 0).any()} == experts


@pytest.mark.parametrize("scheme", SIAMESE)
@pytest.mark.parametrize("form", ROUTED)
def test_the_auxiliary_loss_under_activation_checkpoints(form, scheme):
    model = exact(formed(form, scheme)).train()
    expected = step(model, output_router_logits=True)
    model.activation_checkpointing_enable({"use_reentrant": False})
    same(step(model, output_router_logits=True), expected, 1e-12)


@pytest.mark.parametrize("given", [{"use_reentrant": True}, {"preserve_rng_state": True}], ids=str)
@pytest.mark.parametrize("form", ROUTED)
def test_reentrant_checkpoints_refuse_an_auxiliary_loss(form, given):
    model = copy.deepcopy(formed(form, "hybrid-pre")).train()
    model.activation_checkpointing_enable(given)
    message = "reentrant activation checkpointing loses the gradient of the routers' auxiliary loss"
    with pytest.raises(ConfigError, match=message):
        model(input_ids=tokens(), labels=tokens(), output_router_logits=True)
    model.config.output_router_logits = True
    for asked in (model, model.model):
        with pytest.raises(ConfigError, match=message):
            asked(input_ids=tokens())
    model.eval()(input_ids=tokens(), output_router_logits=True)


def test_the_noise_of_mixtrals_router_stays_out_of_the_streams():
    """It is written into the experts' input, which is the stream itself where no norm stands before the branch."""
    for scheme, options in (("post", {}), ("pre", {}), ("post-pre", {"normalized_input": False})):
        model = rewired("mixtral", scheme, options=options, router_jitter_noise=0.3).train()
        expected = copy.deepcopy(model).eval()
        with torch.no_grad():
            for each in (model, expected):
                for block in hosts.blocks(each):
                    block.mlp.experts.down_proj.zero_()
        assert torch.equal(model(input_ids=tokens()).logits, expected(input_ids=tokens()).logits)


@torch.no_grad()
def test_gpt2s_own_ways_to_compute_its_scores(monkeypatch):
    """Scores scaled by layer too, and computed in float32: its eager kernel has a form for that."""
    model = rewired("gpt2", "hybrid-pre", scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True)
    sdpa = model(input_ids=tokens()).logits
    assert relative_error(sdpa, formed("gpt2", "hybrid-pre")(input_ids=tokens()).logits) > 1e-3
    attention, calls = transformers.models.gpt2.modeling_gpt2.GPT2Attention, []
    upcast = attention._upcast_and_reordered_attn
    monkeypatch.setattr(attention, "_upcast_and_reordered_attn", lambda *args: calls.append(1) or upcast(*args))
    model.set_attn_implementation("eager")
    assert relative_error(model(input_ids=tokens()).logits, sdpa) < 1e-5
    assert len(calls) == 3


def test_a_gpt2_without_cross_attention_does_not_swallow_an_encoders_states():
    with pytest.raises(ConfigError, match="no cross-attention"):
        formed("gpt2", "hybrid-pre")(input_ids=tokens(), encoder_hidden_states=torch.zeros(2, 3, 32))


@pytest.mark.parametrize("form", ["mixtral", "olmoe", "qwen3_moe"])
def test_experts_run_as_they_do_in_the_host(form):
    """transformers chooses by the source of the class's module, where a rewired class is not."""
    assert fresh(form).config._experts_implementation == plain(form).config._experts_implementation == "grouped_mm"
