"""What several tests do with a model: padded batches, decoding, a training step, a scheme with gains of its own."""

from __future__ import annotations

import dataclasses

import torch

from siamesenorm.residual import make_scheme
from siamesenorm.residual import scheme as scheme_module
from tests.hosts.tiny import tokens
from tests.parity import relative_error

GAINS = {"q": 2.0, "k": 3.0, "v": 5.0, "o": 7.0, "mlp": 11.0}


def padded(lengths, seq=13, side="left"):
    """Ids and mask of rows of ``lengths`` tokens, padded to ``seq``."""
    ids, mask = tokens(len(lengths), seq), torch.ones(len(lengths), seq, dtype=torch.long)
    for row, length in enumerate(lengths):
        padding = slice(0, seq - length) if side == "left" else slice(length, seq)
        ids[row, padding], mask[row, padding] = 0, 0
    return ids, mask


def positions_of(mask):
    return (mask.cumsum(-1) - 1).clamp_min(0)


def cache_of(out):
    return out.cache if "cache" in out else out.past_key_values


@torch.no_grad()
def by_hand(model, ids, mask, steps):
    """Greedy decoding without a cache."""
    for _ in range(steps):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask)).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
    return ids


def step(model, **kwargs):
    """Loss and every gradient of one forward and backward."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=tokens(), labels=tokens(), **kwargs).loss
    loss.backward()
    return loss.detach(), {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def same(got, wanted, tolerance=1e-6):
    assert relative_error(got[0], wanted[0]) < tolerance
    assert got[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert gradient is not None, name
        assert got[1][name] is not None, name
        assert relative_error(got[1][name], gradient) < tolerance, name


def register_gains():
    @scheme_module.register
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Gains(type(make_scheme("siamese"))):
        name = "gains"

        def init_gain(self, role, site):
            return GAINS[role]
