"""No probe keeps more than one block's activations beyond what the forward pass itself keeps."""

from __future__ import annotations

import pytest
import torch

from siamesenorm import hosts
from siamesenorm.probes import DEPTH_PROBES, depth_tables, site_table
from siamesenorm.residual import watched
from siamesenorm.training.memory import _Ledger
from tests.hosts.tiny import rewired
from tests.probes.models import of_text

BLOCKS = 8


@pytest.fixture(
    scope="module", params=["post-pre", *(pytest.param(each, marks=pytest.mark.slow) for each in ("pre", "resi_dual"))]
)
def subject(request):
    model = rewired("llama", request.param, num_hidden_layers=BLOCKS)
    return model, of_text(model, 4, 64)


def peak(act) -> int:
    """The most bytes alive at a time of those that ``act`` makes."""
    act()
    with _Ledger() as ledger:
        act()
    return ledger.peak


def of_a_block(model, batch) -> int:
    """What one block keeps for its backward pass, its parameters' gradients aside."""
    kept = []

    def watch(steps, streams, run):
        streams = tuple(stream.detach().requires_grad_() for stream in streams)
        with torch.enable_grad(), _Ledger() as ledger:
            out = run(steps, streams)
        kept.append(ledger.now)
        return tuple(stream.detach() for stream in out)

    with watched(watch), torch.no_grad():
        batch.predict()
    return max(kept)


# The two that keep something.
MAIN = ("lens", "skips")
REST = (pytest.param(probe, marks=pytest.mark.slow) for probe in DEPTH_PROBES if probe not in MAIN)


@pytest.mark.parametrize("probe", [*MAIN, *REST])
def test_depth(subject, probe):
    model, batch = subject
    with torch.no_grad():
        normal = peak(batch.predict)
        predictions = batch.predict().nbytes
    found = peak(lambda: depth_tables(model, [batch], only=[probe]))
    # The lens compares with the whole model's own predictions, which it therefore keeps.
    allowed = predictions if probe == "lens" else 0
    # A covariance a depth is no activation.
    allowed += (BLOCKS + 1) * model.config.hidden_size**2 * 8 if probe == "rank" else 0
    assert found <= normal + of_a_block(model, batch) + allowed
    # The measure would notice: eight blocks are more than that.
    assert BLOCKS * of_a_block(model, batch) > normal + of_a_block(model, batch) + allowed


def test_sites_without_gradients(subject):
    model, batch = subject
    with torch.no_grad():
        normal = peak(batch.predict)
    found = peak(lambda: site_table(model, [batch], gradients=False))
    assert found <= normal + of_a_block(model, batch)


def test_sites_with_gradients(subject):
    model, batch = subject

    def step():
        model.zero_grad(set_to_none=True)
        (batch.loss(batch.predict()) / batch.count).backward()

    normal = peak(step)
    model.zero_grad(set_to_none=True)
    found = peak(lambda: site_table(model, [batch]))
    # Less than a step's own: blocks run again, and gradients of parameters are dropped one by one.
    assert found <= normal
    with torch.no_grad():
        forward = peak(batch.predict)
    borders = (BLOCKS + 1) * sum(stream.nbytes for stream in _streams(model, batch))
    assert found <= forward + borders + 2 * of_a_block(model, batch)


def _streams(model, batch):
    from siamesenorm.probes import capture_streams

    with capture_streams(model) as streams, torch.no_grad():
        batch.predict()
    assert len(hosts.blocks(model)) == BLOCKS
    return streams[-1]
