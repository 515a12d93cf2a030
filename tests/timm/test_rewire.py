"""Rewiring a model of timm: what is kept, what is refused, what can be saved."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from functools import partial

import pytest
import timm
import torch
from timm.layers import Attention, DropPath, LayerNorm, RmsNorm
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, ResPostBlock, VisionTransformer
from torch import nn

import siamesenorm
from siamesenorm import hosts
from siamesenorm.hosts.timm_vit import ResidualViT, residual_class
from siamesenorm.residual import Block, ConfigError, Norm
from tests.hosts.tiny import BASELINES, SCHEMES
from tests.timm.models import ALL, FORMS, SHAPE, host, images, rewired

# Host norms that a scheme has no place for, by block.
BOTH = {"norm1", "norm2"}
GONE = {
    "hybrid-pre": [{"norm1"}] * 3,
    "post": [BOTH] * 3,
    "hybridnorm": [BOTH] * 3,
    "hybridnorm*": [set(), BOTH, BOTH],
    "mixln": [BOTH, set(), set()],
    "deepnorm": [BOTH] * 3,
    "spannorm": [{"norm2"}, BOTH, BOTH],
    "resi_dual": [BOTH] * 3,
    "topology-single": [{"norm1"}] * 3,
}


@pytest.mark.parametrize("form", ["class", "average", "qk-norm"])
@pytest.mark.parametrize("scheme", ALL)
def test_names_and_values_stay(form, scheme):
    model = host(form)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    name, options = ALL[scheme]
    assert siamesenorm.rewire(model, name, **options) is model
    after = dict(model.named_parameters())
    gone = {
        f"blocks.{i}.{norm}.{part}"
        for i, norms in enumerate(GONE.get(scheme, ()))
        for norm in norms
        for part in ("weight", "bias")
    }
    assert before.keys() - after.keys() == gone
    assert all(torch.equal(after[n], before[n]) for n in before.keys() - gone)
    new = after.keys() - before.keys()
    heads = tuple(f"attn.{role}_norm.{part}" for role in "qkv" for part in ("weight", "bias"))
    assert all("_residual." in n or n.startswith("norm.readout.") or n.endswith(heads) for n in new)
    assert (not new) == (scheme in ("pre", "reordered", "lns"))
    assert isinstance(model, VisionTransformer)
    assert not list(model.named_buffers())
    assert model.training is False
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("scheme", ["post-pre", "hybrid-pre", "mgr"])
def test_weights_come_back_by_the_same_steps(scheme, tmp_path):
    model = rewired("average", scheme)
    torch.save({"scheme": model.residual_scheme, "weights": model.state_dict()}, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    again = siamesenorm.rewire(host("average", seed=3), hosts.scheme_from_dict(saved["scheme"]))
    again.load_state_dict(saved["weights"])
    assert torch.equal(again(images()), model(images()))
    assert hosts.scheme_of(again) == hosts.scheme_of(model)
    with pytest.raises(RuntimeError, match=r"Missing key.*norm\.readout|Unexpected key.*norm\.readout"):
        host("average").load_state_dict(saved["weights"])


def test_copies_and_pickles(tmp_path):
    saved = []
    for cls in (VisionTransformer, VisionTransformerDistilled):
        model = siamesenorm.rewire(cls(**SHAPE).eval(), "siamese", x="hybrid")
        assert type(model) is residual_class(cls)
        assert type(model).__name__ == f"Residual{cls.__name__}"
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(again) is type(model)
            assert torch.equal(again(images()), model(images()))
            assert again.blocks[0].attn.v_norm.weight is not model.blocks[0].attn.v_norm.weight
        saved.append((model, images(), model(images())))
    torch.save(saved, tmp_path / "models.pt")
    code = f"""
import torch
for model, x, wanted in torch.load({str(tmp_path / "models.pt")!r}, weights_only=False):
    assert torch.equal(model(x), wanted)
    print(type(model).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [type(model).__name__ for model, *_ in saved], done.stderr


class OfYourOwn(VisionTransformer):
    """A class that derives from timm's, and leaves the way through the blocks as it is."""

    def forward_head(self, x, pre_logits=False):
        return -super().forward_head(x, pre_logits)


def test_a_class_of_your_own():
    torch.manual_seed(0)
    mine = OfYourOwn(**SHAPE).eval()
    wanted = mine(images())
    siamesenorm.rewire(mine, "pre")
    assert torch.allclose(mine(images()), wanted, atol=1e-5)
    assert torch.equal(pickle.loads(pickle.dumps(mine))(images()), mine(images()))


def test_blocks_and_sites():
    model = rewired("average", "hybrid-pre")
    blocks = hosts.blocks(model)
    assert blocks == list(model.blocks)
    assert all(isinstance(block, Block) and isinstance(block, TimmBlock) for block in blocks)
    streams = blocks[0](torch.randn(2, 5, 48))
    assert [stream.shape for stream in streams] == [(2, 5, 48)] * 2
    rows = hosts.site_table(model)
    assert [row["kind"] for row in rows] == ["attention", "mlp"] * 3 + ["readout"]
    assert [tuple(row[key] for key in ("sublayer", "block", "reads", "norms")) for row in rows[2:4]] == [
        (2, 1, "c1⊙X + Ny(Y)", "no Nin; q, k, v per head"),
        (3, 1, "Nx(X) + Ny(Y)", "Nin before"),
    ]
    assert rows[-1]["reads"] == "Nx(X) + Ny(Y)"
    with pytest.raises(ConfigError, match="no residual scheme"):
        hosts.site_table(host())


def test_trained_norms_that_go_are_named(caplog):
    with caplog.at_level(logging.WARNING):
        siamesenorm.rewire(host(), "siamese", x="hybrid")
    (record,) = caplog.records
    assert record.message.endswith("removed: blocks.0.norm1, blocks.1.norm1, blocks.2.norm1")
    caplog.clear()
    siamesenorm.rewire(VisionTransformer(**SHAPE), "siamese", x="hybrid")
    assert not caplog.records


def test_a_model_without_memory():
    with torch.device("meta"):
        model = timm.create_model("siamese_deit_tiny_patch16_224", **SHAPE, scheme_options={"x": "hybrid"})
    assert all(p.is_meta for p in model.parameters())
    wanted = rewired("class", "hybrid-pre")
    model.to_empty(device="cpu")
    model.load_state_dict(wanted.state_dict())
    assert torch.equal(model.eval()(images()), wanted(images()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    model.init_weights()
    assert not any((p == 9).any() for n, p in model.named_parameters())
    fresh = timm.create_model("siamese_deit_tiny_patch16_224", **SHAPE, scheme_options={"x": "hybrid"})
    for name, module in model.named_modules():
        if isinstance(module, Norm):
            assert torch.equal(module.weight, fresh.get_submodule(name).weight)


def test_in_another_dtype():
    model = siamesenorm.rewire(host().bfloat16(), "siamese", x="hybrid")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.to(torch.float64)(images(dtype=torch.float64)).dtype == torch.float64


# What is refused


class WithAnActivation(LayerNorm):
    pass


class Scaled(Attention):
    pass


class ByHand(VisionTransformer):
    def forward_features(self, x, attn_mask=None, is_causal=False):
        return super().forward_features(x.flip(-1))


def unscaled(model):
    model.blocks[1].drop_path2 = DropPath(0.3, scale_by_keep=False)
    return model


def patched(model):
    model.forward_features = lambda x: x
    return model


def with_norm(model):
    model.norm = nn.BatchNorm1d(48)
    return model


REFUSED = {
    "is a ResPostBlock, and of timm's blocks only 'Block'": lambda: host(block_fn=ResPostBlock),
    "is a ParallelScalingBlock": lambda: host(block_fn=ParallelScalingBlock),
    "is a ParallelThingsBlock": lambda: host(block_fn=ParallelThingsBlock),
    "its block 0 has a norm of unknown kind, WithAnActivation": lambda: host(norm_layer=WithAnActivation),
    "it has a norm of unknown kind, BatchNorm1d; known are LayerNorm, LayerNormFp32, RmsNorm, RmsNormFp32": lambda: (
        with_norm(host())
    ),
    "cannot tell what kind of norm a RmsNorm is": lambda: host(norm_layer=partial(RmsNorm, affine=False)),
    "its block 1 has stochastic depth of another kind": lambda: unscaled(host()),
    "cannot rewire a ByHand: its forward_features is not VisionTransformer's": lambda: ByHand(**SHAPE),
    "cannot rewire a VisionTransformer: its forward_features is not": lambda: patched(host()),
    "cannot rewire a VisionTransformer without blocks": lambda: host(depth=0),
    "is rewired already (scheme 'siamese')": lambda: rewired(),
}


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_are_refused(message):
    model = REFUSED[message]()
    kinds = [type(module) for module in model.modules()]
    state = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ConfigError) as raised:
        siamesenorm.rewire(model, "siamese")
    assert message in str(raised.value)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert isinstance(model, ResidualViT) == ("already" in message)


@pytest.mark.parametrize("layer", ["diff", Scaled])
def test_normed_values_are_known_of_timms_attention_alone(layer):
    for name, options in (SCHEMES["hybrid-pre"], BASELINES["hybridnorm"]):
        with pytest.raises(ConfigError, match="q, k, v normalised per head, which is known of timm's Attention alone"):
            siamesenorm.rewire(host(attn_layer=layer), name, **options)
    assert siamesenorm.rewire(host(attn_layer=layer), "siamese")(images()).isfinite().all()


def test_an_attention_that_is_not_known():
    model = host()
    model.blocks[2].attn = nn.Identity()
    with pytest.raises(ConfigError, match="its block 2 has a Identity: known are Attention and DiffAttention"):
        siamesenorm.rewire(model, "pre")


def test_bad_schemes_leave_the_model_as_it_is():
    model = host()
    with pytest.raises(ConfigError, match="did you mean 'siamese'"):
        siamesenorm.rewire(model, "siames")
    with pytest.raises(ConfigError, match="no option 'nn': did you mean 'n'"):
        siamesenorm.rewire(model, "hyper", nn=4)
    assert type(model) is VisionTransformer


def test_models_of_timm_that_are_no_vision_transformer():
    for name in ("resnet10t", "vit_relpos_small_patch16_224"):
        with torch.device("meta"):
            model = timm.create_model(name)
        with pytest.raises(ConfigError, match=r"Models of other libraries may be .*timm\..*\.VisionTransformer"):
            siamesenorm.rewire(model, "siamese")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", ["post-pre", "peri", "mgr"])
def test_every_form_trains(form, scheme):
    model = rewired(form, scheme).train()
    model(images()).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
