"""Training on from an upcycled model: only what is new at first, and X opened on a schedule."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from siamesenorm import convert, hosts
from siamesenorm.residual import ConfigError, own_parameters
from siamesenorm.training import engine
from siamesenorm.training.build import build_model, check
from siamesenorm.training.run import train
from siamesenorm.training.run_folder import read_metrics
from tests.hosts.tiny import host
from tests.training.test_pretrained import BYTES
from tests.training.test_run import Killed, assert_same, kill
from tests.training.tiny import Watcher

OPENED = ("norm_x.weight", "c1")


@pytest.fixture
def recipes(tiny, tmp_path):
    """Makes a recipe that goes on from an upcycled model, with overrides."""
    convert.upcycle(host("llama", **BYTES)).save_pretrained(tmp_path / "upcycled")
    base = {
        "model.scheme": "siamese",
        "model.options": "{x: post, x_init: 0.0, y_eps: 1.0}",
        "model.config": "{}",
        "model.pretrained": tmp_path / "upcycled",
        "data.sequence_length": 16,
    }
    return lambda *overrides: tiny(*(f"{key}={value}" for key, value in base.items()), *overrides)


@pytest.fixture
def seen(monkeypatch):
    """Every weight before each step of the train module, and after it, by the trainer's step."""
    found, plain = {}, engine.EngineModule.optim_step

    def watched(self):
        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        plain(self)
        after = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        found[self.trainer.global_step] = (before, after)

    monkeypatch.setattr(engine.EngineModule, "optim_step", watched)
    return found


def moved(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_only_what_is_new_moves_at_first(recipes, tmp_path, seen):
    recipe = recipes("schedule.own_steps=3", "schedule.warmup_steps=0", "optim.weight_decay=0.5")
    model = build_model(recipe)
    own, everything = set(own_parameters(model)), {name for name, _ in model.named_parameters()}
    assert len(own) == 10
    assert train(recipe, tmp_path / "run", Watcher()).status == "finished"
    for step, (before, after) in seen.items():
        assert moved(before, after) == (own if step <= 3 else everything), step
    # The rate that is told is that of what moves.
    assert all(line["lr"] > 0 for line in read_metrics(tmp_path / "run" / "metrics.jsonl")[:-1])


def test_x_opens_by_equal_parts(recipes, tmp_path, seen):
    opened = recipes("schedule.open_steps=4", "optim.lr=1e-12", "optim.weight_decay=0.0")
    assert train(opened, tmp_path / "run", Watcher()).status == "finished"
    for step, (_, after) in seen.items():
        for name, weight in after.items():
            if name.endswith(OPENED):
                torch.testing.assert_close(weight, torch.full_like(weight, min(step / 4, 1)), rtol=0, atol=1e-6)
    first = seen[1][0]
    assert all(not weight.any() for name, weight in first.items() if name.endswith(OPENED))
    for name, weight in first.items():
        if not name.endswith(OPENED):
            torch.testing.assert_close(weight, seen[7][1][name], rtol=0, atol=1e-6)
    # What is saved is what was trained: no schedule is left in it.
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(weight, seen[7][1][name]) for name, weight in saved.items())


@pytest.mark.parametrize("at", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_resumed_run_goes_on_with_both(recipes, tmp_path, at):
    recipe = recipes("schedule.own_steps=3", "schedule.open_steps=5", "train.checkpoint_every=1")
    train(recipe, tmp_path / "unbroken", Watcher())
    with pytest.raises(Killed):
        train(recipe, tmp_path / "broken", Watcher(at, kill))
    train(recipe, tmp_path / "broken", Watcher())
    assert_same(tmp_path / "broken", tmp_path / "unbroken")


def test_a_schedule_for_what_is_not_there_is_refused(recipes, tiny):
    for overrides, message in (
        (("model.scheme=pre", "schedule.own_steps=2"), "own_steps .*'pre' .* adds nothing"),
        (("model.options={x: post}", "schedule.open_steps=2"), "open_steps .*'siamese' is closed"),
        (("model.scheme=mhc", "schedule.open_steps=2"), "open_steps .*'mhc' is closed"),
        (("schedule.open_steps=8",), r"schedule\.open_steps \(8\) must not exceed train\.steps \(7\)"),
        (("schedule.own_steps=8",), r"schedule\.own_steps \(8\) must not exceed train\.steps \(7\)"),
        (("schedule.own_steps=-1",), r"schedule\.own_steps must be at least 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(tiny(*overrides))


def test_norms_per_head_are_the_schemes_own_where_it_brought_them():
    added = own_parameters(hosts.build("llama", {**BYTES}, "siamese", {"x": "hybrid"}))
    assert {name.split(".")[-2] for name in added if "self_attn" in name} == {"q_norm", "k_norm", "v_norm"}
    # Qwen3 has norms of q and k itself.
    added = own_parameters(hosts.build("qwen3", {**BYTES}, "siamese", {"x": "hybrid"}))
    assert {name.split(".")[-2] for name in added if "self_attn" in name} == {"v_norm"}
