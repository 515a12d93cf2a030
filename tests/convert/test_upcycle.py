"""Upcycling: the same function on every family, gradients for all that is new, and what cannot be had is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers

import siamesenorm
from siamesenorm import convert, hosts, hub
from siamesenorm.convert import load_official, upcycle
from siamesenorm.convert.difference import difference
from siamesenorm.residual import ConfigError, Norm, Sublayer, make_scheme, open_by, own_parameters
from tests.hosts import test_dit, test_vision, tiny
from tests.hosts.tiny import FORMS, config, model_class, scatter, tokens
from tests.parity import load_case, relative_error

TEXT = {**{family: (family, {}) for family in tiny.FAMILIES}, **FORMS}
TOLERANCE = 1e-4


def plain(form: str, *, trained: bool, tied: bool):
    """A language model where training starts, or away from there."""
    family, changes = TEXT[form]
    torch.manual_seed(0)
    model = model_class(family)(config(family, **{**changes, "tie_word_embeddings": tied})).eval()
    return scatter(model) if trained else model


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens()).logits


def assert_new_weights_learn(model, loss):
    """Every parameter of the scheme has a gradient at once, and a step along it lowers the loss by as much as it says.

    The step is one that lowers it by a thousandth: less would be rounding, and more would meet the curvature.
    """
    before = loss()
    before.backward()
    own = own_parameters(model)
    assert own
    dead = [name for name, parameter in own.items() if parameter.grad is None or not parameter.grad.abs().max() > 0]
    assert dead == []
    norm = torch.stack([parameter.grad.norm() for parameter in own.values()]).norm()
    with torch.no_grad():
        for parameter in own.values():
            parameter -= 1e-3 * parameter.grad / norm**2
        assert (loss() - before).item() == pytest.approx(-1e-3, rel=0.1)


# The same function


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("trained", [False, True], ids=["at-start", "trained"])
@pytest.mark.parametrize("form", TEXT)
def test_language_models(form, trained, tied):
    model = plain(form, trained=trained, tied=tied)
    wanted, names = logits(model), dict(model.named_parameters())
    assert upcycle(model) is model
    assert relative_error(logits(model), wanted) < TOLERANCE
    own = own_parameters(model)
    assert {name: id(p) for name, p in model.named_parameters() if name not in own} == {
        name: id(p) for name, p in names.items()
    }
    assert_new_weights_learn(model, lambda: model(input_ids=tokens(), labels=tokens()).loss)


@pytest.mark.parametrize("form", test_vision.FORMS)
@pytest.mark.parametrize("trained", [False, True], ids=["at-start", "trained"])
def test_image_classifiers(form, trained):
    model = test_vision.host(form)
    if not trained:
        torch.manual_seed(0)
        model = type(model)(model.config).eval()
    wanted = model(pixel_values=test_vision.images()).logits.detach()
    upcycle(model)
    assert relative_error(model(pixel_values=test_vision.images()).logits, wanted) < TOLERANCE
    assert_new_weights_learn(model, lambda: test_vision.loss_of(model))


@pytest.mark.parametrize("kind", ["diffusers", "ours", "ours-pre"])
def test_models_of_diffusers(kind):
    if kind == "diffusers":
        model = test_dit.stock()
    else:
        # Pre-Norm where its config carries no scheme, and where it carries that.
        model = hosts.dit.DiT(**test_dit.SHAPE) if kind == "ours" else test_dit.new("pre")
        scatter(model).eval()
    x, t, y = test_dit.inputs(dtype=torch.float32)
    wanted = model(x, t, y).sample.detach()
    assert upcycle(model) is model
    assert relative_error(model(x, t, y).sample, wanted) < TOLERANCE
    assert hosts.scheme_in(model) == make_scheme("siamese", x_init=0, y_eps=1)
    assert_new_weights_learn(model, lambda: model(x, t, y).sample.square().mean())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_is_left_is_half_the_eps_of_the_hosts_norms(family):
    """RMSNorm and LayerNorm, in float64, at the scale of an embedding where training starts."""
    model = plain(family, trained=False, tied=False).double()
    upcycle(model)
    block = hosts.blocks(model)[1]
    placed = block.sublayers[1]
    final = model.base_model.norm if family == "llama" else model.base_model.ln_f
    inner = block.get_submodule(placed.norms_before[0])
    for own, of_y in ((inner, getattr(block, placed.residual).norm_y), (final, final.readout.norm_y)):
        assert (of_y.eps, own.eps) == (1.0, 1e-6 if family == "llama" else 1e-5)
        for scale in (1e-3, 2e-2, 1.0, 1e3):
            y = scale * torch.randn(64, 32, dtype=torch.float64)
            assert relative_error(own._normed(of_y(y)), own._normed(y)) < own.eps / 2


def test_with_the_hosts_own_eps_it_would_not_be_the_same():
    model = plain("llama", trained=False, tied=False)
    wanted = logits(model)
    siamesenorm.rewire(model, "siamese", x_init=0)
    assert relative_error(logits(model), wanted) > TOLERANCE


# What is saved


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma", "olmoe"])
def test_the_eps_is_saved_and_loaded(family, tied, tmp_path):
    model = upcycle(plain(family, trained=True, tied=tied))
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["residual_scheme"]
    assert (saved["name"], saved["x"], saved["x_init"], saved["y_eps"]) == ("siamese", "post", 0.0, 1.0)
    for again in (hub.load(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert torch.equal(logits(again), logits(model))
        norms = {name: module for name, module in again.named_modules() if isinstance(module, Norm)}
        assert {norm.eps for name, norm in norms.items() if name.endswith("norm_y")} == {1.0}
        assert {norm.eps for name, norm in norms.items() if not name.endswith("norm_y")} == {
            config(family).rms_norm_eps
        }


def test_a_dit_saves_its_eps(tmp_path):
    model = upcycle(test_dit.stock())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    x, t, y = test_dit.inputs(dtype=torch.float32)
    assert again.scheme.y_eps == 1.0
    assert torch.equal(again(x, t, y).sample, model(x, t, y).sample)


def test_options_that_are_not_the_starts_own_are_kept(tmp_path):
    model = plain("llama", trained=True, tied=False)
    wanted = logits(model)
    upcycle(model, "siamese", depth_scale="paper", stream_dtype="float32")
    assert relative_error(logits(model), wanted) < TOLERANCE
    assert hosts.scheme_in(model) == make_scheme(
        "siamese", depth_scale="paper", stream_dtype="float32", x_init=0, y_eps=1
    )


def test_opening_x_by_hand():
    """By equal parts, from Nx at 0 to Nx at 1; Gemma's weights are one less than what they multiply by."""
    for family, closed in (("llama", 0.0), ("gemma", -1.0)):
        model = upcycle(plain(family, trained=True, tied=False))
        scheme = hosts.scheme_in(model)
        weights = {name: p for name, p in model.named_parameters() if name.endswith("norm_x.weight")}
        kept = {name: p.detach().clone() for name, p in model.named_parameters() if name not in weights}
        assert len(weights) == 7
        for step in range(4):
            assert all((p == closed + step / 4).all() for p in weights.values())
            open_by(model, scheme, 1 / 4)
        assert all((p == closed + 1).all() for p in weights.values())
        assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters() if name in kept)


# From scheme to scheme


def rewired(scheme, family="llama", **options):
    return scatter(siamesenorm.rewire(plain(family, trained=True, tied=False), scheme, **options), 1).eval()


WAYS = {
    "pre-siamese": (("pre", {}), ("siamese", {})),
    "pre-mhc": (("pre", {}), ("mhc", {})),
    "pre-mhc-2": (("pre", {}), ("mhc", {"n": 2})),
    "pre-hyper-1": (("pre", {}), ("hyper", {"n": 1})),
    "pre-lns": (("pre", {}), ("lns", {})),
    "pre-pre": (("pre", {}), ("pre", {"stream_dtype": "float32"})),
    "lns-pre": (("lns", {}), ("pre", {})),
    "lns-siamese": (("lns", {}), ("siamese", {})),
    "lns-mhc": (("lns", {}), ("mhc", {})),
    "mixln-siamese": (("mixln", {"share": 0.0}), ("siamese", {})),
    "pre-mixln": (("pre", {}), ("mixln", {"share": 0.0})),
    "warm-siamese": (("pre", {"warmup_steps": 10}), ("siamese", {})),
    "single-resi_dual": (("siamese", {"topology": "single"}), ("siamese", {"topology": "resi_dual"})),
    "single-siamese": (("siamese", {"topology": "single"}), ("siamese", {"y_eps": 0.5})),
    "resi_dual-siamese": (
        ("siamese", {"topology": "resi_dual", "normalized_input": False, "depth_scale": "paper"}),
        ("siamese", {"normalized_input": False, "depth_scale": "paper"}),
    ),
    "single-hybrid": (("siamese", {"x": "hybrid", "topology": "single"}), ("siamese", {"x": "hybrid"})),
    "siamese-wide": (("siamese", {}), ("siamese", {"stream_dtype": "float32"})),
    "keel-wide": (("keel", {}), ("keel", {"stream_dtype": "float32"})),
}


@pytest.mark.parametrize("way", WAYS)
def test_from_scheme_to_scheme(way):
    (source, before), (target, after) = WAYS[way]
    model = rewired(source, **before)
    wanted, kept = logits(model), dict(model.named_parameters())
    assert upcycle(model, target, **after) is model
    assert relative_error(logits(model), wanted) < TOLERANCE
    found = hosts.scheme_in(model)
    assert (found.name, {key: found.options()[key] for key in after}) == (target, after)
    now = dict(model.named_parameters())
    assert all(now[name] is parameter for name, parameter in kept.items() if name in now)
    # Nothing of the old scheme is left behind.
    assert now.keys() == dict(type(model)(copy.deepcopy(model.config)).named_parameters()).keys()
    states = model(input_ids=tokens(), output_hidden_states=True).hidden_states
    assert len(states) == len(hosts.blocks(model)) + 1
    model(input_ids=tokens(), labels=tokens()).loss.backward()


@pytest.mark.parametrize("way", ["single-siamese", "single-hybrid", "resi_dual-siamese"])
def test_what_a_larger_topology_adds_learns_at_once(way):
    (source, before), (target, after) = WAYS[way]
    model = rewired(source, **before)
    old = set(own_parameters(model))
    upcycle(model, target, **after)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    new = {name: parameter for name, parameter in own_parameters(model).items() if name not in old}
    assert len(new) == (7 if source == "siamese" and before["topology"] == "single" else 6)
    assert all(not parameter.any() and parameter.grad.abs().max() > 0 for parameter in new.values())


@pytest.mark.parametrize("family", ["gemma", "gpt2", "phi"])
def test_scaled_norms_of_every_kind_are_made_up_for(family):
    """An offset in the weight, a bias, and one norm before two branches."""
    for source, target in (("pre", "lns"), ("lns", "siamese")):
        model = rewired(source, family)
        wanted = logits(model)
        assert relative_error(logits(upcycle(model, target)), wanted) < TOLERANCE


def test_a_parallel_block_and_a_dit_change_schemes_too():
    model = scatter(siamesenorm.rewire(plain("gpt_neox-parallel", trained=True, tied=False), "pre"), 1)
    wanted = logits(model)
    assert relative_error(logits(upcycle(model)), wanted) < TOLERANCE
    model, (x, t, y) = test_dit.new("pre"), test_dit.inputs(dtype=torch.float32)
    wanted = model(x, t, y).sample.detach()
    assert relative_error(upcycle(model, "mhc")(x, t, y).sample, wanted) < TOLERANCE
    assert model.config.residual_scheme["name"] == "mhc"


def test_stochastic_depth_stays():
    config = {**test_vision.SHAPE, "drop_path_rate": 0.2}
    for model in (hosts.build("vit", config, "pre"), test_dit.new("pre", drop_path_rate=0.2)):
        rates = [module.drop_path for module in model.modules() if isinstance(module, Sublayer)]
        upcycle(model)
        assert [module.drop_path for module in model.modules() if isinstance(module, Sublayer)] == rates
        assert max(rates) == pytest.approx(0.2)


def test_an_official_pre_norm_model():
    case = load_case("lm_prenorm_dev")
    model = load_official(case.group("param/"), "lm", case.args)
    ids = case.tensors["input/tokens"]
    upcycle(model)
    assert relative_error(model(input_ids=ids).logits, case.tensors["output/logits"]) < TOLERANCE


def test_the_config_of_other_models_is_left_alone():
    first = siamesenorm.rewire(plain("llama", trained=True, tied=False), "pre")
    second = copy.copy(first.config)
    shared = first.config
    upcycle(first)
    assert shared.residual_scheme["name"] == second.residual_scheme["name"] == "pre"
    assert first.config.residual_scheme["name"] == "siamese"
    assert {id(m.config) for m in first.modules() if hasattr(m, "config")} == {id(first.config)}


# What cannot be had

NO_WAY = [
    ("pre", {}, "siamese", {"x": "hybrid"}, "hybrid-pre takes the host's norm out of attention"),
    ("pre", {}, "siamese", {"normalized_input": False}, "takes out the host's norms"),
    ("pre", {}, "siamese", {"topology": "single"}, "do not read the stream that is never normalised"),
    ("pre", {}, "hyper", {}, "take n=1, or mhc"),
    *(("pre", {}, scheme, {}, f"cannot go on as '{scheme}'") for scheme in ("post", "peri", "reordered", "keel")),
    *(("pre", {}, scheme, {}, "compute the same function") for scheme in ("mixln", "attnres", "mgr", "resi_dual")),
    ("post", {}, "siamese", {}, "'post' cannot go on as 'siamese'"),
    ("reordered", {}, "siamese", {}, "'reordered' cannot go on as 'siamese'"),
    ("siamese", {"x": "hybrid"}, "siamese", {}, "'siamese:x=hybrid' cannot go on as 'siamese'"),
    ("siamese", {}, "siamese", {"depth_scale": "paper"}, "'siamese' cannot go on as 'siamese:depth_scale=paper'"),
    ("siamese", {}, "siamese", {"topology": "single"}, "cannot go on as 'siamese:topology=single'"),
    ("siamese", {}, "pre", {}, "'siamese' cannot go on as 'pre'"),
    ("pre", {}, "siamese", {"x_init": 1.0}, r"option 'x_init' .* is 0\.0 .* not 1\.0"),
    ("pre", {}, "siamese", {"y_eps": 0.5}, r"option 'y_eps' .* is 1\.0 .* not 0\.5"),
    ("pre", {}, "siamese", {"warmup_steps": 100}, "'warmup_steps' closes the branches"),
    ("pre", {}, "siamse", {}, "did you mean 'siamese'"),
]


# A model of transformers as it is, for Pre-Norm, and a rewired one.
@pytest.mark.parametrize(
    ("source", "before", "target", "after", "message"),
    [*((None, *rest) for source, *rest in NO_WAY if source == "pre"), *NO_WAY],
)
def test_no_way(source, before, target, after, message):
    model = rewired(source, **before) if source else plain("llama", trained=True, tied=False)
    wanted, kind = logits(model), type(model)
    with pytest.raises(ConfigError, match=message) as error:
        upcycle(model, target, **after)
    assert "\n" not in str(error.value)
    assert type(model) is kind
    assert torch.equal(logits(model), wanted)


def test_an_option_that_a_scheme_object_brings_is_not_overridden_in_silence():
    with pytest.raises(ConfigError, match="option 'y_init'"):
        upcycle(plain("llama", trained=True, tied=False), make_scheme("siamese", y_init=2.0))


def test_norms_without_a_weight_cannot_make_up_for_a_scale():
    model = plain("olmo", trained=True, tied=False)
    with pytest.raises(ConfigError, match="have no weight that could make up for it"):
        upcycle(model, "lns")
    assert type(model) is transformers.OlmoForCausalLM
    assert hosts.scheme_in(upcycle(model)).name == "siamese"


def test_norms_that_may_learn_nothing_cannot_start_at_0():
    case = load_case("lm_prenorm_dev")
    bare = {key: value for key, value in case.group("param/").items() if "norm" not in key and "ln_f" not in key}
    model = load_official(bare, "lm", {**case.args, "layer_norm_with_affine": False})
    with pytest.raises(ConfigError, match=r"'x_init' .* the norms here have no weight"):
        upcycle(model)
    assert hosts.scheme_in(model).name == "pre"


def test_where_the_streams_started_is_kept_by_another_option():
    model = convert.upcycle(tiny.host("llama"))
    before = model(input_ids=tokens()).logits
    convert.upcycle(model, "siamese", stream_dtype="float32")
    assert hosts.scheme_in(model) == make_scheme("siamese", x_init=0.0, y_eps=1.0, stream_dtype="float32")
    torch.testing.assert_close(model(input_ids=tokens()).logits, before)
    with pytest.raises(ConfigError, match="'x_init'"):
        convert.upcycle(model, "siamese", x_init=1.0)


def test_a_stream_that_starts_closed_can_be_opened():
    for options, opened in (({"x_init": 0.25}, {"norm_x": 0.75}), ({"y_init": 0.0}, {"norm_y": 1.0}), ({}, {})):
        scheme = make_scheme("siamese", **options)
        for name in ("norm_x", "norm_y"):
            assert scheme.opening(f"block.0.attn_residual.{name}.weight") == opened.get(name, 0.0)


def test_models_that_are_no_hosts_are_refused():
    with pytest.raises(ConfigError, match="cannot rewire a Linear"):
        convert.upcycle(torch.nn.Linear(2, 2))


def test_options_of_y():
    assert make_scheme("siamese", y_eps=1) != make_scheme("siamese")
    for options, message in (
        ({"y_eps": -1.0}, "'y_eps'"),
        ({"y_eps": "1"}, "'y_eps'"),
        ({"y_init": float("nan")}, "'y_init'"),
        ({"x_init": 0, "y_init": 0}, "cannot both be 0"),
        ({"topology": "single", "y_eps": 1.0}, "has none"),
        ({"topology": "single", "y_init": 0.0}, "has none"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_scheme("siamese", **options)


def test_the_difference_is_relative_to_the_largest_entry_and_never_finite_by_accident():
    one, other = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -3.5])
    assert difference(other, one).absolute == 0.5
    assert difference(other, one).relative == 0.125
    assert difference(one, torch.zeros(2)).relative == float("inf")
    assert difference(torch.zeros(2), torch.zeros(2)).relative == 0.0
    for broken in (float("nan"), float("inf")):
        gap = difference(torch.tensor([1.0, broken]), one)
        assert not gap.relative <= 1e9
