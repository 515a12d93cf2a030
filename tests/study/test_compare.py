"""What follows from the rows of a study, on rows that are made up."""

import math

import pytest

from siamesenorm.study.compare import compare
from siamesenorm.study.grid import Study

T2 = 4.302652729696142
AXES = {"schemes": ("pre", "siamese"), "lrs": (1e-3, 2e-3), "seeds": (0, 1, 2)}


def outcome(losses, axes=AXES, **fields):
    """A study's outcome, given the losses of each place but the seeds'; a word in place of a loss is a status."""
    study = Study(name="s", recipe="lm-study", axes=axes, **fields)
    rows = []
    for run in study.runs:
        place = tuple(value for column, value in run.values.items() if column != "seed")
        value = losses[place if len(place) > 1 else place[0]][run.values.get("seed", 0)]
        is_status = isinstance(value, str)
        rows.append(
            {
                "run": run.key,
                "seed": run.recipe.seed,
                "status": value if is_status else "finished",
                "val_loss": None if is_status else value,
                "blind_loss": 3.3,
            }
        )
    return compare(study, study.runs, rows)


def test_each_scheme_stands_at_its_own_best_value():
    found = outcome(
        {
            ("pre", 1e-3): [3.0, 3.1, 3.2],
            ("pre", 2e-3): [2.0, 2.1, "diverged"],
            ("siamese", 1e-3): [2.9, 3.2, 3.0],
            ("siamese", 2e-3): [2.5, 2.6, 2.8],
        },
        best_over="lrs",
    )
    # Lower at 2e-3, but not with every seed.
    assert [(each.values["scheme"], each.values["lr"]) for each in found.best] == [("pre", 1e-3), ("siamese", 2e-3)]
    reference, best = found.best
    assert found.baseline_of(reference) is None
    assert found.baseline_of(best) is reference
    gap = found.difference(best)
    # Seed by seed -0.5, -0.5 and -0.4.
    assert gap.mean == pytest.approx(-1.4 / 3)
    assert gap.half == pytest.approx(T2 * math.sqrt(0.02 / 3 / 2) / math.sqrt(3))
    assert found.winner is best
    assert found.advice == (
        f"Take siamese, lr 0.002: its loss, {best.loss}, is below that of the baseline at its best, pre, lr 0.001 "
        f"({reference.loss}), by 0.4667 ± {gap.half:.4f} over 3 seeds."
    )
    assert [each.fate for each in found.conditions] == ["", "1 diverged of 3", "", ""]


def test_without_an_axis_to_take_the_best_over_schemes_meet_in_each_setting():
    found = outcome(
        {
            ("pre", 1e-3): [3.0, 3.1, 3.2],
            ("pre", 2e-3): [2.0, 2.1, 2.2],
            ("siamese", 1e-3): [2.5, 2.6, 2.75],
            ("siamese", 2e-3): [2.1, 2.0, 2.3],
        }
    )
    assert found.best == found.conditions
    assert [round(found.difference(each).mean, 4) for each in found.best if found.baseline_of(each)] == [
        -0.4833,
        0.0333,
    ]
    assert found.settings_won == {"siamese": (1, 1, 2)}
    assert found.winner.title == "pre, lr 0.002"
    assert found.advice.startswith("pre, lr 0.002 has the lowest loss, 2.1000 ±")
    assert "to the next best, siamese, lr 0.002" in found.advice
    assert "is within the noise: keep the baseline, or add seeds" in found.advice


def one_rate(pre, siamese, **fields):
    return outcome({"pre": pre, "siamese": siamese}, {"schemes": ("pre", "siamese"), "seeds": (0, 1, 2)}, **fields)


def test_noise_recommends_the_baseline():
    advice = one_rate([3.0, 2.0, 2.5], [2.1, 2.8, 2.0]).advice
    assert "siamese has the lowest loss" in advice
    assert "the baseline at its best, pre" in advice
    assert "is within the noise: keep the baseline, or add seeds" in advice


def test_a_baseline_that_is_best_beyond_the_noise_is_taken():
    assert one_rate([2.0, 2.1, 2.2], [3.0, 3.1, 3.2]).advice.startswith("Take pre: its loss")


def test_another_baseline():
    found = one_rate([3.0, 3.1, 3.2], [2.0, 2.1, 2.2], baseline="siamese")
    assert found.difference(found.best[0]).mean == pytest.approx(1.0)
    assert found.advice.startswith("Take siamese: its loss")


def test_where_the_baseline_always_diverges_there_is_nothing_to_beat():
    advice = one_rate(["diverged"] * 3, [2.0, 2.1, 2.2]).advice
    assert advice == (
        "Take siamese: it has the lowest loss, 2.1000 ± 0.2484. No other condition has all its runs. The baseline, "
        "pre, has no condition in which all its runs finished."
    )


def test_without_a_baseline_the_next_best_has_to_be_beaten():
    def advice(*losses):
        found = {"pre": ["diverged"] * 3, "siamese": [2.0, 2.1, 2.2], "post": list(losses)}
        return outcome(found, {"schemes": tuple(found), "seeds": (0, 1, 2)}).advice

    gone = "The baseline, pre, has no condition in which all its runs finished."
    assert advice(3.0, 3.1, 3.2).startswith("Take siamese: its loss, 2.1000 ± 0.2484, is below that of the next best, ")
    assert advice(3.0, 3.1, 3.2).endswith(gone)
    noise = advice(2.0, 2.2, 2.2)
    assert "within the noise: take whichever is cheaper, or add seeds." in noise
    assert noise.endswith(gone)


def test_what_is_missing_is_said():
    advice = one_rate([3.0, "pending", 3.2], [2.0, 2.1, 2.2]).advice
    assert advice.endswith("Runs that are missing: 1, so this may change.")
    assert one_rate([3.0, "pending", 3.2], [2.0, "pending", 2.2]).advice == (
        "Nothing can be recommended yet: no condition has all its seeds."
    )
    assert one_rate([3.0, "diverged", 3.2], [2.0, "failed", 2.2]).advice == (
        "Nothing can be recommended: in every condition a run diverged or failed."
    )


def test_one_seed_says_nothing_of_chance():
    found = outcome({"pre": [3.0], "siamese": [2.0]}, {"schemes": ("pre", "siamese")})
    assert "With one seed there is no telling whether that is more than chance" in found.advice


def test_a_grid_without_schemes_compares_its_conditions():
    found = outcome({1e-3: [3.0, 3.1, 3.2], 2e-3: [2.0, 2.1, 2.2]}, {"lrs": (1e-3, 2e-3), "seeds": (0, 1, 2)})
    assert found.study.reference is None
    assert [found.difference(each) for each in found.best] == [None, None]
    assert found.advice.startswith("Take lr 0.002: its loss, 2.1000 ± 0.2484, is below that of the next best, lr 0.001")


def test_what_learnt_next_to_nothing_is_told_by_a_prediction_that_ignores_its_input():
    found = outcome({"pre": [3.26], "siamese": [3.28], "post": [3.4]}, {"schemes": ("pre", "siamese", "post")})
    # One percent below 3.3 is 3.267.
    assert [condition.is_blind for condition in found.conditions] == [False, True, True]
