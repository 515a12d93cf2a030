"""Preparing a folder: what is in it, going on after a sudden end, and what is refused."""

import errno
import gzip
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siamesenorm.data import arrays, byte_tokenizer, folders, prepare, shards
from siamesenorm.data import tokenizer as tokenizers
from siamesenorm.data.prepare import Request, held_out
from siamesenorm.data.sources import Reading
from siamesenorm.residual import ConfigError
from tests.data.watching import Silent

WORDS = ["the", "quick", "brown", "fox", "jumps,", "naïve", "漢字", "\t<|end|>", "<|pad|>\n", "and\r\n", "so", "on"]


def texts(count=300, seed=0):
    chosen = random.Random(seed)
    return [f"{index}: {' '.join(chosen.choices(WORDS, k=chosen.randint(1, 40)))}" for index in range(count)]


def write(path: Path, documents) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path) -> Path:
    return write(tmp_path / "corpus.jsonl", texts())


def request(source, **more) -> Request:
    return Request(str(source), **{"validation_fraction": 0.1, "shard_tokens": 3000, **more})


def run(wanted: Request, out: Path):
    return prepare.prepare(wanted, out, Silent())


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def documents_in(found: shards.TokenArrays, part: shards.Part) -> list[list[int]]:
    """The tokens of each document, without its end."""
    out = []
    for shard in part.shards:
        tokens = np.fromfile(found.folder / shard.file, dtype=found.vocabulary.dtype)
        assert len(tokens) == shard.tokens
        assert tokens[-1] == found.vocabulary.eos_id
        ends = np.flatnonzero(tokens == found.vocabulary.eos_id)
        out += [ids.tolist() for ids in np.split(tokens, ends + 1)[:-1]]
    return [ids[:-1] for ids in out]


def bert(folder: Path) -> Path:
    """A tokeniser without an end-of-text token, whose text comes back in lower case."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[UNK]", "[SEP]", "[CLS]", *sorted({word.lower() for text in texts() for word in text.split()})]
    core = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", sep_token="[SEP]", cls_token="[CLS]")
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("how", ["bytes", "bpe"])
def test_text_comes_back_from_the_arrays(corpus, tmp_path, how):
    done = run(request(corpus, train_bpe=400 if how == "bpe" else None), tmp_path / "out")
    found = done.arrays
    tokenizer = found.tokenizer()
    expected = {name: [text for text in texts() if held_out(text.encode(), 0.1) is side] for name, side in
                (("train", False), ("validation", True))}  # fmt: skip
    for name, part in (("train", found.train), ("validation", found.validation)):
        # The names of the special tokens were in the text and are text again.
        assert [tokenizer.decode(ids) for ids in documents_in(found, part)] == expected[name]
        assert part.documents == len(expected[name])
        assert part.bytes == sum(len(text.encode()) for text in expected[name])
        assert all(shard.tokens <= 3000 for shard in part.shards)
    assert len(found.train.shards) > 2
    assert 0.03 < found.validation.documents / 300 < 0.2
    summary = done.summary()
    assert (summary["documents"], summary["skipped"], summary["empty"]) == (300, 0, 0)
    assert summary["bytes_per_token"] == summary["bytes"] / summary["tokens"]
    assert found.vocabulary == tokenizers.vocabulary(tokenizer)
    if how == "bpe":
        assert found.vocabulary.size == 400
        assert summary["bytes_per_token"] > 1.5
    else:
        assert found.vocabulary == tokenizers.BYTES
        assert summary["tokens"] == summary["bytes"] + 300


def test_any_tokeniser_of_transformers(corpus, tmp_path):
    found = run(request(corpus, tokenizer=str(bert(tmp_path / "bert"))), tmp_path / "out").arrays
    assert (found.vocabulary.eos_id, found.vocabulary.pad_id) == (1, 1)
    tokenizer = found.tokenizer()
    assert (tokenizer.eos_token, len(tokenizer)) == ("[SEP]", found.vocabulary.size)
    train = [text for text in texts() if not held_out(text.encode(), 0.1)]
    assert [tokenizer.decode(ids) for ids in documents_in(found, found.train)] == [
        " ".join(text.lower().split()) for text in train
    ]


def test_a_large_vocabulary_is_kept_in_32_bits(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"word{index}": index for index in range(70_000)}, unk_token="word0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="word1").save_pretrained(tmp_path / "large")
    source = write(tmp_path / "a.jsonl", [f"word{index} word{70_000 - index}" for index in range(100, 200)])
    found = run(request(source, tokenizer=str(tmp_path / "large")), tmp_path / "out").arrays
    assert found.vocabulary.dtype is np.uint32
    assert all(first + second == 70_000 for first, second in documents_in(found, found.train))
    assert arrays.prepare(str(tmp_path / "out"), cache=tmp_path / "cache").train.tokens == found.train.tokens


def test_the_vocabulary_is_learnt_from_the_training_split_alone(tmp_path):
    # A word that would be learnt at once if it were seen.
    marked = [f"{index} zyzzyva zyzzyva" for index in range(300)]
    marked = [text for text in marked if held_out(text.encode(), 0.1)]
    made = [
        run(request(write(tmp_path / f"{name}.jsonl", which), train_bpe=350), tmp_path / name).arrays
        for name, which in (("with", texts() + marked), ("without", texts()))
    ]
    assert len(marked) > 20
    assert made[0].validation.documents == made[1].validation.documents + len(marked)
    assert made[0].tokenizer_sha256 == made[1].tokenizer_sha256


@given(st.lists(st.text(max_size=12), max_size=40), st.integers(0, 3), st.floats(0.05, 0.95))
@settings(deadline=None, max_examples=100)
def test_a_document_is_on_one_side_wherever_it_stands(documents, seed, fraction):
    first = {text: held_out(text.encode(), fraction, seed) for text in documents}
    assert all(held_out(text.encode(), fraction, seed) is first[text] for text in reversed(documents * 2))
    # A larger share holds out more, and never fewer.
    assert all(held_out(text.encode(), min(fraction * 1.05, 1), seed) for text in first if first[text])


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=8), min_size=30, max_size=60), st.integers(0, 9))
@settings(deadline=None, max_examples=12)
def test_no_document_is_on_both_sides(tmp_path_factory, documents, seed):
    base = tmp_path_factory.mktemp("split")
    documents += [str(index) for index in range(30)]
    source = write(base / "a.jsonl", documents * 2)
    found = run(request(source, seed=seed, validation_fraction=0.5), base / "out").arrays
    sides = [{bytes(ids) for ids in documents_in(found, part)} for part in (found.train, found.validation)]
    kept = [text.encode() for text in documents if text.encode().strip()]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == set(kept)
    assert found.train.documents + found.validation.documents == 2 * len(kept)


def test_the_seed_and_nothing_else_moves_documents(corpus, tmp_path):
    def validation(name, **more):
        found = run(request(corpus, **more), tmp_path / name).arrays
        return {bytes(ids) for ids in documents_in(found, found.validation)}

    first = validation("a")
    assert validation("b", shard_tokens=500) == first
    assert validation("c", seed=1) != first


class StopError(BaseException):
    """As sudden as a kill: nothing of ours catches it."""


def stop_at(monkeypatch, name, count):
    """Break off in the `count`th call of a writer's method, after half of its work is on disk."""
    calls, original = [], getattr(shards.ShardWriter, name)

    def method(self, *args):
        calls.append(name)
        if len(calls) == count:
            if name == "write":
                original(self, args[0][: len(args[0]) // 2], 0)
                self._file.flush()
            raise StopError
        return original(self, *args)

    monkeypatch.setattr(shards.ShardWriter, name, method)


@pytest.mark.parametrize("how", ["bytes", "bpe", "text", "gz"])
@pytest.mark.parametrize(("name", "count"), [("write", 1), ("write", 100), ("write", 291), ("finish_shard", 1),
                                             ("finish_shard", 3), ("flush", 4), ("flush", 9)])  # fmt: skip
def test_what_was_broken_off_goes_on_to_equal_bytes(corpus, tmp_path, monkeypatch, how, name, count):
    if how == "text":
        corpus = tmp_path / "corpus.txt"
        corpus.write_bytes("<|x|>".join(texts()).encode())
    elif how == "gz":
        corpus = tmp_path / "packed.jsonl.gz"
        corpus.write_bytes(gzip.compress((tmp_path / "corpus.jsonl").read_bytes()))
    wanted = request(
        corpus,
        train_bpe=300 if how == "bpe" else None,
        reading=Reading(document_end="<|x|>" if how == "text" else None),
        shard_tokens=1500 if how == "bpe" else 3000,
    )
    monkeypatch.setattr(prepare, "_BATCH_DOCUMENTS", 17)
    run(wanted, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, name, count)
        with pytest.raises(StopError):
            run(wanted, tmp_path / "out")
    assert not (tmp_path / "out" / "meta.json").exists()
    with pytest.raises(ConfigError, match="has not finished"):
        arrays.prepare(str(tmp_path / "out"), cache=tmp_path / "cache")
    watcher = Silent()
    done = prepare.prepare(wanted, tmp_path / "out", watcher)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert done.status == "finished"
    if (name, count) in {("write", 291), ("finish_shard", 3)}:
        # It did not begin anew.
        assert any("going on after" in note for note in watcher.notes)
        assert watcher.shown[1] < 300


def test_what_a_kill_leaves_half_written_goes_away(corpus, tmp_path, monkeypatch):
    run(request(corpus), tmp_path / "whole")
    for name in ("first", "later"):
        if name == "later":
            with monkeypatch.context() as patch:
                stop_at(patch, "finish_shard", 3)
                with pytest.raises(StopError):
                    run(request(corpus), tmp_path / name)
        else:
            (tmp_path / name).mkdir()
        (tmp_path / name / ".progress.json.123").write_text('{"for')
        (tmp_path / name / ".meta.json.45").write_text("")
        run(request(corpus), tmp_path / name)
        assert content(tmp_path / name) == content(tmp_path / "whole")


def test_broken_off_again_and_again(corpus, tmp_path, monkeypatch):
    wanted = request(corpus, shard_tokens=800)
    run(wanted, tmp_path / "whole")
    chosen, broken = random.Random(3), 0
    while not (tmp_path / "out" / "meta.json").exists():
        with monkeypatch.context() as patch:
            stop_at(patch, "write", chosen.randint(5, 60))
            try:
                run(wanted, tmp_path / "out")
            except StopError:
                broken += 1
    assert broken >= 5
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_finished_folder_says_so_and_stays_as_it_is(corpus, tmp_path):
    first = run(request(corpus), tmp_path / "out")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = run(request(corpus), tmp_path / "out")
    assert (first.status, again.status) == ("finished", "already finished")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == stamps
    ours = {**first.summary(), "status": 0, "seconds": 0}
    assert {**again.summary(), "status": 0, "seconds": 0} == ours


OTHERS = {
    "seed": {"seed": 1},
    "validation-fraction": {"validation_fraction": 0.2},
    "shard-tokens": {"shard_tokens": 4000},
    "train-bpe": {"train_bpe": 300},
    "text-field": {"reading": Reading(text_field="other")},
    "split": {"reading": Reading(split="other")},
}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_are_refused_and_named(corpus, tmp_path, monkeypatch, name, finished):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        if finished:
            run(request(corpus), out)
        else:
            stop_at(patch, "finish_shard", 4)
            with pytest.raises(StopError):
                run(request(corpus), out)
    before = content(out)
    with pytest.raises(ConfigError, match=f"--{name}: .* there, .* asked for"):
        run(request(corpus, **OTHERS[name]), out)
    assert content(out) == before


def test_a_source_that_changed_is_refused(corpus, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, "finish_shard", 2)
        with pytest.raises(StopError):
            run(request(corpus), out)
    before = content(out)
    other = write(tmp_path / "other.jsonl", texts(200))
    with pytest.raises(ConfigError, match=r"--source: '.*corpus.jsonl' there, '.*other.jsonl' asked for"):
        run(request(other), out)
    corpus.write_text(corpus.read_text() + json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ConfigError, match="has changed since the preparation"):
        run(request(corpus), out)
    assert content(out) == before


def broken(path: Path) -> Path:
    """A corpus with two bad lines, the first behind some shards."""
    lines = [json.dumps({"text": text}) for text in texts()]
    lines[200], lines[250] = "{broken", json.dumps({"text": ""})
    lines.insert(220, json.dumps({"txt": "x"}))
    path.write_text("\n".join(lines))
    return path


def test_skip_bad_goes_on_where_a_bad_line_stopped(tmp_path):
    source = broken(tmp_path / "a.jsonl")
    whole = run(request(source, skip_bad=True), tmp_path / "whole")
    assert whole.summary()["skipped_reasons"] == {"broken JSON": 1, "no text field": 1}
    assert (whole.summary()["empty"], whole.summary()["documents"]) == (1, 298)
    with pytest.raises(ConfigError, match=r"a.jsonl, line 201: broken JSON .*--skip-bad"):
        run(request(source), tmp_path / "out")
    progress = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert sum(side["documents"] for side in progress["sides"].values()) == 200
    done = run(request(source, skip_bad=True), tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert done.arrays.sha256 == whole.arrays.sha256
    # Switched off again, the bad lines could not be passed over.
    with pytest.raises(ConfigError, match="--skip-bad: True there, False asked for"):
        run(request(source), tmp_path / "out")


def test_skip_bad_without_anything_bad_is_no_difference(corpus, tmp_path):
    run(request(corpus), tmp_path / "out")
    assert run(request(corpus, skip_bad=True), tmp_path / "out").status == "already finished"


def test_a_request_that_fails_at_once_leaves_nothing(corpus, tmp_path):
    for wanted, words in (
        (request(corpus, reading=Reading(text_field="txet")), "did you mean 'text'"),
        (request(corpus, train_bpe=300, reading=Reading(text_field="txet")), "did you mean 'text'"),
        (request(tmp_path / "nothing.txt"), "there is no file"),
        (request(corpus, tokenizer=str(tmp_path)), "cannot load the tokeniser"),
        (request(write(tmp_path / "single.jsonl", ["only"])), "there is a single document"),
        (request(corpus, validation_fraction=1e-9), "the validation split is empty"),
        (request(corpus, validation_fraction=1 - 1e-9), "the train split is empty"),
        (request(write(tmp_path / "empty.jsonl", ["", " \n"])), r"there is no document in .*2 empty"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(wanted, tmp_path / "made" / "out")
        assert not (tmp_path / "made").exists()
    run(request(corpus), tmp_path / "made" / "out")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"source": ""}, "the source is empty"),
        ({"train_bpe": 257}, "--train-bpe must be at least 258"),
        ({"train_bpe": 300, "tokenizer": "gpt2"}, "--tokenizer .* --train-bpe .* one of them"),
        ({"validation_fraction": 0.0}, "--validation-fraction must be between 0 and 1, not 0.0"),
        ({"validation_fraction": float("nan")}, "--validation-fraction"),
        ({"seed": -1}, "--seed"),
        ({"shard_tokens": 0}, "--shard-tokens"),
        ({"reading": Reading(document_end="")}, "--document-end"),
    ],
)
def test_arguments_out_of_range_are_refused(corpus, tmp_path, more, words):
    with pytest.raises(ConfigError, match=words):
        run(request(**{"source": corpus, **more}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_few_words_give_few_tokens_and_a_note(tmp_path):
    source, watcher = write(tmp_path / "a.jsonl", [f"{index % 10}" for index in range(50)]), Silent()
    done = prepare.prepare(request(source, train_bpe=1000, validation_fraction=0.3), tmp_path / "out", watcher)
    assert done.arrays.vocabulary.size == 258
    assert "the documents to train on give 258 tokens, not 1,000" in watcher.notes


def test_folders_with_something_else_are_left_alone(corpus, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "train-00000.npy").write_text("precious")
    with pytest.raises(ConfigError, match="is not empty and holds no prepared corpus"):
        run(request(corpus), other)
    assert (other / "train-00000.npy").read_text() == "precious"
    with pytest.raises(ConfigError, match="is a file; --out needs a folder"):
        run(request(corpus), corpus)
    with pytest.raises(ConfigError, match="cannot make the folder"):
        run(request(corpus), corpus / "below")


def test_a_folder_inside_its_source_is_refused(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write(source / "a.jsonl", texts())
    for out in (source / "out", source / ".." / "source" / "deep" / "out"):
        with pytest.raises(ConfigError, match="lies in the source"):
            run(request(source), out)
    assert [path.name for path in source.iterdir()] == ["a.jsonl"]
    run(request(source), tmp_path / "source-out")


def test_a_full_disk_leaves_what_was_finished(corpus, tmp_path, monkeypatch):
    out, wanted = tmp_path / "out", request(corpus)
    run(wanted, tmp_path / "whole")
    original = shards.ShardWriter.write

    def write_until_full(self, *args):
        if len(self.finished) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "write", write_until_full)
        with pytest.raises(ConfigError, match="No space left on device; what was finished stays"):
            run(wanted, out)
    assert (out / "train-00001.npy").read_bytes() == (tmp_path / "whole" / "train-00001.npy").read_bytes()
    run(wanted, out)
    assert content(out) == content(tmp_path / "whole")


def test_two_processes_do_not_prepare_one_folder(corpus, tmp_path):
    with (
        folders.claimed(tmp_path / "out", "preparing"),
        pytest.raises(ConfigError, match="another process is preparing"),
    ):
        run(request(corpus), tmp_path / "out")
    assert run(request(corpus), tmp_path / "out").status == "finished"


@pytest.mark.parametrize("damage", ["progress", "shorter", "gone", "tokenizer", "no tokenizer"])
def test_an_unfinished_folder_that_was_damaged_is_refused(corpus, tmp_path, monkeypatch, damage):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, "finish_shard", 4)
        with pytest.raises(StopError):
            run(request(corpus), out)
    if damage == "progress":
        (out / "progress.json").write_text("{")
        words = "progress.json is damaged"
    elif damage == "shorter":
        with (out / "train-00000.npy").open("r+b") as file:
            file.truncate(100)
        words = "train-00000.npy has 100 bytes"
    elif damage == "gone":
        (out / "train-00000.npy").unlink()
        words = "train-00000.npy, which was finished, cannot be read"
    elif damage == "no tokenizer":
        shutil.rmtree(out / "tokenizer")
        words = "the tokeniser .* is missing; delete the folder"
    else:
        byte_tokenizer.build().save_pretrained(out / "tokenizer")
        facts = json.loads((out / "tokenizer" / "tokenizer.json").read_text())
        facts["normalizer"] = {"type": "Lowercase"}
        (out / "tokenizer" / "tokenizer.json").write_text(json.dumps(facts))
        words = "has changed since the preparation"
    before = content(out)
    with pytest.raises(ConfigError, match=words):
        run(request(corpus), out)
    assert content(out).keys() == before.keys()


def test_another_tokeniser_of_the_same_name_is_refused(corpus, tmp_path, monkeypatch):
    folder, out = tmp_path / "tokenizer", tmp_path / "out"
    tokenizers.train_bpe(texts(), 300).save_pretrained(folder)
    wanted = request(corpus, tokenizer=str(folder), shard_tokens=1000)
    with monkeypatch.context() as patch:
        stop_at(patch, "finish_shard", 3)
        with pytest.raises(StopError):
            run(wanted, out)
    tokenizers.train_bpe(texts(seed=1), 300).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"the tokeniser .* has changed since"):
        run(wanted, out)


def test_a_moved_source_is_the_same_source(corpus, tmp_path):
    run(request(corpus), tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    moved = corpus.rename(tmp_path / "elsewhere" / corpus.name)
    assert run(request(moved), tmp_path / "out").status == "already finished"
