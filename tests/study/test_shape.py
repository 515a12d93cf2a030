"""Widths that give other depths the same number of parameters."""

import pytest

from siamesenorm.residual import ConfigError
from siamesenorm.study.shape import Shape, solve
from siamesenorm.study.timing import trial
from siamesenorm.training.build import check, parameter_counts
from siamesenorm.training.recipe_files import load


def counted(recipe, changes):
    made = load(recipe, [f"{key}={value}" for key, value in changes.items()])
    return parameter_counts(check(made, needs_data=False))[0], made


@pytest.mark.parametrize(("recipe", "layers"), [("lm-tiny", 3), ("lm-tiny", 17), ("vit-tiny", 17), ("dit-tiny", 3)])
def test_the_parameters_are_those_of_the_recipe(recipe, layers):
    base = load(recipe)
    target = parameter_counts(check(base))[0]
    count, made = counted(recipe, solve(Shape(layers), base))
    # One more or less in the width of the MLP is the smallest step that there is.
    key = next(key for key in solve(Shape(layers), base) if "intermediate" in key or "ratio" in key)
    shape = Shape.of(made)
    more = {**solve(Shape(layers), base), key: shape.mlp + 1 / shape.width if "ratio" in key else int(shape.mlp) + 1}
    assert abs(count - target) <= (counted(recipe, more)[0] - count) / 2
    assert Shape.of(made).layers == layers
    own, other = Shape.of(base), Shape.of(made)
    if recipe != "dit-tiny":
        assert other.mlp / other.width == pytest.approx(own.mlp / own.width, rel=0.35)


@pytest.mark.parametrize("layers", [2, 4, 12])
def test_experts_have_widths_that_their_kernels_take(layers):
    base = load("moe-tiny")
    target = parameter_counts(check(base, needs_data=False))[0]
    changes = solve(Shape(layers), base)
    assert changes["model.config.hidden_size"] % 8 == changes["model.config.intermediate_size"] % 8 == 0
    for precision in ("float32", "bfloat16"):
        count, made = counted("moe-tiny", {**changes, "train.precision": precision})
        assert count == pytest.approx(target, rel=2e-3)
        assert trial(made, check(made, needs_data=False)) > 0
    own, other = Shape.of(base), Shape.of(made)
    assert 1 / 1.6 < (other.mlp / other.width) / (own.mlp / own.width) < 1.6


def test_the_recipes_own_depth_gives_the_recipe():
    base = load("lm-tiny")
    assert solve(Shape(12), base) == {
        "model.config.num_hidden_layers": 12,
        "model.config.hidden_size": 128,
        "model.config.intermediate_size": 352,
    }


def test_a_width_that_is_given_stays():
    base = load("lm-tiny")
    changes = solve(Shape.read("6x160"), base)
    assert (changes["model.config.num_hidden_layers"], changes["model.config.hidden_size"]) == (6, 160)
    # By hand: without biases, a layer has 4·160² in attention, 3·160·m in the MLP and two norms; around them are an
    # embedding, a head and a last norm. 258 tokens.
    rest = 6 * (4 * 160**2 + 2 * 160) + 2 * 258 * 160 + 160
    wanted = parameter_counts(check(base))[0] - 12 * 2 * 2 * 128 + 0
    assert changes["model.config.intermediate_size"] == pytest.approx((wanted - rest) / (6 * 3 * 160), abs=3)
    whole = solve(Shape.read("6x160x200"), base)
    assert whole["model.config.intermediate_size"] == 200


def test_a_model_that_is_too_large_without_an_mlp_is_refused():
    with pytest.raises(ConfigError, match=r"have more than the .* parameters of lm-tiny, however narrow"):
        solve(Shape.read("12x512"), load("lm-tiny"))


@pytest.mark.parametrize(
    ("written", "read"),
    [(12, Shape(12)), ("12", Shape(12)), ("12x128", Shape(12, 128)), ("12x128x352", Shape(12, 128, 352.0))],
)
def test_how_shapes_are_written(written, read):
    assert Shape.read(written) == read


@pytest.mark.parametrize("written", [0, -1, True, 1.5, "12x", "x128", "0x128", "12x0", None, "12 x 128"])
def test_what_is_no_shape(written):
    with pytest.raises(ConfigError, match="a depth is a number of layers"):
        Shape.read(written)
