"""Studies from their grid to their table: what is trained, what is not trained again, and what goes wrong."""

import csv
import json
import os
import shutil
import signal
import time

import pytest

from siamesenorm.residual import ConfigError
from siamesenorm.study.folder import StudyFolder
from siamesenorm.study.results import TIME_AND_MEMORY
from siamesenorm.study.session import Share, report
from siamesenorm.training import run as training
from siamesenorm.training.display import Silent
from siamesenorm.training.run_folder import read_metrics

TIMED = {*TIME_AND_MEMORY}


def table(outcome):
    with outcome.folder.csv.open(newline="") as file:
        return [{key: value for key, value in row.items() if key not in TIMED} for row in csv.DictReader(file)]


def statuses(outcome):
    return [row["status"] for row in outcome.rows]


def stamps(outcome):
    return {path: path.stat().st_mtime_ns for path in outcome.folder.runs.glob("*/summary.json")}


def test_runs_are_those_of_the_training_command_and_end_in_a_table(make, go, tmp_path):
    study = make()
    outcome = go(study, jobs=2)
    assert outcome.status == "done"
    assert statuses(outcome) == ["finished"] * 4
    assert sorted(outcome.watcher.over) == sorted((run.title, "finished", "") for run in study.runs)
    rows = table(outcome)
    alone = training.train(outcome.folder.pinned(study.runs[3]), tmp_path / "alone", Silent())
    assert float(rows[3]["val_loss"]) == alone.summary["val_loss"]
    for run, row in zip(study.runs, rows, strict=True):
        assert (row["run"], row["scheme"], int(row["seed"])) == (run.key, run.values["scheme"], run.recipe.seed)
        assert (row["format_version"], row["study"], row["why"]) == ("1", "small", "")
        assert (float(row["config.optim.lr"]), int(row["config.train.steps"])) == (1e-2, 7)
        assert len(row["config.data.sha256"]) == 64
        norms = [line["grad_norm"] for line in read_metrics(outcome.folder.run(run).metrics)]
        assert float(row["grad_norm_max"]) == max(norms)
        # What a finished run would have been resumed from is gone, and its model is there.
        assert not outcome.folder.run(run).checkpoints.exists()
        assert (outcome.folder.run(run).model / "config.json").is_file()
    # Again: nothing is trained, and the table is the same to the letter.
    before, text = stamps(outcome), outcome.folder.csv.read_text()
    again = go(study)
    assert (again.watcher.over, stamps(again), again.folder.csv.read_text()) == ([], before, text)
    # With another seed, only that is trained; a run of another config is not taken for one of these.
    more = go(make("seeds=[1,2]", "schemes=[pre]"))
    assert [title for title, *_ in more.watcher.over] == ["pre, seed 2"]
    assert before.items() <= stamps(more).items()
    changed = go(make("optim.lr=2e-2", "seeds=[0]", "schemes=[pre]", "keep_models=false"))
    assert [title for title, *_ in changed.watcher.over] == ["pre, seed 0"]
    assert not changed.folder.run(changed.comparison.study.runs[0]).model.exists()


def test_a_failed_and_a_diverged_run_stop_no_other(make, go):
    study = make(
        axes={"lrs": [1e-2, 1e30], "model.config.max_position_embeddings": [8, 32], "seeds": [0]},
    )
    outcome = go(study)
    assert [(row["lr"], row["model.config.max_position_embeddings"], row["status"]) for row in outcome.rows] == [
        (1e-2, 8, "failed"),
        (1e-2, 32, "finished"),
        (1e30, 8, "failed"),
        (1e30, 32, "diverged"),
    ]
    assert "longer than the model's max_position_embeddings (8)" in outcome.rows[0]["why"]
    assert outcome.rows[3]["why"] == f"not finite at step {outcome.rows[3]['diverged_at_step']}"
    assert outcome.failed == 2
    # A diverged run is an outcome, a failed one is tried again.
    again = go(study)
    assert [how for _, how, _ in again.watcher.over] == ["failed", "failed"]
    assert sum("it failed" in note and "is tried again" in note for note in again.watcher.notes) == 2
    assert table(again) == table(outcome)


def test_a_worker_that_dies_takes_one_run_with_it(make, go, monkeypatch):
    train = training.train

    def dies(recipe, *arguments, **more):
        if recipe.seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(recipe, *arguments, **more)

    monkeypatch.setattr(training, "train", dies)
    study = make("schemes=[pre]", "seeds=[1,2]")
    outcome = go(study)
    assert statuses(outcome) == ["failed", "finished"]
    assert "SIGKILL, which is what a system does that runs out of memory" in outcome.rows[0]["why"]
    monkeypatch.setattr(training, "train", train)
    assert statuses(go(study)) == ["finished"] * 2


def test_a_disk_that_fills_up_fails_the_run_in_words_and_no_other(make, go, monkeypatch, tmp_path):
    import resource

    train = training.train

    def on_a_full_disk(recipe, *arguments, **more):
        # No file may grow beyond this, which the operating system answers as it does a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        limit = 20_000 if recipe.seed == 1 else hard
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            return train(recipe, *arguments, **more)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    monkeypatch.setattr(training, "train", on_a_full_disk)
    study = make("schemes=[pre]", "seeds=[1,2]", "train.checkpoint_every=3")
    outcome = go(study)
    assert statuses(outcome) == ["failed", "finished"]
    assert "the checkpoint of step 3 cannot be written to" in outcome.rows[0]["why"]
    assert "\n" not in outcome.rows[0]["why"]
    monkeypatch.setattr(training, "train", train)
    before = stamps(outcome)
    again = go(study)
    assert statuses(again) == ["finished"] * 2
    assert before.items() <= stamps(again).items()
    # As if there had been room from the start.
    alone = train(again.folder.pinned(study.runs[0]), tmp_path / "alone", Silent())
    assert again.rows[0]["val_loss"] == alone.summary["val_loss"]


def test_a_folder_that_is_deleted_by_hand_is_said_and_trained_again(make, go):
    study = make("schemes=[pre]")
    outcome = go(study)
    whole, before = table(outcome), stamps(outcome)
    gone = outcome.folder.run(study.runs[0])
    shutil.rmtree(gone.path)
    assert statuses(report(study, outcome.folder.path)) == ["pending", "finished"]
    again = go(study)
    assert again.watcher.warnings == [
        f"pre, seed 0: it had ended, and what it left in {gone.path} is gone or not whole; it is trained again"
    ]
    assert [title for title, *_ in again.watcher.over] == ["pre, seed 0"]
    assert (table(again), stamps(again).keys()) == (whole, before.keys())
    kept = outcome.folder.run(study.runs[1]).summary
    assert stamps(again)[kept] == before[kept]


@pytest.mark.parametrize("name", ["results.parquet", "results.csv"])
def test_a_table_of_another_version_is_left_alone(make, go, name):
    study = make("schemes=[pre]", "seeds=[0]")
    outcome = go(study)
    path, other = outcome.folder.path / name, {"results.parquet", "results.csv"} - {name}
    if name.endswith("csv"):
        path.write_text(path.read_text().replace("\n1,", "\n0,"))
    else:
        import pyarrow.parquet as parquet

        found = parquet.read_table(path)
        parquet.write_table(found.replace_schema_metadata({"format_version": "0"}), path)
    before, runs = path.read_bytes(), stamps(outcome)
    for act in (lambda: go(make("schemes=[pre]")), lambda: report(study, outcome.folder.path)):
        with pytest.raises(ConfigError, match=rf"{name} has format 0, .* writes format 1. Move it away"):
            act()
    assert (path.read_bytes(), stamps(outcome)) == (before, runs)
    path.unlink()
    again = go(study)
    assert (again.watcher.over, statuses(again)) == ([], ["finished"])
    damaged = outcome.folder.path / other.pop()
    for content in ("no table", ""):
        damaged.write_text(content)
        with pytest.raises(ConfigError, match=r"cannot be read \(\w.*\); move it away"):
            go(study)
    damaged.unlink()
    damaged.mkdir()
    with pytest.raises(ConfigError, match="is no file; move it away"):
        go(study)


@pytest.mark.parametrize("part", ["config.yaml", "metrics.jsonl", "summary.json", "model"])
def test_a_part_of_a_run_that_is_deleted_by_hand_is_said_and_made_again(make, go, part):
    study = make("schemes=[pre]", "seeds=[0]")
    outcome = go(study)
    lost = outcome.folder.run(study.runs[0]).path / part
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    again = go(study)
    assert len(again.watcher.warnings) == 1
    assert "is gone or not whole; it is trained again" in again.watcher.warnings[0]
    assert table(again) == table(outcome)
    assert lost.exists()


def test_a_disk_that_is_full_at_the_end_keeps_the_runs(make, go, monkeypatch):
    from siamesenorm.study import results

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    study = make("schemes=[pre]", "seeds=[0]")
    with monkeypatch.context() as patched:
        patched.setattr(results, "write_whole", full)
        words = r"cannot be written: No space left on device \(.*\)\. The runs stay as they are; the same command"
        with pytest.raises(ConfigError, match=words):
            go(study)
    again = go(study)
    assert (again.watcher.over, statuses(again)) == ([], ["finished"])


def test_a_folder_is_of_one_study(make, go, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="is not empty and holds no study"):
        go(make(), out="full")
    with pytest.raises(ConfigError, match=r"is a file; --out needs a folder"):
        go(make(), out="full/file")
    go(make("schemes=[pre]", "seeds=[0]"))
    with pytest.raises(ConfigError, match="holds the study 'small', not 'other'"):
        go(make(name="other"))
    with pytest.raises(ConfigError, match="holds no study"):
        report(make(), tmp_path / "full")
    # What cannot be had is found before anything is written.
    with pytest.raises(ConfigError, match="validation_sequences"):
        go(make("data.validation_sequences=1000"), out="new")
    assert not (tmp_path / "new").exists()
    # And a folder that is there stays the study that it was.
    before = (tmp_path / "out" / "study.yaml").read_text()
    with pytest.raises(ConfigError, match="validation_sequences"):
        go(make("data.validation_sequences=1000"))
    assert (tmp_path / "out" / "study.yaml").read_text() == before


def test_tasks_that_start_at_once_share_a_new_folder(make, tmp_path):
    import multiprocessing

    study, context = make(), multiprocessing.get_context("fork")
    count = 6
    barrier, said = context.Barrier(count), context.Queue()

    def start(out):
        barrier.wait()
        try:
            with StudyFolder(out).claim(study):
                pass
            said.put("")
        except Exception as error:
            said.put(str(error))

    for attempt in range(3):
        processes = [context.Process(target=start, args=(tmp_path / f"new{attempt}",)) for _ in range(count)]
        for process in processes:
            process.start()
        assert [said.get(timeout=60) for _ in processes] == [""] * count
        for process in processes:
            process.join()


def test_a_disk_that_is_full_at_the_start_leaves_nothing(make, tmp_path, monkeypatch):
    from siamesenorm.study import folder as module

    def full(*arguments):
        raise OSError(28, "No space left on device")

    study, folder = make(), StudyFolder(tmp_path / "new" / "out")
    with monkeypatch.context() as patched:
        patched.setattr(module, "write_whole", full)
        with pytest.raises(ConfigError, match="No space left on device"), folder.claim(study):
            pass
    assert not (tmp_path / "new").exists()
    with folder.claim(study):
        pass
    assert folder.recorded() == study


def test_what_failed_in_a_session_waits_for_the_next(make, go, tmp_path):
    from siamesenorm.study.worker import Job, _Trainer

    study = make("schemes=[pre]", "seeds=[0]")
    folder = StudyFolder(tmp_path / "out")
    with folder.claim(study):
        folder.pin(study.runs)
    began = time.time()
    folder.fail(study.runs[0], "no luck")
    again = _Trainer(lambda said: None).train(Job(study.runs[0], folder.path, began))
    assert (again.how, again.why) == ("failed", "no luck")
    assert statuses(go(study)) == ["finished"]


@pytest.mark.parametrize("damage", ["summary", "record"])
def test_what_cannot_be_read_is_trained_again(make, go, damage):
    study = make("schemes=[pre]", "seeds=[0]")
    outcome = go(study)
    path = outcome.folder.run(study.runs[0]).summary
    if damage == "record":
        path = next(outcome.folder.states.glob("*.json"))
    path.write_text('{"status": "finished"')
    again = go(study)
    assert statuses(again) == ["finished"]
    assert table(again) == table(outcome)


def test_the_data_is_pinned_again_from_a_run(make, go):
    study = make("schemes=[pre]", "seeds=[0]")
    folder = go(study).folder
    before = folder.data.read_text()
    folder.data.unlink()
    go(study)
    assert folder.data.read_text() == before
    folder.data.write_text("{")
    with pytest.raises(ConfigError, match=r"data\.json cannot be read; move it away"):
        go(study)


def test_what_another_process_trains_is_waited_for_or_left_to_it(make, go, tmp_path):
    study = make("schemes=[pre]")
    folder = StudyFolder(tmp_path / "out")
    with folder.claim(study):
        folder.pin(study.runs)
    claim = folder.claimed(study.runs[0])
    assert claim.take()
    shared = go(study, share=Share(0, 2))
    assert (shared.status, statuses(shared)) == ("incomplete", ["pending", "finished"])
    # The lock file stays when its owner is gone, and keeps nobody out.
    claim.release()
    assert claim.path.exists()
    assert (go(study).status, statuses(go(study))) == ("done", ["finished", "finished"])


def test_tasks_begin_apart_and_take_what_others_leave(make):
    runs = make("seeds=[0,1,2]").runs
    first, second = (Share(number, 2).order(runs) for number in (0, 1))
    assert first[:3] == [runs[0], runs[2], runs[4]]
    assert second[:3] == [runs[1], runs[3], runs[5]]
    assert {run.key for run in first} == {run.key for run in second} == {run.key for run in runs}


def test_how_tasks_are_given(monkeypatch):
    assert Share.read("2/4") == Share(2, 4)
    for text in ("4", "a/b", "1/0", "-1/4"):
        with pytest.raises(ConfigError, match="a task is I/N"):
            Share.read(text)
    with pytest.raises(ConfigError, match="tasks count from 0, so the last of them is 3"):
        Share.read("4/4")
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    assert Share.of_slurm() is None
    # sbatch --array=10-16:2
    for name, value in (("ID", 14), ("MIN", 10), ("MAX", 16), ("COUNT", 4), ("STEP", 2)):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    assert Share.of_slurm() == Share(2, 4)


@pytest.mark.slow
def test_runs_of_equal_time(make, go):
    study = make("seconds=0.5", "seeds=[0]", "schemes=[pre,attnres]")
    outcome = go(study)
    paces = json.loads((outcome.folder.path / "pace.json").read_text())
    assert len(paces) == 2
    assert {row["steps"] for row in outcome.rows} == {max(round(0.5 / pace), 1) for pace in paces.values()}
    # A later session times nothing again, so that its runs are the same ones.
    again = go(study)
    assert (again.watcher.over, again.watcher.notes) == ([], [])
    assert [row["run"] for row in report(study, outcome.folder.path).rows] == [row["run"] for row in outcome.rows]


def test_all_runs_have_the_data_that_the_first_had(make, go, tmp_path):
    study = make("schemes=[pre]")
    outcome = go(make("schemes=[pre]", "seeds=[0]"))
    (tmp_path / "corpus" / "file0.py").write_bytes(bytes(range(25)))
    shutil.rmtree(tmp_path / "cache")
    changed = go(study)
    assert statuses(changed) == ["finished", "failed"]
    assert "is not the one that data.sha256 asks for" in changed.rows[1]["why"]
    assert stamps(outcome).items() <= stamps(changed).items()


@pytest.mark.slow
def test_a_study_that_is_killed_five_times_ends_in_the_same_table(make, go, tmp_path):
    import multiprocessing
    import random

    words = ["lrs=[1e-2,1e30]", "train.steps=30", "train.checkpoint_every=7", "model.config.attention_dropout=0.2"]
    study = make(*words)
    started = time.monotonic()
    unbroken = go(study, out="unbroken", jobs=2)
    longest = time.monotonic() - started
    moments = random.Random(7)
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        # Not a daemon, as it has workers of its own.
        child = context.Process(target=go, args=(study,), kwargs={"out": "broken", "jobs": 2})
        child.start()
        child.join(moments.uniform(0.05, 0.5) * longest)
        child.kill()
        child.join()
    broken = go(study, out="broken", jobs=2)
    assert statuses(unbroken) == ["finished", "diverged"] * 4
    assert table(broken) == table(unbroken)
