"""``siamesenorm probe``, in this process, on tiny runs of every modality."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas
import pytest
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from siamesenorm import hub
from tests.cli.test_commands import refused, run
from tests.training.tiny_images import write_recipes

__all__ = ["run"]

SHORT = ["train.steps=2", "schedule.warmup_steps=1", "train.validate_every=2"]


def trained(run, out, *overrides):
    assert run("train", run.recipe, *SHORT, *overrides, "--out", out)[0] == 0


def test_two_runs_are_compared(run):
    trained(run, "ours")
    trained(run, "theirs", "model.scheme=pre")
    code, out, err = run("probe", "ours", "theirs", "--out", "compared", "--batches", "1", "--only", "lens")
    assert (code, err) == (0, "")
    assert "without the deepest block" in out
    assert "compared/" in out
    found = json.loads(Path("compared/probe.json").read_text())
    assert [model["label"] for model in found["models"]] == ["siamese:x=hybrid", "pre"]
    depth = pandas.read_parquet("compared/depth.parquet")
    assert depth.groupby("model").size().to_dict() == {"siamese:x=hybrid": 3, "pre": 3}
    # Four held-out sequences of sixteen tokens, all in one batch: what the run was validated on.
    for model in found["models"]:
        assert model["counted"] == 4 * 15
        summary = json.loads(Path(model["path"], "summary.json").read_text())
        assert model["loss"] == pytest.approx(summary["val_loss"], rel=1e-5)
    assert "<title>A look inside 2 models</title>" in Path("compared/report.html").read_text()

    code, out, err = run("probe", "ours", "--batches", "1", "--only", "sites,overflow", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(Path("ours/probe/probe.json").read_text())
    (model,) = json.loads(out)["models"]
    assert model["overflow"] == {"first": None}
    assert {row["stream"] for row in model["sites"]} == {"X", "Y"}

    refused(run("probe", "ours", "ours"), "'ours' is given twice")
    refused(run("probe", "ours", "--only", "sites,lense"), "no probe 'lense'", "'lens'")
    refused(run("probe", "ours", "--only", ""), "no probe ''", "sites")
    refused(run("probe", "ours/model", "--only", "stability"), "ours/model", "no run")
    refused(run("probe", "ours", "--only", "stability", "--source", "digits"), "--source")
    refused(run("probe", "ours", "--source", "nothing"), "unknown data source")
    refused(run("probe", "ours", "--batches", "0"), "--batches")
    refused(run("probe", "ours", "--out", "theirs"), "not empty")
    refused(run("probe", "ours", "--out", "ours/summary.json"), "is a file")
    refused(run("probe", "nowhere"), "nowhere")
    refused(run("probe"), "MODEL_OR_RUN")
    Path("empty").mkdir()
    refused(run("probe", "ours", "empty"), "empty")
    Path("unfinished").mkdir()
    shutil.copy("ours/config.yaml", "unfinished")
    refused(run("probe", "unfinished"), "has not finished")
    weights = Path("theirs/model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    refused(run("probe", "theirs"), "theirs/model")
    assert not Path("theirs/probe").exists()


def test_a_run_that_diverged_has_a_stability(run):
    code, *_ = run("train", run.recipe, "optim.lr=1e36", "train.max_grad_norm=null", "--out", "run")
    assert code == 1
    code, out, err = run("probe", "run", "--only", "stability")
    assert (code, err) == (0, "")
    assert "diverged" in out
    assert "too few steps" in out
    summary = json.loads(Path("run/summary.json").read_text())
    (model,) = json.loads(Path("run/probe/probe.json").read_text())["models"]
    assert model["stability"]["diverged"] == {
        "step": summary["diverged_at_step"],
        "where": summary["diverged_where"],
    }
    assert "its run diverged at step" in Path("run/probe/report.html").read_text()
    refused(run("probe", "run"), "has not finished")


@pytest.mark.slow
def test_all_that_there_is_and_a_model_without_a_run(run):
    steps = ["train.steps=60", "train.validate_every=60", "train.checkpoint_every=60"]
    assert run("train", run.recipe, *steps, "--out", "ours")[0] == 0
    code, _, err = run("probe", "ours")
    assert (code, err) == (0, "")
    (of_run,) = json.loads(Path("ours/probe/probe.json").read_text())["models"]
    assert of_run["stability"]["loss"]["judged"] == 10
    assert len(pandas.read_parquet("ours/probe/trace.parquet")) == 60

    options = ["--batches", "2", "--batch-size", "2", "--json"]
    code, out, err = run("probe", "ours/model", *options)
    assert (code, err) == (0, "")
    (of_model,) = json.loads(out)["models"]
    assert (of_model["stability"], of_model["overflow"]) == (None, {"first": None})
    assert of_model["sha256"] == of_run["sha256"]


@pytest.mark.slow
def test_a_plain_model_is_looked_at_as_pre_norm(run):
    trained(run, "theirs", "model.scheme=pre")
    rewired = hub.load("theirs/model")
    plain = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in rewired.config.to_dict().items() if "residual" not in k}))
    plain.load_state_dict(rewired.state_dict())
    shutil.copytree("theirs/model", "plain")
    for path in Path("plain").glob("*.safetensors"):
        path.unlink()
    plain.save_pretrained("plain")
    assert transformers.AutoConfig.from_pretrained("plain").model_type == "llama"
    options = ["--batches", "1", "--batch-size", "2", "--only", "sites", "--only", "lens", "--json"]
    found = []
    for name in ("theirs/model", "plain"):
        code, out, _ = run("probe", name, *options)
        assert code == 0
        found.append(json.loads(out)["models"][0])
    assert found[1]["scheme"] == "pre"
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-5)
    for ours, theirs in zip(found[1]["sites"], found[0]["sites"], strict=True):
        assert ours["rms"] == pytest.approx(theirs["rms"], rel=1e-5)


@pytest.mark.slow
def test_models_of_images(run, tmp_path):
    write_recipes(tmp_path)
    for name in ("tiny-vit", "tiny-dit"):
        recipe = str(tmp_path / f"{name}.yaml")
        assert run("train", recipe, *SHORT, "train.batch_size=40", "--out", name)[0] == 0
        code, out, err = run("probe", name, "--batches", "2", "--json")
        assert (code, err) == (0, "")
        (model,) = json.loads(out)["models"]
        summary = json.loads(Path(name, "summary.json").read_text())
        # Forty images were held out, which is one batch.
        assert (model["counted"], model["counts"]) == (40, "images")
        assert model["loss"] == pytest.approx(summary["val_loss"], rel=1e-4)
        assert len(model["sites"]) == 8
        assert model["depth"][0]["divergence"] > 0
        assert Path(name, "probe", "report.html").is_file()
    refused(run("probe", "tiny-vit", "tiny-dit"), "nats per image", "squared error", "two commands")
