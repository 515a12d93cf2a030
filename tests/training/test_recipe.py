from dataclasses import FrozenInstanceError

import pytest

from siamesenorm.residual import ConfigError
from siamesenorm.training import recipe_files
from siamesenorm.training.recipe import flatten, from_mapping, to_mapping
from siamesenorm.training.recipe_files import dump, load, packaged_names, read


def test_every_packaged_recipe_loads_and_survives_yaml(tmp_path):
    assert "lm-tiny" in packaged_names()
    for name in packaged_names():
        recipe = load(name)
        assert recipe.name == name
        path = tmp_path / f"{name}.yaml"
        path.write_text(dump(recipe))
        assert from_mapping(read(path)) == recipe


def test_the_default_names_its_x_stream():
    assert load("lm-tiny").model.scheme == "siamese"
    assert "x" in load("lm-tiny").model.options


def test_overrides_are_typed():
    recipe = load(
        "lm-tiny",
        [
            "optim.lr=1e-3",
            "train.steps=1_0",
            "schedule.warmup_steps=0",
            "train.compile=true",
            "train.max_grad_norm=null",
            "optim.weight_decay=0",
            "model.config.rope_theta=5e5",
            "sample.prompt='a=b'",
        ],
    )
    assert recipe.optim.lr == 0.001
    assert recipe.train.steps == 10
    assert recipe.train.compile is True
    assert recipe.train.max_grad_norm is None
    assert isinstance(recipe.optim.weight_decay, float)
    assert recipe.model.config["rope_theta"] == 500000.0
    assert recipe.sample.prompt == "a=b"


def test_a_new_scheme_drops_the_old_ones_options():
    base = load("lm-tiny")
    assert load("lm-tiny", ["model.scheme=pre"]).model.options == {}
    assert load("lm-tiny", ["model.scheme=siamese"]).model.options == base.model.options
    kept = load("lm-tiny", ["model.options.depth_scale=none", "model.scheme=siamese"]).model.options
    assert kept == {**base.model.options, "depth_scale": "none"}
    switched = load("lm-tiny", ["model.options.a=1", "model.scheme=pre"])
    assert switched.model.options == {"a": 1}
    same = {key: value for key, value in flatten(load("lm-tiny", ["model.scheme=pre"])).items() if "model." not in key}
    assert same == {key: value for key, value in flatten(base).items() if "model." not in key}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lrr=1"], "unknown key 'optim.lrr'; did you mean 'optim.lr'"),
        (["lr=1"], "unknown key 'lr'; did you mean 'optim.lr'"),
        (["train.lr=1"], "did you mean 'optim.lr'"),
        (["model.option.x=post"], "unknown key 'model.option.x'"),
        (["model.config.a.b=1"], "unknown key 'model.config.a.b'"),
        (["model=1"], "unknown key 'model'"),
        (["train.steps=ten"], "train.steps must be a whole number, not 'ten'"),
        (["train.steps=1.5"], "train.steps must be a whole number, not 1.5"),
        (["train.steps=true"], "train.steps must be a whole number, not True"),
        (["train.steps="], "train.steps must be a whole number, not None"),
        (["optim.lr=fast"], "optim.lr must be a number, not 'fast'"),
        (["train.compile=1"], "train.compile must be true or false, not 1"),
        (["train.max_grad_norm=big"], "train.max_grad_norm must be a number or null, not 'big'"),
        (["model.scheme=3"], "model.scheme must be text, not 3"),
        (["model.options=3"], "model.options must be a mapping"),
        (["train.steps=0"], "train.steps must be at least 1"),
        (["optim.lr=0"], "optim.lr must be above 0"),
        (["optim.lr=.nan"], "optim.lr must be above 0"),
        (["optim.beta2=1"], "optim.beta2 must be at least 0 and below 1"),
        (["train.precision=float16"], "train.precision must be one of float32, bfloat16"),
        (["train.batch_size=6", "train.micro_batch_size=4"], "must be a multiple of train.micro_batch_size"),
        (["train.steps=5", "schedule.warmup_steps=6"], "must not exceed train.steps"),
        (["task=causal"], "unknown task 'causal'"),
        (["seed=1", "seed=2"], "seed is given twice"),
        (["seed"], "'seed' is no override"),
        (["sample.prompt='open"], "cannot be read as YAML"),
    ],
)
def test_a_wrong_override_is_refused_in_words(overrides, message):
    with pytest.raises(ConfigError) as caught:
        load("lm-tiny", overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", "the key 'name' is given twice"),
        ("name: [", "is not valid YAML"),
        ("- 1\n", "holds no recipe"),
        ("", "holds no recipe"),
        ("name: a\n", "the recipe lacks 'model'"),
        ("name: a\nmodel: 3\n", "model must be a mapping"),
        ("name: a\nmodle: {}\n", "unknown key 'modle' in the recipe; did you mean 'model"),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path, text, message):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(str(path))
    assert message in str(caught.value)


def test_unknown_recipes_name_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="unknown recipe 'lm-tinny'; did you mean 'lm-tiny'"):
        load("lm-tinny")
    with pytest.raises(ConfigError, match="there is no recipe file"):
        load(str(tmp_path / "no.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"cannot read|not valid YAML"):
        load(str(tmp_path / "bytes.yaml"))


def test_recipes_cannot_be_changed_after_they_are_made():
    recipe = load("lm-tiny")
    with pytest.raises(FrozenInstanceError):
        recipe.seed = 3
    tree = to_mapping(recipe)
    tree["model"]["options"]["x"] = "changed"
    assert recipe.model.options["x"] != "changed"


def test_installed_recipes_are_found_inside_the_package(tmp_path, monkeypatch):
    package = tmp_path / "siamesenorm"
    (package / "recipes").mkdir(parents=True)
    (package / "training").mkdir()
    monkeypatch.setattr(recipe_files, "__file__", str(package / "training" / "recipe_files.py"))
    assert recipe_files.packaged_folder() == package / "recipes"


@pytest.mark.parametrize("leaf", ["{{x: {0}, y: {0}}}", "[{0}, {0}]"])
def test_aliases_that_multiply_are_refused(leaf, tmp_path):
    """Forty lines that come to 2**40 values."""
    lines = ["a0: &a0 {x: 1}", *(f"a{i + 1}: &a{i + 1} " + leaf.format(f"*a{i}") for i in range(40))]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="more than 100,000 values"):
        load(str(tmp_path / "bomb.yaml"))
    (tmp_path / "bomb.yaml").write_text("a: &a\n  b: *a\n")
    with pytest.raises(ConfigError, match="contains itself"):
        load(str(tmp_path / "bomb.yaml"))
