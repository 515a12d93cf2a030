import json
import math

import pytest

from siamesenorm.residual import ConfigError
from siamesenorm.training import checkpoints
from siamesenorm.training.recipe_files import load
from siamesenorm.training.run_folder import MetricsFile, RunFolder, read_metrics


def test_a_new_folder_is_claimed_and_an_equal_recipe_accepted(tmp_path):
    run = RunFolder(tmp_path / "deep" / "run")
    run.claim(load("lm-tiny"))
    assert run.recipe() == load("lm-tiny")
    run.claim(load("lm-tiny"))


def test_another_recipe_is_refused_with_what_differs_and_nothing_is_touched(tmp_path):
    run = RunFolder(tmp_path)
    run.claim(load("lm-tiny"))
    before = run.config.read_bytes()
    with pytest.raises(ConfigError) as caught:
        run.claim(load("lm-tiny", ["optim.lr=1", "model.scheme=pre"]))
    message = str(caught.value)
    assert "optim.lr: 0.00" in message
    assert "1.0 asked for" in message
    assert "model.scheme: 'siamese' there, 'pre' asked for" in message
    assert "model.options.x" in message
    assert "seed" not in message
    assert run.config.read_bytes() == before


def test_files_and_other_peoples_folders_are_refused(tmp_path):
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder(tmp_path / "file").claim(load("lm-tiny"))
    with pytest.raises(ConfigError, match="cannot make the run folder"):
        RunFolder(tmp_path / "file" / "below").claim(load("lm-tiny"))
    with pytest.raises(ConfigError, match="not empty and holds no run"):
        RunFolder(tmp_path).claim(load("lm-tiny"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.yaml").write_text("name: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        RunFolder(tmp_path / "own").claim(load("lm-tiny"))


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    run = RunFolder(tmp_path)
    with run.locked(), pytest.raises(ConfigError, match="another process"), run.locked():
        pass
    with run.locked():
        pass


def test_metrics_are_cut_after_the_step_that_a_run_goes_on_from(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": step / 10}) + "\n" for step in range(1, 6)]
    path.write_text("".join(lines) + '{"step": 6, "lo')
    metrics = MetricsFile(path)
    metrics.open_after(3)
    metrics.append({"step": 4, "loss": math.nan})
    metrics.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, None)]


def test_a_summary_that_is_not_finite_is_valid_json_with_null(tmp_path):
    run = RunFolder(tmp_path)
    run.write_summary({"val_loss": math.inf, "nested": [math.nan, 1], "diverged": False})
    assert json.loads(run.summary.read_text()) == {"val_loss": None, "nested": [None, 1], "diverged": False}
    assert run.finished_summary() is not None
    run.write_summary({"diverged": True})
    assert run.finished_summary() is None


def test_only_sealed_and_unchanged_checkpoints_are_whole(tmp_path):
    for step in (5, 40, 100):
        folder = tmp_path / f"step{step}"
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "data.bin").write_bytes(b"x" * step)
        (folder / ".meta").write_bytes(b"y")
        checkpoints.seal(folder, "run")
    (tmp_path / "step7-tmp").mkdir()
    (tmp_path / "order").mkdir()
    assert [step for step, _ in checkpoints.newest_first(tmp_path)] == [100, 40, 5]
    newest = tmp_path / "step100"
    assert checkpoints.fault(newest, "run") is None
    assert checkpoints.fault(newest, "another") == "it belongs to another run"
    (tmp_path / "step40").rename(tmp_path / "step41")
    assert checkpoints.fault(tmp_path / "step41", "run") == "it was taken after step 40"
    (newest / "model" / "data.bin").write_bytes(b"x" * 99)
    assert checkpoints.fault(newest, "run") == "its file model/data.bin has 99 bytes instead of 100"
    (newest / "model" / "data.bin").unlink()
    assert "is missing" in (checkpoints.fault(newest, "run") or "")
    (newest / "manifest.json").write_text("{")
    assert "cannot be read" in (checkpoints.fault(newest, "run") or "")
    (newest / "manifest.json").unlink()
    assert checkpoints.fault(newest, "run") == "it was not finished"
    assert checkpoints.newest_first(tmp_path / "nowhere") == []
