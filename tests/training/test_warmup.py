"""A residual warm-up in training: its step is the run's, through resumes, validation and saving."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from siamesenorm import hosts
from siamesenorm.residual import ConfigError, Sublayer
from siamesenorm.training import engine
from siamesenorm.training.run import train
from tests.training.test_run import Killed, assert_same, kill
from tests.training.tiny import Watcher

WARM = ("model.scheme=siamese", "model.options.warmup_steps=2")


def gates(model):
    return [float(module.gate) for module in model.modules() if isinstance(module, Sublayer)]


@pytest.fixture
def seen(monkeypatch):
    """The gates at each forward of the train module, with the trainer's step; -1 for a trial batch."""
    found, plain = [], engine.EngineModule.train_batch

    def watched(self, batch, dry_run=False):
        plain(self, batch, dry_run)
        found.append((-1 if dry_run else self.trainer.global_step, gates(self.model)))

    monkeypatch.setattr(engine.EngineModule, "train_batch", watched)
    return found


def expected(t):
    return [min(t / 2, 1.0)] * 2 + [min(t / 4, 1.0)] * 2


def test_gates_follow_the_step_from_1(tiny, tmp_path, seen):
    assert train(tiny(*WARM), tmp_path / "run", Watcher()).status == "finished"
    assert [t for t, _ in seen if t > 0] == list(range(1, 8))
    assert all(found == expected(max(t, 1)) for t, found in seen)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert gates(model) == [1.0] * 4
    assert hosts.scheme_of(model.config).warmup_steps == 2


# In the warm-up, and when no step is left; a run killed at a step resumes before it.
@pytest.mark.parametrize(("scheme", "at"), [("mhc", 3), ("siamese", 4), ("siamese", 7)])
def test_a_resumed_run_goes_on_with_its_gates(tiny, tmp_path, seen, scheme, at):
    recipe = tiny(f"model.scheme={scheme}", "model.options={warmup_steps: 3}", "train.checkpoint_every=1")
    train(recipe, tmp_path / "unbroken", Watcher())
    with pytest.raises(Killed):
        train(recipe, tmp_path / "broken", Watcher(at, kill))
    seen.clear()
    train(recipe, tmp_path / "broken", Watcher())
    assert [t for t, _ in seen if t > 0] == list(range(at, 8))
    for t, found in seen:
        assert t < 0 or found == pytest.approx([min(t / 3, 1.0)] * 2 + [min(t / 6, 1.0)] * 2)
    assert_same(tmp_path / "broken", tmp_path / "unbroken")


def test_a_validation_sees_the_gates_of_its_step(tiny, tmp_path, monkeypatch):
    from siamesenorm.training.tasks import text

    found, plain = [], text.evaluate

    def watched(model, *args, **kwargs):
        found.append(gates(model))
        return plain(model, *args, **kwargs)

    monkeypatch.setattr(text, "evaluate", watched)
    train(tiny(*WARM), tmp_path / "run", Watcher())
    assert found == [expected(t) for t in (3, 6, 7)]


def test_a_warmup_longer_than_the_run_is_said(tiny, tmp_path):
    watcher = Watcher()
    train(tiny("model.options.warmup_steps=4", "train.steps=3"), tmp_path / "run", watcher)
    assert any("residual warm-up of scheme 'siamese' is not over at the last step, 3" in w for w in watcher.warnings)
    watcher = Watcher()
    train(tiny(*WARM), tmp_path / "other", watcher)
    assert not any("warm-up" in warning for warning in watcher.warnings)


def test_a_warmup_of_no_steps_is_refused_before_anything_is_written(tiny, tmp_path):
    with pytest.raises(ConfigError, match="a schedule of no steps"):
        train(tiny("model.options.warmup_steps=0"), tmp_path / "run", Watcher())
    assert not (tmp_path / "run").exists()


def test_a_warmup_changes_what_is_learnt(tiny, tmp_path):
    plain = train(tiny(), tmp_path / "plain", Watcher()).summary
    warm = train(tiny("model.options.warmup_steps=2"), tmp_path / "warm", Watcher()).summary
    assert warm["val_loss"] != plain["val_loss"]
    assert torch.isfinite(torch.tensor(warm["val_loss"]))
