"""One suite for image classifiers: ViT, and DeiT with one head and with two."""

from __future__ import annotations

import copy
import functools
import json
import pickle

import pytest
import torch
import transformers
from torch.nn import functional as F

import siamesenorm
from siamesenorm import hosts, hub
from siamesenorm.probes import capture_streams
from siamesenorm.residual import ConfigError, Norm
from tests.hosts.running import assert_built_without_memory_as_with, assert_checkpoints_change_nothing, same
from tests.hosts.test_streams import STREAMS
from tests.hosts.tiny import BASELINES, SCHEMES, scatter
from tests.oracle_streams import extras
from tests.oracle_vision import hf_vit
from tests.parity import relative_error
from tests.residual.test_streams import without_gradient

SHAPE = {
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "num_labels": 5,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "layer_norm_eps": 1e-6,
}
# By name: the family, its class, and the body's name within it.
FORMS = {
    "vit": ("vit", "ViTForImageClassification"),
    "deit": ("deit", "DeiTForImageClassification"),
    "teacher": ("deit", "DeiTForImageClassificationWithTeacher"),
}
CONFIGS = {"vit": transformers.ViTConfig, "deit": transformers.DeiTConfig}
ALL = {
    **SCHEMES,
    "hybrid-pre*": ("siamese", {"x": "hybrid", "first_block_pre": True}),
    **BASELINES,
    **STREAMS,
}
MAIN = ("post-pre", "hybrid-pre", "hybridnorm", "post")
# One scheme of each kind: two streams, one that is normalised, a gate of its own, and a growing tuple.
KINDS = ("post-pre", "hybrid-pre", "peri", "attnres-3")
CROSS = [(form, scheme) for form in FORMS for scheme in KINDS]
PAIRS = [*(("vit", scheme) for scheme in ALL), *((form, scheme) for form in ("deit", "teacher") for scheme in MAIN)]


def host(form="vit", seed=0, **changes):
    """A plain model of transformers, every parameter away from where it starts."""
    family, name = FORMS[form]
    torch.manual_seed(seed)
    made = getattr(transformers, name)(CONFIGS[family](**{**SHAPE, **changes}))
    return scatter(made, seed).eval()


def rewired(form="vit", scheme="post-pre", seed=0, *, options=None, **changes):
    name, given = ALL[scheme]
    model = siamesenorm.rewire(host(form, seed, **changes), name, **{**given, **(options or {})})
    return scatter(model, seed + 1).eval()


@functools.cache
def shared(form="vit", scheme="post-pre"):
    """A model that no test may change."""
    return rewired(form, scheme)


@functools.cache
def exact_of(form, scheme):
    """In float64; a test may leave gradients in it. Its eps lets the scale of what a norm reads show."""
    return rewired(form, scheme, layer_norm_eps=0.1).double()


def images(batch=2, size=16, channels=3, seed=5):
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(seed))


def labels(batch=2):
    return torch.arange(batch) % 5


def loss_of(model, batch=2):
    return F.cross_entropy(model(pixel_values=images(batch)).logits, labels(batch))


def step(model, seed=None, batch=2):
    """Loss and every gradient of one forward and backward."""
    if seed is not None:
        torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def body_of(model):
    return getattr(model, model.base_model_prefix)


def dead(parameter, scheme):
    """Whether the equations leave a parameter without gradient."""
    name, options = ALL[scheme]
    # A softmax does not see what is added to every score, as the last bias of k is.
    if parameter.endswith(("k_proj.bias", "k_norm.bias")):
        normed = name == "hybridnorm" or options.get("x") == "hybrid"
        return parameter.endswith("k_norm.bias" if normed else "k_proj.bias")
    if ".layers.0.attn_residual." not in parameter:
        return False
    own = "blocks.0.residuals.0." + parameter.rpartition(".")[2]
    return own.endswith(without_gradient(name, **options))


# What rewiring leaves as it is


@pytest.mark.parametrize(("form", "scheme"), PAIRS)
def test_names_and_values_stay(form, scheme):
    model = host(form)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    name, options = ALL[scheme]
    assert siamesenorm.rewire(model, name, **options) is model
    after = dict(model.named_parameters())
    gone = before.keys() - after.keys()
    assert all(".layernorm_before." in n or ".layernorm_after." in n for n in gone)
    assert all(torch.equal(after[n], before[n]) for n in before.keys() - gone)
    new = after.keys() - before.keys()
    assert all("residual." in n or ".readout." in n or "attention." in n for n in new)
    own = [n for n in new if n.endswith((".weight", ".bias")) and "norm" in n]
    assert all((after[n] == (1 if n.endswith("weight") else 0)).all() for n in own)
    assert list(model.named_buffers()) == []
    assert {type(m).__module__ for m in model.modules() if isinstance(m, torch.nn.LayerNorm)} == set()
    assert all(m.eps == SHAPE["layer_norm_eps"] for m in model.modules() if isinstance(m, Norm))


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_pre_is_the_plain_host_to_the_bit(form):
    plain, model = host(form), siamesenorm.rewire(host(form), "pre")
    got, wanted = (m(pixel_values=images(), output_hidden_states=True) for m in (model, plain))
    assert torch.equal(got.logits, wanted.logits)
    # The host's last one is what its final norm reads.
    assert all(torch.equal(a, b) for a, b in zip(got.hidden_states[:-1], wanted.hidden_states[:-1], strict=True))
    if form == "teacher":
        assert torch.equal(got.cls_logits, wanted.cls_logits)
        assert torch.equal(got.distillation_logits, wanted.distillation_logits)


@pytest.mark.parametrize("form", ["vit", "deit"])
def test_the_hosts_loss(form):
    plain, model = host(form), siamesenorm.rewire(host(form), "pre")
    got, wanted = (m(pixel_values=images(), labels=labels()).loss for m in (model, plain))
    assert torch.equal(got, wanted)
    torch.testing.assert_close(got, loss_of(model))


def test_the_class_is_still_the_hosts():
    for form, (family, name) in FORMS.items():
        model = shared(form)
        assert type(model).__name__ == f"Residual{name}"
        assert isinstance(model, getattr(transformers, name))
        assert type(body_of(model)).__name__ == f"Residual{'ViT' if family == 'vit' else 'DeiT'}Model"
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(again(images()).logits, model(images()).logits)


# The equations


@pytest.mark.parametrize(("form", "scheme"), PAIRS)
def test_float64_against_the_oracle(form, scheme):
    name, options = ALL[scheme]
    model = exact_of(form, scheme)
    weights = dict(model.named_parameters())
    more = extras(name, 0.1, weights, f"{model.base_model_prefix}.layernorm.readout.") if scheme in STREAMS else {}
    pixels = images().double()
    expected, states, last = hf_vit(weights, model.config, name, pixels, **options, **more)
    with capture_streams(model) as streams:
        out = model(pixel_values=pixels, output_hidden_states=True)
    assert relative_error(out.logits, expected) < 1e-10
    assert relative_error(out.hidden_states[-1], last) < 1e-10
    assert len(streams) == len(states) == 3
    for got, wanted in zip(streams, states, strict=True):
        assert len(got) == len(wanted)
        assert all(relative_error(a, b) < 1e-10 for a, b in zip(got, wanted, strict=True))
    probe = torch.randn(expected.shape, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((logits * probe).sum(), list(weights.values()), materialize_grads=True)
        for logits in (out.logits, expected)
    )
    for n, a, b in zip(weights, ours, theirs, strict=True):
        if dead(n, scheme):
            assert max(a.abs().max(), b.abs().max()) < 1e-12, n
        else:
            assert b.abs().max() > 1e-9, n
            assert relative_error(a, b) < 1e-10, n


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": False},
        {"num_channels": 1},
        {"num_hidden_layers": 1},
        {"image_size": [8, 20], "patch_size": [4, 2]},
        {"num_labels": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("scheme", ["post-pre", "hybrid-pre"])
def test_other_configs_against_the_oracle(scheme, changes):
    name, options = ALL[scheme]
    model = rewired("deit", scheme, **changes).double()
    pixels = images(3, changes.get("image_size", 16), changes.get("num_channels", 3)).double()
    expected, _, _ = hf_vit(dict(model.named_parameters()), model.config, name, pixels, **options)
    assert relative_error(model(pixel_values=pixels).logits, expected) < 1e-10


@pytest.mark.parametrize("scheme", siamesenorm.schemes())
@pytest.mark.parametrize("form", FORMS)
def test_every_scheme_builds_and_trains_every_parameter(form, scheme):
    family, name = FORMS[form]
    # Where the streams are read through a norm, only its eps shows their scale.
    model = hosts.build(family, {**SHAPE, "layer_norm_eps": 1e-3}, scheme, model_class=name).train()
    assert isinstance(model, getattr(transformers, name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, 5)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # DeiT's tokens start at zero, where a norm is steep, so the first step may go too far.
    assert losses[-1] < losses[1]
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert {n for n in without if not dead(n, {"siamese": "post-pre"}.get(scheme, scheme))} == set()


def test_equal_seeds_give_equal_weights_under_every_scheme():
    made = {}
    for scheme in siamesenorm.schemes():
        torch.manual_seed(7)
        made[scheme] = dict(hosts.build("vit", SHAPE, scheme).named_parameters())
    reference = made.pop("pre")
    for scheme, weights in made.items():
        common = reference.keys() & weights.keys()
        assert len(common) >= 3 * 12 + 8
        scaled = {n for n in common if not torch.equal(weights[n], reference[n])}
        assert bool(scaled) == (scheme == "deepnorm"), scheme
        for n in scaled:
            assert n.endswith(("v_proj.weight", "o_proj.weight", "fc1.weight", "fc2.weight"))
            torch.testing.assert_close(weights[n], reference[n] * 24**-0.25)


# Saving and loading


@pytest.mark.parametrize(("form", "scheme"), CROSS)
def test_equal_bits_after_saving_and_loading(form, scheme, tmp_path):
    model = shared(form, scheme)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == f"siamesenorm_{FORMS[form][0]}"
    assert written["architectures"] == [f"Residual{FORMS[form][1]}"]
    for load in (transformers.AutoModelForImageClassification.from_pretrained, hub.load):
        again = load(tmp_path)
        assert type(again) is type(model)
        assert hosts.scheme_of(again.config) == hosts.scheme_of(model.config)
        assert again.state_dict().keys() == model.state_dict().keys()
        assert torch.equal(again(pixel_values=images()).logits, model(pixel_values=images()).logits)


@pytest.mark.parametrize("form", FORMS)
def test_a_plain_classifier_loads_too(form, tmp_path):
    model = host(form)
    model.save_pretrained(tmp_path)
    again = hub.load(tmp_path)
    assert type(again) is type(model)
    assert torch.equal(again(pixel_values=images()).logits, model(pixel_values=images()).logits)


def test_a_missing_head_is_listed(tmp_path):
    body_of(shared()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"missing keys.*classifier\.bias, classifier\.weight"):
        hub.load(tmp_path)


@pytest.mark.parametrize(("key", "kind"), [("readout.norm_x.bias", "missing"), ("readout.norm_z.bias", "unexpected")])
def test_a_body_that_does_not_fit_is_an_error(key, kind, tmp_path):
    from safetensors.torch import load_file, save_file

    shared().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    if kind == "missing":
        del weights[f"vit.layernorm.{key}"]
    else:
        weights[f"vit.layernorm.{key}"] = torch.ones(32)
    save_file(weights, path, metadata={"format": "pt"})
    for load in (transformers.AutoModelForImageClassification.from_pretrained, hub.load):
        with pytest.raises(ConfigError, match=rf"{kind} keys.*vit\.layernorm\.{key}"):
            load(tmp_path)


def test_other_auto_classes(tmp_path):
    """What belongs to a head may come and go, a pooler and a mask's token in the body included."""
    shared().save_pretrained(tmp_path / "classifier")
    hidden = body_of(shared())(pixel_values=images()).last_hidden_state
    base = transformers.AutoModel.from_pretrained(tmp_path / "classifier")
    assert base.pooler is not None
    assert torch.equal(base(pixel_values=images()).last_hidden_state, hidden)
    base.save_pretrained(tmp_path / "base")
    again = transformers.AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(again(pixel_values=images()).pooler_output, base(pixel_values=images()).pooler_output)
    classifier = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "base", num_labels=3)
    assert torch.equal(body_of(classifier)(pixel_values=images()).last_hidden_state, hidden)

    masked = transformers.AutoModelForMaskedImageModeling.from_pretrained(tmp_path / "classifier", encoder_stride=4)
    mask = torch.arange(16).expand(2, -1) % 2 == 0
    out = masked(pixel_values=images(), bool_masked_pos=mask)
    assert out.reconstruction.shape == (2, 3, 16, 16)
    out.loss.backward()
    assert masked.vit.embeddings.mask_token.grad.abs().sum() > 0
    masked.save_pretrained(tmp_path / "masked")
    classifier = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "masked")
    assert torch.equal(body_of(classifier)(pixel_values=images()).last_hidden_state, hidden)


@pytest.mark.parametrize(("form", "scheme"), CROSS)
def test_a_model_built_without_memory_is_initialised_and_loaded_like_any(form, scheme):
    family, name = FORMS[form]
    given, inputs = (family, SHAPE, *ALL[scheme]), {"pixel_values": images()}
    assert_built_without_memory_as_with(given, lambda n: "residual" in n or "norm" in n, inputs, model_class=name)


def test_a_model_without_labels_is_its_last_hidden_state(tmp_path):
    for form in FORMS:
        model = rewired(form, num_labels=0)
        out = model(pixel_values=images(), output_hidden_states=True)
        last = out.hidden_states[-1]
        expected = (last[:, 0] + last[:, 1]) / 2 if form == "teacher" else last[:, 0]
        assert torch.equal(out.logits, expected)
        model.save_pretrained(tmp_path / form)
        again = hub.load(tmp_path / form)
        assert again.config.num_labels == 0
        assert torch.equal(again(pixel_values=images()).logits, out.logits)


# In use


@pytest.mark.parametrize(("form", "scheme"), PAIRS)
@torch.no_grad()
def test_hidden_states_are_what_blocks_read(form, scheme):
    model = shared(form, scheme)
    body = body_of(model)
    with capture_streams(model) as streams:
        out = model(pixel_values=images(), output_hidden_states=True)
    assert len(out.hidden_states) == 4
    assert torch.equal(out.hidden_states[0], body.embeddings(images()))
    for i in (1, 2):
        u, _ = body.layers[i].attn_residual.read(streams[i - 1])
        torch.testing.assert_close(out.hidden_states[i], u)
    assert torch.equal(out.hidden_states[-1], body(pixel_values=images()).last_hidden_state)
    assert model(pixel_values=images()).hidden_states is None


@pytest.mark.parametrize("scheme", ["post-pre", "hybrid-pre"])
@torch.no_grad()
def test_attentions_of_the_eager_kernel(scheme):
    for form in FORMS:
        model = copy.deepcopy(shared(form, scheme))
        sdpa = model(pixel_values=images()).logits
        model.set_attn_implementation("eager")
        out = model(pixel_values=images(), output_attentions=True, output_hidden_states=True)
        assert relative_error(out.logits, sdpa) < 1e-5
        seq = 17 if form == "vit" else 18
        assert [weights.shape for weights in out.attentions] == [(2, 4, seq, seq)] * 3
        for weights in out.attentions:
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, seq))
        assert len({weights.square().sum().item() for weights in out.attentions}) == 3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("form", "scheme"), CROSS)
def test_activation_checkpointing_changes_nothing(form, scheme, reentrant):
    assert_checkpoints_change_nothing(exact_of(form, scheme), step, reentrant, 1e-12, lambda name: dead(name, scheme))


def assert_compiles(form, scheme):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = rewired(form, scheme, num_hidden_layers=2, layer_norm_eps=0.1).train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    expected, logits = (each(pixel_values=images()).logits for each in (model, compiled))
    assert relative_error(logits, expected) < 1e-5
    live = {n: p for n, p in model.named_parameters() if not dead(n, scheme)}
    wanted, got = (torch.autograd.grad(out.square().sum(), list(live.values())) for out in (expected, logits))
    for n, a, b in zip(live, got, wanted, strict=True):
        assert relative_error(a, b) < 1e-4, n
    for seed in (1, 2):
        compiled(pixel_values=images(seed=seed))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        (form, scheme)
        if (form, scheme) == ("teacher", "post-pre")
        else pytest.param(form, scheme, marks=pytest.mark.slow)
        for form, scheme in CROSS
    ],
)
def test_compiled_training_is_one_graph_with_the_same_gradients(form, scheme):
    assert_compiles(form, scheme)


def test_blocks_compiled_one_by_one_share_their_graphs_whatever_their_rate():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = rewired("vit", "hybrid-pre", num_hidden_layers=10)
    expected = model(pixel_values=images()).logits
    counter = CompileCounterWithBackend("eager")
    for block in hosts.blocks(model):
        block.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(model(pixel_values=images()).logits, expected)
    assert counter.frame_count <= 3


@pytest.mark.parametrize(("form", "scheme"), PAIRS)
@torch.no_grad()
def test_the_batch_an_image_is_in_changes_nothing(form, scheme):
    model = shared(form, scheme)
    together = model(pixel_values=images(5)).logits
    for batch in (1, 3):
        parts = [model(pixel_values=part).logits for part in images(5).split(batch)]
        assert relative_error(torch.cat(parts), together) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [24, (16, 28), 8], ids=str)
def test_images_of_another_size(form, size):
    name, options = ALL["post-pre"]
    model = copy.deepcopy(shared(form, "post-pre")).double()
    pixels, body = images(2, size).double(), body_of(model)
    height, width = pixels.shape[2:]
    own = body.embeddings.position_embeddings
    special = own.shape[1] - 16
    grid = own[:, special:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, (height // 4, width // 4), mode="bicubic", align_corners=False)
    positions = torch.cat((own[:, :special], grid.flatten(2).transpose(1, 2)), 1)
    expected, _, _ = hf_vit(dict(model.named_parameters()), model.config, name, pixels, positions=positions, **options)
    logits = model(pixel_values=pixels, interpolate_pos_encoding=True).logits
    assert relative_error(logits, expected) < 1e-10
    assert torch.equal(
        model(pixel_values=images().double(), interpolate_pos_encoding=True).logits,
        model(pixel_values=images().double()).logits,
    )


@pytest.mark.parametrize("stream_dtype", [None, "float32"])
@pytest.mark.parametrize("scheme", KINDS)
def test_bf16_weights(scheme, stream_dtype):
    model = rewired("teacher", scheme, options={"stream_dtype": stream_dtype}).bfloat16()
    exact = copy.deepcopy(model).float()
    with capture_streams(model) as streams:
        logits = model(pixel_values=images()).logits
    assert {t.dtype for s in streams for t in s} == {torch.float32 if stream_dtype else torch.bfloat16}
    assert logits.dtype == torch.bfloat16
    F.cross_entropy(logits, labels()).backward()
    gradients = [p.grad for n, p in model.named_parameters() if not dead(n, scheme)]
    assert all(g.isfinite().all() and g.dtype == torch.bfloat16 for g in gradients)
    assert relative_error(logits, exact(pixel_values=images()).logits) < 0.2


def test_the_site_table():
    rows = hosts.site_table(shared("deit", "hybrid-pre"))
    assert [(row["kind"], row["reads"], row["norms"]) for row in rows[2:4]] == [
        ("attention", "c1⊙X + Ny(Y)", "no Nin; q, k, v per head"),
        ("mlp", "Nx(X) + Ny(Y)", "Nin before"),
    ]
    assert len(rows) == 7


# Stochastic depth


def rates(model):
    return [(block.attn_residual.drop_path, block.mlp_residual.drop_path) for block in hosts.blocks(model)]


def factors(config, batch, dtype):
    """What a forward from the same seed multiplies each sublayer's output by, one number for each image."""
    drawn = []
    for index in range(config.num_hidden_layers):
        p = config.drop_path_rate * index / max(config.num_hidden_layers - 1, 1)
        for _ in range(2):
            kept = torch.ones(batch, 1, 1, dtype=dtype)
            drawn.append(kept.bernoulli_(1 - p) / (1 - p) if p else kept)
    return drawn


@pytest.mark.parametrize("scheme", ["post-pre", "hybrid-pre", "hybrid-pre*", "pre", "post", "hybridnorm", "resi_dual"])
def test_stochastic_depth_against_the_oracle(scheme):
    """X and Y of an image lose the same updates, and keep the same ones, grown by 1/(1-p)."""
    name, options = ALL[scheme]
    model = rewired("vit", scheme, drop_path_rate=0.6).double().train()
    weights, pixels = dict(model.named_parameters()), images(8).double()
    torch.manual_seed(3)
    drawn = factors(model.config, 8, torch.float64)
    assert 0 < sum((factor == 0).sum() for factor in drawn) < 32
    expected, states, _ = hf_vit(weights, model.config, name, pixels, factors=drawn, **options)
    torch.manual_seed(3)
    with capture_streams(model) as streams:
        logits = model(pixel_values=pixels).logits
    assert relative_error(logits, expected) < 1e-10
    for got, wanted in zip(streams, states, strict=True):
        assert all(relative_error(a, b) < 1e-10 for a, b in zip(got, wanted, strict=True))
    ours, theirs = (torch.autograd.grad(out.square().sum(), list(weights.values())) for out in (logits, expected))
    for n, a, b in zip(weights, ours, theirs, strict=True):
        if dead(n, scheme):
            assert a.abs().max() < 1e-10, n
        else:
            assert relative_error(a, b) < 1e-10, n


@pytest.mark.parametrize("form", FORMS)
def test_the_rate_grows_from_block_to_block_and_is_saved(form, tmp_path):
    family, name = FORMS[form]
    built = hosts.build(family, {**SHAPE, "drop_path_rate": 0.4}, model_class=name)
    assert rates(built) == [(0.0, 0.0), (0.2, 0.2), (0.4, 0.4)]
    # A key that the host does not know stays with its config, and is known once it is rewired.
    assert rates(rewired(form, drop_path_rate=0.4)) == rates(built)
    assert rates(rewired(form)) == [(0.0, 0.0)] * 3
    assert rates(rewired(form, drop_path_rate=0.4, num_hidden_layers=1)) == [(0.0, 0.0)]
    built.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["drop_path_rate"] == 0.4
    assert rates(hub.load(tmp_path)) == rates(built)
    changed = transformers.AutoModelForImageClassification.from_pretrained(tmp_path, drop_path_rate=0.2)
    assert rates(changed) == [(0.0, 0.0), (0.1, 0.1), (0.2, 0.2)]


@pytest.mark.parametrize("scheme", KINDS)
@torch.no_grad()
def test_stochastic_depth_is_off_in_evaluation(scheme):
    model = rewired("vit", scheme, drop_path_rate=0.9)
    expected = shared("vit", scheme)(pixel_values=images()).logits
    assert torch.equal(model(pixel_values=images()).logits, expected)
    assert not torch.allclose(model.train()(pixel_values=images()).logits, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scheme", KINDS)
def test_recomputation_drops_the_same(scheme, reentrant):
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = rewired("teacher", scheme, drop_path_rate=0.7, layer_norm_eps=0.1, **dropout).double().train()
    expected = step(model, seed=11, batch=6)
    other = step(model, seed=12, batch=6)
    assert relative_error(other[0], expected[0]) > 1e-3
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    got = step(model, seed=11, batch=6)
    for name in [name for name in expected[1] if dead(name, scheme)]:
        del got[1][name], expected[1][name]
    same(got, expected, 1e-12)


@pytest.mark.slow
def test_stochastic_depth_compiles_for_any_batch():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = rewired("vit", "post-pre", num_hidden_layers=2, drop_path_rate=0.5).train()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for batch in (2, 3, 5, 7):
        torch.manual_seed(batch)
        logits = compiled(pixel_values=images(batch)).logits
        torch.manual_seed(batch)
        torch.testing.assert_close(logits, model(pixel_values=images(batch)).logits)
    assert counter.frame_count <= 2


# What cannot be had


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 5}, "patch_size 5 does not divide image_size 16"),
        ({"patch_size": 32}, "patch_size 32 does not divide image_size 16"),
        ({"patch_size": 0}, "patch_size 0 does not divide image_size 16"),
        ({"image_size": [16, 18]}, r"patch_size 4 does not divide image_size \[16, 18\]"),
        ({"image_size": [16, 16, 16]}, r"a size is one number or height and width, not \[16, 16, 16\]"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not a multiple of num_attention_heads 5"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, not 0"),
        ({"num_channels": 0}, "num_channels must be at least 1, not 0"),
        ({"num_labels": -2}, "num_labels must not be negative, but is -2"),
        ({"drop_path_rate": 1.0}, "drop_path_rate must be .*at least 0 and below 1, not 1.0"),
        ({"drop_path_rate": -0.1}, "drop_path_rate must be .*at least 0 and below 1, not -0.1"),
        ({"drop_path_rate": "much"}, "drop_path_rate"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob must be at least 0 and below 1"),
        ({"patchsize": 4}, "has no key 'patchsize': did you mean 'patch_size'"),
        ({"drop_path": 0.1}, "has no key 'drop_path': did you mean 'drop_path_rate'"),
        ({"hidden_act": "gelo"}, "gelo"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps must be a number of at least 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["vit", "deit"])
def test_configs_that_are_refused(family, change, message):
    with pytest.raises(ConfigError, match=message) as error:
        hosts.build(family, {**SHAPE, **change})
    assert "\n" not in str(error.value)


def test_a_class_that_is_not_there():
    with pytest.raises(ConfigError, match="a DeiT has no class 'DeiTForImageClassificationWithTeecher': did you mean"):
        hosts.build("deit", SHAPE, model_class="DeiTForImageClassificationWithTeecher")
    with pytest.raises(ConfigError, match=r"a ViT has no class 'ViTModel': (did you mean|valid)"):
        hosts.build("vit", SHAPE, model_class="ViTModel")


@pytest.mark.parametrize("rate", [1.0, 1.5, -0.1, True, "0.1", float("nan"), None], ids=str)
def test_a_rate_of_a_hosts_own_config_is_checked_before_anything_is_changed(rate):
    model = host(drop_path_rate=rate)
    before = model(pixel_values=images()).logits
    with pytest.raises(ConfigError, match="drop_path_rate must be a number of at least 0 and below 1"):
        siamesenorm.rewire(model)
    assert type(model) is transformers.ViTForImageClassification
    assert type(model.config) is transformers.ViTConfig
    assert torch.equal(model(pixel_values=images()).logits, before)


def test_a_rate_of_a_saved_config_is_checked(tmp_path):
    shared().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "drop_path_rate": 1.0}))
    with pytest.raises(ConfigError, match=r"drop_path_rate must be .* not 1\.0"):
        hub.load(tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_images_that_do_not_fit(form):
    model = shared(form)
    with pytest.raises(ValueError, match="Expected 3 but got 1"):
        model(pixel_values=images(channels=1))
    with pytest.raises(ValueError, match=r"Input image size \(24\*24\) doesn't match model \(16\*16\)"):
        model(pixel_values=images(size=24))
