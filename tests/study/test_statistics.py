"""Means, intervals and verdicts, by hand."""

import math

import pytest

from siamesenorm.study.statistics import estimate, paired
from siamesenorm.study.verdict import lost, over_steps, verdict

# Quantiles of Student's distribution at 97.5%, from a printed table.
T = {1: 12.706, 2: 4.303, 4: 2.776}


@pytest.mark.parametrize("values", [[1.0, 2.0], [2.0, 3.0, 7.0], [1.0, 1.5, 2.5, 4.0, 6.0]])
def test_an_interval_is_students(values):
    count = len(values)
    mean = sum(values) / count
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    found = estimate(values)
    assert found.mean == pytest.approx(mean)
    assert found.half == pytest.approx(T[count - 1] * spread / math.sqrt(count), rel=3e-4)
    assert (found.low, found.high) == (pytest.approx(mean - found.half), pytest.approx(mean + found.half))


def test_a_single_seed_has_no_interval_and_none_has_nothing():
    assert estimate([]) is None
    found = estimate([2.0])
    assert (found.mean, found.half, found.low, found.high) == (2.0, None, None, None)
    assert not found.is_apart_from_zero
    assert str(found) == "2.0000"


def test_pairs_are_made_by_seed():
    # The seeds differ by 10, and within each the first is lower by 1, 2 and 3: the spread of seeds plays no part.
    one, other = {0: 1.0, 1: 11.0, 2: 21.0, 3: 5.0}, {2: 24.0, 1: 13.0, 0: 2.0, 9: 0.0}
    found = paired(one, other)
    assert (found.mean, found.count) == (pytest.approx(-2.0), 3)
    assert found.half == pytest.approx(T[2] * 1.0 / math.sqrt(3), rel=1e-4)
    assert not found.is_apart_from_zero
    assert paired({0: 1.0, 1: 2.0}, {0: 2.0, 1: 3.1}).is_apart_from_zero
    assert paired({0: 1.0}, {1: 1.0}) is None


def curve(*levels, width=10):
    """Steps at each level in turn, without scatter but for a trace of it."""
    return [level + 1e-6 * (index % 2) for level in levels for index in range(width)]


def test_what_is_lost_is_a_share_of_what_was_learnt():
    # Of the 4 that were learnt, 1 is lost again: the means are over a tenth of 100 steps.
    falling = curve(5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0)
    assert lost(falling) == pytest.approx(0.25, abs=1e-5)
    assert verdict({}, lost(falling)) == "lost 25% of what it had learnt"
    assert lost(curve(5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)) == 0.0
    assert lost(curve(5.0, 5.5, 6.0, 6.5, 7.0, 7.0, 7.0, 7.0, 7.0, 9.0)) == 1.0
    # A spike in between is none of this.
    assert lost(curve(5.0, 4.0, 3.0, 2.0, 1.0, 9.0, 1.0, 1.0, 1.0, 1.0)) == 0.0
    assert lost([1.0] * 19) is None


def test_scatter_is_no_loss():
    # 0.5 up and down at each step, so the standard error of a mean of 2 is 0.5: a rise of 2 is within six of them.
    noisy = [3.0 + 0.5 * (-1) ** index + (2.0 if index >= 18 else 0.0) for index in range(20)]
    assert lost(noisy) == 0.0
    assert lost([3.0 + 0.01 * (-1) ** index + (2.0 if index >= 16 else 0.0) for index in range(20)]) == 1.0


def test_a_run_that_stopped_being_finite_diverged():
    assert verdict({"diverged": True, "diverged_at_step": 7}, 0.0) == "not finite at step 7"
    assert verdict({"diverged": False}, 0.1) is None
    assert verdict({}, None) is None


def test_what_the_steps_say():
    lines = [{"loss": 3.0 + 0.001 * (step % 3), "grad_norm": 1.0 + 0.01 * (step % 2)} for step in range(100)]
    lines[80]["grad_norm"] = 100.0
    lines[90]["loss"] = None
    found = over_steps(lines)
    # Judged are those behind the first 50, of which each has one that stands out.
    assert found == {
        "loss_lost": 0.0,
        "loss_spikes": 1 / 50,
        "grad_norm_spikes": 1 / 50,
        "grad_norm_median": 1.01,
        "grad_norm_max": 100.0,
    }
    assert set(over_steps([]).values()) == {None}
