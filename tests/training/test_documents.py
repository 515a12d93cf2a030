"""Documents kept apart in a sequence: a document's logits are those it has alone."""

import json

import numpy as np
import pytest
import torch
import yaml

from siamesenorm import hosts
from siamesenorm.data.prepare import Request, prepare
from siamesenorm.residual import ConfigError
from siamesenorm.training import run as runs
from siamesenorm.training.build import build_model, check
from siamesenorm.training.documents import DocumentMask
from siamesenorm.training.evaluate import IGNORED, evaluate, held_out_sequences
from siamesenorm.training.processes import ALONE
from siamesenorm.training.recipe_files import load
from siamesenorm.training.tasks import task_of
from tests.data.watching import Silent
from tests.training.tiny import TREE, Watcher

EOS = 7
SHAPES = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 2, "max_position_embeddings": 64},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
}  # fmt: skip


def packed():
    """A sequence that begins and ends inside a document, with one of nothing but its end in between."""
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 1, 9, 4)
    documents = [torch.randint(8, 40, (length,), generator=generator) for length in lengths]
    for document in documents[:-1]:
        document[-1] = EOS
    return documents


def model_of(host, x, implementation):
    config = {**SHAPES[host], "vocab_size": 40, "eos_token_id": EOS, "pad_token_id": None, "bos_token_id": None}
    torch.manual_seed(0)
    model = hosts.build(host, config, "siamese", {"x": x}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Away from a fresh model's near-identity, so that attention to a neighbour would show.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("x", ["post", "hybrid"])
@pytest.mark.parametrize("host", SHAPES)
def test_a_documents_logits_are_those_it_has_alone(host, x, implementation):
    model, documents, mask = model_of(host, x, implementation), packed(), DocumentMask(EOS)
    sequence = torch.cat(documents)
    # Another row, so that nothing leaks between rows either.
    ids = torch.stack([sequence, sequence.flip(0)])
    with torch.no_grad():
        together = model(input_ids=ids, use_cache=False, **mask.inputs(model, ids)).logits[0]
        alone = torch.cat([model(input_ids=document[None], use_cache=False).logits[0] for document in documents])
        unmasked = model(input_ids=ids, use_cache=False).logits[0]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert (unmasked[5:] - alone[5:]).abs().max() > 1e-2


def test_positions_masks_and_labels_by_hand():
    model = model_of("llama", "post", "sdpa")
    ids = torch.tensor([[9, EOS, EOS, 8, 8]])
    made = DocumentMask(EOS).inputs(model, ids)
    assert made["position_ids"].tolist() == [[0, 1, 0, 0, 1]]
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert made["attention_mask"].int().tolist() == [[expected]]
    labels = torch.tensor([[EOS, EOS, 8, 8, IGNORED]])
    assert DocumentMask(EOS).labels(ids, labels).tolist() == [[EOS, IGNORED, IGNORED, 8, IGNORED]]


def test_the_held_out_loss_is_the_mean_over_documents_alone():
    model, documents, mask = model_of("llama", "hybrid", "sdpa"), packed(), DocumentMask(EOS)
    found = evaluate(model, torch.cat(documents)[None].numpy(), batch_size=1, device=torch.device("cpu"), mask=mask)
    total = 0.0
    for document in documents:
        logits = model(input_ids=document[None]).logits[0, :-1].double()
        total += (
            torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum").item() if len(document) > 1 else 0
        )
    assert found.tokens == sum(len(document) - 1 for document in documents)
    assert found.loss == pytest.approx(total / found.tokens, rel=1e-5)


def test_held_out_sequences_do_not_go_over_a_shards_end():
    shards = [np.arange(10), np.arange(100, 103), np.arange(200, 209)]
    assert held_out_sequences(shards, 4, None).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [200, 201, 202, 203],
                                                            [204, 205, 206, 207]]  # fmt: skip
    assert held_out_sequences(shards, 4, 2).tolist() == [[0, 1, 2, 3], [200, 201, 202, 203]]
    with pytest.raises(ConfigError, match=r"\(22\) make 4 sequences of 4"):
        held_out_sequences(shards, 4, 5)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A recipe on a BPE corpus in several arrays."""
    monkeypatch.setenv("SIAMESENORM_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "corpus.txt"
    source.write_text("\n\n".join(f"document {index} has so many words and so on" for index in range(200)))
    prepare(Request(str(source), train_bpe=280, validation_fraction=0.2, shard_tokens=500), tmp_path / "data", Silent())
    tree = {**TREE, "data": {**TREE["data"], "source": str(tmp_path / "data")}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tree))
    return lambda *overrides: load(str(tmp_path / "tiny.yaml"), overrides)


def test_models_take_their_vocabulary_from_the_data(prepared):
    config = build_model(prepared()).config
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id) == (280, 0, 1)
    assert build_model(prepared("model.config.vocab_size=512")).config.vocab_size == 512
    for size in (279, 513):
        with pytest.raises(ConfigError, match=f"vocabulary of {size} does not match the tokeniser's 280 tokens"):
            check(prepared(f"model.config.vocab_size={size}"))
    with pytest.raises(ConfigError, match="eos_token_id"):
        check(prepared("model.config.eos_token_id=3"))


def test_a_document_end_that_is_padding_too_is_trained(tmp_path):
    from siamesenorm.data.tokenizer import train_bpe

    made = train_bpe(["some text"], 260)
    made.pad_token = made.eos_token
    made.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "corpus.txt").write_text("\n\n".join(map(str, range(50))))
    request = Request(str(tmp_path / "corpus.txt"), tokenizer=str(tmp_path / "tokenizer"), validation_fraction=0.2)
    prepare(request, tmp_path / "data", Silent())
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TREE))
    model = build_model(load(str(tmp_path / "tiny.yaml"), [f"data.source={tmp_path / 'data'}"]))
    assert (model.config.eos_token_id, model.config.pad_token_id) == (0, None)
    ids = torch.tensor([[0, 5]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad[0].abs().sum() > 0


@pytest.mark.parametrize("more", [[], ["data.document_masking=true"]])
def test_runs_on_prepared_data_resume_and_know_their_data(prepared, tmp_path, more):
    recipe = prepared("train.steps=4", *more)
    whole = runs.train(recipe, tmp_path / "whole", Watcher())

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.train(recipe, tmp_path / "run", Watcher(3, stop))
    resumed = runs.train(recipe, tmp_path / "run", Watcher())
    assert resumed.status == "finished"
    assert resumed.summary["val_loss"] == whole.summary["val_loss"]
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["data"]
    meta = json.loads((tmp_path / "data" / "meta.json").read_text())
    assert (config["sha256"], config["tokenizer_sha256"]) == (meta["sha256"], meta["tokenizer_sha256"])
    bytes_per_token = meta["validation"]["bytes"] / meta["validation"]["tokens"]
    assert resumed.summary["bits_per_byte"] == whole.summary["val_loss"] / np.log(2) / bytes_per_token


def test_the_split_into_micro_batches_does_not_change_a_masked_run(prepared, tmp_path):
    off = ["model.config.attention_dropout=0.0", "train.steps=3", "data.document_masking=true"]
    losses = [
        runs.train(prepared(*off, f"train.micro_batch_size={size}"), tmp_path / str(size), Watcher()).summary[
            "val_loss"
        ]
        for size in (1, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    unmasked = runs.train(prepared(*off[:2]), tmp_path / "unmasked", Watcher()).summary
    assert unmasked["val_loss"] != pytest.approx(losses[0], rel=1e-4)


def test_what_cannot_follow_a_mask_is_refused(prepared):
    recipe = prepared("data.document_masking=true")
    model = check(recipe)
    mask = task_of(recipe).objective(model, task_of(recipe).load(ALONE), torch.device("cpu")).mask
    assert mask.eos_id == 0
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match="sdpa and eager, not with 'flash_attention_2'"):
        mask.check(model, 16)
    with pytest.raises(ConfigError, match=r"sliding_window \(8\) is shorter"):
        check(prepared("data.document_masking=true", "model.host=mistral", "model.config.sliding_window=8"))
    check(prepared("data.document_masking=true", "model.host=mistral", "model.config.sliding_window=16"))
