"""``siamesenorm upcycle`` and ``siamesenorm import-official``."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import siamesenorm
from siamesenorm import hub
from siamesenorm.data import byte_tokenizer
from siamesenorm.residual import make_scheme
from tests.cli.test_commands import refused, run
from tests.convert.test_import import fixture, official
from tests.hosts import test_dit, test_vision
from tests.hosts.tiny import host, scatter, tokens
from tests.parity import relative_error
from tests.training.test_pretrained import BYTES

__all__ = ["run"]


def test_from_a_run_to_a_run(run):
    """The command that upcycling prints trains on from where the model is."""
    assert run("train", run.recipe, "model.scheme=pre", "--out", "pre")[0] == 0
    code, out, _ = run("upcycle", "pre", "up")
    assert code == 0
    assert re.search(r"largest difference of the outputs: \d\.\d+e-0[5-9] relative to its largest entry", out)
    assert "2 random sequences of 32 tokens" in out
    assert "up: llama with siamese:x_init=0.0:y_eps=1.0" in out
    assert {path.name for path in Path("up").iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "upcycle.json",
    }  # fmt: skip
    before, after = hub.load("pre/model"), hub.load("up")
    ids = torch.arange(24).view(2, 12)
    assert relative_error(after(input_ids=ids).logits, before(input_ids=ids).logits) < 1e-4

    command = shlex.split(re.search(r"^next: (.*)$", out, re.M)[1])
    assert command[:3] == ["siamesenorm", "train", "pre/config.yaml"]
    code, out, err = run(*command[1:], "schedule.own_steps=2", "schedule.open_steps=4", "--out", "on", "--json")
    assert code == 0, err
    losses = [json.loads(line)["loss"] for line in Path("on/metrics.jsonl").read_text().splitlines()]
    first = json.loads(Path("pre/summary.json").read_text())["train_loss"]
    # It goes on about where Pre-Norm stopped, and not from the start.
    assert losses[0] == pytest.approx(first, rel=0.2)
    assert hub.load("on/model").config.residual_scheme["y_eps"] == 1.0
    code, out, _ = run("generate", "on", "--prompt", "ab", "--tokens", "3", "--greedy")
    assert out.startswith("ab")


def test_a_given_batch_and_the_tolerance(run):
    host().to(torch.bfloat16).save_pretrained("source")
    byte_tokenizer.build().save_pretrained("source")
    save_file({"input_ids": tokens(3, 7)}, "batch.safetensors")
    code, out, _ = run("upcycle", "source", "one", "--batch", "batch.safetensors", "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["inputs"], facts["scheme"], facts["scheme_options"]["y_eps"]) == (
        "the batch batch.safetensors", "siamese", 1.0,
    )  # fmt: skip
    assert 0 < facts["largest_relative_difference"] < 1e-4
    assert json.loads(Path("one/upcycle.json").read_text()) == facts
    # Compared in float32, and saved as it was: the host's weights to the bit.
    source, made = hub.load("source"), hub.load("one")
    assert made.dtype == torch.bfloat16
    assert all(torch.equal(made.get_parameter(name), p) for name, p in source.named_parameters())

    refused(run("upcycle", "source", "two", "--tolerance", "1e-12"), "outputs differ by", "Nothing was written")
    refused(run("upcycle", "source", "two", "--batch", "nothing.safetensors"), "there is no batch")
    save_file({"input_ids": tokens() + 1000}, "batch.safetensors")
    refused(run("upcycle", "source", "two", "--batch", "batch.safetensors"), "cannot take the batch")
    save_file({"colour": tokens()}, "batch.safetensors")
    refused(run("upcycle", "source", "two", "--batch", "batch.safetensors"), "cannot take the batch")
    refused(run("upcycle", "source", "two", "--length", "1000"), "longer than the model's max_position_embeddings (64)")
    assert not Path("two").exists()
    assert not list(Path().glob(".two*"))


def test_what_cannot_be_upcycled(run):
    siamesenorm.rewire(host(), "post").save_pretrained("post")
    host().save_pretrained("source")
    refused(run("upcycle", "post", "out"), "'post' cannot go on as 'siamese'")
    refused(run("upcycle", "source", "out", "--scheme", "siamese:x=hybrid"), "hybrid-pre takes the host's norm out")
    refused(run("upcycle", "source", "out", "--scheme", "siamse"), "did you mean 'siamese'")
    refused(run("upcycle", "source", "source"), "is not an empty folder")
    refused(run("upcycle", "no/such/place", "out"), "there is no folder 'no/such/place'")
    Path("timm").mkdir()
    Path("timm/config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
    refused(run("upcycle", "timm", "out"), "a model of timm", "siamesenorm.convert.upcycle")
    assert not Path("out").exists()


def test_a_rewired_source_and_another_scheme(run):
    scatter(siamesenorm.rewire(host(), "lns"), 1).save_pretrained("lns")
    assert run("upcycle", "lns", "mhc", "--scheme", "mhc:n=2")[0] == 0
    made, wanted = hub.load("mhc"), hub.load("lns")
    assert made.config.residual_scheme["n"] == 2
    assert relative_error(made(input_ids=tokens()).logits, wanted(input_ids=tokens()).logits) < 1e-4


def test_models_of_images(run):
    from siamesenorm.hub.loading import load_dit
    from siamesenorm.training.sampling import load_pipeline
    from tests.hub.test_security import pipeline

    model = test_vision.host("teacher")
    model.save_pretrained("vit")
    code, out, _ = run("upcycle", "vit", "vit-up", "--rows", "3")
    assert code == 0
    assert "3 random images" in out
    assert "next: siamesenorm train RECIPE model.pretrained=vit-up model.scheme=siamese" in out
    again = hub.load("vit-up")
    assert relative_error(again(pixel_values=test_vision.images()).logits,
                          model(pixel_values=test_vision.images()).logits) < 1e-4  # fmt: skip

    test_dit.stock().save_pretrained("dit")
    assert "2 random noisy latents" in run("upcycle", "dit", "dit-up")[1]
    assert load_dit("dit-up").scheme == make_scheme("siamese", x_init=0, y_eps=1)

    scatter(test_dit.new("pre", in_channels=3, out_channels=3)).save_pretrained(pipeline(Path("pre")) / "transformer")
    assert run("upcycle", "pre", "pre-up")[0] == 0
    made, before = load_pipeline(Path("pre-up")), load_pipeline(Path("pre"))
    x, t, y = test_dit.inputs(dtype=torch.float32, channels=3)
    assert made.transformer.scheme.y_eps == 1.0
    assert relative_error(made.transformer.eval()(x, t, y).sample, before.transformer.eval()(x, t, y).sample) < 1e-4


def test_import_official(run):
    name = "lm_prenorm_dev"
    torch.save({"model": official(name), "epoch": 3}, "checkpoint.pt")
    code, out, _ = run("import-official", "checkpoint.pt", "model", "--kind", "lm", "--verify", fixture(name))
    assert code == 0
    for words in (
        f"read {len(official(name))} weights of 'model' of checkpoint.pt; none is missing, none left over",
        "left aside: epoch",
        f"arguments from {fixture(name)}",
        "verified: the output differs from that in",
        "model: ResidualLlamaForCausalLM with pre",
    ):
        assert words in out
    code, out, _ = run("import-official", "checkpoint.pt", "again", "--kind", "lm", "--args", fixture(name), "--json")
    facts = json.loads(out)
    assert (facts["weights"], facts["left_aside"], facts["largest_relative_difference"]) == ("model", ["epoch"], None)
    assert Path("model/model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()

    refused(run("import-official", "checkpoint.pt", "third", "--kind", "ln"), "did you mean 'lm'")
    weights = official(name)
    del weights["transformer.ln_f.weight"]
    torch.save(weights, "checkpoint.pt")
    refused(
        run("import-official", "checkpoint.pt", "third", "--kind", "lm", "--args", fixture(name)),
        "missing: transformer.ln_f.weight",
    )
    assert not Path("third").exists()


def test_a_language_model_of_bytes_is_evaluated_on(run):
    host("llama", **BYTES).save_pretrained("source")
    byte_tokenizer.build().save_pretrained("source")
    assert run("upcycle", "source", "up")[0] == 0
    losses = []
    for folder in ("source", "up"):
        code, out, _ = run("eval", folder, "--sequence-length", "16", "--sequences", "2", "--json")
        assert code == 0
        losses.append(json.loads(out)["val_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
