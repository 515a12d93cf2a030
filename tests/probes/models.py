"""Models to probe: stacks whose numbers are known, and a tiny one of every modality."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from siamesenorm.probes import Batch, categorical, unit_gaussian
from siamesenorm.residual import Stack
from tests.hosts import test_dit, test_vision
from tests.hosts.tiny import VOCAB, rewired, tokens
from tests.residual.test_against_oracle import embedding


class Constant(nn.Module):
    """A branch that gives the same vector (d,) for whatever it reads."""

    branch_norms = ("q", "k", "v")

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.out = nn.Parameter(torch.tensor(numbers, dtype=torch.float64))

    def forward(self, u):
        return self.out.expand_as(u)


def constant_stack(outputs, scheme="pre", **options):
    """A stack of such branches, two a block, in float64."""
    return Stack([Constant(*each) for each in outputs], scheme, len(outputs[0]), **options).double()


def of_stack(stack, h, loss=lambda out: out.square().sum()):
    """The embedding ``h`` (batch, seq, d) as a batch of a stack, whose predictions are its outputs."""
    return unit_gaussian(lambda: stack(h), loss, len(h))


def of_text(model, batch=2, seq=13):
    ids = tokens(batch, seq)
    return categorical(lambda: model(input_ids=ids, use_cache=False).logits[:, :-1], ids[:, 1:])


def vit_and_batch(scheme="post-pre"):
    model = test_vision.rewired("vit", scheme)
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    return model, categorical(lambda: model(pixel_values=pixels).logits, torch.tensor([0, 4, 2]))


def dit_and_batch(scheme="post-pre"):
    model = test_dit.new(*test_dit.FORMS[scheme])
    x, t, labels = test_dit.inputs(dtype=torch.float32)
    target = torch.zeros(3, 2, 6, 6)

    def predict():
        return model(hidden_states=x, timestep=t, class_labels=labels).sample.chunk(2, dim=1)[0]

    return model, unit_gaussian(predict, lambda out: F.mse_loss(out, target, reduction="none").mean((1, 2, 3)).sum(), 3)


def text_and_batch(family="llama", scheme="post-pre", **changes):
    model = rewired(family, scheme, **changes)
    return model, of_text(model)


def every_modality() -> dict[str, tuple[nn.Module, Batch]]:
    """A tiny model of each kind, with a batch of it."""
    return {
        "text": text_and_batch(scheme="hybrid-pre"),
        "mixture": text_and_batch("olmoe"),
        "parallel": text_and_batch("gpt_neox"),
        "vit": vit_and_batch(),
        "dit": dit_and_batch(),
    }


__all__ = ["VOCAB", "Constant", "constant_stack", "embedding", "every_modality", "of_stack", "of_text"]
