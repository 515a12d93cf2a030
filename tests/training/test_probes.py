"""Looking into a model as it trains: nothing changes by it, nothing of it is lost, and nothing is done unasked."""

from __future__ import annotations

import json

import pandas
import pytest
import torch

from siamesenorm import hub, probes
from siamesenorm.residual import ConfigError
from siamesenorm.training import parallel
from siamesenorm.training.processes import ALONE, Processes
from siamesenorm.training.recipe_files import load
from siamesenorm.training.run import train
from siamesenorm.training.tasks import task_of
from tests.training.test_distributed import PLAIN, run_all
from tests.training.tiny import Watcher, small_corpus, write_recipe
from tests.training.tiny_images import write_recipes


class CrashError(Exception):
    pass


def crash():
    raise CrashError


def parameters(folder):
    return hub.load(folder / "model").state_dict()


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def test_rows_are_written_and_nothing_else_changes(tiny, tmp_path):
    train(tiny(), tmp_path / "plain", Watcher())
    train(tiny("train.probe_every=3"), tmp_path / "probed", Watcher())
    assert not (tmp_path / "plain" / "probes.parquet").exists()
    table = pandas.read_parquet(tmp_path / "probed" / "probes.parquet")
    # Four sublayers of two streams each, every third step and the last.
    assert table.groupby("step").size().to_dict() == {3: 8, 6: 8, 7: 8}
    assert list(table.columns[:5]) == ["step", "sublayer", "block", "kind", "stream"]
    assert (table["parameter_grad"] > 0).all()
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "probed")
    plain, probed = parameters(tmp_path / "plain"), parameters(tmp_path / "probed")
    assert all(torch.equal(plain[name], probed[name]) for name in plain)


@pytest.mark.slow
def test_the_last_rows_are_those_of_the_saved_model(tiny, tmp_path):
    recipe = tiny("train.probe_every=7")
    train(recipe, tmp_path / "run", Watcher())
    model, task = hub.load(tmp_path / "run" / "model"), task_of(recipe)
    batches = task.probe_batches(model, task.load(ALONE), device=torch.device("cpu"), batch_size=4, count=1)
    written = pandas.read_parquet(tmp_path / "run" / "probes.parquet").drop(columns="step")
    pandas.testing.assert_frame_equal(written, pandas.DataFrame(probes.site_table(model, batches)), rtol=1e-6)


def test_a_crash_loses_nothing_and_a_resumed_run_cuts_what_it_repeats(tiny, tmp_path):
    recipe = tiny("train.probe_every=1")
    train(recipe, tmp_path / "unbroken", Watcher())
    folder = tmp_path / "broken"
    with pytest.raises(CrashError):
        train(recipe, folder, Watcher(at=5, act=crash))
    assert sorted(set(pandas.read_parquet(folder / "probes.parquet")["step"])) == [1, 2, 3, 4, 5]
    watcher = Watcher()
    train(recipe, folder, watcher)
    assert watcher.begun == [4]
    frames = [pandas.read_parquet(tmp_path / name / "probes.parquet") for name in ("unbroken", "broken")]
    pandas.testing.assert_frame_equal(*frames)


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_no_reason_to_lose_it(tiny, tmp_path):
    recipe = tiny("train.probe_every=2")
    with pytest.raises(CrashError):
        train(recipe, tmp_path / "run", Watcher(at=5, act=crash))
    path = tmp_path / "run" / "probes.parquet"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ConfigError, match=r"cannot go on with .*probes.parquet"):
        train(recipe, tmp_path / "run", Watcher())
    assert len(path.read_bytes()) == 50


def test_nothing_is_done_unasked(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "site_table", crash)
    monkeypatch.setattr(type(load("lm-tiny")), "probe_batches", crash, raising=False)
    assert train(tiny("train.steps=2"), tmp_path / "run", Watcher()).status == "finished"


@pytest.mark.slow
def test_two_processes_that_each_hold_the_model(tmp_path):
    write_recipe(tmp_path)
    small_corpus(tmp_path)
    shared = [*PLAIN, "train.parallel=ddp", "train.micro_batch_size=1"]
    jobs = [
        {"overrides": shared, "out": "plain"},
        {"overrides": [*shared, "train.probe_every=2"], "out": "probed"},
        {"overrides": [*PLAIN, "train.probe_every=2"], "out": "in-parts"},
    ]
    done = run_all(tmp_path, jobs)
    assert [result["status"] for result in done.values()] == ["finished", "finished", "refused"]
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "probed")
    table = pandas.read_parquet(tmp_path / "probed" / "probes.parquet")
    assert sorted(set(table["step"])) == [2, 4, 6, 7]
    assert (table["parameter_grad"] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), [("tiny-vit", 2), ("tiny-dit", 2)])
def test_models_of_images(name, blocks, tmp_path):
    write_recipes(tmp_path)
    recipe = load(str(tmp_path / f"{name}.yaml"), ["train.probe_every=2", "train.steps=2", "train.batch_size=40"])
    train(recipe, tmp_path / "run", Watcher())
    table = pandas.read_parquet(tmp_path / "run" / "probes.parquet")
    assert len(table) == blocks * 2 * 2
    assert (table["share"] > 0).all()


def test_what_is_held_in_parts_is_refused(tiny):
    recipe = tiny("train.probe_every=2")
    with pytest.raises(ConfigError, match=r"train\.probe_every .*train\.parallel=ddp"):
        parallel.check(recipe, Processes(count=2, local=2))
    parallel.check(tiny("train.probe_every=2", "train.parallel=ddp"), Processes(count=2, local=2))
    with pytest.raises(ConfigError, match=r"train\.probe_every must be at least 1"):
        tiny("train.probe_every=0")
