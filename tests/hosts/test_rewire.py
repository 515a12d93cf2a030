"""Rewiring: what it keeps, what it computes, what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle

import peft
import pytest
import torch
import transformers
from torch import nn

import siamesenorm
from siamesenorm import hosts
from siamesenorm.hosts import Host, families
from siamesenorm.residual import ConfigError, LayerNorm, RMSNorm
from tests import oracle
from tests.hosts.running import GAINS, register_gains
from tests.hosts.tiny import FAMILIES, PREFIX, SCHEMES, SHAPE, SIAMESE, config, host, rewired, scatter, shared, tokens
from tests.parity import relative_error

GONE = {
    "pre": (),
    "post-pre": (),
    "post": ("input_layernorm", "post_attention_layernorm"),
    "hybrid-pre": ("input_layernorm",),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_values_stay(family, scheme):
    plain = host(family)
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    identity = {id(p) for p in plain.parameters()}
    name, options = SCHEMES[scheme]
    model = siamesenorm.rewire(plain, name, **options)
    assert model is plain
    after = dict(model.named_parameters())
    gone = {n for n in before if any(f".{norm}." in n for norm in GONE[scheme])}
    assert len(gone) == 3 * len(GONE[scheme])
    assert before.keys() - after.keys() == gone
    for n in before.keys() - gone:
        assert torch.equal(after[n], before[n]), n
        assert id(after[n]) in identity
    new = after.keys() - before.keys()
    assert all(
        "_residual." in n or ".readout." in n or n.endswith(("q_norm.weight", "k_norm.weight", "v_norm.weight"))
        for n in new
    )
    assert all((after[n] == 1).all() for n in new)
    assert (not new) == (scheme == "pre")


@pytest.mark.parametrize("family", FAMILIES)
def test_pre_is_the_host(family):
    plain = host(family)
    with torch.no_grad():
        before = plain(input_ids=tokens()).logits
        after = siamesenorm.rewire(plain, "pre")(input_ids=tokens()).logits
    assert relative_error(after, before) < 1e-6


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_against_the_oracle(family, scheme):
    name, options = SCHEMES[scheme]
    model = rewired(family, scheme).double()
    weights = dict(model.named_parameters())
    ids = tokens()
    expected, _ = oracle.hf_lm(weights, model.config, name, ids, **options)
    logits = model(input_ids=ids).logits
    assert relative_error(logits, expected) < 1e-10
    probe = torch.randn(logits.shape, dtype=torch.float64)
    ours = torch.autograd.grad((logits * probe).sum(), list(weights.values()))
    theirs = torch.autograd.grad((expected * probe).sum(), list(weights.values()))
    for n, a, b in zip(weights, ours, theirs, strict=True):
        assert relative_error(a, b) < 1e-10, n


@pytest.mark.parametrize(
    "options",
    [
        {"x": "post", "normalized_input": False},
        {"x": "post", "depth_scale": "paper"},
        {"x": "hybrid", "first_block_pre": True},
        {"x": "hybrid", "first_block_pre": True, "normalized_input": False, "depth_scale": "none"},
    ],
    ids=str,
)
def test_options_reach_the_model(options):
    model = scatter(siamesenorm.rewire(host(), "siamese", **options)).double()
    expected, _ = oracle.hf_lm(dict(model.named_parameters()), model.config, "siamese", tokens(), **options)
    assert relative_error(model(input_ids=tokens()).logits, expected) < 1e-10


def test_x_init_zero_is_pre_norm_whose_norm_is_nin_of_ny():
    plain = host()
    model = siamesenorm.rewire(copy.deepcopy(plain), "siamese", x_init=0).double()
    expected, _ = oracle.hf_lm(dict(model.named_parameters()), model.config, "siamese", tokens())
    logits = model(input_ids=tokens()).logits
    assert relative_error(logits, expected) < 1e-10
    assert relative_error(logits, plain.double()(input_ids=tokens()).logits) < 1e-4


def test_every_norm_has_our_numerics_and_the_hosts_eps():
    for family in FAMILIES:
        for scheme in SCHEMES:
            model = rewired(family, scheme, rms_norm_eps=1e-4)
            norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
            assert len(norms) >= 7
            assert all(isinstance(m, RMSNorm) and m.eps == 1e-4 for m in norms)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_buffers_of_ours(family, scheme):
    plain = {name for name, _ in host(family).named_buffers()}
    assert {name for name, _ in shared(family, scheme).named_buffers()} == plain


def test_trained_norms_that_go_are_named_in_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "siamesenorm"):
        siamesenorm.rewire(host(), "siamese", x="hybrid")
    assert "layers.0.input_layernorm, layers.1.input_layernorm, layers.2.input_layernorm" in caplog.text
    caplog.clear()
    fresh = transformers.LlamaForCausalLM(config("llama"))
    with caplog.at_level(logging.WARNING, "siamesenorm"):
        siamesenorm.rewire(fresh, "siamese", x="hybrid")
        siamesenorm.rewire(host(), "siamese", x="post")
    assert caplog.text == ""


def test_new_parameters_have_the_models_dtype_and_mode():
    model = siamesenorm.rewire(host().bfloat16().train(), "siamese", x="hybrid")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(m.training for m in model.modules())
    model = siamesenorm.rewire(host(), "siamese")
    assert not any(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tied_and_untied(scheme):
    tied, untied = rewired("llama", scheme, tie_word_embeddings=True), shared("llama", scheme)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    name, options = SCHEMES[scheme]
    tied = tied.double()
    expected, _ = oracle.hf_lm(dict(tied.named_parameters()), tied.config, name, tokens(), **options)
    assert relative_error(tied(input_ids=tokens()).logits, expected) < 1e-10


@pytest.mark.parametrize("scheme", SIAMESE)
def test_copies_and_pickles_of_a_fresh_model(scheme):
    model = rewired("qwen3", scheme)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    expected = model(input_ids=tokens(), output_hidden_states=True)
    for again in copies:
        assert type(again) is type(model)
        out = again(input_ids=tokens(), output_hidden_states=True)
        assert torch.equal(out.logits, expected.logits)
        assert len(out.hidden_states) == 4
        with torch.no_grad():
            next(again.parameters()).add_(1.0)
        assert torch.equal(model(input_ids=tokens()).logits, expected.logits)


def test_two_models_of_one_config():
    made = config("llama")
    first, second = (scatter(transformers.LlamaForCausalLM(made)).eval() for _ in range(2))
    before = second(input_ids=tokens()).logits
    siamesenorm.rewire(first, "siamese")
    assert type(second) is transformers.LlamaForCausalLM
    assert second.config is made
    assert made.model_type == "llama"
    assert not hasattr(made, "residual_scheme")
    assert torch.equal(second(input_ids=tokens()).logits, before)
    assert first.config is not made
    assert all(m.config is first.config for m in first.modules() if hasattr(m, "config"))


def test_the_other_model_of_one_config_is_saveable(tmp_path):
    made = config("llama")
    first, second = (scatter(transformers.LlamaForCausalLM(made)).eval() for _ in range(2))
    siamesenorm.rewire(first, "siamese")
    second.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is transformers.LlamaForCausalLM
    assert torch.equal(again(input_ids=tokens()).logits, second(input_ids=tokens()).logits)


def test_rewiring_twice():
    model = rewired()
    with pytest.raises(ConfigError, match="is rewired already \\(scheme 'siamese'\\)"):
        siamesenorm.rewire(model, "pre")
    with pytest.raises(ConfigError, match="rewired already"):
        siamesenorm.rewire(model.model, "pre")


class HasConfig(nn.Module):
    """What wraps a model often passes its config on."""

    def __init__(self):
        super().__init__()
        self.inner = host()
        self.config = self.inner.config


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 4),
        nn.Module,
        lambda: transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=8, n_layer=1, n_head=1)),
        HasConfig,
        lambda: torch.compile(host(), backend="eager"),
        lambda: peft.get_peft_model(host(), peft.LoraConfig(target_modules=["q_proj"])),
        lambda: None,
        lambda: "llama",
        lambda: config("llama"),
        lambda: transformers.LlamaForCausalLM,
    ],
    ids=["linear", "module", "bloom", "wrapper", "compiled", "adapted", "none", "string", "config", "class"],
)
def test_what_is_not_supported(make):
    with pytest.raises(ConfigError, match=rf"supported are {', '.join(hosts.hosts())}\..*register_host"):
        siamesenorm.rewire(make(), "siamese")


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("siamsee", {}, "did you mean 'siamese'"),
        ("siamese", {"xx": 1}, "no option 'xx'"),
        ("siamese", {"x": "hybird"}, "did you mean 'hybrid'"),
        ("siamese", {"first_block_pre": True}, "needs x='hybrid'"),
    ],
)
def test_a_refused_scheme_changes_nothing(scheme, options, message):
    model = host()
    before = model(input_ids=tokens()).logits
    with pytest.raises(ConfigError, match=message):
        siamesenorm.rewire(model, scheme, **options)
    assert type(model) is transformers.LlamaForCausalLM
    assert model.config.model_type == "llama"
    assert torch.equal(model(input_ids=tokens()).logits, before)


def test_a_base_model_without_a_head():
    whole = rewired()
    torch.manual_seed(0)
    base = host().model
    siamesenorm.rewire(base, "siamese")
    base.load_state_dict(whole.model.state_dict())
    assert type(base).__name__ == "ResidualLlamaModel"
    assert torch.equal(base(input_ids=tokens()).last_hidden_state, whole.model(input_ids=tokens()).last_hidden_state)


def test_a_sequence_classifier_trains_through_both_streams():
    model = transformers.LlamaForSequenceClassification(config("llama", num_labels=3))
    head = model.score.weight.detach().clone()
    siamesenorm.rewire(scatter(model), "siamese", x="hybrid")
    assert type(model).__name__ == "ResidualLlamaForSequenceClassification"
    assert not torch.equal(head, model.score.weight)
    out = model(input_ids=tokens(), labels=torch.tensor([0, 2]))
    assert out.logits.shape == (2, 3)
    hidden = model.model(input_ids=tokens()).last_hidden_state
    torch.testing.assert_close(out.logits, model.score(hidden)[:, -1])
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "residual" in n)


# Other families


def like_llama(name, prefix):
    return dataclasses.replace(
        families.get_host("llama"), name=name, modeling=f"transformers.models.{name}.modeling_{name}", prefix=prefix
    )


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("scheme", SIAMESE)
def test_another_family_is_a_table(scheme, tmp_path):
    table = like_llama("seed_oss", "SeedOss")
    assert hosts.register_host(table) is table
    assert "seed_oss" in hosts.hosts()
    name, options = SCHEMES[scheme]
    plain = transformers.SeedOssForCausalLM(
        transformers.SeedOssConfig(**SHAPE, attention_bias=True, attention_out_bias=True)
    )
    model = scatter(siamesenorm.rewire(scatter(plain), name, **options)).eval()
    exact = copy.deepcopy(model).double()
    expected, _ = oracle.hf_lm(dict(exact.named_parameters()), exact.config, name, tokens(), **options)
    assert relative_error(exact(input_ids=tokens()).logits, expected) < 1e-10
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)
    assert torch.equal(pickle.loads(pickle.dumps(model))(input_ids=tokens()).logits, model(input_ids=tokens()).logits)
    built = hosts.build("seed_oss", SHAPE, name, options)
    assert type(built) is type(model)


@pytest.mark.usefixtures("_clean")
def test_a_family_whose_norm_is_a_layer_norm():
    table = dataclasses.replace(
        families.get_host("llama"),
        name="starcoder2",
        modeling="transformers.models.starcoder2.modeling_starcoder2",
        prefix="Starcoder2",
        mlp_weights=("mlp.c_fc", "mlp.c_proj"),
    )
    siamesenorm.register_host(table)
    shape = {k: v for k, v in SHAPE.items() if k != "head_dim"}
    plain = transformers.Starcoder2ForCausalLM(
        transformers.Starcoder2Config(**shape, norm_epsilon=1e-4, sliding_window=None)
    )
    scatter(plain).eval()
    before = plain(input_ids=tokens()).logits
    model = siamesenorm.rewire(copy.deepcopy(plain), "pre")
    assert relative_error(model(input_ids=tokens()).logits, before) < 1e-6
    model = siamesenorm.rewire(plain, "siamese", x="hybrid")
    norms = [m for m in model.modules() if isinstance(m, LayerNorm)]
    assert len(norms) == 3 * (1 + 3 + 3) + 3
    assert all(m.eps == 1e-4 and m.bias is not None for m in norms)
    out = model(input_ids=tokens(), labels=tokens())
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.usefixtures("_clean")
def test_a_family_is_registered_once():
    with pytest.raises(ConfigError, match="a host named 'llama' is registered already"):
        hosts.register_host(families.get_host("llama"))


def test_an_unknown_family_is_named():
    with pytest.raises(ConfigError, match="unknown host 'lama': did you mean 'llama'"):
        hosts.build("lama", SHAPE)
    assert isinstance(hosts.get_host("qwen3"), Host)


# Initialisation


def gain_of(name):
    for role in "qkvo":
        if f"{role}_proj" in name:
            return GAINS[role]
    return GAINS["mlp"] if ".mlp." in name else 1.0


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("init", [False, True])
def test_init_applies_the_schemes_gains_when_asked(init):
    register_gains()
    plain = host("qwen2")
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    model = siamesenorm.rewire(plain, "gains", init=init)
    for name, parameter in model.named_parameters():
        if name in before:
            gain = gain_of(name) if init and name.endswith("weight") else 1.0
            torch.testing.assert_close(parameter, before[name] * gain)


@pytest.mark.usefixtures("_clean")
def test_a_built_model_has_the_gains_and_a_loaded_one_does_not_get_them_again(tmp_path):
    register_gains()
    torch.manual_seed(3)
    plain = dict(hosts.build("llama", SHAPE, "pre").named_parameters())
    torch.manual_seed(3)
    model = hosts.build("llama", SHAPE, "gains")
    for name, parameter in model.named_parameters():
        if name in plain:
            torch.testing.assert_close(parameter, plain[name] * gain_of(name))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_seeds_give_equal_shared_weights(family):
    shape = dict(SHAPE) if family != "qwen2" else {k: v for k, v in SHAPE.items() if k != "head_dim"}
    made = {}
    for scheme, (name, options) in SCHEMES.items():
        torch.manual_seed(7)
        made[scheme] = dict(hosts.build(family, shape, name, options).named_parameters())
        made[scheme + "-next"] = torch.rand(3)
    torch.manual_seed(7)
    plain = dict(getattr(transformers, PREFIX[family] + "ForCausalLM")(config(family)).named_parameters())
    for scheme in SCHEMES:
        shared_names = plain.keys() & made[scheme].keys()
        assert len(shared_names) >= len(plain) - 6
        assert all(torch.equal(plain[n], made[scheme][n]) for n in shared_names)
        assert torch.equal(made[scheme + "-next"], made["pre-next"])


@pytest.mark.parametrize("scheme", SIAMESE)
def test_initialising_again_after_the_meta_device_keeps_x_init(scheme):
    """transformers sets whatever is called a norm to 1."""
    name, options = SCHEMES[scheme]
    wanted = dict(hosts.build("llama", SHAPE, name, {**options, "x_init": 0.25}).named_parameters())
    with torch.device("meta"):
        model = hosts.build("llama", SHAPE, name, {**options, "x_init": 0.25})
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 9.0)
    for module in model.modules():
        model._init_weights(module)
    for n, parameter in model.named_parameters():
        if "norm" in n or n.endswith("c1"):
            assert torch.equal(parameter, wanted[n]), n
        assert not (parameter == 9).any()


def test_build_refuses_what_it_does_not_know():
    with pytest.raises(ConfigError, match="no key 'hiden_size': did you mean 'hidden_size'"):
        hosts.build("llama", {"hiden_size": 32})
    with pytest.raises(ConfigError, match="no valid Llama config"):
        hosts.build("llama", {**SHAPE, "hidden_size": "wide"})
    with pytest.raises(ConfigError, match="no option 'y'"):
        hosts.build("llama", SHAPE, "siamese", {"y": 1})
    for reserved in ("residual_scheme", "residual_norm"):
        assert hasattr(hosts.model_config("llama", SHAPE), reserved)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_build_on_the_meta_device(scheme):
    name, options = SCHEMES[scheme]
    with torch.device("meta"):
        empty = hosts.build("llama", SHAPE, name, options)
    real = hosts.build("llama", SHAPE, name, options)
    assert all(p.is_meta for p in empty.parameters())
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    assert hosts.site_table(empty) == hosts.site_table(real)


def test_the_site_table():
    rows = hosts.site_table(shared("qwen3", "hybrid-pre"))
    assert len(rows) == 7
    assert [row["kind"] for row in rows] == ["attention", "mlp"] * 3 + ["readout"]
    assert rows[2] == {
        "sublayer": 2,
        "block": 1,
        "kind": "attention",
        "reads": "c1⊙X + Ny(Y)",
        "writes": "X = X + c·o, Y = Y + o",
        "scale": 0.5,
        "norms": "no Nin; q, k, v per head",
    }
    assert len(hosts.blocks(shared("qwen3", "hybrid-pre"))) == 3
