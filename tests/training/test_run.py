"""Whole runs of the tiny recipe: what is on disk after one, and that breaking one off changes nothing."""

import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from siamesenorm.residual import ConfigError
from siamesenorm.training import run as run_module
from siamesenorm.training.run import default_folder, train
from siamesenorm.training.run_folder import read_metrics
from tests.training.tiny import Watcher


class Killed(BaseException):
    """Stands for the process's sudden end: nothing of the package catches it."""


def kill():
    raise Killed


def weights(folder):
    model = folder / "model"
    pipeline = model / "transformer" / "diffusion_pytorch_model.safetensors"
    return load_file(pipeline if pipeline.exists() else model / "model.safetensors")


def numbers(folder):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(folder / "metrics.jsonl")]


def assert_same(broken, unbroken):
    ours, theirs = weights(broken), weights(unbroken)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert numbers(broken) == numbers(unbroken)
    a, b = (json.loads((folder / "summary.json").read_text()) for folder in (broken, unbroken))
    timed = {"seconds", "tokens_per_second", "images_per_second"}
    assert {k: v for k, v in a.items() if k not in timed} == {k: v for k, v in b.items() if k not in timed}


def test_a_run_leaves_what_the_readme_says(tiny, tmp_path):
    watcher = Watcher()
    result = train(tiny(), tmp_path / "run", watcher)
    assert result.status == "finished"
    assert watcher.steps == list(range(1, 8))
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert {"step", "loss", "lr", "grad_norm", "tokens"} <= lines[0].keys()
    assert [line["tokens"] for line in lines] == [64 * step for step in range(1, 8)]
    assert [line["step"] for line in lines if "val_loss" in line] == [3, 6, 7]
    # Warm-up over two steps to the peak, then a cosine to a tenth of it.
    assert [round(line["lr"], 6) for line in lines[:2]] == [0.005, 0.01]
    assert lines[-1]["lr"] == pytest.approx(0.001)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == result.summary
    assert summary["val_loss"] == lines[-1]["val_loss"]
    assert summary["val_ppl"] == pytest.approx(torch.tensor(summary["val_loss"]).exp().item(), rel=1e-5)
    assert (summary["tokens"], summary["diverged"], len(summary["corpus_sha256"])) == (448, False, 64)
    assert summary["tokens_per_second"] > 0
    assert summary["sample"].startswith("ab")
    assert any(summary["corpus_sha256"] in note for note in watcher.notes)
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step*")) == ["step6", "step7"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == summary["params"]
    assert model.config.eos_token_id == 256
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").decode([104, 105]) == "hi"
    assert not [path for path in (tmp_path / "run").rglob("*") if "unfinished" in path.name or "tmp" in path.name]


def test_a_finished_run_is_not_trained_again(tiny, tmp_path):
    train(tiny(), tmp_path / "run", Watcher())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    watcher = Watcher()
    result = train(tiny(), tmp_path / "run", watcher)
    assert (result.status, watcher.steps) == ("already finished", [])
    assert result.summary["tokens"] == 448
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.name != ".lock"}
    assert {path: stamp for path, stamp in after.items() if path.is_file()} == {
        path: stamp for path, stamp in before.items() if path.name != ".lock"
    }


def test_another_recipe_is_refused_and_the_run_goes_on_after(tiny, tmp_path):
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "run", Watcher(3, kill))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.01 there, 0\.02 asked for"):
        train(tiny("optim.lr=0.02"), tmp_path / "run", Watcher())
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert train(tiny(), tmp_path / "run", Watcher()).status == "finished"


# An epoch has 4 steps and a checkpoint is taken every 2: before the first, right after one, in the middle of an epoch,
# at its end, and after the last step.
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 7])
def test_a_killed_run_ends_as_an_unbroken_one(tiny, tmp_path, at):
    train(tiny(), tmp_path / "unbroken", Watcher())
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "broken", Watcher(at, kill))
    assert not (tmp_path / "broken" / "summary.json").exists()
    watcher = Watcher()
    assert train(tiny(), tmp_path / "broken", watcher).status == "finished"
    # The step at which it was killed is not in a checkpoint yet: the recorder runs before the checkpointer.
    resumed = (at - 1) // 2 * 2
    assert watcher.begun == [resumed]
    assert watcher.steps == list(range(resumed + 1, 8))
    assert_same(tmp_path / "broken", tmp_path / "unbroken")


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.config.tie_word_embeddings=true", "model.scheme=pre"],
        ["train.micro_batch_size=1", "train.activation_checkpointing=true", "train.precision=bfloat16"],
        pytest.param(["train.compile=true", "model.config.num_hidden_layers=1"], marks=pytest.mark.slow),
    ],
)
def test_every_way_to_train_resumes_exactly(tiny, tmp_path, overrides):
    recipe = tiny(*overrides)
    train(recipe, tmp_path / "unbroken", Watcher())
    with pytest.raises(Killed):
        train(recipe, tmp_path / "broken", Watcher(4, kill))
    train(recipe, tmp_path / "broken", Watcher())
    assert_same(tmp_path / "broken", tmp_path / "unbroken")


def test_compiled_training_learns_the_same_within_rounding(tiny, tmp_path):
    options = ["model.config.num_hidden_layers=1", "model.config.attention_dropout=0.0", "train.steps=3"]
    plain = train(tiny(*options), tmp_path / "plain", Watcher()).summary
    compiled = train(tiny(*options, "train.compile=true"), tmp_path / "compiled", Watcher()).summary
    assert compiled["val_loss"] == pytest.approx(plain["val_loss"], abs=1e-4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves(tiny, tmp_path, number):
    train(tiny(), tmp_path / "unbroken", Watcher())
    result = train(tiny(), tmp_path / "broken", Watcher(3, lambda: signal.raise_signal(number)))
    assert result.status == "interrupted"
    assert "after step 3 of 7 and saved; the same command goes on" in result.message
    watcher = Watcher()
    assert train(tiny(), tmp_path / "broken", watcher).status == "finished"
    assert watcher.steps == [4, 5, 6, 7]
    assert_same(tmp_path / "broken", tmp_path / "unbroken")


@pytest.mark.parametrize("damage", ["truncate", "empty", "remove", "unsealed", "garbage"])
def test_a_damaged_newest_checkpoint_is_stepped_back_from(tiny, tmp_path, damage):
    train(tiny(), tmp_path / "unbroken", Watcher())
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "broken", Watcher(5, kill))
    newest = tmp_path / "broken" / "checkpoints" / "step4"
    data = max((newest / "model_and_optim").iterdir(), key=lambda path: path.stat().st_size)
    content = data.read_bytes()
    if damage == "truncate":
        data.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        (newest / "train" / "rank0.pt").write_bytes(b"")
    elif damage == "remove":
        data.unlink()
    elif damage == "unsealed":
        (newest / "manifest.json").unlink()
    else:
        state = newest / "train" / "rank0.pt"
        state.write_bytes(b"x" * state.stat().st_size)
    watcher = Watcher()
    assert train(tiny(), tmp_path / "broken", watcher).status == "finished"
    assert watcher.begun == [2]
    assert len(watcher.warnings) == 1
    assert "step4 is not used" in watcher.warnings[0]
    assert_same(tmp_path / "broken", tmp_path / "unbroken")


def test_a_checkpoint_of_another_run_is_not_taken(tiny, tmp_path):
    train(tiny(), tmp_path / "unbroken", Watcher())
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "broken", Watcher(3, kill))
    train(tiny("seed=1"), tmp_path / "other", Watcher())
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step6", tmp_path / "broken" / "checkpoints" / "step6")
    watcher = Watcher()
    train(tiny(), tmp_path / "broken", watcher)
    assert watcher.begun == [2]
    assert "step6 is not used: it belongs to another run" in watcher.warnings[0]
    assert_same(tmp_path / "broken", tmp_path / "unbroken")


def test_a_damaged_order_of_the_data_is_made_again(tiny, tmp_path):
    train(tiny(), tmp_path / "unbroken", Watcher())
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "broken", Watcher(3, kill))
    (order,) = (tmp_path / "broken" / "checkpoints" / "order").glob("*.npy")
    order.write_bytes(order.read_bytes()[::-1])
    train(tiny(), tmp_path / "broken", Watcher())
    assert_same(tmp_path / "broken", tmp_path / "unbroken")


def test_a_run_that_cannot_begin_leaves_its_folder_to_the_next(tiny, tmp_path, monkeypatch):
    def fail(*_):
        raise ConfigError("no weights")

    with monkeypatch.context() as patch:
        patch.setattr(run_module.parallel, "place", fail)
        with pytest.raises(ConfigError, match="no weights"):
            train(tiny(), tmp_path / "run", Watcher())
    assert not (tmp_path / "run").exists()
    assert train(tiny("seed=1"), tmp_path / "run", Watcher()).status == "finished"


def test_with_no_checkpoint_left_the_run_starts_over(tiny, tmp_path):
    train(tiny(), tmp_path / "unbroken", Watcher())
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "broken", Watcher(3, kill))
    (tmp_path / "broken" / "checkpoints" / "step2" / "manifest.json").unlink()
    watcher = Watcher()
    train(tiny(), tmp_path / "broken", watcher)
    assert watcher.begun == [0]
    assert "starts from its beginning" in watcher.warnings[-1]
    assert_same(tmp_path / "broken", tmp_path / "unbroken")


def test_a_diverging_run_stops_before_the_step_and_says_so(tiny, tmp_path):
    recipe = tiny("optim.lr=1e36", "schedule.warmup_steps=0", "train.checkpoint_every=1", "train.max_grad_norm=null")
    result = train(recipe, tmp_path / "run", Watcher())
    assert result.status == "diverged"
    failed = result.summary["diverged_at_step"]
    assert failed >= 2
    assert f"step {failed}" in result.message
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["diverged"], summary["val_loss"], summary["steps"]) == (True, None, failed - 1)
    steps = [int(path.name[4:]) for path in (tmp_path / "run" / "checkpoints").glob("step*")]
    assert max(steps) == failed - 1
    assert [line["step"] for line in numbers(tmp_path / "run")] == list(range(1, failed))
    assert not (tmp_path / "run" / "model").exists()
    again = train(recipe, tmp_path / "run", Watcher())
    assert (again.status, again.summary["diverged_at_step"], again.summary["steps"]) == ("diverged", failed, failed - 1)


def test_the_scheme_does_not_change_the_data_order(tiny, tmp_path, monkeypatch):
    from siamesenorm.training.engine import EngineModule

    seen, forward = [], EngineModule.train_batch

    def spy(self, batch, dry_run=False):
        if not dry_run:
            seen[-1].append(batch["input_ids"].clone())
        forward(self, batch, dry_run)

    monkeypatch.setattr(EngineModule, "train_batch", spy)
    for overrides in ([], ["model.scheme=pre"], ["seed=1"]):
        seen.append([])
        train(tiny(*overrides), tmp_path / "-".join(["run", *overrides]), Watcher())
    siamese, pre, other_seed = (torch.stack(batches) for batches in seen)
    assert torch.equal(siamese, pre)
    assert not torch.equal(siamese, other_seed)
    # A whole epoch goes through every sequence once, and the next epoch in another order.
    assert siamese[:4].flatten(0, 1).unique(dim=0).shape[0] == 16
    assert not torch.equal(siamese[0], siamese[4])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.sequence_length=33"], r"data.sequence_length \(33\) is longer than .* \(32\)"),
        (["model.config.vocab_size=100"], "vocabulary of 100 does not match"),
        (["model.config.vocab_size=50257"], "vocabulary of 50,257 does not match"),
        (["model.scheme=siamee"], "siamese"),
        (["model.options.y=post"], "'?y'?"),
        (["model.options.x=pots"], "post"),
        (["model.config.hidden_sise=8"], "hidden_size"),
        (["model.host=lama"], "llama"),
        (["data.source=stdlib"], "unknown data source 'stdlib'"),
        (["data.sha256=00ff"], "is not the one that data.sha256 asks for"),
        (["data.validation_sequences=1000"], "data.validation_sequences asks for 1000"),
        (["train.batch_size=1000"], "asks for more sequences of 16 tokens than the corpus has"),
        (["train.device=cuda"], "no CUDA device"),
        (["model.config.num_attention_heads=0"], "no valid Llama config"),
        (["model.config.hidden_act=foo"], "foo"),
        (["model.config.attention_dropout=2"], "attention_dropout must be at least 0 and below 1"),
        (["model.config.rms_norm_eps=.nan"], "rms_norm_eps must be a number"),
        (["model.config.dtype=bfloat16"], "weights are float32"),
        (["model.host=olmoe", "model.config.num_experts=4", "model.config.num_experts_per_tok=8"], r"per_tok \(8\)"),
        (["seed=9999999999999999999999"], "seed must be below"),
        (["optim.weight_decay=.inf"], "weight_decay must be below"),
        (["sample.temperature=1e-40"], "temperature must be 0 or at least"),
        (["name=../../evil"], "becomes part of a folder's name"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_written(tiny, tmp_path, overrides, message):
    if overrides == ["train.device=cuda"] and torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(ConfigError, match=message):
        train(tiny(*overrides), tmp_path / "run", Watcher())
    assert not (tmp_path / "run").exists()


def test_the_corpus_of_a_run_is_written_down_and_kept_to(tiny, tmp_path, monkeypatch):
    with pytest.raises(Killed):
        train(tiny(), tmp_path / "run", Watcher(3, kill))
    (tmp_path / "corpus" / "file1.py").write_bytes(b"changed")
    with pytest.raises(ConfigError, match=r"data\.sha256"):
        train(tiny(), tmp_path / "run", Watcher())


def test_default_folders_differ_where_recipes_do(tiny):
    names = {default_folder(tiny(*overrides)) for overrides in ([], ["seed=1"], ["model.scheme=pre"], [])}
    assert len(names) == 3
    assert any(path.name.startswith("tiny-pre-") for path in names)
    assert run_module.default_folder(tiny()).parent.name == "runs"
