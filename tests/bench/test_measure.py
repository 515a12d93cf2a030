"""The benchmark: what it measures, on models whose cost is known."""

from __future__ import annotations

import json

import pytest
import torch

from siamesenorm.bench import Case, bench, cases, measure, of_shape
from siamesenorm.bench.measure import Spread, _Allocations
from siamesenorm.residual import ConfigError
from siamesenorm.training.recipe_files import load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recipe():
    return load("lm-tiny", of_shape("2x64", 32))


def test_a_shape_is_a_llama(recipe):
    assert recipe.model.config["num_hidden_layers"] == 2
    assert recipe.model.config["hidden_size"] == 64
    assert recipe.data.sequence_length == 32
    assert of_shape("lm-tiny", 32) is None
    with pytest.raises(ConfigError, match="multiple of 64"):
        of_shape("2x65", 32)
    with pytest.raises(ConfigError, match="at least one layer"):
        of_shape("0x64", 32)


def test_cases_have_pre_norm_in_every_mode_and_the_host_where_it_differs():
    made = cases(["host", "siamese", "siamese:x=post"], ["plain", "fused"])
    assert made == [
        Case("pre", "plain"),
        Case("host", "plain"),
        Case("siamese", "plain"),
        Case("pre", "fused"),
        Case("siamese", "fused"),
    ]
    with pytest.raises(ConfigError, match="did you mean 'fused'"):
        cases(["siamese"], ["fusd"])
    with pytest.raises(ConfigError, match="did you mean 'siamese'"):
        cases(["siamse"], ["fused"])


def test_memory_is_counted_to_the_byte():
    ledger = _Allocations()
    with ledger:
        kept = torch.empty(1 << 16)
        torch.empty(1 << 18)
    assert ledger.now == kept.nbytes
    assert ledger.peak == kept.nbytes + 4 * (1 << 18)


def test_results_agree_with_each_other(recipe):
    seen = []
    plain, host, siamese, fused, siamese_fused = measure(
        recipe, cases(["host", "siamese"], ["plain", "fused"]), rounds=3, device=CPU, tell=seen.append
    )
    assert sum(seen) == 5 * (3 + 4)
    assert plain.time_to_baseline == Spread(1.0, 1.0, 1.0)
    assert plain.time_to_plain == Spread(1.0, 1.0, 1.0)
    # transformers' Pre-Norm keeps what ours keeps.
    assert host.kept == pytest.approx(plain.kept, rel=0.02)
    assert host.time_to_plain is not None
    assert siamese.kept_to_baseline == siamese.kept / plain.kept > 1.1
    assert fused.kept < plain.kept
    assert siamese_fused.kept < siamese.kept
    assert all(each.peak > each.kept > 0 for each in (plain, host, siamese, fused))
    assert plain.tokens_per_second == pytest.approx(32 / plain.seconds.median)
    assert all(each.seconds.low <= each.seconds.median <= each.seconds.high for each in (plain, siamese))


@pytest.mark.parametrize("name", ["vit-tiny", "dit-tiny", "moe-tiny"])
def test_every_modality_runs(name):
    small = ["model.config.num_hidden_layers=2"] if name != "dit-tiny" else ["model.config.num_layers=2"]
    tokens = ["data.sequence_length=16"] if name == "moe-tiny" else []
    recipe = load(name, [*small, *tokens, "train.batch_size=2"])
    facts = bench(recipe, cases(["host", "siamese"], ["fused", "plain"]), rounds=1, device=CPU)
    json.dumps(facts, allow_nan=False)
    rows = {(row["scheme"], row["mode"]): row for row in facts["cases"]}
    assert rows["siamese", "fused"]["kept"] < rows["siamese", "plain"]["kept"]
    assert rows["siamese", "fused"]["streams"]["total"] < rows["siamese", "plain"]["streams"]["total"]
    assert rows["siamese", "fused"]["time_floor_to_baseline"] > 1
    assert "streams" not in rows["host", "plain"]
    assert facts["sublayers"] == 4
