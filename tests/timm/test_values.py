"""What rewired models of timm compute: timm's own numbers under pre, and the equations under every scheme."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import transformers
from timm.models.deit import VisionTransformerDistilled
from torch.nn import functional as F

import siamesenorm
from siamesenorm import hosts
from siamesenorm.probes import capture_streams
from siamesenorm.residual import LayerNorm, Norm, RMSNorm
from tests.hosts.running import same
from tests.hosts.tiny import scatter
from tests.parity import load_case, relative_error
from tests.timm.models import ALL, EPS, FORMS, HEADS, PLAIN, SHAPE, dead, exact, gradients, host, images, live, rewired
from tests.timm.reference import vit

TWO = ("post-pre", "hybrid-pre")


def all_gradients(out, weights, probe):
    return torch.autograd.grad((out * probe).sum(), list(weights.values()), materialize_grads=True)


@pytest.mark.parametrize("form", FORMS)
def test_pre_is_timms_model(form):
    theirs = host(form).double()
    ours = siamesenorm.rewire(copy.deepcopy(theirs), "pre")
    assert {n for n, _ in ours.named_parameters()} == {n for n, _ in theirs.named_parameters()}
    x = images(dtype=torch.float64)
    assert relative_error(ours.forward_features(x), theirs.forward_features(x)) < 1e-12
    assert relative_error(ours.forward_head(ours.forward_features(x), pre_logits=True),
                          theirs.forward_head(theirs.forward_features(x), pre_logits=True)) < 1e-12  # fmt: skip
    got, wanted = gradients(ours), gradients(theirs)
    # No softmax sees what is added to every key alike, so what these have for a gradient is rounding.
    for name in [name for name in wanted[1] if name.endswith("k_norm.bias")]:
        assert max(found[1].pop(name).abs().max() for found in (got, wanted)) < 1e-10
    same(got, wanted, 1e-12)


def test_pre_is_timms_distilled_model():
    torch.manual_seed(0)
    theirs = scatter(VisionTransformerDistilled(**SHAPE)).double()
    ours = siamesenorm.rewire(copy.deepcopy(theirs), "pre")
    for model in (ours, theirs):
        model.set_distilled_training()
    x = images(dtype=torch.float64)
    for got, wanted in zip(ours(x), theirs(x), strict=True):
        assert relative_error(got, wanted) < 1e-12
    assert ours.eval()(x).shape == (2, 10)
    assert relative_error(ours(x), theirs.eval()(x)) < 1e-12


@pytest.mark.parametrize("size", [32, 48])
def test_pre_is_timms_model_at_another_image_size(size):
    theirs = host("any-size").double()
    ours = siamesenorm.rewire(copy.deepcopy(theirs), "pre")
    x = images(size=size, dtype=torch.float64)
    assert relative_error(ours(x), theirs(x)) < 1e-12


def test_pre_drops_the_patches_and_paths_that_timm_drops():
    changes = {"patch_drop_rate": 0.5, "drop_path_rate": 0.6, "pos_drop_rate": 0.2, "drop_rate": 0.3}
    theirs = host("layer-scale", **changes, proj_drop_rate=0.2).double().train()
    ours = siamesenorm.rewire(copy.deepcopy(theirs), "pre")
    results = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        results.append(gradients(model, images(8, dtype=torch.float64)))
    same(*results, 1e-12)


@pytest.mark.parametrize("how", ["causal", "seen", "added"])
@pytest.mark.parametrize("form", ["class", "qk-norm"])
def test_pre_masks_what_timm_masks(form, how):
    theirs = host(form).double()
    ours = siamesenorm.rewire(copy.deepcopy(theirs), "pre")
    seen = (torch.rand(17, 17, generator=torch.Generator().manual_seed(1)) < 0.7) | torch.eye(17, dtype=torch.bool)
    added = torch.zeros(17, 17, dtype=torch.float64).masked_fill(~seen, -1e4)
    given = {"causal": {"is_causal": True}, "seen": {"attn_mask": seen}, "added": {"attn_mask": added}}[how]
    x = images(dtype=torch.float64)
    assert relative_error(ours(x, **given), theirs(x, **given)) < 1e-12
    assert relative_error(ours(x), theirs(x, **given)) > 1e-6


@pytest.mark.parametrize(
    ("form", "scheme"),
    [("layer-scale", scheme) for scheme in ALL] + [(f, s) for f in PLAIN if f != "layer-scale" for s in TWO],
)
def test_float64_against_the_oracle(form, scheme):
    name, options = ALL[scheme]
    model = exact(form, scheme)
    weights = dict(model.named_parameters())
    x = images(dtype=torch.float64)
    average = form.startswith("average")
    expected, features, states = vit(weights, x, name, heads=HEADS, eps=EPS, average=average, **options)
    with capture_streams(model) as streams:
        logits = model(x)
    assert relative_error(logits, expected) < 1e-10
    assert relative_error(model.forward_features(x), features) < 1e-10
    assert len(streams) == len(states) == 3
    for got, wanted in zip(streams, states, strict=True):
        assert all(relative_error(a, b) < 1e-10 for a, b in zip(got, wanted, strict=True))
    probe = torch.randn(logits.shape, dtype=torch.float64)
    ours, theirs = (all_gradients(out, weights, probe) for out in (logits, expected))
    for n, a, b in zip(weights, ours, theirs, strict=True):
        if dead(n, scheme):
            assert max(a.abs().max(), b.abs().max()) < 1e-12, n
        else:
            assert b.abs().max() > 0, n
            assert relative_error(a, b) < 1e-10, n


def test_the_official_model():
    """Its names are timm's where timm has the part."""
    case = load_case("deit_dev")
    shape = {key: case.args[key] for key in SHAPE}
    model = siamesenorm.rewire(timm.models.VisionTransformer(**shape), "siamese").double().eval()
    official = case.group("param/")
    model.load_state_dict({ours_of(name): tensor for name, tensor in official.items()})
    x = case.tensors["input/x"].double()
    with capture_streams(model) as streams:
        logits = model(x)
    assert relative_error(logits, case.tensors["output/logits"]) < 1e-9
    assert relative_error(model.forward_features(x), case.tensors["state/readout"]) < 1e-9
    for index, pair in enumerate(streams):
        for stream, letter in zip(pair, "xy", strict=True):
            assert relative_error(stream, case.tensors[f"state/{index}/{letter}"]) < 1e-9
    logits.square().mean().backward()
    for name, wanted in case.group("grad/").items():
        assert relative_error(model.get_parameter(ours_of(name)).grad, wanted) < 1e-9, name


def ours_of(official):
    """What a rewired model calls an official parameter; in the readout the official norms change places."""
    if "." not in official:
        return official
    *where, module, part = official.split(".")
    renamed = {"pre_norm": "norm.readout.norm_x", "post_norm": "norm.readout.norm_y", "final_norm": "norm"}
    for number, residual in (("1", "attn_residual"), ("2", "mlp_residual")):
        renamed |= {
            f"pre_norm{number}": f"{residual}.norm_y",
            f"post_norm{number}": f"{residual}.norm_x",
            f"input_norm{number}": f"norm{number}",
        }
    return ".".join([*where, renamed.get(module, module), part])


def test_transformers_model_with_the_same_weights():
    config = transformers.ViTConfig(
        hidden_size=48,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=32,
        patch_size=8,
        num_labels=10,
        layer_norm_eps=1e-6,
    )
    theirs = siamesenorm.rewire(transformers.ViTForImageClassification(config), "siamese").double().eval()
    ours = rewired().double()
    weights = {}
    for name, tensor in ours.state_dict().items():
        if ".qkv." in name:
            parts = [name.replace("attn.qkv", f"attn.{role}") for role in "qkv"]
            weights |= dict(zip(parts, tensor.chunk(3), strict=True))
        else:
            weights[name] = tensor
    renamed = {
        "attn.q.": "attention.q_proj.",
        "attn.k.": "attention.k_proj.",
        "attn.v.": "attention.v_proj.",
        "attn.proj.": "attention.o_proj.",
        "norm1.": "layernorm_before.",
        "norm2.": "layernorm_after.",
        "patch_embed.proj.": "vit.embeddings.patch_embeddings.projection.",
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "head.": "classifier.",
        "blocks.": "vit.layers.",
    }
    mapped = {}
    for name, tensor in weights.items():
        name = "vit.layernorm." + name.removeprefix("norm.") if name.startswith("norm.") else name
        for old, new in renamed.items():
            name = name.replace(old, new) if not name.startswith(new) else name
        mapped[name] = tensor
    theirs.load_state_dict(mapped)
    x = images(dtype=torch.float64)
    assert relative_error(ours(x), theirs(pixel_values=x).logits) < 1e-12
    with capture_streams(ours) as a, capture_streams(theirs) as b:
        ours(x)
        theirs(pixel_values=x)
    for mine, other in zip(a, b, strict=True):
        assert all(relative_error(x, y) < 1e-12 for x, y in zip(mine, other, strict=True))


# Norms of their own


@pytest.mark.parametrize("scheme", TWO)
@pytest.mark.parametrize("form", ["class", "average", "rms", "no-final-norm"])
def test_every_norm_is_of_the_hosts_kind(form, scheme):
    model = siamesenorm.rewire(host(form), *ALL[scheme][:1], **ALL[scheme][1])
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    assert len(norms) >= 18
    for norm in norms:
        assert isinstance(norm, RMSNorm if form == "rms" else LayerNorm)
        assert norm.eps == 1e-6
        assert (norm.bias is not None) == (form != "rms")
    new = model.state_dict().keys() - host(form).state_dict().keys()
    for name in new:
        assert (model.state_dict()[name] == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize("how", ["causal", "seen", "added", "none"])
def test_attention_with_normed_values_is_one_function_fused_or_not(how):
    model = rewired("qk-norm", "hybrid-pre", global_pool="avg").double()
    seen = (torch.rand(17, 17, generator=torch.Generator().manual_seed(1)) < 0.7) | torch.eye(17, dtype=torch.bool)
    added = torch.zeros(17, 17, dtype=torch.float64).masked_fill(~seen, -1e4)
    masks = {"causal": {"is_causal": True}, "seen": {"attn_mask": seen}, "added": {"attn_mask": added}, "none": {}}
    fused, slow = model, copy.deepcopy(model)
    for block in hosts.blocks(slow):
        assert block.attn.fused_attn
        block.attn.fused_attn = False
    x = images(dtype=torch.float64)
    same(*(live(gradients(each, x, **masks[how]), "hybrid-pre") for each in (slow, fused)), 1e-10)


def test_gated_attention_with_normed_values():
    """A gate of zeros halves what the output projection reads."""
    from timm.layers import Attention

    if "gated" not in Attention.__init__.__annotations__:
        pytest.skip("this timm has no gated attention")
    model = rewired("class", "hybrid-pre").double()
    gated = copy.deepcopy(model)
    for block in hosts.blocks(gated):
        block.attn.gate = torch.nn.Linear(48, 48).double()
        torch.nn.init.zeros_(block.attn.gate.weight)
        torch.nn.init.zeros_(block.attn.gate.bias)
    with torch.no_grad():
        for block in hosts.blocks(model):
            block.attn.proj.weight.mul_(0.5)
    x = images(dtype=torch.float64)
    assert relative_error(gated(x), model(x)) < 1e-12


# Stochastic depth


def test_one_draw_for_all_streams():
    """A sequence whose every update is dropped keeps both streams as they were opened."""
    model = siamesenorm.rewire(host(drop_path_rate=0.5), "siamese", depth_scale="none")
    assert [block.attn_residual.drop_path for block in hosts.blocks(model)] == [0.0, 0.25, 0.5]
    assert [block.mlp_residual.drop_path for block in hosts.blocks(model)] == [0.0, 0.25, 0.5]
    block = hosts.blocks(model)[2].train()
    streams = tuple(torch.randn(64, 5, 48) for _ in range(2))
    x, y = block(streams)
    normed = block.attn_residual.norm_x(streams[0])
    dropped = (y == streams[1]).flatten(1).all(1)
    assert 0 < dropped.sum() < 64
    assert torch.equal(x[dropped], block.mlp_residual.norm_x(normed)[dropped])
    kept = F.mse_loss(x[~dropped], block.mlp_residual.norm_x(normed)[~dropped], reduction="none").flatten(1)
    assert (kept.amax(1) > 0).all()


def test_no_path_is_dropped_in_evaluation():
    model, plain = (siamesenorm.rewire(host(drop_path_rate=rate), "siamese") for rate in (0.5, 0.0))
    assert torch.equal(model(images()), plain(images()))


@pytest.mark.parametrize("stream_dtype", [None, "float32"])
@pytest.mark.parametrize("scheme", [*TWO, "hyper", "attnres"])
def test_bf16_weights(scheme, stream_dtype):
    model = rewired("average", scheme, options={"stream_dtype": stream_dtype}).bfloat16()
    wide = copy.deepcopy(model).float()
    with capture_streams(model) as streams:
        out = model(images(dtype=torch.bfloat16))
    assert {t.dtype for s in streams for t in s} == {torch.float32 if stream_dtype else torch.bfloat16}
    assert out.dtype == torch.bfloat16
    assert relative_error(out, wide(images())) < 0.1
    _, after = model.forward_intermediates(images(dtype=torch.bfloat16))
    assert {feature.dtype for feature in after} == {torch.bfloat16}
