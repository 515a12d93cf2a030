"""Official language models that no fixture shows, against a plain torch oracle that the fixtures vouch for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from siamesenorm.convert import load_official, official_names
from siamesenorm.probes import capture_streams
from tests import oracle
from tests.parity import load_case, relative_error

BASE = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 3,
    "mlp_hidden_size": 96,
    "vocab_size": 53,
    "weight_tying": False,
    "rope_theta": 10000,
    "max_sequence_length": 64,
    "layer_norm_type": "rms",
    "layer_norm_eps": 1e-5,
    "include_bias": False,
    "bias_for_layer_norm": False,
    "attention_dropout": 0.0,
}
HYBRID = {"use_query_norm": True, "use_key_norm": True, "use_value_norm": True, "attn_norm": False}
STARRED = {**HYBRID, "norm_pos_special_config": "_{0:{'attn_norm':True,'ffn_residual':False}}_"}
VARIANTS = {"hybrid": HYBRID, "starred": STARRED, "hybridnorm": HYBRID, "hybridnorm-starred": STARRED, "pre": {}}
CHANGES = {
    "plain": {},
    "tied": {"weight_tying": True},
    "one-kv-head": {"n_kv_heads": 1},
    "two-kv-heads": {"n_kv_heads": 2},
    "multi-query": {"multi_query_attention": True},
    "layer-norm": {"layer_norm_type": "default"},
    "layer-norm-bias": {"layer_norm_type": "default", "bias_for_layer_norm": True},
    "rms-bias": {"bias_for_layer_norm": True},
    "biases-tied": {"include_bias": True, "bias_for_layer_norm": None, "weight_tying": True},
    "biases-but-none-in-norms": {"include_bias": True, "weight_tying": True},
    "wide-embedding": {"embedding_size": 64},
    "wide-embedding-tied": {"embedding_size": 64, "weight_tying": True},
    "no-affine": {"layer_norm_with_affine": False},
    "no-affine-layer-norm": {
        "layer_norm_with_affine": False,
        "layer_norm_type": "default",
        "bias_for_layer_norm": True,
    },
    "mlp-ratio": {"mlp_hidden_size": None, "mlp_ratio": 2},
    "another-eps-and-theta": {"layer_norm_eps": 1e-3, "rope_theta": 500000},
}


def tokens(vocab, batch=2, seq=17):
    return torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(5))


def gradients_of(loss, parameters):
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


FIXTURES = {
    "lm_hybridpre_dev_untied": "hybrid",
    "lm_hybridpre_dev_tied": "hybrid",
    "lm_hybridnorm_dev": "hybridnorm",
    "lm_prenorm_dev": "pre",
}


@pytest.mark.parametrize("name", FIXTURES)
def test_the_oracle_itself_meets_the_official_fixtures(name):
    case = load_case(name)
    parameters = {k: v.double().requires_grad_() for k, v in case.group("param/").items()}
    logits, states = oracle.official_lm(parameters, case.args, FIXTURES[name], case.tensors["input/tokens"])
    loss = F.cross_entropy(logits.flatten(0, 1), case.tensors["input/labels"].flatten())
    gradients = gradients_of(loss, parameters)
    assert relative_error(logits, case.tensors["output/logits"]) < 1e-12
    assert relative_error(loss, case.tensors["loss"]) < 1e-12
    for key, value in case.group("grad/").items():
        assert relative_error(gradients[key], value) < 1e-11
    for block, streams in enumerate(states):
        for stream, axis in zip(streams, "xy", strict=False):
            assert relative_error(stream, case.tensors[f"state/{block}/{axis}"]) < 1e-12


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_streams_loss_and_every_gradient(variant, change):
    args = {**BASE, **VARIANTS[variant], **CHANGES[change]}
    plain = {**args, "n_kv_heads": 1} if args.get("multi_query_attention") else args
    parameters = oracle.official_parameters(plain, variant)
    ids, labels = tokens(53), tokens(53, 2, 17).flip(0)
    expected, states = oracle.official_lm(parameters, plain, variant, ids)
    loss = F.cross_entropy(expected.flatten(0, 1), labels.flatten())
    gradients = gradients_of(loss, parameters)

    model = load_official({k: v.detach() for k, v in parameters.items()}, "lm", args)
    with capture_streams(model) as streams:
        logits = model(input_ids=ids).logits
    ours = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    ours.backward()

    assert logits.dtype == torch.float64
    assert relative_error(logits, expected) < 1e-10
    assert relative_error(ours, loss) < 1e-10
    assert len(streams) == len(states) == 3
    for got, wanted in zip(streams, states, strict=True):
        for stream, reference in zip(got, wanted, strict=True):
            assert relative_error(stream, reference) < 1e-10
    named = official_names(model, "lm", {n: p.grad for n, p in model.named_parameters()})
    assert named.keys() == gradients.keys()
    for key, value in gradients.items():
        assert relative_error(named[key], value) < 1e-10, key


@pytest.mark.parametrize("variant", ["starred", "hybridnorm-starred"])
def test_the_official_names_give_the_official_state_dict_back(variant):
    parameters = oracle.official_parameters({**BASE, **STARRED}, variant)
    model = load_official({k: v.detach() for k, v in parameters.items()}, "lm", {**BASE, **STARRED})
    back = official_names(model, "lm", model.state_dict())
    assert back.keys() == parameters.keys()
    assert all(torch.equal(back[k], parameters[k]) for k in parameters)


def test_the_state_dict_is_not_shared_with_the_model():
    parameters = {k: v.detach() for k, v in oracle.official_parameters({**BASE}, "pre").items()}
    kept = {k: v.clone() for k, v in parameters.items()}
    model = load_official(parameters, "lm", BASE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(parameters[k], kept[k]) for k in kept)


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        *(("starred", change) for change in ("layer-norm-bias", "no-affine", "two-kv-heads", "biases-tied")),
        ("hybridnorm-starred", "layer-norm-bias"),
    ],
)
def test_an_imported_model_saves_and_loads_to_equal_bits(variant, change, tmp_path):
    import transformers

    args = {**BASE, **STARRED, **CHANGES[change]}
    parameters = {k: v.detach().float() for k, v in oracle.official_parameters(args, variant).items()}
    model = load_official(parameters, "lm", args)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=tokens(53)).logits, model(input_ids=tokens(53)).logits)
