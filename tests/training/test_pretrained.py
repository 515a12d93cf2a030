"""Training on from a saved model: plain or rewired, in a folder, a run or the hub's cache."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import siamesenorm
from siamesenorm import hosts
from siamesenorm.data import byte_tokenizer, prepare
from siamesenorm.data import tokenizer as tokenizers
from siamesenorm.data.prepare import Request
from siamesenorm.residual import ConfigError
from siamesenorm.training import pretrained
from siamesenorm.training.build import build_model, check, empty_model
from siamesenorm.training.recipe import Recipe
from siamesenorm.training.run import train
from siamesenorm.training.run_folder import RunFolder, read_metrics
from tests.data.watching import Silent
from tests.hosts.tiny import host
from tests.training.tiny import Watcher

IDS = torch.arange(24).view(2, 12)
BYTES = {
    "vocab_size": byte_tokenizer.VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
FAMILIES = {"llama": {}, "olmoe": {"num_experts": 4, "num_experts_per_tok": 2}}


def saved(folder: Path, family: str = "llama", *, tokenizer: bool = True, **changes):
    """A plain model in a folder, away from its initial values."""
    model = host(family, **{**BYTES, **FAMILIES.get(family, {}), **changes})
    model.save_pretrained(folder)
    if tokenizer:
        byte_tokenizer.build().save_pretrained(folder)
    return model


Recipes = Callable[..., Recipe]


@pytest.fixture
def recipes(tiny: Recipes, tmp_path: Path) -> Recipes:
    """Makes a recipe that starts from ``<tmp_path>/saved`` under a scheme, with overrides."""

    def make(scheme: str = "pre", *overrides: str) -> Recipe:
        given = dict(override.split("=", 1) for override in overrides)
        options = {"model.options.x": "hybrid"} if scheme == "siamese" else {}
        base = {"model.scheme": scheme, "model.pretrained": str(tmp_path / "saved"), "model.config": "{}"}
        return tiny(*(f"{key}={value}" for key, value in {**base, **options, **given}.items()))

    return make


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def refuses(recipe: Recipe, match: str) -> None:
    """Without weights already, in one line."""
    with pytest.raises(ConfigError, match=match) as caught:
        check(recipe)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_pre_norm_computes_what_the_saved_model_does(family, recipes, tmp_path):
    plain = saved(tmp_path / "saved", family)
    model = build_model(recipes("pre", f"model.host={family}"))
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-5)
    assert len(hosts.blocks(model)) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_another_scheme_keeps_the_weights(family, recipes, tmp_path, caplog):
    plain = saved(tmp_path / "saved", family)
    with caplog.at_level(logging.WARNING):
        model = build_model(recipes("siamese", f"model.host={family}"))
    ours, theirs = model.state_dict(), plain.state_dict()
    removed = {f"model.layers.{block}.input_layernorm.weight" for block in range(2)}
    assert theirs.keys() - ours.keys() == removed
    assert [name for name in theirs.keys() & ours.keys() if not torch.equal(ours[name], theirs[name])] == []
    assert "layers.0.input_layernorm" in caplog.text
    assert not torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(model), logits(siamesenorm.rewire(plain, "siamese", x="hybrid")))


def test_weights_are_float32_whatever_was_saved(recipes, tmp_path):
    host("llama", **BYTES).bfloat16().save_pretrained(tmp_path / "saved")
    for model in (build_model(recipes("siamese")), empty_model(recipes("siamese"))):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("rewired", [False, True])
def test_the_empty_model_is_the_same_without_weights(rewired, recipes, tmp_path):
    model = saved(tmp_path / "saved")
    if rewired:
        siamesenorm.rewire(model, "siamese", x="hybrid").save_pretrained(tmp_path / "saved")
    recipe = recipes("siamese", "model.config.rms_norm_eps=1e-4")
    full, empty = build_model(recipe), empty_model(recipe)
    assert type(empty) is type(full)
    assert empty.config.to_dict() == full.config.to_dict()
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in full.named_parameters()}
    assert full.model.layers[0].post_attention_layernorm.eps == 1e-4


def test_a_check_reads_no_weights(recipes, tmp_path):
    saved(tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").write_bytes(b"not weights")
    check(recipes())
    with pytest.raises(ConfigError, match="cannot load the model"):
        build_model(recipes())


def test_a_rewired_model_goes_on_as_it_is(recipes, tmp_path):
    model = siamesenorm.rewire(saved(tmp_path / "saved"), "siamese", x="hybrid")
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(build_model(recipes("siamese"))), logits(model))
    assert pretrained.find(recipes("siamese")).saved_scheme == hosts.scheme_of(model.config)
    refuses(recipes("pre"), r"saved with the scheme siamese \(.*x=hybrid.*\), and the recipe asks for pre")
    refuses(recipes("siamese", "model.options.first_block_pre=true"), r"first_block_pre=False.*first_block_pre=True")


def test_a_run_stands_for_its_model(recipes, tiny, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.claim(tiny("model.scheme=pre"))
    recipe = recipes("pre", f"model.pretrained={run.path}")
    refuses(recipe, "has not finished")
    model = saved(run.model)
    assert torch.allclose(logits(build_model(recipe)), logits(model), atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["model.config.rms_norm_epz=1"], "has no key 'rms_norm_epz'.*rms_norm_eps"),
        (["model.config.hidden_size=32"], r"changes the weights.*\(258, 16\) and would be \(258, 32\), and \d+ more"),
        (["model.config.num_hidden_layers=3"], "layers.2.*not there"),
        (["model.config.tie_word_embeddings=true"], "lm_head.weight is .258, 16. and would be gone"),
        (["model.config.num_attention_heads=3", "model.config.head_dim=null"], "does not fit|changes the weights"),
        (["model.config.max_position_embeddings=many"], "does not fit model.pretrained"),
        (["model.config.dtype=bfloat16"], "model.config.dtype cannot be changed"),
        (["model.host=olmoe"], "is a model of host llama, and model.host is olmoe"),
        (["data.sequence_length=64"], "longer than the model's max_position_embeddings"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, match, recipes, tmp_path):
    saved(tmp_path / "saved")
    refuses(recipes("pre", *overrides), match)


def test_changes_that_keep_the_weights_are_made(recipes, tmp_path):
    saved(tmp_path / "saved")
    recipe = recipes("pre", "model.config.attention_dropout=0.25", "model.config.max_position_embeddings=48")
    model = build_model(recipe)
    assert model.config.attention_dropout == 0.25
    assert model.model.layers[1].self_attn.attention_dropout == 0.25
    assert model.config.max_position_embeddings == 48
    # The ids are the saved model's, not the data's.
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (None, 256, 257)


def test_folders_without_a_model(recipes, tmp_path):
    folder = tmp_path / "saved"
    refuses(recipes("pre", f"model.pretrained={tmp_path / 'a' / 'b' / 'c'}"), "there is no such folder")
    folder.mkdir()
    refuses(recipes(), "holds no saved model: it has no config.json")
    (folder / "config.json").write_text("{")
    refuses(recipes(), "holds no weights")
    (folder / "model.safetensors").touch()
    refuses(recipes(), "cannot load model.pretrained")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    refuses(recipes(), "is a model of type bert; supported are deit")
    file = tmp_path / "file"
    file.touch()
    refuses(recipes("pre", f"model.pretrained={file}"), "is a file")


def test_a_quantised_model_is_refused(recipes, tmp_path):
    saved(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    refuses(recipes(), "is quantised")


def test_weights_that_are_missing_are_named(recipes, tmp_path):
    model = saved(tmp_path / "saved")
    model.model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"missing keys.*lm_head\.weight"):
        build_model(recipes())


def test_the_vocabulary_may_be_larger_than_the_tokenisers_and_not_smaller(recipes, tmp_path):
    saved(tmp_path / "saved", vocab_size=1000)
    assert check(recipes()).config.vocab_size == 1000
    shutil.rmtree(tmp_path / "saved")
    saved(tmp_path / "saved", vocab_size=257, pad_token_id=None)
    refuses(recipes(), "has 257 tokens, and the data's tokeniser has 258")


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Path, transformers.PreTrainedTokenizerBase]:
    """Data cut by a tokeniser of their own, and that tokeniser."""
    texts = [f"document {index}: {'ab' * index}" for index in range(200)]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = tokenizers.train_bpe(texts, 270)
    tokenizer.save_pretrained(tmp_path / "bpe")
    folder = tmp_path / "prepared"
    prepare.prepare(Request(str(source), tokenizer=str(tmp_path / "bpe"), validation_fraction=0.2), folder, Silent())
    return folder, tokenizer


def test_the_data_must_be_cut_by_the_models_tokeniser(recipes, tmp_path, prepared):
    folder, tokenizer = prepared
    ours = f"data.source={folder}"
    saved(tmp_path / "saved", vocab_size=300)
    refuses(recipes("pre", ours), f"another tokeniser.*data prepare' with --tokenizer {tmp_path / 'saved'}")
    check(recipes("pre"))
    tokenizer.save_pretrained(tmp_path / "saved")
    check(recipes("pre", ours))
    refuses(recipes("pre"), "another tokeniser")
    # A model that was saved without one is taken at its word.
    shutil.rmtree(tmp_path / "saved")
    saved(tmp_path / "saved", vocab_size=300, tokenizer=False)
    check(recipes("pre", ours))
    check(recipes("pre"))


def test_without_the_data_the_saved_model_alone_is_checked(recipes, tmp_path):
    saved(tmp_path / "saved", vocab_size=100, eos_token_id=None, pad_token_id=None)
    elsewhere = "data.source=not/here"
    assert check(recipes("pre", elsewhere), needs_data=False).config.vocab_size == 100
    with pytest.raises(ConfigError):
        check(recipes("pre", elsewhere))


def test_training_goes_on_from_the_saved_model_and_resumes(recipes, tmp_path):
    saved(tmp_path / "saved", attention_dropout=0.2)
    recipe = recipes("siamese")
    unbroken = train(recipe, tmp_path / "unbroken", Watcher())
    assert unbroken.status == "finished"
    first = read_metrics(tmp_path / "unbroken" / "metrics.jsonl")[0]["loss"]
    assert first > read_metrics(tmp_path / "unbroken" / "metrics.jsonl")[-1]["loss"]

    class Killed(BaseException):
        pass

    def kill():
        raise Killed

    with pytest.raises(Killed):
        train(recipe, tmp_path / "broken", Watcher(at=5, act=kill))
    assert train(recipe, tmp_path / "broken", Watcher()).status == "finished"
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("broken", "unbroken"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    # Two runs are told apart by what they start from.
    with pytest.raises(ConfigError, match=r"model\.pretrained"):
        train(recipes("siamese", f"model.pretrained={tmp_path / 'broken'}"), tmp_path / "broken", Watcher())
    # A run's model can be trained on in its turn.
    again = train(recipes("siamese", f"model.pretrained={tmp_path / 'broken'}"), tmp_path / "third", Watcher())
    assert again.status == "finished"


FROM_THE_HUB = """
import sys
from siamesenorm.residual import ConfigError
from siamesenorm.training.build import build_model, check
from siamesenorm.training.recipe_files import load
recipe = load(sys.argv[1], ["model.scheme=pre", "model.config={}", f"model.pretrained={sys.argv[2]}"])
try:
    check(recipe)
    print(build_model(recipe).lm_head.weight.sum().item())
except ConfigError as error:
    print(error)
"""


def test_a_name_on_the_hub(recipes, tmp_path):
    """As the hub's client finds a model in its cache when there is no connection."""
    recipes()
    repository = tmp_path / "home" / "hub" / "models--org--tiny"
    model = saved(repository / "snapshots" / "1234")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1234")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def said(name: str) -> str:
        command = [sys.executable, "-c", FROM_THE_HUB, str(tmp_path / "tiny.yaml"), name]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    assert float(said("org/tiny")) == pytest.approx(model.lm_head.weight.sum().item())
    missing = said("org/nothing")
    assert missing.startswith("cannot load model.pretrained=org/nothing, which is no folder here and cannot be had")
    assert "\n" not in missing
