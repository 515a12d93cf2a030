"""Official DeiT: its own numbers, and a plain torch oracle that they vouch for where there is no fixture."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import transformers
from torch import nn

from siamesenorm import hosts
from siamesenorm.convert import load_official, official_names
from siamesenorm.probes import capture_streams
from siamesenorm.residual import ConfigError, make_scheme
from tests import oracle_vision
from tests.parity import load_case, relative_error

BASE = {
    "img_size": 16,
    "patch_size": 4,
    "in_chans": 3,
    "num_classes": 7,
    "embed_dim": 24,
    "depth": 3,
    "num_heads": 3,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "distilled": False,
    "drop_rate": 0.0,
    "attn_drop_rate": 0.0,
    "drop_path_rate": 0.0,
}
CHANGES = {
    "plain": {},
    "distilled": {"distilled": True},
    "no-qkv-bias": {"qkv_bias": False},
    "distilled-no-qkv-bias": {"distilled": True, "qkv_bias": False},
    "one-channel": {"in_chans": 1},
    "one-block-one-head": {"depth": 1, "num_heads": 1},
    "deep": {"depth": 7, "embed_dim": 16, "num_heads": 4},
    "narrow-mlp": {"mlp_ratio": 1.3},
    "whole-mlp-ratio": {"mlp_ratio": 2},
    "one-patch": {"img_size": 8, "patch_size": 8},
    "oblong-image": {"img_size": [8, 20]},
    "oblong-patch": {"img_size": (16, 24), "patch_size": (8, 4), "distilled": True},
    "two-classes": {"num_classes": 2},
    "one-class": {"num_classes": 1},
    "headless": {"num_classes": 0},
    "distilled-headless": {"num_classes": 0, "distilled": True},
    "with-dropout": {"drop_rate": 0.1, "attn_drop_rate": 0.2, "drop_path_rate": 0.3, "distilled": True},
    "as-by-default": {
        "representation_size": None,
        "embed_layer": None,
        "norm_layer": partial(nn.LayerNorm, eps=1e-6),
        "act_layer": nn.GELU,
        "weight_init": "nlhb",
        "qk_scale": None,
    },
}


def images(args, batch=2):
    shape = (batch, args["in_chans"], *oracle_vision.pair(args["img_size"]))
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def detached(parameters, dtype=torch.float64):
    return {name: p.detach().to(dtype) for name, p in parameters.items()}


def gradients_of(loss, parameters):
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def case_of(change):
    args = {**BASE, **CHANGES[change]}
    return args, oracle_vision.official_parameters(args)


# The fixture


def run(dtype):
    case = load_case("deit_dev")
    model = load_official(case.group("param/"), "deit", case.args).to(dtype)
    with capture_streams(model) as streams:
        out = model(pixel_values=case.tensors["input/x"].to(dtype), output_hidden_states=True)
    return case, model, out, list(streams)


def test_float64_logits_loss_streams_readout_and_every_gradient():
    case, model, out, streams = run(torch.float64)
    loss = out.logits.square().mean()
    loss.backward()
    gradients = official_names(model, "deit", {n: p.grad for n, p in model.named_parameters()})
    assert relative_error(out.logits, case.tensors["output/logits"]) < 1e-9
    assert relative_error(loss, case.tensors["loss"]) < 1e-9
    assert relative_error(out.hidden_states[0], case.tensors["state/init/x"]) < 1e-9
    assert relative_error(out.hidden_states[-1], case.tensors["state/readout"]) < 1e-9
    assert len(streams) == case.args["depth"]
    for block, pair in enumerate(streams):
        for stream, axis in zip(pair, "xy", strict=True):
            assert relative_error(stream, case.tensors[f"state/{block}/{axis}"]) < 1e-9
    expected = case.group("grad/")
    assert gradients.keys() == expected.keys()
    assert max(relative_error(gradients[name], expected[name]) for name in expected) < 1e-9


def test_float32_logits():
    case, _, out, _ = run(torch.float32)
    assert relative_error(out.logits, case.tensors["output/logits_f32"]) < 2e-5


def test_the_oracle_itself_meets_the_fixture():
    case = load_case("deit_dev")
    parameters = {k: v.double().requires_grad_() for k, v in case.group("param/").items()}
    logits, states, readout = oracle_vision.official_deit(parameters, case.args, case.tensors["input/x"])
    loss = logits.square().mean()
    gradients = gradients_of(loss, parameters)
    assert relative_error(logits, case.tensors["output/logits"]) < 1e-12
    assert relative_error(loss, case.tensors["loss"]) < 1e-12
    assert relative_error(readout, case.tensors["state/readout"]) < 1e-12
    for key, value in case.group("grad/").items():
        assert relative_error(gradients[key], value) < 1e-11, key
    for block, pair in enumerate(states):
        for stream, axis in zip(pair, "xy", strict=True):
            assert relative_error(stream, case.tensors[f"state/{block}/{axis}"]) < 1e-12


# Other cases


@pytest.mark.parametrize("change", CHANGES)
def test_logits_streams_readout_and_every_gradient(change):
    args, parameters = case_of(change)
    expected, states, readout = oracle_vision.official_deit(parameters, args, images(args))
    probe = torch.randn(expected.shape, dtype=torch.float64)
    gradients = gradients_of((expected * probe).sum(), parameters)

    model = load_official(detached(parameters), "deit", args)
    assert not model.training
    with capture_streams(model) as streams:
        out = model(pixel_values=images(args), output_hidden_states=True)
    (out.logits * probe).sum().backward()

    assert out.logits.dtype == model.config.dtype == torch.float64
    assert relative_error(out.logits, expected) < 1e-10
    assert relative_error(out.hidden_states[-1], readout) < 1e-10
    assert len(streams) == len(states) == args["depth"]
    for got, wanted in zip(streams, states, strict=True):
        for stream, reference in zip(got, wanted, strict=True):
            assert relative_error(stream, reference) < 1e-10
    named = official_names(model, "deit", {n: p.grad for n, p in model.named_parameters()})
    assert named.keys() == gradients.keys()
    for key, value in gradients.items():
        assert relative_error(named[key], value) < 1e-10, key


@pytest.mark.parametrize("change", ["plain", "distilled", "no-qkv-bias", "headless"])
def test_float32_agrees(change):
    args, parameters = case_of(change)
    expected, _, _ = oracle_vision.official_deit(parameters, args, images(args))
    model = load_official(detached(parameters, torch.float32), "deit", args)
    logits = model(pixel_values=images(args).float()).logits
    assert logits.dtype == torch.float32
    assert relative_error(logits, expected) < 2e-5


@pytest.mark.parametrize("change", ["plain", "distilled", "distilled-headless"])
def test_the_official_names_give_the_official_state_dict_back(change):
    args, parameters = case_of(change)
    model = load_official(detached(parameters), "deit", args)
    back = official_names(model, "deit", model.state_dict())
    assert back.keys() == parameters.keys()
    assert all(torch.equal(back[name], parameters[name]) for name in parameters)


def test_what_the_model_is():
    args, parameters = case_of("with-dropout")
    model = load_official(detached(parameters), "deit", args)
    assert isinstance(model, transformers.DeiTForImageClassificationWithTeacher)
    assert hosts.scheme_of(model.config) == make_scheme("siamese", x="post")
    config = model.config
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.drop_path_rate) == (0.1, 0.2, 0.3)
    assert [block.mlp_residual.drop_path for block in hosts.blocks(model)] == [0.0, 0.15, 0.3]
    assert isinstance(
        load_official(detached(case_of("plain")[1]), "deit", BASE), transformers.ViTForImageClassification
    )


def test_a_distilled_model_says_what_each_head_says():
    args, parameters = case_of("distilled")
    _, _, readout = oracle_vision.official_deit(parameters, args, images(args))
    out = load_official(detached(parameters), "deit", args)(pixel_values=images(args))
    for logits, name, token in ((out.cls_logits, "head", 0), (out.distillation_logits, "head_dist", 1)):
        assert relative_error(logits, oracle_vision.linear(parameters, name, readout[:, token])) < 1e-10


@pytest.mark.parametrize("change", ["plain", "distilled", "headless", "oblong-patch"])
def test_an_imported_model_saves_and_loads_to_equal_bits(change, tmp_path):
    args, parameters = case_of(change)
    model = load_official(detached(parameters, torch.float32), "deit", args)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert type(again) is type(model)
    pixels = images(args).float()
    assert torch.equal(again(pixel_values=pixels).logits, model(pixel_values=pixels).logits)


def test_the_constructors_defaults():
    """224 by 224 in patches of 16, three channels, 1000 classes, twelve blocks of width 768: as in DeiT-B."""
    args, parameters = case_of("plain")
    with pytest.raises(ConfigError) as error:
        load_official(detached(parameters), "deit", {"depth": 1, "embed_dim": 24})
    said = str(error.value)
    assert "pos_embed is (1, 17, 24), expected (1, 197, 24)" in said
    assert "patch_embed.proj.weight is (24, 3, 4, 4), expected (24, 3, 16, 16)" in said
    assert "head.weight is (7, 24), expected (1000, 24)" in said
    assert "mlp.fc1" not in said.partition("of another shape")[2]
    some = {"img_size": 16, "patch_size": 4, "num_classes": 7, "embed_dim": 24, "depth": 3, "num_heads": 3}
    model = load_official(detached(parameters), "deit", some)
    assert (
        relative_error(model(images(args)).logits, oracle_vision.official_deit(parameters, args, images(args))[0])
        < 1e-10
    )


def test_the_callers_random_generator_and_state_dict_are_left_alone():
    args, parameters = case_of("distilled")
    given = detached(parameters)
    kept = {name: p.clone() for name, p in given.items()}
    before = torch.random.get_rng_state()
    model = load_official(given, "deit", args)
    assert torch.equal(before, torch.random.get_rng_state())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(given[name], kept[name]) for name in kept)


@pytest.mark.parametrize(("rate", "warned"), [(0.0, False), (0.1, True)])
def test_dropout_that_transformers_puts_elsewhere_is_said(rate, warned, caplog):
    _, parameters = case_of("plain")
    with caplog.at_level(logging.WARNING):
        load_official(detached(parameters), "deit", {**BASE, "drop_rate": rate, "attn_drop_rate": 0.1})
    assert ("dropout between the layers of its MLP" in caplog.text) == warned


# What does not fit


def test_weights_that_do_not_fit_are_all_listed():
    args, parameters = case_of("plain")
    state = detached(parameters)
    for name in ("blocks.1.post_norm2.bias", "cls_token"):
        del state[name]
    state["pre_logits.fc.weight"] = torch.ones(3, 3)
    state["blocks.0.attn.qkv.weight"] = torch.ones(71, 24)
    state["pos_embed"] = torch.ones(1, 18, 24)
    with pytest.raises(ConfigError) as error:
        load_official(state, "deit", args)
    for said in (
        "missing: blocks.1.post_norm2.bias, cls_token;",
        "not used: pre_logits.fc.weight;",
        "blocks.0.attn.qkv.weight is (71, 24), expected (72, 24)",
        "pos_embed is (1, 18, 24), expected (1, 17, 24)",
    ):
        assert said in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"distilled": True}, r"missing: dist_token, head_dist\.bias, head_dist\.weight"),
        ({"qkv_bias": False}, r"not used: blocks\.0\.attn\.qkv\.bias"),
        ({"num_classes": 0}, r"not used: head\.bias, head\.weight"),
        ({"num_classes": 8}, r"head\.weight is \(7, 24\), expected \(8, 24\)"),
        ({"depth": 2}, r"not used: blocks\.2\."),
        ({"depth": 4}, r"missing: blocks\.3\."),
        ({"mlp_ratio": 2.0}, r"fc1\.weight is \(96, 24\), expected \(48, 24\)"),
        ({"img_size": 32}, r"pos_embed is \(1, 17, 24\), expected \(1, 65, 24\)"),
    ],
    ids=str,
)
def test_arguments_of_another_model(change, message):
    _, parameters = case_of("plain")
    with pytest.raises(ConfigError, match=message):
        load_official(detached(parameters), "deit", {**BASE, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed_dims": 24}, "has no argument 'embed_dims': did you mean 'embed_dim'"),
        ({"representation_size": 64}, "representation_size=64 is not supported, only None"),
        ({"qk_scale": 0.5}, "qk_scale=0.5 is not supported"),
        ({"norm_layer": nn.LayerNorm}, "norm_layer"),
        ({"norm_layer": partial(nn.LayerNorm, eps=1e-5)}, "norm_layer"),
        ({"norm_layer": partial(nn.LayerNorm, eps=1e-6, bias=False)}, "norm_layer"),
        ({"act_layer": nn.ReLU}, "act_layer"),
        ({"embed_layer": nn.Conv2d}, "embed_layer"),
        ({"num_heads": 5}, "embed_dim 24 is not a multiple of num_heads 5"),
        ({"num_heads": 0}, "'num_heads' must be a whole number of at least 1, not 0"),
        ({"embed_dim": "24"}, "'embed_dim' must be a whole number"),
        ({"depth": True}, "'depth' must be a whole number"),
        ({"in_chans": 0}, "'in_chans' must be"),
        ({"num_classes": -1}, "'num_classes' must be a whole number of at least 0, not -1"),
        ({"img_size": [16, 16, 16]}, "'img_size' must be a whole number of at least 1, or two of them"),
        ({"img_size": None}, "'img_size' must be"),
        ({"patch_size": 0}, "'patch_size' must be"),
        ({"patch_size": 5}, "patch_size 5 does not divide image_size 16"),
        ({"patch_size": 32}, "patch_size 32 does not divide image_size 16"),
        ({"mlp_ratio": 0.01}, "'mlp_ratio' must be"),
        ({"mlp_ratio": float("nan")}, "'mlp_ratio' must be"),
        ({"qkv_bias": 1}, "'qkv_bias' must be true or false, not 1"),
        ({"distilled": "no"}, "'distilled' must be true or false"),
        ({"drop_path_rate": 1.0}, "'drop_path_rate' must be at least 0 and below 1, not 1.0"),
        ({"drop_rate": -0.1}, "'drop_rate' must be at least 0"),
        ({"attn_drop_rate": "0.1"}, "'attn_drop_rate' must be at least 0"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_followed_are_refused(change, message):
    _, parameters = case_of("plain")
    with pytest.raises(ConfigError, match=message) as error:
        load_official(detached(parameters), "deit", {**BASE, **change})
    assert "\n" not in str(error.value)
