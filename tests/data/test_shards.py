"""What a prepared folder must be like before anything is trained on it."""

import json
import shutil

import numpy as np
import pytest

from siamesenorm.data import arrays, shards
from siamesenorm.data.prepare import Request, prepare
from siamesenorm.data.tokenizer import BYTES
from siamesenorm.residual import ConfigError
from tests.data.watching import Silent


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "corpus.txt"
    source.write_text("\n\n".join(f"document {index} " + "x" * (index % 7) for index in range(60)))
    request = Request(str(source), validation_fraction=0.2, shard_tokens=200)
    return prepare(request, tmp_path / "out", Silent()).arrays.folder


def opened(folder):
    return arrays.prepare(str(folder), cache=folder.parent / "cache")


def change_meta(folder, change):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def test_a_prepared_folder_is_a_source(folder, monkeypatch):
    found = opened(folder)
    assert found.source == str(folder)
    assert len(found.train_paths) > 3
    tokens = np.concatenate([np.fromfile(path, np.uint16) for path in found.train_paths])
    assert len(tokens) == found.train.tokens
    assert found.train.sequences(16) == sum(shard.tokens // 16 for shard in found.train.shards)
    assert sum(map(len, found.held_out())) == found.validation.tokens
    assert found.held_out_bytes_per_token == found.validation.bytes / found.validation.tokens
    assert found.tokenizer(77).model_max_length == 77
    # A relative path is the same source.
    monkeypatch.chdir(folder.parent)
    assert arrays.prepare("out", cache=folder.parent / "cache") == found
    assert arrays.vocabulary("out") == found.vocabulary


def test_arrays_are_read_as_a_whole_once(folder, monkeypatch):
    read = []
    original = shards._check_shard
    monkeypatch.setattr(shards, "_check_shard", lambda path, *rest: (read.append(path.name), original(path, *rest)))
    first = opened(folder)
    count = len(first.train.shards) + len(first.validation.shards)
    assert len(read) == count
    assert opened(folder) == first
    assert len(read) == count
    # What was touched is read again, and nothing else.
    (folder / "train-00001.npy").touch()
    assert opened(folder) == first
    assert read[count:] == ["train-00001.npy"]


def overwrite(folder, token):
    tokens = np.memmap(folder / "train-00001.npy", dtype=np.uint16, mode="r+")
    tokens[7] = token
    tokens.flush()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "meta.json").write_text('{"format": 1'), "meta.json cannot be read"),
        (lambda f: (f / "meta.json").write_text("[]"), "meta.json is damaged"),
        (lambda f: (f / "meta.json").write_text('{"format": 1}'), "meta.json is damaged: KeyError at 'vocab_size'"),
        (lambda f: change_meta(f, lambda meta: meta["train"].update(documents=-1)), "meta.json is damaged"),
        (lambda f: change_meta(f, lambda meta: meta["train"]["shards"][0].update(file="../a")), "no file name"),
        (lambda f: change_meta(f, lambda meta: meta.update(format=99)), "later version of siamesenorm"),
        (lambda f: change_meta(f, lambda meta: meta.update(dtype="uint32")), "are uint32; a vocabulary of 258"),
        (lambda f: change_meta(f, lambda meta: meta.update(dtype="float16")), "are float16"),
        (lambda f: change_meta(f, lambda meta: meta.update(eos_id=5)), "changed by hand"),
        (lambda f: change_meta(f, lambda meta: meta["train"]["shards"].pop()), "changed by hand"),
        (lambda f: (f / "train-00000.npy").unlink(), "train-00000.npy cannot be read: No such file"),
        (lambda f: (f / "train-00000.npy").write_bytes(b"x" * 10), "train-00000.npy has 10 bytes; "),
        (lambda f: np.save(f / "train-00000.npy", np.zeros(99, np.uint16)), "numpy's file header"),
        (lambda f: overwrite(f, 258), "train-00001.npy holds token 258 at position 7, above the vocabulary of 258"),
        (lambda f: overwrite(f, 3), "train-00001.npy has changed since it was prepared"),
    ],
)
def test_a_damaged_folder_is_refused(folder, damage, words):
    opened(folder)
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        opened(folder)
    assert words in str(caught.value)


def test_a_tokeniser_that_is_not_the_arrays_is_refused(folder):
    found = opened(folder)
    path = folder / "tokenizer" / "tokenizer.json"
    facts = json.loads(path.read_text())
    facts["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(facts))
    # Before anything is trained on them, and not when the trained model is saved.
    for take in (found.tokenizer, lambda: opened(folder)):
        with pytest.raises(ConfigError, match="is not the one that made the arrays"):
            take()
    path.unlink()
    for take in (found.tokenizer, lambda: opened(folder)):
        with pytest.raises(ConfigError, match="cannot load the tokeniser"):
            take()
    shutil.rmtree(folder / "tokenizer")
    for take in (found.tokenizer, lambda: opened(folder)):
        with pytest.raises(ConfigError, match="tokenizer is missing; delete the folder"):
            take()


def test_what_is_not_prepared_is_no_source(folder, tmp_path):
    (tmp_path / "raw").mkdir()
    for path in (tmp_path / "raw", tmp_path / "corpus.txt"):
        with pytest.raises(ConfigError, match="is not prepared; 'siamesenorm data prepare"):
            opened(path)
    with pytest.raises(ConfigError, match="unknown data source"):
        opened(tmp_path / "nowhere")


def test_one_document_longer_than_a_shard_has_one_of_its_own(tmp_path):
    writer = shards.ShardWriter(tmp_path, "train", BYTES, shard_tokens=10)
    for length in (3, 5, 30, 2, 7):
        writer.write(np.zeros(length, np.uint16), length)
    writer.finish_shard()
    assert [shard.tokens for shard in writer.part().shards] == [10, 31, 3, 8]
    assert writer.part().bytes == 47
