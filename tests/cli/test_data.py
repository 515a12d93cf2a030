"""``siamesenorm data`` and what is done with its folders, as commands."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from siamesenorm.cli import main
from siamesenorm.training.recipe_files import load
from tests.cli.test_commands import refused
from tests.training.tiny import write_recipe


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SIAMESENORM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder with a corpus; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_corpus(Path("corpus.jsonl"), 150)
    write_recipe(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    return call


def write_corpus(path, count):
    lines = [json.dumps({"body": f"the {index}th text is about {index * index} things"}) for index in range(count)]
    path.write_text("\n".join(lines) + "\n")


PREPARE = ["data", "prepare", "corpus.jsonl", "--text-field", "body", "--validation-fraction", "0.2"]


def test_from_text_to_a_model_with_its_own_tokeniser(command):
    code, out, err = command(*PREPARE, "--out", "bpe", "--train-bpe", "300")
    assert code == 0
    meta = json.loads(Path("bpe/meta.json").read_text())
    train, validation = meta["train"], meta["validation"]
    assert f"{train['documents']:,} documents, {train['tokens']:,} tokens, {train['bytes']:,} bytes, 1 array" in out
    per_token = (train["bytes"] + validation["bytes"]) / (train["tokens"] + validation["tokens"])
    assert f"bytes per token  {per_token:.3f}" in out
    assert meta["sha256"] in out
    assert "tokenising" in err
    assert "documents (" in err

    recipe = ["tiny.yaml", "train.steps=3", "data.source=bpe", "data.document_masking=true"]
    code, out, err = command("train", *recipe, "--out", "run", "--json")
    assert code == 0, err
    summary = json.loads(out)
    assert summary["corpus_sha256"] == meta["sha256"]
    assert summary["corpus"] == str(Path("bpe").resolve())
    saved = json.loads(Path("run/model/config.json").read_text())
    assert (saved["vocab_size"], saved["eos_token_id"], saved["pad_token_id"]) == (300, 0, 1)
    core = [json.loads(Path(folder, "tokenizer.json").read_text()) for folder in ("run/model", "bpe/tokenizer")]
    assert core[0]["model"] == core[1]["model"]

    code, out, err = command("eval", "run", "--json")
    assert (code, err) == (0, "")
    for key in ("val_loss", "bits_per_byte", "val_tokens"):
        assert json.loads(out)[key] == pytest.approx(summary[key], rel=1e-5)
    assert summary["bits_per_byte"] == pytest.approx(
        summary["val_loss"] * validation["tokens"] / validation["bytes"] / 0.6931471805599453
    )
    code, out, _ = command("generate", "run", "--prompt", "the 1", "--tokens", "4", "--greedy")
    assert code == 0
    assert out.startswith("the 1")
    assert command("train", *recipe, "--out", "run")[0] == 0

    # Data or tokeniser of another kind than the run's.
    command(*PREPARE, "--out", "bytes")
    refused(command("eval", "run", "--source", "bytes"), "another tokeniser")
    command(*PREPARE, "--out", "other", "--train-bpe", "300", "--seed", "1")
    refused(command("eval", "run", "--source", "other"), "another tokeniser")
    refused(command("train", "run/config.yaml", "data.source=other"), "another tokeniser than data.tokenizer_sha256")


def test_the_next_command_asks_for_no_more_than_a_small_corpus_has(command):
    _, out, _ = command(*PREPARE, "--out", "small")
    held_out = json.loads(Path("small/meta.json").read_text())["validation"]["shards"][0]["tokens"]
    sequences = held_out // load("lm-tiny", []).data.sequence_length
    assert sequences > 0
    assert out.endswith(f"data.source={Path('small')} data.validation_sequences={sequences}\n")
    write_corpus(Path("corpus.jsonl"), 20)
    _, out, _ = command(*PREPARE, "--out", "smaller")
    assert "does not make one sequence of lm-tiny's 256 tokens" in out
    write_corpus(Path("corpus.jsonl"), 20_000)
    _, out, _ = command(*PREPARE, "--out", "large")
    assert out.endswith("next: siamesenorm train data.source=large\n")


def test_data_that_changed_between_start_and_resume_is_refused(command):
    prepare = [*PREPARE, "--out", "data"]
    assert command(*prepare)[0] == 0
    recipe = ["tiny.yaml", "train.steps=3", "data.source=data", "--out", "run"]
    assert command("train", *recipe)[0] == 0
    for path in sorted(Path("data").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    write_corpus(Path("corpus.jsonl"), 151)
    assert command(*prepare)[0] == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    refused(command("train", *recipe), "holds another run", "data.sha256")
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    refused(command("train", "run/config.yaml", "--out", "again"), "is not the one that data.sha256 asks for")
    array = Path("data/train-00000.npy")
    array.write_bytes(array.read_bytes()[:-2] + b"\xff\xff")
    refused(command("train", *recipe), "holds token 65,535", "above the vocabulary of 258")


def test_json_is_alone_on_stdout_and_a_finished_folder_says_so(command):
    code, out, _ = command(*PREPARE, "--out", "data", "--json")
    first = json.loads(out)
    assert (code, first["status"], first["documents"]) == (0, "finished", 150)
    code, out, err = command(*PREPARE, "--out", "data", "--json")
    assert (code, json.loads(out)["status"], err) == (0, "already finished", "")
    code, out, _ = command(*PREPARE, "--out", "data")
    assert "data has already been prepared with these arguments" in out


def test_bad_input_is_one_message(command):
    write_corpus(Path("broken.jsonl"), 40)
    with Path("broken.jsonl").open("ab") as file:
        file.write(b'{"body": \n{"body": "\xff"}\n')
    prepare = [
        "data",
        "prepare",
        "broken.jsonl",
        "--text-field",
        "body",
        "--validation-fraction",
        "0.3",
        "--out",
        "out",
    ]
    refused(command(*prepare), "broken.jsonl, line 41: broken JSON", "--skip-bad")
    code, out, _ = command(*prepare, "--skip-bad")
    assert code == 0
    assert "2 skipped (1 for broken JSON, 1 for invalid UTF-8)" in out
    refused(command(*PREPARE, "--out", "out"), "out is prepared with other arguments", "'broken.jsonl' there")
    refused(command(*PREPARE[:3], "--out", "new"), "there is no field 'text'; valid: body (--text-field)")
    refused(command(*PREPARE, "--out", "new", "--train-bpe", "10"), "--train-bpe must be at least 258")
    refused(command(*PREPARE, "--out", "new", "--train-bpe", "300", "--tokenizer", "x"), "give one of them")
    refused(command("data", "prepare", "nothing.txt", "--out", "new"), "there is no file or folder nothing.txt")
    Path("empty.txt").touch()
    refused(command("data", "prepare", "empty.txt", "--out", "new"), "empty.txt is empty")
    refused(
        command("train", "tiny.yaml", "data.source=corpus.jsonl"), "siamesenorm data prepare corpus.jsonl --out DIR"
    )
    assert not Path("new").exists()


def test_an_interrupt_is_said_and_gone_on_from(command, monkeypatch):
    from siamesenorm.data.shards import ShardWriter

    original, calls = ShardWriter.write, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) == 50:
            raise KeyboardInterrupt
        original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", interrupted)
        code, out, err = command(*PREPARE, "--out", "data")
    assert (code, out) == (130, "")
    assert "the same command goes on" in err
    assert command(*PREPARE, "--out", "data")[0] == 0


def test_kill_and_the_same_command_gives_equal_bytes(tmp_path):
    write_corpus(tmp_path / "corpus.jsonl", 6000)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}

    def start(out):
        arguments = [*PREPARE, "--out", out, "--shard-tokens", "1500"]
        return subprocess.Popen(
            [sys.executable, "-m", "siamesenorm", *arguments], cwd=tmp_path, env=environment, stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    process = start("killed")
    progress, deadline = tmp_path / "killed" / "progress.json", time.monotonic() + 60
    while not list((tmp_path / "killed").glob("train-00020.npy")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert sum(side["documents"] for side in json.loads(progress.read_text())["sides"].values()) > 100
    assert not (tmp_path / "killed" / "meta.json").exists()

    again = start("killed")
    whole = start("whole")
    assert "going on after" in again.communicate(timeout=60)[1]
    whole.communicate(timeout=60)
    assert (again.returncode, whole.returncode) == (0, 0)
    files = [
        {path.relative_to(tmp_path / out): path.read_bytes() for path in (tmp_path / out).rglob("*") if path.is_file()}
        for out in ("killed", "whole")
    ]
    assert len(files[0]) > 100
    assert files[0] == files[1]


def test_encode_latents_says_what_is_wrong_before_it_loads_anything(command):
    encode = ["data", "encode-latents", "digits", "--autoencoder", "nothing", "--image-size", "16", "--out"]
    refused(command(*encode, "new", "--batch-size", "0"), "--batch-size must be at least 1")
    refused(command(*encode, "new", "--dtype", "float61"), "did you mean 'float16'?")
    refused(command(*encode, "new", "--device", "gpu"), "--device gpu cannot be used")
    refused(command(*encode, "corpus.jsonl"), "corpus.jsonl is a file; --out needs a folder")
    Path("full").mkdir()
    Path("full/x").touch()
    refused(command(*encode, "full"), "full is not empty and holds no latents")
    assert not Path("new").exists()
