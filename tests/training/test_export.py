"""Checkpoints made saved models: the bytes that a run's end saves, without its data, in little memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from siamesenorm.data import arrays
from siamesenorm.residual import ConfigError
from siamesenorm.training import form
from siamesenorm.training.evaluate import evaluate, held_out_sequences
from siamesenorm.training.export import export
from siamesenorm.training.recipe_files import load
from siamesenorm.training.run import train
from siamesenorm.training.run_folder import RunFolder, read_metrics
from tests.training.measured import WARM
from tests.training.test_memory import MIXTURE, RECIPE
from tests.training.test_run import Killed, kill
from tests.training.tiny import Watcher
from tests.training.tiny_images import write_recipes

ROOT = Path(__file__).parents[2]
KINDS = {
    "dense": ["train.ema_decay=0.9", "model.config.tie_word_embeddings=true"],
    "mixture": ["model.host=olmoe", "model.config.num_experts=4", "model.config.num_experts_per_tok=2"],
    "gpt2": ["model.host=gpt2", "model.scheme=hyper", "model.config={n_embd: 16, n_layer: 2, n_head: 2}"],
}


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_card(found):
    return {path: content for path, content in found.items() if path != Path("README.md")}


def unreachable(*_, **__):
    raise AssertionError("the data is not needed")


@pytest.mark.parametrize("kind", ["dense", "mixture", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_last_checkpoint_is_what_the_run_saved(tiny, tmp_path, monkeypatch, kind):
    train(tiny(*KINDS[kind]), tmp_path / "run", Watcher())
    monkeypatch.setattr(arrays, "prepare", unreachable)
    made = export(tmp_path / "run", tmp_path / "model", step=7)
    saved = without_card(files(tmp_path / "run" / "model"))
    assert without_card(files(tmp_path / "model")) == saved
    assert Path("tokenizer.json") in saved
    assert (made.step, made.averaged, made.passed_over) == (7, kind == "dense", ())
    assert made.params == json.loads((tmp_path / "run" / "summary.json").read_text())["params"]
    assert (made.files, made.bytes) == (1, len(saved[Path("model.safetensors")]))
    # Loaded and saved again, they are the same bytes.
    AutoModelForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again")[Path("model.safetensors")] == saved[Path("model.safetensors")]
    assert {path.name for path in tmp_path.iterdir()} >= {"run", "model", "again"}
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("name", [pytest.param("tiny-vit", marks=pytest.mark.slow), "tiny-dit"])
def test_models_of_images_are_exported_with_what_belongs_to_them(tmp_path, name):
    write_recipes(tmp_path)
    recipe = load(str(tmp_path / f"{name}.yaml"), [] if name == "tiny-vit" else ["sample.per_class=0"])
    train(recipe, tmp_path / "run", Watcher())
    export(tmp_path / "run", tmp_path / "model")
    saved = without_card(files(tmp_path / "run" / "model"))
    assert without_card(files(tmp_path / "model")) == saved
    assert Path("preprocessor_config.json" if name == "tiny-vit" else "vae/config.json") in saved
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.library_name == ("transformers" if name == "tiny-vit" else "diffusers")
    assert "images seen | 2,800" in card.text


def test_a_step_of_an_unfinished_run_is_the_model_that_was_validated_there(tiny, tmp_path):
    with pytest.raises(Killed):
        train(tiny("train.validate_every=2"), tmp_path / "run", Watcher(7, kill))
    export(tmp_path / "run", tmp_path / "model", step=4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    sequences = held_out_sequences(arrays.prepare().held_out(), 16, 4)
    found = evaluate(model, sequences, batch_size=4, device=torch.device("cpu"))
    line = read_metrics(tmp_path / "run" / "metrics.jsonl")[3]
    assert found.loss == pytest.approx(line["val_loss"], rel=1e-6)
    text = (tmp_path / "model" / "README.md").read_text()
    assert "after step 4 of 7." in text
    assert f"| validation loss (nats per token) | {line['val_loss']:.4g} |" in text
    assert f"| loss (nats per token) over the last batch | {line['loss']:.4g} |" in text
    assert "| tokens seen | 256 |" in text
    # Without a step it is the newest.
    assert export(tmp_path / "run", tmp_path / "newest").step == 6


def test_raw_weights_are_those_of_a_run_that_does_not_average(tiny, tmp_path):
    train(tiny("train.ema_decay=0.9"), tmp_path / "averaging", Watcher())
    train(tiny(), tmp_path / "plain", Watcher())
    export(tmp_path / "averaging", tmp_path / "raw", raw=True)
    export(tmp_path / "averaging", tmp_path / "average")
    plain, raw, average = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "plain" / "model", tmp_path / "raw", tmp_path / "average")
    )
    for name, weight in plain.items():
        assert torch.equal(raw[name], weight)
    assert not all(torch.equal(average[name], weight) for name, weight in plain.items())
    assert "averaged with decay 0.9" in (tmp_path / "average" / "README.md").read_text()
    card = (tmp_path / "raw" / "README.md").read_text()
    assert "averaged" not in card
    # What was measured is the average.
    assert "validation loss" in (tmp_path / "average" / "README.md").read_text()
    assert "validation loss" not in card
    with pytest.raises(ConfigError, match="no average of its weights"):
        export(tmp_path / "plain", tmp_path / "other", raw=True)


def test_what_cannot_be_exported_is_refused(tiny, tmp_path, monkeypatch):
    train(tiny(), tmp_path / "run", Watcher())
    run, out = tmp_path / "run", tmp_path / "model"

    def refused(match, path=run, to=out, **options):
        with pytest.raises(ConfigError, match=match):
            export(path, to, **options)
        assert not out.exists()

    refused("holds no run", path=tmp_path)
    refused(r"no checkpoint of step 5; there are those of 6, 7", step=5)
    refused("is there already", to=run)
    refused("is there already", to=run / "config.yaml")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            export(run, tmp_path / "full" / "model")
    assert list((tmp_path / "full").iterdir()) == []
    # Found as late as can be: a folder stands where the file of weights belongs.
    with monkeypatch.context() as patched:
        patched.setattr(form.shutil, "copytree", lambda _, to, **more: (to / "model.safetensors").mkdir(parents=True))
        refused("cannot write the weights", to=tmp_path / "late" / "model")
    assert list((tmp_path / "late").iterdir()) == []

    # A newer checkpoint that was damaged is passed over, but not where it was asked for.
    data = max((run / "checkpoints" / "step7" / "model_and_optim").iterdir(), key=lambda path: path.stat().st_size)
    whole = data.read_bytes()
    data.write_bytes(whole[:-100])
    refused("step7 is not used: its file .* bytes instead of", step=7)
    made = export(run, tmp_path / "older")
    assert (made.step, len(made.passed_over)) == (6, 1)
    assert "step7 is not used" in made.passed_over[0]
    # Of the right size and still wrong.
    data.write_bytes(bytes(len(whole)))
    refused("step7 cannot be read", step=7)
    shutil.rmtree(run / "checkpoints" / "form")
    refused("did not write down what is saved beside weights", step=6)
    shutil.rmtree(run / "checkpoints")
    refused("has ended, and its checkpoints are gone, .* is its model")
    (run / "summary.json").unlink()
    refused("has no checkpoint yet")


def test_a_folder_that_a_run_started_from_is_no_name_on_the_hub_later(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(tiny("train.steps=2"), tmp_path / "first", Watcher())
    shutil.copytree("first/model", "models/upcycled")
    changes = ("model.pretrained=models/upcycled", "model.config={}", "train.steps=2", "train.checkpoint_every=1")
    train(tiny(*changes), tmp_path / "run", Watcher())
    shutil.rmtree("models")
    export(tmp_path / "run", tmp_path / "model")
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.base_model is None
    assert "| trained on from | upcycled |" in card.text
    assert "models/upcycled" not in card.text


def test_the_card_says_what_a_run_did_and_names_no_places(tiny, tmp_path, monkeypatch):
    train(tiny("model.options.x_init=0.5", "train.steps=2"), tmp_path / "origin", Watcher())
    origin = tmp_path / "origin" / "model"
    recipe = tiny("model.options.x_init=0.5", f"model.pretrained={origin}", "model.config={}", "seed=3")
    summary = train(recipe, tmp_path / "run", Watcher()).summary
    card = ModelCard.load(tmp_path / "run" / "model" / "README.md")
    assert card.data.to_dict()["library_name"] == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["siamesenorm", "residual-scheme:siamese"]
    assert card.data.base_model is None
    assert {(each.metric_type, each.metric_value) for each in card.data.eval_results} == {
        ("loss", summary["val_loss"]),
        ("perplexity", summary["val_ppl"]),
    }
    for said in (
        "with the residual scheme `siamese:x=hybrid:x_init=0.5`, trained by the recipe `tiny` with seed 3",
        "| `x_init` | `0.5` |",
        '| `depth_scale` | `"code"` |',
        f"| SHA-256 | `{summary['corpus_sha256']}` |",
        "| tokens seen | 448 |",
        f"| bits per byte of the held-out text | {summary['bits_per_byte']:.4g} |",
        "| trained on from | model |",
        "arXiv:2602.08064",
    ):
        assert said in card.text
    assert str(tmp_path) not in card.text
    # The recipe in it is the run's, but for places.
    written = yaml.safe_load(card.text.split("```yaml\n")[1].split("```")[0])
    assert written["optim"] == yaml.safe_load(RunFolder(tmp_path / "run").config.read_text())["optim"]
    # And the way to load it works from where the folder is.
    code = card.text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "run")
    found: dict = {}
    exec(code, found)
    assert found["model"].num_parameters() == summary["params"]
    assert found["tokenizer"].decode([104, 105]) == "hi"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    (tmp_path / "dense.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(MIXTURE))
    few = ["train.steps=1", "train.batch_size=2", "train.micro_batch_size=2", "train.checkpoint_every=1"]
    few += ["data.sequence_length=16", "sample.tokens=0", "model.config.num_hidden_layers=12"]
    recipe = str(tmp_path / "mixture.yaml")
    large = load(recipe, [*few, "model.config.intermediate_size=256"])
    params = train(large, tmp_path / "run", Watcher()).summary["params"]
    train(load(recipe, [*few, *WARM]), tmp_path / "small", Watcher())
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.exported", *(tmp_path / each for each in ("run", "model", "small"))],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    grew = int(done.stdout.split()[-1])
    assert params * 4 > 90e6
    assert grew < 0.4 * params * 4
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 4
