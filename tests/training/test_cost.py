"""What a model costs, against the paper and against counts made by hand."""

import pytest

from siamesenorm.training.build import check, parameter_counts
from siamesenorm.training.cost import active_parameters, expert_counts, flops_per_token
from siamesenorm.training.recipe_files import load

MIXTURES = {"olmoe": "intermediate_size", "mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}
TOTAL, WIDTH, INNER, BLOCKS, VOCABULARY, LENGTH = 8, 64, 96, 2, 258, 32


def built(name, *overrides):
    return check(load(name, overrides), needs_data=False)


@pytest.mark.parametrize("x", ["post", "hybrid"])
def test_the_cost_over_pre_norm_is_what_the_paper_says(x):
    model, baseline = built("lm-1.3b", f"model.options.x={x}"), built("lm-1.3b", "model.scheme=pre")
    length = load("lm-1.3b").data.sequence_length
    more = parameter_counts(model)[0] / parameter_counts(baseline)[0] - 1
    slower = flops_per_token(model, length).training / flops_per_token(baseline, length).training - 1
    assert 0 < more < 1e-3
    assert 0 < slower < 1e-3


def mixture(host, active):
    return built(
        "moe-tiny",
        f"model.host={host}",
        "model.scheme=pre",
        f"model.config.hidden_size={WIDTH}",
        f"model.config.{MIXTURES[host]}={INNER}",
        f"model.config.num_hidden_layers={BLOCKS}",
        f"model.config.num_local_experts={TOTAL}" if host == "mixtral" else f"model.config.num_experts={TOTAL}",
        f"model.config.num_experts_per_tok={active}",
        "model.config.head_dim=16" if host != "olmoe" else "seed=0",
    )


@pytest.mark.parametrize("host", MIXTURES)
def test_of_a_mixture_only_the_experts_in_use_count(host):
    expert = 3 * WIDTH * INNER
    for active in (1, 3):
        model = mixture(host, active)
        assert expert_counts(model) == (active, TOTAL)
        total = parameter_counts(model)[0]
        assert active_parameters(model) == total - BLOCKS * (TOTAL - active) * expert
        attention, scores = 4 * WIDTH * WIDTH, 2 * LENGTH * WIDTH
        router, head = TOTAL * WIDTH, VOCABULARY * WIDTH
        products = 2 * (BLOCKS * (attention + scores + router + active * expert) + head)
        # Half a percent: the RoPE angles are a matrix product too.
        assert flops_per_token(model, LENGTH).products == pytest.approx(products, rel=5e-3)


def test_a_dense_model_is_active_as_a_whole():
    model = built("lm-tiny")
    assert expert_counts(model) is None
    assert active_parameters(model) == parameter_counts(model)[0]


def test_counting_leaves_the_model_as_it_was():
    model = mixture("olmoe", 2)
    before = model.config._experts_implementation
    flops_per_token(model, LENGTH)
    assert model.config._experts_implementation == before
