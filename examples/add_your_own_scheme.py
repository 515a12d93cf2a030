"""A residual scheme of your own: registered, trained for 20 steps, saved and loaded again.

    python examples/add_your_own_scheme.py

The scheme is ReZero (Bachlechner et al., arXiv 2003.04887): Y = Y + a·F(Y), a learnt and 0 at first, without any norm.
"""

import tempfile
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from siamesenorm.hosts import build
from siamesenorm.residual import Scheme, Sublayer, register, single


class ReZeroSublayer(Sublayer):
    def __init__(self, site):
        super().__init__(site)
        self.a = nn.Parameter(torch.zeros(1))

    def reset_parameters(self):
        nn.init.zeros_(self.a)

    def read(self, streams):
        return streams[0], streams

    def write(self, carry, o):
        return (carry[0] + self.a * o,)

    def describe(self):
        return {"reads": "Y", "writes": "Y = Y + a·o", "scale": 1.0}


@register
@dataclass(frozen=True, kw_only=True)
class ReZero(Scheme):
    name = "rezero"

    def open(self, h):
        return (h,)

    def input_norm(self, site):
        return "none"

    def sublayer(self, site, norm):
        return ReZeroSublayer(site)

    def readout(self, norm):
        return single.OneStream("Y")


def main():
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    model = build("llama", {**shape, "num_attention_heads": 4}, "rezero")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 64, (8, 32))
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after 20 steps")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    print("saved and loaded: the same logits")


if __name__ == "__main__":
    main()
