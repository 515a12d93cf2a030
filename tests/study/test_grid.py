"""Grids: axes as words, their runs, and what is refused."""

import itertools

import pytest
import yaml

import siamesenorm
from siamesenorm.residual import ConfigError
from siamesenorm.study.grid import changed, load_study, study_from, to_mapping
from siamesenorm.study.timing import kind, of_equal_time
from siamesenorm.training.build import check, parameter_counts
from siamesenorm.training.recipe import flatten
from siamesenorm.training.recipe_files import packaged_names
from tests.training.tiny import TREE, write_recipe


@pytest.fixture
def study(tmp_path):
    write_recipe(tmp_path)

    def make(*words, **fields):
        tree = {"recipe": "tiny.yaml", "axes": {"schemes": ["pre", "siamese"], "seeds": [0, 1]}, **fields}
        (tmp_path / "small.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        return load_study(str(tmp_path / "small.yaml"), words)

    return make


def test_runs_are_the_product_of_the_axes_seed_after_seed(study):
    made = study("lrs=[1e-3,4e-3]")
    assert [run.title for run in made.runs] == [
        f"{scheme}, seed {seed}, lr {lr}"
        for seed, scheme, lr in itertools.product((0, 1), ("pre", "siamese"), (0.001, 0.004))
    ]
    for run in made.runs:
        recipe = run.recipe
        assert (recipe.model.scheme, recipe.seed, recipe.optim.lr) == tuple(run.values.values())
        assert (run.places["lr"], run.places["scheme"], run.places["seed"]) == (recipe.optim.lr, None, None)
        # All options are written down, and those of the recipe's own scheme do not reach another.
        assert recipe.model.options == siamesenorm.residual.make_scheme(recipe.model.scheme).options()
    keys = {run.key for run in made.runs}
    assert len(keys) == 8
    # A run is the same in any grid that has it.
    assert {run.key for run in study("lrs=[4e-3]").runs} < keys


def test_nothing_differs_between_runs_but_the_axes(study):
    made = study("lrs=[1e-3,4e-3]", "optim.weight_decay=0.3", "steps=70")
    flat = [flatten(run.recipe) for run in made.runs]
    varied = {key for key in flat[0] if len({str(each.get(key)) for each in flat}) > 1}
    assert {key for key in varied if not key.startswith("model.options.")} == {"model.scheme", "optim.lr", "seed"}
    assert {each["optim.weight_decay"] for each in flat} == {0.3}
    # The warm-up is 2 of 7 steps in the recipe.
    assert {(each["train.steps"], each["schedule.warmup_steps"]) for each in flat} == {(70, 20)}


def test_axes_that_are_not_given_are_added_and_those_that_are_replaced(study):
    made = study("seeds=[5]", "optim.beta2=0.9", axes={"schemes": ["pre"], "seeds": [0], "optim.beta1": [0.8, 0.9]})
    assert [run.values for run in made.runs] == [
        {"scheme": "pre", "seed": 5, "optim.beta1": beta} for beta in (0.8, 0.9)
    ]
    assert [run.places["optim.beta1"] for run in made.runs] == [0.8, 0.9]
    # On the command line too, once the study has it as an axis.
    assert len(study("optim.beta1=[0.5,0.6,0.7]", axes={"optim.beta1": [0.8]}).runs) == 3


def test_a_warm_up_is_scaled_to_the_run(study):
    made = study("steps=1000", "warmups=[0,7,300 of 47684,2000 of 47684,1 of 1000000]", "seeds=[0]", "schemes=[pre]")
    # 300 · 1000 / 47684 is 6.29, and 2000 · 1000 / 47684 is 41.9; what is not nothing is at least a step.
    assert [run.recipe.schedule.warmup_steps for run in made.runs[:2]] == [0, 7]
    assert [run.recipe.schedule.warmup_steps for run in made.runs[2:]] == [6, 42, 1]
    assert made.runs[3].places["warmup"] == pytest.approx(4.2)
    assert made.runs[3].values["warmup"] == "2000 of 47684"


def test_all_stands_for_every_scheme_that_is_not_named(study):
    words = [run.values["scheme"] for run in study("schemes=[pre,all,siamese:x=hybrid]", "seeds=[0]").runs]
    assert (words[0], words[-1]) == ("pre", "siamese:x=hybrid")
    assert sorted(words[:-1]) == list(siamesenorm.schemes())


def test_a_study_survives_its_file(study):
    made = study("lrs=[1e-3]", "best_over=lrs", "optim.weight_decay=0.3", "seconds=5.5", "keep_models=false")
    again = study_from(yaml.safe_load(yaml.safe_dump(to_mapping(made))))
    assert again == made
    assert [run.key for run in again.runs] == [run.key for run in made.runs]
    assert changed(again, ["seeds=[1]"]).axes["seeds"] == (1,)


@pytest.mark.parametrize("name", packaged_names("study"))
def test_the_packages_studies_can_be_run(name):
    made = load_study(name)
    assert (made.name, made.title != "", made.about != "") == (name, True, True)
    assert made.base.name == "lm-study"
    assert len({run.recipe.seed for run in made.runs}) == 3
    for table in made.paper:
        if table.match is not None:
            assert {row[0] for row in table.rows} <= set(made.axes[table.match])


def test_the_studies_are_those_that_the_package_promises():
    assert packaged_names("study") == ["ablation", "depth", "lr", "schemes", "warmup"]


def test_depths_have_equal_parameters():
    made = load_study("depth", ["schemes=[pre]", "seeds=[0]"])
    counts = [parameter_counts(check(run.recipe))[0] for run in made.runs]
    assert len(counts) >= 4
    assert counts == pytest.approx([parameter_counts(check(made.base))[0]] * len(counts), rel=1e-3)
    assert [run.places["depth"] for run in made.runs] == [3, 6, 12, 24]
    widths = [run.recipe.model.config["hidden_size"] for run in made.runs]
    assert widths == sorted(widths, reverse=True)
    assert made.runs[0].values["depth"] == f"3x{widths[0]}"


def test_equal_time_gives_each_kind_of_run_its_own_number_of_steps(study):
    runs = study("steps=70", "lrs=[1e-3,2e-3]").runs
    fast, slow = runs[0], runs[2]
    assert (fast.values["scheme"], slow.values["scheme"]) == ("pre", "siamese")
    # Neither rate nor seed changes how long a step takes.
    assert len({kind(run.recipe) for run in runs}) == 2
    timed = of_equal_time(runs, 30.0, {kind(fast.recipe): 0.1, kind(slow.recipe): 0.4})
    for before, after in zip(runs, timed, strict=True):
        steps, warmup = (300, 86) if before.values["scheme"] == "pre" else (75, 21)
        assert (after.recipe.train.steps, after.recipe.schedule.warmup_steps) == (steps, warmup)
        assert (after.values, after.key != before.key) == (before.values, True)


def test_a_warm_up_stays_one_in_fewer_steps_and_two_runs_stay_apart(study):
    none, one = study("warmups=[0,1]", "schemes=[pre]", "seeds=[0]").runs
    pace = {kind(none.recipe): 1.0}
    assert [run.recipe.schedule.warmup_steps for run in of_equal_time([none, one], 2.0, pace)] == [0, 1]
    two = study("warmups=[2]", "schemes=[pre]", "seeds=[0]").runs[0]
    with pytest.raises(ConfigError, match=r"which are 2 steps, 'pre, .*warmup 2' and 'pre, .*warmup 1' are the same"):
        of_equal_time([one, two], 2.0, pace)


def test_an_axis_of_mappings_is_shown_as_text(study):
    rope = [{"rope_type": "default", "rope_theta": 5.0}]
    (run,) = study(axes={"schemes": ["pre"], "model.config.rope_parameters": rope}).runs
    assert run.values["model.config.rope_parameters"] == '{"rope_type": "default", "rope_theta": 5.0}'
    assert run.recipe.model.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5.0}


@pytest.mark.parametrize(
    ("words", "fields", "message"),
    [
        (["scheme=[pre]"], {}, "unknown axis or key 'scheme': did you mean 'schemes'"),
        ([], {"axes": {"schemas": ["pre"]}}, "unknown axis 'schemas': did you mean 'schemes'"),
        ([], {"axes": {"optim.lr": [1e-3]}}, "the axis over optim.lr is called 'lrs'"),
        ([], {"axes": {}}, "the study has no axis"),
        (["lrs=[]"], {}, "the axis 'lrs' is empty"),
        (["lrs=1e-3"], {}, r"the axis 'lrs' must be a list of values, such as \[0.001\]"),
        (["lrs=[fast]"], {}, "a learning rate is a number, not 'fast'"),
        (["seeds=[0,0]"], {}, r"a run twice: \(pre, seed 0\) and \(pre, seed 0\)"),
        (
            ["schemes=[siamese,siamese:x=post]"],
            {},
            r"\(siamese, seed 0\) and \(siamese:x=post, seed 0\) come to the same",
        ),
        (["schemes=[siames]"], {}, "unknown scheme 'siames': did you mean 'siamese'"),
        (["schemes=[siamese:y=post]"], {}, "has no option 'y'"),
        (["seeds=[1.5]"], {}, "a seed is a whole number"),
        (["warmups=[5 of 3]"], {}, "with N at most M, not '5 of 3'"),
        (["warmups=[1 of 10]"], {"axes": {"train.steps": [5, 10]}}, "a warm-up 'N of M' is a share of one length"),
        (["depths=[0]"], {}, "a depth is a number of layers"),
        (["depths=[2x7]"], {}, "a width of 7 does not divide over the 2 heads"),
        (["lrs=[1e-3]", "optim.lr=2e-3"], {}, "the axis 'lrs' varies optim.lr, and 'set' or the command line gives"),
        (["model.options.x=post"], {}, "the axis 'schemes' varies model.options"),
        (
            [],
            {"axes": {"depths": [2], "model.config.hidden_size": [8]}},
            "varies model.config.hidden_size, and the axis",
        ),
        (["optim.lrr=1"], {}, "unknown key 'optim.lrr'"),
        (["baseline=post"], {}, "the baseline 'post' is none of the grid's schemes"),
        (["best_over=lrs"], {}, "best_over names an axis of the grid"),
        (["best_over=seeds"], {}, "best_over names an axis of the grid"),
        (["steps=0"], {}, "steps must be at least 1"),
        (["steps=5", "train.steps=6"], {}, "steps and train.steps both say how long a run is"),
        (["steps=5", "seconds=6"], {}, "steps and seconds both say how long a run is"),
        (["seconds=-1"], {}, "seconds must be above 0"),
        (["seeds"], {}, "'seeds' is no override"),
        (["seeds=[0]", "seeds=[1]"], {}, "seeds is given twice"),
        (["recipe=nothing"], {}, "unknown recipe 'nothing'"),
        ([], {"axis": {}}, "a study has no key 'axis'; did you mean 'axes'"),
        ([], {"axes": [1]}, "axes of a study must be a mapping"),
        ([], {"steps": True}, "steps of a study must be a whole number, not True"),
        ([], {"recipe": None}, "the study lacks 'recipe'"),
        ([], {"name": "a/b"}, "a study cannot be called 'a/b'"),
        ([], {"paper": [{"caption": "c", "columns": ["a", "b"], "rows": [[1]]}]}, "has 1 of 2 columns"),
        ([], {"paper": [{"caption": "c", "cols": []}]}, "has no key 'cols'"),
        (
            [],
            {"paper": [{"caption": "c", "columns": ["a"], "rows": [[1]], "match": ["lrs"]}]},
            "matches the axis",
        ),
        ([], {"paper": [{"caption": "c"}]}, "needs a caption, columns and rows"),
        ([], {"paper": [{"caption": "c", "columns": ["a"], "rows": [[1]], "match": "lrs"}]}, "matches the axis 'lrs'"),
    ],
)
def test_what_is_refused(study, words, fields, message):
    with pytest.raises(ConfigError, match=message):
        _ = study(*words, **fields).runs


def test_a_study_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown study 'ablatoin'; did you mean 'ablation'\?"):
        load_study("ablatoin")
    with pytest.raises(ConfigError, match=r"there is no study file 'no.yaml'"):
        load_study("no.yaml")
    (tmp_path / "text.yaml").write_text("just text")
    with pytest.raises(ConfigError, match="holds no study"):
        load_study(str(tmp_path / "text.yaml"))


def test_a_recipe_that_is_a_path_is_found_from_anywhere(study, tmp_path, monkeypatch):
    made = study()
    monkeypatch.chdir(tmp_path.parent)
    assert made.base.model.config["hidden_size"] == TREE["model"]["config"]["hidden_size"]
    (tmp_path / "folder").mkdir()
    copied = tmp_path / "folder" / "study.yaml"
    copied.write_text(yaml.safe_dump(to_mapping(made)))
    assert [run.key for run in load_study(str(copied)).runs] == [run.key for run in made.runs]
