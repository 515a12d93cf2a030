"""``siamesenorm study``, in this process and as one of its own."""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pandas
import pytest
import yaml

from siamesenorm.study import session
from siamesenorm.training.run_folder import read_metrics
from tests.cli.test_commands import refused, run
from tests.study.conftest import AXES, QUICK
from tests.training.tiny_images import CLASSIFIER

__all__ = ["run"]


@pytest.fixture
def study(run, monkeypatch):
    """Runs ``siamesenorm study`` on a small study beside the tiny recipe; workers see what a test has put in place."""
    monkeypatch.setattr(session, "run_study", partial(session.run_study, start="fork"))
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    path = Path(run.recipe).parent / "small.yaml"
    path.write_text(yaml.safe_dump({"recipe": "tiny.yaml", "axes": AXES, "set": QUICK}, sort_keys=False))
    return partial(run, "study", str(path))


def test_a_study_ends_with_its_advice_and_where_things_are(study):
    code, out, err = study("schemes=[pre,siamese]", "seeds=[0]", "--out", "made", "--jobs", "2")
    assert code == 0, err
    assert "2 runs: 2 finished" in out
    assert "With one seed there is no telling" in out
    assert all(
        (Path("made") / name).exists() for name in ("results.csv", "results.parquet", "summary.md", "report.html")
    )
    assert "2/2  siamese, seed 0: finished  validation loss" in err or "2/2  pre, seed 0: finished" in err
    # Again from what is there, read in another way.
    code, out, _ = study("--out", "made", "--report-only", "baseline=siamese")
    assert (code, "2 runs: 2 finished" in out) == (0, True)
    assert "difference to siamese" in Path("made/summary.md").read_text()


def test_the_command_that_it_ends_with_looks_inside_a_run_of_each_scheme(study, run):
    _, out, _ = study("schemes=[pre,siamese]", "--out", "made")
    command = out.splitlines()[-1].removeprefix("to look inside: siamesenorm ")
    code, out, err = run(*shlex.split(command))
    assert code == 0, err
    assert Path("made/inside/report.html").is_file()
    assert pandas.read_parquet("made/inside/sites.parquet").model.nunique() == 2


@pytest.mark.parametrize("words", [["schemes=[pre]"], ["schemes=[pre,siamese]", "keep_models=false"]])
def test_without_two_models_there_is_nothing_to_look_into(study, words):
    assert "look inside" not in study(*words, "seeds=[0]", "--out", "made")[1]


def test_a_failed_run_is_told_and_the_exit_code_says_so(study):
    code, out, err = study("schemes=[pre]", "seeds=[0]", "model.config.max_position_embeddings=8", "--out", "made")
    assert code == 1
    assert "longer than the model's max_position_embeddings (8)" in out
    assert "Traceback" not in out + err


def test_a_dry_run_lists_and_writes_nothing(study):
    code, out, _ = study("schemes=[pre,siamese:x=hybrid,keel]", "--dry-run", "--jobs", "2")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.startswith(("pre ", "siamese:", "keel "))]
    assert [row[:3] for row in rows] == [
        [scheme, seed, "pending"] for seed in "01" for scheme in ("pre", "siamese:x=hybrid", "keel")
    ]
    assert rows[0][3:5] == ["12,176", "+0.000%"]
    assert rows[1][3:5] == ["12,352", f"{12352 / 12176 - 1:+.3%}"]
    assert out.splitlines()[-1].startswith("6 runs, 6 of them to be trained: about 0:0")
    assert out.splitlines()[-1].endswith("of training, 2 at a time")
    assert list(Path.cwd().iterdir()) == []


def test_a_study_can_be_printed_and_copied(run):
    code, out, _ = run("study", "lr", "--print")
    assert code == 0
    assert yaml.safe_load(out)["best_over"] == "lrs"
    Path("mine.yaml").write_text(out)
    assert run("study", "mine.yaml", "--print")[1] == out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scheme=[pre]"], ["unknown axis or key 'scheme'", "did you mean 'schemes'"]),
        (["lrs=[]"], ["the axis 'lrs' is empty"]),
        (["seeds=[0,0]"], ["a run twice"]),
        (["--task", "4/4"], ["tasks count from 0"]),
        (["--seconds", "-1"], ["seconds must be above 0"]),
        (["--dry-run", "--report-only"], ["cannot be had at once"]),
        (["--report-only", "--out", "nowhere"], ["holds no study"]),
    ],
)
def test_what_is_refused_is_refused_in_a_line(study, arguments, words):
    refused(study(*arguments), *words)
    assert list(Path.cwd().iterdir()) == []


def test_a_study_is_none_of_torchruns(study, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("siamesenorm.cli.leave", lambda error: (_ for _ in ()).throw(error))
    refused(study(), "a study starts its own processes")


@pytest.mark.slow
def test_a_terminated_study_saves_and_the_same_command_goes_on(tmp_path):
    train = {**CLASSIFIER["train"], "steps": 60, "validate_every": 60, "checkpoint_every": 1000}
    (tmp_path / "tiny-vit.yaml").write_text(yaml.safe_dump({**CLASSIFIER, "train": train}))
    tree = {"recipe": "tiny-vit.yaml", "axes": {"schemes": ["pre", "siamese"], "seeds": [0]}}
    (tmp_path / "images.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SIAMESENORM_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "siamesenorm", "study", "images.yaml", "--jobs", "2", "--out", "made"]

    def start():
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes)

    def steps():
        return sorted(len(read_metrics(path)) for path in (tmp_path / "made" / "runs").glob("*/metrics.jsonl"))

    process = start()
    deadline = time.monotonic() + 120
    while len(steps()) < 2 or not steps()[0]:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command goes on from there" in err
    assert "Traceback" not in err
    saved = steps()
    assert len(list((tmp_path / "made" / "runs").glob("*/checkpoints/step*"))) == 2
    process = start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "2 runs: 2 finished" in out
    assert (steps(), saved < [60, 60]) == ([60, 60], True)
    with (tmp_path / "made" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["images"] for row in rows] == [str(60 * CLASSIFIER["train"]["batch_size"])] * 2
    assert all(float(row["val_accuracy"]) > 0 for row in rows)
    assert len(json.loads((tmp_path / "made" / "data.json").read_text())) == 1
