"""How far a study is, and how long it will take."""

import io

import pytest
from rich.console import Console

from siamesenorm.study import display
from siamesenorm.study.display import Bar, Standing
from siamesenorm.study.grid import load_study
from siamesenorm.study.worker import Ended, Moved


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def runs():
    return load_study("lr", ["schemes=[pre,siamese:x=hybrid]", "lrs=[1e-3]", "seeds=[0,1]", "steps=100"]).runs


def test_the_time_left_is_that_of_the_steps_left_at_the_pace_of_their_kind(runs, clock):
    standing = Standing(runs, [], workers=2)
    assert (standing.share, standing.seconds_left) == (0.0, None)
    pre, siamese, later, _ = (run.key for run in runs)
    standing.begin(pre), standing.begin(siamese)
    standing.move(pre, Moved(1, 0.1, 5.0)), standing.move(siamese, Moved(1, 0.1, 5.0))
    assert standing.seconds_left is None
    # 20 steps in 4 seconds, and 10 in as many.
    clock[0] += 4
    standing.move(pre, Moved(21, 2.0, 4.0)), standing.move(siamese, Moved(11, 2.0, 4.0))
    assert standing.share == pytest.approx(32 / 400)
    assert standing.seconds_left == pytest.approx((79 * 0.2 + 89 * 0.4 + 100 * 0.2 + 100 * 0.4) / 2)
    standing.end(pre, "failed"), standing.end(siamese, "finished")
    assert standing.share == 0.5
    assert standing.seconds_left == pytest.approx(40.0)
    assert standing.under_way == {}
    # The last run cannot be shared between workers.
    standing.end(later, "finished")
    assert standing.seconds_left == pytest.approx(40.0)


def test_runs_that_had_ended_before_are_no_part_of_the_work(runs):
    standing = Standing(runs, ["finished", "diverged"], workers=1)
    for run in runs[:2]:
        standing.skip(run.key)
    standing.begin(runs[2].key)
    standing.move(runs[2].key, Moved(50, 1.0, 5.0))
    assert standing.share == pytest.approx(50 / 200)
    assert sum(standing.counts.values()) == 2


def test_the_bar_shows_the_grid_and_what_is_under_way(runs, clock, monkeypatch):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=160)
    monkeypatch.setattr("rich.console.Console", lambda **arguments: console)
    bar, standing = Bar(), Standing(runs, [], workers=1)
    standing.begin(runs[0].key)
    standing.move(runs[0].key, Moved(1, 0.1, 5.0))
    clock[0] += 10
    standing.move(runs[0].key, Moved(51, 5.0, 3.5))
    bar.show(standing)
    # It would draw itself a tenth of a second later.
    bar._progress.refresh()
    standing.end(runs[0].key, "finished")
    bar.ended(runs[0], Ended("finished", loss=3.25), standing)
    bar.warn("beware")
    bar.end()
    shown = text.getvalue()
    assert "0/4 runs · pre, lr 0.001, seed 0 51/100, loss 3.500 · 1:10 left" in shown
    assert "1/4  pre, lr 0.001, seed 0: finished  validation loss 3.2500" in shown
    assert "warning: beware" in shown
