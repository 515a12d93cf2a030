"""Spikes, by hand; and where numbers stop being finite."""

from __future__ import annotations

import math

import pytest
import torch

from siamesenorm.probes import overflow, spike_score, spikes
from tests.hosts.tiny import rewired
from tests.probes.models import of_text

CALM = [1.0, 3.0] * 30  # mean 2, standard deviation 1


def test_a_spike_is_seven_deviations_off_up_or_down():
    assert spikes([*CALM, 9.0]) == ([60], 11)
    assert spikes([*CALM, -5.0]) == ([60], 11)
    assert spikes([*CALM, 8.9]) == ([], 11)
    assert spike_score([*CALM, 9.0]) == 1 / 11


def test_a_value_does_not_count_towards_its_own_mean():
    assert spikes([*CALM, 1e9]) == ([60], 11)


def test_a_spike_is_history_for_what_follows():
    assert spikes([*CALM, 9.0, 9.0]) == ([60], 12)


def test_only_the_window_counts():
    early = [100.0, -100.0] * 30
    assert spikes([*early, *CALM, 9.0], window=60)[0] == [120]
    assert spikes([*early, *CALM, 9.0])[0] == []


def test_what_is_too_early_is_not_judged():
    assert spikes([1.0] * 49 + [5.0]) == ([], 0)
    assert spike_score([1.0, 50.0]) is None
    assert spike_score([]) is None
    assert spikes([1.0, 3.0, 9.0], least=2) == ([2], 1)


def test_a_flat_series_has_a_spike_where_it_changes():
    assert spikes([2.0] * 60) == ([], 10)
    assert spikes([2.0] * 60 + [2.5]) == ([60], 11)


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_not_finite_is_a_spike_and_no_history(value):
    assert spikes([value, *CALM, 9.0]) == ([0, 61], 12)


@pytest.mark.parametrize("scheme", ["post-pre", "pre", "resi_dual"])
@pytest.mark.parametrize("sublayer", [0, 3])
def test_the_first_sublayer_that_overflows(scheme, sublayer):
    model = rewired("llama", scheme)
    batch = of_text(model)
    with torch.no_grad():
        assert overflow.first_in_streams(model, batch.predict) == overflow.NOWHERE
        block = model.model.layers[sublayer // 2]
        (block.mlp.down_proj if sublayer % 2 else block.self_attn.o_proj).weight[0, 0] = float("inf")
        assert overflow.first_in_streams(model, batch.predict) == sublayer
    assert overflow.name_of(model, 3) == "sublayer 3 (block 1, mlp)"
