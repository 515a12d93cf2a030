"""Results of probes as ``siamesenorm probe`` makes them, of stacks that take no training."""

from __future__ import annotations

import torch

from siamesenorm.probes import categorical, depth_tables, site_table, spikes
from siamesenorm.residual import Stack
from tests.residual.test_against_oracle import Branch, D

STEPS = 120


def result(label: str, scheme: str, blocks: int = 4, broken: int | None = None, **options):
    """Of an untrained stack on random numbers, with the trace of a run that has a spike.

    The branches of block ``broken`` give infinity.
    """
    stack = Stack([Branch(index) for index in range(2 * blocks)], scheme, D, **options).double()
    branches = [module for module in stack.modules() if isinstance(module, Branch)]
    for branch in branches if broken is not None else ():
        if branch in branches[2 * broken : 2 * broken + 2]:
            branch.register_forward_hook(lambda module, inputs, out: out + float("inf"))
    h = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = categorical(lambda: stack(h), torch.arange(18).view(2, 9) % D)
    depth = depth_tables(stack, [batch])
    loss = [3.0 + 0.01 * (step % 2) for step in range(STEPS)]
    loss[100] = 9.0
    trace = {"step": list(range(1, STEPS + 1)), "loss": loss, "grad_norm": [1.0 + step % 3 for step in range(STEPS)]}
    stability = {"diverged": None}
    for name in ("loss", "grad_norm"):
        found, judged = spikes(trace[name])
        stability[name] = {"score": len(found) / judged, "judged": judged, "spikes": [place + 1 for place in found]}
    return {
        "label": label,
        "path": label,
        "scheme": scheme,
        "blocks_of_model": blocks,
        "parameters": sum(parameter.numel() for parameter in stack.parameters()),
        "loss": depth.loss,
        "loss_label": "loss (nats per token)",
        "divergence_label": "KL divergence (nats)",
        "counted": 18,
        "counts": "tokens",
        "source": "random numbers",
        "sha256": "0",
        "sites": site_table(stack, [batch]),
        "depth": depth.depths,
        "blocks": depth.blocks,
        "skips": depth.skips,
        "angles": depth.angles,
        "overflow": {"first": None},
        "stability": stability,
        "trace": trace,
    }
