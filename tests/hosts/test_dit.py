"""DiT as a host: diffusers' own model rewired, and the subclass of it, under every scheme."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import siamesenorm
from siamesenorm import hosts, ops
from siamesenorm.probes import capture_streams
from siamesenorm.residual import ConfigError, LayerNorm, Norm, Sublayer, make_scheme, schemes, set_step
from tests.hosts.running import GAINS, register_gains, sharded
from tests.hosts.tiny import scatter
from tests.oracle_dit import dit as oracle
from tests.parity import relative_error
from tests.residual.test_streams import without_gradient

SHAPE = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 2,
    "out_channels": 4,
    "num_layers": 3,
    "sample_size": 6,
    "patch_size": 2,
    "num_embeds_ada_norm": 5,
}
# A scheme by what a test calls it; all there are but those that a DiT refuses.
FORMS: dict[str, tuple[str, dict[str, object]]] = {
    "post-pre": ("siamese", {}),
    "no-nin": ("siamese", {"normalized_input": False, "depth_scale": "paper"}),
    "hybrid-pre": ("siamese", {"x": "hybrid"}),
    "hybrid-pre*": ("siamese", {"x": "hybrid", "first_block_pre": True}),
    "topology-single": ("siamese", {"topology": "single"}),
    "hybridnorm*": ("hybridnorm", {"first_block_pre": True}),
    "attnres-blocks": ("attnres", {"block_size": 4}),
    "mgr": ("mgr", {"n": 3}),
    **{name: (name, {}) for name in schemes() if name not in ("siamese", "peri", "mgr")},
}
SOME = ("post-pre", "hybrid-pre", "reordered", "mgr")


def new(scheme="siamese", options=None, seed=0, **changes):
    """A model of ours with all parameters away from their start."""
    torch.manual_seed(seed)
    return scatter(hosts.build("dit", {**SHAPE, **changes}, scheme, options), seed).eval()


def stock(seed=0, **changes):
    """diffusers' own model."""
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(seed)
    return scatter(DiTTransformer2DModel(**{**SHAPE, **changes}), seed).eval()


@functools.cache
def exact_of(form):
    """A model in float64 that no test may change."""
    return new(*FORMS[form]).double()


def inputs(batch=3, dtype=torch.float64, size=6, channels=2, seed=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, channels, size, size, generator=generator, dtype=torch.float64).to(dtype)
    t = torch.randint(1000, (batch,), generator=generator)
    return x, t, torch.arange(batch) % 6


def gradients(model, *args):
    model.zero_grad(set_to_none=True)
    out = model(*(args or inputs())).sample
    out.square().sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_same(got, wanted, tolerance=1e-12):
    assert relative_error(got[0], wanted[0]) < tolerance
    assert got[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        # Some have none: see ``dead``.
        assert torch.equal(got[1][name], gradient) or relative_error(got[1][name], gradient) < tolerance, name


def dead(name, form, names):
    """Whether the equations leave a parameter without gradient."""
    # A constant added to all keys is none to the softmax.
    last = "norm_k.bias" if name.rpartition("attn1.")[0] + "attn1.norm_k.bias" in names else "to_k.bias"
    if name.endswith(("to_k.bias", "norm_k.bias")):
        return name.endswith(last)
    scheme, options = FORMS[form]
    own = name.replace("transformer_blocks.0.attn_residual.", "blocks.0.residuals.0.")
    return own.endswith(without_gradient(scheme, **options))


# The schemes


@pytest.mark.parametrize("form", FORMS)
def test_output_streams_and_every_gradient_against_the_oracle(form):
    name, options = FORMS[form]
    model = copy.deepcopy(exact_of(form))
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    expected, states = oracle(weights, model.config, name, *inputs(), **options)
    with capture_streams(model) as streams:
        out = model(*inputs()).sample
    assert out.shape == (3, 4, 6, 6)
    assert relative_error(out, expected) < 1e-10
    assert len(streams) == len(states) == 3
    for got, wanted in zip(streams, states, strict=True):
        assert all(relative_error(a, b) < 1e-10 for a, b in zip(got, wanted, strict=True))
    parameters = dict(model.named_parameters())
    probe = torch.randn(out.shape, dtype=torch.float64)
    ours = torch.autograd.grad((out * probe).sum(), list(parameters.values()))
    theirs = torch.autograd.grad((expected * probe).sum(), list(parameters.values()))
    scale = max(gradient.abs().max() for gradient in theirs)
    for n, a, b in zip(parameters, ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-10 * b.abs().max() + 1e-14 * scale, n
        assert (b.abs().max() > 1e-10 * scale) != dead(n, form, parameters), n


@pytest.mark.parametrize("form", FORMS)
def test_names_and_values_stay_and_new_norms_have_a_weight_and_a_bias(form):
    from siamesenorm.hosts.dit import DiT

    scheme, options = FORMS[form]
    for model in (stock(num_layers=2), scatter(DiT(**{**SHAPE, "num_layers": 2}))):
        before = {n: p.clone() for n, p in model.state_dict().items()}
        buffers = {n for n, _ in model.named_buffers()}
        assert siamesenorm.rewire(model, scheme, **options) is model
        after = model.state_dict()
        assert all(torch.equal(after[n], value) for n, value in before.items())
        new_names = after.keys() - before.keys()
        assert all("residual." in n or ".readout." in n or ".attn1.norm_" in n for n in new_names)
        assert {n for n, _ in model.named_buffers()} == buffers
        parts = [m for n, m in model.named_modules() if "residual" in n or "readout" in n or "attn1.norm" in n]
        for norm in (m for m in parts if isinstance(m, Norm)):
            assert isinstance(norm, LayerNorm)
            assert (norm.weight == 1).all()
            assert (norm.bias == 0).all()
        assert model(*inputs(dtype=torch.float32)).sample.isfinite().all()


def test_a_scheme_that_would_lose_the_gate_changes_nothing():
    model = stock()
    before = model.state_dict()
    for given in ({}, {"normalized_embedding": False}):
        with pytest.raises(ConfigError, match="scheme 'peri' normalises the branch output, so the gate of adaLN"):
            siamesenorm.rewire(model, "peri", **given)
        with pytest.raises(ConfigError, match="the gate of adaLN"):
            hosts.build("dit", SHAPE, "peri", given)
    assert type(model) is type(stock())
    assert model.state_dict().keys() == before.keys()
    assert "residual_scheme" not in model.config


def test_trained_norms_that_go_are_named(caplog):
    model = stock(norm_elementwise_affine=True)
    siamesenorm.rewire(model, "post")
    assert "removed: transformer_blocks.0.norm3, transformer_blocks.1.norm3, transformer_blocks.2.norm3" in caplog.text


# diffusers' own model


@pytest.mark.parametrize("changes", [{}, {"attention_bias": False, "norm_elementwise_affine": True, "norm_eps": 1e-3}])
def test_pre_is_diffusers_own_function(changes):
    model = stock(**changes).double()
    expected = gradients(model)
    siamesenorm.rewire(model, "pre")
    assert_same(gradients(model), expected)
    assert relative_error(model(*inputs(), return_dict=False)[0], expected[0]) < 1e-12


def test_of_another_size_diffusers_model_has_other_positions():
    model = stock().double()
    expected = model(*inputs(size=10)).sample
    assert relative_error(siamesenorm.rewire(model, "pre")(*inputs(size=10)).sample, expected) < 1e-12
    x, t, y = inputs()
    tall = model(x[:, :, :, :4], t, y).sample
    assert tall.shape == (3, 4, 6, 4)


@pytest.mark.parametrize("form", SOME)
def test_both_kinds_of_model_are_one_function(form):
    """With equal embedders in each block, what diffusers' model has more is the frequency shift."""
    scheme, options = FORMS[form]
    ours = new(scheme, options, timestep_shift=1).double()
    theirs = siamesenorm.rewire(stock(norm_eps=1e-6), scheme, **options).double()
    state = ours.state_dict()
    embedder = {n: state.pop(n) for n in list(state) if n.startswith("emb.")}
    state.pop("pos_embed.pos_embed")
    for index in range(3):
        state |= {f"transformer_blocks.{index}.norm1.{n}": p for n, p in embedder.items()}
    theirs.load_state_dict(state)
    assert relative_error(theirs(*inputs()).sample, ours(*inputs()).sample) < 1e-12


def test_a_subclass_or_other_blocks_are_refused():
    import diffusers

    class Other(diffusers.DiTTransformer2DModel):
        pass

    with pytest.raises(ConfigError, match="cannot rewire a Other"):
        siamesenorm.rewire(Other(**SHAPE), "siamese")
    wrapped = stock()
    wrapped.transformer_blocks[1] = torch.nn.Identity()
    with pytest.raises(ConfigError, match="blocks are Identity: rewire it before wrapping it"):
        siamesenorm.rewire(wrapped, "siamese")
    for model in (siamesenorm.rewire(stock(), "siamese"), new("hyper")):
        with pytest.raises(ConfigError, match="is rewired already"):
            siamesenorm.rewire(model, "siamese")
    with pytest.raises(ConfigError, match="did you mean 'siamese'"):
        siamesenorm.rewire(stock(), "siamsee")


# Building


def test_a_plain_model_is_pre_norm():
    from siamesenorm.hosts.dit import DiT

    torch.manual_seed(0)
    plain = scatter(DiT(**SHAPE)).eval()
    assert plain.config.residual_scheme is None
    assert plain.state_dict().keys() == new("pre").state_dict().keys()
    assert torch.equal(plain(*inputs(dtype=torch.float32)).sample, new("pre")(*inputs(dtype=torch.float32)).sample)


def test_initial_values():
    model = hosts.build("dit", {**SHAPE, "num_attention_heads": 8, "sample_size": 8}, "siamese")
    state = model.state_dict()
    zero = {n for n, p in state.items() if not p.any()}
    biases = {n for n in state if n.endswith(".bias")}
    adaptive = {f"transformer_blocks.{i}.norm1.linear.weight" for i in range(3)}
    assert zero == biases | adaptive | {"proj_out_1.weight", "proj_out_2.weight"}
    for name, p in state.items():
        if name.startswith("emb.") and name.endswith("weight"):
            assert p.std().item() == pytest.approx(0.02, rel=0.15), name
        elif name.endswith(("to_q.weight", "to_out.0.weight", "proj.weight", "net.2.weight")):
            limit = (6 / (len(p) + p[0].numel())) ** 0.5
            assert p.abs().max().item() == pytest.approx(limit, rel=0.02), name
            assert p.std().item() == pytest.approx(limit / 3**0.5, rel=0.1), name
        elif "norm_" in name and name.endswith("weight") and "readout" in name:
            assert (p == 1).all()
    half = torch.arange(16, dtype=torch.float64)[None] / 16
    angle = torch.arange(4)[:, None] / 10000**half
    row = torch.cat((angle.sin(), angle.cos()), 1)
    # The first half of a position's vector tells the column, the second the row.
    table = torch.cat((row.repeat(4, 1), row.repeat_interleave(4, 0)), 1)
    assert relative_error(state["pos_embed.pos_embed"][0], table) < 1e-6


def test_equal_seeds_give_equal_shared_weights():
    made = {}
    for form, (scheme, options) in FORMS.items():
        torch.manual_seed(7)
        made[form] = hosts.build("dit", SHAPE, scheme, options).state_dict()
    reference = made.pop("pre")
    for form, weights in made.items():
        assert reference.keys() <= weights.keys()
        same = [torch.equal(weights[n], reference[n]) for n in reference]
        assert all(same) == (form != "deepnorm"), form


def test_deepnorms_gains():
    torch.manual_seed(7)
    reference = hosts.build("dit", SHAPE, "pre").state_dict()
    torch.manual_seed(7)
    gained = hosts.build("dit", SHAPE, "deepnorm").state_dict()
    scaled = {"attn1.to_v.weight", "attn1.to_out.0.weight", "ff.net.0.proj.weight", "ff.net.2.weight"}
    for name, weight in reference.items():
        gain = 24**-0.25 if name.split(".", 2)[-1] in scaled else 1
        torch.testing.assert_close(gained[name], weight * gain, msg=name)


@pytest.mark.usefixtures("_clean")
def test_gains_of_every_role_at_a_rewiring_that_asks_for_them():
    register_gains()
    for make in (stock, lambda: siamesenorm.hosts.dit.DiT(**SHAPE)):
        model = make()
        before = {n: p.clone() for n, p in model.state_dict().items()}
        after = siamesenorm.rewire(model, "gains", init=True).state_dict()
        roles = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "ff.net.0.proj": "mlp", "ff.net.2": "mlp"}
        for name, value in before.items():
            role = next((r for part, r in roles.items() if name.endswith(f"{part}.weight") and "blocks" in name), None)
            assert torch.equal(after[name], value * GAINS.get(role, 1.0)), name


@pytest.mark.parametrize("form", FORMS)
def test_a_model_built_without_memory_is_initialised_and_loaded_like_any(form):
    scheme, options = FORMS[form]
    with torch.device("meta"):
        empty = hosts.build("dit", SHAPE, scheme, options)
    assert all(t.is_meta for t in empty.state_dict().values())
    real = hosts.build("dit", SHAPE, scheme, options).eval()
    assert {n: p.shape for n, p in empty.state_dict().items()} == {n: p.shape for n, p in real.state_dict().items()}
    assert hosts.site_table(empty) == hosts.site_table(real)
    empty.to_empty(device="cpu")
    for tensor in empty.state_dict().values():
        tensor.fill_(9.0)
    empty.reset_parameters()
    for name, tensor in empty.state_dict().items():
        assert not (tensor == 9).any(), name
        if "norm" in name or "residual" in name or name == "pos_embed.pos_embed":
            assert torch.equal(tensor, real.state_dict()[name]), name
    empty.load_state_dict(real.state_dict())
    x = inputs(dtype=torch.float32)
    assert torch.equal(empty.eval()(*x).sample, real(*x).sample)


def test_the_config_and_what_it_refuses():
    config = hosts.model_config("dit", {"num_layers": 2, "in_channels": 3}, "hybridnorm", {"first_block_pre": True})
    assert hosts.scheme_of(config) == make_scheme("hybridnorm", first_block_pre=True)
    assert (config.num_layers, config.out_channels, config.mlp_ratio) == (2, 3, 4.0)
    assert "dit" in hosts.hosts()
    for call in (hosts.model_config, hosts.build):
        for change, message in (
            ({"num_layer": 2}, "a DiT config has no key 'num_layer': did you mean 'num_layers'"),
            ({"residual_scheme": {}}, "no key 'residual_scheme'"),
            ({"patch_size": 4}, "patch_size 4 does not divide sample_size 6"),
            ({"num_attention_heads": 0}, "num_attention_heads of a DiT must be a whole number of at least 1, not 0"),
            ({"num_layers": True}, "num_layers of a DiT must be a whole number of at least 1, not True"),
            ({"out_channels": -2}, "out_channels of a DiT must be a whole number of at least 1, not -2"),
            ({"attention_head_dim": 7}, "must be a multiple of 4, a quarter for each sine and cosine"),
            ({"class_dropout_prob": 1.0}, "class_dropout_prob of a DiT must be a number of at least 0 and below 1"),
            ({"drop_path_rate": -0.1}, "drop_path_rate of a DiT must be"),
            ({"mlp_ratio": 0.01}, "mlp_ratio of a DiT must be a number that leaves the MLP a width"),
            ({"timestep_shift": 2}, "timestep_shift of a DiT must be 0 or 1, not 2"),
            ({"norm_eps": float("nan")}, "norm_eps of a DiT must be a number of at least 0"),
            ({"activation_fn": "gelu-aproximate"}, "did you mean 'gelu-approximate'"),
            ({"norm_type": "layer_norm"}, "a DiT has no norm_type 'layer_norm', only 'ada_norm_zero'"),
            ({"attention_bias": 1}, "attention_bias of a DiT must be true or false, not 1"),
        ):
            with pytest.raises(ConfigError, match=message):
                call("dit", {**SHAPE, **change}, "siamese")
        with pytest.raises(ConfigError, match="no option 'xx'"):
            call("dit", SHAPE, "siamese", {"xx": 1})
    with pytest.raises(ConfigError, match="'dit' has no choice of classes"):
        hosts.build("dit", SHAPE, "siamese", model_class="DiT")


def test_without_diffusers_the_message_says_how_to_install_it(monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "diffusers" or name.startswith("siamesenorm.hosts.dit"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ConfigError, match=r"'dit' needs diffusers: pip install \"siamesenorm\[diffusion\]\""):
        hosts.build("dit", SHAPE, "siamese")
    assert "dit" in hosts.hosts()


def test_the_site_table_and_the_blocks():
    model = exact_of("hybrid-pre")
    rows = hosts.site_table(model)
    assert [row["kind"] for row in rows] == ["attention", "mlp"] * 3 + ["readout"]
    assert rows[2]["reads"] == "c1⊙X + Ny(Y)"
    assert rows[2]["norms"] == "no Nin; q, k, v per head"
    assert rows[3]["scale"] == pytest.approx(0.5)
    assert rows[3]["norms"] == "Nin before"
    assert hosts.blocks(model) == list(model.transformer_blocks)
    assert hosts.site_table(exact_of("reordered"))[0]["norms"] == "Nin after"


# Labels and guidance


def test_what_pipelines_call_the_null_class_is_the_null_class():
    model = exact_of("post-pre")
    x, t, _ = inputs()
    assert model.null_class == 5
    given, own = (model(x, t, torch.tensor([1, null, 3])).sample for null in (1000, 5))
    assert torch.equal(given, own)
    rewired = siamesenorm.rewire(stock(), "pre").double()
    assert rewired.null_class == 5
    assert torch.equal(*(rewired(x, t, torch.tensor([1, null, 3])).sample for null in (1000, 5)))


def test_labels_that_are_none_are_refused():
    model = exact_of("post-pre")
    x, t, y = inputs()
    for label in (-1, 6, 999, 1001):
        with pytest.raises(ConfigError, match=f"class_labels must be from 0 to 5, not {label}"):
            model(x, t, torch.tensor([0, label, 1]))
    for given in ((None, y), (t, None)):
        with pytest.raises(ConfigError, match="needs both timestep and class_labels"):
            model(x, *given)
    for shape, message in (
        ((3, 3, 6, 6), r"hidden_states must be \(batch, 2, height, width\)"),
        ((3, 2, 7, 6), "a multiple of the patch size 2"),
        ((3, 2, 36), "hidden_states must be"),
        ((3, 2, 8, 8), "positions for latents of 6×6, not of 8×8"),
    ):
        with pytest.raises(ConfigError, match=message):
            model(torch.zeros(shape, dtype=torch.float64), t, y)


def test_a_model_without_a_null_class():
    model = new(class_dropout_prob=0.0).double()
    x, t, y = inputs(4)
    assert model.null_class is None
    assert len(model.emb.class_embedder.embedding_table.weight) == 5
    assert model(x, t, y).sample.isfinite().all()
    for null in (5, 1000):
        with pytest.raises(ConfigError, match=r"has 5 classes and no null class .* guidance_scale=1"):
            model(x, t, torch.tensor([0, 1, 2, null]))
    with pytest.raises(ConfigError, match="no null class"):
        model.forward_with_cfg(x, t, y, 2.0)


def test_no_label_is_dropped_in_training():
    model = copy.deepcopy(exact_of("post-pre")).train()
    assert torch.equal(model(*inputs()).sample, model(*inputs()).sample)
    assert torch.equal(model(*inputs()).sample, exact_of("post-pre")(*inputs()).sample)


def test_guidance_is_of_the_first_three_channels():
    model = new(in_channels=4, out_channels=8).double()
    x, t, _ = inputs(4, channels=4)
    y = torch.tensor([2, 3, 5, 1000])
    out = model.forward_with_cfg(x, t, y, 3.0)
    plain = model(torch.cat((x[:2], x[:2])), t, y).sample
    guided = plain[2:, :3] + 3.0 * (plain[:2, :3] - plain[2:, :3])
    assert relative_error(out[:2, :3], guided) < 1e-12
    assert torch.equal(out[2:, :3], out[:2, :3])
    assert torch.equal(out[:, 3:], plain[:, 3:])
    assert not torch.equal(out[:2, 3:], out[2:, 3:])
    with pytest.raises(ConfigError, match="a batch of two halves, not of 3"):
        model.forward_with_cfg(x[:3], t[:3], y[:3], 3.0)


# Saving and pipelines


@pytest.mark.parametrize("form", FORMS)
def test_equal_bits_after_saving_and_loading(form, tmp_path):
    scheme, options = FORMS[form]
    for index, model in enumerate((new(scheme, options), siamesenorm.rewire(stock(), scheme, **options))):
        x = inputs(dtype=torch.float32)
        model.save_pretrained(tmp_path / str(index))
        again = type(model).from_pretrained(tmp_path / str(index))
        assert type(again) is type(model)
        assert hosts.scheme_of(again.config) == make_scheme(scheme, **options)
        assert again.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(p, again.state_dict()[n]) for n, p in model.state_dict().items())
        assert torch.equal(again(*x).sample, model(*x).sample)
        # What diffusers' exponential moving average and others copy a model by.
        copied = type(model).from_config(model.config)
        assert copied.state_dict().keys() == model.state_dict().keys()
        assert hosts.scheme_of(copied.config) == make_scheme(scheme, **options)


def test_a_saved_model_keeps_its_table_of_positions_and_its_dtype(tmp_path):
    model = new()
    model.pos_embed.pos_embed.normal_()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.pos_embed.pos_embed, model.pos_embed.pos_embed)
    x = inputs(dtype=torch.bfloat16)
    assert torch.equal(again(*x).sample, model(*x).sample)


@pytest.mark.parametrize("low", [True, False])
def test_a_checkpoint_that_is_not_whole_is_refused(low, tmp_path):
    from safetensors.torch import load_file, save_file

    model = new()
    model.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    kept = weights.pop("transformer_blocks.1.attn_residual.norm_y.weight")
    save_file(weights, path)
    with pytest.raises(
        ConfigError, match=r"missing keys .* DiT: transformer_blocks\.1\.attn_residual\.norm_y\.weight$"
    ):
        type(model).from_pretrained(tmp_path, low_cpu_mem_usage=low)
    save_file({**weights, "transformer_blocks.1.attn_residual.norm_y.weight": kept, "more": kept.clone()}, path)
    with pytest.raises(ConfigError, match=r"unexpected keys in the checkpoint of DiT: more$"):
        type(model).from_pretrained(tmp_path, low_cpu_mem_usage=low)


def test_diffusers_own_class_cannot_load_a_rewired_model(tmp_path):
    import diffusers

    for index, model in enumerate((new(), siamesenorm.rewire(stock(), "siamese"))):
        model.save_pretrained(tmp_path / str(index))
        config = json.loads((tmp_path / str(index) / "config.json").read_text())
        assert not hasattr(diffusers, config["_class_name"])
        assert config["residual_scheme"]["name"] == "siamese"
        with pytest.raises(NotImplementedError, match="norm_type"):
            diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / str(index))
        with pytest.raises((ValueError, AttributeError), match=config["_class_name"]):
            diffusers.AutoModel.from_pretrained(tmp_path / str(index))
    with pytest.raises(ConfigError, match="carries no residual scheme"):
        type(model).from_config(stock().config)


def pipeline(model):
    import diffusers

    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        in_channels=1,
        out_channels=1,
        latent_channels=2,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,),
        norm_num_groups=2,
        sample_size=6,
    )
    made = diffusers.DiTPipeline(transformer=model, vae=vae, scheduler=diffusers.DDIMScheduler())
    made.set_progress_bar_config(disable=True)
    return made


def sampled(pipe, guidance_scale=3.0):
    generator = torch.Generator().manual_seed(2)
    made = pipe([1, 3], guidance_scale, generator, num_inference_steps=2, output_type="np", return_dict=False)
    return torch.from_numpy(made[0])


@pytest.mark.parametrize("make", [new, lambda: siamesenorm.rewire(stock(), "siamese")], ids=["ours", "diffusers"])
def test_a_pipeline_samples_and_is_saved_and_loaded(make, tmp_path):
    import diffusers

    pipe = pipeline(make())
    images = sampled(pipe)
    assert images.shape == (2, 6, 6, 1)
    assert not torch.equal(images, sampled(pipe, 1.0))
    # Without a null class in its table, 1000 would be no row of it: guidance has used the null class.
    own = copy.copy(pipe)
    own.register_modules(transformer=copy.deepcopy(pipe.transformer))
    for table in (m for n, m in own.transformer.named_modules() if n.endswith("embedding_table")):
        table.weight.data[5] += 1
    assert not torch.equal(images, sampled(own))
    assert torch.equal(sampled(pipe, 1.0), sampled(own, 1.0))

    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["siamesenorm.hosts.dit", type(pipe.transformer).__name__]
    again = diffusers.DiTPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert type(again.transformer) is type(pipe.transformer)
    assert torch.equal(sampled(again), images)


def test_a_pipeline_is_told_that_its_model_was_rewired(tmp_path):
    import diffusers

    pipe = pipeline(stock())
    siamesenorm.rewire(pipe.transformer, "siamese")
    pipe.save_pretrained(tmp_path / "untold")
    with pytest.raises(NotImplementedError, match="norm_type"):
        diffusers.DiTPipeline.from_pretrained(tmp_path / "untold")
    pipe.register_modules(transformer=pipe.transformer)
    pipe.save_pretrained(tmp_path / "told")
    again = diffusers.DiTPipeline.from_pretrained(tmp_path / "told")
    again.set_progress_bar_config(disable=True)
    assert torch.equal(sampled(again), sampled(pipe))


def test_a_pipeline_needs_a_null_class_to_guide():
    pipe = pipeline(new(class_dropout_prob=0.0))
    assert sampled(pipe, 1.0).isfinite().all()
    with pytest.raises(ConfigError, match="no null class"):
        sampled(pipe)


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["import diffusers, siamesenorm", "import siamesenorm, diffusers"])
def test_a_process_that_imports_the_package_loads_a_pipeline(order, tmp_path):
    pipe = pipeline(new())
    pipe.save_pretrained(tmp_path / "pipe")
    torch.save(sampled(pipe), tmp_path / "images")
    code = f"""
import torch, sys
torch.set_num_threads(1)
{order}
assert "siamesenorm.hosts.dit" not in sys.modules
pipe = diffusers.DiffusionPipeline.from_pretrained({str(tmp_path / "pipe")!r})
generator = torch.Generator().manual_seed(2)
made = pipe([1, 3], 3.0, generator, num_inference_steps=2, output_type="np", return_dict=False)[0]
assert torch.equal(torch.from_numpy(made), torch.load({str(tmp_path / "images")!r}))
print(type(pipe.transformer).__name__)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "DiT"


@pytest.mark.slow
def test_a_process_that_imports_diffusers_alone_loads_the_model_or_says_what_to_import(tmp_path):
    """Recent releases of diffusers import no module because a saved pipeline names it."""
    pipeline(new()).save_pretrained(tmp_path)
    code = f"import diffusers; print(diffusers.DiTPipeline.from_pretrained({str(tmp_path)!r}).transformer.scheme.name)"
    done = python(code)
    if done.returncode == 0:
        assert done.stdout.strip() == "siamese"
    else:
        assert "import siamesenorm.hosts.dit before calling" in done.stderr


@pytest.mark.slow
def test_nothing_else_imports_diffusers():
    code = """
import sys, siamesenorm, siamesenorm.convert
assert "dit" in siamesenorm.hosts.hosts()
try:
    siamesenorm.rewire(None, "siamese")
except siamesenorm.ConfigError:
    pass
assert not [name for name in sys.modules if name.split(".")[0] == "diffusers"]
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


# Training


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", SOME)
def test_gradient_checkpointing_changes_nothing(form, reentrant):
    model = copy.deepcopy(exact_of(form)).train()
    expected = gradients(model)

    def checkpoint(module, *args):
        return torch.utils.checkpoint.checkpoint(module, *args, use_reentrant=True)

    model.enable_gradient_checkpointing(checkpoint if reentrant else None)
    with capture_streams(model) as streams:
        assert_same(gradients(model), expected)
    assert len(streams) == 3
    model.disable_gradient_checkpointing()
    assert_same(gradients(model), expected)


def test_gradient_checkpointing_of_diffusers_model():
    model = siamesenorm.rewire(stock(), "siamese").double()
    expected = gradients(model)
    model.enable_gradient_checkpointing()
    assert_same(gradients(model), expected)


@pytest.mark.parametrize(
    "form", [form if form == "post-pre" else pytest.param(form, marks=pytest.mark.slow) for form in SOME]
)
def test_compiled_training_is_one_graph_with_the_same_gradients(form):
    model = new(*FORMS[form], num_layers=1 if form == "post-pre" else 2).train()
    # What a compiler is given is the plain form.
    with ops.use("plain"):
        expected = gradients(model, *inputs(dtype=torch.float32))
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    out, got = gradients(compiled, *inputs(dtype=torch.float32))
    assert_same((out, {n.removeprefix("_orig_mod."): g for n, g in got.items()}), expected, 1e-4)


def test_blocks_are_sharded_one_by_one(mesh):
    model = copy.deepcopy(exact_of("post-pre"))
    expected = gradients(model)
    out, got = gradients(sharded(model, mesh))
    assert_same((out, {n: g.full_tensor() for n, g in got.items()}), expected)


def test_a_warm_up_opens_the_blocks_one_after_the_other():
    model = new("siamese", {"warmup_steps": 2}).double()
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    scheme = hosts.scheme_of(model.config)
    set_step(model, scheme, 1)
    gates = {m.site.block: m.gate for m in model.modules() if isinstance(m, Sublayer)}
    assert [float(gates[block]) for block in range(3)] == [0.5, 0.25, 1 / 6]
    # A gate on the branch is a factor on adaLN's gate.
    scaled = dict(weights)
    for block, gate in gates.items():
        for suffix in ("weight", "bias"):
            name = f"transformer_blocks.{block}.norm1.linear.{suffix}"
            pieces = list(scaled[name].chunk(6))
            pieces[2], pieces[5] = pieces[2] * gate, pieces[5] * gate
            scaled[name] = torch.cat(pieces)
    expected, _ = oracle(scaled, model.config, "siamese", *inputs())
    assert relative_error(model(*inputs()).sample, expected) < 1e-10
    set_step(model, scheme, 6)
    assert relative_error(model(*inputs()).sample, oracle(weights, model.config, "siamese", *inputs())[0]) < 1e-10


def test_stochastic_depth_drops_an_update_for_both_streams():
    model = new(drop_path_rate=0.5, num_layers=3).double()
    rates = [m.drop_path for m in model.modules() if isinstance(m, Sublayer)]
    assert rates == [0.0, 0.0, 0.25, 0.25, 0.5, 0.5]
    assert (
        relative_error(model(*inputs()).sample, oracle(model.state_dict(), model.config, "siamese", *inputs())[0])
        < 1e-10
    )

    # In a block whose two sublayers are dropped for an image, Y stays as it is and X is normalised twice.
    x, t, y = (tensor.repeat(16, *(1 for _ in tensor.shape[1:])) for tensor in inputs())
    torch.manual_seed(1)
    with capture_streams(model.train()) as streams:
        model(x, t, y)
    (x_before, y_before), (x_after, y_after) = streams[1], streams[2]
    block = model.transformer_blocks[2]
    twice = block.mlp_residual.norm_x(block.attn_residual.norm_x(x_before))
    dropped = (y_after == y_before).flatten(1).all(1)
    assert 0 < dropped.sum() < len(dropped)
    assert torch.equal((x_after == twice).flatten(1).all(1), dropped)
    again = type(model).from_config(model.config)
    assert [m.drop_path for m in again.modules() if isinstance(m, Sublayer)] == rates


def test_stochastic_depth_scales_what_is_kept():
    model = new(drop_path_rate=0.5, num_layers=2).double().train()
    block = model.transformer_blocks[1]
    seen = {}
    block.attn1.register_forward_hook(lambda *args: seen.update(o=args[-1].detach()))
    x, t, y = (tensor.repeat(8, *(1 for _ in tensor.shape[1:])) for tensor in inputs())
    torch.manual_seed(3)
    written = []
    write = block.attn_residual.write
    block.attn_residual.write = lambda carry, o: written.append(o.detach()) or write(carry, o)
    model(x, t, y)
    gate = block.norm1.linear(F.silu(model.emb(t, y, hidden_dtype=x.dtype))).chunk(6, 1)[2]
    full = gate[:, None] * seen["o"]
    kept = written[0].flatten(1).any(1)
    assert 0 < kept.sum() < len(kept)
    assert relative_error(written[0][kept], 2 * full[kept]) < 1e-12


@pytest.mark.parametrize("stream_dtype", [None, "float32"])
@pytest.mark.parametrize("form", SOME)
def test_bf16_weights(form, stream_dtype):
    scheme, options = FORMS[form]
    for model in (
        new(scheme, {**options, "stream_dtype": stream_dtype}),
        siamesenorm.rewire(stock(), scheme, **options, stream_dtype=stream_dtype),
    ):
        model.bfloat16()
        exact = copy.deepcopy(model).float()
        with capture_streams(model) as streams:
            out = model(*inputs(dtype=torch.bfloat16)).sample
        assert {s.dtype for each in streams for s in each} == {torch.float32 if stream_dtype else torch.bfloat16}
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        assert relative_error(out, exact(*inputs(dtype=torch.float32)).sample) < 0.1


def test_a_step_from_the_start_moves_what_adaln_lets_through():
    """All gates and the output are 0 at first, as in the paper: the output layer moves first, then everything."""
    model = hosts.build("dit", SHAPE, "siamese").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    x, t, y = inputs(6, dtype=torch.float32)
    for _ in range(4):
        (model(x, t, y).sample - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [n for n, p in model.named_parameters() if torch.equal(p, before[n])] == []


def test_other_arguments_of_the_attention_are_passed_on():
    model = exact_of("post-pre")
    seen = []

    class Processor:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, mark=None):
            seen.append(mark)
            return torch.zeros_like(hidden_states)

    changed = copy.deepcopy(model)
    for block in changed.transformer_blocks:
        block.attn1.set_processor(Processor())
    changed(*inputs(), cross_attention_kwargs={"mark": 7})
    assert seen == [7, 7, 7]


def test_the_model_is_what_its_config_says():
    model = new(mlp_ratio=2.5, attention_bias=False, norm_eps=1e-3, dropout=0.1)
    block = model.transformer_blocks[0]
    assert block.ff.net[0].proj.out_features == 40
    assert block.attn1.to_q.bias is None
    assert block.norm1.norm.eps == block.norm3.eps == 1e-3
    assert block.ff.net[1].p == block.attn1.to_out[1].p == 0.1
