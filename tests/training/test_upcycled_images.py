"""Training on from saved models of images: upcycled ones, plain ones, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import DiTPipeline, DiTTransformer2DModel
from safetensors.torch import load_file

from siamesenorm import hosts, hub
from siamesenorm.convert.saved import upcycle_saved
from siamesenorm.hub.loading import load_dit
from siamesenorm.residual import ConfigError, make_scheme, own_parameters
from siamesenorm.training import form, parallel, pictures, run
from siamesenorm.training.build import build_model, check, empty_model
from siamesenorm.training.processes import ALONE
from siamesenorm.training.recipe_files import load
from siamesenorm.training.run import train
from siamesenorm.training.tasks import task_of
from tests.hosts.tiny import host, scatter
from tests.parity import relative_error
from tests.training.test_distributed import run_all
from tests.training.test_pretrained import BYTES
from tests.training.test_run import Killed, assert_same, kill, weights
from tests.training.tiny import Watcher
from tests.training.tiny_images import write_recipes

KINDS = ("tiny-vit", "tiny-dit")
STEPS = ("train.steps=3", "train.validate_every=3", "train.checkpoint_every=1", "schedule.warmup_steps=0")
UPCYCLED = ("model.scheme=siamese", "model.options={x: post, x_init: 0.0, y_eps: 1.0}", "model.config={}")
DIT = {
    "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "patch_size": 4, "sample_size": 8,
    "in_channels": 1, "out_channels": 2, "num_embeds_ada_norm": 10,
}  # fmt: skip


def short(kind):
    """Without the pictures of diffusion, which take longer than its steps."""
    return (*STEPS, *(["sample.per_class=0"] if kind == "tiny-dit" else []))


@pytest.fixture(scope="module", autouse=True)
def _no_pictures():
    """They take longer than the steps."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((pictures, "confusion"), (pictures, "mistakes"), (run, "loss_curve")):
            patch.setattr(module, name, lambda *_: None)
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory, _no_pictures):
    """A folder with Pre-Norm runs, and with what the command makes of them."""
    folder = tmp_path_factory.mktemp("sources")
    write_recipes(folder)
    for kind in KINDS:
        plain = load(str(folder / f"{kind}.yaml"), ["model.scheme=pre", "model.options={}", *short(kind)])
        assert train(plain, folder / kind, Watcher()).status == "finished"
        upcycle_saved(folder / kind / "model", folder / f"{kind}-up", make_scheme("siamese"))
    return folder


@pytest.fixture
def recipe(sources):
    """Makes a recipe that goes on from the upcycled model of a kind, with overrides."""

    def make(kind, *overrides):
        given = (*UPCYCLED, f"model.pretrained={sources / f'{kind}-up'}", *short(kind), *overrides)
        # Later ones of the same key do not replace earlier ones, but are refused.
        return load(
            str(sources / f"{kind}.yaml"), [f"{k}={v}" for k, v in dict(o.split("=", 1) for o in given).items()]
        )

    return make


def outputs(model):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 1, 8, 8, generator=generator)
    with torch.no_grad():
        if hasattr(model, "null_class") or isinstance(model, DiTTransformer2DModel):
            return model.eval()(x, torch.arange(4) * 12, torch.arange(4)).sample
        return model.eval()(pixel_values=x).logits


def saved_model(kind, folder):
    return hub.load(folder) if kind == "tiny-vit" else load_dit(folder / "transformer")


@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_as_what_it_was_made_of(recipe, sources, kind):
    model = build_model(recipe(kind))
    assert relative_error(outputs(model), outputs(saved_model(kind, sources / kind / "model"))) < 1e-4
    task = task_of(recipe(kind))
    data = task.load(ALONE)
    found = task.validate(model, data, device=torch.device("cpu"), batch_size=40)
    before = json.loads((sources / kind / "summary.json").read_text())
    assert {name: before[name] for name in found.figures()} == pytest.approx(found.figures(), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_new_moves_alone_at_first_and_a_resumed_run_does_the_same(recipe, sources, tmp_path, kind):
    made = recipe(kind, "schedule.own_steps=3", "schedule.open_steps=3", "train.ema_decay=0.0")
    start = build_model(made)
    own, everything = set(own_parameters(start)), dict(start.named_parameters())
    assert own
    assert train(made, tmp_path / "unbroken", Watcher()).status == "finished"
    with pytest.raises(Killed):
        train(made, tmp_path / "broken", Watcher(at=2, act=kill))
    train(made, tmp_path / "broken", Watcher())
    assert_same(tmp_path / "broken", tmp_path / "unbroken")
    ended = weights(tmp_path / "unbroken")
    assert {name for name, weight in everything.items() if not torch.equal(weight, ended[name])} == own
    # X is open once its schedule has ended, but for what was learned.
    opening = make_scheme(made.model.scheme, **made.model.options).opening
    opened = [weight for name, weight in ended.items() if opening(name)]
    assert opened
    assert all((weight - 1).abs().max() < 0.1 for weight in opened)
    # What was trained on can be trained on.
    folder = tmp_path / "unbroken"
    check(recipe(kind, f"model.pretrained={folder}"))


def test_diffusers_own_dit(recipe, tmp_path):
    torch.manual_seed(0)
    source = scatter(DiTTransformer2DModel(**DIT), 0)
    source.save_pretrained(tmp_path / "stock")
    plain = build_model(recipe("tiny-dit", f"model.pretrained={tmp_path / 'stock'}", "model.scheme=pre",
                               "model.options={}"))  # fmt: skip
    assert relative_error(outputs(plain), outputs(source)) < 1e-5

    upcycle_saved(tmp_path / "stock", tmp_path / "up", make_scheme("siamese"))
    made = recipe("tiny-dit", f"model.pretrained={tmp_path / 'up'}", "model.config.dropout=0.25")
    model, empty = build_model(made), empty_model(made)
    assert relative_error(outputs(model), outputs(source)) < 1e-4
    assert model.config.dropout == empty.config.dropout == model.transformer_blocks[1].attn1.to_out[1].p == 0.25
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in empty.named_parameters()}
    # Labels are dropped by training, once for all blocks, and not by each of these.
    dropping = [module for module in model.modules() if hasattr(module, "dropout_prob")]
    assert [module.dropout_prob for module in dropping] == [0.0, 0.0]
    with pytest.raises(ConfigError, match=r"train\.parallel=ddp"):
        parallel.shard(empty, None, made)

    train(made, tmp_path / "run", Watcher())
    pipeline = DiTPipeline.from_pretrained(tmp_path / "run" / "model")
    assert type(pipeline.transformer).__name__ == "ResidualDiTTransformer2DModel"
    kept = form.empty(tmp_path / "run" / "checkpoints" / "form").state_dict()
    written = load_file(tmp_path / "run" / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {name: weight.shape for name, weight in kept.items()} == {name: w.shape for name, w in written.items()}


def test_a_plain_classifier_is_rewired(recipe, tmp_path):
    config = {
        "image_size": [8, 8], "num_channels": 1, "num_labels": 10, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    }  # fmt: skip
    from transformers import ViTConfig, ViTForImageClassification

    source = ViTForImageClassification(ViTConfig(**config))
    source.save_pretrained(tmp_path / "plain")
    options = ["model.options={}", f"model.pretrained={tmp_path / 'plain'}", "model.config.hidden_dropout_prob=0.25"]
    model = build_model(recipe("tiny-vit", "model.scheme=pre", *options))
    assert relative_error(outputs(model), outputs(source)) < 1e-5
    assert model.config.hidden_dropout_prob == 0.25
    changed = build_model(recipe("tiny-vit", "model.scheme=siamese", *options))
    assert hosts.scheme_in(changed) == make_scheme("siamese")


def test_the_recipe_says_how_often_labels_are_dropped(recipe):
    model = build_model(recipe("tiny-dit", "diffusion.label_dropout=0.3"))
    assert model.config.class_dropout_prob == 0.3


REFUSED = {
    "tiny-vit": [
        ("model.host=deit", "is a model of host vit, and model.host is deit"),
        ("model.host=llama", "its hosts are deit, vit"),
        ("model.options={x: post}", "was saved with the scheme siamese.*cannot be changed"),
        ("model.scheme=pre", "was saved with the scheme siamese.*asks for pre"),
        ("data.image_size=16", "image_size of model.pretrained=.* is 8, and the data says 16"),
        ("data.channels=3", "num_channels of model.pretrained=.* is 1, and the data says 3"),
        ("data.mean=[0.25]", "takes pixels less .* over .*: give these as data.mean and data.std"),
        ("model.config.hidden_size=32", "changes the weights"),
        ("model.config.image_size=16", "changes the weights.*position_embeddings"),
        ("model.config.hidden_sise=32", "has no key 'hidden_sise'.*hidden_size"),
        ("model.pretrained=DIT", "is a model of host dit, and model.host is vit"),
        ("model.pretrained=TEXT", "is a model of host llama, and model.host is vit"),
        ("model.pretrained=SEVEN", "tells 7 classes apart, and digits has 10"),
        ("model.pretrained=NAMED", "class 3 of the model is 'three', and that of digits is '3'"),
    ],
    "tiny-dit": [
        ("model.options={x: post}", "was saved with the scheme siamese.*cannot be changed"),
        ("data.image_size=16", "sample_size of model.pretrained=.* is 8, and the data says 16"),
        ("data.channels=3", "in_channels of model.pretrained=.* is 1, and the data says 3"),
        ("diffusion.learned_sigma=false", "out_channels of model.pretrained=.* is 2, and the data says 1"),
        ("diffusion.label_dropout=0", "has a null class, so diffusion.label_dropout must be above 0"),
        ("model.config.num_layers=3", "changes the weights.*transformer_blocks.2"),
        ("model.config.sample_size=16", r"changes the weights.*pos_embed.*\(1, 4, 16\) and would be \(1, 16, 16\)"),
        ("model.config.class_dropout_prob=0", "changes the weights.*embedding_table"),
        ("model.config.dropout=2", "dropout of a DiT must be a number"),
        ("model.config.norm_type=ada_norm", "norm_type cannot be changed"),
        ("model.config.layers=3", "has no key 'layers'.*num_layers"),
        ("model.pretrained=VIT", "is a model of host vit, and model.host is dit"),
        ("model.pretrained=TEXT", "is a model of host llama, and model.host is dit"),
        ("model.pretrained=SEVEN", "num_embeds_ada_norm of model.pretrained=.* is 7, and the data says 10"),
        ("model.pretrained=NAMED", "class 3 of the model is 'three', and that of digits is '3'"),
        ("model.pretrained=NO_NULL", "has no null class, so diffusion.label_dropout must be 0"),
    ],
}


def other(kind, which, sources, folder):
    """A saved model that is none for the digits, or for the task."""
    if which in ("VIT", "DIT"):
        return sources / f"tiny-{which.lower()}-up"
    if which == "TEXT":
        host("llama", **BYTES).save_pretrained(folder)
        return folder
    if which == "NAMED":
        shutil.copytree(sources / f"{kind}-up", folder)
        config = folder / ("config.json" if kind == "tiny-vit" else "model_index.json")
        written = json.loads(config.read_text())
        written["id2label"]["3"] = "three"
        config.write_text(json.dumps(written))
        return folder
    scheme = make_scheme("siamese", x="post", x_init=0.0, y_eps=1.0)
    if kind == "tiny-vit":
        source = json.loads((sources / f"{kind}-up" / "config.json").read_text())
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size",
                 "image_size", "num_channels")  # fmt: skip
        config = {**{key: source[key] for key in sizes}, "num_labels": 7}
        hosts.build("vit", config, scheme).save_pretrained(folder)
    else:
        changes = {"num_embeds_ada_norm": 7} if which == "SEVEN" else {"class_dropout_prob": 0.0}
        hosts.build("dit", {**DIT, **changes}, scheme).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("kind", "override", "message"), [(k, *each) for k in REFUSED for each in REFUSED[k]])
def test_what_is_refused(recipe, sources, tmp_path, kind, override, message):
    key, value = override.split("=", 1)
    if key == "model.pretrained":
        override = f"{key}={other(kind, value, sources, tmp_path / 'other')}"
    overrides = ["sample.guidance=1", override] if kind == "tiny-dit" else [override]
    if value == "pre":
        overrides.append("model.options={}")
    with pytest.raises(ConfigError, match=message) as caught:
        check(recipe(kind, *overrides))
    assert "\n" not in str(caught.value)


def test_a_model_of_images_is_none_for_text(tiny, sources):
    for kind, its in (("tiny-vit", "vit"), ("tiny-dit", "dit")):
        with pytest.raises(ConfigError, match=f"is a model of host {its}, and model.host is llama"):
            check(tiny("model.config={}", f"model.pretrained={sources / f'{kind}-up'}"))


def test_folders_without_a_model(recipe, sources, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(sources / "tiny-dit-up", folder)
    made = recipe("tiny-dit", f"model.pretrained={folder}")
    part = folder / "transformer"
    config, file = part / "config.json", next(part.glob("*.safetensors"))
    file.write_bytes(b"not weights")
    check(made)
    with pytest.raises(ConfigError, match=r"is no safetensors|cannot (load|read)"):
        build_model(made)
    config.write_text(json.dumps({"_class_name": "UNet2DModel"}))
    with pytest.raises(ConfigError, match=r"cannot load model\.pretrained.*holds no DiT.*UNet2DModel"):
        check(made)
    file.unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        check(made)
    shutil.rmtree(Path(part))
    with pytest.raises(ConfigError, match="holds no saved model"):
        check(made)


@pytest.mark.slow
def test_two_processes_resume_the_same(recipe, sources, tmp_path):
    write_recipes(tmp_path)
    todo, names = [], [(kind, how) for kind in KINDS for how in ("fsdp", "ddp")]
    for kind, how in names:
        start = f"model.pretrained={sources / f'{kind}-up'}"
        changes = [*UPCYCLED, *short(kind), start, "schedule.own_steps=2", f"train.parallel={how}"]
        shared = {"recipe": f"{kind}.yaml", "overrides": changes}
        todo += [
            {**shared, "out": f"unbroken/{kind}-{how}"},
            {**shared, "out": f"broken/{kind}-{how}", "at": 2, "signal": "SIGTERM"},
            {**shared, "out": f"broken/{kind}-{how}"},
        ]
    run_all(tmp_path, todo)
    for kind, how in names:
        assert_same(tmp_path / f"broken/{kind}-{how}", tmp_path / f"unbroken/{kind}-{how}")
