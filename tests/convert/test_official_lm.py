"""Official language models against the official implementation's own numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import siamesenorm
from siamesenorm.convert import load_official, official_names
from siamesenorm.probes import capture_streams
from siamesenorm.residual import ConfigError, make_scheme
from tests.parity import load_case, relative_error

CASES = ["lm_hybridpre_dev_untied", "lm_hybridpre_dev_tied", "lm_hybridnorm_dev", "lm_prenorm_dev"]


def run(name, dtype):
    case = load_case(name)
    model = load_official(case.group("param/"), "lm", case.args).to(dtype)
    with capture_streams(model) as streams:
        logits = model(input_ids=case.tensors["input/tokens"]).logits
    return case, model, logits, list(streams)


@pytest.mark.parametrize("name", CASES)
def test_float64_logits_loss_and_every_gradient(name):
    case, model, logits, _ = run(name, torch.float64)
    loss = F.cross_entropy(logits.flatten(0, 1), case.tensors["input/labels"].flatten())
    loss.backward()
    gradients = official_names(model, "lm", {n: p.grad for n, p in model.named_parameters()})
    assert gradients.keys() == case.group("grad/").keys()
    # The official RoPE tables are float32, kept in its float64 run; ``alt64`` has float64 ones. One of the two is met.
    errors = []
    for prefix in ("", "alt64/"):
        error = {g: relative_error(gradients[g], case.tensors[f"{prefix}grad/{g}"]) for g in gradients}
        error["logits"] = relative_error(logits, case.tensors[prefix + "output/logits"])
        error["loss"] = relative_error(loss, case.tensors[prefix + "loss"])
        errors.append(max(error.values()))
    assert min(errors) < 1e-9, errors


@pytest.mark.parametrize("name", CASES)
def test_streams_after_every_block(name):
    case, _, _, streams = run(name, torch.float64)
    assert len(streams) == case.args["n_layers"]
    for block, pair in enumerate(streams):
        for stream, axis in zip(pair, "xy", strict=False):
            assert relative_error(stream, case.tensors[f"state/{block}/{axis}"]) < 2e-6


@pytest.mark.parametrize("name", CASES)
def test_float32_logits(name):
    case, _, logits, _ = run(name, torch.float32)
    assert relative_error(logits, case.tensors["output/logits_f32"]) < 2e-5


def test_hybridnorm_is_recognised_and_its_special_first_block_checked():
    case = load_case("lm_hybridnorm_dev")
    model = load_official(case.group("param/"), "lm", case.args)
    assert siamesenorm.hosts.scheme_of(model.config) == make_scheme("hybridnorm")
    starred = {"norm_pos_special_config": "_{0:{'attn_norm':True,'ffn_residual':False}}_"}
    with pytest.raises(ConfigError, match=r"missing: transformer\.blocks\.0\.attn_norm\.weight"):
        load_official(case.group("param/"), "lm", {**case.args, **starred})
    for change, message in (
        ({"norm_pos_special_config": "_{1:{'attn_norm':True}}_"}, "starred form"),
        ({"use_value_norm": False}, "use_value_norm"),
        ({"ffn_residual_after_norm": False}, "ffn_residual_after_norm"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_official(case.group("param/"), "lm", {**case.args, **change})


def official_state(case, **changes):
    return {**case.group("param/"), **changes}


def test_a_missing_weight_is_named():
    case = load_case("lm_hybridpre_dev_tied")
    state = case.group("param/")
    del state["transformer.blocks.1.ff_y_norm.weight"]
    with pytest.raises(ConfigError, match=r"missing: transformer\.blocks\.1\.ff_y_norm\.weight"):
        load_official(state, "lm", case.args)


def test_a_weight_left_over_is_named():
    case = load_case("lm_prenorm_dev")
    state = official_state(case, **{"transformer.surplus.weight": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"not used: transformer\.surplus\.weight"):
        load_official(state, "lm", case.args)


def test_a_weight_of_another_shape_is_named():
    case = load_case("lm_prenorm_dev")
    state = official_state(case, **{"transformer.ln_f.weight": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"transformer\.ln_f\.weight is \(3,\), expected \(48,\)"):
        load_official(state, "lm", case.args)


def test_arguments_that_cannot_be_followed_are_refused():
    case = load_case("lm_prenorm_dev")
    for change in ({"alibi": True}, {"clip_qkv": 8.0}, {"activation_type": "gelu"}, {"norm_pos_special_config": "_{_"}):
        with pytest.raises(ConfigError, match=next(iter(change))):
            load_official(case.group("param/"), "lm", {**case.args, **change})
    with pytest.raises(ConfigError, match="did you mean 'n_layers'"):
        load_official(case.group("param/"), "lm", {**case.args, "n_layer": 3})
    with pytest.raises(ConfigError, match=r"valid: .*\blm\b"):
        load_official(case.group("param/"), "vision", case.args)


def test_the_callers_random_generator_is_left_alone():
    case = load_case("lm_prenorm_dev")
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    load_official(case.group("param/"), "lm", case.args)
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_imported_model_saves_and_loads(tmp_path):
    import transformers

    case, model, logits, _ = run("lm_hybridpre_dev_tied", torch.float32)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(input_ids=case.tensors["input/tokens"]).logits, logits)
