"""Trackers, read back with their own tools where they have some."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from siamesenorm.residual import ConfigError
from siamesenorm.training.evaluate import Evaluation
from siamesenorm.training.events import Step
from siamesenorm.training.recipe import flatten
from siamesenorm.training.trackers import TensorBoard, Trackers, Tracking, WeightsAndBiases


def step(number: int, loss: float = 2.0, validation: float | None = None, **fields) -> Step:
    """Ten tokens and half a second each."""
    return Step(
        step=number,
        loss=loss,
        lr=number / 100,
        grad_norm=0.5,
        tokens=10 * number,
        seconds=0.5 * number,
        validation=None if validation is None else Evaluation(loss=validation, tokens=4),
        **fields,
    )


def session(trackers: Trackers, after: int, steps: list[Step], summary=None) -> None:
    trackers.resumed(after)
    for each in steps:
        trackers.step(each)
    trackers.close(summary)


def scalars(folder: Path) -> dict[str, dict[int, list[float]]]:
    """What TensorBoard shows: by tag and step, all values there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder)).Reload()
    shown: dict[str, dict[int, list[float]]] = {}
    for tag in read.Tags()["scalars"]:
        for event in read.Scalars(tag):
            shown.setdefault(tag, {}).setdefault(event.step, []).append(event.value)
    return shown


def fail(message: str) -> None:
    pytest.fail(f"nothing may be said here: {message}")


def test_tensorboard_shows_every_figure(tmp_path):
    trackers = Trackers({"TensorBoard": TensorBoard(tmp_path)}, fail)
    steps = [step(1), step(2, validation=1.5, parts={"router_loss": 0.25}), step(3, loss=math.inf, skipped=True)]
    session(trackers, 0, steps, {"val_loss": 1.5})
    assert scalars(tmp_path) == {
        "train/loss": {1: [2.0], 2: [2.0], 3: [math.inf]},
        "train/lr": {n: [pytest.approx(n / 100)] for n in (1, 2, 3)},
        "train/grad_norm": {n: [0.5] for n in (1, 2, 3)},
        "train/tokens": {n: [10.0 * n] for n in (1, 2, 3)},
        "train/tokens_per_second": {n: [20.0] for n in (1, 2, 3)},
        "train/router_loss": {2: [0.25]},
        "train/skipped": {3: [1.0]},
        "validation/loss": {2: [1.5]},
    }


def test_steps_done_again_do_not_double_in_tensorboard(tmp_path):
    first = Trackers({"TensorBoard": TensorBoard(tmp_path)}, fail)
    first.resumed(0)
    for number in range(1, 6):
        first.step(step(number, loss=1.0))
    # The process is killed here: nothing is closed, and what a checkpoint needs was flushed.
    first.flush()
    session(Trackers({"TensorBoard": TensorBoard(tmp_path)}, fail), 3, [step(n, loss=9.0) for n in range(4, 8)])
    shown = scalars(tmp_path)
    assert shown["train/loss"] == {1: [1.0], 2: [1.0], 3: [1.0], 4: [9.0], 5: [9.0], 6: [9.0], 7: [9.0]}
    # What the step before a resume took is not known to the session after it.
    assert sorted(shown["train/tokens_per_second"]) == [1, 2, 3, 5, 6, 7]


def test_a_run_that_starts_afresh_takes_everything_back(tmp_path):
    for loss in (1.0, 2.0):
        session(Trackers({"TensorBoard": TensorBoard(tmp_path)}, fail), 0, [step(1, loss), step(2, loss)])
    assert scalars(tmp_path)["train/loss"] == {1: [2.0], 2: [2.0]}


class Stub:
    """What is used of the wandb package; a server that remembers runs by id."""

    def __init__(self) -> None:
        self.runs: dict[str, StubRun] = {}

    def Settings(self, **settings) -> dict:  # noqa: N802
        return settings

    def init(self, *, id: str, resume: str, **options) -> StubRun:
        assert resume == "allow"
        run = self.runs.setdefault(id, StubRun())
        run.starting_step = max(run.history, default=-1) + 1
        run.sessions.append(options)
        return run


class StubRun:
    offline = False
    disabled = False
    url = "https://wandb.example/run"

    def __init__(self) -> None:
        self.history: dict[int, dict] = {}
        self.sessions: list[dict] = []
        self.summary: dict = {}
        self.exits: list[int] = []
        self.starting_step = 0

    def log(self, figures: dict, step: int) -> None:
        assert step >= max(self.history, default=0), "W&B's steps never go back"
        self.history[step] = figures

    def finish(self, exit_code: int) -> None:
        self.exits.append(exit_code)


@pytest.fixture
def stub(monkeypatch) -> Stub:
    made = Stub()
    monkeypatch.setitem(sys.modules, "wandb", made)
    return made


def test_a_resumed_run_goes_on_in_the_same_wandb_run(stub, tiny, tmp_path):
    tracking, recipe = Tracking(wandb="project"), tiny()
    tracking.check()
    folder = tmp_path / "the-run"
    folder.mkdir()
    first = tracking.open(folder, recipe, fail)
    assert first.places == ["https://wandb.example/run"]
    session(first, 0, [step(n, loss=1.0) for n in range(1, 6)])
    session(tracking.open(folder, recipe, fail), 3, [step(n, loss=9.0) for n in range(4, 8)], {"val_loss": 1.5})
    (run,) = stub.runs.values()
    assert [run.history[n]["train/loss"] for n in range(1, 8)] == [1.0] * 5 + [9.0] * 2
    assert run.exits == [1, 0]
    assert run.summary == {"val_loss": 1.5}
    for options in run.sessions:
        assert options["project"] == "project"
        assert options["name"] == "the-run"
        assert options["dir"] == str(folder)
        assert options["config"] == flatten(recipe)
        assert options["config"]["model.options.x"] == "hybrid"


def test_two_folders_are_two_wandb_runs(stub, tiny, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        session(Tracking(wandb="project").open(tmp_path / name, tiny(), fail), 0, [step(1)])
    assert len(stub.runs) == 2


@pytest.fixture
def wandb_mode(monkeypatch) -> Iterator[Callable[[str], None]]:
    """Sets ``WANDB_MODE``, which the package reads once in a process."""
    import wandb

    wandb.teardown()
    yield lambda mode: monkeypatch.setenv("WANDB_MODE", mode)
    wandb.teardown()


def test_wandb_disabled_by_its_own_variable(tiny, tmp_path, wandb_mode):
    wandb_mode("disabled")
    trackers = Tracking(wandb="project").open(tmp_path, tiny(), fail)
    session(trackers, 0, [step(1)], {"val_loss": 1.0})


@pytest.mark.parametrize(("summary", "code"), [({}, 1), ({"diverged": True}, 1), ({"diverged": False}, 0)])
def test_wandb_hears_how_a_run_ended(stub, tiny, tmp_path, summary, code):
    session(Tracking(wandb="project").open(tmp_path, tiny(), fail), 0, [step(1)], summary)
    (run,) = stub.runs.values()
    assert run.exits == [code]


def payload(log: bytes) -> bytes:
    """What a W&B file holds, without the 7 bytes (checksum, length, kind) before each piece of a block of 32 KiB."""
    pieces, at = [], 7
    while at + 7 <= len(log):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length = int.from_bytes(log[at + 4 : at + 6], "little")
        pieces.append(log[at + 7 : at + 7 + length])
        at += 7 + length
    return b"".join(pieces)


def test_wandb_offline(tiny, tmp_path, wandb_mode, capfd):
    wandb_mode("offline")
    recipe = tiny()
    for after in (0, 2):
        # Sessions are told apart by the second in which they began.
        time.sleep(1.1)
        session(
            Trackers({"W&B": WeightsAndBiases("project", tmp_path, recipe, "name")}, fail),
            after,
            [step(n, loss=n + 0.123456) for n in range(after + 1, after + 4)],
            {"val_loss": 1.5, "sample": None},
        )
    run_id = (tmp_path / "wandb" / "run-id.txt").read_text().strip()
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {path.stem for path in files} == {f"run-{run_id}"}
    # A process of W&B's own writes them, now and then after it has said that it did.
    expected = (b"train/loss", b"3.123456", b"5.123456", b"model.config.hidden_size", b"val_loss")
    until = time.monotonic() + 30
    while True:
        content = b"".join(payload(path.read_bytes()) for path in files)
        missing = [each for each in expected if each not in content]
        if not missing or time.monotonic() > until:
            break
        time.sleep(0.1)
    assert not missing
    assert capfd.readouterr().out == ""


def test_wandb_that_cannot_start_is_an_error(stub, tiny, tmp_path, monkeypatch):
    def refuse(**options):
        raise RuntimeError("no API key\nconfigured")

    monkeypatch.setattr(stub, "init", refuse)
    with pytest.raises(ConfigError, match=r"no API key configured; 'wandb login'.*WANDB_MODE=offline"):
        Tracking(wandb="project").open(tmp_path, tiny(), fail)


@pytest.mark.parametrize(
    ("tracking", "module", "package"),
    [
        (Tracking(tensorboard=True), "torch.utils.tensorboard", "tensorboard"),
        (Tracking(wandb="project"), "wandb", "wandb"),
    ],
)
def test_a_missing_package_is_named(tracking, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        tracking.check()


def test_a_folder_called_wandb_is_not_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())
    with pytest.raises(ConfigError, match="pip install wandb"):
        Tracking(wandb="project").check()
    with pytest.raises(ConfigError, match="name of a project"):
        Tracking(wandb="").check()


def test_no_trackers_unless_asked_for(tiny, tmp_path):
    Tracking().check()
    trackers = Tracking().open(tmp_path, tiny(), fail)
    session(trackers, 0, [step(1)], {"val_loss": 1.0})
    assert trackers.places == []
    assert [path.name for path in tmp_path.iterdir() if path.name in ("tensorboard", "wandb")] == []


class Failing:
    """A tracker that fails at one of its methods."""

    place = "nowhere"

    def __init__(self, at: str) -> None:
        self.at = at
        self.heard: list[str] = []

    def _hear(self, what: str) -> None:
        self.heard.append(what)
        if what == self.at:
            raise OSError(28, "No space left\non device")

    def resumed(self, step) -> None:
        self._hear("resumed")

    def log(self, step, figures) -> None:
        self._hear("log")

    def flush(self) -> None:
        self._hear("flush")

    def close(self, summary) -> None:
        self._hear("close")


@pytest.mark.parametrize("at", ["resumed", "log", "flush", "close"])
def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(at, tmp_path):
    said: list[str] = []
    failing, healthy = Failing(at), TensorBoard(tmp_path)
    trackers = Trackers({"Failing": failing, "TensorBoard": healthy}, said.append)
    trackers.resumed(0)
    for number in (1, 2, 3):
        trackers.step(step(number))
        trackers.flush()
    trackers.close(None)
    trackers.close(None)
    assert len(said) == 1
    assert "Failing failed" in said[0]
    assert "No space left on device" in said[0]
    assert failing.heard.count(at) == 1
    assert failing.heard[-1] == at
    assert sorted(scalars(tmp_path)["train/loss"]) == [1, 2, 3]


def test_a_full_disk_under_tensorboard_is_a_warning(tmp_path, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    said: list[str] = []
    board = TensorBoard(tmp_path)
    trackers = Trackers({"TensorBoard": board}, said.append)
    trackers.resumed(0)
    # The writer works in a thread of its own, so its error comes up at a later call.
    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    writer = board._writer.file_writer.event_writer._async_writer
    writer._writer._writer = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    for number in range(1, 40):
        trackers.step(step(number))
        trackers.flush()
    trackers.close(None)
    writer._worker.join()
    assert len(said) == 1
    assert "No space left" in said[0]
