"""The commands in this process, on the tiny recipe."""

import json
from pathlib import Path

import pytest

from siamesenorm.cli import main

WIDE = {"COLUMNS": "200", "TERMINAL_WIDTH": "200"}


@pytest.fixture
def run(tiny, tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder; its exit code, stdout and stderr."""
    del tiny  # for the small corpus, and for the recipe file
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    for key, value in WIDE.items():
        monkeypatch.setenv(key, value)

    def command(*arguments):
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    command.recipe = str(tmp_path / "tiny.yaml")
    return command


def refused(result, *words):
    code, out, err = result
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word in err
    return err


def test_train_reports_and_the_model_goes_through_every_command(run):
    code, out, err = run("train", run.recipe, "--out", "first")
    assert code == 0
    summary = json.loads(Path("first/summary.json").read_text())
    for expected in (
        f"validation loss  {summary['val_loss']:.4f}",
        f"perplexity       {summary['val_ppl']:.4f}",
        summary["corpus_sha256"],
        "sample",
        "first/",
        "model/",
    ):
        assert expected in out
    # No terminal here, so the progress is plain lines, on stderr.
    assert "step 2/7  loss" in err
    assert "tokens/s" in err
    assert summary["corpus_sha256"] in err

    code, out, err = run("eval", "first", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)
    assert json.loads(out)["corpus_sha256"] == summary["corpus_sha256"]
    code, out, _ = run("eval", "first/model", "--sequence-length", "16", "--sequences", "4")
    assert f"{summary['val_loss']:.4f} nats per token" in out
    assert summary["corpus_sha256"] in out

    greedy = [run("generate", "first", "--prompt", "ab", "--greedy", "--tokens", "5", "--json")[1] for _ in range(2)]
    assert greedy[0] == greedy[1]
    assert json.loads(greedy[0])["text"].startswith("ab")
    code, out, err = run("generate", "first/model", "--prompt", "ab", "--tokens", "5", "--seed", "1", "--top-k", "20")
    assert (code, err) == (0, "")
    assert out.startswith("ab")

    code, out, err = run("inspect", "first")
    assert (code, err) == (0, "")
    assert "siamese" in out
    assert f"{summary['params']:,} in total" in out

    code, out, err = run("train", run.recipe, "--out", "first", "--json")
    assert (code, json.loads(out)) == (0, summary)
    assert "step" not in err


def test_a_runs_own_config_is_a_recipe_that_repeats_it(run):
    assert run("train", run.recipe, "train.steps=3", "seed=5", "--out", "first")[0] == 0
    assert run("train", "first/config.yaml", "--out", "second")[0] == 0
    first, second = (json.loads(Path(name, "summary.json").read_text()) for name in ("first", "second"))
    assert (second["val_loss"], second["seed"], second["sample"]) == (first["val_loss"], 5, first["sample"])


def test_json_is_alone_on_stdout(run):
    code, out, err = run("train", run.recipe, "train.steps=2", "--out", "run", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(Path("run/summary.json").read_text())
    assert "step 2/2" in err


def test_the_default_folder_keeps_different_runs_apart(run):
    for overrides in (["train.steps=2"], ["train.steps=2", "model.scheme=pre"], ["train.steps=2"]):
        assert run("train", run.recipe, *overrides)[0] == 0
    names = sorted(path.name for path in Path("runs").iterdir())
    assert len(names) == 2
    assert names[0].startswith("tiny-pre-")
    assert names[1].startswith("tiny-siamese-")


def test_a_diverging_run_exits_with_1_and_a_message(run):
    code, out, err = run("train", run.recipe, "optim.lr=1e36", "train.max_grad_norm=null", "--out", "run", "--json")
    assert code == 1
    assert json.loads(out)["diverged"] is True
    assert json.loads(out)["val_loss"] is None
    assert "Traceback" not in err
    assert f"step {json.loads(out)['diverged_at_step']}: " in err


def test_inspect_counts_against_pre_norm(run):
    code, out, _ = run("inspect", run.recipe, "model.options.x=post", "--json")
    assert code == 0
    facts = json.loads(out)
    # Two norms of width 16 for each of the four sublayers and the readout; Nin is there in both.
    assert facts["over_pre"]["params"] == 2 * 16 * (4 + 1)
    assert facts["over_pre"]["params_percent"] == pytest.approx(100 * 160 / (facts["params"] - 160))
    assert facts["over_pre"]["flops_per_token_training"] > 0
    assert [row["kind"] for row in facts["sites"]] == ["attention", "mlp"] * 2 + ["readout"]
    assert facts["sites"][2]["scale"] == pytest.approx(0.5)
    code, out, _ = run("inspect", run.recipe, "model.scheme=pre", "--json")
    assert json.loads(out)["over_pre"] == {
        "params": 0,
        "params_percent": 0,
        "flops_per_token_training": 0,
        "flops_percent": 0,
    }
    code, out, _ = run("inspect", "lm-tiny")
    assert code == 0
    assert "over Pre-Norm" in out
    assert "readout" in out
    assert "FLOPs per token" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lm-tinny"], ["lm-tinny", "did you mean 'lm-tiny'"]),
        (["RECIPE", "optim.lrr=1"], ["optim.lrr", "did you mean 'optim.lr'"]),
        (["RECIPE", "model.scheme=siamees"], ["siamees", "'siamese'"]),
        (["RECIPE", "model.options.xx=post"], ["xx", "'x'"]),
        (["RECIPE", "model.options.x=hibrid"], ["hibrid", "hybrid"]),
        (["RECIPE", "train.steps=many"], ["train.steps", "'many'", "whole number"]),
        (["RECIPE", "data.sequence_length=64"], ["64", "32"]),
        (["RECIPE", "model.config.vocab_size=64"], ["vocabulary", "64", "258"]),
        (["RECIPE", "model.config.hidden_size=15"], []),
        (["RECIPE", "model.config.num_attention_heads=3"], []),
        (["RECIPE", "model.config.hidden_size=wide"], []),
        (["RECIPE", "model.config.num_hidden_layers=0"], []),
        (["RECIPE", "second", "seed=1"], ["second"]),
        (["no/such.yaml"], ["no/such.yaml"]),
        (["RECIPE", "--out", "a-file"], ["a-file is a file"]),
        (["RECIPE", "--out", "a-file/below"], ["a-file"]),
        (["RECIPE", "--out", "others"], ["not empty"]),
        (["RECIPE", "--nonsense"], ["nonsense"]),
    ],
)
def test_train_refuses_in_one_message(run, arguments, words):
    Path("a-file").write_text("precious")
    Path("others").mkdir()
    Path("others/thing").write_text("precious")
    result = run("train", *(run.recipe if argument == "RECIPE" else argument for argument in arguments))
    err = refused(result, *words)
    if "--nonsense" not in arguments:
        assert err.startswith("error: ")
    assert Path("a-file").read_text() == Path("others/thing").read_text() == "precious"
    assert not Path("runs").exists()


def test_a_folder_with_another_run_is_left_alone(run):
    assert run("train", run.recipe, "train.steps=2", "--out", "run")[0] == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    refused(
        run("train", run.recipe, "train.steps=3", "--out", "run"), "another run", "train.steps: 2 there, 3 asked for"
    )
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("command", ["eval", "generate", "inspect"])
def test_what_is_no_model_is_refused(run, command):
    more = ["--prompt", "a"] if command == "generate" else []
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    Path("unfinished").mkdir()
    Path("unfinished/config.yaml").write_text("name: x\n")
    refused(run(command, "empty", *more), "empty")
    refused(run(command, "broken", *more), "broken")
    refused(run(command, "unfinished", *more), "has not finished")
    refused(run(command, "nowhere", *more), "nowhere")


def test_generate_and_eval_refuse_what_does_not_fit(run):
    assert run("train", run.recipe, "train.steps=1", "schedule.warmup_steps=0", "--out", "run")[0] == 0
    refused(run("generate", "run", "--prompt", ""), "the prompt is empty")
    refused(run("generate", "run", "--prompt", "a" * 40), "32 positions")
    refused(run("generate", "run", "--prompt", "a", "--tokens", "40"), "at most 31 can be added")
    refused(run("generate", "run"), "--prompt")
    refused(run("eval", "run", "--sequence-length", "64"), "64", "32")
    refused(run("eval", "run", "--source", "nothing"), "unknown data source")
    refused(run("inspect", "run", "seed=1"), "seed=1")
    weights = Path("run/model/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    refused(run("eval", "run"), "run/model")
