"""``siamesenorm export``, and ``eval --tasks`` on what it makes, in this process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.cli.test_commands import refused, run
from tests.training.test_harness import task
from tests.training.tiny import tiny

__all__ = ["run", "tiny"]


def test_a_run_is_exported_and_goes_through_every_command(run, tmp_path):
    run("train", run.recipe, "--out", "first")
    code, out, err = run("export", "first", "model", "--step", "6")
    assert (code, err) == (0, "")
    assert "the weights after step 6 of first" in out
    assert "next: siamesenorm generate model" in out
    facts = json.loads(run("export", "first", "again", "--json")[1])
    assert (facts["step"], facts["averaged"], facts["files"], facts["passed_over"]) == (7, False, 1, [])
    assert facts["bytes"] == Path("again/model.safetensors").stat().st_size
    assert json.loads(run("generate", "again", "--prompt", "ab", "--greedy", "--tokens", "3", "--json")[1])["text"]
    measured = json.loads(run("eval", "again", "--sequence-length", "16", "--sequences", "4", "--json")[1])
    assert measured["val_loss"] == pytest.approx(json.loads(Path("first/summary.json").read_text())["val_loss"])
    refused(run("export", "first", "model"), "is there already, and is not an empty folder; choose another")
    refused(run("export", "first", "other", "--step", "1"), "no checkpoint of step 1; there are those of 6, 7")
    refused(run("export", "again", "other"), "holds no run")
    # A newer checkpoint that is damaged is a warning.
    Path("first/checkpoints/step7/manifest.json").unlink()
    code, out, err = run("export", "first", "older")
    assert code == 0
    assert "warning: checkpoint first/checkpoints/step7 is not used: it was not finished" in err
    # Options that do not go together.
    refused(run("eval", "first", "--tasks", "quiz.yaml", "--sequences", "3"), "--sequences is about held-out data")
    refused(run("eval", "first", "--shots", "3"), "--shots is for --tasks")


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_tasks_are_measured_and_kept(run, tmp_path):
    run("train", run.recipe, "model.config.max_position_embeddings=64", "--out", "first")
    one, two = task(tmp_path, "one"), task(tmp_path, "two")
    code, out, _ = run("eval", "first", "--tasks", f"{one},{two}", "--limit", "4")
    assert code == 0
    accuracy = json.loads(Path("first/model/evaluations.json").read_text())["tasks"]["two"]["metrics"]["acc"]["value"]
    assert f"two                      acc              {accuracy:.4f} ± " in out
    assert "over the first 4 of 5" in out
    assert "in first/model/evaluations.json, and in the model's card" in out
    assert "| one | acc_norm |" in Path("first/model/README.md").read_text()
    code, out, _ = run("eval", "first", "--tasks", one, "--json")
    assert json.loads(out)["tasks"]["one"]["examples"] == 5
    assert set(json.loads(Path("first/model/evaluations.json").read_text())["tasks"]) == {"one", "two"}
