"""Official DiT against the official implementation's own numbers, and against an oracle where there are none."""

from __future__ import annotations

import pytest
import torch

import siamesenorm
from siamesenorm.convert import load_official, official_names
from siamesenorm.probes import capture_streams
from siamesenorm.residual import ConfigError, make_scheme
from tests import oracle_dit
from tests.parity import load_case, relative_error

CASES = ["dit_dev", "dit_dev_sincos"]
ARGS = {
    "input_size": 6,
    "patch_size": 3,
    "in_channels": 2,
    "hidden_size": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2.5,
    "class_dropout_prob": 0.1,
    "num_classes": 5,
    "learn_sigma": True,
}


def run(name, dtype):
    case = load_case(name)
    model = load_official(case.group("param/"), "dit", case.args).to(dtype)
    x, t, y = (case.tensors[f"input/{key}"] for key in "xty")
    with capture_streams(model) as streams:
        out = model(x.to(dtype), t, y).sample
    return case, model, out, list(streams)


def with_gradients(model, loss):
    loss.backward()
    return official_names(model, "dit", {n: p.grad for n, p in model.named_parameters()})


@pytest.mark.parametrize("name", CASES)
def test_float64_output_loss_and_every_gradient(name):
    case, model, out, _ = run(name, torch.float64)
    loss = out.square().mean()
    gradients = with_gradients(model, loss)
    assert gradients.keys() == case.group("grad/").keys()
    # The sinusoid is float32 here as there: where the last bit of a sine differs, it would be 2e-6, and gradients 2e-5.
    assert relative_error(out, case.tensors["output/out"]) < 2e-6
    assert relative_error(loss, case.tensors["loss"]) < 2e-6
    for official, gradient in gradients.items():
        assert relative_error(gradient, case.tensors[f"grad/{official}"]) < 2e-5, official


@pytest.mark.parametrize("name", CASES)
def test_streams_after_every_block(name):
    case, _, _, streams = run(name, torch.float64)
    assert len(streams) == case.args["depth"]
    for block, pair in enumerate(streams):
        for stream, axis in zip(pair, "xy", strict=True):
            assert relative_error(stream, case.tensors[f"state/{block}/{axis}"]) < 2e-6


@pytest.mark.parametrize("name", CASES)
def test_float32_output(name):
    case, _, out, _ = run(name, torch.float32)
    assert relative_error(out, case.tensors["output/out_f32"]) < 2e-5


@pytest.mark.parametrize(("dtype", "suffix", "tolerance"), [(torch.float64, "", 2e-6), (torch.float32, "_f32", 2e-5)])
def test_guidance(dtype, suffix, tolerance):
    case = load_case("dit_dev")
    model = load_official(case.group("param/"), "dit", case.args).to(dtype)
    x, t, y = (case.tensors[f"input/cfg_{key}"] for key in "xty")
    out = model.forward_with_cfg(x.to(dtype), t, y, 2.5)
    assert relative_error(out, case.tensors["output/cfg_out" + suffix]) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_is_the_official_model(name):
    case = load_case(name)
    weights = {n: p.double() for n, p in case.group("param/").items()}
    x, t, y = (case.tensors[f"input/{key}"] for key in "xty")
    out, states = oracle_dit.official_dit(weights, case.args, x.double(), t, y, float64=True)
    assert relative_error(out, case.tensors["alt64/output/out"]) < 1e-9
    assert len(states) == case.args["depth"]


@pytest.mark.parametrize("variant", ["siamese", "pre"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": False},
        {"in_channels": 1},
        {"learn_sigma": False},
        {"class_dropout_prob": 0.0},
        {"patch_size": 1, "mlp_ratio": 4, "num_heads": 4, "depth": 1},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_other_models_against_the_oracle(changes, variant):
    args = {**ARGS, **{name: value for name, value in changes.items() if name != "bias"}}
    weights = oracle_dit.official_parameters(args, variant, bias=changes.get("bias", True))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, args["in_channels"], 6, 6, generator=generator, dtype=torch.float64)
    t, y = torch.tensor([0, 999, 371]), torch.tensor([0, 4, 5 if args["class_dropout_prob"] else 1])
    expected, _ = oracle_dit.official_dit(weights, args, x, t, y)
    model = load_official(weights, "dit", args)
    out = model(x, t, y).sample
    assert relative_error(out, expected) < 1e-10
    probe = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    gradients = with_gradients(model, (out * probe).sum())
    trained = {name: weight for name, weight in weights.items() if name != "pos_embed"}
    assert gradients.keys() == trained.keys()
    wanted = torch.autograd.grad((expected * probe).sum(), list(trained.values()))
    for name, reference in zip(trained, wanted, strict=True):
        assert relative_error(gradients[name], reference) < 1e-10, name


def test_what_is_loaded_is_what_was_given():
    weights = oracle_dit.official_parameters(ARGS)
    model = load_official(weights, "dit", {**ARGS, "qkv_bias": True})
    named = official_names(model, "dit", model.state_dict())
    assert named.keys() == weights.keys()
    assert all(torch.equal(named[name], weights[name]) for name in weights)
    assert model.dtype == torch.float64
    assert not model.training
    assert model.null_class == 5
    assert siamesenorm.hosts.scheme_of(model.config) == make_scheme("siamese")
    assert not any(p.data_ptr() == weights[n].data_ptr() for n, p in named.items())
    assert (
        load_official(oracle_dit.official_parameters(ARGS, "pre"), "dit", ARGS).config.residual_scheme["name"] == "pre"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.1.prenorm2.bias": None}, r"missing: blocks\.1\.prenorm2\.bias$"),
        ({"pos_embed": None, "blocks.0.attn.qkv.bias": None}, r"missing: blocks\.0\.attn\.qkv\.bias, pos_embed$"),
        ({"surplus": torch.ones(3)}, "not used: surplus$"),
        ({"pos_embed": torch.ones(1, 4, 8)}, r"pos_embed is \(1, 4, 8\), expected \(1, 4, 16\)"),
        ({"y_embedder.embedding_table.weight": torch.ones(5, 16)}, r"is \(5, 16\), expected \(6, 16\)"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message):
    weights = {**oracle_dit.official_parameters(ARGS), **change}
    weights = {name: weight for name, weight in weights.items() if weight is not None}
    with pytest.raises(ConfigError, match=message):
        load_official(weights, "dit", ARGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_head": 2}, "the official DiT has no argument 'num_head': did you mean 'num_heads'"),
        ({"num_heads": 3}, "hidden_size 16 is not a multiple of num_heads 3"),
        ({"num_heads": 0}, "'num_heads' must be a whole number of at least 1, not 0"),
        ({"patch_size": 4}, "patch_size 4 does not divide sample_size 6"),
        ({"learn_sigma": 1}, "'learn_sigma' must be true or false, not 1"),
        ({"qkv_bias": False}, r"not used: blocks\.0\.attn\.qkv\.bias"),
        ({"class_dropout_prob": 1.5}, "class_dropout_prob of a DiT must be a number of at least 0 and below 1"),
    ],
)
def test_arguments_that_cannot_be_followed_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        load_official(oracle_dit.official_parameters(ARGS), "dit", {**ARGS, **change})


def test_the_callers_random_generator_is_left_alone():
    weights = oracle_dit.official_parameters(ARGS)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    load_official(weights, "dit", ARGS)
    assert torch.equal(before, torch.random.get_rng_state())
