"""The recipes that come with the package, and what a recipe takes from another."""

import pytest
import yaml

from siamesenorm.residual import ConfigError
from siamesenorm.training.build import check, parameter_counts
from siamesenorm.training.recipe import flatten
from siamesenorm.training.recipe_files import load
from tests.training.tiny import TREE

PAPER = ["lm-390m-l10", "lm-390m-l17", "lm-390m-l33", "lm-390m-l80", "lm-1.3b", "moe-15b-a2b"]


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_recipes_follow_it(name):
    recipe = load(name)
    tokens, params = {"lm-390m": (12e9, 390e6), "lm-1.3b": (100e9, 1.3e9), "moe-15b": (100e9, 15e9)}[name[:7]]
    trained = recipe.train.steps * recipe.train.batch_size * recipe.data.sequence_length
    assert trained == pytest.approx(tokens, rel=1e-4)
    # No data is needed to look at a recipe that gives its vocabulary.
    assert parameter_counts(check(recipe, needs_data=False))[0] == pytest.approx(params, rel=0.02)
    assert (recipe.model.scheme, recipe.model.options) == ("siamese", {"x": "hybrid"})
    assert (recipe.optim.lr, recipe.schedule.warmup_steps, recipe.schedule.final_fraction) == (1e-3, 2000, 0.1)
    config = recipe.model.config
    assert config["hidden_size"] / config["num_attention_heads"] in (64, 128)


@pytest.mark.parametrize("name", PAPER)
def test_their_data_must_be_there_to_train(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"siamesenorm data prepare .* --out data/fineweb-edu"):
        check(load(name))


@pytest.fixture
def write(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(TREE))

    def child(tree, name="child.yaml"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(tree))
        return str(path)

    return child


def test_a_recipe_gives_what_differs_from_the_one_that_it_extends(write, tmp_path):
    recipe = load(write({"extends": "base.yaml", "model": {"config": {"hidden_size": 32}}, "optim": {"lr": 1.0}}))
    expected = {**flatten(load(str(tmp_path / "base.yaml"))), "model.config.hidden_size": 32, "optim.lr": 1.0}
    assert flatten(recipe) == {**expected, "name": "child"}


def test_extending_goes_over_several_recipes_and_packaged_ones(write):
    write({"extends": "lm-tiny", "seed": 3}, "middle.yaml")
    recipe = load(write({"extends": "middle.yaml", "optim": {"lr": 1.0}}), ["optim.beta1=0.5"])
    assert (recipe.seed, recipe.optim.lr, recipe.optim.beta1) == (3, 1.0, 0.5)
    assert recipe.model == load("lm-tiny").model


def test_another_scheme_does_not_inherit_options(write):
    assert load(write({"extends": "base.yaml", "model": {"scheme": "pre"}})).model.options == {}
    same = load(write({"extends": "base.yaml", "model": {"scheme": "siamese", "options": {"depth_scale": "none"}}}))
    assert same.model.options == {"x": "hybrid", "depth_scale": "none"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"extends": "child.yaml"}, "extends itself"),
        ({"extends": "lm-tinny"}, "did you mean 'lm-tiny'"),
        ({"extends": "nowhere.yaml"}, "there is no recipe file"),
        ({"extends": ["base.yaml"]}, "must be a recipe's name or path"),
        ({"extends": "base.yaml", "optim": {"lrr": 1}}, "unknown key 'optim.lrr'"),
        ({"extends": "base.yaml", "optim": 1}, "optim must be a mapping"),
    ],
)
def test_what_cannot_be_extended_is_refused(write, tree, message):
    with pytest.raises(ConfigError, match=message):
        load(write(tree))
