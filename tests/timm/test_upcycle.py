"""Upcycling models of timm: the same function where a norm follows the blocks, and an error where none does."""

from __future__ import annotations

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

import siamesenorm
from siamesenorm import hosts
from siamesenorm.convert import upcycle
from siamesenorm.convert.difference import output_of
from siamesenorm.residual import ConfigError, Sublayer, make_scheme, own_parameters
from tests.hosts.tiny import scatter
from tests.parity import relative_error
from tests.timm.models import FORMS, SHAPE, host, images

# timm norms behind the pooling, or not at all.
WITHOUT = ("average", "average-alone", "rms", "no-final-norm")


@pytest.mark.parametrize("form", [form for form in FORMS if form not in WITHOUT])
@pytest.mark.parametrize("trained", [False, True], ids=["at-start", "trained"])
def test_the_same_function_and_gradients_for_all_that_is_new(form, trained):
    model = host(form)
    if not trained:
        torch.manual_seed(0)
        model = VisionTransformer(**{**SHAPE, **FORMS[form]}).eval()
    wanted, kept = output_of(model, {"x": images()}), dict(model.named_parameters())
    assert upcycle(model) is model
    out = model(images())
    assert relative_error(out, wanted) < 1e-4
    out.square().mean().backward()
    own = own_parameters(model)
    assert [name for name, p in own.items() if p.grad is None or not p.grad.abs().max() > 0] == []
    assert {name: id(p) for name, p in kept.items()} == {
        name: id(p) for name, p in model.named_parameters() if name not in own
    }


@pytest.mark.parametrize("form", WITHOUT)
def test_without_a_norm_behind_the_blocks_there_is_no_way(form):
    model = host(form)
    wanted = output_of(model, {"x": images()})
    with pytest.raises(ConfigError, match="only before a final norm, and this model has none"):
        upcycle(model)
    assert type(model) is VisionTransformer
    assert torch.equal(output_of(model, {"x": images()}), wanted)
    # A scheme whose readout has no norm does not need one.
    assert relative_error(output_of(upcycle(model, "mhc"), {"x": images()}), wanted) < 1e-4


def test_from_scheme_to_scheme_with_stochastic_depth_and_back_from_a_file(tmp_path):
    model = scatter(siamesenorm.rewire(host("class", drop_path_rate=0.3), "lns"), 1).eval()
    wanted = output_of(model, {"x": images()})
    rates = [module.drop_path for module in model.modules() if isinstance(module, Sublayer)]
    upcycle(model)
    assert relative_error(output_of(model, {"x": images()}), wanted) < 1e-4
    assert [module.drop_path for module in model.modules() if isinstance(module, Sublayer)] == rates
    assert max(rates) == pytest.approx(0.3)

    torch.save({"scheme": model.residual_scheme, "weights": model.state_dict()}, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt")
    again = siamesenorm.rewire(host("class", seed=3), hosts.scheme_from_dict(saved["scheme"]))
    again.load_state_dict(saved["weights"])
    assert hosts.scheme_in(again) == make_scheme("siamese", x_init=0, y_eps=1)
    for each, name in ((model, "first"), (again, "second")):
        save_file(each.state_dict(), tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert torch.equal(output_of(again, {"x": images()}), output_of(model, {"x": images()}))


@pytest.mark.parametrize("form", ["class", "no-final-norm"])
def test_a_larger_topology_whose_host_norms_are_gone(form):
    model = scatter(siamesenorm.rewire(host(form), "siamese", x="hybrid", topology="single"), 1).eval()
    wanted = output_of(model, {"x": images()})
    upcycle(model, "siamese", x="hybrid")
    assert relative_error(output_of(model, {"x": images()}), wanted) < 1e-4
    assert sum(name.endswith("norm_y.weight") for name in own_parameters(model)) == 7


def test_a_model_of_the_registry():
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=2, num_classes=5).eval()
    batch = torch.randn(1, 3, 224, 224)
    wanted = output_of(model, {"x": batch})
    assert relative_error(output_of(upcycle(model), {"x": batch}), wanted) < 1e-4
