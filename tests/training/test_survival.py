"""Ends that come from outside: kill -9 at any moment, a full disk, signals to several processes."""

import json
import multiprocessing
import os
import random
import resource
import signal
import time

import pytest

from siamesenorm.training.events import SaveError
from siamesenorm.training.run import train
from siamesenorm.training.run_folder import read_metrics
from tests.training.test_distributed import MOE, TIED, alone, folder, torchrun
from tests.training.test_run import Killed, assert_same, kill
from tests.training.tiny import Watcher

__all__ = ["alone", "folder"]

FORMS = {"dense": [], "dense-tied": TIED, "moe": MOE, "moe-tied": [*MOE, *TIED]}
# So many steps that a moment is more often in a step, a validation or a checkpoint than before the first.
LONG = ["train.steps=40", "train.checkpoint_every=3", "train.validate_every=5"]
fork = multiprocessing.get_context("fork")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_kill_at_any_moment_changes_nothing(tiny, tmp_path, form):
    recipe = tiny(*LONG, *FORMS[form])
    started = time.monotonic()
    train(recipe, tmp_path / "unbroken", Watcher())
    longest = time.monotonic() - started
    moments = random.Random(form)
    resumed = []
    for attempt in range(5):
        out = tmp_path / f"broken-{attempt}"
        child = fork.Process(target=train, args=(recipe, out, Watcher()))
        child.start()
        child.join(moments.uniform(0.1, 0.9) * longest)
        child.kill()
        child.join()
        watcher = Watcher()
        train(recipe, out, watcher)
        resumed += watcher.begun
        assert_same(out, tmp_path / "unbroken")
    assert any(resumed), "every kill came before the first checkpoint"


@pytest.mark.parametrize("form", ["dense", "moe-tied"])
def test_a_full_disk_ends_the_run_in_words_and_what_is_there_loads(tiny, tmp_path, form):
    recipe, out = tiny(*FORMS[form]), tmp_path / "broken"
    train(recipe, tmp_path / "unbroken", Watcher())

    def fill():
        # No file may grow beyond this from now on, which the operating system answers as it does a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(
            SaveError, match=r"checkpoint of step 4 cannot be written to .*: .*\. The run stopped"
        ) as caught:
            train(recipe, out, Watcher(3, fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    watcher = Watcher()
    assert train(recipe, out, watcher).status == "finished"
    assert watcher.begun == [2]
    assert_same(out, tmp_path / "unbroken")


def test_skipped_steps_are_written_down_and_resumed(tiny, tmp_path, monkeypatch):
    from siamesenorm.training.engine import EngineModule

    step_of = EngineModule.optim_step

    def spoil(self):
        if self.trainer.global_step in (3, 6):
            self._batch_losses[0] = float("inf")
        step_of(self)

    monkeypatch.setattr(EngineModule, "optim_step", spoil)
    recipe = tiny("train.skip_nonfinite=1")
    watcher = Watcher()
    summary = train(recipe, tmp_path / "unbroken", watcher).summary
    assert (summary["skipped_steps"], summary["steps"]) == (2, 7)
    lines = read_metrics(tmp_path / "unbroken" / "metrics.jsonl")
    assert [line["step"] for line in lines if line.get("skipped")] == [3, 6]
    assert [line["loss"] for line in lines if line.get("skipped")] == [None, None]
    assert sum("is skipped" in warning for warning in watcher.warnings) == 2
    with pytest.raises(Killed):
        train(recipe, tmp_path / "broken", Watcher(4, kill))
    train(recipe, tmp_path / "broken", Watcher())
    assert_same(tmp_path / "broken", tmp_path / "unbroken")
    stopped = train(tiny(), tmp_path / "stopped", Watcher())
    assert (stopped.status, stopped.summary["diverged_at_step"]) == ("diverged", 3)


def go(folder, jobs, *, expect=0, during=None):
    (folder / "jobs.json").write_text(json.dumps(jobs))
    process = torchrun(folder, "-m", "tests.training.worker", folder)
    if during is not None:
        during(process)
    output, _ = process.communicate(timeout=120)
    assert (process.returncode == 0) == (expect == 0), output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dense", "moe-tied"])
@pytest.mark.parametrize(("at", "on"), [(3, 1), (5, 0)])
def test_a_killed_process_of_two_ends_both_and_both_resume(folder, form, at, on):
    name = f"killed-{form}-{at}"
    whole = {"overrides": FORMS[form], "out": f"{name}/unbroken"}
    broken = {"overrides": FORMS[form], "out": f"{name}/broken"}
    go(folder, [whole, {**broken, "at": at, "signal": "SIGKILL", "on": on}], expect=1)
    assert not (folder / broken["out"] / "summary.json").exists()
    go(folder, [broken])
    assert json.loads((folder / "results.json").read_text())[0]["begun"] == [(at - 1) // 2 * 2]
    assert_same(folder / broken["out"], folder / whole["out"])


@pytest.mark.slow
def test_ten_runs_of_two_processes_end(folder):
    for attempt in range(10):
        started = time.monotonic()
        go(folder, [{"overrides": MOE if attempt % 2 else [], "out": f"again-{attempt}"}])
        assert time.monotonic() - started < 100
        (done,) = json.loads((folder / "results.json").read_text())
        assert done["statuses"] == ["finished", "finished"]


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_and_leaves(folder):
    out = folder / "terminated"
    overrides = ["train.steps=100000", "train.validate_every=1000000", "train.checkpoint_every=1000000"]
    arguments = ["-m", "siamesenorm", "train", folder / "tiny.yaml", *overrides, "--out", out]
    process = torchrun(folder, *arguments)
    deadline = time.monotonic() + 90
    while not read_metrics(out / "metrics.jsonl") and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert "and saved; the same command goes on from there" in output
    (checkpoint,) = (out / "checkpoints").glob("step*")
    assert (checkpoint / "manifest.json").exists()
    assert os.path.exists(checkpoint / "train" / "rank1.pt")
