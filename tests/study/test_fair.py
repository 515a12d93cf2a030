"""Runs of one seed start from the same weights and see the same data."""

import pytest
import torch

import siamesenorm
from siamesenorm.training import engine
from siamesenorm.training import run as training
from siamesenorm.training.build import build_model
from siamesenorm.training.display import Silent
from siamesenorm.training.settings import scheme_of


def weights(recipe):
    return {name: value.clone() for name, value in build_model(recipe).state_dict().items()}


def test_shared_parameters_start_equal_under_every_scheme(make):
    study = make("schemes=[pre,all,siamese:x=hybrid,siamese:topology=single]", "seeds=[0,1]")
    started = {seed: weights(next(run.recipe for run in study.runs if run.recipe.seed == seed)) for seed in (0, 1)}
    assert not torch.equal(*(each["model.embed_tokens.weight"] for each in started.values()))
    for run in study.runs:
        scheme, reference = scheme_of(run.recipe), started[run.recipe.seed]
        found = weights(run.recipe)
        shared = {name for name in found if name in reference and found[name].shape == reference[name].shape}
        # All but norms, which a scheme may have no place for.
        assert {name for name in reference if "norm" not in name} <= shared
        for name in shared:
            ratio = 1.0
            if not torch.equal(found[name], reference[name]):
                # A scheme's own initialisation multiplies what is drawn, and nothing else.
                ratio = (found[name] / reference[name]).median().item()
            assert torch.equal(found[name], reference[name] * ratio), (run.title, name)
        if scheme.name != "deepnorm":
            assert all(torch.equal(found[name], reference[name]) for name in shared), run.title
    assert "deepnorm" in siamesenorm.schemes()


def batches_of(recipe, folder, monkeypatch):
    seen = []
    step = engine.EngineModule.train_batch

    def watch(self, batch, dry_run=False):
        if not dry_run:
            seen.append(batch["input_ids"].clone())
        step(self, batch, dry_run)

    with monkeypatch.context() as patched:
        patched.setattr(engine.EngineModule, "train_batch", watch)
        training.train(recipe, folder, Silent())
    return torch.stack(seen)


def test_data_come_in_the_same_order_whatever_is_varied(make, tmp_path, monkeypatch):
    study = make("schemes=[pre,siamese:x=hybrid]", "lrs=[1e-3,1e-2]", "seeds=[0,1]")
    chosen = [study.runs[index] for index in (0, 3, 4)]
    one, other, reseeded = (batches_of(run.recipe, tmp_path / run.key, monkeypatch) for run in chosen)
    assert [run.values["seed"] for run in chosen] == [0, 0, 1]
    assert one.shape == (7, 4, 16)
    assert torch.equal(one, other)
    assert not torch.equal(one, reseeded)


@pytest.mark.slow
def test_a_run_learns_the_same_whatever_was_trained_before_it_in_its_process(make, go):
    alone = go(make("schemes=[siamese:x=hybrid]", "seeds=[1]"), out="alone")
    after = go(make("schemes=[attnres,siamese:x=hybrid]", "seeds=[1]"), out="after")
    assert alone.rows[0]["val_loss"] == after.rows[1]["val_loss"]
